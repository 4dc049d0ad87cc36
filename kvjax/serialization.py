"""Names the nodes of caches for programs that `jax.export` serializes, and writes static parts.

A serialized program holds the structure of its inputs and outputs. Each node class has a name in
it, `kvjax.` and the name of the class. Static fields are JSON: numbers and texts as they are,
methods by their names (`kvjax.register`), other values by the names of their classes here. Reading
them executes nothing from the program. JAX learns the names when this module is imported, which
`kvjax` does when any of its names is first used.
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
from kvjax.budgets.heads import HeadShares
from kvjax.budgets.layers import LayerBudget
from kvjax.cache.payload import Dense
from kvjax.cache.record import Record
from kvjax.cache.rope import Rope
from kvjax.cache.slots import Column, KVCache
from kvjax.calibration import Learner
from kvjax.compose.chain import Chain
from kvjax.compose.ring import Ring
from kvjax.compose.wrappers import HeadGroups, Repeated
from kvjax.devices import Placement
from kvjax.messages import brief
from kvjax.protocol import AttentionOptions, Wrapped
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from kvjax.storage.codebook.payload import Book, CodebookPayload
from kvjax.storage.offload.payload import Offloaded
from kvjax.storage.offload.transform import Resident
from kvjax.storage.quantize.channels import Channels
from kvjax.storage.quantize.payload import Form, Quantized
from kvjax.storage.recent import Recent
from kvjax.transforms.cam import CaMState
from kvjax.transforms.chelsea.chelsea import Passes
from kvjax.transforms.chelsea.outlier_heads import RemainingBudget
from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.document_budget import Documents
from kvjax.transforms.kvcrush.kvcrush import KVCrushState
from kvjax.transforms.pyramidinfer.pyramidinfer import (
    Generated,
    PyramidInferLayer,
    PyramidInferPrompt,
)
from kvjax.transforms.pyramidinfer.schedule import CosineBudget, TokensEntering
from kvjax.transforms.pyramidkv import PyramidBudget
from kvjax.transforms.quest import Pages
from kvjax.transforms.spindlekv.layer_budget_eviction import LayerEviction
from kvjax.transforms.spindlekv.schedule import SpindleBudget
from pallas_kernels.formats.bits import Encoded

# Names in programs. They must stay, so that later versions can read programs of earlier ones.
NODES = {
    f"kvjax.{node.__name__}": node
    for node in (
        AttentionOptions, CaMState, Channels, Clusters, CodebookPayload, Column, Dense, Documents,
        Encoded, Generated, KVCache, KVCrushState, LayerCache, Offloaded, Pages, Passes, Quantized,
        QueryWindow, Reading, Recent, Record, Repeated, Resident, Rope, Wrapped,
    )
}  # fmt: skip
# Classes of static values, by the names of the classes. Methods have the names of the registry.
VALUES = {
    value.__name__: value
    for value in (
        Book, Chain, CosineBudget, Form, HeadGroups, HeadShares, LayerBudget, LayerEviction,
        Placement, PyramidBudget, PyramidInferLayer, PyramidInferPrompt, RemainingBudget, Ring,
        Share, SpindleBudget, TokensEntering,
    )
}  # fmt: skip


def to_json(value: Any) -> Any:
    """Writes a static value in a form that JSON can hold; `from_json` is the reverse.

    Raises:
      TypeError: the value is a function, or something else that has no form in JSON.
      ValueError: a method has no name (`kvjax.register`).

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
    """Reads a static value back: the reverse of `to_json`.

    Raises:
      ValueError: this version does not know a name, or devices of a mesh do not exist here.
    """
    if isinstance(content, list):
        return tuple(map(from_json, content))
    if not isinstance(content, dict):
        return content
    form, value = next(iter(content.items()))
    if form == "range":
        return range(*value)
    if form == "dtype":
        return jnp.dtype(value)
    if form == "array":
        numbers, dtype, shape = value
        return np.frombuffer(base64.b64decode(numbers), jnp.dtype(dtype)).reshape(shape)
    if form == "mesh":
        shape, devices = value
        return _mesh(shape, devices)
    known = METHODS | WRAPPERS | STORAGE if form == "method" else _values()
    if value not in known:
        hint = " (kvjax.register gives a method its name)" if form == "method" else ""
        raise ValueError(f"a program names the {form} {brief(value)}, which is unknown here{hint}")
    return known[value](**{name: from_json(x) for name, x in content["fields"].items()})


def _values() -> dict[str, type]:
    """Returns `VALUES`, and the classes of what methods with a name learn."""
    methods = (METHODS | WRAPPERS | STORAGE).values()
    learned = (method.learns[1] for method in methods if issubclass(method, Learner))
    return {kind.__name__: kind for kind in learned} | VALUES


def _name(value: Any) -> dict[str, str]:
    """Returns how JSON names the class of a value."""
    if _values().get(type(value).__name__) is type(value):
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
    """Returns the fields of a dataclass or named tuple that its constructor takes."""
    if dataclasses.is_dataclass(value):
        return [(x.name, getattr(value, x.name)) for x in dataclasses.fields(value) if x.init]
    return value._asdict().items()


def _mesh(shape: dict[str, int], devices: list[int] | None) -> Mesh | AbstractMesh:
    """Makes a mesh with automatic axes, as the meshes of caches have them.

    Args:
      shape: the axes and their sizes.
      devices: ids of the devices; None: the mesh is abstract.
    """
    axis_types = (AxisType.Auto,) * len(shape)
    if devices is None:
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=axis_types)
    by_id = {device.id: device for device in jax.devices()}
    if not by_id.keys() >= set(devices):
        raise ValueError(
            f"a program is for a mesh of the devices {devices}, got those of {sorted(by_id)}"
        )
    grid = np.array([by_id[number] for number in devices]).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(shape), axis_types=axis_types)


def _register(name: str, node: type) -> None:
    """Tells JAX how to write and read the nodes of a class."""
    if not dataclasses.is_dataclass(node):
        jax.export.register_namedtuple_serialization(node, serialized_name=name)
        return
    fields = dataclasses.fields(node)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if field.name not in static]

    def serialize(values: tuple) -> bytes:
        static_values = {name: to_json(x) for name, x in zip(static, values, strict=True)}
        return json.dumps({"arrays": arrays, "static": static_values}).encode()

    def build(content: dict[str, Any], children: Iterable[Any]) -> Any:
        static_values = {name: from_json(x) for name, x in content["static"].items()}
        return node(**dict(zip(content["arrays"], children, strict=True)), **static_values)

    jax.export.register_pytree_node_serialization(
        node, serialized_name=name, serialize_auxdata=serialize,
        deserialize_auxdata=json.loads, from_children=build,
    )  # fmt: skip


for _node_name, _node in NODES.items():
    _register(_node_name, _node)
