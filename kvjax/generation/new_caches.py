"""Makes the empty caches of a model's layers, from their sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from kvjax.attention.init_cache import init_cache
from kvjax.attention.joined_heads import AllHeads, all_heads_of
from kvjax.attention.layer import Cache, LayerCache, layer_caches, map_parts
from kvjax.attention.parts import placed
from kvjax.budgets.layers import layers_of
from kvjax.cache.rope import Rope
from kvjax.checks import check_count, floating
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.compose.wrappers import Heads
from kvjax.devices import mesh_of
from kvjax.generation.model import FunctionalModel, OfLayers, of_layer
from kvjax.protocol import AttentionOptions, KVTransform, State
from kvjax.registry import as_transform


def abstract_array(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Returns the shape and dtype of an array, in its place where nothing is computed.

    Example:
      >>> from kvjax.generation.new_caches import abstract_array
      >>> abstract_array((2, 3), "int32")
      ShapeDtypeStruct(shape=(2, 3), dtype=int32)
    """
    return jax.ShapeDtypeStruct(shape, dtype)


class CacheSize(NamedTuple):
    """The sizes that caches are made for, which all layers share.

    They are arguments of `init_cache`, and static in compiled code.
    """

    batch: int
    kv_heads: int
    query_heads: int
    head_dim: int
    max_prompt: int
    max_new: int
    dtype: str | None
    mesh: Mesh | None = None
    max_length: int | None = None

    @classmethod
    def of(
        cls,
        model: FunctionalModel,
        batch: int,
        max_prompt: int,
        max_new: int,
        dtype: DTypeLike | None,
        tokens: int,
    ) -> CacheSize:
        """Returns the sizes of a model's caches, on the mesh of its parameters.

        Args:
          batch: rows.
          max_prompt, max_new: most tokens of a row that are read and written. They may be padded.
          dtype: of keys and values.
          tokens: tokens of a row without padding, from which `max_length` follows: padding must
            not change how a model treats a text. A text has no more positions than the model.
        """
        tokens = tokens if model.max_positions is None else min(tokens, model.max_positions)
        return cls(
            batch=batch,
            kv_heads=model.kv_heads,
            query_heads=model.query_heads,
            head_dim=model.head_dim,
            max_prompt=max_prompt,
            max_new=max_new,
            dtype=None if dtype is None else floating(dtype).name,
            mesh=mesh_of(model.params),
            max_length=None if model.length_class is None else model.length_class(tokens),
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens of a row, prompt and new ones."""
        return self.max_prompt + self.max_new

    def cache(
        self, transform: KVTransform, layer: int, attention: AttentionOptions | None = None
    ) -> Cache:
        """Makes the empty cache of one layer.

        Args:
          attention: options of the layer's attention; None: the default ones, where only the size
            or the state of the cache matters.
        """
        options = {} if attention is None else attention.static
        return init_cache(transform, layer=layer, **self._asdict(), **options)


def init_caches(
    transform: KVTransform | str,
    *,
    num_layers: int,
    batch: int,
    kv_heads: int,
    head_dim: int,
    max_prompt: int,
    max_new: int,
    query_heads: int | None = None,
    dtype: DTypeLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    max_length: int | None = None,
    scale: OfLayers = None,
    windows: Sequence[int | None] = (),
    soft_cap: OfLayers = None,
    rope: Rope | None = None,
    repeats: bool = False,
) -> tuple[Cache, ...]:
    """Empty caches for all attention layers of a model: `init_cache` for each element of `bind`.

    Args:
      transform: the method, or its text.
      num_layers: of the model.
      batch, kv_heads, head_dim, max_prompt, max_new, query_heads, dtype, mesh, max_length, rope: as
        in `init_cache`.
      scale, soft_cap: as in `init_cache`: one number for all layers, or a tuple with one for each.
      windows: sliding window of each layer, None where it has none; empty: no layer has one. A
        layer whose window is shorter than a text may become is a `kvjax.Ring` (see `bind`).
      repeats: whether a step may have a row's last token once more, or queries alone (see
        `attend`). Such a query sees one token more than the next one will, and rings hold it.

    Returns:
      A cache for each layer, in a tuple.

    Raises:
      TypeError, ValueError: as `init_cache` and `bind`; a tuple of another number of layers.

    Example:
      >>> import kvjax
      >>> caches = kvjax.init_caches("snapkv(budget=64)", num_layers=3, batch=2, kv_heads=4,
      ...     head_dim=16, max_prompt=512, max_new=32, windows=(128, 128, None))
      >>> [cache.kv.shape for cache in caches]
      [(2, 4, 128), (2, 4, 128), (2, 4, 96)]
    """
    check_count("max_prompt", max_prompt, 1)
    check_count("max_new", max_new, 0)
    seen = [window if window is None else window + repeats for window in windows]
    layers = bind(as_transform(transform, "init_caches"), num_layers, seen, max_prompt + max_new)
    windows = tuple(windows) or (None,) * num_layers
    for name, option in (("scale", scale), ("soft_cap", soft_cap)):
        if isinstance(option, tuple) and len(option) != num_layers:
            raise ValueError(f"{name} must have {num_layers} entries, got {len(option)}")
    return tuple(
        init_cache(
            bound, layer=layer, batch=batch, kv_heads=kv_heads, head_dim=head_dim,
            max_prompt=max_prompt, max_new=max_new, query_heads=query_heads, dtype=dtype,
            mesh=mesh, max_length=max_length, scale=of_layer(scale, layer),
            window=windows[layer], soft_cap=of_layer(soft_cap, layer), rope=rope,
        )
        for layer, bound in enumerate(layers)
    )  # fmt: skip


class LayerStates(NamedTuple):
    """Holds all that differs between the empty caches of layers that are alike.

    Args:
      parts: state and heads of each rectangle of the layer's cache.
      all_heads: state and heads of the method for all heads; None: there is none.
    """

    parts: tuple[tuple[State, Heads | None], ...]
    all_heads: AllHeads | None = None


@compiled(static_argnums=(0, 1))
def states_of_layers(layers: tuple[KVTransform, ...], size: CacheSize) -> tuple[LayerStates, ...]:
    """Returns the states of all layers' transforms for empty caches."""
    return tuple(states_of(transform, size, layer) for layer, transform in enumerate(layers))


def states_of(transform: KVTransform, size: CacheSize, layer: int) -> LayerStates:
    """Returns the states of one layer's transform for an empty cache."""
    cache = placed(size.cache(transform, layer))
    parts = tuple((part.state, part.heads) for part in layer_caches(cache))
    return LayerStates(parts, all_heads_of(transform, cache))


def new_cache(
    transform: KVTransform, size: CacheSize, attention: AttentionOptions, states: LayerStates
) -> Cache:
    """Makes an empty cache with these states, equal in all else for layers that are alike."""
    # Any layer that the transform is for will do, since its own state is replaced. It must be one
    # of those where the transform is bound to some.
    bound = layers_of(transform)
    cache = size.cache(transform, 0 if bound is None else bound[0], attention)
    of_parts = iter(states.parts)

    def with_state(part: LayerCache) -> LayerCache:
        state, heads = next(of_parts)
        return dataclasses.replace(part, state=state, heads=heads)

    return map_parts(with_state, cache)
