"""Folders that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvjax.files import is_hidden


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write to, which gets its name when everything is in it.

    Until then it lies beside that name, hidden. Where something goes wrong it is removed; a process
    that is killed leaves it behind.

    Args:
      path: the name; nothing may be there but a folder that is empty, or holds hidden files alone,
        which stay.

    Yields:
      The folder.

    Raises:
      ValueError: there is something.
      OSError: the folder cannot be made.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from kvjax.models.new_folder import new_folder
      >>> with tempfile.TemporaryDirectory() as place:
      ...     with new_folder(f"{place}/new") as folder:
      ...         _ = (folder / "a.txt").write_text("a")
      ...     sorted(path.name for path in Path(place).rglob("*"))
      ['a.txt', 'new']
    """
    target = Path(path).resolve()
    _check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        _check_free(target)
        if target.is_dir():
            for hidden in target.iterdir():
                hidden.rename(partial / hidden.name)
            target.rmdir()  # it is empty, and not all systems rename onto it
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_free(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is not a folder")
    if not all(map(is_hidden, target.iterdir())):
        raise ValueError(f"{target} must be new or empty, but there is something in it")
