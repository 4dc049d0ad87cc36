"""Values in messages of errors: short, in one line, and of any kind."""

from __future__ import annotations

import numpy as np

from kvjax.messages import brief


def test_numbers_of_numpy_are_shown_as_pythons():
    assert [brief(x) for x in (np.int64(3), np.float32(0.5), np.bool_(True))] == [
        "3",
        "0.5",
        "True",
    ]


def test_values_that_python_does_not_print():
    assert brief(10**5000) == "a int too long to print"
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert brief(nested) == "a list nested too deeply to print"
    while nested:  # taken apart from outside, for which Python needs no recursion
        nested = nested.pop()
