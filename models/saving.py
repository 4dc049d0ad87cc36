"""From a `Decoder` to a Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.files import check_regular
from kvjax.messages import brief

from .decoder import Decoder
from .families import FAMILIES, describe
from .finding import find_model, is_gguf
from .loading import MOST_TOKENIZER_BYTES
from .new_folder import new_folder
from .safetensors_files import INDEX_FILE, SINGLE_FILE, STORED_DTYPES, NewTensor, write_tensors
from .shapes import abstract_parameters
from .tensor_names import ParameterPath, Weight

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.jinja",
)  # fmt: skip
_WRITTEN_AT_ONCE = 2**20  # elements
_NAMES = {name: stored for stored, name in STORED_DTYPES.items()}


def save_pretrained(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a model as a Hugging Face folder, which `transformers` and `from_pretrained` load.

    The folder has `config.json`, `generation_config.json` where the model has end tokens, and the
    weights in safetensors, as they are. The configuration is that of the model type that the model
    was read from (`model.config.model_type`). For any other decoder, and for ChatGLM's, it is that
    of the first supported type that has such decoders. Tensors are written one at a time, divided
    ones too, so that host memory holds one of them. The folder gets its name when it is complete.

    Args:
      model: the decoder.
      folder: to write to; nothing may be there but an empty folder.
      max_shard_bytes: weights that are larger together are written to several files of at most so
        many bytes, but for a tensor that is larger alone, with an index of them.
      tokenizer_from: a folder or a Hugging Face id whose tokenizer files are copied. None: the
        folder has no tokenizer; that of `load_tokenizer` has a `save_pretrained` of its own.

    Raises:
      TypeError: `model` is not a `Decoder`, or has something else than arrays as parameters.
      ValueError: no supported model type has such decoders; parameters do not fit `model.config`,
        are of several dtypes or of one that is not stored, or are not all on devices of this
        process; `folder` is not empty; there is no tokenizer in `tokenizer_from`; or
        `max_shard_bytes` is below 1.
      OSError: the folder cannot be written.

    Example:
      >>> import tempfile
      >>> from kvjax.models import (
      ...     DecoderConfig, RopeConfig, from_pretrained, random_decoder, save_pretrained)
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_pretrained(model, folder)
      ...     from_pretrained(folder).config.model_type
      'llama'
    """
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {brief(max_shard_bytes)}")
    parameters = check_parameters(model)
    dtype = _one_dtype(parameters)
    raw = describe(model.config) | {"dtype": dtype}
    copied = [] if tokenizer_from is None else _tokenizer_files(tokenizer_from)
    tensors = _tensors(FAMILIES[raw["model_type"]].weights(model.config), parameters, dtype)
    with new_folder(folder) as partial:
        _write_json(partial / "config.json", raw)
        if model.config.eos_token_ids:
            ids = {name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            _write_json(partial / "generation_config.json", ids)
        for path in copied:
            shutil.copyfile(path, partial / path.name)
        _write_shards(partial, tensors, max_shard_bytes)


def check_parameters(model: Decoder) -> dict[ParameterPath, jax.Array]:
    """The parameters of a decoder by their paths, which are those that its configuration asks for.

    Raises:
      TypeError: it is not a `Decoder`, or has something else than arrays as parameters.
      ValueError: parameters are missing, unknown or misshapen, or not all of one is on devices of
        this process.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"model must be a Decoder, got {type(model).__name__}")
    found = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    _, leaves = abstract_parameters(model.config, jnp.float32)
    expected = {path: leaf.get_value() for path, leaf in leaves.items()}
    if found.keys() != expected.keys():
        path = sorted(found.keys() ^ expected.keys(), key=str)[0]
        state = "is unknown to" if path in found else "is missing for"
        raise ValueError(f"parameter {dotted(path)} {state} the model's configuration")
    for path, value in found.items():
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"parameter {dotted(path)} must be an array, got {brief(value)}")
        if value.shape != expected[path].shape:
            raise ValueError(
                f"parameter {dotted(path)} has shape {list(value.shape)}, expected "
                f"{list(expected[path].shape)}"
            )
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise ValueError(f"parameter {dotted(path)} is not all on devices of this process")
    return found


def dotted(path: ParameterPath) -> str:
    """A parameter's path as text, as `layers.0.mlp.up_proj.kernel`."""
    return ".".join(map(str, path))


def _one_dtype(parameters: Mapping[ParameterPath, Any]) -> str:
    names = sorted({jnp.dtype(value.dtype).name for value in parameters.values()})
    if len(names) > 1 or names[0] not in _NAMES:
        raise ValueError(
            f"parameters must have one dtype of {', '.join(_NAMES)}, got {', '.join(names)}"
        )
    return names[0]


def _tensors(
    weights: Mapping[str, Weight], parameters: Mapping[ParameterPath, Any], dtype: str
) -> list[NewTensor]:
    """What is to be written: each parameter once, under the first name that it has."""
    tensors, taken = [], set()
    for name, weight in weights.items():
        if weight.parts in taken:  # a tied output projection
            continue
        taken.add(weight.parts)
        values = [parameters[path] for path in weight.parts]
        shapes = [x.shape[::-1] if weight.transpose else x.shape for x in values]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        tensors.append(NewTensor(name, shape, jnp.dtype(dtype), _Blocks(values, weight.transpose)))
    return tensors


class _Blocks:
    """The rows of a stored tensor, block by block, in the orientation of the file."""

    def __init__(self, values: list[Any], transpose: bool) -> None:
        self.values = values
        self.transpose = transpose

    def __iter__(self) -> Iterator[np.ndarray]:
        for value in self.values:
            whole = on_host(value)
            whole = whole.T if self.transpose else whole
            rows = max(_WRITTEN_AT_ONCE // max(whole[0].size, 1), 1)
            for start in range(0, len(whole), rows):
                yield np.ascontiguousarray(whole[start : start + rows])
            del whole  # before the next one comes


def on_host(value: jax.Array | np.ndarray) -> np.ndarray:
    """The numbers of an array, all shards together.

    JAX keeps what it has copied to the host with the array. The copy is therefore made of another
    array with the same buffers, or a model that is written would end up in host memory as a whole.
    """
    if not isinstance(value, jax.Array):
        return value
    pieces = [shard.data for shard in value.addressable_shards]
    same = jax.make_array_from_single_device_arrays(value.shape, value.sharding, pieces)
    return np.asarray(same)


def _write_shards(folder: Path, tensors: list[NewTensor], most: int) -> None:
    """The safetensors files, and their index where there are several."""
    shards: list[list[NewTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(one.nbytes for one in (*shards[-1], tensor)) > most:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_tensors(folder / SINGLE_FILE, shards[0])
        return
    files = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard)
        files |= {tensor.name: name for tensor in shard}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    _write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": files})


def _tokenizer_files(directory_or_hub_id: str | os.PathLike[str]) -> list[Path]:
    folder = find_model(directory_or_hub_id)
    if is_gguf(folder):
        raise ValueError(
            f"tokenizer_from must be a folder or a Hugging Face id, got {folder}: "
            "load_tokenizer makes a tokenizer of a GGUF file, which has a save_pretrained"
        )
    found = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    for path in found:
        check_regular(path, MOST_TOKENIZER_BYTES)
    if not found:
        raise ValueError(f"there are no files of a tokenizer in {folder}")
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
