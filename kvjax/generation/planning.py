"""Computes how many bytes of weights and caches devices will hold, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kvjax.attention.layer import Cache, LayerCache, layer_caches
from kvjax.attention.occupancy import Occupancy, occupancy
from kvjax.attention.parts import cache_specs, divided_among
from kvjax.cache.nbytes import nbytes
from kvjax.calibration import Learner
from kvjax.checks import check_count
from kvjax.compose.bind import bind
from kvjax.compose.chain import parts_of
from kvjax.compose.foreseen import frees_at_prompts_end, frees_while_decoding
from kvjax.compose.ring import Ring
from kvjax.compose.walks import map_methods
from kvjax.compose.wrappers import by_head_groups
from kvjax.devices import DATA, check_mesh
from kvjax.generation.calibration import with_named
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.prompt_checks import check_positions
from kvjax.generation.prompt_pass import cache_shapes
from kvjax.protocol import KVTransform, MethodHeads
from kvjax.registry import as_transform
from kvjax.storage.offload.payload import Offloaded
from kvjax.storage.quantize.transform import GROUP, Quantize
from pallas_kernels.base.annotations import NoneElsewhere


class Bytes(NamedTuple):
    """Bytes of caches on one device, by what they are for.

    Args:
      device: in the device's memory.
      host: in host memory (`Offload`).
      read: those of `device` that a decode step reads at least, when the caches are full.
      room: those in either memory that hold nothing yet when a prompt of `max_prompt` tokens is
        complete: slots for later prompts and new tokens, and for rows that wait to be encoded.
    """

    device: float
    host: float
    read: float
    room: float

    def plus(self, other: Bytes, times: float = 1) -> Bytes:
        """Returns the sum of these bytes and `times` times the others."""
        return Bytes(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Plan:
    """The bytes of a model and its caches that one device of a mesh holds, and moves per step.

    Requests are rows of a batch. The axis "data" divides them if their number is a multiple of its
    size; else each of its devices has all of them. Activations and temporary memory are not
    counted.

    Args:
      transform: how caches are compressed.
      layers: the transform bound to each layer.
      devices: number of devices in the mesh.
      data: size of the axis that divides the rows.
      weights: bytes of weights.
      weights_read: bytes of the weights that a decode step reads.
      fixed: bytes of caches that do not depend on the number of requests.
      request: bytes of one request's caches, on each device that has them.
      occupancy: slots of the caches of `data` requests, on all devices together, when each has read
        a prompt of `max_prompt` tokens; with bounds on what is kept.
    """

    transform: KVTransform
    layers: tuple[KVTransform, ...]
    devices: int
    data: int
    weights: int
    weights_read: int
    fixed: Bytes
    request: Bytes
    occupancy: Occupancy

    def caches(self, requests: int) -> Bytes:
        """Returns the bytes that the caches of `requests` requests take on a device."""
        return self.fixed.plus(self.request, self._rows(requests))

    def held(self, requests: int) -> int:
        """Returns the bytes in a device's memory: weights, and the caches of all requests."""
        return self.weights + round(self.caches(requests).device)

    def fits(self, memory: float) -> int:
        """Returns how many requests fit if each device has `memory` bytes; 0 if none does."""
        free = memory - self.weights - self.fixed.device
        return self.data * max(int(free // self.request.device), 0)

    def step_bytes(self, requests: int) -> int:
        """Returns the bytes that a decode step moves at least on a device.

        They are those of weights and caches, each read once.
        """
        return self.weights_read + round(self.caches(requests).read)

    def whole(self, others: Iterable[Plan]) -> Plan | None:
        """Returns the first of other plans that takes no more memory and keeps every token.

        Args:
          others: `whole_plans` for the same model, sizes and devices.

        Returns:
          None if there is none, or if this transform keeps every token itself.

        Example:
          >>> import kvjax
          >>> from kvjax.generation.planning import plan, whole_plans
          >>> from kvjax.models import DecoderConfig, RopeConfig, abstract_decoder
          >>> model = abstract_decoder(DecoderConfig(
          ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
          ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
          >>> sizes = {"max_prompt": 256, "max_new": 64, "dtype": "float32"}
          >>> [plan(model, kvjax.KVzip(0.1, room=room), **sizes).whole(whole_plans(model, **sizes))
          ...  is None for room in (256, 16)]
          [False, True]
        """
        if not any(map(_loses_tokens, set(self.layers))):
            return None
        most = self.caches(1).device
        return next((other for other in others if other.caches(1).device <= most), None)

    def _rows(self, requests: int) -> int:
        """Returns the number of rows on a device."""
        return requests // self.data if requests % self.data == 0 else requests


def _loses_tokens(layer: KVTransform) -> bool:
    """Tells whether a layer's transform evicts or merges tokens that a query could still see."""
    return any(
        frees_at_prompts_end(part) or frees_while_decoding(part)
        for group in by_head_groups(layer)
        for part in parts_of(group)
        if not isinstance(part, Ring)
    )


def plan(
    model: LanguageModel | FunctionalModel,
    transform: KVTransform | str,
    *,
    max_prompt: int,
    max_new: int,
    dtype: DTypeLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    looked_up: int = 0,
) -> Plan:
    """Computes the bytes of a model and its caches before any of them is made.

    The caches are those of `kvjax.read(..., max_prompt=, max_new=)` after a prompt.

    Args:
      model: as for `kvjax.generate`; its parameters may be `jax.ShapeDtypeStruct`, with a sharding
        where a mesh divides them (`kvjax.models.abstract_decoder`).
      transform: how caches are compressed, as in `kvjax.generate`. For an `InfiniGen` without
        calibration, the largest number of channels is assumed that a calibration can have. For a
        `ByHead` without profile, every head has the mean share; by a profile, rectangles take up to
        a third more.
      max_prompt, max_new, dtype: as in `kvjax.read`; bfloat16 by default.
      mesh: devices, with the axes "data" and "tensor"; None: one device.
      looked_up: bytes per device of weights of which a step reads only a few rows, such as an
        embedding.

    Raises:
      TypeError, ValueError: as `kvjax.generate`, for such a prompt and as many new tokens; a mesh
        with other axes.

    Example:
      >>> import kvjax
      >>> from kvjax.generation.planning import plan
      >>> from kvjax.models import DecoderConfig, RopeConfig, abstract_decoder
      >>> model = abstract_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> full, snapkv = (plan(model, tx, max_prompt=256, max_new=64)
      ...                 for tx in (kvjax.Full(), kvjax.SnapKV(64)))
      >>> full.weights == snapkv.weights, round(full.request.device / snapkv.request.device, 1)
      (True, 2.5)
    """
    transform = as_transform(transform, "plan")
    check_count("max_prompt", max_prompt, 1)
    check_count("max_new", max_new, 1)
    mesh = None if mesh is None else check_mesh(mesh)
    functional = as_functional(model)
    layers = bind(
        _with_stand_ins(transform, functional), functional.num_layers, functional.windows,
        max_prompt + max_new,
    )  # fmt: skip
    check_positions(functional, layers, max_prompt, max_new)
    dtype = jnp.bfloat16 if dtype is None else dtype
    data = 1 if mesh is None else mesh.shape.get(DATA, 1)

    def cache_bytes(rows: int) -> tuple[Bytes, Occupancy]:
        tokens = max_prompt + max_new
        size = CacheSize.of(functional, rows, max_prompt, max_new, dtype, tokens)
        # Shapes are those of all devices together; `_cache_bytes` divides them.
        caches = cache_shapes(functional, layers, size._replace(mesh=None))
        return _cache_bytes(caches, functional.kv_heads, mesh), occupancy(caches)

    # With one and with two rows on each device: the difference is one request.
    (one_row, occupied), (two_rows, _) = cache_bytes(data), cache_bytes(2 * data)
    request = two_rows.plus(one_row, -1)
    weights = sum(bytes_on_device(x) for x in jax.tree.leaves(functional.params))
    return Plan(
        transform=transform,
        layers=layers,
        devices=1 if mesh is None else mesh.size,
        data=data,
        weights=weights,
        weights_read=weights - looked_up,
        fixed=one_row.plus(request, -1),
        request=request,
        occupancy=occupied,
    )


def too_long(model: LanguageModel | FunctionalModel, *, max_prompt: int, max_new: int) -> bool:
    """Returns whether a cache of every token would take more positions than the model has."""
    positions = as_functional(model).max_positions
    return positions is not None and max_prompt + max_new > positions


def whole_plans(model: LanguageModel | FunctionalModel, **sizes: Any) -> Iterator[Plan]:
    """Yields plans of stored forms that keep every token, the most faithful form first.

    They are those of `Quantize` in 8 bits and, if groups of 4 bits divide the model's channels, in
    4 bits. There are none where the model has fewer positions than these tokens.

    Args:
      sizes: all other arguments of `plan`.
    """
    if too_long(model, max_prompt=sizes["max_prompt"], max_new=sizes["max_new"]):
        return
    yield plan(model, Quantize(), **sizes)
    if as_functional(model).head_dim % GROUP == 0:
        yield plan(model, Quantize(bits=4), **sizes)


def _cache_bytes(
    caches: tuple[Cache, ...], kv_heads: int, mesh: Mesh | AbstractMesh | None
) -> Bytes:
    """Returns the bytes of all layers' caches on one device; `caches` are their shapes."""
    total = Bytes(0, 0, 0, 0)
    known: dict[int, tuple[Cache, Bytes]] = {}  # by the cache's id; the cache keeps that id alive
    for cache in caches:
        # Layers that are alike share one value.
        if id(cache) not in known:
            on_mesh = divided_among(cache, mesh, kv_heads)
            known[id(cache)] = cache, _layer_bytes(on_mesh)
        total = total.plus(known[id(cache)][1])
    return total


def _layer_bytes(cache: Cache) -> Bytes:
    """Returns the bytes of a layer's cache on one device of its placement."""
    parts = map(_part_bytes, layer_caches(cache))
    return Bytes(*map(sum, zip(*parts, strict=True)))


def _part_bytes(cache: LayerCache) -> Bytes:
    """Returns the bytes of a cache: a layer's, or that of one head group."""
    placement, kv = cache.placement, cache.kv
    specs: Any = jax.tree.map(lambda x: PartitionSpec(), cache)
    if placement is not None:
        specs = cache_specs(cache)

    def on_device(tree: Any, specs: Any) -> int:
        mesh = None if placement is None else placement.mesh
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
        return sum(bytes_on_device(x, mesh, spec) for x, spec in pairs)

    payloads = (kv.k, specs.kv.k), (kv.v, specs.kv.v)
    host = sum(
        on_device(payload.store, spec.store)
        for payload, spec in payloads
        if isinstance(payload, Offloaded)
    )
    device = on_device(cache, specs) - host
    # Everything that is stored for a slot is divided as positions are.
    divided = on_device(kv.position, specs.kv.position) / nbytes(kv.position)
    room = divided * occupancy(cache).room_bytes
    if kv.lists is None:
        return Bytes(device, host, device, room)
    # A step reads only the slots of its lists. Rows from host memory come to the device as state.
    stored = 0 if host else sum(on_device(payload, spec) for payload, spec in payloads)
    lists, length = kv.lists
    selected = min(lists * length / (kv.shape[1] * kv.shape[2]), 1.0)
    return Bytes(device, host, device - stored * (1 - selected), room)


def bytes_on_device(
    x: Any, mesh: Mesh | AbstractMesh | None = None, spec: PartitionSpec | NoneElsewhere = None
) -> int:
    """Returns the bytes that an array or shape takes on each device that shares it.

    Args:
      mesh, spec: how the array is divided; without a mesh, its own sharding says so.
    """
    sharding = getattr(x, "sharding", None) if mesh is None else NamedSharding(mesh, spec)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _with_stand_ins(transform: KVTransform, model: FunctionalModel) -> KVTransform:
    """Puts what takes as many bytes in the place of methods that have not learned yet."""
    transform = with_named(transform, model, weights=False)

    def stand_in(method: KVTransform, heads: MethodHeads) -> KVTransform:
        if isinstance(method, Learner) and method.lacks_calibration:
            return method.planned(model)
        return method

    return map_methods(stand_in, transform)


def abstract_mesh(sizes: Iterable[tuple[str, int]]) -> AbstractMesh:
    """Makes a mesh of devices that need not exist.

    Args:
      sizes: pairs of an axis, "data" or "tensor", and its size.

    Example:
      >>> from kvjax.generation.planning import abstract_mesh
      >>> abstract_mesh([("data", 2), ("tensor", 4)]).size
      8
    """
    names, counts = zip(*sizes, strict=True)
    return check_mesh(AbstractMesh(tuple(counts), tuple(names)))
