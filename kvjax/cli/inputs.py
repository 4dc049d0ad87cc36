"""What a command is given by name: text files, the folder of a model, modules to import."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

_BUNDLED = (
    "config.json", "model.safetensors", "tokenizer.json", "document.txt", "document.json",
    "held_out.txt",
)  # fmt: skip


def read_text(path: str) -> str:
    """The text of a UTF-8 file, line ends as they are; ValueError where it is none."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{path} is not UTF-8 text: {where}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def model_folder(given: str | None) -> Path:
    """The folder of a model; None stands for the bundled one, an id for files of the hub.

    Raises ValueError if there is no such model, or files of the bundled model are missing.
    """
    # Imported here: kvjax does without kvjax.models, and help without what they import.
    from kvjax.models import demo
    from kvjax.models.loading import local_directory

    if given is not None:
        return local_directory(given)
    folder = demo.directory()
    missing = [name for name in _BUNDLED if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"the bundled model in {folder} is incomplete: no {', '.join(missing)}")
    return folder


def import_module(given: str) -> None:
    """Imports an installed module by its name, or a Python file by a path that ends in `.py`.

    Once per process: what has been imported is not run again. Raises ValueError if there is no such
    module or file, or if it raises an exception.
    """
    try:
        if not given.endswith(".py"):
            importlib.import_module(given)
        elif (name := str(Path(given).resolve())) not in sys.modules:
            _run_file(name)
    except Exception as error:  # their code may fail in any way
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot import {given}: {reason}{where}") from error


def _run_file(name: str) -> None:
    """Runs a file as a module whose name is its path, so that it hides no other module."""
    if not Path(name).is_file():
        raise FileNotFoundError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
