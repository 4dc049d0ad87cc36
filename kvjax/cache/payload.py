"""How the keys and values of a cache are stored.

A payload is the keys, or the values, of all slots in some form. It answers five calls: `read`
(dense rows), `write` (new rows), `flush` (what is done with new rows every M steps), `encode` (all
rows in the payload's form, at a prompt's end) and `attention` (of a decode step, over the form as
it is).
While a prompt is read, keys and values are `Dense`, whatever they are stored in between prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.rope import Rope
from pallas_kernels import Turn, decode_attention, gather_attention, segment_sum
from pallas_kernels.attention.call import beside_sinks
from pallas_kernels.base.rows import take_slots

T = TypeVar("T")
# Mapped over rows and heads, as `take_slots` is, and not indexed by iota. No index is negative.
_into = {"mode": "drop", "wrap_negative_indices": False}
_scatter = jax.vmap(jax.vmap(lambda data, index, rows: data.at[index].set(rows, **_into)))

Moves = tuple[Int[Array, "B H N"], Int[Array, "B H N"]]  # source slots, and the slots they go to


def write_slots(x: Array, index: Int[Array, "B H T"], rows: Array) -> Array:
    """Writes `rows [B, H, T, ...]` into `x [B, H, S, ...]`; index S writes nothing.

    No index is negative.
    """
    return _scatter(x, index, rows.astype(x.dtype))


def sum_into(
    into: Int[Array, "B H N"],
    x: Array,
    places: int | None = None,
    *,
    implementation: str | None = "xla",
) -> Array:
    """Sums of the rows of `x [B, H, N, ...]` that go `into` each place; numbers beyond: into none.

    No number is negative.

    Args:
      places: how many there are; N by default.
      implementation: of `pallas_kernels.segment_sum`. XLA by default, whose order of additions is
        not fixed on a GPU: that is the best for whole numbers, and where no two rows go into the
        same place. Elsewhere give `Step.implementation`, so that equal caches have equal sums.
    """
    return segment_sum(x, into, places, implementation=implementation)


def of_rows(rows: Bool[Array, "B *H"], new: T, old: T) -> T:  # noqa: UP037
    """`new` in the rows that are chosen and `old` in the others: trees of arrays `[B, ...]`.

    With more axes, `rows` chooses heads, or groups of slots.
    """

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(*rows.shape, *(1,) * (old.ndim - rows.ndim)), new, old)

    return jax.tree.map(choose, new, old)


class Seen(NamedTuple):
    """What attention knows of all slots.

    Args:
      bias, position: of each slot, `-inf` and -1 where it is free.
      used: a number of slots from which on none is live.
      rotate: how stored keys are rotated; None: they are already.
    """

    bias: Float[Array, "B H S"]
    position: Int[Array, "B H S"]
    used: Int[Array, "B H"]
    rotate: Turn | None

    def of(self, index: Int[Array, "B K N"]) -> Seen:
        """The same of the slots of each list, free where an entry is -1."""
        named, slot = index >= 0, jnp.maximum(index, 0)
        rotate = self.rotate
        return Seen(
            bias=jnp.where(named, take_slots(self.bias, slot), -jnp.inf),
            position=jnp.where(named, take_slots(self.position, slot), -1),
            used=jnp.full(index.shape[:2], index.shape[2], jnp.int32),
            rotate=None if rotate is None else rotate.at(take_slots(rotate.position, slot)),
        )


class Slots(NamedTuple):
    """What a payload knows of the slots when it encodes all of them.

    Args:
      position: of each slot, -1 where it is free. Live slots stand in front, `0 ... n - 1`.
      live: which slots hold a token.
      rows: the rows that had tokens in the prompt that has just been read.
      source: the slot of the payload at which each row stood before that prompt, -1 where it is
        new. It may have been changed since. None: all rows are new.
      rope: what rotates keys when they are read; None: nothing does.
    """

    position: Int[Array, "B H S"]
    live: Bool[Array, "B H S"]
    rows: Bool[Array, " B"]
    source: Int[Array, "B H S"] | None = None
    rope: Rope | None = None


class Payload(Protocol):
    """What stores the keys or the values of a cache: `[B, H, S, D]` in whatever form."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dense rows."""

    @property
    def room(self) -> Int[Array, " B"] | None:
        """How many new rows it takes before it has to be flushed; None: any number."""

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Payload:
        """Replaces a few slots (slot number S writes nothing), or all of them where None."""

    def flush(self, steps: int, moves: Moves | None = None) -> Payload:
        """Moves rows among slots, then makes room for `steps` new rows where there is less."""

    def encode(
        self, values: Payload, k: Float[Array, "B H S D"], v: Float[Array, "B H S D"], slots: Slots
    ) -> tuple[Payload, Payload]:
        """Keys and values in the forms of these keys and of `values`.

        Rows of the batch that are not in `slots.rows` stay exactly as they are stored, and so does
        what was stored before the prompt and has not been changed by it.
        """

    def attention(
        self,
        values: Payload,
        q: Float[Array, "B K G T D"],
        seen: Seen,
        positions: Int[Array, "B T"],
        *,
        index: Int[Array, "B K N"] | None = None,
        probabilities: bool,
        implementation: str | None,
        sinks: Float[Array, " Q"] | None = None,
        **logits,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | None]:
        """The output and, where asked for, each slot's probability.

        Attention is to all slots (K = H, N = S), or with `index` to N of each of K lists, one per
        KV head or per query head; -1 is none. List k reads head `k // (K / H)`. `sinks` and
        `options` are those of `AttentionOptions`.
        """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """Rows as they are, `data [B, H, S, D]`, and anything in free slots.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.cache.payload import Dense
      >>> payload = Dense(jnp.zeros((1, 2, 8, 4)))
      >>> payload = payload.write(jnp.array([[[3], [5]]]), jnp.ones((1, 2, 1, 4)))
      >>> payload.read().sum(axis=(0, 2, 3)).tolist()
      [4.0, 4.0]
    """

    data: Float[Array, "B H S D"]

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    room = property(lambda self: None)

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""
        return self.data if index is None else take_slots(self.data, index)

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Dense:
        """Replaces a few slots (slot number S writes nothing), or all of them where None."""
        if slots is None:
            return Dense(rows.astype(self.data.dtype))
        return Dense(write_slots(self.data, slots, rows))

    def flush(self, steps: int, moves: Moves | None = None) -> Dense:
        """Moves rows among slots; there is room for any number of new ones."""
        if moves is None:
            return self
        source, slots = moves
        return self.write(slots, self.read(source))

    def encode(self, values: Payload, k: Array, v: Array, slots: Slots) -> tuple[Dense, Dense]:
        """The rows as they are."""
        return Dense(k), Dense(v)

    def attention(
        self,
        values: Dense,
        q: Float[Array, "B K G T D"],
        seen: Seen,
        positions: Int[Array, "B T"],
        *,
        index: Int[Array, "B K N"] | None = None,
        sinks: Float[Array, " Q"] | None = None,
        **options,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | None]:
        """The output and, where asked for, each slot's probability: of all slots or of a list's."""
        keys = self.data if seen.rotate is None else seen.rotate.rotate(self.data)
        at = seen.bias, positions, seen.position
        if index is None:
            out, lse, found = decode_attention(q, keys, values.data, *at, used=seen.used, **options)
        else:
            out, lse, found = gather_attention(q, keys, values.data, index, *at, **options)
        _, out, found = beside_sinks(sinks, lse, out, found)
        return out, found
