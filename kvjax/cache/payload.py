"""How the keys and values of a cache are stored.

A payload answers four calls: `read` (dense rows), `take` (the same payload with its slots moved),
`write` (a few rows) and `fill` (all rows). A method of compression calls nothing else, so that a
quantised or host-resident payload serves under every one of them. Three more are the cache's own:
`open` and `close` around a prompt, which is read with all rows at hand, and `settle` for the tail
of new tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Rows of every (row, KV head). Mapped over both leading axes and not indexed by iota: an indexed
# gather or scatter brings collectives when a cache is sharded over rows or heads.
_gather = jax.vmap(jax.vmap(lambda data, index: data[index]))
_scatter = jax.vmap(jax.vmap(lambda data, index, rows: data.at[index].set(rows, mode="drop")))


def take_slots(x: Array, index: Int[Array, "B K N"]) -> Array:
    """Gathers slots of a per-slot array: `x [B, H, S, ...]` to `[B, K, N, ...]`.

    K is H, or a multiple of it: list k then reads head `k // (K / H)`.
    """
    batch, kv_heads = x.shape[:2]
    rows = _gather(x, index.reshape(batch, kv_heads, -1))
    return rows.reshape(*index.shape, *x.shape[3:])


def write_slots(x: Array, index: Int[Array, "B H T"], rows: Array) -> Array:
    """Writes `rows [B, H, T, ...]` into `x [B, H, S, ...]`; index S writes nothing."""
    return _scatter(x, index, rows.astype(x.dtype))


def sum_into(into: Int[Array, "B H N"], x: Array) -> Array:
    """Sums of the rows of `x [B, H, N, ...]` that go `into` each of N places; N = none."""
    add = jax.vmap(jax.vmap(lambda into, x: jnp.zeros_like(x).at[into].add(x, mode="drop")))
    return add(into, x)


class Payload(Protocol):
    """What stores the keys or the values of a cache: `[B, H, S, D]` in whatever form."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dense rows."""

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""

    def take(self, index: Int[Array, "B H N"]) -> Payload:
        """The payload whose slot n is this one's slot `index[..., n]`; N may differ from S."""

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> Payload:
        """Replaces a few slots; slot number S writes nothing."""

    def fill(self, rows: Float[Array, "B H S D"]) -> Payload:
        """Replaces all slots."""

    def open(self) -> Payload:
        """The payload for the time that a prompt is read, all rows at hand on the device."""

    def close(self, tail: Int[Array, ""]) -> Payload:
        """As it was before `open`; the tail now begins at slot `tail`."""

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Dense rows of the tail's `size` slots from `start` on."""

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> Payload:
        """Sorts the tail's N slots from `start` on by `index`; the tail then begins behind them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """Rows as they are, `data [B, H, S, D]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.cache.payload import Dense
      >>> payload = Dense.zeros((1, 2, 8, 4), jnp.float32)
      >>> payload = payload.write(jnp.array([[[3], [5]]]), jnp.ones((1, 2, 1, 4)))
      >>> payload.read().sum(axis=(0, 2, 3)).tolist()
      [4.0, 4.0]
    """

    data: Float[Array, "B H S D"]

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], dtype: DTypeLike) -> Dense:
        """A payload of zeros (free slots must hold finite numbers)."""
        return cls(jnp.zeros(shape, dtype))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""
        return self.data.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the rows."""
        return self.data.dtype

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""
        return self.data if index is None else take_slots(self.data, index)

    def take(self, index: Int[Array, "B H N"]) -> Dense:
        """The payload whose slot n is this one's slot `index[..., n]`; N may differ from S."""
        return Dense(take_slots(self.data, index))

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> Dense:
        """Replaces a few slots; slot number S writes nothing."""
        return Dense(write_slots(self.data, slots, rows))

    def fill(self, rows: Float[Array, "B H S D"]) -> Dense:
        """Replaces all slots."""
        return Dense(rows.astype(self.data.dtype))

    def open(self) -> Dense:
        """Itself."""
        return self

    def close(self, tail: Int[Array, ""]) -> Dense:
        """Itself."""
        return self

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Rows of `size` slots from `start` on."""
        return jax.lax.dynamic_slice_in_dim(self.data, start, size, 2)

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> Dense:
        """Sorts N slots from `start` on by `index`."""
        rows = take_slots(self.span(start, index.shape[2]), index)
        return Dense(jax.lax.dynamic_update_slice_in_dim(self.data, rows, start, 2))


@dataclass(frozen=True)
class OpenRows:
    """Dense rows for the time that a prompt is read; what they are closed to is the subclass's.

    Args:
      rows: of all slots.
    """

    rows: Dense

    shape = property(lambda self: self.rows.shape)
    dtype = property(lambda self: self.rows.dtype)

    def _with(self, rows: Dense) -> Self:
        return dataclasses.replace(self, rows=rows)

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""
        return self.rows.read(index)

    def take(self, index: Int[Array, "B H N"]) -> Self:
        """The payload whose slot n is this one's slot `index[..., n]`; N may differ from S."""
        return self._with(self.rows.take(index))

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> Self:
        """Replaces a few slots; slot number S writes nothing."""
        return self._with(self.rows.write(slots, rows))

    def fill(self, rows: Float[Array, "B H S D"]) -> Self:
        """Replaces all slots."""
        return self._with(self.rows.fill(rows))

    def open(self) -> Self:
        """Itself."""
        return self

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Rows of `size` slots from `start` on."""
        return self.rows.span(start, size)

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> Self:
        """Sorts N slots from `start` on by `index`."""
        return self._with(self.rows.settle(start, index))
