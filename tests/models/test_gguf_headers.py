"""Headers of GGUF files that somebody changed: refused in one line, and never believed."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from kvjax.models import from_pretrained, load_tokenizer
from kvjax.models.gguf_header import read_header
from tests.support.gguf_models import add_rope, add_sizes, tensors_of, write
from tests.support.hf_models import random_reference

MOST_BYTES = 2**23  # that may be allocated; the file has 60 thousand


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small model with a tokenizer: its bytes, and where its header ends."""
    model = random_reference()

    def add(writer):
        add_sizes(writer, model.config)
        add_rope(writer, model.config)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["<s>", "</s>", *(f"token{i}" for i in range(95))])
        writer.add_token_types([3, 3, *[1] * 95])
        writer.add_token_scores([0.5] * 97)
        writer.add_token_merges(["t o", "k e"])
        writer.add_add_bos_token(True)

    tensors = tensors_of("llama", model)
    path = write(tmp_path_factory.mktemp("sound") / "model.gguf", "llama", tensors, add)
    from_pretrained(path)
    return path.read_bytes(), min(read_header(path).offsets.values())


def test_a_header_is_read_again_when_it_has_changed(sound, tmp_path):
    data, end = sound
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    header = read_header(path)
    assert read_header(path) is header
    path.write_bytes(data[:end] + bytes(len(data) - end))
    assert read_header(path) is header, "tensors are not part of it"
    path.write_bytes(data.replace(b"token7", b"taken7"))
    assert "taken7" in read_header(path).metadata["tokenizer.ggml.tokens"]
    path.write_bytes(data[:-8])
    with pytest.raises(ValueError, match="but the file has"):
        read_header(path)


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_read_or_refused(sound, tmp_path, seed):
    """A tokenizer and a model, or one line: no other exception, and no memory for a claim.

    Bits of the header are turned over, or eight bytes become a large number, or the file is cut.
    """
    rng, (data, end) = np.random.default_rng(seed), sound
    path = tmp_path / "model.gguf"
    refused = 0
    for index in range(60):
        changed = bytearray(data)
        for position in rng.integers(0, end, rng.integers(1, 4)):
            changed[position] ^= 1 << rng.integers(8)
        if index % 3 == 1:
            claim = 2 ** int(rng.integers(20, 64)) - int(rng.integers(2))
            changed[position : position + 8] = struct.pack("<Q", claim)  # pyright: ignore[reportPossiblyUnboundVariable]  # a position at least
        path.write_bytes(changed[:position] if index % 3 == 2 else changed)  # pyright: ignore[reportPossiblyUnboundVariable]  # a position at least
        for read in (read_header, load_tokenizer, from_pretrained):
            tracemalloc.start()
            try:
                read(path)
            except ValueError as error:
                refused += 1
                assert len(str(error)) < 1500
            finally:
                most = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert most < MOST_BYTES
    assert refused > 60


@pytest.mark.parametrize("count", [2, 7, 10, 22])
def test_a_header_that_lacks_a_tensor(sound, tmp_path, count):
    """A smaller number of tensors is not believed either: the model misses some."""
    path = tmp_path / "model.gguf"
    path.write_bytes(sound[0][:8] + struct.pack("<Q", count) + sound[0][16:])
    with pytest.raises(ValueError):
        from_pretrained(path)


def header(*entries: tuple[str, int, bytes], tensors: bytes = b"", count: int = 0) -> bytes:
    """A header from its parts."""
    written = b"".join(text(key) + struct.pack("<I", kind) + data for key, kind, data in entries)
    return b"GGUF" + struct.pack("<IQQ", 3, count, len(entries)) + written + tensors


def tensor(name: str, offset: int, *sizes: int, kind: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "model.gguf"),
        (b"GGML" + bytes(20), "this is not a GGUF file: it begins with b'GGML', expected b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF is not supported; supp.* 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3 << 24, 0, 0), "a big-endian GGUF file is not supported"),
        (header(count=2**63), "bytes more than the file has"),
        (header(("a", 9, array(4, 2**62))), "bytes more than the file has"),
        (header(("a", 9, array(8, 2**62))), "a list of 4,611,686,018,427,387,904 texts, at most"),
        (header(("a", 77, bytes(64))), "value type 77; supported are numbers and texts"),
        (header(("a", 9, array(9, 1) + bytes(64))), "value type 9; supported are numbers and te"),
        (header(("a", 4, bytes(4)), ("a", 4, bytes(4))), "metadata entry 'a' is there twice"),
        (header(("a", 8, text(b"\xff"))), "'utf-8' codec can't decode byte 0xff"),
        (header(("general.alignment", 4, bytes(4))), "general.alignment must be from 1 to 1048576"),
        (header(("general.alignment", 8, text(b"32"))), "must be from 1 to 1048576, got '32'"),
        (header(tensors=tensor("a", 0), count=1) + bytes(9), "a has 0 dimensions, expected 1 to 4"),
        (header(tensors=tensor("a", 0, 0), count=1), r"a has shape \[0\], expected sizes above 0"),
        (header(tensors=tensor("a", 0, 7, kind=8), count=1), "a multiple of 32 numbers for Q8_0"),
        (header(tensors=tensor("a", 0, 8, kind=999), count=1), "999 is not a valid GGMLQuanti"),
        (header(tensors=2 * tensor("a", 0, 8), count=2), "tensor a is there twice"),
        (
            header(tensors=tensor("a", 0, 16) + tensor("b", 32, 8), count=2) + bytes(200),
            "tensor b has offset 32, expected 64, where the tensor before it ends",
        ),
        (header(tensors=tensor("a", 0, 1000), count=1) + bytes(200), "tensor a ends at byte 4,"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    assert "model.gguf" in str(caught.value)
