"""Reads files that others wrote, within bounds, and writes files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
"""kvjax's version, which the files that it writes name."""

MOST_JSON_BYTES = 2**26
"""Size of the largest JSON file that is read."""

# Folders of files that are being written, and the time after which nobody writes them any more.
_UNFINISHED, _LEFT_SECONDS = ".kvjax-unfinished-", 3600
_OFF = ("", "0", "off")  # values of KVJAX_CACHE that switch it off
_HIDDEN = {"thumbs.db", "desktop.ini", "icon\r", "@eadir"}  # files of Windows, macOS, and a NAS


def is_hidden(path: Path) -> bool:
    """Returns whether a file is hidden: one that a system put into a folder, without content.

    Such a name begins with a dot (`.DS_Store`, `._name`, `.nfs...`), or is a known one.

    Example:
      >>> from pathlib import Path
      >>> from kvjax.files import is_hidden
      >>> is_hidden(Path("book/.DS_Store")), is_hidden(Path(".cache/book"))
      (True, False)
    """
    return path.name.startswith(".") or path.name.lower() in _HIDDEN


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Raises unless a path, links resolved, leads to a regular file of at most `most_bytes` bytes.

    Opening a pipe would wait for another process, and reading a device may never end.

    Raises:
      ValueError: the path is something else, is too large, or cannot be looked at; names the path.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"cannot read {path}: it must be a regular file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise ValueError(f"cannot read {path}: it has more than {most_bytes:,} bytes")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Returns the content of a regular file.

    Raises:
      ValueError: as `check_regular`, or the file cannot be read.
    """
    check_regular(path, most_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {_reason(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in the JSON file `path`.

    Raises:
      ValueError: the file cannot be read, is not a regular file, has more than `MOST_JSON_BYTES`,
        is not JSON or does not hold an object; names the file.
    """
    content = read_regular(path, MOST_JSON_BYTES)
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:  # Python raises it also for an integer of thousands of digits
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _reason(error: OSError | ValueError) -> str:
    """Returns the system's message without the path, which is in kvjax's message already."""
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the path in an OSError, which may lack it or name a file that a user does not know."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_folder(folder: Path) -> None:
    """Raises ValueError unless files can be written to a folder; does not make the folder."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        name = "it" if existing == folder else existing
        raise ValueError(f"cannot write to {folder}: {name} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: no permission for {existing}")


def user_cache() -> Path | None:
    """Returns the folder of what kvjax keeps between processes: compiled code, profiles of heads,
    and the decoded weights and tokenizers of GGUF files.

    It is `KVJAX_CACHE`, or `kvjax` in the user's cache folder; None if `KVJAX_CACHE` is off or the
    user has no home.
    """
    folder = os.environ.get("KVJAX_CACHE")
    if folder is not None:
        return None if folder.lower() in _OFF else Path(folder).absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return (Path(caches) if caches else Path.home() / ".cache") / "kvjax"
    return None


def keep_recently_used(places: Iterable[Path], most_bytes: int) -> None:
    """Removes the least recently used of some files and folders, until the rest is small enough.

    The last use of a folder is that of the file in it that was used last.

    Args:
      places: files, and folders of files.
      most_bytes: what the rest may take.

    Raises:
      OSError: a place cannot be looked at.
    """
    uses = []
    for place in places:
        status = [file.stat() for file in (place.iterdir() if place.is_dir() else [place])]
        used = max((max(x.st_atime, x.st_mtime) for x in status), default=place.stat().st_mtime)
        uses.append((used, sum(x.st_size for x in status), place))
    total = 0
    for _, size, place in sorted(uses, reverse=True):
        total += size
        if total > most_bytes and place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        elif total > most_bytes:
            place.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file in one piece: a reader sees the earlier content or this one, never a part.

    The content goes to a file in a hidden folder beside `path`, which is then renamed. So several
    threads and processes may write to one path, and the last one to finish stays. A new file has
    the permissions of any new file, and a replaced one those that it had. Hidden folders that
    killed processes left an hour ago or earlier are removed.

    Args:
      path: the file; its folder must exist.
      content: bytes, or text, which is written as UTF-8.

    Raises:
      OSError: the file cannot be written; names `path`.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from kvjax.files import write_whole
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_whole(Path(folder) / "notes.txt", "whole")
      ...     [(path.name, path.read_text()) for path in Path(folder).iterdir()]
      [('notes.txt', 'whole')]
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with writing(path):
        # A folder, since Python makes unique files readable for their owner alone.
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
            part = Path(folder) / path.name
            part.write_bytes(data)
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(path, part)
            os.replace(part, path)
        for left in path.parent.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):  # another process may be removing it
                if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(left)
