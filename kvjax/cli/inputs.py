"""Inputs that commands take by name: text files, models, and modules to import."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import TextIO

from kvjax.messages import brief


def unix_text(text: str) -> str:
    r"""Converts a text to Unix form: lines end with `\n`, without a byte order mark.

    A `\r` at the end is removed too: a shell, or a reader of lines, has already removed the `\n`
    after it.

    Example:
      >>> from kvjax.cli.inputs import unix_text
      >>> unix_text("one\r\ntwo\rthree\r")
      'one\ntwo\nthree'
    """
    lines = text.removeprefix("\ufeff").removesuffix("\r").replace("\r\n", "\n")
    return lines.replace("\r", "\n")


def read_text(path: str) -> str:
    """Reads a UTF-8 file as `unix_text`; `-` is standard input.

    Raises ValueError if the file cannot be read or is not UTF-8.
    """
    name = "standard input" if path == "-" else path
    try:
        data = standard_input().buffer.read() if path == "-" else Path(path).read_bytes()
        return unix_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{name} is not UTF-8 text: {detail}") from error
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error


def standard_input() -> TextIO:
    """Returns standard input; raises ValueError if it is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    return sys.stdin


def read_prompts(path: str) -> list[str]:
    """Reads the prompts of a file, one per line, as text or as JSON.

    Lines are JSON if the first one is a JSON string or object; an object has its text as "prompt".
    Empty lines are skipped. Raises ValueError for other JSON, and without a prompt.
    """
    name = "standard input" if path == "-" else path
    lines = read_text(path).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{name} is empty")
    if _prompt_of(numbered[0][1]) is None and not numbered[0][1].lstrip().startswith("{"):
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        prompt = _prompt_of(line)
        if prompt is None:
            raise ValueError(
                f"line {number} of {name} must be a JSON string, or an object with a text as "
                f'"prompt", got {brief(line)}'
            )
        prompts.append(prompt)
    return prompts


def _prompt_of(line: str) -> str | None:
    """Returns the prompt in a line of JSON; None if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = record.get("prompt") if isinstance(record, dict) else record
    return prompt if isinstance(prompt, str) else None


def check_text(text: str, name: str) -> str:
    """Returns the text as `unix_text`; `name` is its name in errors.

    Raises ValueError if the text is empty, or if it has bytes that are not UTF-8, as arguments may.
    """
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text") from error
    return unix_text(text)


def model_path(name: str | None) -> Path:
    """Returns the folder or the file of a model; the name may be an id of the hub.

    None is the bundled model. Raises ValueError if there is no such model.
    """
    # Imported here: kvjax works without kvjax.models, and help is faster without its imports.
    from kvjax.models import demo
    from kvjax.models.finding import find_model

    return demo.directory() if name is None else find_model(name)


def import_module(module: str) -> None:
    """Imports an installed module by its name, or a Python file by a path that ends in `.py`.

    A module or file is run once per process. Raises ValueError if it does not exist, or if it
    raises an exception.
    """
    try:
        if not module.endswith(".py"):
            importlib.import_module(module)
        elif (name := str(Path(module).resolve())) not in sys.modules:
            _run_file(name)
    except Exception as error:  # the user's code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        # An error of the import itself has no line of the user's code.
        is_import = last.filename.startswith("<") or last.filename == __file__
        hint = "" if is_import else f" ({last.filename}, line {last.lineno})"
        reason = f"{type(error).__name__}: {error}"
        if (file := Path(f"{module}.py")).is_file():
            hint = f"; for the file that is here, --import {file}"
        raise ValueError(f"cannot import {module}: {reason}{hint}") from error


def _run_file(name: str) -> None:
    """Runs a file as a module whose name is its path, so that it hides no other module."""
    if not Path(name).is_file():
        raise FileNotFoundError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # pyright: ignore[reportArgumentType]  # paths that end in .py have one
    try:
        spec.loader.exec_module(module)  # pyright: ignore[reportOptionalMemberAccess]  # and a loader
    except BaseException:
        # A module that failed half-way must not look imported.
        del sys.modules[name]
        raise
