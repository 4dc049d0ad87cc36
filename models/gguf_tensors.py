"""The tensors of a GGUF file, read and dequantised one at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from .gguf_header import GgufHeader, gguf_library

_AT_ONCE = 2**20  # numbers that are dequantised at a time, in blocks of complete rows


@functools.cache
def readable_types() -> tuple[str, ...]:
    """Returns the names of the element types that the package `gguf` dequantises."""
    names = []
    for element_type, (_, size) in gguf_library().GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            _dequantise(np.zeros((1, size), np.uint8), element_type)
            names.append(element_type.name)
    return tuple(names)


def _dequantise(rows: np.ndarray, element_type: Any) -> np.ndarray:
    with np.errstate(all="ignore"):  # the caller refuses numbers that are not finite
        return gguf_library().dequantize(rows, element_type)


def read_gguf_tensors(header: GgufHeader, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the named tensors in float32, one by one.

    Each is read and dequantised at its turn, some rows at a time. So host memory holds one tensor
    besides what the caller keeps.

    Args:
      header: header of the file.
      names: names of tensors whose type is one of `readable_types`.

    Raises:
      ValueError: the file can no longer be read, or has become shorter. The message names it.
    """
    try:
        with open(header.path, "rb", buffering=0) as file:
            for name in names:
                yield name, _read(file, header, name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot read {header.path}: {reason}") from error


def _read(file: BinaryIO, header: GgufHeader, name: str) -> np.ndarray:
    gguf, stored = gguf_library(), header.tensors[name]
    element_type = gguf.GGMLQuantizationType[stored.dtype]
    block, block_bytes = gguf.GGML_QUANT_SIZES[element_type]
    row_bytes = stored.shape[-1] // block * block_bytes
    out = np.empty(stored.shape, np.float32)
    rows = out.reshape(-1, stored.shape[-1])
    step = max(_AT_ONCE // stored.shape[-1], 1)
    file.seek(header.offsets[name])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        data = np.fromfile(file, np.uint8, len(part) * row_bytes)
        if data.size != len(part) * row_bytes:
            raise ValueError(
                f"tensor {name} of {header.path} ends before its {len(rows) * row_bytes:,} bytes do"
            )
        part[:] = _dequantise(data.reshape(len(part), row_bytes), element_type)
    return out
