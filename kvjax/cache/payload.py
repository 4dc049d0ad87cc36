"""Stores the keys and values of a cache.

A payload holds the keys, or the values, of all slots in some form. A form that encodes each row by
itself is a `RowPayload`, of two functions. Any other has the members of `Payload`, among them:

- `read` returns dense rows.
- `write` stores new rows.
- `flush` encodes new rows, every M steps.
- `encode` brings all rows into the payload's form, at the end of a prompt.
- `free_bytes` says how much of its memory holds nothing.
- `resized` cuts off what holds no row, or adds it again.
- `map_slots` applies a function to the arrays that have places for slots.
- `attention` computes the attention of a decode step over the form as it is.

At rest, between calls, a form may take fewer bytes: `at_rest` and `awake` bring it there and back.
`room`, `beside` and `beside_taken` count places for new rows and beside the slots.

While a prompt is read, keys and values are `Dense`, whatever their form between prompts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.nbytes import nbytes
from kvjax.cache.rope import Rope
from kvjax.serialization import pytree_node
from pallas_kernels import Mask, Queries, Seen, decode_attention, gather_attention, segment_sum
from pallas_kernels.attention.call import join_sinks
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.rows import take_slots

T = TypeVar("T")
# `vmap` over rows and heads, as in `take_slots`, needs no index arrays for these axes. No index is
# negative, so that JAX need not compare them with 0.
_into = {"mode": "drop", "wrap_negative_indices": False}
_scatter = jax.vmap(jax.vmap(lambda data, index, rows: data.at[index].set(rows, **_into)))

# A function of an array, of the number of slots for each of its places, and of the places to have.
OfPlaces = Callable[[Array, int, int], Array]
Moves = tuple[Int[Array, "B H N"], Int[Array, "B H N"]]  # source slots, and the slots they go to


def write_slots(x: Array, index: Int[Array, "B H T"], rows: Array) -> Array:
    """Writes `rows [B, H, T, ...]` into `x [B, H, S, ...]`; index S writes nothing.

    Args:
      x: values of all slots.
      index: the slot of each row; none is negative.
      rows: new values, which are cast to the dtype of `x`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> x, rows = jnp.array([[[5, 6, 7]]]), jnp.array([[[1, 2]]])
      >>> kvjax.kit.write_slots(x, jnp.array([[[2, 3]]]), rows).tolist()
      [[[5, 6, 1]]]
    """
    rows = rows.astype(x.dtype)
    if x.ndim == 3 and index.shape[2] == 1:
        # One number for each head. XLA on CPUs compiles every scatter of a program by itself, but
        # shares such a pass over scalars among all layers.
        return jnp.where(jax.lax.broadcasted_iota(index.dtype, x.shape, 2) == index, rows, x)
    if index.size == 1:
        # A second row that is written nowhere. XLA turns a scatter of a single row into an update
        # of a slice, and then copies x: all of the cache of a group of one head, in every step.
        index = jnp.concatenate((index, jnp.full_like(index, x.shape[2])), 2)
        rows = jnp.concatenate((rows, rows), 2)
    return _scatter(x, index, rows)


def sum_into(
    into: Int[Array, "B H N"],
    x: Array,
    places: int | None = None,
    *,
    implementation: str | None = "xla",
) -> Array:
    """Sums the rows of `x [B, H, N, ...]` that go `into` the same place.

    Args:
      into: the place of each row, not negative; a row whose place does not exist is left out.
      x: the rows, `[B, H, N, ...]`.
      places: number of places; N by default.
      implementation: of `pallas_kernels.segment_sum`. XLA by default, whose order of additions is
        not fixed on a GPU: that is the best choice for integers, and where no two rows go into the
        same place. Elsewhere give `Step.implementation`, so that equal caches have equal sums.

    Returns:
      The sums, `[B, H, places, ...]`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> into, x = jnp.array([[[1, 1, 0]]]), jnp.array([[[5, 6, 7]]])
      >>> kvjax.kit.sum_into(into, x, 2).tolist()
      [[[7, 11]]]
    """
    return segment_sum(x, into, places, implementation=implementation)


# The largest number among all that go into the same place, at each of them: `max_into(x, into)`.
max_into = jax.vmap(jax.vmap(lambda x, into: jax.ops.segment_max(x, into, x.shape[0])[into]))


def of_rows(rows: Bool[Array, "B *H"], new: T, old: T) -> T:  # noqa: UP037
    """Takes `new` in the rows that are chosen and `old` in the others: trees of arrays `[B, ...]`.

    With more axes, `rows` chooses heads, or groups of slots.
    """

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(*rows.shape, *(1,) * (old.ndim - rows.ndim)), new, old)

    return jax.tree.map(choose, new, old)


def free_bytes(arrays: object, taken: int, places: int) -> int:
    """Returns the bytes of free places, of arrays that have as many bytes for each place."""
    return round(nbytes(arrays) * (places - taken) / places) if places else 0


def resized(x: Array, size: int, fill: float | bool = 0) -> Array:
    """Cuts `x [B, H, N, ...]` behind N = `size`, or adds places that hold `fill` up to there."""
    added = max(size - x.shape[2], 0)
    padding = [(0, added * (axis == 2)) for axis in range(x.ndim)]
    return jnp.pad(x[:, :, :size], padding, constant_values=fill)


def to_places(x: Array, per: int, places: int) -> Array:
    """Cuts or adds places, as `Payload.map_slots` calls it."""
    return resized(x, places)


class Slots(NamedTuple):
    """The slots of a cache as a payload gets them when it encodes all of them.

    Args:
      position: position of each slot, -1 where it is free. The first n slots are live.
      live: which slots hold a token.
      rows: which rows had tokens in the prompt that has just been read.
      source: the payload's slot that held each token before that prompt, -1 for new tokens. Its key
        and value may have been changed since. None: all tokens are new.
      rope: rotates keys when they are read; None: nothing does.
    """

    position: Int[Array, "B H S"]
    live: Bool[Array, "B H S"]
    rows: Bool[Array, " B"]
    source: Int[Array, "B H S"] | None = None
    rope: Rope | None = None


class Payload(Protocol):
    """The keys or the values of a cache, `[B, H, S, D]`, in any form.

    Payloads are immutable pytrees: a method that changes one returns another.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Quantize(bits=8), batch=1, kv_heads=2, head_dim=16,
      ...                          max_prompt=8, max_new=0)
      >>> keys = cache.kv.k
      >>> type(keys).__name__, keys.shape, keys.read(jnp.array([[[3, 5], [0, 1]]])).shape
      ('Quantized', (1, 2, 8, 16), (1, 2, 2, 16))
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes B, H, S, D."""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dense rows."""
        ...

    @property
    def at_rest(self) -> Payload:
        """The payload in its fewest bytes, for `map_slots`, `free_bytes` and `awake` alone."""
        ...

    @property
    def awake(self) -> Payload:
        """The payload that was brought to rest, bit for bit."""
        ...

    @property
    def room(self) -> Int[Array, " B"] | None:
        """Number of new rows that fit in before the next flush; None: any number."""
        ...

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Returns dense rows: those of all slots, or those of `index`."""
        ...

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Payload:
        """Replaces a few slots (slot number S writes nothing), or all of them where None."""
        ...

    def flush(self, steps: int, moves: Moves | None = None) -> Payload:
        """Moves rows among slots, then makes room for `steps` new rows if there is less."""
        ...

    def encode(
        self, values: Payload, k: Float[Array, "B H S D"], v: Float[Array, "B H S D"], slots: Slots
    ) -> tuple[Payload, Payload]:
        """Brings dense keys and values into the forms of this payload and of `values`.

        Rows of the batch that are not in `slots.rows` stay exactly as they are stored. So do tokens
        that were stored before the prompt and that it has not changed.
        """
        ...

    def free_bytes(self, live: int) -> int:
        """Returns the bytes of all places that hold no row, in slots and beside them.

        Args:
          live: number of slots that hold a token, of all (row, KV head) together. Where the
            payload's arrays are shapes, nothing is beside the slots.
        """
        ...

    @property
    def beside(self) -> int:
        """Number of places beside the slots, for each row and KV head or for each row."""
        ...

    @property
    def beside_taken(self) -> int | Int[Array, ""]:
        """Number of these places, from the first one on, after which none is taken."""
        ...

    def resized(self, slots: int, beside: int) -> Payload:
        """Cuts off free slots and places at the end, or adds some; what is stored stays as it is.

        Args:
          slots: number of slots afterwards.
          beside: number of places beside them afterwards.
        """
        ...

    def map_slots(self, change: OfPlaces, slots: int) -> Payload:
        """Applies `change(x, per, places)` to the arrays in device memory that have slots.

        Such an array has a place in its third axis for every `per` slots; `places` is how many
        places `slots` slots take. Arrays beside the slots stay as they are.
        """
        ...

    def attention(
        self,
        values: Payload,
        queries: Queries,
        seen: Seen,
        mask: Mask,
        *,
        sinks: Float[Array, " Q"] | None = None,
        probabilities: bool,
        implementation: str | None,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | NoneElsewhere]:
        """Returns the output of attention and, if asked for, the probability of each slot.

        Attention is to all slots (K = H, N = S), or to the N slots of each of K lists where `seen`
        has an index: one list per KV head or per query head.

        Args:
          sinks: logits of a learned sink of each query head; None: there are none.
        """
        ...


class _SlotsAlone:
    """Base class of payloads whose arrays all have one place for each slot."""

    room = property(lambda self: None)
    at_rest = awake = property(lambda self: self)
    beside = beside_taken = property(lambda self: 0)

    def free_bytes(self, live: int) -> int:
        """Returns the bytes of free slots, `live` of all slots being taken."""
        array, *_ = jax.tree.leaves(self)
        return free_bytes(self, live, math.prod(array.shape[:3]))

    def resized(self, slots: int, beside: int) -> Self:
        """Cuts or adds free slots at the end."""
        return self.map_slots(to_places, slots)

    def map_slots(self, change: OfPlaces, slots: int) -> Self:
        """Applies `change` to all arrays."""
        return jax.tree.map(lambda x: change(x, 1, slots), self)


@pytree_node
@dataclass(frozen=True)
class Dense(_SlotsAlone):
    """Keys or values as they are, `data [B, H, S, D]`; free slots may hold any numbers.

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

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Returns the rows of all slots, or those of `index`."""
        return self.data if index is None else take_slots(self.data, index)

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Dense:
        """Replaces a few slots (slot number S writes nothing), or all of them where None."""
        if slots is None:
            return Dense(rows.astype(self.data.dtype))
        return Dense(write_slots(self.data, slots, rows))

    def flush(self, steps: int, moves: Moves | None = None) -> Dense:
        """Moves rows among slots; there is room for any number of new ones."""
        return self if moves is None else self.write(moves[1], self.read(moves[0]))

    def encode(self, values: Payload, k: Array, v: Array, slots: Slots) -> tuple[Dense, Dense]:
        """Returns the rows as they are."""
        return Dense(k), Dense(v)

    def attention(
        self,
        values: Dense,
        queries: Queries,
        seen: Seen,
        mask: Mask,
        *,
        sinks: Float[Array, " Q"] | None = None,
        **options,
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | NoneElsewhere]:
        """Returns the output and, if asked for, the probability of each slot or list entry."""
        attend = decode_attention if seen.index is None else gather_attention
        out, lse, probabilities = attend(queries, self.data, values.data, seen, mask, **options)
        _, out, probabilities = join_sinks(sinks, lse, out, probabilities)
        return out, probabilities


class RowPayload(_SlotsAlone, ABC):
    """Base class of stored forms that encode each row by itself: the key or value of one token.

    A subclass is a frozen dataclass of arrays `[B, H, S, ...]` under the decorator
    `kvjax.kit.pytree_node`. It has `encoded` and `decoded`. Rows that a prompt leaves unchanged
    stay as they are stored, however much the form loses when it encodes a row again. The `init` of
    a transform of the stage `REPRESENT` puts `empty` payloads of the class into the cache.

    Example:
      >>> from dataclasses import dataclass
      >>> import jax, jax.numpy as jnp, kvjax
      >>> @kvjax.kit.pytree_node
      ... @dataclass(frozen=True)
      ... class Halves(kvjax.kit.RowPayload):
      ...     rows: jax.Array
      ...     @classmethod
      ...     def encoded(cls, rows):
      ...         return cls(rows.astype(jnp.float16))
      ...     def decoded(self):
      ...         return self.rows.astype(jnp.float32)
      >>> keys = Halves.empty(kvjax.kit.Dense(jnp.zeros((1, 1, 4, 2))))
      >>> keys.write(jnp.array([[[2]]]), jnp.full((1, 1, 1, 2), 0.5)).read()[0, 0, :, 0].tolist()
      [0.0, 0.0, 0.5, 0.0]
    """

    shape = property(lambda self: jax.eval_shape(type(self).decoded, self).shape)
    dtype = property(lambda self: jax.eval_shape(type(self).decoded, self).dtype)

    @classmethod
    @abstractmethod
    def encoded(cls, rows: Float[Array, "B H N D"]) -> Self:
        """Returns dense rows in the stored form."""

    @abstractmethod
    def decoded(self) -> Float[Array, "B H N D"]:
        """Returns all stored rows, dense."""

    @classmethod
    def empty(cls, rows: Payload) -> Self:
        """Makes as many rows of zeros as another payload has."""
        dense = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        form = jax.eval_shape(cls.encoded, dense)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)

    def _at(self, index: Int[Array, "B K N"]) -> Self:
        return jax.tree.map(lambda x: take_slots(x, index), self)

    def _written(self, slots: Int[Array, "B H T"], new: Self) -> Self:
        return jax.tree.map(lambda x, rows: write_slots(x, slots, rows), self, new)

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Returns the rows of all slots, or those of `index`."""
        return (self if index is None else self._at(index)).decoded()

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Self:
        """Replaces a few slots (slot number S writes nothing), or those that differ where None."""
        new = self.encoded(rows)
        if slots is None:
            return of_rows(equal_rows(rows, self.read(), self.dtype), self, new)
        return self._written(slots, new)

    def flush(self, steps: int, moves: Moves | None = None) -> Self:
        """Moves rows among slots; there is room for any number of new ones."""
        return self if moves is None else self._written(moves[1], self._at(moves[0]))

    def encode(
        self, values: RowPayload, k: Array, v: Array, slots: Slots
    ) -> tuple[RowPayload, RowPayload]:
        """Encodes the rows that a prompt has brought or changed."""
        return self._after_prompt(k, slots), values._after_prompt(v, slots)

    def _after_prompt(self, rows: Float[Array, "B H S D"], slots: Slots) -> Self:
        new = self.encoded(rows)
        if slots.source is not None:
            before = self._at(jnp.maximum(slots.source, 0))
            same = equal_rows(rows, before.decoded(), self.dtype)
            new = of_rows(same & (slots.source >= 0), before, new)
        return of_rows(slots.rows, new, self)

    def attention(
        self, values: RowPayload, queries: Queries, seen: Seen, mask: Mask, **options
    ) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T N"] | NoneElsewhere]:
        """Attends to decoded rows: all of them, or those of a selection alone."""
        index = None if seen.index is None else jnp.maximum(seen.index, 0)
        keys, dense_values = Dense(self.read(index)), Dense(values.read(index))
        seen = seen if index is None else seen.listed()
        return keys.attention(dense_values, queries, seen, mask, **options)


def equal_rows(
    rows: Float[Array, "B K N D"], stored: Float[Array, "B K N D"], dtype: Any
) -> Bool[Array, "B K N"]:
    """Tells which rows equal the stored ones, up to the last digit of two readings in a dtype."""
    stored = stored.astype(jnp.float32)
    size = jnp.abs(stored)
    tolerance = float(jnp.finfo(dtype).eps) * size + 1e-5 * size.max(-1, keepdims=True)
    return (jnp.abs(rows.astype(jnp.float32) - stored) <= tolerance).all(-1)
