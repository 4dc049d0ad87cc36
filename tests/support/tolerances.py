"""The one table of tolerances."""

from __future__ import annotations

import numpy as np

TOLERANCES = {
    "exact": {"rtol": 0.0, "atol": 0.0},
    "float32": {"rtol": 2e-5, "atol": 2e-5},
    # A whole method in float32 against its float64 reference: outputs, and sums of attention.
    "reference": {"rtol": 1e-5, "atol": 1e-5},
    "accumulated": {"rtol": 1e-4, "atol": 1e-4},
    "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
    # What a decode step over tokens of about size 1 may lose to their encoding.
    "8 bits": {"rtol": 0.0, "atol": 0.05},
    "4 bits": {"rtol": 0.0, "atol": 0.35},
    # One float32 rounding or two: what merging equal keys may change.
    "rounding": {"rtol": 1e-6, "atol": 1e-6},
}


def close(actual, expected, kind: str = "float32", what: str = "") -> None:
    """Asserts that two arrays have one shape and agree within the tolerance of `kind`."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    np.testing.assert_allclose(
        actual.astype(np.float64), expected.astype(np.float64), err_msg=what, **TOLERANCES[kind]
    )
