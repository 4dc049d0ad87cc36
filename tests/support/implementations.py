"""How tests compute an operation: by XLA, by its kernel interpreted, or by its kernel on a GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
EVERY = ["xla", *KERNELS]


def each_way(cases: Mapping[str, Sequence], fast: Collection[str] = (), xla: bool = True) -> list:
    """Parameters `(*case, implementation)` of every case; kernels of those in `fast` are fast."""
    assert set(fast) <= set(cases)
    return [
        pytest.param(*case, implementation, id=f"{name}-{implementation}", marks=marks)
        for name, case in cases.items()
        for implementation, marks in (
            *([("xla", ())] if xla else []),
            ("interpret", () if name in fast else pytest.mark.slow),
            ("pallas", pytest.mark.gpu),
        )
    ]
