"""Holds what a model has read and written so far: caches that are kept between calls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, layer_caches
from kvjax.attention.occupancy import Occupancy, occupancy
from kvjax.attention.parts import placed
from kvjax.attention.rows import copied, take_rows
from kvjax.cache.nbytes import nbytes
from kvjax.compose.bind import bind
from kvjax.devices import put, put_by_rows
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.new_caches import CacheSize
from kvjax.protocol import Full, KVTransform


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Context:
    """The caches of a model's layers after some turns, and what the next turn needs.

    It is a pytree, from `kvjax.read` or `Generation.context`. It is never changed: a call that goes
    on from it returns a new one.

    Axis letters: B rows, V vocabulary.

    Args:
      caches: the cache of each layer.
      logits: logits after each row's newest token.
      seen: which tokens each row has read or written, for a repetition penalty.
      length: tokens of each row so far, which is also the next position.
      prompt_tokens: how many of them were read; `max_prompt` at most.
      new_tokens: how many of them the model wrote; `max_new` at most.
      waiting: decode steps since the last flush of the caches (see `kvjax.flush`).
      transform: how the caches are compressed (static).
      layers: the transform bound to each layer (static).
      size: the sizes that the caches were made for (static).
      windows: sliding window of each layer, as the model says; empty: no layer has one (static).
      fingerprint: fingerprint of the model; no other model can go on from the context (static).
        None only within a call of `generate` that does not keep the context.
    """

    caches: tuple[Cache, ...]
    logits: Float[Array, "B V"]
    seen: Bool[Array, "B V"]
    length: Int[Array, " B"]
    prompt_tokens: Int[Array, " B"]
    new_tokens: Int[Array, " B"]
    waiting: Int[Array, ""]
    transform: KVTransform = field(metadata={"static": True})
    layers: tuple[KVTransform, ...] = field(metadata={"static": True})
    size: CacheSize = field(metadata={"static": True})
    windows: tuple[int | None, ...] = field(metadata={"static": True})
    fingerprint: Fingerprint | None = field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        """Shows what the context was made for, and not the numbers that it holds."""
        return (
            f"Context(transform={self.transform!r}, rows={self.rows}, "
            f"max_prompt={self.max_prompt}, max_new={self.max_new}, layers={len(self.layers)})"
        )

    rows = property(lambda self: self.size.batch)
    max_prompt = property(lambda self: self.size.max_prompt)
    max_new = property(lambda self: self.size.max_new)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return nbytes(self.caches)

    @property
    def occupancy(self) -> Occupancy:
        """Slots and bytes of all caches that hold something, and those that are room for more."""
        return occupancy(self.caches)

    @property
    def full_nbytes(self) -> int:
        """Bytes that `Full` would take for as many tokens as this context is made for.

        Layers with windows are rings there too.
        """
        full_layers = bind(Full(), len(self.layers), self.windows, self.size.max_tokens)
        return sum(
            count * nbytes(jax.eval_shape(lambda layer=layer: self.size.cache(layer, 0)))
            for layer, count in Counter(full_layers).items()
        )

    @property
    def dropped(self) -> int:
        """Tokens that found no free slot and were lost, summed over layers, rows and lists."""
        return sum(int(part.kv.dropped.sum()) for part in layer_caches(self.caches))

    def repeat(self, rows: int) -> Context:
        """Repeats the one row of this context `rows` times, for many questions about one document.

        Only what the caches hold is copied.

        Raises:
          ValueError: there is more than one row.
        """
        if self.rows != 1:
            raise ValueError(f"only a context of one row can be repeated, got {self.rows} rows")
        return self.take([0] * rows)

    def take(self, rows: Sequence[int]) -> Context:
        """Returns the context of some rows, each as often as it is named, in memory of their own.

        Args:
          rows: the row that each new row is copied from.

        Raises:
          TypeError, ValueError: as `kvjax.take_rows`.
        """
        caches, index = take_rows(self.caches, rows), np.asarray(rows)
        by_row = {
            name: getattr(self, name)[index]
            for name in ("logits", "seen", "length", "prompt_tokens", "new_tokens")
        }
        size = self.size._replace(batch=len(rows))
        # `+` makes another array, since a call may donate those of the context that results.
        taken = dataclasses.replace(self, caches=caches, size=size, waiting=+self.waiting, **by_row)
        return taken.placed()

    def copy(self) -> Context:
        """Copies all arrays, so that a call may donate those of the copy."""
        return jax.tree.map(copied, self)

    def placed(self) -> Context:
        """Puts the context on the mesh that its caches were made for, if there is one."""
        mesh = self.size.mesh
        if mesh is None:
            return self
        counts = ("length", "prompt_tokens", "new_tokens", "waiting")
        arrays = {name: put(getattr(self, name), mesh) for name in counts}
        arrays |= {name: put_by_rows(getattr(self, name), mesh) for name in ("logits", "seen")}
        return dataclasses.replace(self, caches=tuple(map(placed, self.caches)), **arrays)
