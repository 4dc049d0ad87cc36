"""Checkpoints in one form for the loader: Hugging Face folders and GGUF files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .config import DecoderConfig
from .families import FAMILIES, Family, check_depth, parse_config, read_raw_config
from .finding import is_gguf
from .gguf_architectures import ROPE_TENSORS, architecture_of, config_of, family_of
from .gguf_header import GgufHeader, read_header
from .gguf_tensors import read_gguf_tensors, readable_types
from .plain_weights import check_names
from .safetensors_files import (
    STORED_DTYPES,
    Slices,
    StoredTensor,
    list_tensors,
    open_tensors,
    tensor_names,
)
from .tensor_names import Weight


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its configuration, and descriptions of its tensors.

    Attributes:
      config: the decoder's configuration.
      dtype: NumPy name of the dtype that the model was stored in, if it is known.
      tensors: name → description.
      weights: every name that a tensor may have → its place in the decoder.
      types: element types that can be read, by their names in the descriptions.
      read: `read(names)` yields the named tensors one by one, each opened for slicing, or read, at
        its turn. A tensor is valid until the next one is yielded.
      quantised: the file whose weights have to be decoded; None: there is nothing to decode.
    """

    config: DecoderConfig
    dtype: str | None
    tensors: Mapping[str, StoredTensor]
    weights: Mapping[str, Weight]
    types: tuple[str, ...]
    read: Callable[[Iterable[str]], Iterator[tuple[str, Slices]]]
    quantised: Path | None = None


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint of a Hugging Face folder or a GGUF file; no weight is read.

    Raises:
      ValueError: a file is missing or unreadable, or describes a model that is not supported. The
        message names the file and what is wrong with it.

    Example:
      >>> from kvjax.models import demo
      >>> from kvjax.models.checkpoints import open_checkpoint
      >>> open_checkpoint(demo.directory()).tensors["model.norm.weight"].shape
      (128,)
    """
    return _open_gguf(path) if is_gguf(path) else _open_folder(path)


def read_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """Reads the configuration of the model in a Hugging Face folder or a GGUF file.

    Args:
      path: a folder with `config.json`, or a GGUF file with the same in its metadata. If the folder
        has a `generation_config.json`, its end tokens are used.

    Returns:
      The `DecoderConfig`.

    Raises:
      ValueError: the file is missing or unreadable; its model type, rope type, activation or
        quantisation is not supported (the message says what is); a value is missing or wrong; there
        is an adapter in the folder; a checkpoint in it is unreadable, or the number of its layers
        is not that of the configuration.

    Example:
      >>> from kvjax.models import read_config
      >>> read_config("llama-3.2-1b").num_layers  # doctest: +SKIP
      16
    """
    path = Path(path)
    if is_gguf(path):
        return _read_gguf(read_header(path))[-1]
    raw = read_raw_config(path)
    return _read_folder(path, raw, tensor_names(path))[1]


def _read_folder(
    folder: Path, raw: Mapping[str, Any], names: Collection[str] | None
) -> tuple[Family, DecoderConfig]:
    """Returns the family, with the tensor names of this checkpoint, and the configuration."""
    family = FAMILIES[raw["model_type"]]
    if names is not None:
        check_names(names, folder)
        family = family._replace(names=family.names.among(names))
    config = parse_config(raw, family, folder / "config.json")
    if names is not None:
        check_depth(family, config, names, folder / "config.json")
    return family, config


def _open_folder(folder: Path) -> Checkpoint:
    raw = read_raw_config(folder)
    tensors = list_tensors(folder)
    family, config = _read_folder(folder, raw, tensors)
    weights = family.names.weights(config)
    # Files without `dtype` or its former name `torch_dtype` have the first tensor's.
    first = next((STORED_DTYPES.get(tensor.dtype) for tensor in tensors.values()), None)
    return Checkpoint(
        config,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or first,
        tensors=tensors,
        weights=weights,
        types=tuple(STORED_DTYPES),
        read=lambda names: open_tensors(tensors, names),
    )


def _read_gguf(header: GgufHeader) -> tuple[dict[str, Any], Family, DecoderConfig]:
    raw = config_of(header)
    family = family_of(header, raw)
    config = parse_config(raw, family, header.path)
    check_depth(family, config, header.tensors, header.path)
    return raw, family, config


def _open_gguf(path: Path) -> Checkpoint:
    header = read_header(path)
    raw, family, config = _read_gguf(header)
    change = architecture_of(header).change

    def read(names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in read_gguf_tensors(header, names):
            if change is not None:
                tensor = change(name, tensor, config)
            yield name, tensor
            del tensor  # frees the tensor before the next one is read

    tensors = {name: x for name, x in header.tensors.items() if name not in ROPE_TENSORS}
    plain = {tensor.dtype for tensor in tensors.values()} <= set(STORED_DTYPES)
    return Checkpoint(
        config,
        dtype=raw["dtype"],
        tensors=tensors,
        weights=family.names.weights(config),
        types=readable_types(),
        read=read,  # pyright: ignore[reportArgumentType]  # arrays are read in parts, too
        quantised=None if plain else path,
    )
