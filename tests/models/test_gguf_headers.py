"""Headers of GGUF files that somebody changed: refused in one line, and never believed."""

from __future__ import annotations

import struct
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest

from kvjax.models import from_pretrained, load_tokenizer
from kvjax.models.gguf_header import read_header
from tests.models.test_models_loading import put_in_place
from tests.support.gguf_models import add_rope, add_sizes, tensors_of, write
from tests.support.hf_models import random_reference

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9
MUTATIONS = 300
MOST_BYTES = 2**23  # that may be allocated; the file has 60 thousand
# What else a number could be: little, much, and what signs and 32 bits make of it.
CLAIMS = (
    0,
    1,
    2,
    7,
    255,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
)
NO_WEIGHTS = (24, 25, 26, 27, 28, 41, 1000, 2**31)  # element types


class Number(NamedTuple):
    """A number in a header: what it says, where it is, and how many bytes it has."""

    what: str
    position: int
    size: int


class Walk:
    """Where the numbers of a sound header are, found without the code under test."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position, self.numbers = data, 0, []

    def number(self, what: str, size: int) -> int:
        self.numbers.append(Number(what, self.position, size))
        value = int.from_bytes(self.data[self.position : self.position + size], "little")
        self.position += size
        return value

    def text(self) -> None:
        length = self.number("length of a text", 8)
        self.position += length

    def value(self, kind: int) -> None:
        if kind == TEXT:
            self.text()
        elif kind == ARRAY:
            kind = self.number("type of a value", 4)
            for _ in range(self.number("length of a list", 8)):
                self.value(kind)
        else:
            self.position += SIZES[kind]

    def header(self) -> list[Number]:
        self.number("magic", 4)
        self.number("version", 4)
        tensors, entries = self.number("count", 8), self.number("count", 8)
        for _ in range(entries):
            self.text()
            self.value(self.number("type of a value", 4))
        for _ in range(tensors):
            self.text()
            for _ in range(self.number("dimensions", 4)):
                self.number("size of a dimension", 8)
            self.number("element type", 4)
            self.number("offset", 8)
        return self.numbers


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small model with a tokenizer, as bytes."""
    model = random_reference()
    tokens = ["<s>", "</s>", *(f"token{i}" for i in range(95))]

    def add(writer):
        add_sizes(writer, model.config)
        add_rope(writer, model.config)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * 95])
        writer.add_token_scores([0.5] * 97)
        writer.add_token_merges(["t o", "k e"])
        writer.add_add_bos_token(True)

    tensors = tensors_of("llama", model)
    path = write(tmp_path_factory.mktemp("sound") / "model.gguf", "llama", tensors, add)
    from_pretrained(path)
    return path.read_bytes()


def other_value(number: Number, before: int, rng) -> int:
    """Something that the number is not, and that cannot be right."""
    while True:
        value = int(rng.choice(CLAIMS)) if rng.integers(3) else before + int(rng.choice([-1, 1]))
        if number.what == "magic":
            value = int(rng.integers(2**32))
        if number.what == "element type":
            value = int(rng.choice(NO_WEIGHTS))
        if number.what == "type of a value":
            value = int(rng.choice([*range(13), 13, 255, 2**31]))
            if SIZES.get(value) == SIZES.get(before, -1):  # as 5 instead of 4: nothing is broken
                continue
        sound = (2, 3) if number.what == "version" else (before,)
        if value not in sound and 0 <= value < 256**number.size:
            return value


def mutations(data: bytes):
    """What is changed → the changed file."""
    rng = np.random.default_rng(0)
    numbers = Walk(data).header()
    end = numbers[-1].position + numbers[-1].size
    kinds = sorted({number.what for number in numbers})
    for index in range(MUTATIONS):
        what = [*kinds, "shortened"][index % (len(kinds) + 1)]
        if what == "shortened":
            length = int(rng.integers(0, end))
            yield f"shortened to {length} bytes", data[:length]
            continue
        alike = [number for number in numbers if number.what == what]
        number = alike[rng.integers(len(alike))]
        position, end_of = number.position, number.position + number.size
        before = int.from_bytes(data[position:end_of], "little")
        value = other_value(number, before, rng)
        changed = data[:position] + value.to_bytes(number.size, "little") + data[end_of:]
        yield f"{what} at byte {position}: {value} instead of {before}", changed


def test_mutated_headers_are_refused(data, tmp_path):
    """Each in one line that names the file, and without memory for what it claims."""
    path = tmp_path / "model.gguf"
    count = 0
    for what, changed in mutations(data):
        path.write_bytes(changed)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError) as caught:
                from_pretrained(path)
                pytest.fail(f"not refused: {what}")
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, what
        finally:
            tracemalloc.stop()
        message = str(caught.value)
        assert "model.gguf" in message or "tensors are missing: " in message, (what, message)
        count += 1
    assert count == MUTATIONS


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_read_or_refused(data, tmp_path, seed):
    """Any bytes of the header: a tokenizer and a model, or one line; never another exception."""
    rng = np.random.default_rng(seed)
    numbers = Walk(data).header()
    end = numbers[-1].position + numbers[-1].size
    path = tmp_path / "model.gguf"
    refused = 0
    for _ in range(60):
        changed = bytearray(data)
        for position in rng.integers(0, end, rng.integers(1, 4)):
            changed[position] ^= 1 << rng.integers(8)
        path.write_bytes(changed)
        for read in (read_header, load_tokenizer, from_pretrained):
            try:
                read(path)
            except ValueError:
                refused += 1
    assert refused > 20


def with_number(data: bytes, what: str, value: int) -> bytes:
    """The file with another value of the first number of this kind."""
    number = next(number for number in Walk(data).header() if number.what == what)
    new = value.to_bytes(number.size, "little")
    return data[: number.position] + new + data[number.position + number.size :]


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        (
            "magic",
            0,
            r"this is no GGUF file: it begins with b'\\x00\\x00\\x00\\x00', expected b'GG",
        ),
        ("version", 1, "version 1 of GGUF is not supported; supported: 2, 3"),
        ("version", 3 << 24, "a big-endian GGUF file is not supported"),
        ("count", 2**63, "the number of tensors is 9,223,372,036,854,775,808, but the header can"),
        ("length of a text", 2**40, "the key of metadata entry 0 takes 1,099,511,627,776 bytes"),
        ("length of a list", 2**33, "the length of metadata entry 'tokenizer.ggml.tokens' is 8,5"),
        ("type of a value", 77, "'general.architecture' has value type 77, which GGUF does not"),
        ("dimensions", 2**31, "has 2147483648 dimensions, expected 1 to 4"),
        ("size of a dimension", 0, r"has shape \[97, 0\], expected sizes from 1 to 2147483647"),
        ("element type", 999, "has element type 999, which the package gguf does not know"),
        ("offset", 16, "has offset 16, expected [0-9]+, where the tensor before it ends"),
    ],
)
def test_what_is_wrong_is_named(data, tmp_path, what, value, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(with_number(data, what, value))
    with pytest.raises(ValueError, match=message):
        read_header(path)


def header(*entries: tuple[str, int, bytes], tensors: bytes = b"", count: int = 0) -> bytes:
    """A header from its parts."""
    written = b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
        for key, kind, value in entries
    )
    return b"GGUF" + struct.pack("<IQQ", 3, count, len(entries)) + written + tensors


def tensor(name: str, offset: int, *sizes: int) -> bytes:
    begin = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(sizes))
    return begin + struct.pack(f"<{len(sizes)}QIQ", *sizes, 0, offset)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(("a", 4, bytes(4)), ("a", 4, bytes(4))), "metadata entry 'a' is there twice"),
        (header(("a", 8, text(b"\xff"))), "metadata entry 'a' is not UTF-8 text"),
        (
            header(("a", 9, struct.pack("<IQ", 9, 1) + bytes(64))),
            "array of value type 9; supported are numbers and texts",
        ),
        (header(("general.alignment", 4, struct.pack("<I", 0))), "must be a power of two"),
        (header(("general.alignment", 4, struct.pack("<I", 2**31))), "must be a power of two"),
        (header(("general.alignment", 8, text(b"32"))), "a power of two up to 1048576, got '32'"),
        (
            header(tensors=tensor("a", 0, 8) + tensor("a", 32, 8), count=2) + bytes(200),
            "tensor a is there twice",
        ),
        (
            header(tensors=tensor("a", 0, 16) + tensor("b", 32, 8), count=2) + bytes(200),
            "tensor b has offset 32, expected 64, where the tensor before it ends",
        ),
        (header(tensors=tensor("a", 0, 1000), count=1) + bytes(200), "tensor a ends at byte 4,"),
        (
            header(tensors=tensor("a", 0, 8), count=1) + bytes(200),
            "tensors end at byte 96, but the",
        ),
    ],
)
def test_contradictions_are_named(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_header(path)


@pytest.mark.parametrize("what", ["pipe", "device"])
@pytest.mark.parametrize("read", [read_header, from_pretrained, load_tokenizer])
def test_only_regular_files_are_read(tmp_path, what, read):
    path = tmp_path / "model.gguf"
    put_in_place(path, what)
    with pytest.raises(ValueError, match=r"gguf: it must be a regular file"):
        read(path)
