"""What devices will hold: weights and caches in bytes, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kvjax.attention.layer import Cache, LayerCache, layer_caches, map_parts
from kvjax.attention.parts import cache_specs
from kvjax.checks import check_count
from kvjax.compose.bind import bind
from kvjax.compose.walks import map_methods
from kvjax.compose.wrappers import HeadGroups
from kvjax.devices import DATA, Placement, check_mesh
from kvjax.generation.calibration import WithCalibration
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_pass import CacheSize, cache_shapes
from kvjax.protocol import KVTransform, check_transform
from kvjax.storage.offload.payload import Offloaded
from kvjax.transforms.infinigen.projections import InfiniGenCalibration

_CHANNELS = 0.2  # of queries and of keys, the share that `calibrate_infinigen` takes


class Bytes(NamedTuple):
    """Bytes of caches on one device, by what they are for.

    Args:
      device: in the device's memory.
      host: in host memory (`Offload`).
      read: of those on the device, what a decode step reads at least when the caches are full.
    """

    device: float
    host: float
    read: float

    def plus(self, other: Bytes, times: float = 1) -> Bytes:
        """The sum with so many times the other."""
        return Bytes(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Plan:
    """What one device of a mesh holds of a model and its caches, and moves in a decode step.

    Requests are rows of a batch. The axis "data" divides them where their number is a multiple of
    it; others are on all of its devices. Activations and temporary memory are not counted.

    Args:
      transform: how caches are compressed.
      devices: in the mesh.
      data: how many of them divide the rows.
      weights: bytes of weights.
      weights_read: those of them that a step reads.
      fixed: of caches, whatever the number of requests.
      request: of one request's caches, on each device that has it.
    """

    transform: KVTransform
    devices: int
    data: int
    weights: int
    weights_read: int
    fixed: Bytes
    request: Bytes

    def caches(self, requests: int) -> Bytes:
        """Of the caches of so many requests."""
        return self.fixed.plus(self.request, self._rows(requests))

    def held(self, requests: int) -> int:
        """Bytes in a device's memory: weights, and the caches of so many requests."""
        return self.weights + round(self.caches(requests).device)

    def fits(self, memory: float) -> int:
        """How many requests fit where each device has so many bytes; 0 if none does."""
        free = memory - self.weights - self.fixed.device
        return self.data * max(int(free // self.request.device), 0)

    def step_bytes(self, requests: int) -> int:
        """Bytes that a decode step moves at least on a device: weights and caches, once."""
        return self.weights_read + round(self.caches(requests).read)

    def _rows(self, requests: int) -> int:
        """Rows on a device."""
        return requests // self.data if requests % self.data == 0 else requests


def plan(
    model: LanguageModel | FunctionalModel,
    transform: KVTransform,
    *,
    max_prompt: int,
    max_new: int,
    dtype: DTypeLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    looked_up: int = 0,
) -> Plan:
    """Prices a model and its caches before anything of them is made.

    Caches are those of `kvjax.read(..., max_prompt=, max_new=)` once they have a prompt.

    Args:
      model: as for `kvjax.generate`; its parameters may be `jax.ShapeDtypeStruct`, with a sharding
        where a mesh divides them (`kvjax.models.abstract_decoder`).
      transform: how caches are compressed. An `InfiniGen` without calibration is taken with as
        many channels as one has at most.
      max_prompt, max_new, dtype: as in `kvjax.read`; bfloat16 by default.
      mesh: devices, with the axes "data" and "tensor"; None: one device.
      looked_up: bytes per device of weights of which a step takes few rows, as of an embedding.

    Raises:
      TypeError, ValueError: as `kvjax.read`; a mesh with other axes.

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
    check_transform(transform, "plan")
    check_count("max_prompt", max_prompt, 1)
    check_count("max_new", max_new, 1)
    mesh = None if mesh is None else check_mesh(mesh)
    functional = as_functional(model)
    layers = bind(
        _with_stand_ins(transform, functional), functional.num_layers, functional.windows,
        max_prompt + max_new,
    )  # fmt: skip
    dtype, data = jnp.bfloat16 if dtype is None else dtype, 1
    if mesh is not None:
        data = mesh.shape.get(DATA, 1)
    one, two = (
        _cache_bytes(functional, layers, _size(functional, rows, max_prompt, max_new, dtype), mesh)
        for rows in (data, 2 * data)
    )
    request = two.plus(one, -1)
    weights = sum(bytes_on_device(x) for x in jax.tree.leaves(functional.params))
    devices = 1 if mesh is None else mesh.size
    return Plan(
        transform, devices, data, weights, weights - looked_up, one.plus(request, -1), request
    )


def _size(
    model: FunctionalModel, rows: int, max_prompt: int, max_new: int, dtype: DTypeLike
) -> CacheSize:
    tokens = max_prompt + max_new
    return CacheSize.of(model, rows, max_prompt, max_new, dtype, tokens)._replace(mesh=None)


def _cache_bytes(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    size: CacheSize,
    mesh: Mesh | AbstractMesh | None,
) -> Bytes:
    """Of all layers' caches on one device."""
    total, known = Bytes(0, 0, 0), {}
    for cache, transform in zip(cache_shapes(model, layers, size), layers, strict=True):
        # Layers that are alike share one value.
        if id(cache) not in known:
            known[id(cache)] = cache, _layer_bytes(_on(cache, transform, size.kv_heads, mesh))
        total = total.plus(known[id(cache)][1])
    return total


def _on(
    cache: Cache, transform: KVTransform, kv_heads: int, mesh: Mesh | AbstractMesh | None
) -> Cache:
    """A layer's cache as one that is divided among a mesh."""
    divisible = not isinstance(transform, HeadGroups)
    placement = Placement.of(mesh, kv_heads, divisible)
    return map_parts(lambda part: dataclasses.replace(part, placement=placement), cache)


def _layer_bytes(cache: Cache) -> Bytes:
    parts = map(_part_bytes, layer_caches(cache))
    return Bytes(*map(sum, zip(*parts, strict=True)))


def _part_bytes(cache: LayerCache) -> Bytes:
    """Of a layer's cache, or of that of a group of its heads."""
    placement, kv = cache.placement, cache.kv
    specs: Any = jax.tree.map(lambda x: PartitionSpec(), cache)
    if placement is not None:
        specs = cache_specs(cache)

    def on_device(tree: Any, spec: Any) -> int:
        mesh = None if placement is None else placement.mesh
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(spec), strict=True)
        return sum(bytes_on_device(x, mesh, s) for x, s in pairs)

    payloads = (kv.k, specs.kv.k), (kv.v, specs.kv.v)
    host = sum(
        on_device(own.store, spec.store) for own, spec in payloads if isinstance(own, Offloaded)
    )
    device = on_device(cache, specs) - host
    if kv.lists is None:
        return Bytes(device, host, device)
    # A step reads the slots of its lists alone; rows from host memory come to the device as state.
    stored = 0 if host else sum(on_device(*own) for own in payloads)
    lists, length = kv.lists
    selected = min(lists * length / (kv.shape[1] * kv.shape[2]), 1.0)
    return Bytes(device, host, device - stored * (1 - selected))


def bytes_on_device(
    x: Any, mesh: Mesh | AbstractMesh | None = None, spec: PartitionSpec | None = None
) -> int:
    """Bytes of an array, or of a shape, on each device of those that share it."""
    where = getattr(x, "sharding", None) if mesh is None else NamedSharding(mesh, spec)
    shape = x.shape if where is None else where.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _with_stand_ins(transform: KVTransform, model: FunctionalModel) -> KVTransform:
    """The transform with a calibration of the largest size in place of one that is missing."""
    channels = min(2 * max(1, int(_CHANNELS * model.head_dim)), model.head_dim)
    shape = model.num_layers, model.kv_heads, model.head_dim, channels
    stand_in = InfiniGenCalibration(np.zeros(shape, np.float32))
    return map_methods(WithCalibration(stand_in), transform)


def abstract_mesh(sizes: Iterable[tuple[str, int]]) -> AbstractMesh:
    """A mesh of devices that need not be there.

    Args:
      sizes: pairs of an axis, "data" or "tensor", and its size.

    Example:
      >>> from kvjax.generation.planning import abstract_mesh
      >>> abstract_mesh([("data", 2), ("tensor", 4)]).size
      8
    """
    names, counts = zip(*sizes, strict=True)
    return check_mesh(AbstractMesh(tuple(counts), tuple(names)))
