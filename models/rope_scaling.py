"""Inverse frequencies of the rotary embedding: plain, interpolated, dynamic and Llama 3.1."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.rope import Rope

from .config import RopeConfig


def make_rope(config: RopeConfig, positions: Int[Array, "B T"]) -> Rope:
    """The rotary embedding for one call with tokens at `positions` (−1: padding).

    Only `"dynamic"` looks at the positions. Its inverse frequencies are `[B, R]`: each row's
    depend on the row's own length, the highest position of this call plus one, so that a padded
    batch equals its rows alone. Nothing is remembered between calls: keys keep the rotation of the
    call that wrote them, as they do in `transformers`.

    Args:
      config: theta, type and the type's parameters.
      positions: token positions `[B, T]`.

    Returns:
      A `kvjax.Rope` with `inv_freq` `[R]`, or `[B, R]` for `"dynamic"`.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.models import RopeConfig
      >>> from kvjax.models.rope_scaling import make_rope
      >>> make_rope(RopeConfig(rotary_dim=8), jnp.array([[0, 1, 2]])).inv_freq.shape
      (4,)
    """
    if config.type == "dynamic":
        return Rope(_dynamic(config, positions), interleaved=config.interleaved)
    inv_freq = _plain(config)
    if config.type == "linear":
        inv_freq = inv_freq / np.float32(config.factor)
    elif config.type == "llama3":
        inv_freq = _llama3(config, inv_freq)
    return Rope(jnp.asarray(inv_freq), interleaved=config.interleaved)


def _exponents(config: RopeConfig) -> Float[np.ndarray, " R"]:
    return np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)


def _plain(config: RopeConfig) -> Float[np.ndarray, " R"]:
    """`theta ** (-2i / rotary_dim)`.

    At position 100,000 one unit in the last place of a frequency near 1 is an angle of 0.006, so
    the rounding steps are those of the models' training code: exponent, power and reciprocal are
    each rounded to float32. The power itself is taken in float64, which rounds it correctly.
    """
    power = np.float64(config.theta) ** _exponents(config).astype(np.float64)
    return np.float32(1.0) / power.astype(np.float32)


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
