"""Files that others wrote, read within bounds, and files that kvjax writes."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 2**26
"""Size of the largest JSON file that is read."""

_HIDDEN = {"thumbs.db", "desktop.ini", "icon\r", "@eadir"}  # of Windows, macOS, and a NAS


def is_hidden(path: Path) -> bool:
    """Whether a file is hidden: systems put such files into folders, and no content is in them.

    Their names begin with a dot (`.DS_Store`, `._name`, `.nfs...`), or systems know them.

    Example:
      >>> from pathlib import Path
      >>> from kvjax.files import is_hidden
      >>> is_hidden(Path("book/.DS_Store")), is_hidden(Path(".cache/book"))
      (True, False)
    """
    return path.name.startswith(".") or path.name.lower() in _HIDDEN


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Raises unless a path, links resolved, leads to a regular file of at most so many bytes.

    To open a pipe would wait for another process, and a device may never end.

    Raises:
      ValueError: it is something else, is too large, or cannot be looked at; names the path.
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
    """The content of a regular file.

    Raises:
      ValueError: as `check_regular`, or the file cannot be read.
    """
    check_regular(path, most_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {_reason(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`.

    Raises:
      ValueError: the file cannot be read, is no regular file, has more than `MOST_JSON_BYTES`, is
        not JSON or holds no object; names the file.
    """
    content = read_regular(path, MOST_JSON_BYTES)
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:  # also of an integer with thousands of digits
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives an OSError the path that it lacks, such as one of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_folder(folder: Path) -> None:
    """Raises ValueError unless files can be written to a folder, which is not made."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        what = "it" if above == folder else above
        raise ValueError(f"cannot write to {folder}: {what} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: no permission for {above}")


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    with writing(path):
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
