"""Inverse frequencies of the rotary embedding: plain ones, and those of stretched contexts."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.rope import Rope

from .config import RopeConfig


def make_rope(config: RopeConfig, positions: Int[Array, "B T"]) -> Rope:
    """The rotary embedding for one call with tokens at `positions` (−1: padding).

    Only `"dynamic"` and `"longrope"` look at the positions. Their inverse frequencies are `[B, R]`:
    each row's depend on the row's own length, the highest position of this call plus one, so that a
    padded batch equals its rows alone. (`transformers` decides by the longest row of the batch.)
    Nothing is remembered between calls: keys keep the rotation of the call that wrote them, as they
    do in the modules of `transformers`. A row of `"longrope"` that grows beyond the original
    context while it is decoded therefore has keys of both sets; `generate` of `transformers` reads
    such a row again from its beginning.

    Args:
      config: theta, type and the type's parameters.
      positions: token positions `[B, T]`.

    Returns:
      A `kvjax.Rope` with `inv_freq` `[R]`, or `[B, R]` for `"dynamic"` and `"longrope"`.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.models import RopeConfig
      >>> from kvjax.models.rope_scaling import make_rope
      >>> make_rope(RopeConfig(rotary_dim=8), jnp.array([[0, 1, 2]])).inv_freq.shape
      (4,)
    """
    if config.type == "dynamic":
        return Rope(_dynamic(config, positions), interleaved=config.interleaved)
    if config.type == "longrope":
        inv_freq = _longrope(config, positions)
    else:
        inv_freq = _plain(config)
        if config.type == "linear":
            inv_freq = inv_freq / np.float32(config.factor)
        elif config.type == "llama3":
            inv_freq = _llama3(config, inv_freq)
        elif config.type == "yarn":
            inv_freq = _yarn(config)
    return Rope(
        jnp.asarray(inv_freq), interleaved=config.interleaved, factor=attention_factor(config)
    )


def attention_factor(config: RopeConfig) -> float:
    """What rotated channels are multiplied by.

    The configuration's own; else `0.1 · ln(factor) + 1` for YaRN and
    `sqrt(1 + ln(factor) / ln(original_max_positions))` for LongRoPE, which is 1 where the factor is
    1 or less; 1 for all other types.

    Example:
      >>> from kvjax.models import RopeConfig
      >>> from kvjax.models.rope_scaling import attention_factor
      >>> rope = RopeConfig(rotary_dim=8, type="yarn", factor=4.0, original_max_positions=32768)
      >>> round(attention_factor(rope), 4)
      1.1386
    """
    if config.type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return float(config.attention_factor)
    if config.factor <= 1:
        return 1.0
    if config.type == "yarn":
        return yarn_magnitude(config.factor)
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_positions))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's `0.1 · weight · ln(factor) + 1`, which is 1 for factors up to 1.

    Example:
      >>> from kvjax.models.rope_scaling import yarn_magnitude
      >>> yarn_magnitude(1.0)
      1.0
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _exponents(config: RopeConfig) -> Float[np.ndarray, " R"]:
    return np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)


def _powers(config: RopeConfig) -> Float[np.ndarray, " R"]:
    """`theta ** (2i / rotary_dim)`.

    At position 100,000 one unit in the last place of a frequency near 1 is an angle of 0.006, so
    the rounding steps are those of the models' training code: exponent, power and reciprocal are
    each rounded to float32. The power itself is taken in float64, which rounds it correctly.
    """
    power = np.float64(config.theta) ** _exponents(config).astype(np.float64)
    return power.astype(np.float32)


def _plain(config: RopeConfig) -> Float[np.ndarray, " R"]:
    return np.float32(1.0) / _powers(config)


def _llama3(config: RopeConfig, inv_freq: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a ramp between.

    `turns` is how often a wavelength fits into the original context. The share that is kept goes
    linearly from 0 at `low_freq_factor` turns to 1 at `high_freq_factor` turns.
    """
    low, high = np.float32(config.low_freq_factor), np.float32(config.high_freq_factor)
    wavelength = np.float32(2.0 * np.pi) / inv_freq
    turns = np.float32(config.original_max_positions) / wavelength
    kept = np.clip((turns - low) / (high - low), np.float32(0.0), np.float32(1.0))
    return kept * inv_freq + (np.float32(1.0) - kept) * inv_freq / np.float32(config.factor)


def _yarn(config: RopeConfig) -> Float[np.ndarray, " R"]:
    """YaRN: as Llama 3.1, but the ramp is linear over channel pairs.

    It begins at the pair that turns `beta_fast` times within the original context and ends at the
    one that turns `beta_slow` times.
    """
    powers, factor = _powers(config), np.float32(config.factor)
    start, end = (_pair_that_turns(config, beta) for beta in (config.beta_fast, config.beta_slow))
    if config.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, config.rotary_dim - 1)
    if start == end:
        end += 0.001  # a step
    pairs = np.arange(config.rotary_dim // 2, dtype=np.float32)
    ramp = (pairs - np.float32(start)) / np.float32(end - start)
    kept = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    stretched, plain = np.float32(1.0) / (factor * powers), np.float32(1.0) / powers
    return stretched * (np.float32(1.0) - kept) + plain * kept


def _pair_that_turns(config: RopeConfig, times: float) -> float:
    """The channel pair, as a fraction, whose wavelength fits so often into the original context."""
    length = config.original_max_positions / (times * 2 * math.pi)
    return config.rotary_dim * math.log(length) / (2 * math.log(config.theta))


def _longrope(config: RopeConfig, positions: Int[Array, "B T"]) -> Float[Array, "B R"]:
    """Short factors for rows up to the original context, long ones for longer rows."""
    short, long = (
        np.float32(1.0) / (np.asarray(factors, np.float32) * _powers(config))
        for factors in (config.short_factors, config.long_factors)
    )
    is_long = positions.max(axis=1) + 1 > config.original_max_positions
    return jnp.where(is_long[:, None], jnp.asarray(long)[None, :], jnp.asarray(short)[None, :])


def _dynamic(config: RopeConfig, positions: Int[Array, "B T"]) -> Float[Array, "B R"]:
    """The base grows with the length once a row is longer than the original context.

    `theta * (factor * length / original - (factor - 1)) ** (d / (d - 2))`, `d = rotary_dim`; a
    shorter row has `length = original`, which leaves theta unchanged.
    """
    original, dim = config.original_max_positions, config.rotary_dim
    length = jnp.maximum(positions.max(axis=1) + 1, original).astype(jnp.float32)
    stretch = config.factor * length / original - (config.factor - 1.0)
    base = config.theta * stretch ** (dim / (dim - 2))
    return 1.0 / jnp.power(base[:, None], jnp.asarray(_exponents(config))[None, :])
