"""The parts of a decoder layer: RMSNorm, attention through kvjax, gated MLP."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.attention.layer import Cache

from .config import ACTIVATIONS, DecoderConfig
from .rope_scaling import make_rope

MLP_TOKENS = 2048
"""How many tokens go through the MLP at once: what is wider than the residual stream is temporary
memory, and a prompt of 100,000 tokens would take gigabytes of it in every layer."""


class RMSNorm(nnx.Module):
    """Scales `x [..., C]` to a root mean square of one, then by a learned weight per channel.

    The mean square is float32; the result is rounded to the dtype of `x` before the weight, as in
    the code that these models were trained with.
    """

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*N C"]) -> Float[Array, "*N C"]:
        """The normalised `x`, in its dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        return normed.astype(x.dtype) * scale


class Attention(nnx.Module):
    """Projections around `kvjax.attend`."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            bias = config.attention_bias
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=dtype, rngs=rngs)

        self.q_proj = linear(config.hidden_size, queries)
        self.k_proj = linear(config.hidden_size, keys)
        self.v_proj = linear(config.hidden_size, keys)
        self.o_proj = linear(queries, config.hidden_size)

    def __call__(
        self,
        x: Float[Array, "B T C"],
        positions: Int[Array, "B T"],
        cache: Cache,
        *,
        layer: kvjax.KVTransform,
        phase: Literal["prompt", "decode"],
        last: bool = True,
        predicted_query: Float[Array, "B Q T D"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """What attention adds to the residual stream, and the cache with the new tokens."""
        q, k, v = self.project(x)
        out, cache = kvjax.attend(
            layer,
            cache,
            q,
            k,
            v,
            positions,
            phase=phase,
            last=last,
            rope=make_rope(self.config.rope, positions),
            window=self.config.sliding_window,
            predicted_query=predicted_query,
        )
        return self.merge(out.astype(x.dtype)), cache

    def project(
        self, x: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B Q T D"], Float[Array, "B H T D"], Float[Array, "B H T D"]]:
        """Queries, keys and values of `x`, not rotated."""
        return self.queries(x), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))

    def queries(self, x: Float[Array, "B T C"]) -> Float[Array, "B Q T D"]:
        """Queries of `x` alone, not rotated."""
        return self._heads(self.q_proj(x))

    def _heads(self, projected: Float[Array, "B T N"]) -> Float[Array, "B N T D"]:
        split = projected.reshape(*projected.shape[:2], -1, self.config.head_dim)
        return split.transpose(0, 2, 1, 3)

    def merge(self, out: Float[Array, "B Q T D"]) -> Float[Array, "B T C"]:
        """The heads' outputs, side by side and projected to the residual stream."""
        batch, _, tokens, _ = out.shape
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, tokens, -1))


class MLP(nnx.Module):
    """Gated MLP: `down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            bias = config.mlp_bias
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=dtype, rngs=rngs)

        self.activation = config.activation
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """What the MLP adds to the residual stream."""
        if x.shape[1] <= MLP_TOKENS:
            return self._added(x)
        by_token = jax.lax.map(self._added, x.swapaxes(0, 1), batch_size=MLP_TOKENS)
        return by_token.swapaxes(0, 1)

    def _added(self, x: Float[Array, "*N C"]) -> Float[Array, "*N C"]:
        gate = ACTIVATIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T C"], positions: Int[Array, "B T"], cache: Cache, **how: Any
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """The residual stream after the layer, and its cache; `how` goes to `Attention`."""
        attended, cache = self.attention(self.attention_norm(x), positions, cache, **how)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache

    def predict_queries(
        self, below: DecoderLayer, x: Float[Array, "B T C"]
    ) -> Float[Array, "B Q T D"]:
        """This layer's queries for the input of the attention of the layer `below`, not rotated.

        Args:
          below: the layer before this one.
          x: the residual stream as it entered that layer. It changes little from layer to layer, so
            these queries are close to the layer's own, and they are known a layer earlier.
        """
        return self.attention.queries(below.attention_norm(x))


def wants_prediction(layer: kvjax.KVTransform) -> bool:
    """Whether a layer's transform, or that of any of its head groups, uses predicted queries."""
    grouped = isinstance(layer, kvjax.HeadGroups)
    transforms = [tx for _, tx in layer.groups] if grouped else [layer]
    return any(transform.needs.predicted_query for transform in transforms)
