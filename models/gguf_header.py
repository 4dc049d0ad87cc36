"""The header of a GGUF file, read within bounds: its metadata, and the list of its tensors.

Counts, lengths, shapes and offsets of a header are numbers that somebody wrote. Each is compared
with what is left of the file before anything is read or made for it.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kvjax.extras import extra_module
from kvjax.files import check_regular
from kvjax.messages import brief

from .config import MOST_SIZE
from .safetensors_files import StoredTensor

MOST_HEADER_BYTES = 2**28
"""Size of the largest header that is read."""

_MOST_ITEMS = 2**22  # texts of one array, ten times those of today's largest vocabularies
_MOST_DIMENSIONS = 4
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_TEXT, _ARRAY = 8, 9
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes: a name's length, one dimension, a type, an offset
_LEAST_ENTRY = 8 + 4 + 1  # a key's length, a type, one byte


class Place(NamedTuple):
    """Where the bytes of a tensor are.

    Attributes:
      offset: from the beginning of the file.
      size: how many bytes.
    """

    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its tensors.

    Attributes:
      path: the file.
      metadata: key → number, text, or list of numbers or of texts.
      tensors: name → description. Shapes are as Hugging Face has them, `[out, in]`.
      places: name → where its bytes are. They follow each other, and end where the file does.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    places: Mapping[str, Place] = field(repr=False)


def gguf_library() -> Any:
    """The package `gguf`.

    Raises:
      ValueError: it is not installed; says how it is.
    """
    return extra_module("gguf", "gguf", "GGUF files")


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file `path`; of its tensors nothing is read.

    Raises:
      ValueError: `gguf` is not installed; the file cannot be read or is no GGUF file, is in another
        byte order, is one of several parts, or has a header that claims more than the file has. One
        line names the file, the field, and what was found and expected.

    Example:
      >>> from pathlib import Path
      >>> from kvjax.models.gguf_header import read_header
      >>> header = read_header(Path("smollm2.gguf"))  # doctest: +SKIP
      >>> header.metadata["general.architecture"]  # doctest: +SKIP
      'llama'
    """
    gguf_library()  # first: it is what is missing most often
    check_regular(path)
    try:
        with open(path, "rb") as file:
            cursor = _Cursor(file, path)
            return _read(cursor)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot read {path}: {reason}") from error


class _Cursor:
    """Reads a file from its beginning, and refuses what is not there."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self.path = file, path
        self.size = file.seek(0, 2)
        self.position = file.seek(0)

    @property
    def left(self) -> int:
        """How many bytes of a header there can still be."""
        return min(self.size, MOST_HEADER_BYTES) - self.position

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.error(
                f"{what} takes {count:,} bytes, but the header can have {self.left:,} more"
            )
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"{what} ends before its {count:,} bytes do")
        self.position += count
        return data

    def number(self, kind: int, what: str) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def integer(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str) -> str:
        length = self.integer("<Q", what)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text: {error.reason}") from error

    def count(self, least: int, most: int, what: str) -> int:
        """A number of things that take at least so many bytes each."""
        given = self.integer("<Q", what)
        if given * least > self.left or given > most:
            raise self.error(
                f"{what} is {given:,}, but the header can have {self.left:,} more bytes, which are "
                f"at most {min(self.left // least, most):,}"
            )
        return given


def _read(cursor: _Cursor) -> GgufHeader:
    _check_beginning(cursor)
    tensors = cursor.count(_LEAST_TENSOR, _MOST_ITEMS, "the number of tensors")
    entries = cursor.count(_LEAST_ENTRY, _MOST_ITEMS, "the number of metadata entries")
    metadata: dict[str, Any] = {}
    for index in range(entries):
        key = cursor.text(f"the key of metadata entry {index}")
        if key in metadata:
            raise cursor.error(f"metadata entry {brief(key)} is there twice")
        metadata[key] = _value(cursor, f"metadata entry {brief(key)}")
    _check_kind(cursor, metadata)
    listed = [_tensor(cursor, index) for index in range(tensors)]
    return _placed(cursor, metadata, listed)


def _check_beginning(cursor: _Cursor) -> None:
    magic = cursor.take(4, "a GGUF file's beginning")
    if magic != _MAGIC:
        raise cursor.error(f"this is no GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
    version = cursor.integer("<I", "the version")
    if version in (v << 24 for v in _VERSIONS):
        raise cursor.error("a big-endian GGUF file is not supported")
    if version not in _VERSIONS:
        raise cursor.error(
            f"version {version} of GGUF is not supported; supported: "
            f"{', '.join(map(str, _VERSIONS))}"
        )


def _check_kind(cursor: _Cursor, metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise cursor.error(f"general.type must be 'model', got {brief(kind)}")
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise cursor.error(
            f"this is one of {brief(parts)} parts of a model, which are not supported: "
            "llama-gguf-split --merge makes one file of them"
        )


def _value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.integer("<I", what)
    if kind == _TEXT:
        return cursor.text(what)
    if kind == _ARRAY:
        return _array(cursor, what)
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has value type {kind}, which GGUF does not have")
    return cursor.number(kind, what)


def _array(cursor: _Cursor, what: str) -> list[Any]:
    kind = cursor.integer("<I", what)
    if kind == _TEXT:
        length = cursor.count(8, _MOST_ITEMS, f"the length of {what}")
        return [cursor.text(what) for _ in range(length)]
    if kind not in _NUMBERS:
        raise cursor.error(
            f"{what} is an array of value type {kind}; supported are numbers and texts"
        )
    dtype = np.dtype(_NUMBERS[kind])
    length = cursor.count(dtype.itemsize, MOST_SIZE, f"the length of {what}")
    return np.frombuffer(cursor.take(length * dtype.itemsize, what), dtype).tolist()


class _Listed(NamedTuple):
    """A tensor of the list; its offset counts from the end of the header."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


def _tensor(cursor: _Cursor, index: int) -> _Listed:
    name = cursor.text(f"the name of tensor {index}")
    what = f"tensor {name}"
    dimensions = cursor.integer("<I", what)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions, expected 1 to {_MOST_DIMENSIONS}")
    shape = tuple(cursor.integer("<Q", what) for _ in range(dimensions))[::-1]
    if not all(1 <= size <= MOST_SIZE for size in shape):
        raise cursor.error(f"{what} has shape {list(shape)}, expected sizes from 1 to {MOST_SIZE}")
    kind = cursor.integer("<I", what)
    offset = cursor.integer("<Q", what)
    types = element_types()
    if kind not in types:
        raise cursor.error(f"{what} has element type {kind}, which the package gguf does not know")
    dtype, block, size = types[kind]
    if shape[-1] % block:
        raise cursor.error(
            f"{what} has rows of {shape[-1]} numbers, expected a multiple of {block} for {dtype}"
        )
    return _Listed(name, shape, dtype, offset, math.prod(shape) // block * size)


@functools.cache
def element_types() -> dict[int, tuple[str, int, int]]:
    """Number of an element type in GGUF → its name, numbers per block, and bytes per block."""
    gguf = gguf_library()
    return {
        int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()
    }


def _placed(cursor: _Cursor, metadata: Mapping[str, Any], listed: list[_Listed]) -> GgufHeader:
    """The header, once every tensor has bytes of its own in the file, and every byte a tensor."""
    alignment = metadata.get("general.alignment", 32)
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment must be a power of two up to {2**20}, got {brief(alignment)}"
        )
    begin = _rounded_up(cursor.position, alignment)
    tensors, places = {}, {}
    end = 0
    for tensor in sorted(listed, key=lambda tensor: tensor.offset):
        what = f"tensor {tensor.name}"
        if tensor.name in tensors:
            raise cursor.error(f"{what} is there twice")
        if tensor.offset != _rounded_up(end, alignment):
            raise cursor.error(
                f"{what} has offset {tensor.offset}, expected {_rounded_up(end, alignment)}, where "
                "the tensor before it ends"
            )
        end = tensor.offset + tensor.size
        if begin + end > cursor.size:
            raise cursor.error(
                f"{what} ends at byte {begin + end:,}, but the file has {cursor.size:,}"
            )
        tensors[tensor.name] = StoredTensor(cursor.path, tensor.shape, tensor.dtype)
        places[tensor.name] = Place(begin + tensor.offset, tensor.size)
    if cursor.size - begin - end >= alignment:
        raise cursor.error(
            f"the tensors end at byte {begin + end:,}, but the file has {cursor.size:,}"
        )
    return GgufHeader(cursor.path, metadata, tensors, places)


def _rounded_up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
