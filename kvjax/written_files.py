"""Files that kvjax writes: the folder is checked before, files are whole, errors name them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvjax.messages import printable


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives an OSError the path that it lacks, such as one of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, printable(path)) from error


def check_folder(folder: Path) -> None:
    """Raises ValueError unless files can be written to a folder, which is not made."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        what = "it" if above == folder else above
        raise ValueError(
            f"cannot write to {printable(folder)}: {printable(what)} is not a directory"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"cannot write to {printable(folder)}: no permission for {printable(above)}"
        )


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    with writing(path):
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
