"""The header of a GGUF file: its metadata, and the list of its tensors."""

from __future__ import annotations

import collections
import hashlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.files import check_regular
from kvjax.messages import brief, extra_module, one_line

from .safetensors_files import StoredTensor

_VERSIONS = (2, 3)
_TEXT, _ARRAY = 8, 9
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_MOST_TEXTS = 2**22  # most texts of an array, ten times those of today's largest vocabularies


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file, which precedes its tensors.

    Attributes:
      path: the file.
      metadata: key → number, text, or list of numbers or of texts.
      tensors: name → description. Shapes are those of Hugging Face, `[out, in]`.
      offsets: name → where in the file the tensor's bytes begin. All bytes are within the file, and
        no tensors overlap.
      digest: SHA-256 of the header's bytes.
      size: number of the header's bytes.
      file_size: number of the file's bytes.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    offsets: Mapping[str, int] = field(repr=False)
    digest: str
    size: int
    file_size: int


_last: collections.deque[GgufHeader] = collections.deque(maxlen=1)


def gguf_library() -> Any:
    """Returns the package `gguf`.

    Raises:
      ValueError: it is not installed; the message says how to install it.
    """
    return extra_module("gguf", "gguf", "GGUF files")


def read_header(path: Path) -> GgufHeader:
    """Reads the header of the GGUF file `path`, without its tensors.

    Counts and lengths in a header are not trusted: no object is made for them that is larger than
    the file. The header that was read last is kept, and returned if it is asked for again and the
    file still has its bytes: a vocabulary takes far longer to read than to compare.

    Raises:
      ValueError: `gguf` is not installed; the file cannot be read or is not a GGUF file, is in
        another byte order, is one of several parts, or has a damaged header; names the file.
    """
    gguf_library()  # checked first: a missing package is the most frequent error
    check_regular(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = next((x for x in _last if _is_of(x, path, data)), None)
            if header is None:
                _last.append(header := _read(path, data))
            return header
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot read {path}: {reason}") from error
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def _is_of(header: GgufHeader, path: Path, data: mmap.mmap) -> bool:
    """Returns whether reading a file's data would give this header."""
    same_file = header.path == path and header.file_size == len(data)
    return same_file and _digest(data, header.size) == header.digest


class _Reader:
    """Reads a file from its beginning; reading beyond its end raises ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise ValueError(f"the header takes {count:,} bytes more than the file has")
        self.position += count
        return self.data[self.position - count : self.position]

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self) -> str:
        return self.take(*self.unpack("<Q")).decode("utf-8")

    def texts(self, count: int) -> list[str]:
        """Reads as `text` does, several times; vocabularies have hundreds of thousands of texts."""
        data, position, size_of = self.data, self.position, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            (size,) = size_of(data, position)  # raises struct.error beyond the end
            start, position = position + 8, position + 8 + size
            if position > len(data):
                raise ValueError(f"the header takes {size:,} bytes more than the file has")
            texts.append(data[start:position].decode("utf-8"))
        self.position = position
        return texts

    def numbers(self, value_type: int, count: int) -> list[Any]:
        if value_type not in _NUMBERS:
            raise ValueError(
                f"the header has value type {value_type}; supported are numbers and texts"
            )
        dtype = np.dtype(_NUMBERS[value_type])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def value(self) -> Any:
        [value_type] = self.unpack("<I")
        if value_type == _TEXT:
            return self.text()
        if value_type != _ARRAY:
            return self.numbers(value_type, 1)[0]
        item_type, count = self.unpack("<IQ")
        if item_type != _TEXT:
            return self.numbers(item_type, count)
        if count > _MOST_TEXTS:
            raise ValueError(f"the header has a list of {count:,} texts, at most {_MOST_TEXTS:,}")
        return self.texts(count)


def _read(path: Path, data: mmap.mmap) -> GgufHeader:
    reader = _Reader(data)
    magic = reader.take(4)
    if magic != b"GGUF":
        raise ValueError(f"this is not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    version, count, entries = reader.unpack("<IQQ")
    # A known version in the other byte order.
    if version in (known << 24 for known in _VERSIONS):
        raise ValueError("a big-endian GGUF file is not supported")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of GGUF is not supported; supported: 2, 3")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"metadata entry {brief(key)} is there twice")
        metadata[key] = reader.value()
    file_type, parts = metadata.get("general.type", "model"), metadata.get("split.count", 0)
    if file_type != "model":
        raise ValueError(f"general.type must be 'model', got {brief(file_type)}")
    if parts not in (0, 1):
        raise ValueError(
            f"this is one of {brief(parts)} parts of a model, which are not supported: "
            "llama-gguf-split --merge makes one file of them"
        )
    tensors, places = {}, []
    for _ in range(count):
        name, tensor, offset, size = _tensor(reader, path)
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        tensors[name] = tensor
        places.append((offset, size, name))
    size = reader.position
    offsets = _offsets(reader, metadata, places)
    return GgufHeader(path, metadata, tensors, offsets, _digest(data, size), size, len(data))


def _digest(data: mmap.mmap, size: int) -> str:
    return hashlib.sha256(data[:size]).hexdigest()


def _tensor(reader: _Reader, path: Path) -> tuple[str, StoredTensor, int, int]:
    """Reads name, description, offset after the header and size of the next tensor."""
    gguf = gguf_library()
    name, [dimensions] = reader.text(), reader.unpack("<I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name} has {dimensions} dimensions, expected 1 to 4")
    *sizes, number, offset = reader.unpack(f"<{dimensions}QIQ")
    shape, element_type = tuple(sizes[::-1]), gguf.GGMLQuantizationType(number)
    block, block_bytes = gguf.GGML_QUANT_SIZES[element_type]
    if 0 in shape or shape[-1] % block:
        raise ValueError(
            f"tensor {name} has shape {list(shape)}, expected sizes above 0 and rows of "
            f"a multiple of {block} numbers for {element_type.name}"
        )
    size = math.prod(shape) // block * block_bytes
    return name, StoredTensor(path, shape, element_type.name), offset, size


def _offsets(
    reader: _Reader, metadata: Mapping[str, Any], places: list[tuple[int, int, str]]
) -> dict[str, int]:
    """Returns where each tensor begins, after checking that none overlap or exceed the file."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20:
        raise ValueError(f"general.alignment must be from 1 to {2**20}, got {brief(alignment)}")
    # Tensors must follow each other in the file, each at the next aligned byte.
    begin, end, offsets = reader.position + -reader.position % alignment, 0, {}
    for offset, size, name in sorted(places):
        expected = end + -end % alignment
        if offset != expected:
            raise ValueError(
                f"tensor {name} has offset {offset}, expected {expected}, where the "
                "tensor before it ends"
            )
        end = offset + size
        if begin + end > len(reader.data):
            raise ValueError(
                f"tensor {name} ends at byte {begin + end:,}, but the file has {len(reader.data):,}"
            )
        offsets[name] = begin + offset
    return offsets
