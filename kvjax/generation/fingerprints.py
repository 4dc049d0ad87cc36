"""Describes everything that a model or a tokenizer computes with, to tell them apart.

A description is a tree that JSON can hold. It is the same in every process. It is also the same
under every version of Python, JAX and Flax, as far as names are the same there.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import math
import sys
import types
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array

from kvjax.devices import divided
from kvjax.generation.model import FunctionalModel
from kvjax.messages import brief

_SAMPLES = 256  # numbers of each array that its checksum is made of
_MODELS = 16  # models whose fingerprints are remembered
_SHOWN = 3  # differences in a message
_LONG, _ENTRIES = 200, 20  # JSON of more characters or entries is replaced by a checksum
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "kvjax")  # their modules may get other names
_PLACES = (jax.sharding.Sharding, Mesh, jax.Device)  # they say where arrays are: not described


@dataclass(frozen=True)
class Fingerprint:
    """A description of everything that a model computes with.

    Two are equal if their digests are.

    Args:
      digest: a checksum of the content.
      content: sizes and windows, `"model"` with the description of what is static, and `"weights"`
        with dtype, shape and a checksum of each parameter.
    """

    digest: str
    content: dict[str, Any] = field(compare=False, repr=False)

    @classmethod
    def of(cls, model: FunctionalModel) -> Fingerprint:
        """Returns the fingerprint of a model; makes it once while the arrays are the same objects.

        NNX modules are described by all static attributes. Functions are described by their names
        and by what partial arguments, defaults and closures hold; other objects by their classes
        and attributes. The rest of a function's code, such as a number in it, and the global
        variables that it reads are not looked at. Each parameter is described by a few hundred
        numbers spread over all of it. The first call waits until they have been read.
        """
        leaves, static = jax.tree.leaves(model.params), dataclasses.replace(model, params=None)
        if _graph(model) is not None:
            # The parts follow from the graph of the model, and would take long to compare.
            static = dataclasses.replace(static, parts=None)
        immutable = all(isinstance(x, jax.Array) for x in leaves)  # NumPy arrays may change
        for known in tuple(_known) if immutable else ():
            if known.is_of(leaves, static):
                return known.fingerprint
        content = _content(model)
        fingerprint = cls(checksum(content), content)
        if immutable:
            _known.append(_Known([weakref.ref(x) for x in leaves], static, fingerprint))
        return fingerprint


class _Known(NamedTuple):
    """A model whose fingerprint has been made. Its arrays are not kept alive."""

    leaves: list[weakref.ref]
    static: FunctionalModel
    fingerprint: Fingerprint

    def is_of(self, leaves: list[Array], static: FunctionalModel) -> bool:
        """Returns whether a model with these arrays and this static part is the known one."""
        if len(leaves) != len(self.leaves):
            return False
        if any(ref() is not x for ref, x in zip(self.leaves, leaves, strict=True)):
            return False
        return static == self.static


_known: collections.deque[_Known] = collections.deque(maxlen=_MODELS)


def _graph(model: FunctionalModel) -> nnx.GraphDef | None:
    """Returns the graph of the NNX module that a model was made of; None if it was not."""
    graph = getattr(model.apply, "model", None)
    return graph if isinstance(graph, nnx.GraphDef) else None


def _content(model: FunctionalModel) -> dict[str, Any]:
    """Describes a model: the `content` of its fingerprint."""
    fields = {x.name: getattr(model, x.name) for x in dataclasses.fields(model)}
    params, called = fields.pop("params"), {name: fields.pop(name) for name in ("apply", "parts")}
    graph, weights = _graph(model), params
    if graph is not None:
        # Each call changes the state of random generators, such as that of dropout.
        weights = nnx.filter_state(params, nnx.Not(nnx.RngState))
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, _ in leaves
    ]
    return {
        **describe(fields),
        "model": describe(called if graph is None else nnx.merge(graph, params)),
        "weights": dict(zip(names, _checksums([x for _, x in leaves]), strict=True)),
    }


def describe(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Describes a value in a form that JSON can hold.

    Addresses, and everything that does not change what is computed, are left out.

    Args:
      value: any object.
      within: the ids of the objects that the value is a part of, so that a cycle ends.

    Example:
      >>> import functools, jax
      >>> from kvjax.generation.fingerprints import describe
      >>> describe({"activation": functools.partial(jax.nn.gelu, approximate=True), "bias": None})
      {'activation': {'function': 'jax.gelu', 'approximate': True}}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, str | int | float):
        return value
    if value is None or isinstance(value, (*_PLACES, nnx.Variable)):
        return None
    if isinstance(value, np.ndarray | jax.Array):
        return _checksums([value])[0]
    if _is_dtype(value):
        return jnp.dtype(value).name
    if id(value) in within:
        return "what it is a part of"
    inner = functools.partial(describe, within=(*within, id(value)))
    if isinstance(value, Set):
        return sorted(map(inner, value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [inner(x) for x in value]
    parts = value if isinstance(value, Mapping) else _parts(value)
    if isinstance(parts, str):
        return parts
    described = {str(name): inner(x) for name, x in parts.items()}
    # A later version of a class may have more options, which are None where they are not used.
    return {name: x for name, x in described.items() if x is not None}


def _is_dtype(value: Any) -> bool:
    """Returns whether a value is a dtype of NumPy or of JAX, as a type or as an object."""
    of_numpy = isinstance(value, type) and issubclass(value, np.generic)
    return of_numpy or isinstance(value, np.dtype | type(jnp.float32))


def _parts(value: Any) -> Mapping[str, Any] | str:
    """Returns what a function or another object holds, by name; its name if it holds nothing."""
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "self": value.__self__}
    while _is_wrapped(value):
        value = value.__wrapped__
    if isinstance(value, functools.partial):
        arguments = {"arguments": value.args} if value.args else {}
        return {"function": value.func, **arguments, **value.keywords}
    # Functions of libraries are known by their names, whatever another version of them holds.
    if isinstance(value, types.FunctionType) and _root(value) not in _LIBRARIES:
        variables = _variables(value)
        return {"function": _name(value), **variables} if variables else _name(value)
    named_types = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType
    of_library = _root(type(value)) in _LIBRARIES and hasattr(value, "__name__")
    if isinstance(value, named_types) or of_library:
        return _name(value)
    return {"class": _name(type(value)), **_attributes(value)}


def _is_wrapped(value: Any) -> bool:
    """Returns whether `jax.jit`, a cache or the like has been put around a function."""
    is_function = isinstance(value, types.FunctionType | functools.partial)
    of_library = _root(type(value)) in (*_LIBRARIES, "functools")
    return not is_function and of_library and hasattr(value, "__wrapped__")


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """Returns the defaults of a function's arguments, and the variables of functions around it."""
    arguments = inspect.signature(function, follow_wrapped=False).parameters.values()
    variables = {x.name: x.default for x in arguments if x.default is not x.empty}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value
            variables[name] = cell.cell_contents
    return variables


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object except those that compute nothing."""
    cls, fields = type(value), ()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
    attributes = {x.name: getattr(value, x.name) for x in fields} | getattr(value, "__dict__", {})
    unused = {x.name for x in fields if not (x.compare and x.metadata.get("computes", True))}
    of_flax = _root(cls) == "flax"
    return {
        name: x
        for name, x in attributes.items()
        if name not in unused
        and not name.startswith(("_pytree__", "_object__"))  # Flax's notes in every module
        and not (of_flax and (name.startswith("_") or name.endswith(("_init", "_metadata"))))
        and not isinstance(getattr(cls, name, None), functools.cached_property)
    }


def _module(value: Any) -> str:
    """Returns the module of a function or class; for a script, the name to import it by."""
    name = getattr(value, "__module__", None) or ""
    if name != "__main__":
        return name
    script = sys.modules["__main__"]
    spec, file = getattr(script, "__spec__", None), getattr(script, "__file__", None)
    return spec.name if spec is not None else name if file is None else Path(file).stem


def _root(value: Any) -> str:
    """Returns the package that a function or class belongs to."""
    return _module(value).partition(".")[0]


def _name(value: Any) -> str:
    """Returns the full name of a function, class or module; for a library's, without modules."""
    name = getattr(value, "__qualname__", value.__name__)
    # Another version of a library may have moved it to another module.
    module = _root(value) if _root(value) in _LIBRARIES else _module(value)
    return f"{module}.{name}" if module else name


def _checksums(arrays: Sequence[Any]) -> list[str]:
    """Returns each array's dtype, shape, and a checksum of some of its numbers, bit for bit."""
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in arrays]
    samples = jax.device_get([_sample(x) for x in arrays])  # waits for the devices once
    return [
        f"{x.dtype.name}{list(x.shape)} {checksum(sample.tobytes())}"
        for x, sample in zip(arrays, samples, strict=True)
    ]


def _sample(x: Array | np.ndarray) -> Array | np.ndarray:
    """Returns some stored numbers of an array, spread over all of it."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not x.size:
        return np.zeros(0)
    places = np.unique(np.linspace(0, x.size - 1, _SAMPLES).astype(np.int64))
    index = np.unravel_index(places, x.shape) if x.ndim else ()
    if isinstance(x, np.ndarray):
        return x[index]
    devices = x.sharding.device_set
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        # Nothing is compiled here. `np.asarray(x)` would be kept with `x`, which could then no
        # longer be donated; a shard is another object.
        return np.asarray(x.addressable_data(0))[index]
    return _sample_on_devices(x, index)


def _sample_on_devices(x: Array, index: tuple[np.ndarray, ...]) -> Array:
    """Returns the numbers at an index as `_take` does, without moving the whole array."""
    if not isinstance(x.sharding, NamedSharding):
        return _take(None, x, index)
    # Views the buffers on a mesh of automatic axes, whatever axes the user's mesh has: an index
    # into explicit ones would have to name its sharding.
    users_mesh, axis_types = x.sharding.mesh, (AxisType.Auto,) * len(x.sharding.mesh.axis_names)
    mesh = Mesh(users_mesh.devices, users_mesh.axis_names, axis_types=axis_types)  # pyright: ignore[reportArgumentType]  # arrays are on real devices
    sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    pieces = [shard.data for shard in x.addressable_shards]
    with jax.set_mesh(mesh):
        x = jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)
        return _take(mesh, x, index)


@functools.partial(jax.jit, static_argnums=0)
def _take(mesh: Mesh | None, x: Array, index: tuple[Array, ...]) -> Array:
    """Returns the numbers at an index, on every device; floats as the integers of their bits."""
    bits = 8 * x.dtype.itemsize
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits == bits:
        # The devices of a mesh add up what each of them has, and -0.0 + 0.0 would be 0.0.
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    return divided(x[index], mesh)


def checksum(value: Any) -> str:
    """Returns a checksum of bytes, or of a value that JSON can hold."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Describes everything in a tokenizer that decides which ids a text or conversation becomes.

    These are its vocabulary, its merges, the processing before and after them, added and special
    tokens, and the chat template. Long entries are described by their checksums.

    Args:
      tokenizer: of `transformers`, or any with `get_vocab`.
    """
    description: dict[str, Any] = {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        description["vocabulary"] = checksum(tokenizer.get_vocab())
    else:
        # Truncation and padding are options of each call, and the decoder changes no id. Each part
        # is pickled as JSON; that of the vocabulary and its merges would take long to parse.
        description["model"] = checksum(backend.model.__getstate__())
        for name in ("normalizer", "pre_tokenizer", "post_processor"):
            part = getattr(backend, name)
            description[name] = None if part is None else json.loads(part.__getstate__())
        added = backend.get_added_tokens_decoder()
        description["added_tokens"] = {str(index): repr(token) for index, token in added.items()}
    special = getattr(tokenizer, "special_tokens_map", None) or {}
    description["special_tokens"] = {name: str(token) for name, token in special.items()}
    for name in ("add_bos_token", "add_eos_token", "chat_template"):
        description[name] = getattr(tokenizer, name, None)
    return _shortened(description)


def _shortened(value: Any) -> Any:
    """Drops entries that are None, and puts checksums in place of long ones."""
    if isinstance(value, Mapping) and len(value) <= _ENTRIES:
        return {name: _shortened(x) for name, x in value.items() if x is not None}
    text = json.dumps(value)  # vocabularies come in the order of their ids
    return value if len(text) <= _LONG else checksum(text.encode())


def differences(there: Any, here: Any) -> str:
    """Says in one line where two descriptions differ; empty if they do not.

    Example:
      >>> from kvjax.generation.fingerprints import differences
      >>> differences({"rope": {"theta": 1e4, "type": "yarn"}}, {"rope": {"theta": 1e6}})
      "rope.theta: 10000.0 there, 1000000.0 here; rope.type: 'yarn' there, nothing here"
    """
    # Settings come before weights, and those of a whole model before those of its parts.
    paths = sorted(_paths(there, here), key=lambda x: (x[0][0] == "weights", len(x[0])))
    # A setting of a model may stand in the description of each of its layers as well.
    first: dict[tuple[str, ...], str] = {}
    for path, a, b in paths:
        first.setdefault(path[-2:], f"{'.'.join(path)}: {_brief(a)} there, {_brief(b)} here")
    lines = list(first.values())
    more = len(lines) - _SHOWN
    return "; ".join([*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _paths(there: Any, here: Any, path: tuple[str, ...] = ()) -> list[tuple]:
    """Returns the paths at which descriptions differ, each with both values."""
    if _modules(there) and _modules(here) and len(there) == len(here):
        there, here = ({str(n): x for n, x in enumerate(value)} for value in (there, here))
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [] if there == here else [(path, there, here)]
    names = dict.fromkeys((*there, *here))
    if str(there.get("class")).startswith("flax."):  # another version has other attributes
        names = [name for name in names if name in there and name in here]
    pairs = ((there.get(name), here.get(name), (*path, name)) for name in names)
    return [difference for pair in pairs for difference in _paths(*pair)]


def _modules(value: Any) -> bool:
    """Returns whether a description is that of a list of objects, such as modules."""
    return isinstance(value, list) and all(isinstance(x, Mapping) for x in value)


def _brief(value: Any) -> str:
    """Returns a value as a message shows it."""
    return "nothing" if value is None else brief(value)
