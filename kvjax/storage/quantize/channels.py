"""The mean and the spread of a head's keys, channel by channel, which rounding leaves aside."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.rope import Rope

# Measured on keys of SmolLM2, Qwen2.5 and Gemma 3: see docs/methods/quantize.md.
EXPONENT = 0.75
FEW = 8
LEAST = 1e-4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Channels:
    """A mean and a scale for each channel of each (row, KV head): keys are `mean + scale · x`.

    What is encoded is x. A query's product with a key is `q · mean + (q · scale) · x`, so that a
    step changes its queries and no key. The first term is the same for all keys.

    Args:
      mean, scale: the greatest scale of a head is 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.storage.quantize.channels import Channels
      >>> keys = jnp.array([[[[300.0, 1.0], [302.0, -1.0]]]])
      >>> channels = Channels.of(keys, jnp.ones((1, 1, 2), bool))
      >>> channels.mean.tolist(), channels.inside(keys).round(3).tolist()
      ([[[301.0, 0.0]]], [[[[-1.0, 1.0], [1.0, -1.0]]]])
    """

    mean: Float[Array, "B H D"]
    scale: Float[Array, "B H D"]

    @classmethod
    def neutral(cls, batch: int, heads: int, channels: int) -> Channels:
        """Those that leave keys as they are."""
        shape = batch, heads, channels
        return cls(jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))

    @classmethod
    def of(
        cls, keys: Float[Array, "B H S D"], live: Bool[Array, "B H S"], rope: Rope | None = None
    ) -> Channels:
        """Those of the live keys.

        With n keys and a standard deviation s of a channel, its scale is proportional to
        `s ** (0.75 · n / (n + 8))`: a few keys say little of how far others will lie apart. An s
        below 1e-4 of the head's greatest one counts as that.

        Args:
          rope: what rotates the keys when they are read. A rotation leaves alone only what both
            channels of a pair share, so that there is no mean then, and s is the root of the mean
            square of a pair. None: nothing rotates them.
        """
        keys = keys.astype(jnp.float32)
        # A key that is not finite says nothing of the others.
        counted = (live & jnp.isfinite(keys).all(-1))[..., None]
        keys = jnp.where(counted, keys, 0.0)
        unit = _or_one(jnp.abs(keys).max((2, 3), keepdims=True))
        keys, count = keys / unit, counted.sum(2, dtype=jnp.float32)  # no square overflows
        mean = keys.sum(2) / jnp.maximum(count, 1.0)
        mean = mean if rope is None else jnp.zeros_like(mean)
        apart = jnp.where(counted, keys - mean[:, :, None], 0.0)
        square = (apart**2).sum(2) / jnp.maximum(count, 1.0)
        square = square if rope is None else _over_pairs(square, rope)
        square = jnp.maximum(square, LEAST**2 * square.max(-1, keepdims=True))
        scale = square ** (EXPONENT / 2 * count / (count + FEW))
        scale = _or_one(scale / _or_one(scale.max(-1, keepdims=True)))
        return cls(mean * unit[:, :, 0], scale)

    def inside(self, keys: Float[Array, "B K N D"]) -> Float[Array, "B K N D"]:
        """The x of keys in float32, also of K lists, a multiple of the heads."""
        return (keys.astype(jnp.float32) - _like(keys, self.mean)) / _like(keys, self.scale)

    def outside(self, x: Float[Array, "B K N D"]) -> Float[Array, "B K N D"]:
        """The keys of x."""
        return _like(x, self.mean) + x * _like(x, self.scale)

    def of_queries(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G D"]:
        """What x is multiplied with in place of the queries; `at_mean` is still to be added."""
        return q.astype(jnp.float32) * _like(q, self.scale)

    def at_mean(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G"]:
        """Products of queries with the mean."""
        return (q.astype(jnp.float32) * _like(q, self.mean)).sum(-1)


def _like(x: Float[Array, "B K *N D"], own: Float[Array, "B H D"]) -> Float[Array, "B K *1 D"]:
    """What each list's head has, beside x."""
    own = jnp.repeat(own, x.shape[1] // own.shape[1], axis=1)
    return own.reshape(*own.shape[:2], *(1,) * (x.ndim - 3), own.shape[2])


def _or_one(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return jnp.where(x > 0, x, 1.0)


def _over_pairs(square: Float[Array, "B H D"], rope: Rope) -> Float[Array, "B H D"]:
    """Means over the channels that are rotated together."""
    pairs = rope.inv_freq.shape[-1]
    rotated, rest = square[..., : 2 * pairs], square[..., 2 * pairs :]
    axis, shape = (-1, (pairs, 2)) if rope.interleaved else (-2, (2, pairs))
    rotated = rotated.reshape(*square.shape[:2], *shape)
    mean = jnp.broadcast_to(rotated.mean(axis, keepdims=True), rotated.shape)
    return jnp.concatenate((mean.reshape(*square.shape[:2], -1), rest), axis=-1)
