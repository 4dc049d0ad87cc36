"""Rotary position embedding as a small pytree that `kvjax.attend` can apply itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.rotation import Turn, turn
from pallas_kernels.base.logits import Product, products
from pallas_kernels.base.rows import take_shared


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864): what turns a key into a rotated key.

    Channel pair i of a vector at position p is turned by the angle `p * inv_freq[i]`. The first
    `2 * R` channels are rotated, the others pass through unchanged.

    Args:
      inv_freq: inverse frequencies, `[R]`, or `[B, R]` where they depend on the row (the `dynamic`
        scaling of long prompts).
      interleaved: pairs are neighbours (0,1), (2,3), ... (GLM) instead of halves (0,R), (1,R+1),
        ... (Llama, the default).
      factor: rotated channels are multiplied by it (the attention factor of YaRN and LongRoPE);
        1 by default.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax import Rope
      >>> rope = Rope(inv_freq=1.0 / 10000.0 ** (jnp.arange(0, 8, 2) / 8))
      >>> rope.rotate(jnp.ones((1, 2, 3, 8)), jnp.array([[0, 1, 2]])).shape
      (1, 2, 3, 8)
    """

    inv_freq: Float[Array, "*B R"]
    interleaved: bool = field(default=False, metadata={"static": True})
    factor: float = field(default=1.0, metadata={"static": True})

    def rotate(
        self,
        x: Float[Array, "B H T D"],
        positions: Int[Array, "B T"] | Int[Array, "B H T"],
    ) -> Float[Array, "B H T D"]:
        """Turns the vectors `x [B, H, T, D]` by their `positions [B, T]` or `[B, H, T]`.

        Angles, sines and cosines are float32; the result has the dtype of `x`. A position below
        zero (padding) is rotated like any other number: nothing reads such a vector.
        """
        pairs = self.inv_freq.shape[-1]
        if positions.ndim == 2:
            positions = positions[:, None, :]
        frequencies = self.inv_freq.astype(jnp.float32)
        frequencies = frequencies.reshape((-1, 1, 1, pairs))
        angle = positions[..., None].astype(jnp.float32) * frequencies
        return self.turn(x, jnp.cos(angle) * self.factor, jnp.sin(angle) * self.factor)

    def turn(
        self,
        x: Float[Array, "B H T D"],
        cos: Float[Array, "B H T R"],
        sin: Float[Array, "B H T R"],
    ) -> Float[Array, "B H T D"]:
        """Turns vectors by angles whose cosines and sines, times `factor`, are given."""
        return turn(x, cos, sin, self.interleaved)

    def product(
        self,
        q: Float[Array, "B H R D"],
        x: Float[Array, "B H T D"],
        cos: Float[Array, "B H T R"],
        sin: Float[Array, "B H T R"],
    ) -> Float[Array, "B H R T"]:
        """Float32 `q · turn(x)`; halves of turned vectors are not put together where that costs."""
        if self.interleaved:
            return products(q, self.turn(x, cos, sin))
        pairs = self.inv_freq.shape[-1]
        a, b, rest = jnp.split(x, (pairs, 2 * pairs), axis=-1)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        q_a, q_b, q_rest = jnp.split(q, (pairs, 2 * pairs), axis=-1)
        first, second = (a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)
        out = products(q_a, first) + products(q_b, second)
        return out + products(q_rest, rest) if rest.shape[-1] else out


STRIDE = 256  # positions between those whose angles are added to nearer ones
DEAR = 32  # on CPU, about how many rows of a `TurnTable` cost as much as one cosine per pair


@dataclass(frozen=True)
class TurnTable:
    """The cosines and sines of `Rope`, for many vectors on CPU, where XLA computes them one by one.

    Those of all positions come from sums of two angles: of a multiple of 256 positions and of
    the rest. They are nearer to the truth at large positions than those of `Rope.rotate`, whose
    products of position and frequency are rounded to float32.

    Args:
      rows: cosines, then sines, of every position.
    """

    rows: Float[Array, "#B N 2*R"]

    @classmethod
    def below(cls, rope: Rope, tokens: int) -> TurnTable:
        """For all positions below `tokens`."""
        frequencies = rope.inv_freq.astype(jnp.float32)
        frequencies = frequencies.reshape((-1, 1, frequencies.shape[-1]))

        def cos_sin(count: int, stride: int) -> tuple[Array, Array]:
            angle = (jnp.arange(count, dtype=jnp.float32) * stride)[None, :, None] * frequencies
            return jnp.cos(angle), jnp.sin(angle)

        def beside(*parts: Array) -> Array:
            return jnp.concatenate(parts, axis=-1)

        # Cosines and sines in one product over whole rows: XLA does not vectorise halves of them.
        (cos, sin), (c, s) = cos_sin(-(-tokens // STRIDE), STRIDE), cos_sin(STRIDE, 1)
        far, turned = beside(cos, sin)[:, :, None], beside(-sin, cos)[:, :, None]
        rows = far * beside(c, c)[:, None] + turned * beside(s, s)[:, None]
        rows = rows * rope.factor
        return cls(rows.reshape(rows.shape[0], -1, rows.shape[-1]))

    def of(self, positions: Int[Array, "B H T"]) -> tuple[Array, Array]:
        """Cosines and sines `[B, H, T, R]` of positions, -1 like 0; all within the table."""
        return jnp.split(take_shared(self.rows, jnp.maximum(positions, 0)), 2, axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """How the stored keys of a decode step are rotated.

    Args:
      rope: of the model.
      position: of each slot.
      tokens: what positions are below, as a rule (static).
    """

    rope: Rope
    position: Int[Array, "B H S"]
    tokens: int = field(metadata={"static": True})

    @property
    def channels(self) -> int:
        """Leading channels that are rotated."""
        return 2 * self.rope.inv_freq.shape[-1]

    @property
    def turn(self) -> Turn:
        """The same for a kernel."""
        frequencies = self.rope.inv_freq
        frequencies = frequencies.reshape(-1, frequencies.shape[-1])
        return Turn(frequencies, self.position, self.rope.interleaved, self.rope.factor)

    def logits(self, compute: Callable[[Product], Array]) -> Array:
        """`compute(product)`, where `product` multiplies q with blocks of keys that it rotates.

        From a table, where there are enough keys and no position is beyond it; two forms of the
        same are then compiled.
        """

        def one_by_one(q: Array, keys: Array, start: Array | int) -> Array:
            return products(q, self.rope.rotate(keys, self._of_block(keys, start)))

        many = self.tokens <= DEAR * math.prod(self.position.shape)
        if jax.default_backend() != "cpu" or not many:
            return compute(one_by_one)
        table = TurnTable.below(self.rope, self.tokens)

        def by_table(q: Array, keys: Array, start: Array | int) -> Array:
            return self.rope.product(q, keys, *table.of(self._of_block(keys, start)))

        within = (self.position < table.rows.shape[1]).all()
        return jax.lax.cond(within, lambda: compute(by_table), lambda: compute(one_by_one))

    def _of_block(self, keys: Array, start: Array | int) -> Int[Array, "B H N"]:
        return jax.lax.dynamic_slice_in_dim(self.position, start, keys.shape[2], 2)
