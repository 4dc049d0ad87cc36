"""Keys or values as references to a codebook, which attention reads directly (arXiv 2507.06517)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from kvjax.cache.payload import (
    Moves,
    OfPlaces,
    Slots,
    free_bytes,
    of_rows,
    resized,
    take_slots,
    to_places,
    write_slots,
)
from kvjax.devices import all_heads, own_heads
from kvjax.serialization import pytree_node, static_value
from kvjax.storage.encoded_attention import EncodedPayload
from pallas_kernels import codebook_logits, codebook_mix, greedy_cover, nearest_entries
from pallas_kernels.attention.forms import Rows, codebook_rows
from pallas_kernels.base.rotation import Turn
from pallas_kernels.base.varying import varying
from pallas_kernels.formats.codebook import References
from pallas_kernels.grouping.nearest_entries import directions


@static_value
@dataclass(frozen=True)
class Book:
    """Options of a codebook.

    Args:
      theta: a vector is near an entry if their cosine is above theta.
      entries: E, the largest number of entries of a row.
      magnitude: entries are directions, and a vector keeps its norm. False: entries are vectors,
        and are read unchanged for all vectors that refer to them.
      interval: M, new tokens that are kept as they came until they are encoded together.
      copies: number of lists of slots that hold the same new tokens (`KVCache.unfolded`).
      vectors: largest number of different vectors that a row has at a prompt's end; None: as many
        as slots. The memory of the cover grows with their square.
      heads: as in `KVCache`; None: all lists of a row are on one device.
    """

    theta: float
    entries: int
    magnitude: bool
    interval: int = 1
    copies: int = 1
    vectors: int | None = None
    heads: int | None = None


@pytree_node
@dataclass(frozen=True)
class CodebookPayload(EncodedPayload):
    """Vectors stored as an entry of their row's book and a norm: `entries[index] * magnitude`.

    Until it is encoded, a new vector is an entry of its own, as it came and with magnitude 1. These
    are the last N = M · H / copies entries; token t and head h have number `t * (H / copies) + h`
    among them. Where heads are divided among devices, each device has the whole book, and the
    references of its own heads.

    Args:
      entries: E directions that all heads of a row share, then N places of new vectors.
      index: entry of each slot; 16 bits where they suffice.
      magnitude: norm of each slot; None where entries are read as they are.
      count: number of entries so far, without new vectors.
      overflow: number of vectors that found no entry near enough, and no room for a new one, since
        the earliest prompt of the row of which anything remains. A vector counts once per KV head,
        and still counts when it is gone.
      waiting: number of tokens whose vectors are not encoded yet.
      book: options of the book (static).
    """

    operation: ClassVar[str] = "codebook_attention"
    recent: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]  # new vectors are among the entries

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
        """Makes a payload of zeros, with an empty book."""
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
    beside = property(lambda self: self.entries.shape[2])
    _heads = property(lambda self: (self.book.heads or self.index.shape[1]) // self.book.copies)
    _references = property(lambda self: References(self.entries, self.index, self.magnitude))

    @property
    def beside_taken(self) -> Int[Array, ""]:
        """Number of entries, or of all of them with the new vectors behind them."""
        waiting = self.waiting.max()
        new = self.book.entries + waiting * self._heads
        return jnp.where(waiting > 0, new, self.count.max())

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Decodes rows: all slots, or those of `index`."""
        part = self if index is None else self._with(lambda x: take_slots(x, index))
        flat = part.index.astype(jnp.int32).reshape(part.index.shape[0], 1, -1)
        rows = take_slots(self.entries, flat).reshape(*part.index.shape, -1)
        if part.magnitude is not None:
            rows = rows * part.magnitude[..., None]
        return rows

    def write(
        self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]
    ) -> CodebookPayload:
        """Writes new rows to a few slots (slot number S writes nothing), unencoded for now.

        If `slots` is None, makes a new book for the rows of all slots, in the order of the slots.
        """
        if slots is not None:
            return self._write_new(slots, rows)
        slot = jax.lax.broadcasted_iota(jnp.int32, self.index.shape, 2)
        # Lists that get the same new tokens may still differ in any slot: no copies are assumed.
        book = dataclasses.replace(self.book, copies=1, vectors=None)
        without_copies = dataclasses.replace(self, book=book)
        rows, kept = rows.astype(self.dtype)[None], jnp.full_like(slot, -1)
        (new,) = make_books((without_copies,), rows, slot, jnp.ones_like(slot, bool), (kept,))
        return dataclasses.replace(new, book=self.book)

    def flush(self, steps: int, moves: Moves | None = None) -> CodebookPayload:
        """Moves rows among slots, then encodes the new rows if room is needed.

        They are encoded token by token, and within a token head by head. A row refers to the entry
        with the highest cosine if that is above theta. Otherwise it becomes an entry, or refers to
        the nearest one without room for it.
        """
        payload = self
        if moves is not None:
            source, slots = moves
            payload = self._with(lambda x: write_slots(x, slots, take_slots(x, source)))
        return payload._encode_new(payload.room < steps) if steps else payload

    def encode(
        self, values: CodebookPayload, k: Array, v: Array, slots: Slots
    ) -> tuple[CodebookPayload, CodebookPayload]:
        """Makes books for the live vectors of `slots.rows`.

        Vectors that were encoded before the prompt keep their entries and norms. Entries without
        references are dropped.
        """
        live = slots.live & slots.rows[:, None, None]
        rows = jnp.stack([k, v])
        payloads = (self, values)
        kept = (payload._unchanged(x, slots) for payload, x in zip(payloads, rows, strict=True))
        new = make_books(payloads, rows, slots.position, live, tuple(kept))
        encoded_keys, encoded_values = of_rows(slots.rows, new, payloads)
        return encoded_keys, encoded_values

    def free_bytes(self, live: int) -> int:
        """Returns the bytes of free slots, of unused entries, and of places of new vectors.

        Where arrays are shapes, all entries are in use.
        """
        index = self.index.shape
        slots = free_bytes((self.index, self.magnitude), live, math.prod(index))
        taken = index[0] * self.book.entries
        if not isinstance(self.count, jax.ShapeDtypeStruct):
            taken = int(self.count.sum()) + self._heads * int(self.waiting.sum())
        return slots + free_bytes(self.entries, taken, math.prod(self.entries.shape[:3]))

    def resized(self, slots: int, beside: int) -> CodebookPayload:
        """Cuts or adds free slots, and entries behind those in use."""
        payload = self.map_slots(to_places, slots)
        return dataclasses.replace(payload, entries=resized(self.entries, beside))

    def map_slots(self, change: OfPlaces, slots: int) -> CodebookPayload:
        """Applies `change` to the references and norms."""
        return self._with(lambda x: change(x, 1, slots))

    def _entries_of(self, slots: Int[Array, "B H S"]) -> Int[Array, "B H S"]:
        """Returns the entries of slots (-1: none); -1 where a vector is not encoded yet."""
        entry = take_slots(self.index, jnp.maximum(slots, 0)).astype(jnp.int32)
        return jnp.where((slots >= 0) & (entry < self.book.entries), entry, -1)

    def _write_new(
        self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]
    ) -> CodebookPayload:
        """Adds T tokens as they came; a token that no list stores takes no place."""
        copies, (batch, lists, tokens) = self.book.copies, slots.shape
        stored = (slots < self.index.shape[2]).any(1)
        place = self.waiting[:, None] + jnp.cumsum(stored, axis=1, dtype=jnp.int32) - 1
        # A place beyond the last one writes nothing.
        place = jnp.where(stored, place, self.book.interval)[:, None]
        heads = self._heads
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
            magnitude = write_slots(magnitude, slots, jnp.ones(slots.shape, magnitude.dtype))
        return dataclasses.replace(
            self,
            entries=entries,
            index=write_slots(self.index, slots, jnp.repeat(entry, copies, axis=1)),
            magnitude=magnitude,
            waiting=self.waiting + stored.sum(1, dtype=jnp.int32),
        )

    def _encode_new(self, due: Bool[Array, " B"]) -> CodebookPayload:
        """Encodes the new vectors in the order in which they came, in the rows that are due."""
        vectors, index_lists = self.entries[:, 0, self.book.entries :], self.index.shape[1]
        new = self.index.astype(jnp.int32) - self.book.entries
        unencoded = (new >= 0) & due[:, None, None]
        number = vectors.shape[1]
        # Vectors that no slot refers to any more are not encoded.
        place = jnp.where(unencoded, new, number).reshape(new.shape[0], 1, -1)
        referred = write_slots(
            jnp.zeros((new.shape[0], 1, number), bool), place, jnp.ones(place.shape, bool)
        )
        devices = (self.book.heads or index_lists) // index_lists
        payload, index = self._add(vectors, all_heads(referred, devices).any(1))

        def update(slots: Array, of_vectors: Array) -> Array:
            updated = take_slots(of_vectors[:, None], jnp.minimum(place, number - 1))
            return jnp.where(unencoded, updated.reshape(slots.shape).astype(slots.dtype), slots)

        magnitude = self.magnitude
        if magnitude is not None:
            magnitude = update(magnitude, directions(vectors)[1])
        waiting = jnp.where(due, 0, self.waiting)
        index = update(self.index, index)
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
        """Applies `change` to the arrays that are per slot."""
        magnitude = None if self.magnitude is None else change(self.magnitude)
        return dataclasses.replace(self, index=change(self.index), magnitude=magnitude)

    def _add(
        self, vectors: Float[Array, "B M D"], valid: Bool[Array, "B M"]
    ) -> tuple[CodebookPayload, Int[Array, "B M"]]:
        """Adds entries for M vectors, one after the other; returns the entry of each too."""
        entries, count = self.entries[:, 0], self.count
        nearest, cosine = nearest_entries(vectors, entries, count)
        units, norms = directions(vectors)
        # Cosines among the vectors: a new entry can serve the vectors after it.
        mutual = jnp.einsum("bmd,bnd->bmn", units, units, precision="highest")
        mutual = jnp.minimum(mutual, 1.0)
        number, room = vectors.shape[1], self.book.entries

        def add_to_row(nearest, cosine, mutual, nonzero, count):
            def step(carry, m):
                count, new = carry  # new: entries that earlier vectors have become, -1 = none
                to_new = jnp.where(new >= 0, mutual[m], -jnp.inf)
                best = jnp.where(to_new == to_new.max(), new, room).min()
                best = jnp.where(to_new.max() > cosine[m], best, nearest[m])
                alone = nonzero[m] & ~(jnp.maximum(to_new.max(), cosine[m]) > self.book.theta)
                becomes = alone & (count < room)
                new = new.at[m].set(jnp.where(becomes, count, -1))
                index = jnp.where(becomes, count, jnp.where(nonzero[m], best, 0))
                return (count + becomes.astype(jnp.int32), new), (index, alone & ~becomes)

            start = count, jnp.full(number, -1, jnp.int32)
            start = varying(start, cosine, mutual, nonzero, count)
            (count, new), (index, over) = jax.lax.scan(
                step, start, jnp.arange(number, dtype=jnp.int32)
            )
            return index, new, count, over.sum(dtype=jnp.int32)

        nonzero = valid & (norms > 0)
        index, new, count, over = jax.vmap(add_to_row)(nearest, cosine, mutual, nonzero, count)
        place = jnp.where(new >= 0, new, self.entries.shape[2])[:, None]
        stored = units if self.book.magnitude else vectors
        entries = write_slots(self.entries, place, stored[:, None])
        overflow = self.overflow + over
        return dataclasses.replace(self, entries=entries, count=count, overflow=overflow), index


def make_books(
    payloads: tuple[CodebookPayload, ...],
    rows: Float[Array, "P B H S D"],
    position: Int[Array, "B H S"],
    live: Bool[Array, "B H S"],
    kept: tuple[Int[Array, "B H S"], ...],
) -> tuple[CodebookPayload, ...]:
    """Makes P payloads with books for their live rows: see `pallas_kernels.greedy_cover`.

    Kept vectors refer to the same entries as before, which come first in the new book. Vectors near
    enough to one of these entries refer to it too, and new entries cover the others. If several
    lists of a KV head hold copies of a token's vector, the copies are one vertex of the graph, with
    their number as its weight. Ties go to the lowest position, then the lowest head. The covers of
    all payloads and rows are computed as rows of one batch, so that books must have one size. Where
    heads are divided among devices, each device gets the vectors of all heads and makes the whole
    books.

    Args:
      kept: for each slot, the slot of its payload that had its row before; -1: the row is another.
    """
    book, lists_here = payloads[0].book, rows.shape[2]
    referred = jnp.stack([x._entries_of(slots) for x, slots in zip(payloads, kept, strict=True)])
    num_payloads, batch = len(payloads), rows.shape[1]

    def joined(x: Array) -> Array:
        """Reshapes `[P, B, H, ...]` to rows of one batch, with the heads of all devices."""
        x = all_heads(x, book.heads, axis=2)
        return x.reshape(num_payloads * batch, -1, *x.shape[4:])

    shape = num_payloads, *position.shape
    lists = all_heads(position, book.heads).shape[1]
    held = joined(referred)
    new = joined(jnp.broadcast_to(live, shape)) & (held < 0)
    size = new.shape[1]
    room = size if book.vectors is None else min(size, book.vectors)
    position = joined(jnp.broadcast_to(position, shape))
    number = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1)
    head = number // (size // lists) // book.copies
    position = jnp.where(new, position, jnp.iinfo(jnp.int32).max)
    position, head, order, new = jax.lax.sort(
        (position, head, number, new), dimension=1, num_keys=3
    )
    first = (position != jnp.roll(position, 1, 1)) | (head != jnp.roll(head, 1, 1))
    first |= number == 0
    if book.copies == 1:
        first = jnp.ones_like(first)
    # Copies follow each other in this order, and have the number of the first one's vertex.
    vertex = (first & new).cumsum(1, dtype=jnp.int32) - 1

    def sum_by_vertex(x: Array, chosen: Array) -> Array:
        zeros = jnp.zeros((x.shape[0], room), x.dtype)
        add = jax.vmap(lambda zeros, vertex, x: zeros.at[vertex].add(x, mode="drop"))
        return add(zeros, jnp.where(chosen, vertex, room), x)

    source = sum_by_vertex(order, first & new)
    weights = sum_by_vertex(new.astype(jnp.int32), new)
    stored, norms = directions(rows) if book.magnitude else (rows.astype(jnp.float32), None)
    vectors, stored = (take_slots(joined(x)[:, None], source[:, None]) for x in (rows, stored))
    theta = jnp.repeat(jnp.array([x.book.theta for x in payloads], jnp.float32), batch)
    entries = jnp.concatenate([x.entries[:, 0, : book.entries] for x in payloads])
    entries, held, old_count = _without_unused(entries, held)
    entries, index, count, overflow = _with_cover(
        entries, old_count, vectors[:, 0], stored, weights, theta
    )
    # From vertices to sorted vectors, and from there to slots.
    index = jnp.take_along_axis(index, jnp.clip(vertex, 0, room - 1), axis=1)
    scatter = jax.vmap(lambda slot, x: jnp.zeros_like(x).at[slot].set(x))
    index = scatter(order, jnp.where(new, index, 0))
    index = jnp.where(held >= 0, held, index)
    entries = jnp.pad(entries, ((0, 0), (0, payloads[0].entries.shape[2] - book.entries), (0, 0)))

    def payload(n: int, old: CodebookPayload) -> CodebookPayload:
        part, magnitude = slice(n * batch, (n + 1) * batch), None
        if old.magnitude is not None and norms is not None:
            magnitude = jnp.where(live, norms[n], 0.0).astype(old.dtype)
            stays = take_slots(old.magnitude, jnp.maximum(kept[n], 0))
            magnitude = jnp.where(referred[n] >= 0, stays, magnitude)
        references = own_heads(index[part].reshape(batch, lists, -1), lists_here)
        return dataclasses.replace(
            old,
            entries=entries[part, None].astype(old.dtype),
            index=references.astype(old.index.dtype),
            magnitude=magnitude,
            count=count[part],
            # Earlier overflow counts only while something of earlier prompts remains.
            overflow=overflow[part] + jnp.where(old_count[part] > 0, old.overflow, 0),
            waiting=jnp.zeros_like(old.waiting),
        )

    return tuple(payload(n, old) for n, old in enumerate(payloads))


def _without_unused(
    entries: Float[Array, "B E D"], held: Int[Array, "B N"]
) -> tuple[Float[Array, "B E D"], Int[Array, "B N"], Int[Array, " B"]]:
    """Drops the entries that no reference in `held` (-1: none) points at, and closes the gaps.

    Returns the entries, the references to them, and the number of entries.
    """

    def compact(entries: Array, held: Array) -> tuple[Array, Array, Array]:
        size = len(entries)
        used = jnp.zeros(size, bool).at[jnp.where(held < 0, size, held)].set(True, mode="drop")
        place = jnp.cumsum(used, dtype=jnp.int32) - 1
        moved = jnp.zeros_like(entries).at[jnp.where(used, place, size)].set(entries, mode="drop")
        held = jnp.where(held < 0, -1, place[jnp.maximum(held, 0)])
        return moved, held, used.sum(dtype=jnp.int32)

    return jax.vmap(compact)(entries, held)


def _with_cover(
    entries: Float[Array, "B E D"],
    count: Int[Array, " B"],
    vectors: Float[Array, "B N D"],
    stored: Float[Array, "B 1 N D"],
    weights: Int[Array, "B N"],
    theta: Float[Array, " B"],
) -> tuple[Float[Array, "B E D"], Int[Array, "B N"], Int[Array, " B"], Int[Array, " B"]]:
    """Adds entries that cover the vectors which no existing entry is near to.

    Returns the entries, each vector's entry, the number of entries, and the number of vectors that
    found neither a near entry nor room for a new one.

    Args:
      count: number of existing entries.
      stored: vectors in the form in which they become entries.
      weights: weights of the vectors; 0: there is no vector.
    """
    members, capacity = weights > 0, entries.shape[1]
    has_entries = (count > 0).any()

    def nearest(entries: Array, count: Array) -> tuple[Array, Array]:
        return nearest_entries(vectors, entries, count)

    def no_entry(entries: Array, count: Array) -> tuple[Array, Array]:
        cosine = jnp.full(weights.shape, -jnp.inf, jnp.float32)
        return varying((jnp.zeros(weights.shape, jnp.int32), cosine), vectors, entries, count)

    # The search is skipped where all books are empty, as at the end of a first prompt.
    index, cosine = jax.lax.cond(has_entries, nearest, no_entry, entries, count)
    near = cosine > theta[:, None]
    cover = greedy_cover(vectors, members & ~near, weights, theta=theta, capacity=capacity)
    added = jnp.minimum(cover.count, capacity - count)
    number = jax.lax.broadcasted_iota(jnp.int32, cover.centers.shape, 1)
    place = jnp.where(number < added[:, None], count[:, None] + number, capacity)
    center = take_slots(stored, jnp.minimum(cover.centers, stored.shape[2] - 1)[:, None])
    entries = write_slots(entries[:, None], place[:, None], center)[:, 0]
    index = jnp.where(near, index, count[:, None] + cover.index)
    # The cover does not know of the existing entries: its last ones may find no room beside them.
    # Their vectors then refer to the nearest entry.
    beyond = members & ~near & (cover.beyond | (cover.index >= added[:, None]))
    total = count + added
    nearest_index, _ = jax.lax.cond(has_entries, nearest, no_entry, entries, total)
    index = jnp.where(beyond & has_entries, nearest_index, index)
    beyond &= (vectors != 0).any(-1)
    return entries, index, total, beyond.sum(1, dtype=jnp.int32)
