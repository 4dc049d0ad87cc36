"""Converted parameters as Orbax checkpoints, read onto any devices, however they were divided."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx, traverse_util
from jax.sharding import Mesh, Sharding

import kvjax
from kvjax.files import check_regular, read_json, visible_files
from kvjax.messages import brief, one_line, quiet

from .config import DecoderConfig, LayerConfig, RopeConfig
from .decoder import Decoder
from .families import FAMILIES, describe
from .loading import ShardingRule, check_sharding, chosen_sharding
from .new_folder import new_folder
from .placement import weight_placement
from .saving import check_parameters, dotted
from .shapes import abstract_parameters
from .tensor_names import ParameterPath

FORMAT = 1
"""Of the folder; another number is refused."""

_ABOUT, _ARRAYS = "decoder.json", "parameters"


def save_checkpoint(model: Decoder, folder: str | os.PathLike[str]) -> None:
    """Writes a model as an Orbax checkpoint: its parameters as they are, and its configuration.

    Nothing is converted: parameters keep their dtype, and those that are divided among devices are
    written shard by shard. `load_checkpoint` reads them onto any devices, without the work that a
    Hugging Face folder takes. The folder has `decoder.json` (configuration, shapes, versions and
    the sizes of all files) and the checkpoint of Orbax, `parameters`. It gets its name when it is
    complete.

    Args:
      model: the decoder.
      folder: to write to; nothing may be there but an empty folder.

    Raises:
      TypeError: `model` is not a `Decoder`, or has something else than arrays as parameters.
      ValueError: parameters do not fit `model.config`, or are not all on devices of this process;
        `folder` is not empty.
      OSError: the folder cannot be written.

    Example:
      >>> import tempfile
      >>> from kvjax.models import (
      ...     DecoderConfig, RopeConfig, load_checkpoint, random_decoder, save_checkpoint)
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_checkpoint(model, folder)
      ...     load_checkpoint(folder).config == model.config
      True
    """
    parameters = check_parameters(model)
    with new_folder(folder) as partial:
        with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeSave(_nested(parameters))
            checkpointer.save(partial / _ARRAYS, args=args)
        about = {
            "format": FORMAT,
            "kvjax": kvjax.__version__,
            "jax": jax.__version__,
            "config": dataclasses.asdict(model.config),
            "parameters": {dotted(path): _kind(x) for path, x in parameters.items()},
            "files": _sizes(partial / _ARRAYS),
        }
        (partial / _ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def load_checkpoint(
    folder: str | os.PathLike[str],
    sharding: Sharding | ShardingRule | None = None,
    *,
    mesh: Mesh | None = None,
) -> Decoder:
    """The model that `save_checkpoint` wrote, on devices that need not be those of then.

    Configuration, shapes and the sizes of all files are checked before any parameter is read, and
    nothing of the folder is run. A device reads what it is to hold.

    Args:
      folder: of the checkpoint.
      sharding: where the parameters go, as in `from_pretrained`: one `jax.sharding.Sharding` for
        all, or a function from a tensor's name and the shape in the decoder to a Sharding or None.
        The name is the one that `save_pretrained` gives the tensor, so that a function serves both;
        where no model type of Hugging Face has such decoders, it is the parameter's path, as
        `layers.0.mlp.up_proj.kernel`. None (default): the default device.
      mesh: devices that share the model, as in `from_pretrained`.

    Returns:
      A `Decoder`.

    Raises:
      ValueError: the folder is no such checkpoint, is damaged or was written in another format; a
        parameter cannot be placed. One line says which.
      TypeError: `sharding` is neither a Sharding nor callable, or returns neither a Sharding nor
        None.

    Example:
      >>> import jax
      >>> from kvjax.models import load_checkpoint
      >>> mesh = jax.make_mesh((1, 8), ("data", "tensor"))  # doctest: +SKIP
      >>> model = load_checkpoint("checkpoint", mesh=mesh)  # doctest: +SKIP
    """
    check_sharding(sharding, mesh)
    folder = Path(folder).absolute()
    about = _read_about(folder)
    with _damaged(folder):
        if about["files"] != _sizes(folder / _ARRAYS):
            raise ValueError("files are missing, unknown or not of the size that they had")
        config = _config(about["config"], most_layers=len(about["parameters"]))
        graphdef, leaves = abstract_parameters(config, jnp.float32)
        shapes = {path: leaf.get_value() for path, leaf in leaves.items()}
        described = {dotted(path): list(x.shape) for path, x in shapes.items()}
        if {name: shape for name, (_, shape) in about["parameters"].items()} != described:
            raise ValueError("its parameters are not those of its configuration")
        dtypes = {path: jnp.dtype(about["parameters"][dotted(path)][0]) for path in shapes}
    names = _tensor_names(config)
    default = jnp.zeros(()).sharding
    rule = None if mesh is None else weight_placement(config, mesh)

    def place(path: ParameterPath, shape: tuple[int, ...]) -> Sharding:
        where = sharding if rule is None else rule(path)
        return chosen_sharding(names.get(path, dotted(path)), shape, where) or default

    places = {path: place(path, x.shape) for path, x in shapes.items()}
    restore = {
        path: ocp.ArrayRestoreArgs(sharding=places[path], global_shape=x.shape)
        for path, x in shapes.items()
    }
    with _damaged(folder), quiet():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            like = _nested(dict.fromkeys(shapes, 0))  # as they are stored, not cast
            args = ocp.args.PyTreeRestore(like, restore_args=_nested(restore))
            found = traverse_util.flatten_dict(checkpointer.restore(folder / _ARRAYS, args=args))
        arrays: dict[ParameterPath, Any] = {path: found[tuple(map(str, path))] for path in shapes}
        for path, x in arrays.items():
            if x.dtype != dtypes[path]:
                raise ValueError(f"{dotted(path)} is {x.dtype}, and was {dtypes[path]}")
    filled = {path: leaf.replace(arrays[path]) for path, leaf in leaves.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@contextlib.contextmanager
def _damaged(folder: Path) -> Iterator[None]:
    """Whatever goes wrong while a folder is read is said in one line."""
    try:
        yield
    except Exception as error:  # of Orbax, of TensorStore, of what checks the values
        raise ValueError(
            f"the checkpoint in {folder} is damaged: {one_line(error, 300)}"
        ) from error


def _read_about(folder: Path) -> dict[str, Any]:
    """The content of a folder's JSON, of this format."""
    if not (folder / _ABOUT).exists():
        raise ValueError(f"{folder} is no checkpoint of a decoder: it has no {_ABOUT}")
    about = read_json(folder / _ABOUT)
    names = {"format": int, "kvjax": str, "config": dict, "parameters": dict, "files": dict}
    wrong = [name for name, kind in names.items() if not isinstance(about.get(name), kind)]
    if wrong:
        raise ValueError(f"{folder / _ABOUT} lacks {wrong[0]}")
    if about["format"] != FORMAT:
        raise ValueError(
            f"{folder} has format {brief(about['format'])}, written by kvjax "
            f"{about['kvjax']}; kvjax {kvjax.__version__} reads format {FORMAT}"
        )
    return about


def _config(raw: Mapping[str, Any], most_layers: int) -> DecoderConfig:
    """A configuration from its fields as JSON has them."""
    if not isinstance(raw.get("num_layers"), int) or raw["num_layers"] > most_layers:
        raise ValueError(
            f"it has {most_layers} parameters, and {brief(raw.get('num_layers'))} layers"
        )
    layers = (LayerConfig(**{**one, "rope": _rope(one["rope"])}) for one in raw["layers"])
    own = {"rope": _rope(raw["rope"]), "layers": tuple(layers)}
    return DecoderConfig(**{**raw, **own, "eos_token_ids": tuple(raw["eos_token_ids"])})


def _rope(raw: Mapping[str, Any] | None) -> RopeConfig | None:
    if raw is None:
        return None
    lists = {name: tuple(raw[name]) for name in ("short_factors", "long_factors")}
    return RopeConfig(**{**raw, **lists})


def _tensor_names(config: DecoderConfig) -> dict[ParameterPath, str]:
    """The name of the tensor in which `save_pretrained` would write each parameter, if it can."""
    try:
        kind = describe(config)["model_type"]
    except ValueError:
        return {}
    names: dict[ParameterPath, str] = {}
    for name, weight in FAMILIES[kind].weights(config).items():
        for path in weight.parts:
            names.setdefault(path, name)
    return names


def _nested(parameters: Mapping[ParameterPath, Any]) -> dict[str, Any]:
    return traverse_util.unflatten_dict(
        {tuple(map(str, path)): value for path, value in parameters.items()}
    )


def _kind(x: Any) -> list:
    return [jnp.dtype(x.dtype).name, list(x.shape)]


def _sizes(folder: Path) -> dict[str, int]:
    """The size of every file in a folder but hidden ones, all of them regular."""
    found = {}
    for path in visible_files(folder):
        check_regular(path)
        found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found
