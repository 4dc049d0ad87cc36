"""What tells models and tokenizers apart: all that computes, described so that it can be kept.

A description is a tree that JSON can hold, the same in every process and, as far as names are the
same there, under every version of Python, JAX and Flax.
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

_SAMPLES = 256  # numbers of each array that are looked at
_MODELS = 16  # whose fingerprints are remembered
_SHOWN = 3  # differences in a message
_LONG, _ENTRIES = 200, 20  # characters and entries, above which a checksum stands for JSON
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "kvjax")  # their modules may get other names
_PLACES = (jax.sharding.Sharding, Mesh, jax.Device)  # where arrays are, computes nothing


@dataclass(frozen=True)
class Fingerprint:
    """What a model computes with. Two are equal if all of it is.

    Args:
      digest: a checksum of the content.
      content: sizes and windows, `"model"` with the description of what is static, and `"weights"`
        with dtype, shape and a checksum of each parameter.
    """

    digest: str
    content: dict[str, Any] = field(compare=False, repr=False)

    @classmethod
    def of(cls, model: FunctionalModel) -> Fingerprint:
        """The fingerprint of a model, made once for as long as its arrays are the same objects.

        Of NNX modules all static attributes are described. Of functions it is their names, and what
        partial arguments, defaults and closures hold; of other objects their classes and
        attributes. What else the code of a function says, such as a number in it, and what it reads
        from global variables, is not looked at. Of each parameter a few hundred numbers are read,
        spread over all of it, for which the first call waits.
        """
        leaves, static = jax.tree.leaves(model.params), dataclasses.replace(model, params=None)
        if _graph(model) is not None:  # from which the parts follow, each a graph to compare
            static = dataclasses.replace(static, parts=None)
        lasting = all(isinstance(x, jax.Array) for x in leaves)  # others may change
        for known in tuple(_known) if lasting else ():
            if known.is_of(leaves, static):
                return known.fingerprint
        content = _content(model)
        found = cls(checksum(content), content)
        if lasting:
            _known.append(_Known([weakref.ref(x) for x in leaves], static, found))
        return found


class _Known(NamedTuple):
    """A model whose fingerprint has been made. Its arrays are not kept alive."""

    leaves: list[weakref.ref]
    static: FunctionalModel
    fingerprint: Fingerprint

    def is_of(self, leaves: list[Array], static: FunctionalModel) -> bool:
        """Whether these are the arrays of a model, and `static` is all else of it."""
        same = len(leaves) == len(self.leaves)
        if not same or any(ref() is not x for ref, x in zip(self.leaves, leaves, strict=True)):
            return False
        return static == self.static


_known: collections.deque[_Known] = collections.deque(maxlen=_MODELS)


def _graph(model: FunctionalModel) -> nnx.GraphDef | None:
    """The graph of the NNX module that a model was made of, if it was."""
    graph = getattr(model.apply, "model", None)
    return graph if isinstance(graph, nnx.GraphDef) else None


def _content(model: FunctionalModel) -> dict[str, Any]:
    fields = {x.name: getattr(model, x.name) for x in dataclasses.fields(model)}
    params, called = fields.pop("params"), {name: fields.pop(name) for name in ("apply", "parts")}
    graph, weights = _graph(model), params
    if graph is not None:  # what dropout draws is not computed again
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
    """A value as JSON can hold it: no addresses, and nothing that computes nothing.

    Args:
      value: any object.
      within: the ids of the objects that it is a part of.

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
    of_numpy = isinstance(value, type) and issubclass(value, np.generic)
    return of_numpy or isinstance(value, np.dtype | type(jnp.float32))


def _parts(value: Any) -> Mapping[str, Any] | str:
    """What a function or another object holds, by name; its own name where it holds nothing."""
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "self": value.__self__}
    while _is_wrapped(value):
        value = value.__wrapped__
    if isinstance(value, functools.partial):
        given = {"arguments": value.args} if value.args else {}
        return {"function": value.func, **given, **value.keywords}
    if isinstance(value, types.FunctionType) and _root(value) not in _LIBRARIES:
        held = _held(value)
        return {"function": _name(value), **held} if held else _name(value)
    kinds = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType
    of_library = _root(type(value)) in _LIBRARIES and hasattr(value, "__name__")
    if isinstance(value, kinds) or of_library:
        return _name(value)
    return {"class": _name(type(value)), **_attributes(value)}


def _is_wrapped(value: Any) -> bool:
    """Whether `jax.jit`, a cache or the like has been put around a function."""
    own = isinstance(value, types.FunctionType | functools.partial)
    of_library = _root(type(value)) in (*_LIBRARIES, "functools")
    return not own and of_library and hasattr(value, "__wrapped__")


def _held(function: types.FunctionType) -> dict[str, Any]:
    """Defaults of a function's arguments, and the variables of functions around it."""
    arguments = inspect.signature(function, follow_wrapped=False).parameters.values()
    held = {x.name: x.default for x in arguments if x.default is not x.empty}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value
            held[name] = cell.cell_contents
    return held


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object but for those that compute nothing."""
    kind, fields = type(value), ()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
    found = {x.name: getattr(value, x.name) for x in fields} | getattr(value, "__dict__", {})
    unused = {x.name for x in fields if not (x.compare and x.metadata.get("computes", True))}
    of_flax = _root(kind) == "flax"
    return {
        name: x
        for name, x in found.items()
        if name not in unused
        and not name.startswith(("_pytree__", "_object__"))  # notes of Flax in all modules
        and not (of_flax and (name.startswith("_") or name.endswith(("_init", "_metadata"))))
        and not isinstance(getattr(kind, name, None), functools.cached_property)
    }


def _module(value: Any) -> str:
    """The module of a function or a class; of a script, by the name that others import it by."""
    name = getattr(value, "__module__", None) or ""
    if name != "__main__":
        return name
    script = sys.modules["__main__"]
    spec, file = getattr(script, "__spec__", None), getattr(script, "__file__", None)
    return spec.name if spec is not None else name if file is None else Path(file).stem


def _root(value: Any) -> str:
    return _module(value).partition(".")[0]


def _name(value: Any) -> str:
    """The name of a function, a class or a module. Modules of libraries may change their names."""
    name = getattr(value, "__qualname__", value.__name__)
    place = _root(value) if _root(value) in _LIBRARIES else _module(value)
    return f"{place}.{name}" if place else name


def _checksums(arrays: Sequence[Any]) -> list[str]:
    """Dtype and shape of arrays, with a checksum of some numbers of each, bit for bit."""
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in arrays]
    numbers = jax.device_get([_sample(x) for x in arrays])  # waits for the devices once
    return [
        f"{x.dtype.name}{list(x.shape)} {checksum(own.tobytes())}"
        for x, own in zip(arrays, numbers, strict=True)
    ]


def _sample(x: Array | np.ndarray) -> Array | np.ndarray:
    """Some numbers of an array as they are stored, spread over all of it."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not x.size:
        return np.zeros(0)
    places = np.unique(np.linspace(0, x.size - 1, _SAMPLES).astype(np.int64))
    index = np.unravel_index(places, x.shape)
    if isinstance(x, np.ndarray):
        return x[index]
    devices = x.sharding.device_set
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        # Nothing is compiled. What NumPy sees would stay with `x` itself, and forbid its donation.
        return np.asarray(x.addressable_data(0))[index]
    if not isinstance(x.sharding, NamedSharding):
        return _taken(None, x, index)
    # The same buffers on axes that XLA looks after, whatever the user's are.
    own, kinds = x.sharding.mesh, (AxisType.Auto,) * len(x.sharding.mesh.axis_names)
    mesh = Mesh(own.devices, own.axis_names, axis_types=kinds)
    where = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    pieces = [shard.data for shard in x.addressable_shards]
    with jax.set_mesh(mesh):
        return _taken(mesh, jax.make_array_from_single_device_arrays(x.shape, where, pieces), index)


@functools.partial(jax.jit, static_argnums=0)
def _taken(mesh: Mesh | None, x: Array, index: tuple[Array, ...]) -> Array:
    bits = 8 * x.dtype.itemsize
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits == bits:
        # Devices add up what each of them has, and -0 + 0 is 0.
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    return divided(x[index], mesh)


def checksum(value: Any) -> str:
    """A checksum of bytes, or of what JSON can hold."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """What decides which ids a text or a conversation becomes, of a tokenizer.

    That is its words, how they are merged, what is done to a text before and after, added and
    special tokens, and the chat template.

    Long entries are described by their checksums.

    Args:
      tokenizer: of `transformers`, or any with `get_vocab`.
    """
    found: dict[str, Any] = {"vocabulary": checksum(tokenizer.get_vocab())}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # How many tokens are cut off or filled up is a call's, and what decodes changes no id.
        parts = json.loads(backend.to_str())
        names = ("model", "normalizer", "pre_tokenizer", "post_processor", "added_tokens")
        found |= {name: parts[name] for name in names}
    special = getattr(tokenizer, "special_tokens_map", None) or {}
    found["special_tokens"] = {name: str(token) for name, token in special.items()}
    for name in ("add_bos_token", "add_eos_token", "chat_template"):
        found[name] = getattr(tokenizer, name, None)
    return _shortened(found)


def _shortened(value: Any) -> Any:
    """JSON without what is None, and with a checksum in place of what is long."""
    if isinstance(value, Mapping) and len(value) <= _ENTRIES:
        return {name: _shortened(x) for name, x in value.items() if x is not None}
    return value if len(json.dumps(value)) <= _LONG else checksum(value)


def differences(there: Any, here: Any) -> str:
    """In what two descriptions differ, in one line; empty where they don't.

    Example:
      >>> from kvjax.generation.fingerprints import differences
      >>> differences({"rope": {"theta": 1e4, "type": "yarn"}}, {"rope": {"theta": 1e6}})
      "rope.theta: 10000.0 there, 1000000.0 here; rope.type: 'yarn' there, nothing here"
    """
    found = sorted(_paths(there, here), key=lambda x: (x[0][0] == "weights", len(x[0])))
    # A setting of a model may stand in the description of each of its layers as well.
    first: dict[tuple[str, ...], str] = {}
    for path, a, b in found:
        first.setdefault(path[-2:], f"{'.'.join(path)}: {_brief(a)} there, {_brief(b)} here")
    shown = list(first.values())
    more = len(shown) - _SHOWN
    return "; ".join([*shown[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _paths(there: Any, here: Any, path: tuple[str, ...] = ()) -> list[tuple]:
    """Where descriptions differ, with both values."""
    if _modules(there) and _modules(here) and len(there) == len(here):
        there, here = ({str(n): x for n, x in enumerate(value)} for value in (there, here))
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return [] if there == here else [(path, there, here)]
    names = dict.fromkeys((*there, *here))
    if str(there.get("class")).startswith("flax."):  # other versions have other attributes
        names = [name for name in names if name in there and name in here]
    pairs = ((there.get(name), here.get(name), (*path, name)) for name in names)
    return [found for pair in pairs for found in _paths(*pair)]


def _modules(value: Any) -> bool:
    """Whether it is a list of objects."""
    return isinstance(value, list) and all(isinstance(x, Mapping) for x in value)


def _brief(value: Any) -> str:
    return "nothing" if value is None else brief(value)
