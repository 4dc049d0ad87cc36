"""Cases of parametrised tests that run with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def slow(*cases) -> list:
    """Cases with the mark `slow`; a case of several arguments is a tuple."""
    return some_slow(cases)


def some_slow(cases: Iterable, *fast) -> list:
    """Cases with the mark `slow`, but for those that are also given as fast ones."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow] * (case not in fast),
        )
        for case in cases
    ]
