"""Cases of parametrised tests that run with the slow tests, or before a release only."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def slow(*cases) -> list:
    """Cases with the mark `slow`; a case of several arguments is a tuple."""
    return some_slow(cases)


def some_slow(cases: Iterable, *fast, exhaustive: Collection = ()) -> list:
    """Cases with the mark `slow`, but for those that are also given as fast ones.

    Those that are also given as `exhaustive` have that mark in its place.
    """

    def mark(case) -> list:
        if case in fast:
            return []
        return [pytest.mark.exhaustive if case in exhaustive else pytest.mark.slow]

    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark(case))
        for case in cases
    ]
