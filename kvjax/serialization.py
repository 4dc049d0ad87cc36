"""Names classes in programs that `jax.export` serializes, and writes their static parts.

A serialized program holds the structure of its inputs and outputs. Each class of nodes has a name
in it, `kvjax.` and that of the class (`class_name`). Static fields are JSON: numbers and texts
as they are, methods by their names (`named`), other values by the names of their classes
(`static_value`). Reading them executes nothing from the program. A name is known when the module of
the class is imported.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.messages import brief

# Names in programs. They must stay, so that later versions can read programs of earlier ones.
NODES: dict[str, type] = {}
VALUES: dict[str, type] = {}
TRANSFORMS: dict[str, type] = {}

Class = TypeVar("Class", bound=type)


def pytree_node(node: Class) -> Class:
    """Makes a class a node of pytrees that exported programs can hold; a decorator.

    It is for states and payloads: a NamedTuple, or a dataclass, which it registers with JAX; fields
    with `metadata={"static": True}` are static. An exported program calls the class `kvjax.`, its
    module and its name. A notebook defines a class anew whenever its cell runs: JAX keeps the first
    one, so that objects of the later ones are not exported.

    Example:
      >>> import dataclasses, jax, kvjax
      >>> @kvjax.kit.pytree_node
      ... @dataclasses.dataclass(frozen=True)
      ... class Sums:
      ...     total: jax.Array
      >>> jax.tree.map(lambda x: x + 1, Sums(1))
      Sums(total=2)
    """
    name, is_dataclass = f"kvjax.{class_name(node)}", dataclasses.is_dataclass(node)
    if is_dataclass:
        jax.tree_util.register_dataclass(node)
    is_new = name not in NODES
    NODES[name] = node
    if not is_new:
        return node
    if is_dataclass:
        _register_dataclass(name, node)
    else:
        jax.export.register_namedtuple_serialization(node, serialized_name=name)
    return node


def static_value(value: Class) -> Class:
    """Lets exported programs hold values of a class as static parts; a decorator.

    It is for values in fields of a method or a state: a NamedTuple, or a frozen dataclass. A method
    that has a name (`kvjax.register`) needs no decorator.

    Example:
      >>> import dataclasses, kvjax
      >>> @kvjax.kit.static_value
      ... @dataclasses.dataclass(frozen=True)
      ... class Schedule:
      ...     first: float
      >>> Schedule(0.5)
      Schedule(first=0.5)
    """
    VALUES[class_name(value)] = value
    return value


def named(name: str) -> Callable[[Class], Class]:
    """Gives the class of a method its name in texts and in exported programs; a decorator."""

    def decorate(method: Class) -> Class:
        TRANSFORMS[name] = method
        return method

    return decorate


def class_name(new: type) -> str:
    """Returns what a class is called: its name, and its module before it if it is a user's."""
    ours = new.__module__.partition(".")[0] in ("kvjax", "pallas_kernels")
    return new.__name__ if ours else f"{new.__module__}.{new.__name__}"


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
    known = TRANSFORMS if form == "method" else VALUES
    if value not in known:
        hint = " (kvjax.register gives a method its name)" if form == "method" else ""
        raise ValueError(f"a program names the {form} {brief(value)}, which is unknown here{hint}")
    return known[value](**{name: from_json(x) for name, x in content["fields"].items()})


def _name(value: Any) -> dict[str, str]:
    """Returns how JSON names the class of a value."""
    name = class_name(type(value))
    if VALUES.get(name) is type(value):
        return {"value": name}
    for name, method in TRANSFORMS.items():
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


def _register_dataclass(name: str, node: type) -> None:
    """Tells JAX how to write and read the nodes of a dataclass."""
    fields = dataclasses.fields(node)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if field.name not in static]

    def serialize(values: tuple) -> bytes:
        static_values = {name: to_json(x) for name, x in zip(static, values, strict=True)}
        return json.dumps({"arrays": arrays, "static": static_values}).encode()

    def build(aux_data: Any, children: Iterable[Any]) -> Any:
        static_values = {name: from_json(x) for name, x in aux_data["static"].items()}
        return node(**dict(zip(aux_data["arrays"], children, strict=True)), **static_values)

    jax.export.register_pytree_node_serialization(
        node, serialized_name=name, serialize_auxdata=serialize,
        deserialize_auxdata=json.loads, from_children=build,
    )  # fmt: skip
