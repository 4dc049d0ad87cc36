"""The probe of KVzip: an instruction, and the document once more, in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.record import Record
from kvjax.cache.slots import KVCache
from kvjax.protocol import Asking, Look, Probe
from kvjax.transforms.document_budget import Received

# Tokens of a repetition whose queries are kept. Of six needles in 1,024 tokens, Qwen2.5-Coder-0.5B
# finds six with a twentieth and a fit to the queries of half of the tokens, as to those of all;
# without the lookups of the fit it is one.
SAMPLE = 2048
# The instruction of the authors' code, in which the end of a chat message follows. Here it is two
# line ends, or before further pieces nothing, since a document need not be in a chat.
FIRST = "\n\nRepeat the previous context exactly.\n\n"
FURTHER = "\n\nRepeat the part of the previous context exactly, starting with"
OVERLAP = 8  # tokens of the piece before, after which a further piece is asked to begin
MULTIPLE = 8  # lengths of pieces are multiples of it, so that few are compiled
LEAST = 32  # tokens of the shortest piece by which a document is repeated


@dataclass(frozen=True)
class Repetition(Received):
    """Repeats a document, in pieces if it is long, and notes what its tokens receive.

    Args:
      piece: tokens of a piece at most; 2,048, where the authors' code has 2,000. Pieces are shorter
        where the model has fewer positions behind the document.
      queries: whether the record has a `QuerySample` of the repetition too: `"query"`, and by row
        `"position"` and `"count"`.
    """

    piece: int = 2048
    queries: bool = False

    instructions: ClassVar[tuple[str, ...]] = (FIRST, FURTHER)

    def union(self, other: Probe) -> Probe:
        """Returns the repetition that notes queries if either does."""
        if isinstance(other, Repetition) and other.piece == self.piece:
            return self if self.queries else other
        return super().union(other)

    def pieces(
        self, documents: Sequence[Sequence[int]], width: int, asking: Asking
    ) -> Int[np.ndarray, "B P R"]:
        """Cuts documents into pieces, each with the instruction before it.

        Before a further piece, the instruction ends with the last 8 tokens of the piece before.

        Raises:
          ValueError: the model's positions leave no room for a piece of 32 tokens.
        """
        asked = [()] * 2 if asking.encode is None else map(asking.encode, self.instructions)
        first, further = map(tuple, asked)
        longest = max(len(first), len(further) + OVERLAP)
        piece = self._fitting(longest, asking)
        count = -(-width // piece)
        size = min(piece, width) + (longest if count > 1 else len(first))
        tokens = np.full((len(documents), count, -(-size // MULTIPLE) * MULTIPLE), -1, np.int32)
        for row, document in zip(tokens, documents, strict=True):
            for number, start in enumerate(range(0, len(document), piece)):
                before = (*further, *document[max(start - OVERLAP, 0) : start]) if number else first
                ids = [*before, *document[start : start + piece]]
                row[number, : len(ids)] = ids
        return tokens

    def _fitting(self, longest_instruction: int, asking: Asking) -> int:
        """Returns the tokens of a piece that fits behind the documents."""
        positions, least = asking.model.max_positions, min(LEAST, self.piece)
        if positions is None:
            return self.piece
        piece = min(self.piece, positions - asking.length - longest_instruction)
        if piece < least:
            raise ValueError(
                f"a prompt that is repeated may have {positions - longest_instruction - least} "
                f"tokens at most, so that the model's {positions} positions have room for the "
                f"instruction and a piece of it, got {asking.length}"
            )
        return piece

    def empty(self, cache: KVCache) -> Record:
        """Makes the record of a document that has not been repeated."""
        record = super().empty(cache)
        return QuerySample.empty(cache).put(record) if self.queries else record

    def look(self, record: Record, look: Look) -> Record:
        """Notes the largest probabilities, and the queries if they are wanted."""
        record = super().look(record, look)
        if self.queries:
            record = QuerySample.of(record).add(look.query, look.positions).put(record)
        return record


class QuerySample(NamedTuple):
    """Queries of each row's repetition: those of every n-th token.

    n is the smallest power of 2 for which they find room, so that between W / 2 and W are there if
    there have been as many tokens.

    Args:
      query: rotated, `[B, Q, W, D]`.
      position: their positions, -1 where there were fewer, `[B, W]`.
      count: tokens of the repetition so far, `[B]`.
    """

    query: Float[Array, "B Q W D"]
    position: Int[Array, "B W"]
    count: Int[Array, " B"]

    @classmethod
    def empty(cls, cache: KVCache) -> QuerySample:
        """Makes a sample without queries, for documents in this cache."""
        (batch, heads, _), size = cache.shape, min(SAMPLE, cache.max_prompt)
        shape = batch, heads * cache.group, size, cache.k.shape[3]
        position = jnp.full((batch, size), -1, jnp.int32)
        return cls(jnp.zeros(shape, cache.k.dtype), position, jnp.zeros(batch, jnp.int32))

    @classmethod
    def of(cls, record: Record) -> QuerySample:
        """Returns the sample in a record."""
        return cls(record.queries["query"], record.rows["position"], record.rows["count"])

    def put(self, record: Record) -> Record:
        """Returns the record with this sample."""
        rows = {"position": self.position, "count": self.count}
        return dataclasses.replace(record, queries={"query": self.query}, rows=rows)

    def add(self, q: Float[Array, "B Q T D"], positions: Int[Array, "B T"]) -> QuerySample:
        """Returns the sample after T more tokens, whatever calls they come in."""
        size = self.position.shape[1]
        so_far = jnp.cumsum(positions >= 0, axis=1, dtype=jnp.int32)
        count = self.count + so_far[:, -1]
        number = jnp.arange(size, dtype=jnp.int32)[None] * _every(count, size)[:, None]
        earlier = self.count[:, None]
        old = jnp.minimum(number // _every(self.count, size)[:, None], size - 1)
        new = jax.vmap(jnp.searchsorted)(so_far, number - earlier + 1)
        new = jnp.minimum(new, positions.shape[1] - 1).astype(jnp.int32)
        position = jnp.where(
            number < earlier,
            jnp.take_along_axis(self.position, old, axis=1),
            jnp.take_along_axis(positions, new, axis=1),
        )
        query = jnp.where(
            (number < earlier)[:, None, :, None],
            jnp.take_along_axis(self.query, old[:, None, :, None], axis=2),
            jnp.take_along_axis(q, new[:, None, :, None], axis=2).astype(self.query.dtype),
        )
        return QuerySample(query, jnp.where(number < count[:, None], position, -1), count)


def _every(count: Int[Array, " B"], size: int) -> Int[Array, " B"]:
    """Returns the n of every n-th token of so many: the smallest power of 2 that leaves `size`."""
    powers = jnp.arange(31 - size.bit_length(), dtype=jnp.int32)[None]  # size << power < 2^30
    return 1 << (size << powers < count[:, None]).sum(1, dtype=jnp.int32)
