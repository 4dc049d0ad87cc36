"""Modules of the user's that the command line imports: they register methods of their own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path


def import_module(given: str) -> None:
    """Imports an installed module by its name, or a Python file by a path that ends in `.py`.

    Once per process: what has been imported is not run again.

    Raises:
      ValueError: there is no such module or file, or it raises an exception.
    """
    try:
        if given.endswith(".py"):
            _import_file(Path(given).resolve())
        else:
            importlib.import_module(given)
    except Exception as error:  # their code may fail in any way
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot import {given}: {reason}{where}") from error


def _import_file(path: Path) -> None:
    """Runs a file as a module whose name is its path, so that it hides no other module."""
    name = str(path)
    if name in sys.modules:
        return
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
