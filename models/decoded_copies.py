"""Weights of quantised files as they were decoded, kept in the user's cache folder.

A process that opens a file again maps the numbers of its copy: they are neither decoded nor read
into memory of its own. A copy is a folder with one NPY file per parameter, in which the numbers
begin at a multiple of 64 bytes, so that JAX uses them where they are on a CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import kvjax
from kvjax.files import keep_recently_used, read_json, user_cache

from .tensor_names import ParameterPath

_FORMAT = 1  # of a copy; another one is made anew
_MOST_BYTES = 2**33  # of all copies together
_LIST = "parameters.json"


@dataclass(frozen=True)
class DecodedCopy:
    """The place of the decoded weights of a file; they need not be there.

    Args:
      file: the quantised file.
      state: its inode, size and time of change before it was read.
      folder: the copy's folder. Its name is a checksum of everything in the file, of the dtype and
        of kvjax's version: a file with other contents has another copy.
      shapes: path of a parameter in the decoder → its shape.
      dtype: dtype of the parameters.
    """

    file: Path
    state: tuple[int, ...]
    folder: Path
    shapes: Mapping[ParameterPath, tuple[int, ...]]
    dtype: np.dtype

    @classmethod
    def of(
        cls, file: Path, shapes: Mapping[ParameterPath, tuple[int, ...]], dtype: DTypeLike
    ) -> DecodedCopy | None:
        """Returns the copy of a file, for which all of the file is read once.

        Returns:
          None without a folder for copies (see `kvjax.files.user_cache`), if the parameters take
          more than 8 GiB, which is the most that all copies take, or if the file cannot be read.
        """
        root, dtype = user_cache(), jnp.dtype(dtype)
        size = sum(map(math.prod, shapes.values())) * dtype.itemsize
        if root is None or size > _MOST_BYTES:
            return None
        try:
            state = _state(file)
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError:
            return None
        made_from = _FORMAT, kvjax.__version__, dtype.name, content
        name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]
        return cls(file, state, root / "weights" / name, shapes, dtype)

    def read(self) -> dict[ParameterPath, np.ndarray] | None:
        """Maps the parameters; None without a copy, or if it is damaged.

        All numbers are added up and compared with their sums, which finds parts that never reached
        the disk. Arrays can be written to: their memory is then that of the process.
        """
        try:
            sums = read_json(self.folder / _LIST)
            arrays = {
                path: self._mapped(number, shape, sums[_name(path)])
                for number, (path, shape) in enumerate(self.shapes.items())
            }
            os.utime(self.folder / _LIST)  # used now
        except (OSError, ValueError, KeyError, EOFError):  # NumPy raises it for an empty file
            return None
        return arrays

    def _mapped(self, number: int, shape: tuple[int, ...], expected: int) -> np.ndarray:
        numbers = np.load(self.folder / f"{number}.npy", mmap_mode="c", allow_pickle=False)
        if _sum(numbers) != expected:
            raise ValueError("its numbers do not have the sum that they had")
        return numbers.view(self.dtype).reshape(shape)

    @contextlib.contextmanager
    def writing(self) -> Iterator[CopyWriter]:
        """Makes the copy of the parameters that the block adds, once all have been added.

        The least recently used copies make room for it. No copy is made if the block raises, if the
        file changes meanwhile, or if the folder cannot be written to, which is not an error.
        """
        writer = CopyWriter(self)
        try:
            yield writer
            writer.finish()
        finally:
            writer.remove()


class CopyWriter:
    """Writes a copy to a temporary folder, which is renamed when it is complete."""

    def __init__(self, copy: DecodedCopy) -> None:
        self._copy, self._sums = copy, dict[str, int]()
        self._numbers = {path: number for number, path in enumerate(copy.shapes)}
        self._folder: Path | None = None
        size = sum(map(math.prod, copy.shapes.values())) * copy.dtype.itemsize
        with contextlib.suppress(OSError):
            root = copy.folder.parent
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.rmtree(copy.folder, ignore_errors=True)  # a damaged one
            keep_recently_used(root.iterdir(), _MOST_BYTES - size)
            if shutil.disk_usage(root).free > 2 * size:  # leaves room for other files
                self._folder = Path(tempfile.mkdtemp(prefix=f"{copy.folder.name}-", dir=root))

    def add(self, path: ParameterPath, array: np.ndarray) -> None:
        """Writes a parameter."""
        if self._folder is None:
            return
        numbers = array.reshape(-1).view(np.uint8)
        try:
            np.save(self._folder / f"{self._numbers[path]}.npy", numbers, allow_pickle=False)
        except OSError:
            self.remove()
        self._sums[_name(path)] = _sum(numbers)

    def finish(self) -> None:
        """Puts the copy in its place, unless another process was faster."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            if _state(self._copy.file) != self._copy.state:
                return
            (self._folder / _LIST).write_text(json.dumps(self._sums), encoding="utf-8")
            self._folder.rename(self._copy.folder)
            self._folder = None

    def remove(self) -> None:
        """Removes the temporary folder, if it is still there."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _name(path: ParameterPath) -> str:
    return ".".join(map(str, path))


def _sum(numbers: np.ndarray) -> int:
    """Adds up bytes `[N]`, eight at a time."""
    whole = numbers.size // 8 * 8
    return int(numbers[:whole].view(np.uint64).sum()) + int(numbers[whole:].sum(dtype=np.uint64))


def _state(file: Path) -> tuple[int, ...]:
    """Returns what changes if a file is written to or replaced."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
