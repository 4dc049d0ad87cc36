"""What a model has read and written so far: caches that are kept between calls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, layer_caches
from kvjax.attention.parts import placed
from kvjax.attention.rows import copied, take_rows
from kvjax.cache.slots import nbytes
from kvjax.compose.bind import bind
from kvjax.devices import put, put_rows
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.prompt_pass import CacheSize
from kvjax.protocol import Full, KVTransform


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Context:
    """The caches of a model's layers after some turns, and what the next turn needs.

    A pytree, from `kvjax.read` or `Generation.context`. It is never changed: a call that goes on
    from it returns a new one.

    Axis letters: B rows, V vocabulary.

    Args:
      caches: of each layer.
      logits: after each row's newest token.
      seen: the tokens that each row has read and written, for a repetition penalty.
      length: tokens of each row so far, which is the next position.
      prompt_tokens: those of them that were read, of `max_prompt` at most.
      new_tokens: those that the model wrote, of `max_new` at most.
      waiting: decode steps since the caches were flushed last (see `kvjax.flush`).
      transform: how the caches are compressed (static).
      layers: the same, bound to each layer (static).
      size: what the caches were made for (static).
      windows: of each layer, as the model says; empty: no layer has one (static).
      fingerprint: of the model, for which alone it serves (static); None only within a call of
        `generate` that does not keep it.
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
        """What it was made for, and not the numbers that it holds."""
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
    def full_nbytes(self) -> int:
        """Bytes that `Full` would take for as many tokens as this context is made for.

        Its layers with windows are rings too.
        """
        kinds = Counter(bind(Full(), len(self.layers), self.windows, self.size.max_tokens))
        return sum(
            count * nbytes(jax.eval_shape(lambda kind=kind: self.size.cache(kind, 0)))
            for kind, count in kinds.items()
        )

    @property
    def dropped(self) -> int:
        """Tokens that found no free slot and were lost, summed over layers, rows and lists."""
        return sum(int(part.kv.dropped.sum()) for part in layer_caches(self.caches))

    def repeat(self, rows: int) -> Context:
        """The one row of this context `rows` times: many questions about one document.

        Only what the caches hold is copied.

        Raises:
          ValueError: there is more than one row.
        """
        if self.rows != 1:
            raise ValueError(f"only a context of one row can be repeated, got {self.rows} rows")
        caches = take_rows(self.caches, [0] * rows)
        own = {
            name: jnp.repeat(getattr(self, name), rows, axis=0)
            for name in ("logits", "seen", "length", "prompt_tokens", "new_tokens")
        }
        size = self.size._replace(batch=rows)
        whole = dataclasses.replace(self, caches=caches, size=size, waiting=+self.waiting, **own)
        return whole.placed()

    def copy(self) -> Context:
        """The same in memory of its own."""
        return jax.tree.map(copied, self)

    def placed(self) -> Context:
        """The same on the mesh that its caches were made for; without one, as it is."""
        mesh = self.size.mesh
        if mesh is None:
            return self
        counts = ("length", "prompt_tokens", "new_tokens", "waiting")
        own = {name: put(getattr(self, name), mesh) for name in counts}
        own |= {name: put_rows(getattr(self, name), mesh) for name in ("logits", "seen")}
        return dataclasses.replace(self, caches=tuple(map(placed, self.caches)), **own)
