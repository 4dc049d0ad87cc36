"""Saves contexts in folders, so that another process can go on from what a model has read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from kvjax.attention.layer import RestSizes
from kvjax.attention.resting import LayerRest, rest, rest_sizes_of, sizes_of
from kvjax.calibration import Calibration, Learner
from kvjax.compose.bind import bind
from kvjax.compose.walks import map_methods
from kvjax.devices import automatic, by_first_process, mesh_of
from kvjax.files import VERSION, is_hidden
from kvjax.generation.calibration import from_arrays, others_of
from kvjax.generation.context import Context
from kvjax.generation.fingerprints import Fingerprint, describe_tokenizer, differences
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize, abstract_array
from kvjax.generation.prompt_checks import check_context, check_same_model
from kvjax.generation.prompt_pass import cache_shapes
from kvjax.messages import brief, quiet
from kvjax.protocol import KVTransform
from kvjax.registry import parse, unparse
from kvjax.storage.offload.payload import HOST_MEMORY
from kvjax.transforms.random import GENERATOR

FORMAT = 8  # a folder with another number is refused
_ABOUT, _ARRAYS = "about", "arrays"  # items of a checkpoint
_UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax adds it to the name of an incomplete folder
# Names of checkpoints and of what is in them, while they are written and afterwards. Orbax may add
# a time to the names of incomplete ones. Folders with other names are of other programs.
_INCOMPLETE = rf"{re.escape(_UNFINISHED)}(-\d+)?"
_CHECKPOINT = re.compile(rf"[1-9][0-9]*({_INCOMPLETE})?")
_IN_CHECKPOINT = re.compile(
    rf"({_ABOUT}|{_ARRAYS})({_INCOMPLETE})?|_CHECKPOINT_METADATA|commit_success\.txt"
)


@automatic()
def save_context(
    path: str | os.PathLike[str],
    context: Context,
    *,
    model: LanguageModel | FunctionalModel,
    tokenizer: Any = None,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a context to a folder, from which `load_context` reads it back.

    The folder holds an Orbax checkpoint: arrays as they are, and JSON with the method as an
    expression of all its parameters, its calibrations, sizes, versions, and descriptions of model
    and tokenizer. The context is saved at rest, without room. A context that the folder
    holds already is removed when the new one is complete. An interrupted save leaves the earlier
    context in place, and the next save removes what it left.

    All processes that share the model's mesh must call it. Each gathers the context on one of its
    devices, the first one writes, and all of them return when the folder is complete.

    Args:
      path: a folder that does not exist yet, that holds a context or the rest of an interrupted
        save, or that is empty except for hidden files.
      context: from `kvjax.read` or a result.
      model: the model that the context is of.
      tokenizer: a tokenizer of `transformers`, if `load_context` is to check it as well.
      about: more to keep that JSON can hold; `context_about` returns it.

    Raises:
      ValueError: the context is of another model, the method has no expression, `about` is
        not JSON, or `path` is something other than a context.
      OSError: the folder cannot be written, or another process of the mesh has failed.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> context = kvjax.read(model, [[1, 2, 3]], transform=kvjax.SnapKV(64))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.save_context(folder, context, model=model)
      ...     again = kvjax.load_context(folder, model)
      >>> again.length.tolist(), again.transform
      ([3], SnapKV(budget=64, window=16, kernel=7, pooling='max', group_reduce='mean'))
    """
    folder = Path(path).absolute()
    check_context(context)
    check_same_model(context, as_functional(model))
    check_free(folder)
    # Calibrations of methods have names in the expression, and lie beside it.
    transform, calibrations = _with_names(context.transform)
    mesh = context.size.mesh
    context = context.at_rest_on(None)  # files do not tell of a mesh
    leaves = jax.tree.leaves(context)
    arrays = {f"{n:05d}": _plain(leaf) for n, leaf in enumerate(leaves)}
    arrays |= {
        f"{name}.{field}": array
        for name, calibration in calibrations.items()
        for field, array in calibration.arrays.items()
    }
    content = {
        "format": FORMAT,
        "kvjax": VERSION,
        "jax": jax.__version__,
        "method": unparse(transform, defaults=True),
        "calibrations": {
            name: others_of(calibration) for name, calibration in calibrations.items()
        },
        "size": {name: x for name, x in context.size._asdict().items() if name != "mesh"},
        "held": rest_sizes_of(context.held),
        "model": context.fingerprint.content,
        "tokenizer": None if tokenizer is None else describe_tokenizer(tokenizer),
        "arrays": {name: _dtype_and_shape(x) for name, x in arrays.items()},
        "memories": [leaf.sharding.memory_kind for leaf in leaves],
        "about": {} if about is None else about,
    }
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"about must be what JSON can hold: {error}") from error
    with by_first_process(mesh) as writes:
        if writes:
            _write(folder, arrays, content)


def _write(folder: Path, arrays: dict[str, np.ndarray], content: dict[str, Any]) -> None:
    """Writes a checkpoint, which takes the place of the earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    step = 1 + max((int(place.name) for place in _steps(folder)), default=0)
    items = {_ARRAYS: ocp.args.PyTreeSave(arrays), _ABOUT: ocp.args.JsonSave(content)}
    with _checkpointer() as checkpointer:  # Orbax renames the folder when all of it is written
        checkpointer.save(folder / str(step), args=ocp.args.Composite(**items))
    _remove_all_but(folder, str(step))


@automatic()
def load_context(
    path: str | os.PathLike[str], model: LanguageModel | FunctionalModel, *, tokenizer: Any = None
) -> Context:
    """Reads the context that `save_context` wrote, onto the default device or the model's mesh.

    It is at rest, as `kvjax.read` returns it. All processes that share the model's mesh must call
    it, and each reads the folder.

    Nothing in the folder is executed: it is read as JSON and arrays. The caches are those that this
    version of kvjax makes for the method.

    Args:
      path: the folder.
      model: the model that the context is of, with the same weights and settings: see `Context`.
      tokenizer: is checked if `save_context` was given one as well.

    Raises:
      ValueError: there is no context, it is damaged, or it is of another model, tokenizer, method
        or version; says what differs. A context whose file lacks parameters of its method, as
        earlier versions wrote them, is refused: their defaults may have been others.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> context = kvjax.read(model, [[1, 2, 3]], transform=kvjax.SnapKV(64))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.save_context(folder, context, model=model)
      ...     document = kvjax.load_context(folder, model)  # for generate(context=document)
      >>> document.rows, document.length.tolist(), document.resting
      (1, [3], True)
    """
    folder, functional = Path(path).absolute(), as_functional(model)
    step = _newest(folder)
    content = _content(step)
    fingerprint = Fingerprint.of(functional)
    there, here = content["model"], fingerprint.content
    if tokenizer is not None and content["tokenizer"] is not None:
        there = {**there, "tokenizer": content["tokenizer"]}
        here = {**here, "tokenizer": describe_tokenizer(tokenizer)}
    if differing := differences(there, here):
        raise ValueError(f"the context in {folder} is of another model: its {differing}")
    method = _method_of(content, folder)
    with _damaged(folder):
        arrays = _read_arrays(step, content["arrays"])
        transform = _with_calibrations(method, content["calibrations"], arrays)
        size = CacheSize(**content["size"])
        layers = bind(transform, functional.num_layers, functional.windows, size.max_tokens)
        held = [tuple(RestSizes(*part) for part in layer) for layer in content["held"]]
        shapes = _context_shapes(functional, transform, layers, size, held, fingerprint)
    expected = jax.tree.leaves(shapes)
    stored = [arrays[name] for name in sorted(arrays) if name.isdigit()]
    plain = (jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for x in expected)
    expected_kinds = [_dtype_and_shape(x) for x in plain]
    if [_dtype_and_shape(x) for x in stored] != expected_kinds:
        raise ValueError(
            f"{folder} was written by kvjax {content['kvjax']} with jax {content['jax']}, whose "
            f"caches of {content['method']} differ from those of kvjax "
            f"{VERSION} with jax {jax.__version__}"
        )
    leaves = [
        _placed(x, like, memory)
        for x, like, memory in zip(stored, expected, content["memories"], strict=True)
    ]
    context: Context = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return context.at_rest_on(mesh_of(functional.params))


def context_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what `save_context` was given as `about`; reads no array.

    Raises:
      ValueError: there is no context, or its JSON is damaged.
    """
    return _content(_newest(Path(path).absolute()))["about"]


def context_method(path: str | os.PathLike[str]) -> KVTransform:
    """Returns the method of a context, without what it has learned; reads no array.

    Raises:
      ValueError: there is no context, its JSON is damaged, or its method has other parameters.
    """
    folder = Path(path).absolute()
    return unlearned(_method_of(_content(_newest(folder)), folder))


def unlearned(transform: KVTransform) -> KVTransform:
    """Returns a composition without what its methods have learned."""

    def without(method: KVTransform, _: object) -> KVTransform:
        return method.with_learned(None) if isinstance(method, Learner) else method

    return map_methods(without, transform)


def check_free(folder: Path) -> None:
    """Raises ValueError if a folder holds anything that `save_context` has not written.

    Hidden files do not count.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is not the folder of a context")
    for place in folder.iterdir():
        if not is_hidden(place) and not _is_checkpoint(place):
            raise ValueError(f"{folder} is not the folder of a context: it holds {place.name}")


def holds_context(folder: Path) -> bool:
    """Returns whether `save_context` has written a complete context to a folder."""
    return folder.is_dir() and bool(_steps(folder))


def _is_checkpoint(place: Path) -> bool:
    """Returns whether this is a checkpoint of `save_context`, complete or interrupted.

    It holds nothing but what `save_context` writes, so that another program's is not taken for one.
    """
    if not _CHECKPOINT.fullmatch(place.name) or not place.is_dir():
        return False
    items = [item.name for item in place.iterdir() if not is_hidden(item)]
    complete = _UNFINISHED in place.name or {_ABOUT, _ARRAYS} <= set(items)
    return complete and all(map(_IN_CHECKPOINT.fullmatch, items))


def _steps(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder: several if a save was interrupted."""
    return [x for x in folder.iterdir() if _UNFINISHED not in x.name and _is_checkpoint(x)]


def _newest(folder: Path) -> Path:
    """Returns the newest complete checkpoint; raises ValueError if there is none."""
    if not folder.exists():
        raise ValueError(f"{folder} is not the folder of a context: it does not exist")
    if folder.is_dir() and (steps := _steps(folder)):
        return max(steps, key=lambda x: int(x.name))
    check_free(folder)
    raise ValueError(
        f"{folder} is not the folder of a context: it holds none, or one whose save was interrupted"
    )


def _remove_all_but(folder: Path, kept: str) -> None:
    """Removes older checkpoints, and what interrupted saves have left.

    Anything that cannot be removed, such as a file that is open on a network disk, is left to the
    next save.
    """
    for place in folder.iterdir():
        if place.name != kept and _is_checkpoint(place):
            with contextlib.suppress(OSError):
                # Once removal has begun, the folder must not look like a complete checkpoint.
                if _UNFINISHED not in place.name:
                    place = place.rename(f"{place}{_UNFINISHED}")
                shutil.rmtree(place)


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Opens Orbax's checkpointer, without its log lines; it waits for no other process."""
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"kvjax{this}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        **{
            _ABOUT: ocp.JsonCheckpointHandler(multiprocessing_options=alone),
            _ARRAYS: ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        },
    )
    with quiet(), ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        yield checkpointer


@contextlib.contextmanager
def _damaged(folder: Path) -> Iterator[None]:
    """Turns every error while a folder is read into a ValueError of one line."""
    try:
        yield
    except Exception as error:  # from Orbax, from TensorStore, or from checks of the values
        reason = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise ValueError(f"the context in {folder} is damaged: {reason}") from error


def _content(step: Path) -> dict[str, Any]:
    """Reads the JSON of a checkpoint; raises ValueError if it has another format."""
    with _damaged(step.parent), _checkpointer() as checkpointer:
        args = ocp.args.Composite(**{_ABOUT: ocp.args.JsonRestore()})
        content = checkpointer.restore(step, args=args)[_ABOUT]
        number, version = content["format"], content["kvjax"]
    if number != FORMAT:
        raise ValueError(
            f"{step.parent} has format {number}, written by kvjax {version}; kvjax "
            f"{VERSION} reads format {FORMAT}"
        )
    return content


def _method_of(content: dict[str, Any], folder: Path) -> KVTransform:
    """Returns the method of a context, with the parameters that it was made with.

    Raises:
      ValueError: this version has other parameters, or an earlier one did not write all of them:
        nobody can tell whether their defaults were those of today.
    """
    try:
        return parse(content["method"], defaults=False)
    except ValueError as error:
        raise ValueError(
            f"the context in {folder}, which kvjax {content['kvjax']} wrote, is compressed by "
            f"{brief(content['method'])}, which kvjax {VERSION} does not read: {error}. "
            "Read its text again"
        ) from error


def _read_arrays(step: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint."""
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    restore = ocp.args.PyTreeRestore(dict.fromkeys(restore_args, 0), restore_args=restore_args)
    with _checkpointer() as checkpointer:
        return checkpointer.restore(step, args=ocp.args.Composite(**{_ARRAYS: restore}))[_ARRAYS]


def _context_shapes(
    model: FunctionalModel,
    transform: KVTransform,
    layers: tuple[KVTransform, ...],
    size: CacheSize,
    held: Sequence[LayerRest],
    fingerprint: Fingerprint,
) -> Context:
    """Makes the context that this version of kvjax would make, with shapes in place of arrays.

    Args:
      held: sizes of the caches at rest.
    """
    count = abstract_array((size.batch,), jnp.int32)
    awake = cache_shapes(model, layers, size)
    return Context(
        held=tuple(rest.eval_shape(*layer) for layer in zip(awake, held, strict=True)),
        logits=abstract_array((size.batch, model.vocab_size), jnp.float32),
        seen=abstract_array((size.batch, model.vocab_size), jnp.bool_),
        length=count,
        prompt_tokens=count,
        new_tokens=count,
        waiting=abstract_array((), jnp.int32),
        transform=transform,
        layers=layers,
        size=size,
        windows=model.windows,
        awake_sizes=sizes_of(awake),
        fingerprint=fingerprint,
    )


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Array) -> np.ndarray:
    """Returns an array as numbers; a random key as the numbers that it consists of."""
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _placed(x: np.ndarray, like: jax.ShapeDtypeStruct, memory: str) -> Array:
    """Puts an array on the default device, in the kind of memory where it was saved."""
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(x), impl=GENERATOR)
    if memory != HOST_MEMORY:
        return jnp.asarray(x)
    return jax.device_put(
        x, jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory)
    )


def _dtype_and_shape(x: Any) -> list:
    """Returns dtype and shape of an array as JSON holds them."""
    return [jnp.dtype(x.dtype).name, list(x.shape)]


def _with_names(transform: KVTransform) -> tuple[KVTransform, dict[str, Calibration]]:
    """Puts names in the place of calibrations, and returns the calibrations by their names."""
    calibrations: dict[str, Calibration] = {}

    def named(method: KVTransform, _: object) -> KVTransform:
        if not isinstance(method, Learner) or not isinstance(method.learned, Calibration):
            return method
        name = f"calibration{len(calibrations)}"
        calibrations[name] = method.learned
        return method.with_learned(name)

    return map_methods(named, transform), calibrations


def _with_calibrations(
    transform: KVTransform, others: dict[str, Any], arrays: dict[str, np.ndarray]
) -> KVTransform:
    """Puts calibrations in the place of their names: the reverse of `_with_names`."""

    def calibrated(method: KVTransform, _: object) -> KVTransform:
        if not isinstance(method, Learner) or method.learned is None:
            return method
        start = f"{method.learned}."
        of_it = {x.removeprefix(start): arrays[x] for x in arrays if x.startswith(start)}
        return method.with_learned(from_arrays(method, of_it, others[method.learned]))

    return map_methods(calibrated, transform)
