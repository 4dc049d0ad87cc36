"""Keys or values as references to a codebook, read by attention as they are (arXiv 2507.06517)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from kvjax.cache.payload import Dense, OpenRows, take_slots, write_slots
from kvjax.rope import Rotation
from kvjax.storage.encoded_attention import Piece, Seen
from pallas_kernels import codebook_logits, codebook_mix, greedy_cover, nearest_entries
from pallas_kernels.attention.forms import codebook_rows, dense_rows
from pallas_kernels.base.logits import Product, products
from pallas_kernels.formats.codebook import References
from pallas_kernels.grouping.nearest_entries import directions

OPERATION = "codebook_attention"


@dataclass(frozen=True)
class Book:
    """How a codebook is made.

    Args:
      theta: a vector is near an entry where their cosine is above it.
      entries: E, the most that a row has.
      magnitude: entries are directions, and a vector keeps its norm; False: entries are the vectors
        that they came from, and stand for others as they are.
      interval: M, steps after which new tokens are encoded, together.
      copies: lists of slots that hold the same new tokens (`KVCache.unfolded`).
    """

    theta: float
    entries: int
    magnitude: bool
    interval: int = 1
    copies: int = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fresh:
    """New rows, as they are until there are M steps of them.

    Args:
      rows: of the last steps.
      slots: where they belong; S: nowhere.
      count: steps so far.
    """

    rows: Float[Array, "B H M D"]
    slots: Int[Array, "B H M"]
    count: Int[Array, ""]

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: DTypeLike, interval: int) -> Fresh:
        """No rows, for a payload of `shape`."""
        batch, lists, slots, head_dim = shape
        nowhere = jnp.full((batch, lists, interval), slots, jnp.int32)
        rows = jnp.zeros((batch, lists, interval, head_dim), dtype)
        return cls(rows, nowhere, jnp.zeros((), jnp.int32))

    def add(self, slots: Int[Array, "B H"], rows: Float[Array, "B H D"], nowhere: int) -> Fresh:
        """One step more; what was in those slots before is no more."""
        kept = jnp.where(self.slots == slots[..., None], nowhere, self.slots)

        def put(x: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), self.count, 2)

        return Fresh(put(self.rows, rows), put(kept, slots), self.count + 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodebookPayload:
    """Vectors as an entry of their row's book and a norm: `entries[index] * magnitude`.

    Args:
      entries: directions that all heads of a row share.
      index: the entry of each slot; 16 bits where they suffice.
      magnitude: the norm of each slot; None where entries are read as they are.
      count: entries so far.
      overflow: vectors that found none near enough and no room, since the last prompt's end, which
        encodes everything anew. A row's new vectors are counted once per KV head.
      fresh: what is not encoded yet; their slots' index and magnitude mean nothing.
      book: how it is made (static).
    """

    entries: Float[Array, "B 1 E D"]
    index: UInt[Array, "B H S"]
    magnitude: Float[Array, "B H S"] | None
    count: Int[Array, " B"]
    overflow: Int[Array, " B"]
    fresh: Fresh
    book: Book = field(metadata={"static": True})

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], dtype: DTypeLike, book: Book
    ) -> CodebookPayload:
        """A payload of zeros, with an empty book."""
        batch, lists, slots, head_dim = shape
        none = jnp.zeros(batch, jnp.int32)
        return cls(
            jnp.zeros((batch, 1, book.entries, head_dim), dtype),
            jnp.zeros((batch, lists, slots), _index_dtype(book.entries)),
            jnp.zeros((batch, lists, slots), dtype) if book.magnitude else None,
            none,
            none + 0,
            Fresh.empty(shape, dtype, book.interval),
            book,
        )

    @classmethod
    def encode(
        cls,
        rows: Float[Array, "P B H S D"],
        position: Int[Array, "B H S"],
        live: Bool[Array, "B H S"],
        books: Sequence[Book],
        vertices: int | None = None,
    ) -> tuple[CodebookPayload, ...]:
        """New books for the live rows of P payloads: see `pallas_kernels.greedy_cover`.

        Copies of a token's vector under several lists of a KV head are one vertex, which weighs as
        many. Of equals, the lowest position comes first, then the lowest head. All covers are rows
        of one, made one after the other.

        Args:
          rows: keys and values.
          position, live: of all slots.
          books: how they are made; of one size.
          vertices: how many there are at most; as many as slots by default. What the cover takes
            grows with their square.
        """
        _, batch, lists, slots, head_dim = rows.shape
        size, book = lists * slots, books[0]
        room = size if vertices is None else min(size, vertices)
        head = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1) // book.copies
        position = jnp.where(live, position, jnp.iinfo(jnp.int32).max)
        flat = (x.reshape(batch, size) for x in (position, head, live))
        number = jax.lax.broadcasted_iota(jnp.int32, (batch, size), 1)
        position, head, order, alive = _sort(*flat, number)
        first = (position != jnp.roll(position, 1, 1)) | (head != jnp.roll(head, 1, 1))
        first |= number == 0
        if book.copies == 1:
            first = jnp.ones_like(first)
        # A copy has the number of the vertex that comes before it.
        vertex = (first & alive).cumsum(1, dtype=jnp.int32) - 1

        def of_vertices(x: Array, chosen: Array) -> Array:
            zeros = jnp.zeros((batch, room), x.dtype)
            add = jax.vmap(lambda zeros, at, x: zeros.at[at].add(x, mode="drop"))
            return add(zeros, jnp.where(chosen, vertex, room), x)

        def of_all(x: Array) -> Array:
            return jnp.concatenate([x] * len(books))

        source = of_all(of_vertices(order, first & alive))
        weights = of_all(of_vertices(alive.astype(jnp.int32), alive))
        theta = jnp.repeat(jnp.array([book.theta for book in books], jnp.float32), batch)
        vectors = take_slots(rows.reshape(-1, 1, size, head_dim), source[:, None])[:, 0]
        cover = greedy_cover(vectors, weights > 0, weights, theta=theta, capacity=book.entries)
        index = jnp.take_along_axis(cover.index, of_all(jnp.clip(vertex, 0, room - 1)), axis=1)
        put = jax.vmap(lambda at, x: jnp.zeros_like(x).at[at].set(x))
        index = put(of_all(order), jnp.where(of_all(alive), index, 0))
        made = jnp.arange(book.entries, dtype=jnp.int32)[None] < cover.count[:, None]
        entries = take_slots(vectors[:, None], jnp.minimum(cover.centers, room - 1)[:, None])
        entries = jnp.where(made[:, None, :, None], _stored(entries, book), 0)

        def payload(n: int) -> CodebookPayload:
            own, magnitude = slice(n * batch, (n + 1) * batch), None
            if book.magnitude:
                magnitude = jnp.where(live, directions(rows[n])[1], 0.0).astype(rows.dtype)
            return cls(
                entries[own].astype(rows.dtype),
                index[own].reshape(batch, lists, slots).astype(_index_dtype(book.entries)),
                magnitude,
                cover.count[own],
                cover.overflow[own],
                Fresh.empty((batch, lists, slots, head_dim), rows.dtype, book.interval),
                books[n],
            )

        return tuple(payload(n) for n in range(len(books)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""
        return (*self.index.shape, self.entries.shape[3])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dense rows."""
        return self.entries.dtype

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Decoded rows: all slots, or those of `index`."""
        if index is None:
            rows = self._decode(self.index, self.magnitude)
            return write_slots(rows, self.fresh.slots, self.fresh.rows)
        magnitude = None if self.magnitude is None else take_slots(self.magnitude, index)
        rows = self._decode(take_slots(self.index, index), magnitude)
        lists = index.shape[1] // self.index.shape[1]
        new = jnp.repeat(self.fresh.slots, lists, axis=1)
        same = index[..., None] == new[:, :, None]
        fresh = jnp.repeat(self.fresh.rows, lists, axis=1)
        fresh = take_slots(fresh, same.argmax(-1).astype(jnp.int32))
        return jnp.where(same.any(-1, keepdims=True), fresh, rows)

    def take(self, index: Int[Array, "B H N"]) -> CodebookPayload:
        """The payload whose slot n is this one's slot `index[..., n]`; entries stay."""
        done = self.encode_fresh(self.fresh.count > 0)
        moved = done._with(lambda x: take_slots(x, index))
        return dataclasses.replace(
            moved, fresh=Fresh.empty(moved.shape, moved.dtype, self.book.interval)
        )

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> CodebookPayload:
        """Keeps new rows as they are, token by token; every M tokens encodes those before.

        Slot number S is none.
        """

        def one(token: Array | int, payload: CodebookPayload) -> CodebookPayload:
            payload = payload.encode_fresh(payload.fresh.count == self.book.interval)
            own = (jax.lax.dynamic_index_in_dim(x, token, 2, False) for x in (slots, rows))
            fresh = payload.fresh.add(*own, self.index.shape[2])
            return dataclasses.replace(payload, fresh=fresh)

        tokens = rows.shape[2]
        return one(0, self) if tokens == 1 else jax.lax.fori_loop(0, tokens, one, self)

    def encode_fresh(self, due: Bool[Array, ""]) -> CodebookPayload:
        """Where it is due, encodes the new rows, token by token and in a token head by head.

        A row takes the entry with the highest cosine if that is above theta. Else it becomes an
        entry, or without room goes to the nearest one still.
        """
        # A loop of no round leaves entries where they are; a conditional's result would be a copy.
        _, payload = jax.lax.while_loop(
            lambda carry: carry[0], lambda carry: (~carry[0], carry[1]._encoded()), (due, self)
        )
        return payload

    def _encoded(self) -> CodebookPayload:
        batch, lists, tokens, head_dim = self.fresh.rows.shape
        slots, copies = self.fresh.slots, self.book.copies
        heads = lists // copies
        stored = slots < self.index.shape[2]
        stored = stored.reshape(batch, heads, copies, tokens).any(2)
        vectors = jnp.moveaxis(self.fresh.rows[:, ::copies], 1, 2).reshape(batch, -1, head_dim)
        index, entries, count, overflow = self._add(
            vectors, jnp.moveaxis(stored, 1, 2).reshape(batch, -1)
        )
        index = jnp.moveaxis(index.reshape(batch, tokens, heads), 1, 2)
        index = jnp.repeat(index, copies, axis=1)
        magnitude = self.magnitude
        if magnitude is not None:
            magnitude = write_slots(magnitude, slots, directions(self.fresh.rows)[1])
        return dataclasses.replace(
            self,
            entries=entries,
            index=write_slots(self.index, slots, index),
            magnitude=magnitude,
            count=count,
            overflow=overflow,
            fresh=Fresh.empty(self.shape, self.dtype, self.book.interval),
        )

    def fill(self, rows: Float[Array, "B H S D"]) -> CodebookPayload:
        """A new book for all slots, in the order of the slots."""
        slot = jax.lax.broadcasted_iota(jnp.int32, self.index.shape, 2)
        book = dataclasses.replace(self.book, copies=1)  # any two slots may differ
        rows = rows.astype(self.dtype)[None]
        (filled,) = self.encode(rows, slot, jnp.ones_like(slot, bool), (book,))
        return dataclasses.replace(filled, book=self.book)

    def open(self) -> OpenCodebook:
        """Decoded rows, for the time that a prompt is read."""
        return OpenCodebook(Dense(self.read()), self.book)

    def close(self, tail: Int[Array, ""]) -> CodebookPayload:
        """Itself: it is not open."""
        return self

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Decoded rows of `size` slots from `start` on."""
        index = start + jnp.arange(size, dtype=jnp.int32)
        return self.read(jnp.broadcast_to(index, (*self.index.shape[:2], size)))

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> CodebookPayload:
        """Sorts N slots from `start` on by `index`."""
        slot = jax.lax.broadcasted_iota(jnp.int32, self.index.shape, 2)
        return self.take(jax.lax.dynamic_update_slice_in_dim(slot, start + index, start, 2))

    def logits(
        self, q: Float[Array, "B H R D"], rotate: Rotation | None = None
    ) -> Float[Array, "B H R S"]:
        """Products of all keys, rotated or not, with q in float32."""
        keys = self.fresh.rows

        def compute(product: Product | None) -> Array:
            channels = None if rotate is None else rotate.channels
            stored = self.entries, self.index, self.magnitude
            return codebook_logits(q, *stored, product=product, channels=channels)

        if rotate is None:
            old = compute(None)
        else:
            slots = jnp.minimum(self.fresh.slots, self.index.shape[2] - 1)
            keys = rotate.rope.rotate(keys, take_slots(rotate.position, slots))
            old = rotate.logits(compute)
        put = jax.vmap(jax.vmap(lambda x, at, new: x.at[:, at].set(new, mode="drop")))
        return put(old, self.fresh.slots, products(q, keys))

    def mix(self, weights: Float[Array, "B H R S"]) -> Float[Array, "B H R D"]:
        """Weighted sums of all values in float32."""
        cut = jax.vmap(jax.vmap(lambda x, at: x.at[:, at].get(mode="fill", fill_value=0)))
        put = jax.vmap(jax.vmap(lambda x, at: x.at[:, at].set(0, mode="drop")))
        new = cut(weights, self.fresh.slots).astype(self.dtype)
        new = jnp.einsum(
            "bhrm,bhmd->bhrd", new, self.fresh.rows, preferred_element_type=jnp.float32
        )
        old = put(weights, self.fresh.slots)
        return new + codebook_mix(old, self.entries, self.index, self.magnitude)

    def pieces(self, values: CodebookPayload, seen: Seen) -> list[Piece]:
        """What a kernel attends to: what is encoded, and the new rows, these being the keys."""
        new = self.fresh.slots
        hide = jax.vmap(jax.vmap(lambda x, at: x.at[at].set(-jnp.inf, mode="drop")))
        k, v = (codebook_rows(References(x.entries, x.index, x.magnitude)) for x in (self, values))
        old = Piece(
            OPERATION, k, v, hide(seen.bias, new), seen.position, seen.turn, end=seen.used
        )  # fmt: skip
        there, at = new < self.index.shape[2], jnp.minimum(new, self.index.shape[2] - 1)
        bias, position = (take_slots(x, at) for x in (seen.bias, seen.position))
        turn = seen.turn
        if turn is not None:
            turn = turn._replace(position=take_slots(turn.position, at))
        k, v = (dense_rows(x.fresh.rows) for x in (self, values))
        bias = jnp.where(there, bias, -jnp.inf)
        return [old, Piece(OPERATION, k, v, bias, position, turn, slots=new)]

    def _with(self, change) -> CodebookPayload:
        """The payload with its per-slot arrays changed."""
        magnitude = None if self.magnitude is None else change(self.magnitude)
        return dataclasses.replace(self, index=change(self.index), magnitude=magnitude)

    def _decode(self, index: Array, magnitude: Array | None) -> Float[Array, "B K N D"]:
        flat = index.astype(jnp.int32).reshape(index.shape[0], 1, -1)
        rows = take_slots(self.entries, flat).reshape(*index.shape, -1)
        return rows if magnitude is None else rows * magnitude[..., None]

    def _add(self, vectors: Float[Array, "B M D"], valid: Bool[Array, "B M"]):
        """Entries for M vectors, one after the other: their index, entries, count, overflow."""
        entries, count = self.entries[:, 0], self.count
        nearest, cosine = nearest_entries(vectors, entries, count)
        units, norms = directions(vectors)
        mutual = jnp.einsum("bmd,bnd->bmn", units, units, precision="highest")
        mutual = jnp.minimum(mutual, 1.0)
        number, room = vectors.shape[1], self.book.entries

        def one_row(nearest, cosine, mutual, there, count):
            def step(carry, m):
                count, made = carry  # made: the entries of the vectors before, -1 = none
                among = jnp.where(made >= 0, mutual[m], -jnp.inf)
                best = jnp.where(among == among.max(), made, room).min()
                best = jnp.where(among.max() > cosine[m], best, nearest[m])
                alone = there[m] & ~(jnp.maximum(among.max(), cosine[m]) > self.book.theta)
                becomes = alone & (count < room)
                made = made.at[m].set(jnp.where(becomes, count, -1))
                index = jnp.where(becomes, count, jnp.where(there[m], best, 0))
                return (count + becomes.astype(jnp.int32), made), (index, alone & ~becomes)

            start = count, jnp.full(number, -1, jnp.int32)
            (count, made), (index, over) = jax.lax.scan(
                step, start, jnp.arange(number, dtype=jnp.int32)
            )
            return index, made, count, over.sum(dtype=jnp.int32)

        there = valid & (norms > 0)
        index, made, count, over = jax.vmap(one_row)(nearest, cosine, mutual, there, count)
        place = jnp.where(made >= 0, made, room)[:, None]
        entries = write_slots(self.entries, place, _stored(vectors, self.book)[:, None])
        return index, entries, count, self.overflow + over


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OpenCodebook(OpenRows):
    """The rows of a codebook while a prompt is read, decoded; `Codebook` encodes them at its end.

    Args:
      rows: of all slots.
      book: how the book is made (static).
    """

    book: Book = field(metadata={"static": True})

    def close(self, tail: Int[Array, ""]) -> CodebookPayload:
        """A new book for all slots, in the order of the slots."""
        empty = CodebookPayload.zeros(self.shape, self.dtype, self.book)
        return empty.fill(self.rows.read())


def _index_dtype(entries: int) -> type:
    return jnp.uint16 if entries <= 2**16 else jnp.uint32


def _stored(vectors: Float[Array, "... D"], book: Book) -> Float[Array, "... D"]:
    """What becomes of a vector as an entry."""
    return directions(vectors)[0] if book.magnitude else vectors.astype(jnp.float32)


def _sort(position: Array, head: Array, live: Array, number: Array) -> tuple[Array, ...]:
    """Positions, heads, numbers and what is live by position, then by head, then by number."""
    keys = (position, head, number, live)
    return jax.lax.sort(keys, dimension=1, num_keys=3)
