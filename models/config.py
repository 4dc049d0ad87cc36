"""Configuration of a decoder: sizes, rotary embeddings and options, as frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from kvjax.messages import brief, did_you_mean
from pallas_kernels.base.annotations import NoneElsewhere

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Rotary embeddings that `kvjax.models` computes, by their Hugging Face names."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""Activations of the gated MLP, by their Hugging Face names."""

NORM_PLACES = ("before", "after", "both")
"""Places of a sublayer's norms: its input, its output before the residual sum, or both."""

QK_NORMS = ("head", "width")
"""Ways to normalise queries and keys: each head alone, or all heads together."""

MOST_SIZE = 2**31 - 1
"""Largest size in a model."""

MOST_LAYERS = 10_000
"""Most layers of a model; several objects are made for each before any weight is read."""

_NOT_COMPUTED = {"computes": False}  # no logit depends on such a field: contexts may differ in it

_MOST_NUMBER = float(np.finfo(np.float32).max)


def is_finite(value: object) -> bool:
    """Returns whether a value is a number that is finite in float32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MOST_NUMBER <= value <= _MOST_NUMBER


def check_positive(name: str, value: Any) -> Any:
    """Returns the value; raises ValueError unless it is above 0 and finite in float32."""
    if not is_finite(value) or value <= 0:
        large = isinstance(value, int | float) and value > _MOST_NUMBER
        hint = f" (float32 ends at {_MOST_NUMBER:.2g})" if large else ""
        raise ValueError(f"{name} must be a finite number above 0, got {brief(value)}{hint}")
    return value


def check_size(name: str, value: Any, most: int = MOST_SIZE) -> int:
    """Returns the value; raises ValueError unless it is an integer from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {brief(value)}")
    if value > most:
        raise ValueError(f"{name} must be an integer of at most {most}, got {brief(value)}")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str | None]) -> Any:
    """Returns the value; raises ValueError unless it is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {brief(value)}"
            f"{did_you_mean(value, choices)}"
        )
    return value


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of a layer's rotary position embedding.

    Args:
      rotary_dim: number of leading channels of a head that are rotated; even.
      theta: base of the geometric series of wavelengths.
      type: `"default"` (arXiv 2104.09864), `"linear"` (position interpolation, arXiv 2306.15595),
        `"dynamic"` (the base grows with the length, "NTK-aware"), `"llama3"` (long
        wavelengths are stretched, short ones kept), `"yarn"` (as `"llama3"` with another ramp, and
        larger logits, arXiv 2309.00071) or `"longrope"` (a factor per channel pair, one set for
        short texts and one for long ones, arXiv 2402.13753). The length that counts is the
        `max_length` of a cache: see `rope_scaling.make_rope`.
      factor: by how much the context was stretched; for all types except `"default"`.
      original_max_positions: context before it was stretched; for `"dynamic"`, `"llama3"`,
        `"yarn"` and `"longrope"`.
      low_freq_factor: `"llama3"`: wavelengths above `original_max_positions / low_freq_factor` are
        stretched by the full factor.
      high_freq_factor: `"llama3"`: wavelengths below `original_max_positions / high_freq_factor`
        are kept.
      beta_fast: `"yarn"`: a wavelength that fits more often than this into the original context is
        kept.
      beta_slow: `"yarn"`: a wavelength that fits less often than this into the original context is
        stretched by the full factor.
      truncate: `"yarn"`: whether both ends of the ramp are rounded outwards to whole channels.
      short_factors: `"longrope"`: factors of the pairs' wavelengths for texts up to the original
        context, `rotary_dim / 2` numbers.
      long_factors: `"longrope"`: factors for longer texts.
      attention_factor: factor of rotated channels; `"yarn"` and `"longrope"`. None: the
        recommendation of their papers (`rope_scaling.attention_factor`).
      interleaved: whether rotated pairs are neighbouring channels instead of halves.

    Raises:
      ValueError: a parameter is out of its range, or `type` is unknown.

    Example:
      >>> from kvjax.models import RopeConfig
      >>> RopeConfig(rotary_dim=128, theta=500000.0).type
      'default'
    """

    rotary_dim: int
    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int | NoneElsewhere = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_choice("rope type", self.type, ROPE_TYPES)
        check_size("rotary_dim", self.rotary_dim)
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, got {self.rotary_dim}")
        numbers = ("theta", "factor", "low_freq_factor", "high_freq_factor")
        for name in (*numbers, "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor)
        if self.type in ("dynamic", "llama3", "yarn", "longrope"):
            check_size("original_max_positions", self.original_max_positions)
        # The exponent d / (d - 2) of the dynamic base has no value at d = 2.
        if self.type == "dynamic" and self.rotary_dim < 4:
            raise ValueError(f"dynamic rope needs a rotary_dim of 4 or more, got {self.rotary_dim}")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor must be above low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
        # YaRN's ramp divides by ln(theta), which must be above 0.
        if self.type == "yarn" and self.theta <= 1:
            raise ValueError(f"yarn rope needs a theta above 1, got {self.theta}")
        if self.type == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast must be at least beta_slow, got {self.beta_fast} and {self.beta_slow}"
            )
        if self.type == "longrope":
            self._check_longrope()

    def _check_longrope(self) -> None:
        pairs = self.rotary_dim // 2
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if len(factors) != pairs or not all(is_finite(x) and x > 0 for x in factors):
                raise ValueError(
                    f"{name} must be {pairs} finite numbers above 0 (rotary_dim / 2), "
                    f"got {len(factors)}: {brief(factors)}"
                )
        # LongRoPE's own attention factor divides by ln(original_max_positions).
        if self.attention_factor is None and self.original_max_positions < 2:
            raise ValueError(
                "longrope needs an original_max_positions of 2 or more, "
                f"got {self.original_max_positions}"
            )


@dataclass(frozen=True)
class LayerConfig:
    """Settings that may differ between layers of a decoder; layers with equal ones share code.

    Args:
      rope: rotary position embedding; None: the layer has no positions ("NoPE").
      window: number of newest tokens that a token sees, itself included; None: all.

    Raises:
      ValueError: the window is below 1.

    Example:
      >>> from kvjax.models import LayerConfig, RopeConfig
      >>> LayerConfig(RopeConfig(rotary_dim=64), window=4096).window
      4096
    """

    rope: RopeConfig | None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_size("window", self.window)


@dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a `Decoder`; model families differ in these values only.

    Args:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: number of layers.
      query_heads: query heads per layer, a multiple of `kv_heads`.
      kv_heads: key and value heads per layer.
      head_dim: channels per head.
      rope: rotary position embedding.
      max_positions: most tokens that the model is made for.
      norm_eps: added to the mean square in RMSNorm.
      tie_embeddings: whether the output projection is the embedding table.
      attention_bias: whether query, key, value and output projections have a bias.
      output_bias: whether the output projection of attention has a bias; None: as `attention_bias`.
      mlp_bias: whether the projections of the MLP have a bias.
      activation: activation of the MLP's gate, a name of `kvjax.models.config.ACTIVATIONS`.
      sliding_window: number of newest tokens that a token sees, itself included; None: all.
      layers: rope and window of each layer where layers differ, `num_layers` of them; empty: all
        layers have `rope` and `sliding_window`.
      norms: `"before"`: a sublayer's input is normalised; `"after"`: its output is, before it is
        added to the residual stream; `"both"`.
      norm_plus_one: whether norms multiply by `1 + w` instead of by `w`.
      norm_in_float32: whether norms multiply by their weight before they round to the computation's
        dtype; norms with `norm_plus_one` always do.
      qk_norm: normalisation of queries and keys before rotation: `"head"`: each head alone;
        `"width"`: all heads together; None: none.
      attention_scale: scale of the attention logits; None: `head_dim ** -0.5`.
      attention_soft_cap: bound of attention logits, `c · tanh(logit / c)`; None: no bound.
      logit_soft_cap: bound of the model's logits, in the same way.
      embedding_scale: factor of embeddings as they enter the first layer.
      bos_token_id: the token that starts a text, if there is one.
      eos_token_ids: the tokens that end a generation.

    Raises:
      ValueError: a size is below 1 or too large (`MOST_SIZE`, `MOST_LAYERS`), the heads do not
        divide, the activation or another choice is unknown, the number of `layers` is not
        `num_layers`, or there are more rotated channels than a head has.

    Example:
      >>> from kvjax.models import DecoderConfig, RopeConfig
      >>> config = DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128,
      ... )
      >>> config.tie_embeddings
      False
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    max_positions: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool | None = None
    mlp_bias: bool = False
    activation: str = "silu"
    sliding_window: int | None = None
    layers: tuple[LayerConfig, ...] = ()
    norms: str = "before"
    norm_plus_one: bool = False
    norm_in_float32: bool = False
    qk_norm: str | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    bos_token_id: int | None = field(default=None, metadata=_NOT_COMPUTED)
    eos_token_ids: tuple[int, ...] = field(default=(), metadata=_NOT_COMPUTED)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "query_heads")
        for name in (*sizes, "kv_heads", "head_dim", "max_positions"):
            check_size(name, getattr(self, name))
        check_size("num_layers", self.num_layers, MOST_LAYERS)
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        check_positive("norm_eps", self.norm_eps)
        check_positive("embedding_scale", self.embedding_scale)
        for name in ("attention_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_choice("norms", self.norms, NORM_PLACES)
        check_choice("qk_norm", self.qk_norm, (None, *QK_NORMS))
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads must be a multiple of kv_heads, got {self.query_heads} query heads "
                f"and {self.kv_heads} KV heads"
            )
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(
                f"layers must have num_layers = {self.num_layers} entries, got {len(self.layers)}"
            )
        for rope in (self.rope, *(layer.rope for layer in self.layers)):
            if rope is not None and rope.rotary_dim > self.head_dim:
                raise ValueError(
                    f"rotary_dim must be at most head_dim, got {rope.rotary_dim} "
                    f"and {self.head_dim}"
                )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for a layer without; empty if no layer has one.

        Example:
          >>> from kvjax.models import DecoderConfig, LayerConfig, RopeConfig
          >>> rope = RopeConfig(rotary_dim=8)
          >>> DecoderConfig(
          ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
          ...     kv_heads=2, head_dim=8, rope=rope, max_positions=128,
          ...     layers=(LayerConfig(rope, window=16), LayerConfig(rope))).windows
          (16, None)
        """
        windows = tuple(self.layer(index).window for index in range(self.num_layers))
        return windows if any(windows) else ()

    def layer(self, index: int) -> LayerConfig:
        """Returns rope and window of one layer.

        Example:
          >>> from kvjax.models import DecoderConfig, RopeConfig
          >>> config = DecoderConfig(
          ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
          ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128,
          ...     sliding_window=16)
          >>> config.layer(1).window
          16
        """
        return self.layers[index] if self.layers else LayerConfig(self.rope, self.sliding_window)
