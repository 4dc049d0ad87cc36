"""Holds what a model has read and written so far: caches that are kept between calls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, RestSizes
from kvjax.attention.occupancy import Occupancy, occupancy
from kvjax.attention.parts import divided_among, placed
from kvjax.attention.resting import LayerSizes, rest, rounded, sizes_at_rest, sizes_of, wake
from kvjax.attention.rows import copied, take_rows
from kvjax.cache.nbytes import nbytes
from kvjax.checks import check_count
from kvjax.compose.bind import bind
from kvjax.compose.ring import Ring
from kvjax.devices import automatic, on_one_device, put, put_by_rows
from kvjax.generation.compiler import Compiler
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.new_caches import CacheSize
from kvjax.protocol import Full, KVTransform
from pallas_kernels.base.annotations import NoneElsewhere


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Context:
    """The caches of a model's layers after some turns, and what the next turn needs.

    It is a pytree, from `kvjax.read` or `Generation.context`. It is never changed: a call that goes
    on from it returns a new one.

    A context is at rest or awake. At rest it holds the tokens that it keeps, and no room for tokens
    that are still to come: `kvjax.read`, `kvjax.load_context` and `at_rest` return contexts at
    rest, and files hold them. `kvjax.generate` works on a copy with room. The context of its result
    is awake, so that the next turn of a conversation can take it over (`donate=True`) as it is.

    Axis letters: B rows, V vocabulary.

    Args:
      held: the cache of each layer, at rest or awake. `attend` takes no cache at rest: `caches`
        has them with room.
      logits: logits after each row's newest token.
      seen: which tokens each row has read or written, for a repetition penalty.
      length: tokens of each row so far, which is also the next position.
      prompt_tokens: how many of these tokens were read; `max_prompt` at most.
      new_tokens: how many of these tokens the model wrote; `max_new` at most.
      waiting: decode steps since the last flush of the caches (see `kvjax.flush`).
      transform: how the caches are compressed (static).
      layers: the transform bound to each layer (static).
      size: the sizes that the caches were made for (static).
      windows: sliding window of each layer, as the model says; empty: no layer has one (static).
      awake_sizes: slots of each layer's cache when it is awake (static); None: it is awake.
      fingerprint: fingerprint of the model; no other model can go on from the context (static).
        None only within a call of `generate` that does not keep the context.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> context = kvjax.read(model, [[1, 2, 3]], transform=kvjax.Full(), max_new=4)
      >>> context.length.tolist(), context.nbytes < context.awake_nbytes
      ([3], True)
    """

    held: tuple[Cache, ...]
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
    awake_sizes: tuple[LayerSizes, ...] | None = field(default=None, metadata={"static": True})
    fingerprint: Fingerprint | NoneElsewhere = field(default=None, metadata={"static": True})

    def check_there(self) -> None:
        """Raises ValueError if a call with `donate=True` has taken the context's memory over."""
        arrays = (x for x in jax.tree.leaves(self.held) if not isinstance(x, jax.core.Tracer))
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            raise ValueError("the context has been given away with donate=True: use the result's")

    def __repr__(self) -> str:
        """Shows what the context was made for, and not the numbers that it holds."""
        return (
            f"Context(transform={self.transform!r}, rows={self.rows}, "
            f"max_prompt={self.max_prompt}, max_new={self.max_new}, layers={len(self.layers)})"
        )

    rows = property(lambda self: self.size.batch)
    max_prompt = property(lambda self: self.size.max_prompt)
    max_new = property(lambda self: self.size.max_new)

    resting = property(lambda self: self.awake_sizes is not None)

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The cache of each layer, with room for later tokens: for `attend`, `flush` and plots.

        Those of a context at rest are made anew whenever they are asked for.
        """
        return self.awake().held

    @property
    def nbytes(self) -> int:
        """Bytes of all caches as they are held; at rest, room does not count."""
        return nbytes(self.held)

    @property
    def awake_nbytes(self) -> int:
        """Bytes of all caches while the context answers, with room for later tokens."""
        if self.awake_sizes is None:
            return self.nbytes
        layers = zip(self.held, self.awake_sizes, strict=True)
        return nbytes([wake.eval_shape(*layer) for layer in layers])

    @property
    def occupancy(self) -> Occupancy:
        """Slots and bytes of all caches that hold something, and those that are room for more."""
        return occupancy(self.held)

    @property
    def full_nbytes(self) -> int:
        """Bytes that `Full` would take: at rest too, or with as much room.

        Layers with windows are rings there too.
        """
        full_layers = bind(Full(), len(self.layers), self.windows, self.size.max_tokens)
        return sum(count * self._nbytes_of(layer) for layer, count in Counter(full_layers).items())

    def _nbytes_of(self, layer: KVTransform) -> int:
        """Returns the bytes of a layer that keeps every token, or all that its window sees."""
        cache: Any = jax.eval_shape(lambda: self.size.cache(layer, 0))
        if self.resting:
            most = layer.window - 1 if isinstance(layer, Ring) else cache.kv.slots
            lengths = np.minimum(self.length, most)
            slots = min(rounded(int(lengths.max())), cache.kv.slots)
            packed = min(rounded(int(lengths.sum()) * cache.kv.shape[1]), cache.kv.position.size)
            packed = packed if cache.placement is None else 0
            cache = rest.eval_shape(cache, (RestSizes(slots, 0, 0, packed),))
        return nbytes(cache)

    def at_rest(self, *, donate: bool = False, compiler: Compiler | None = None) -> Context:
        """Returns the context without room, in memory of its own; one at rest is returned itself.

        Keys and values stay as they are, bit for bit.

        Args:
          donate: whether this context's caches are given away, one by one as they are copied.
          compiler: compiles; None: nobody is told.
        """
        self.check_there()
        if self.resting:
            return self
        sizes = sizes_at_rest(self.held)
        return self._copied(rest, sizes, donate, compiler, awake_sizes=sizes_of(self.held))

    def at_rest_on(self, mesh: Mesh | None) -> Context:
        """Returns the context at rest on other devices; this one stays as it is.

        Args:
          mesh: the devices; None: one device.
        """
        if mesh == self.size.mesh:
            return self.at_rest()
        resting, held = self.at_rest(), []
        size = self.size._replace(mesh=mesh)
        for cache, sizes in zip(resting.held, resting.awake_sizes or (), strict=True):
            # Places of a mesh take rectangles. Those that come from one have no room.
            cache = wake(cache, sizes) if self.size.mesh is None else cache
            cache = divided_among(cache, mesh, size.kv_heads)
            cache = jax.tree.map(on_one_device, cache) if mesh is None else placed(cache)
            held.append(rest(cache, *sizes_at_rest((cache,))))
        others = dataclasses.replace(resting, held=(), size=size)
        others = jax.tree.map(on_one_device, others) if mesh is None else others.placed()
        return dataclasses.replace(others.copy(), held=tuple(held))

    def awake(self, *, compiler: Compiler | None = None) -> Context:
        """Returns the context with its room, in memory of its own; an awake one is returned itself.

        Args:
          compiler: as in `at_rest`.
        """
        self.check_there()
        if self.awake_sizes is None:
            return self
        return self._copied(wake, self.awake_sizes, False, compiler, awake_sizes=None)

    @automatic()
    def _copied(
        self, copy: Any, sizes: tuple, donate: bool, compiler: Compiler | None, **changes: Any
    ) -> Context:
        """Copies the context, its caches by `rest` or `wake` with the sizes of each layer."""
        held = []
        for cache, layer_sizes in zip(self.held, sizes, strict=True):
            if compiler is None:
                held.append(copy(cache, layer_sizes))
            else:
                held.append(compiler.run("the room of a cache", copy, cache, layer_sizes))
            if donate:
                # Waiting bounds the memory: a layer that is queued has its arrays already.
                jax.block_until_ready(held[-1])
                delete(cache)
        others = dataclasses.replace(self, held=(), **changes).copy()
        return dataclasses.replace(others, held=tuple(held))

    def repeat(self, rows: int) -> Context:
        """Repeats the one row of this context `rows` times, for many questions about one document.

        Only what the caches hold is copied.

        Raises:
          TypeError, ValueError: there is more than one row, `rows` is not an integer from 1 on, or
            the context has been given away.
        """
        check_count("rows", rows, 1)
        if self.rows != 1:
            raise ValueError(f"only a context of one row can be repeated, got {self.rows} rows")
        return self.take([0] * rows)

    def take(self, rows: Sequence[int]) -> Context:
        """Returns the context of some rows, each as often as it is named, in memory of their own.

        Args:
          rows: the row that each new row is copied from.

        Raises:
          TypeError, ValueError: as `kvjax.take_rows`; the context has been given away.
        """
        self.check_there()
        if self.awake_sizes is None:
            held = take_rows(self.held, rows)
        else:  # a layer at a time is awake
            held = tuple(
                _rows_at_rest(*layer, rows)
                for layer in zip(self.held, self.awake_sizes, strict=True)
            )
        index = np.asarray(rows)
        by_row = {
            name: getattr(self, name)[index]
            for name in ("logits", "seen", "length", "prompt_tokens", "new_tokens")
        }
        size = self.size._replace(batch=len(rows))
        # `+` makes another array, since a call may donate those of the context that results.
        taken = dataclasses.replace(self, held=held, size=size, waiting=+self.waiting, **by_row)
        return taken.placed()

    def copy(self) -> Context:
        """Copies all arrays, so that a call may donate those of the copy."""
        self.check_there()
        return jax.tree.map(copied, self)

    def placed(self) -> Context:
        """Puts the context on the mesh that its caches were made for, if there is one."""
        mesh = self.size.mesh
        if mesh is None:
            return self
        counts = ("length", "prompt_tokens", "new_tokens", "waiting")
        arrays = {name: put(getattr(self, name), mesh) for name in counts}
        arrays |= {name: put_by_rows(getattr(self, name), mesh) for name in ("logits", "seen")}
        return dataclasses.replace(self, held=tuple(map(placed, self.held)), **arrays)


def _rows_at_rest(cache: Cache, sizes: LayerSizes, rows: Sequence[int]) -> Cache:
    """Returns rows of a layer's cache that rests."""
    taken = take_rows(wake(cache, sizes), rows)
    return rest(taken, *sizes_at_rest((taken,)))


def delete(caches: Cache | tuple[Cache, ...]) -> None:
    """Frees the memory of caches that have been given away."""
    for array in jax.tree.leaves(caches):
        array.delete()
