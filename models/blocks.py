"""The parts of a decoder layer: RMSNorm, attention through kvjax, gated MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.attention.layer import Cache, layer_caches
from kvjax.compose.wrappers import by_head_groups
from kvjax.protocol import Inputs, Phase

from .config import ACTIVATIONS, DecoderConfig
from .rope_scaling import make_rope

MLP_TOKENS = 2048
"""Number of tokens that go through the MLP at once. The MLP is wider than the residual stream, so a
prompt of 100,000 tokens at once would take gigabytes of temporary memory in every layer."""


class RMSNorm(nnx.Module):
    """Scales `x [..., C]` to a root mean square of one, then by a learned weight per channel.

    The mean square is float32. As in the models' training code, the result is rounded to the dtype
    of `x` before it is multiplied by the weight, or after it.

    Args:
      config: the decoder's configuration: `norm_eps`, `norm_plus_one` and `norm_in_float32` apply.
      size: C.
      dtype: dtype of the weight.
    """

    def __init__(self, config: DecoderConfig, size: int, dtype: DTypeLike) -> None:
        initial = jnp.zeros if config.norm_plus_one else jnp.ones
        self.scale = nnx.Param(initial((size,), dtype))
        self.eps = config.norm_eps
        self.plus_one = config.norm_plus_one
        self.in_float32 = config.norm_in_float32 or config.norm_plus_one

    def __call__(self, x: Float[Array, "*N C"]) -> Float[Array, "*N C"]:
        """Returns the normalised `x`, in its dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        if not self.in_float32:
            return normed.astype(x.dtype) * scale
        scale = scale.astype(jnp.float32)
        return (normed * (1.0 + scale if self.plus_one else scale)).astype(x.dtype)


class Linear(nnx.Module):
    """Multiplies `x [..., C]` by a kernel `[*outputs, C]` and adds a bias `[*outputs]`.

    Kernels have outputs before inputs, as in checkpoints: a decode step then reads a kernel
    from beginning to end. Several axes of outputs let projections that are read together share one
    product.

    Args:
      inputs: C.
      outputs: the shape of a result without the axes of `x`.
      bias: whether the layer adds a bias.
      dtype: dtype of the weights.
      rngs: source of the random initial weights; None: the kernel is zero, which is traced far
        faster.
      accumulate: dtype of the result; None: that of `x` and the weights together.
    """

    def __init__(
        self,
        inputs: int,
        *outputs: int,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        accumulate: DTypeLike | None = None,
    ) -> None:
        shape = *outputs, inputs
        if rngs is None:
            self.kernel = nnx.Param(jnp.zeros(shape, dtype))
        else:
            initial = nnx.initializers.lecun_normal(in_axis=-1, out_axis=range(len(outputs)))
            self.kernel = nnx.Param(initial(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.accumulate = accumulate

    def __call__(self, x: Float[Array, "*N C"]) -> Float[Array, "*N M"]:
        """Returns `[*N, *outputs]`."""
        kernel = self.kernel[...]
        dtype = jnp.promote_types(x.dtype, kernel.dtype)
        # XLA's products with one row are ten times slower on CPUs if a kernel has three axes.
        matrix = kernel.reshape(-1, kernel.shape[-1]).astype(dtype)
        axes = ((x.ndim - 1,), (1,)), ((), ())
        out = jax.lax.dot_general(
            x.astype(dtype), matrix, axes, preferred_element_type=self.accumulate
        ).reshape(*x.shape[:-1], *kernel.shape[:-1])
        if self.bias is None:
            return out
        return out + jnp.expand_dims(self.bias[...].astype(out.dtype), range(x.ndim - 1))


class Attention(nnx.Module):
    """Projections around `kvjax.attend`.

    Queries, keys and values are one product. For each KV head, its kernel `[H, (G + 2) · D, C]` has
    the rows of its G query heads, of its key and of its value, so that a mesh divides it by heads.

    Args:
      config: configuration of the decoder.
      index: the layer's number. Layers with equal settings are equal as graphs, so that they share
        compiled code; the number itself is not kept.
      dtype: dtype of the weights.
      rngs: source of the random initial weights; None: kernels are zero.
    """

    def __init__(
        self, config: DecoderConfig, index: int = 0, *, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.settings = config.layer(index)
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap
        self.qk_norm = config.qk_norm
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        biased = config.attention_bias
        output_biased = biased if config.output_bias is None else config.output_bias

        rows = (config.query_heads // config.kv_heads + 2) * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, config.kv_heads, rows, bias=biased, dtype=dtype, rngs=rngs
        )
        self.o_proj = Linear(
            queries, config.hidden_size, bias=output_biased, dtype=dtype, rngs=rngs
        )
        if config.qk_norm is not None:
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(config, config.head_dim if per_head else queries, dtype)
            self.k_norm = RMSNorm(config, config.head_dim if per_head else keys, dtype)

    def __call__(
        self,
        x: Float[Array, "B T C"],
        positions: Int[Array, "B T"],
        cache: Cache,
        *,
        layer: kvjax.KVTransform,
        phase: Phase,
        last: bool = True,
        predicted_query: Float[Array, "B Q T D"] | None = None,
        residual_norm: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """Returns what attention adds to the residual stream, and the cache with new tokens.

        `residual_norm` is the norm of that stream before the layer, for methods that look at it.
        """
        q, k, v = self.project(x)
        out, cache = kvjax.attend(
            cache,
            q,
            k,
            v,
            positions,
            phase=phase,
            last=last,
            rope=self._rope(layer, cache),
            scale=self.scale,
            window=self.settings.window,
            soft_cap=self.soft_cap,
            predicted_query=predicted_query,
            inputs=Inputs(x, residual_norm),
        )
        return self.merge(out.astype(x.dtype)), cache

    def _rope(self, layer: kvjax.KVTransform, cache: Cache) -> kvjax.Rope | None:
        """Returns the rope of queries and keys; None if the layer needs none.

        Methods that keep keys unrotated need a rope even in a layer without positions: it rotates
        by an angle of 0.
        """
        if self.settings.rope is not None:
            return make_rope(self.settings.rope, layer_caches(cache)[0].max_length)
        # Such methods rotate keys when they are read, whether the layer has positions or not.
        unrotated = any(transform.needs.unrotated_keys for transform in by_head_groups(layer))
        return kvjax.Rope(jnp.zeros((1,), jnp.float32)) if unrotated else None

    def project(
        self, x: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B Q T D"], Float[Array, "B H T D"], Float[Array, "B H T D"]]:
        """Returns queries, keys and values of `x`, not rotated."""
        rows = self.qkv_proj(x)  # [B, T, H, (G + 2) · D]
        key, value = rows.shape[-1] - 2 * self.head_dim, rows.shape[-1] - self.head_dim
        q, k, v = jnp.split(rows, (key, value), axis=-1)
        return self._heads(q, "q_norm"), self._heads(k, "k_norm"), self._heads(v)

    def queries(self, x: Float[Array, "B T C"]) -> Float[Array, "B Q T D"]:
        """Returns the queries of `x` alone, not rotated.

        The product is that of keys and values too: to read the rows of queries alone, they would
        have to be copied first.
        """
        return self.project(x)[0]

    def _heads(
        self, projected: Float[Array, "B T H N"], norm: str | None = None
    ) -> Float[Array, "B N T D"]:
        """Splits heads and normalises them together, each alone, or not at all."""
        split = projected.reshape(*projected.shape[:2], -1, self.head_dim)
        if norm is not None and self.qk_norm == "width":
            wide = split.reshape(*split.shape[:2], -1)
            split = getattr(self, norm)(wide).reshape(split.shape)
        heads = split.transpose(0, 2, 1, 3)
        return getattr(self, norm)(heads) if norm is not None and self.qk_norm == "head" else heads

    def merge(self, out: Float[Array, "B Q T D"]) -> Float[Array, "B T C"]:
        """Joins the heads' outputs and projects them to the residual stream."""
        batch, _, tokens, _ = out.shape
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, tokens, -1))


class MLP(nnx.Module):
    """Gated MLP: `down(activation(gate(x)) * up(x))`.

    Gate and up are one product, whose kernel is `[I, 2, C]`, so that a mesh divides it by width.
    """

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate_up_proj = Linear(hidden, width, 2, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(width, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Returns what the MLP adds to the residual stream."""
        if x.shape[1] <= MLP_TOKENS:
            return self._added(x)
        # `lax.map` cuts along the leading axis, which must be the tokens here. The parts are equal:
        # a product with few tokens takes almost as long as one with many.
        parts = -(-x.shape[1] // MLP_TOKENS)
        size = -(-x.shape[1] // parts)
        by_token = jax.lax.map(self._added, x.swapaxes(0, 1), batch_size=size)
        return by_token.swapaxes(0, 1)

    def _added(self, x: Float[Array, "*N C"]) -> Float[Array, "*N C"]:
        gate_up = self.gate_up_proj(x)  # [*N, I, 2]
        gate, up = gate_up[..., 0], gate_up[..., 1]
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)


class DecoderLayer(nnx.Module):
    """One layer: attention and MLP, each added to the residual stream.

    `config.norms` says where the norms are: before attention and MLP (`attention_norm`,
    `mlp_norm`), after them and before the sum (`attention_post_norm`, `mlp_post_norm`), or in both
    places. The layer has no other norms.

    Args:
      config: configuration of the decoder.
      index: the layer's number.
      dtype: dtype of the weights.
      rngs: source of the random initial weights; None: kernels are zero.
    """

    def __init__(
        self, config: DecoderConfig, index: int = 0, *, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.norms = config.norms
        if config.norms != "after":
            self.attention_norm = RMSNorm(config, config.hidden_size, dtype)
        self.attention = Attention(config, index, dtype=dtype, rngs=rngs)
        if config.norms != "before":
            self.attention_post_norm = RMSNorm(config, config.hidden_size, dtype)
        if config.norms != "after":
            self.mlp_norm = RMSNorm(config, config.hidden_size, dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        if config.norms != "before":
            self.mlp_post_norm = RMSNorm(config, config.hidden_size, dtype)

    def __call__(
        self, x: Float[Array, "B T C"], positions: Int[Array, "B T"], cache: Cache, **options: Any
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """Returns the residual stream after the layer, and its cache.

        `options` are keyword arguments of `Attention`.
        """
        norm = jnp.linalg.norm(x.astype(jnp.float32), axis=-1)  # computed only if it is looked at
        attended, cache = self.attention(
            self.attention_input(x), positions, cache, residual_norm=norm, **options
        )
        if self.norms != "before":
            attended = self.attention_post_norm(attended)
        x = x + attended
        added = self.mlp(x if self.norms == "after" else self.mlp_norm(x))
        if self.norms != "before":
            added = self.mlp_post_norm(added)
        return x + added, cache

    def attention_input(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Returns the input of attention for the residual stream `x`."""
        return x if self.norms == "after" else self.attention_norm(x)

    def predict_queries(
        self, below: DecoderLayer, x: Float[Array, "B T C"]
    ) -> Float[Array, "B Q T D"]:
        """Predicts this layer's queries from the attention input of the layer below, not rotated.

        The residual stream changes little from layer to layer. So these queries are close to the
        layer's own, and they are known a layer earlier.

        Args:
          below: the layer before this one.
          x: the residual stream as it entered that layer.
        """
        return self.attention.queries(below.attention_input(x))


def soft_capped(logits: Float[Array, "*N"], cap: float | None) -> Float[Array, "*N"]:
    """Returns `cap · tanh(logits / cap)`; the logits unchanged if `cap` is None.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.models.blocks import soft_capped
      >>> float(soft_capped(jnp.float32(1000.0), 30.0))
      30.0
    """
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def wants_prediction(layer: kvjax.KVTransform) -> bool:
    """Returns whether a layer's transform, or one of its head groups', uses predicted queries."""
    return any(transform.needs.predicted_query for transform in by_head_groups(layer))
