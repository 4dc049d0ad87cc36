"""Inverse frequencies of the rotary embedding, plain and for stretched contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax.cache.rope import Rope

from .config import DecoderConfig, RopeConfig


def make_rope(config: RopeConfig, max_length: int) -> Rope:
    """Makes the rope of a layer whose cache is made for `max_length` tokens of a row.

    Two types depend on the length. `"longrope"` has short factors up to the original context and
    long ones beyond. `"dynamic"` has a base that grows beyond it. Both are decided once for a
    cache, by its `max_length`, as vLLM and llama.cpp decide `"longrope"` by the context length that
    they are started with. So all keys of a cache have one set of frequencies, however a text is cut
    into turns, chunks and decode steps.

    `transformers` decides at every call by the tokens so far. Keys that were cached before a text
    grew beyond the original context keep their former frequencies. Phi-3's `generate` reads the
    text again at that point; other models continue with keys of two sets.

    Args:
      config: theta, type and the type's parameters.
      max_length: tokens of a row, prompt and new tokens together (`LayerCache.max_length`).

    Returns:
      A `kvjax.Rope` with `inv_freq` `[R]`.

    Example:
      >>> from kvjax.models import RopeConfig
      >>> from kvjax.models.rope_scaling import make_rope
      >>> rope = RopeConfig(
      ...     rotary_dim=4, type="longrope", factor=4.0, original_max_positions=16,
      ...     short_factors=(1.0, 1.0), long_factors=(2.0, 4.0))
      >>> [make_rope(rope, length).inv_freq.tolist() for length in (16, 17)]
      [[1.0, 0.009999999776482582], [0.5, 0.0024999999441206455]]
    """
    inv_freq = np.float32(1.0) / _powers(config, config.theta)
    if config.type == "linear":
        inv_freq = inv_freq / np.float32(config.factor)
    elif config.type == "dynamic":
        inv_freq = _dynamic(config, max_length)
    elif config.type == "llama3":
        inv_freq = _llama3(config, inv_freq)
    elif config.type == "yarn":
        inv_freq = _yarn(config)
    elif config.type == "longrope":
        inv_freq = _longrope(config, max_length)
    return Rope(
        jnp.asarray(inv_freq), interleaved=config.interleaved, factor=attention_factor(config)
    )


@dataclass(frozen=True)
class RopeLengths:
    """Maps lengths with equal frequencies in all layers to one number: a model's `length_class`.

    Args:
      ropes: ropes of the layers with type `"longrope"` or `"dynamic"`.

    Example:
      >>> from kvjax.models import RopeConfig
      >>> from kvjax.models.rope_scaling import RopeLengths
      >>> rope = RopeConfig(rotary_dim=8, type="dynamic", factor=2.0, original_max_positions=64)
      >>> same = RopeLengths((rope,))
      >>> same(10), same(64), same(65), same(100)
      (1, 1, 65, 100)
    """

    ropes: tuple[RopeConfig, ...]

    @classmethod
    def of(cls, config: DecoderConfig) -> RopeLengths | None:
        """Returns the lengths of a decoder; None if no layer depends on the length."""
        layers = (config.layer(index).rope for index in range(config.num_layers))
        ropes = [rope for rope in layers if rope and rope.type in ("dynamic", "longrope")]
        return cls(tuple(dict.fromkeys(ropes))) if ropes else None

    def __call__(self, max_length: int) -> int:
        """Returns the least length with the frequencies of `max_length`."""
        least = 1
        for rope in self.ropes:
            if max_length > rope.original_max_positions:
                # All longer lengths share LongRoPE's long factors, but each has its own dynamic
                # base.
                dynamic = rope.type == "dynamic"
                least = max(least, max_length if dynamic else rope.original_max_positions + 1)
        return least


def attention_factor(config: RopeConfig) -> float:
    """Returns the factor of rotated channels.

    It is the configuration's factor if it has one. Else it is `0.1 · ln(factor) + 1` for YaRN and
    `sqrt(1 + ln(factor) / ln(original_max_positions))` for LongRoPE, or 1 if `factor` is at most 1.
    For all other types it is 1.

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
    """Returns YaRN's `0.1 · weight · ln(factor) + 1`, which is 1 for factors up to 1.

    Example:
      >>> from kvjax.models.rope_scaling import yarn_magnitude
      >>> yarn_magnitude(1.0)
      1.0
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _powers(config: RopeConfig, theta: float) -> Float[np.ndarray, " R"]:
    """Returns `theta ** (2i / rotary_dim)`.

    At position 100,000, one unit in the last place of a frequency near 1 is an angle of 0.006. So
    the rounding steps are those of the models' training code: exponent, power and reciprocal are
    each rounded to float32. The power itself is computed in float64, which rounds it correctly.
    """
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _llama3(config: RopeConfig, inv_freq: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """Returns Llama 3.1's frequencies: long wavelengths stretched by `factor`, short ones kept.

    There is a ramp between them. `turns` is how often a wavelength fits into the original context.
    The share that is kept goes linearly from 0 at `low_freq_factor` turns to 1 at
    `high_freq_factor` turns.
    """
    low, high = np.float32(config.low_freq_factor), np.float32(config.high_freq_factor)
    wavelength = np.float32(2.0 * np.pi) / inv_freq
    turns = np.float32(config.original_max_positions) / wavelength
    kept = np.clip((turns - low) / (high - low), np.float32(0.0), np.float32(1.0))
    return kept * inv_freq + (np.float32(1.0) - kept) * inv_freq / np.float32(config.factor)


def _yarn(config: RopeConfig) -> Float[np.ndarray, " R"]:
    """Returns YaRN's frequencies: as Llama 3.1's, but the ramp is linear over channel pairs.

    It begins at the pair that turns `beta_fast` times within the original context and ends at the
    pair that turns `beta_slow` times.
    """
    powers, factor = _powers(config, config.theta), np.float32(config.factor)
    start, end = (_pair_that_turns(config, beta) for beta in (config.beta_fast, config.beta_slow))
    if config.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, config.rotary_dim - 1)
    if start == end:
        end += 0.001  # the ramp becomes a step, without a division by 0
    pairs = np.arange(config.rotary_dim // 2, dtype=np.float32)
    ramp = (pairs - np.float32(start)) / np.float32(end - start)
    kept = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    stretched, plain = np.float32(1.0) / (factor * powers), np.float32(1.0) / powers
    return stretched * (np.float32(1.0) - kept) + plain * kept


def _pair_that_turns(config: RopeConfig, times: float) -> float:
    """Returns the (fractional) pair whose wavelength fits `times` into the original context."""
    length = config.original_max_positions / (times * 2 * math.pi)
    return config.rotary_dim * math.log(length) / (2 * math.log(config.theta))


def _longrope(config: RopeConfig, max_length: int) -> Float[np.ndarray, " R"]:
    """Returns LongRoPE's frequencies: short factors up to the original context, else long ones."""
    is_long = max_length > config.original_max_positions
    factors = np.asarray(config.long_factors if is_long else config.short_factors, np.float32)
    return np.float32(1.0) / (factors * _powers(config, config.theta))


def _dynamic(config: RopeConfig, max_length: int) -> Float[np.ndarray, " R"]:
    """Returns frequencies with a base that grows with the length beyond the original context.

    The base is `theta * (factor * length / original - (factor - 1)) ** (d / (d - 2))`, with
    `d = rotary_dim`. Up to the original context the length counts as that, which leaves theta
    unchanged.
    """
    original, dim = config.original_max_positions, config.rotary_dim
    length = max(max_length, original)
    stretch = config.factor * length / original - (config.factor - 1.0)
    return np.float32(1.0) / _powers(config, config.theta * stretch ** (dim / (dim - 2)))
