"""Inverse frequencies of the rotary embedding: plain ones, and those of stretched contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax.rope import Rope

from .config import DecoderConfig, RopeConfig


def make_rope(config: RopeConfig, max_length: int) -> Rope:
    """The rotary embedding of a layer whose cache is made for `max_length` tokens of a row.

    Two types look at the length. `"longrope"` has short factors up to the original context and long
    ones beyond, `"dynamic"` a base that grows beyond it. Both are decided once for a cache, by what
    it is made for, as vLLM and llama.cpp decide `"longrope"` by the context length that they are
    started with. All keys of a cache have one set of frequencies, therefore, however a text is cut
    into turns, chunks and decode steps.

    `transformers` decides at every call by the tokens so far: keys that were cached before a text
    grew beyond the original context keep the frequencies of before. Phi-3's `generate` reads the
    text again at that point, other models go on with keys of two sets.

    Args:
      config: theta, type and the type's parameters.
      max_length: tokens of a row, prompt and new ones together (`LayerCache.max_length`).

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
    """Lengths with equal frequencies in all layers, as one number: a model's `length_class`.

    Args:
      ropes: of the layers, those of type `"longrope"` and `"dynamic"`.

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
        """Of a decoder; None where no layer looks at the length."""
        layers = (config.layer(index).rope for index in range(config.num_layers))
        ropes = [rope for rope in layers if rope and rope.type in ("dynamic", "longrope")]
        return cls(tuple(dict.fromkeys(ropes))) if ropes else None

    def __call__(self, max_length: int) -> int:
        """The least length whose frequencies are those of `max_length`."""
        least = 1
        for rope in self.ropes:
            if max_length > rope.original_max_positions:
                dynamic = rope.type == "dynamic"
                least = max(least, max_length if dynamic else rope.original_max_positions + 1)
        return least


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


def _powers(config: RopeConfig, theta: float) -> Float[np.ndarray, " R"]:
    """`theta ** (2i / rotary_dim)`.

    At position 100,000 one unit in the last place of a frequency near 1 is an angle of 0.006, so
    the rounding steps are those of the models' training code: exponent, power and reciprocal are
    each rounded to float32. The power itself is taken in float64, which rounds it correctly.
    """
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


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
    powers, factor = _powers(config, config.theta), np.float32(config.factor)
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


def _longrope(config: RopeConfig, max_length: int) -> Float[np.ndarray, " R"]:
    """Short factors up to the original context, long ones beyond."""
    is_long = max_length > config.original_max_positions
    factors = np.asarray(config.long_factors if is_long else config.short_factors, np.float32)
    return np.float32(1.0) / (factors * _powers(config, config.theta))


def _dynamic(config: RopeConfig, max_length: int) -> Float[np.ndarray, " R"]:
    """The base grows with the length beyond the original context.

    `theta * (factor * length / original - (factor - 1)) ** (d / (d - 2))`, `d = rotary_dim`. Up to
    the original context the length counts as that, which leaves theta unchanged.
    """
    original, dim = config.original_max_positions, config.rotary_dim
    length = max(max_length, original)
    stretch = config.factor * length / original - (config.factor - 1.0)
    return np.float32(1.0) / _powers(config, config.theta * stretch ** (dim / (dim - 2)))
