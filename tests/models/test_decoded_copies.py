"""Copies of decoded weights: the same bits, none of a damaged or changed file, bounded in size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import decoded_copies
from kvjax.models.decoded_copies import DecodedCopy

SHAPES = {("embed", "embedding"): (3, 5), ("layers", 0, "norm", "scale"): (7,)}
EMBEDDING, SCALE = SHAPES


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path) -> Path:
    """The quantised file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"quantised")
    return path


def parameters(dtype="float32", shapes=SHAPES) -> dict:
    """Parameters of random bits, NaN and infinity among them."""
    rng, dtype = np.random.default_rng(5), jnp.dtype(dtype)
    return {
        path: np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        for path, shape in shapes.items()
    }


def write(copy: DecodedCopy, dtype="float32") -> None:
    with copy.writing() as writer:
        for path, array in parameters(dtype, copy.shapes).items():
            writer.add(path, array)


def folders(cache: Path) -> list[Path]:
    """All folders of copies, those that are being written too."""
    return sorted((cache / "weights").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_has_the_same_bits(file, cache, dtype):
    copy = DecodedCopy.of(file, SHAPES, dtype)
    assert copy.read() is None
    write(copy, dtype)
    assert folders(cache) == [copy.folder]
    for path, expected in parameters(dtype).items():
        array = DecodedCopy.of(file, SHAPES, dtype).read()[path]
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.tobytes() == expected.tobytes()
        assert array.ctypes.data % 64 == 0
        array[:] = 0  # it is the process's own memory, and not the file
        assert copy.read()[path].tobytes() == expected.tobytes()


def test_another_file_or_dtype_has_another_copy(file):
    write(DecodedCopy.of(file, SHAPES, "float32"))
    assert DecodedCopy.of(file, SHAPES, "bfloat16").read() is None
    file.write_bytes(b"Quantised")
    assert DecodedCopy.of(file, SHAPES, "float32").read() is None


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


DAMAGES = {
    "first number": ("0.npy", lambda content: flipped(content, 128)),
    "last number": ("1.npy", lambda content: flipped(content, -1)),
    "end": ("1.npy", lambda content: content[:-1]),
    "nothing written": ("0.npy", lambda content: b""),
    "zeros": ("0.npy", lambda content: bytes(len(content))),
    "no file": ("1.npy", None),
    "no list": ("parameters.json", None),
    "half a list": ("parameters.json", lambda content: content[: len(content) // 2]),
    "a parameter less": (
        "parameters.json", lambda content: json.dumps({"embed.embedding": 0}).encode(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_not_read_and_is_made_again(file, damage):
    copy = DecodedCopy.of(file, SHAPES, "bfloat16")
    write(copy, "bfloat16")
    name, change = DAMAGES[damage]
    place = copy.folder / name
    content = place.read_bytes()
    place.unlink()
    if change is not None:
        place.write_bytes(change(content))
    assert copy.read() is None
    write(copy, "bfloat16")
    for path, expected in parameters("bfloat16").items():
        assert copy.read()[path].tobytes() == expected.tobytes()


def test_no_copy_of_a_file_that_changes_meanwhile(file, cache):
    copy = DecodedCopy.of(file, SHAPES, "float32")
    with copy.writing() as writer:
        writer.add(EMBEDDING, parameters()[EMBEDDING])
        file.write_bytes(b"another file")
        writer.add(SCALE, parameters()[SCALE])
    assert copy.read() is None and not folders(cache)


def test_no_copy_if_the_block_raises(file, cache):
    copy = DecodedCopy.of(file, SHAPES, "float32")
    with pytest.raises(ZeroDivisionError), copy.writing() as writer:
        writer.add(EMBEDDING, parameters()[EMBEDDING])
        raise ZeroDivisionError
    assert copy.read() is None and not folders(cache)


def test_a_folder_that_cannot_be_written_is_no_error(file, cache):
    cache.write_text("a file in the place of the folder")
    copy = DecodedCopy.of(file, SHAPES, "float32")
    write(copy)
    assert copy.read() is None and cache.is_file()


def test_a_copy_that_is_removed_while_it_is_written_is_no_error(file, cache):
    copy = DecodedCopy.of(file, SHAPES, "float32")
    with copy.writing() as writer:
        (folder,) = folders(cache)
        folder.rmdir()
        for path, array in parameters().items():
            writer.add(path, array)
    assert copy.read() is None and not folders(cache)


def test_no_copy_on_a_disk_that_is_nearly_full(file, cache, monkeypatch):
    copy, size = DecodedCopy.of(file, SHAPES, "float32"), 4 * (3 * 5 + 7)
    for free, kept in ((2 * size, False), (2 * size + 1, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        write(copy)
        assert (copy.read() is not None) == kept


def test_the_process_that_is_done_first_makes_the_copy(file, cache):
    copy = DecodedCopy.of(file, SHAPES, "float32")
    with copy.writing() as slower:
        write(copy)
        before = (copy.folder / "0.npy").stat().st_ino
        for path, array in parameters().items():
            slower.add(path, array)
    assert folders(cache) == [copy.folder] and (copy.folder / "0.npy").stat().st_ino == before
    assert copy.read() is not None


def test_copies_that_were_used_least_recently_make_room(tmp_path, cache, monkeypatch):
    """Reading a copy is a use."""
    monkeypatch.setattr(decoded_copies, "_MOST_BYTES", 10_000)  # two copies of 4,096 bytes
    copies = []
    for hours, name in ((3, "a"), (2, "b"), (0, "c")):
        (tmp_path / name).write_text(name)
        copies.append(DecodedCopy.of(tmp_path / name, {SCALE: (1024,)}, "float32"))
        if name == "c":
            assert copies[0].read() is not None
        write(copies[-1])
        for place in copies[-1].folder.iterdir():
            then = place.stat().st_mtime - 3600 * hours
            os.utime(place, (then, then))
    first, second, third = copies
    assert folders(cache) == sorted([first.folder, third.folder])
    assert second.read() is None and third.read() is not None


def test_where_nothing_is_kept(file, tmp_path, monkeypatch):
    assert DecodedCopy.of(tmp_path / "nowhere", SHAPES, "float32") is None
    assert DecodedCopy.of(file, {SCALE: (2**31 + 1,)}, "float32") is None, "more than 8 GiB"
    monkeypatch.setenv("KVJAX_CACHE", "off")
    assert DecodedCopy.of(file, SHAPES, "float32") is None
