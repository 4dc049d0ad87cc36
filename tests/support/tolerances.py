"""Tolerances that tests share. A bound that follows from one test alone stands in that test."""

from __future__ import annotations

import jax.numpy as jnp
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
    "2 bits": {"rtol": 0.0, "atol": 1.0},
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


def roundings(actual, expected, dtype) -> float:
    """The largest difference, in roundings of the largest number expected to a dtype of 16 bits.

    One rounding changes a number by at most 2^-8 of it in bfloat16, and 2^-11 in float16.
    """
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
    apart, largest = np.abs(actual - expected).max(), np.abs(expected).max()
    return float(apart / (float(jnp.finfo(dtype).eps) / 2 * largest)) if apart else 0.0


def within_roundings(actual, expected, dtype, most: float, what: str = "") -> None:
    """Asserts that two arrays differ by at most so many `roundings`."""
    worst = roundings(actual, expected, dtype) if np.size(expected) else 0.0
    assert worst <= most, f"{what}: {worst:.2f} roundings apart"
