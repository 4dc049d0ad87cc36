"""Keys or values as references to a codebook, read by attention as they are (arXiv 2507.06517)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from kvjax.cache.payload import Moves, Slots, of_rows, take_slots, write_slots
from kvjax.devices import all_heads, own_heads
from kvjax.storage.encoded_attention import EncodedPayload
from pallas_kernels import codebook_logits, codebook_mix, greedy_cover, nearest_entries
from pallas_kernels.attention.forms import Rows, codebook_rows
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.formats.codebook import References
from pallas_kernels.grouping.nearest_entries import directions


@dataclass(frozen=True)
class Book:
    """How a codebook is made.

    Args:
      theta: a vector is near an entry where their cosine is above it.
      entries: E, the most that a row has.
      magnitude: entries are directions, and a vector keeps its norm; False: entries are the vectors
        that they were made of, and are read for others without a change.
      interval: M, new tokens that are kept as they came until they are encoded together.
      copies: lists of slots that hold the same new tokens (`KVCache.unfolded`).
      vectors: the most different vectors that a row has at a prompt's end; None: as many as slots.
        The memory of the cover grows with their square.
      heads: as of `KVCache`; None: all lists of a row are on one device.
    """

    theta: float
    entries: int
    magnitude: bool
    interval: int = 1
    copies: int = 1
    vectors: int | None = None
    heads: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodebookPayload(EncodedPayload):
    """Vectors as an entry of their row's book and a norm: `entries[index] * magnitude`.

    A new vector is an entry of its own, as it came and with magnitude 1, until it is encoded. Those
    are the last N = M · H / copies entries: of token t and head h, number `t * (H / copies) + h`.
    Where heads are divided among devices, each has the whole book, and the references of its own.

    Args:
      entries: E directions that all heads of a row share, then N places of new vectors.
      index: the entry of each slot; 16 bits where they suffice.
      magnitude: the norm of each slot; None where entries are read as they are.
      count: entries so far, without new vectors.
      overflow: vectors that found no entry near enough and no room, since the row's last prompt,
        at whose end it is encoded anew. A row's new vectors are counted once per KV head.
      waiting: tokens whose vectors are not encoded yet.
      book: how it is made (static).
    """

    operation: ClassVar[str] = "codebook_attention"
    recent: ClassVar[None] = None  # new vectors are among the entries

    entries: Float[Array, "B 1 E+N D"]
    index: UInt[Array, "B H S"]
    magnitude: Float[Array, "B H S"] | None
    count: Int[Array, " B"]
    overflow: Int[Array, " B"]
    waiting: Int[Array, " B"]
    book: Book = field(metadata={"static": True})

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], dtype: DTypeLike, book: Book
    ) -> CodebookPayload:
        """A payload of zeros, with an empty book."""
        batch, lists, slots, head_dim = shape
        entries = book.entries + book.interval * (lists // book.copies)
        return cls(
            jnp.zeros((batch, 1, entries, head_dim), dtype),
            jnp.zeros((batch, lists, slots), "uint16" if entries <= 2**16 else "uint32"),
            jnp.zeros((batch, lists, slots), dtype) if book.magnitude else None,
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            book,
        )

    shape = property(lambda self: (*self.index.shape, self.entries.shape[3]))
    dtype = property(lambda self: self.entries.dtype)
    room = property(lambda self: self.book.interval - self.waiting)
    _references = property(lambda self: References(self.entries, self.index, self.magnitude))

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Decoded rows: all slots, or those of `index`."""
        part = self if index is None else self._with(lambda x: take_slots(x, index))
        flat = part.index.astype(jnp.int32).reshape(len(part.index), 1, -1)
        rows = take_slots(self.entries, flat).reshape(*part.index.shape, -1)
        if part.magnitude is not None:
            rows = rows * part.magnitude[..., None]
        return rows

    def write(
        self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]
    ) -> CodebookPayload:
        """Replaces a few slots (slot number S writes nothing), whose rows stay as they are.

        Where None, a new book for all slots, in the order of the slots.
        """
        if slots is not None:
            return self._write_new(slots, rows)
        slot = jax.lax.broadcasted_iota(jnp.int32, self.index.shape, 2)
        # Any two slots may differ, also those of lists that get the same new tokens.
        book = dataclasses.replace(self.book, copies=1, vectors=None)
        alone, rows = dataclasses.replace(self, book=book), rows.astype(self.dtype)[None]
        (new,) = make_books((alone,), rows, slot, jnp.ones_like(slot, bool))
        return dataclasses.replace(new, book=self.book)

    def flush(self, steps: int, moves: Moves | None = None) -> CodebookPayload:
        """Moves rows among slots, then encodes the new rows where room is needed.

        They are encoded token by token, and in a token head by head. A row takes the entry with the
        highest cosine if that is above theta. Else it becomes an entry, or goes to the nearest one
        where there is no room.
        """
        payload = self
        if moves is not None:
            source, slots = moves
            payload = self._with(lambda x: write_slots(x, slots, take_slots(x, source)))
        return payload._encode_new(payload.room < steps) if steps else payload

    def encode(
        self, values: CodebookPayload, k: Array, v: Array, slots: Slots
    ) -> tuple[CodebookPayload, CodebookPayload]:
        """New books of all that is live in `slots.rows`."""
        live = slots.live & slots.rows[:, None, None]
        new = make_books((self, values), jnp.stack([k, v]), slots.position, live)
        return of_rows(slots.rows, new, (self, values))

    def _write_new(
        self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]
    ) -> CodebookPayload:
        """T tokens more; one that no list stores takes no place."""
        copies, (batch, lists, tokens) = self.book.copies, slots.shape
        stored = (slots < self.index.shape[2]).any(1)
        place = self.waiting[:, None] + jnp.cumsum(stored, axis=1, dtype=jnp.int32) - 1
        # A place beyond the last one writes nothing.
        place = jnp.where(stored, place, self.book.interval)[:, None]
        heads = (self.book.heads or lists) // copies
        rows = all_heads(rows[:, ::copies], heads)
        head = jax.lax.broadcasted_iota(jnp.int32, (batch, heads, tokens), 1)
        entry = self.book.entries + place * heads + head
        entries = write_slots(
            self.entries,
            entry.reshape(batch, 1, -1),
            rows.reshape(batch, 1, -1, rows.shape[3]),
        )
        entry = own_heads(entry, lists // copies)
        magnitude = self.magnitude
        if magnitude is not None:
            magnitude = write_slots(magnitude, slots, jnp.ones(slots.shape))
        return dataclasses.replace(
            self,
            entries=entries,
            index=write_slots(self.index, slots, jnp.repeat(entry, copies, axis=1)),
            magnitude=magnitude,
            waiting=self.waiting + stored.sum(1, dtype=jnp.int32),
        )

    def _encode_new(self, due: Bool[Array, " B"]) -> CodebookPayload:
        """The new vectors encoded in the order in which they came, in the rows that are due."""
        vectors, index_lists = self.entries[:, 0, self.book.entries :], self.index.shape[1]
        new = self.index.astype(jnp.int32) - self.book.entries
        waits = (new >= 0) & due[:, None, None]
        number = vectors.shape[1]
        # What no slot refers to any more is not encoded.
        place = jnp.where(waits, new, number).reshape(len(new), 1, -1)
        there = write_slots(
            jnp.zeros((len(new), 1, number), bool), place, jnp.ones(place.shape, bool)
        )
        devices = (self.book.heads or index_lists) // index_lists
        payload, index = self._add(vectors, all_heads(there, devices).any(1))

        def of_slots(x: Array, old: Array) -> Array:
            own = take_slots(x[:, None], jnp.minimum(place, number - 1)).reshape(old.shape)
            return jnp.where(waits, own.astype(old.dtype), old)

        magnitude = self.magnitude
        if magnitude is not None:
            magnitude = of_slots(directions(vectors)[1], magnitude)
        waiting = jnp.where(due, 0, self.waiting)
        index = of_slots(index, self.index)
        return dataclasses.replace(payload, index=index, magnitude=magnitude, waiting=waiting)

    def _rows(self) -> Rows:
        return codebook_rows(self._references)

    def _logits(self, q: Float[Array, "B H R D"], turn: Turn | None) -> Float[Array, "B H R S"]:
        rotated = {} if turn is None else {"product": turn.product, "channels": turn.channels}
        return codebook_logits(q, *self._references, **rotated)

    def _mix(
        self, weights: Float[Array, "B H R S"], live: Bool[Array, "B H S"]
    ) -> Float[Array, "B H R D"]:
        return codebook_mix(weights, *self._references, live=live)

    def _with(self, change: Callable[[Array], Array]) -> CodebookPayload:
        """The payload with its per-slot arrays changed."""
        magnitude = None if self.magnitude is None else change(self.magnitude)
        return dataclasses.replace(self, index=change(self.index), magnitude=magnitude)

    def _add(
        self, vectors: Float[Array, "B M D"], valid: Bool[Array, "B M"]
    ) -> tuple[CodebookPayload, Int[Array, "B M"]]:
        """With entries for M vectors, one after the other, and the entry of each."""
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
        place = jnp.where(made >= 0, made, self.entries.shape[2])[:, None]
        stored = units if self.book.magnitude else vectors
        entries = write_slots(self.entries, place, stored[:, None])
        overflow = self.overflow + over
        return dataclasses.replace(self, entries=entries, count=count, overflow=overflow), index


def make_books(
    payloads: tuple[CodebookPayload, ...],
    rows: Float[Array, "P B H S D"],
    position: Int[Array, "B H S"],
    live: Bool[Array, "B H S"],
) -> tuple[CodebookPayload, ...]:
    """P payloads with new books for their live rows: see `pallas_kernels.greedy_cover`.

    Copies of a token's vector under several lists of a KV head are one vertex, which weighs as
    many. Of equals, the lowest position comes first, then the lowest head. All covers are rows of
    one, made one after the other, so that books must have one size. Where heads are divided among
    devices, each gets the vectors of all of them, and makes the whole books.
    """
    book, own = payloads[0].book, rows.shape[2]
    rows = all_heads(rows, book.heads, axis=2)
    position, live = (all_heads(x, book.heads) for x in (position, live))
    _, batch, lists, slots, _ = rows.shape
    size = lists * slots
    room = size if book.vectors is None else min(size, book.vectors)
    head = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1) // book.copies
    position = jnp.where(live, position, jnp.iinfo(jnp.int32).max)
    position, head, alive = (x.reshape(batch, size) for x in (position, head, live))
    number = jax.lax.broadcasted_iota(jnp.int32, (batch, size), 1)
    position, head, order, alive = jax.lax.sort(
        (position, head, number, alive), dimension=1, num_keys=3
    )
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
        return jnp.concatenate([x] * len(payloads))

    source = of_all(of_vertices(order, first & alive))
    weights = of_all(of_vertices(alive.astype(jnp.int32), alive))
    theta = jnp.repeat(jnp.array([x.book.theta for x in payloads], jnp.float32), batch)
    vectors = take_slots(rows.reshape(len(source), 1, size, -1), source[:, None])[:, 0]
    cover = greedy_cover(vectors, weights > 0, weights, theta=theta, capacity=book.entries)
    index = jnp.take_along_axis(cover.index, of_all(jnp.clip(vertex, 0, room - 1)), axis=1)
    put = jax.vmap(lambda at, x: jnp.zeros_like(x).at[at].set(x))
    index = put(of_all(order), jnp.where(of_all(alive), index, 0))
    made = jnp.arange(book.entries, dtype=jnp.int32)[None] < cover.count[:, None]
    stored, norms = directions(rows) if book.magnitude else (rows.astype(jnp.float32), None)
    center = jnp.take_along_axis(source, jnp.minimum(cover.centers, room - 1), axis=1)[:, None]
    entries = take_slots(stored.reshape(len(source), 1, size, -1), center)
    entries = jnp.where(made[:, None, :, None], entries, 0)
    new = payloads[0].entries.shape[2] - book.entries
    entries = jnp.pad(entries, ((0, 0), (0, 0), (0, new), (0, 0)))

    def payload(n: int, old: CodebookPayload) -> CodebookPayload:
        part, magnitude = slice(n * batch, (n + 1) * batch), None
        if book.magnitude:
            magnitude = own_heads(jnp.where(live, norms[n], 0.0), own).astype(old.dtype)
        references = own_heads(index[part].reshape(batch, lists, slots), own)
        return dataclasses.replace(
            old,
            entries=entries[part].astype(old.dtype),
            index=references.astype(old.index.dtype),
            magnitude=magnitude,
            count=cover.count[part],
            overflow=cover.overflow[part],
            waiting=jnp.zeros_like(old.waiting),
        )

    return tuple(payload(n, old) for n, old in enumerate(payloads))
