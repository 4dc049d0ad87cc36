"""Mean and scale of each channel of a head's keys, which are taken out before rounding."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.rope import Rope
from kvjax.serialization import pytree_node

# Measured on keys of SmolLM2, Qwen2.5 and Gemma 3: see docs/methods/quantize.md.
EXPONENT = 0.75  # power of the standard deviation that a scale is, given many keys
FEW = 8  # number of keys at which the exponent is half of that
LEAST = 1e-4  # least standard deviation of a channel, relative to the head's greatest


@pytree_node
@dataclass(frozen=True)
class Channels:
    """Mean and scale of each channel of each (row, KV head): a key is `mean + scale · x`.

    Only x is encoded. The product of a query with a key is `q · mean + (q · scale) · x`, so that a
    step changes its queries and no key. The first term is the same for all keys.

    Args:
      mean: means of the channels.
      scale: scales of the channels; the greatest of a head is 1.

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
        """Makes means of 0 and scales of 1, which leave keys as they are."""
        shape = batch, heads, channels
        return cls(jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))

    @classmethod
    def of(
        cls, keys: Float[Array, "B H S D"], live: Bool[Array, "B H S"], rope: Rope | None = None
    ) -> Channels:
        """Computes means and scales from the live keys.

        With n keys and a standard deviation s of a channel, its scale is proportional to
        `s ** (0.75 · n / (n + 8))`, because a few keys tell little about the spread of later ones.
        An s below 1e-4 of the head's greatest one is raised to that.

        Args:
          rope: rotates the keys when they are read; None: nothing does. A rotation mixes the two
            channels of a pair, so that mean and scale must be the same for both. There is then no
            mean, and s is the root mean square of the pair.
        """
        keys = keys.astype(jnp.float32)
        # One key that is not finite must not spoil the statistics of the others.
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
        """Returns the x of keys in float32; K lists may be a multiple of the heads."""
        return (keys.astype(jnp.float32) - _like(keys, self.mean)) / _like(keys, self.scale)

    def outside(self, x: Float[Array, "B K N D"]) -> Float[Array, "B K N D"]:
        """Returns the keys of x."""
        return _like(x, self.mean) + x * _like(x, self.scale)

    def of_queries(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G D"]:
        """Returns `q · scale`, which x is multiplied with; `at_mean` must be added to products."""
        return q.astype(jnp.float32) * _like(q, self.scale)

    def at_mean(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G"]:
        """Returns the products of queries with the mean."""
        return (q.astype(jnp.float32) * _like(q, self.mean)).sum(-1)


def _like(x: Float[Array, "B K *N D"], per_head: Float[Array, "B H D"]) -> Float[Array, "B K *1 D"]:
    """Brings the heads' channels into the shape of x: one for each list, with axes of size 1."""
    per_head = jnp.repeat(per_head, x.shape[1] // per_head.shape[1], axis=1)
    return per_head.reshape(*per_head.shape[:2], *(1,) * (x.ndim - 3), per_head.shape[2])


def _or_one(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Replaces numbers that are not above 0 by 1, for divisions."""
    return jnp.where(x > 0, x, 1.0)


def _over_pairs(square: Float[Array, "B H D"], rope: Rope) -> Float[Array, "B H D"]:
    """Returns the mean over the two channels that are rotated together, at both of them."""
    pairs = rope.inv_freq.shape[-1]
    rotated, rest = square[..., : 2 * pairs], square[..., 2 * pairs :]
    axis, shape = (-1, (pairs, 2)) if rope.interleaved else (-2, (2, pairs))
    rotated = rotated.reshape(*square.shape[:2], *shape)
    mean = jnp.broadcast_to(rotated.mean(axis, keepdims=True), rotated.shape)
    return jnp.concatenate((mean.reshape(*square.shape[:2], -1), rest), axis=-1)
