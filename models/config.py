"""What a decoder is made of: sizes, rotary embedding and options, as frozen values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from kvjax.messages import brief

ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
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


MOST_SIZE = 2**31 - 1
"""The largest size of a model."""

MOST_LAYERS = 10_000
"""The most layers of a model; several objects are made for each before any weight is read."""

_MOST_NUMBER = float(np.finfo(np.float32).max)


def is_finite(value: object) -> bool:
    """Whether a value is a number that is finite in float32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -_MOST_NUMBER <= value <= _MOST_NUMBER


def not_finite(name: str, value: object) -> ValueError:
    """The error for a number that must be finite and above 0."""
    large = isinstance(value, int | float) and value > _MOST_NUMBER
    hint = f" (float32 ends at {_MOST_NUMBER:.2g})" if large else ""
    return ValueError(f"{name} must be a finite number above 0, got {brief(value)}{hint}")


def _check_sizes(owner: object, names: tuple[str, ...], most: int = MOST_SIZE) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {brief(value)}")
        if value > most:
            raise ValueError(f"{name} must be an integer of at most {most}, got {brief(value)}")


def _check_positive(owner: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(owner, name)
        if not is_finite(value) or value <= 0:
            raise not_finite(name, value)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a model, before any frequency is computed.

    Args:
      rotary_dim: how many of the first channels of a head are rotated; even.
      theta: base of the geometric series of wavelengths.
      type: `"default"` (arXiv 2104.09864), `"linear"` (position interpolation, arXiv 2306.15595),
        `"dynamic"` (the base grows with the row's length, "NTK-aware") or `"llama3"` (long
        wavelengths are stretched, short ones kept).
      factor: how many times longer the context became; all types but `"default"`.
      original_max_positions: the context before it was stretched; `"dynamic"` and `"llama3"`.
      low_freq_factor: `"llama3"`: wavelengths above `original_max_positions / low_freq_factor` are
        stretched by the whole factor.
      high_freq_factor: `"llama3"`: wavelengths below `original_max_positions / high_freq_factor`
        are kept.
      interleaved: rotated pairs are neighbouring channels instead of halves.

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
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {brief(self.type)} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        _check_sizes(self, ("rotary_dim",))
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, got {self.rotary_dim}")
        _check_positive(self, ("theta", "factor", "low_freq_factor", "high_freq_factor"))
        if self.type in ("dynamic", "llama3"):
            _check_sizes(self, ("original_max_positions",))
        if self.type == "dynamic" and self.rotary_dim < 4:
            raise ValueError(f"dynamic rope needs a rotary_dim of 4 or more, got {self.rotary_dim}")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor must be above low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that `Decoder` has to know; the families differ in these values only.

    Args:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: number of layers.
      query_heads: query heads per layer, a multiple of `kv_heads`.
      kv_heads: key and value heads per layer.
      head_dim: channels per head.
      rope: rotary position embedding.
      max_positions: highest number of tokens that the model is made for.
      norm_eps: added to the mean square in RMSNorm.
      tie_embeddings: the output projection is the embedding table.
      attention_bias: query, key, value and output projections have a bias.
      mlp_bias: the projections of the MLP have a bias.
      activation: of the MLP's gate, a name of `kvjax.models.config.ACTIVATIONS`.
      sliding_window: a token sees this many of the newest tokens, itself included; None: all.
      bos_token_id: the token that starts a text, if there is one.
      eos_token_ids: the tokens that end a generation.

    Raises:
      ValueError: a size is below 1 or too large (`MOST_SIZE`, `MOST_LAYERS`), the heads do not
        divide, the activation is unknown or the rotated channels are more than a head has.

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
    mlp_bias: bool = False
    activation: str = "silu"
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "query_heads")
        _check_sizes(self, (*sizes, "kv_heads", "head_dim", "max_positions"))
        _check_sizes(self, ("num_layers",), MOST_LAYERS)
        _check_positive(self, ("norm_eps",))
        if self.sliding_window is not None:
            _check_sizes(self, ("sliding_window",))
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads must be a multiple of kv_heads, got {self.query_heads} query heads "
                f"and {self.kv_heads} KV heads"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim must be at most head_dim, got {self.rope.rotary_dim} "
                f"and {self.head_dim}"
            )
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {brief(self.activation)} is not supported; "
                f"supported: {', '.join(ACTIVATIONS)}"
            )
