"""Files that others wrote: which are hidden, and how they are read within bounds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from kvjax.messages import printable

MOST_JSON_BYTES = 2**26
"""Size of the largest JSON file that is read."""

_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip

_HIDDEN = {"thumbs.db", "desktop.ini", "icon\r", "@eadir"}  # of Windows, macOS, and a NAS


def is_hidden(path: Path) -> bool:
    """Whether a file is hidden: systems put such files into folders, and no content is in them.

    Their names begin with a dot (`.DS_Store`, `._name`, `.nfs...`), or systems know them.

    Example:
      >>> from pathlib import Path
      >>> from kvjax.regular_files import is_hidden
      >>> is_hidden(Path("book/.DS_Store")), is_hidden(Path(".cache/book"))
      (True, False)
    """
    return path.name.startswith(".") or path.name.lower() in _HIDDEN


def visible_files(folder: Path) -> list[Path]:
    """All that a folder and those within it hold, but directories and what is hidden, sorted."""
    found = []
    for place in sorted(folder.iterdir()):
        if is_hidden(place):
            continue
        if place.is_dir() and not place.is_symlink():
            found += visible_files(place)
        else:
            found.append(place)
    return found


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Raises unless a path, links resolved, leads to a regular file of at most so many bytes.

    To open a pipe would wait for another process, and a device may never end.

    Raises:
      ValueError: it is something else, is too large, or cannot be looked at; names the path.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {printable(path)}: {_reason(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        what = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ValueError(f"cannot read {printable(path)}: it must be a regular file, it is {what}")
    if most_bytes is not None and found.st_size > most_bytes:
        raise _too_large(path, most_bytes)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
      ValueError: as `check_regular`, or the file cannot be read.
    """
    check_regular(path, most_bytes)
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)  # it may grow, or not have told its size
    except OSError as error:
        raise ValueError(f"cannot read {printable(path)}: {_reason(error)}") from error
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


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
        raise ValueError(f"{printable(path)} is nested too deeply") from None
    except ValueError as error:  # also of an integer with thousands of digits
        raise ValueError(f"{printable(path)} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{printable(path)} must hold a JSON object, got {type(value).__name__}")
    return value


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or printable(error)


def _too_large(path: Path, most_bytes: int) -> ValueError:
    return ValueError(f"cannot read {printable(path)}: it has more than {most_bytes:,} bytes")
