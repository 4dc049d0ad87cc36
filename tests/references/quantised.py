"""Keys and values in 8 and 4 bits, and what that may change (4 bits: KIVI, arXiv 2402.02750)."""

from __future__ import annotations

import numpy as np

DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Significant binary digits."""


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values of `dtype`'s nearest numbers, ties to even."""
    if dtype != "bfloat16":
        return np.asarray(x, dtype).astype(np.float64)
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def over(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x / scale, 0 where the scale is."""
    return np.where(scale > 0, x / np.where(scale > 0, scale, 1.0), 0.0)


# --- 8 bits ---------------------------------------------------------------------------------------


def quantise_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., D] -> q [..., D] in -127 .. 127 and a scale [...] for each vector.

    scale = max |x| / 127, rounded to float32        q = x / scale, rounded half to even
    """
    x = np.asarray(x, np.float64)
    scale = rounded(np.max(np.abs(x), axis=-1) / 127, "float32")
    return np.clip(np.rint(over(x, scale[..., None])), -127, 127).astype(np.int8), scale


def dequantise_int8(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x' = q * scale."""
    return q.astype(np.float64) * scale[..., None]


# --- what keys are relative to --------------------------------------------------------------------


def channels(
    keys: np.ndarray, pairs: list[tuple[int, int]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The keys [N, D] of a head's first prompt -> mean [D] and scale [D] of its channels.

    x = (key - mean) / scale is what is encoded.

        scale = s ** (0.75 N / (N + 8)) over the largest of the head
        s = standard deviation, and no less than 1e-4 of the largest

    pairs: channels that are rotated together when they are read.  There is no mean then, and s is
    the root of the mean square, over both channels of a pair.
    """
    keys = np.asarray(keys, np.float64)
    count, width = keys.shape
    mean = np.zeros(width) if pairs is not None or not count else keys.mean(0)
    square = ((keys - mean) ** 2).mean(0) if count else np.zeros(width)
    for a, b in pairs or ():
        square[[a, b]] = (square[a] + square[b]) / 2
    deviation = np.sqrt(square)
    if not deviation.any():
        return mean, np.ones(width)
    scale = np.maximum(deviation, 1e-4 * deviation.max()) ** (0.75 * count / (count + 8))
    return mean, scale / scale.max()


# --- 4 bits ---------------------------------------------------------------------------------------


def group_starts(x: np.ndarray, group: int, axis: str) -> tuple[int, np.ndarray]:
    """The axis of x [..., N, D] that groups run along, and where on it they start.

    axis "token": channels of one token.  "channel": consecutive tokens of one channel.
    """
    along = {"token": -1, "channel": -2}[axis]
    return along, np.arange(0, x.shape[along], group)


def spread(per_group: np.ndarray, size: int, group: int, axis: str) -> np.ndarray:
    """One number for each group -> for each of `size` members along the axis."""
    along = {"token": -1, "channel": -2}[axis]
    return np.take(per_group, np.arange(size) // group, axis=along)


def quantise_4bit(
    x: np.ndarray, group: int = 32, axis: str = "token", dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [..., N, D] -> q [..., N, D] in 0 .. 15, lo and scale of every group.

        lo = min of the group        scale = (max - min) / 15        both rounded to `dtype`
        q = (x - lo) / scale, rounded half to even, clipped;  0 where scale = 0

    lo, scale: [..., N, D / group] for axis "token", [..., N / group, D] for "channel".  A last
    group may be shorter.
    """
    x = np.asarray(x, np.float64)
    along, starts = group_starts(x, group, axis)
    low = np.minimum.reduceat(x, starts, axis=along)
    high = np.maximum.reduceat(x, starts, axis=along)
    lo, scale = rounded(low, dtype), rounded((high - low) / 15, dtype)
    wide_lo, wide_scale = (spread(s, x.shape[along], group, axis) for s in (lo, scale))
    q = np.clip(np.rint(over(x - wide_lo, wide_scale)), 0, 15)
    return q.astype(np.uint8), lo, scale


def fitted_line(x: np.ndarray, most: int, rounds: int = 3) -> tuple[float, float]:
    """The numbers of one group -> lo and scale, fitted for q in 0 .. most.

    At first lo = min, scale = (max - min) / most.  Each round rounds x to q with them, and takes
    the straight line  lo + scale * q  of least squares through the points (q, x).  Where all q are
    equal, scale = 0 and lo = mean.
    """
    lo, scale = x.min(), (x.max() - x.min()) / most
    for _ in range(rounds):
        q = np.clip(np.rint(over(x - lo, np.full(x.shape, scale))), 0, most)
        if np.ptp(q) == 0:
            lo, scale = x.mean(), 0.0
        else:
            design = np.stack([np.ones(x.size), q], axis=1)
            (lo, scale), *_ = np.linalg.lstsq(design, x, rcond=None)
    return float(lo), float(scale)


def dequantise_4bit(
    q: np.ndarray, lo: np.ndarray, scale: np.ndarray, group: int = 32, axis: str = "token"
) -> np.ndarray:
    """x' = lo + q * scale."""
    along = {"token": -1, "channel": -2}[axis]
    wide_lo, wide_scale = (spread(s, q.shape[along], group, axis) for s in (lo, scale))
    return wide_lo + q * wide_scale


def pack(q: np.ndarray) -> np.ndarray:
    """[..., D] of 0 .. 15 -> bytes [..., D / 2]: q[i] + 16 * q[i + D / 2]."""
    if q.shape[-1] % 2:
        raise ValueError(f"an even number of channels; given {q.shape[-1]}")
    half = q.shape[-1] // 2
    return (q[..., :half].astype(int) + 16 * q[..., half:].astype(int)).astype(np.uint8)


def unpack(packed: np.ndarray) -> np.ndarray:
    """[..., D / 2] -> [..., D]."""
    return np.concatenate([packed % 16, packed // 16], axis=-1)


# --- bounds ---------------------------------------------------------------------------------------


def error_bound(scale: np.ndarray) -> np.ndarray:
    """|x - x'| <= scale / 2, for what lies within lo .. lo + 15 scale, or -127 .. 127 scales."""
    return np.asarray(scale, np.float64) / 2


def rounding_excess(lo: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """How far x may lie outside lo .. lo + 15 scale, since both were rounded to `dtype`.

    |x - x'| <= max(scale / 2, this).  For x in `dtype` itself lo is exact, and the excess at most
    15 * 2**-digits * scale < scale / 2.  To the first order; where no exponent underflows.
    """
    return 2.0 ** -DIGITS[dtype] * (np.abs(lo) + 15 * np.asarray(scale, np.float64))
