"""The tensors of a GGUF file, read and dequantised one at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from kvjax.files import check_regular

from .gguf_header import GgufHeader, element_types, gguf_library

_AT_ONCE = 2**20  # numbers that are dequantised at a time, in blocks of whole rows


@functools.cache
def readable_types() -> tuple[str, ...]:
    """Names of the element types that the package `gguf` dequantises."""
    return tuple(
        name
        for kind, (name, _, size) in element_types().items()
        if _dequantises(np.zeros((1, size), np.uint8), kind)
    )


def _dequantises(block: np.ndarray, kind: int) -> bool:
    try:
        _dequantise(block, kind)
    except NotImplementedError:
        return False
    return True


def _dequantise(rows: np.ndarray, kind: int) -> np.ndarray:
    gguf: Any = gguf_library()
    with np.errstate(all="ignore"):  # numbers that are not finite are for the caller to refuse
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(kind))


def read_gguf_tensors(header: GgufHeader, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The named tensors in float32, one after another.

    Each is read and dequantised when its turn comes, some rows at a time, so that host memory holds
    no more than the caller keeps and one tensor.

    Args:
      header: of the file.
      names: of tensors whose type is one of `readable_types`.

    Raises:
      ValueError: the file can no longer be read, or has become shorter; names it.

    Example:
      >>> from pathlib import Path
      >>> from kvjax.models.gguf_header import read_header
      >>> from kvjax.models.gguf_tensors import read_gguf_tensors
      >>> header = read_header(Path("smollm2.gguf"))  # doctest: +SKIP
      >>> dict(read_gguf_tensors(header, ["output_norm.weight"]))  # doctest: +SKIP
    """
    check_regular(header.path)
    try:
        with open(header.path, "rb", buffering=0) as file:
            for name in names:
                yield name, _read(file, header, name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot read {header.path}: {reason}") from error


def _read(file: BinaryIO, header: GgufHeader, name: str) -> np.ndarray:
    shape = header.tensors[name].shape
    kind = _number_of(header.tensors[name].dtype)
    out = np.empty(shape, np.float32)
    rows = out.reshape(-1, shape[-1])
    row_bytes = header.places[name].size // len(rows)
    step = max(_AT_ONCE // shape[-1], 1)
    file.seek(header.places[name].offset)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        stored = np.fromfile(file, np.uint8, len(part) * row_bytes)
        if stored.size != len(part) * row_bytes:
            raise ValueError(
                f"tensor {name} of {header.path} ends before its "
                f"{header.places[name].size:,} bytes do"
            )
        part[:] = _dequantise(stored.reshape(len(part), row_bytes), kind)
    return out


def _number_of(dtype: str) -> int:
    return next(kind for kind, (name, *_) in element_types().items() if name == dtype)
