"""Caches in programs that `jax.export` serializes: the names of their nodes, and static parts.

A serialized program holds the structure of what it takes and gives. Each class of a node has a name
in it, `kvjax.` and that of the class, and its static fields are JSON: numbers and texts as they
are, methods by their names (`kvjax.register`), other values by the names of their classes here.
Nothing of a program is run to read them. Importing this module tells JAX the names, which `kvjax`
does when one of its own names is first used.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.attention.layer import LayerCache, QueryWindow, Reading
from kvjax.budgets.budgets import Share
from kvjax.budgets.layers import LayerBudget
from kvjax.cache.payload import Dense
from kvjax.cache.slots import Column, KVCache
from kvjax.compose.chain import Chain
from kvjax.compose.wrappers import HeadGroups, Repeated
from kvjax.devices import Placement
from kvjax.messages import brief
from kvjax.protocol import AttentionOptions, Wrapped
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from kvjax.rope import Rope
from kvjax.storage.codebook.payload import Book, CodebookPayload
from kvjax.storage.offload.payload import Offloaded
from kvjax.storage.offload.transform import Resident
from kvjax.storage.quantize.channels import Channels
from kvjax.storage.quantize.payload import Form, Quantized
from kvjax.storage.recent import Recent
from kvjax.transforms.cam import CaMState
from kvjax.transforms.chelsea.chelsea import Passes
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads, RemainingBudget
from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from kvjax.transforms.kvcrush.kvcrush import KVCrushState
from kvjax.transforms.pyramidinfer.pyramidinfer import (
    Generated,
    PyramidInferLayer,
    PyramidInferPrompt,
)
from kvjax.transforms.pyramidinfer.schedule import CosineBudget, TokensEntering
from kvjax.transforms.pyramidkv import PyramidBudget
from kvjax.transforms.quest import Pages
from kvjax.transforms.ring import Ring
from kvjax.transforms.spindlekv.layer_budget_eviction import LayerEviction
from kvjax.transforms.spindlekv.reserve import Reserve
from kvjax.transforms.spindlekv.schedule import SpindleBudget
from pallas_kernels.formats.bits import Encoded

# Names in programs: what is written with them is to be read by later versions.
NODES = {
    f"kvjax.{node.__name__}": node
    for node in (
        AttentionOptions, CaMState, Channels, Clusters, CodebookPayload, Column, Dense, Encoded,
        Generated, KVCache, KVCrushState, LayerCache, Offloaded, Pages, Passes, Quantized,
        QueryWindow, Reading, Recent, Repeated, Resident, Rope, Wrapped,
    )
}  # fmt: skip
# Classes of static values, by their own names. Methods have those of the registry.
VALUES = {
    value.__name__: value
    for value in (
        Book, Chain, CosineBudget, Form, HeadGroups, InfiniGenCalibration, LayerBudget,
        LayerEviction, OutlierHeads, Placement, PyramidBudget, PyramidInferLayer,
        PyramidInferPrompt, RemainingBudget, Reserve, Ring, Share, SpindleBudget, TokensEntering,
    )
}  # fmt: skip


def to_json(value: Any) -> Any:
    """A static value as what JSON can hold; `from_json` is the reverse.

    Raises:
      TypeError: a function, or another value that has no form in JSON.
      ValueError: a method that has no name (`kvjax.register`).

    Example:
      >>> import kvjax
      >>> from kvjax.serialization import from_json, to_json
      >>> to_json((0.5, kvjax.Ring(window=8)))
      [0.5, {'value': 'Ring', 'fields': {'window': 8}}]
      >>> from_json(to_json(kvjax.SnapKV(budget=64)))
      SnapKV(budget=64, window=16, kernel=7, pooling='max', group_reduce='mean')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is tuple:
        return [to_json(x) for x in value]
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, np.ndarray):
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [content, value.dtype.name, list(value.shape)]}
    if isinstance(value, Mesh | AbstractMesh):
        devices = None
        if isinstance(value, Mesh):
            devices = [device.id for device in value.devices.flat]
        return {"mesh": [dict(value.shape), devices]}
    return {**_name(value), "fields": {name: to_json(x) for name, x in _fields(value)}}


def from_json(content: Any) -> Any:
    """The reverse of `to_json`.

    Raises:
      ValueError: a name that this version does not know, or a mesh of devices that there are not.
    """
    if isinstance(content, list):
        return tuple(map(from_json, content))
    if not isinstance(content, dict):
        return content
    kind, given = next(iter(content.items()))
    if kind == "range":
        return range(*given)
    if kind == "dtype":
        return jnp.dtype(given)
    if kind == "array":
        numbers, dtype, shape = given
        return np.frombuffer(base64.b64decode(numbers), jnp.dtype(dtype)).reshape(shape)
    if kind == "mesh":
        return _mesh(*given)
    known = METHODS | WRAPPERS | STORAGE if kind == "method" else VALUES
    if given not in known:
        hint = " (kvjax.register gives a method its name)" if kind == "method" else ""
        raise ValueError(f"a program names the {kind} {brief(given)}, which is unknown here{hint}")
    return known[given](**{name: from_json(x) for name, x in content["fields"].items()})


def _name(value: Any) -> dict[str, str]:
    """How JSON names the class of a value."""
    if VALUES.get(type(value).__name__) is type(value):
        return {"value": type(value).__name__}
    for name, method in (METHODS | WRAPPERS | STORAGE).items():
        if method is type(value):
            return {"method": name}
    if dataclasses.is_dataclass(value):
        raise ValueError(
            f"a method needs a name (kvjax.register) to be in an exported program, got "
            f"{value!r:.200}"
        )
    raise TypeError(f"an exported program cannot hold {value!r:.200}")


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        return [(x.name, getattr(value, x.name)) for x in dataclasses.fields(value) if x.init]
    return value._asdict().items()


def _mesh(shape: dict[str, int], devices: list[int] | None) -> Mesh | AbstractMesh:
    """A mesh whose axes XLA looks after, as those of caches are."""
    kinds = (AxisType.Auto,) * len(shape)
    if devices is None:
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    there = {device.id: device for device in jax.devices()}
    if not there.keys() >= set(devices):
        raise ValueError(
            f"a program is for a mesh of the devices {devices}, got those of {sorted(there)}"
        )
    grid = np.array([there[number] for number in devices]).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(shape), axis_types=kinds)


def _register(name: str, node: type) -> None:
    """Tells JAX how the nodes of a class are written."""
    if not dataclasses.is_dataclass(node):
        jax.export.register_namedtuple_serialization(node, serialized_name=name)
        return
    fields = dataclasses.fields(node)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if field.name not in static]

    def serialized(values: tuple) -> bytes:
        held = {name: to_json(x) for name, x in zip(static, values, strict=True)}
        return json.dumps({"arrays": arrays, "static": held}).encode()

    def built(content: dict[str, Any], children: Iterable[Any]) -> Any:
        values = {name: from_json(x) for name, x in content["static"].items()}
        return node(**dict(zip(content["arrays"], children, strict=True)), **values)

    jax.export.register_pytree_node_serialization(
        node, serialized_name=name, serialize_auxdata=serialized,
        deserialize_auxdata=json.loads, from_children=built,
    )  # fmt: skip


for _node_name, _node in NODES.items():
    _register(_node_name, _node)
