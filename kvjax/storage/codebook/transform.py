"""SpindleKV's codebook: keys and values as references to a few directions (arXiv 2507.06517)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag, check_number
from kvjax.compose.foreseen import frees_while_decoding, rewrites
from kvjax.protocol import Card, Extent, KVTransform, Needs, Stage, State
from kvjax.serialization import named
from kvjax.storage.codebook.payload import Book, CodebookPayload


@named("codebook")
@dataclass(frozen=True)
class Codebook(KVTransform):
    """Stores keys and values as references to a few directions, and their norms.

    A row has one book for its keys, without RoPE, and one for its values; all heads of a layer
    share them. At a prompt's end entries are chosen that cover the live vectors. Two vectors are
    neighbours if their cosine is above theta. In each round, the uncovered vector with the most
    uncovered neighbours, itself included, makes its direction an entry, and all of these refer to
    it. A vector is read as `entry · |x|`; a key is then rotated to its position.

    While decoding, a new vector refers to the nearest entry if their cosine is above theta, and
    becomes an entry otherwise. Where a book is full, vectors refer to the nearest entry and are
    counted in the payload's `overflow`. In a further turn, encoded vectors keep their entries and
    norms, and new ones are covered by existing and new entries. An entry without references is
    dropped when the row's next prompt ends, also if a method evicts while decoding. Attention
    multiplies with the book as it is, a block of slots at a time.

    Args:
      theta_key: threshold of the keys' cosines, 0.98 as in the paper.
      theta_value: threshold of the values' cosines, 0.95 as in the paper.
      capacity: most entries of each of a row's two books. A float is a share of the vectors that
        the cache has slots for. The default of 1.0 has room for all, as the paper has it; arrays
        are then larger than without a book, and only the bytes in use are fewer. Less makes them
        smaller, at the cost of vectors that find no entry near.
      interval: steps after which new tokens are encoded; until then they are kept as they came. 32
        is ours.
      magnitude: store norms. False: entries are vectors as they came, and are read unchanged for
        all vectors that refer to them.

    Raises:
      TypeError, ValueError: a threshold or a share outside (0, 1]; a capacity or an interval below
        1; in a chain, a method before that merges while decoding.

    Example:
      >>> import kvjax
      >>> tx = kvjax.chain(kvjax.SnapKV(budget=256), kvjax.Codebook(capacity=1024))
      >>> size = {"batch": 1, "kv_heads": 8, "head_dim": 64, "max_prompt": 2048, "max_new": 64}
      >>> cache = kvjax.init_cache(tx, **size, dtype="float32")
      >>> cache.kv.k.entries.shape, cache.kv.k.index.shape
      ((1, 1, 1280, 64), (1, 8, 320))

    References:
      Tang et al., SpindleKV: A Novel KV Cache Reduction Method Balancing Both Shallow and Deep
      Layers, arXiv 2507.06517, section 3.4.

    Deviations from the paper:
      In the paper every vector is within theta of its entry. With a smaller `capacity`, or behind a
      method that evicts while decoding, whose entries stay until the row's next prompt ends, a book
      may be full: further vectors are then read as another direction;
      `kvjax.evaluation.overflow_share` says what share they are. Degrees are those of the graph
      (equation 10), where Algorithm 1 sums similarities. New tokens are encoded every `interval`
      steps, one after the other: a vector without a near entry becomes an entry, which later ones
      may refer to. The paper covers the remaining vectors anew, as it does a prompt, and has no
      further turns.
    """

    theta_key: float = 0.98
    theta_value: float = 0.95
    capacity: int | float = 1.0
    interval: int = 32
    magnitude: bool = True

    stage: ClassVar[Stage] = Stage.REPRESENT
    card = Card(acts="prompt, every 32 tokens", paper="SpindleKV, arXiv 2507.06517", when="now")

    @property
    def needs(self) -> Needs:
        """Keys without rotation."""
        return Needs(unrotated_keys=True)

    def __post_init__(self):
        check_number("theta_key", self.theta_key, 0.0, 1.0)
        check_number("theta_value", self.theta_value, 0.0, 1.0)
        check_count("interval", self.interval, 1)
        check_flag("magnitude", self.magnitude)
        if isinstance(self.capacity, float | np.floating):
            check_number("capacity", self.capacity, 0.0, 1.0)
        else:
            check_count("capacity", self.capacity, 1)

    def in_chain(self, before: tuple[KVTransform, ...], after: tuple[KVTransform, ...]) -> Codebook:
        """Raises ValueError behind a part that merges slots while decoding."""
        for part in before:
            if frees_while_decoding(part) and rewrites(part, "flush", "step"):
                raise ValueError(
                    f"{self!r} stores references, and {part!r} merges slots while decoding, "
                    "which would make a new book at every step: merge at the prompt's end only"
                )
        return self

    def extent(self, extent: Extent) -> Extent:
        """Asks for a flush every `interval` steps, which encodes the new tokens."""
        return extent.every(self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, State]:
        """Makes payloads with empty books."""
        shape, dtype = cache.k.shape, cache.k.dtype
        k, v = (
            CodebookPayload.zeros(shape, dtype, self._book(theta, cache))
            for theta in (self.theta_key, self.theta_value)
        )
        return cache.replace(k=k, v=v), ()

    def _book(self, theta: float, cache: KVCache) -> Book:
        """Makes the options of one of a row's two books."""
        entries, lists, copies = self.capacity, cache.shape[1], cache.unfolded
        # The most vectors that a row keeps, with copies in several lists counted once.
        vectors = min(lists * cache.capacity, lists // copies * cache.max_tokens)
        if not isinstance(entries, int | np.integer):
            entries = max(int(entries * vectors), 1)
        return Book(
            theta, int(entries), self.magnitude, self.interval, copies, vectors, heads=cache.heads
        )
