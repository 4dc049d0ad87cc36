"""Lists the tensors of a Hugging Face folder, and reads them one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.files import check_regular, read_json

STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported element types of weights: name in the file → NumPy name."""

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""File with all weights, or index of several files."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


class StoredTensor(NamedTuple):
    """Description of a tensor from the header of its file; the tensor itself is not read.

    Attributes:
      file: the file.
      shape: stored shape.
      dtype: the file format's name of the element type, such as `"BF16"`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns name → description of each tensor in `model.safetensors` or the index's shards.

    Only headers are read.

    Raises:
      ValueError: there is no safetensors checkpoint (pickle files are named and refused), a file
        is missing or unreadable, or a tensor is stored twice.
    """
    tensors: dict[str, StoredTensor] = {}
    index = _shards(folder)
    for path in sorted(set(index.values())) or [folder / SINGLE_FILE]:
        with _open(path) as handle:
            for name in sorted(handle.keys()):
                if name in tensors:
                    raise ValueError(f"tensor {name} is stored twice: {tensors[name].file}, {path}")
                header = handle.get_slice(name)
                tensors[name] = StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
    for name, path in index.items():
        if name not in tensors:
            raise ValueError(f"tensor {name} is missing: {path} does not hold it")
    return tensors


def tensor_names(folder: Path) -> list[str] | None:
    """Returns the names of all tensors, from a header or the index; None without a checkpoint.

    Raises:
      ValueError: a file is unreadable.
    """
    if not any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    index = _shards(folder)
    if index:
        return list(index)
    with _open(folder / SINGLE_FILE) as handle:
        return list(handle.keys())


class Slices(Protocol):
    """A tensor in its file that is read in parts: `tensor[2:5, :7]`, with a slice per axis."""

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray: ...


def open_tensors(
    stored: Mapping[str, StoredTensor], names: Iterable[str]
) -> Iterator[tuple[str, Slices]]:
    """Yields the named tensors one by one, file by file, opened for slicing.

    Files are memory-mapped and slices are copies, so host memory holds no more than the caller
    keeps. A tensor is valid until the next one is yielded.

    Raises:
      ValueError: a file has become unreadable. The message names it.
    """
    # Grouped by file, so that each file is opened once.
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    for path, members in by_file.items():
        with _open(path) as handle:
            for name in members:
                yield name, handle.get_slice(name)


def _shards(folder: Path) -> dict[str, Path]:
    """Returns tensor name → shard; empty if the checkpoint is a single `model.safetensors`."""
    if (folder / SINGLE_FILE).exists():
        return {}
    path = folder / INDEX_FILE
    if not path.exists():
        raise ValueError(_no_checkpoint(folder))
    files = read_json(path).get("weight_map")
    # A shard is a plain file name: an index cannot point outside its folder.
    if not isinstance(files, dict) or not files or not all(map(_is_shard, files.values())):
        raise ValueError(f"{path} must hold a weight_map from tensor names to .safetensors files")
    return {name: folder / file for name, file in files.items()}


def _is_shard(file: object) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file


def _no_checkpoint(folder: Path) -> str:
    wanted = f"{SINGLE_FILE} or {INDEX_FILE}"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds {', '.join(pickles)}, but only safetensors are "
            f"read (pickle files can run code): {wanted} is needed"
        )
    return f"{folder} has no {wanted}"


def _open(path: Path) -> safe_open:
    check_regular(path)
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
