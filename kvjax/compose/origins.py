"""Describes what a method's results depend on besides its parameters, the model and the text."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from kvjax.compose.walks import walk
from kvjax.files import VERSION
from kvjax.protocol import KVTransform

# Packages whose version says what their source is: that of kvjax is a part of an origin.
_VERSIONED = {"kvjax", "pallas_kernels", "builtins", "__future__", *sys.stdlib_module_names}
_INSTALLED = {"site-packages", "dist-packages"}  # names of the folders of installed packages


def origin(transform: KVTransform) -> dict[str, Any]:
    """Describes what a composition depends on that its text does not say.

    Results that are kept under the text of a method are of that method only while this is equal.

    Returns:
      A tree that JSON can hold: `kvjax`, the version; `source`, what `source_of` returns for all
      parts together; `files`, a checksum of each file that a parameter names.

    Raises:
      OSError: a file that a parameter names cannot be read.

    Example:
      >>> import kvjax
      >>> from kvjax.compose.origins import origin
      >>> sorted(origin(kvjax.parse("every(snapkv(budget=64), steps=8)")))
      ['files', 'kvjax', 'source']
    """
    parts = list(walk(transform))
    values = (getattr(part, field.name) for part in parts for field in dataclasses.fields(part))
    files = {path: _checksum(Path(path).read_bytes()) for path in _files_in(tuple(values))}
    return {"kvjax": VERSION, "source": _source(parts), "files": files}


def _files_in(value: Any) -> Iterator[str]:
    """Yields the paths of existing files in the value of a parameter."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _files_in(part)
    elif isinstance(value, str | os.PathLike) and os.path.isfile(value):
        yield os.fspath(value)


def _source(parts: list[KVTransform]) -> str | None:
    """Returns what `source_of` returns, for all parts of a composition together."""
    sources = {source_of(type(part)) for part in parts} - {""}
    if None in sources:
        return None
    return _checksum(*sorted(map(str, sources))) if sources else ""


@functools.cache
def source_of(method: type[KVTransform]) -> str | None:
    """Returns a checksum of the source of a class that does not come with kvjax.

    It is made of the module that defines the class, of the modules of its base classes, and of all
    modules that these import and that are not installed packages. It is remembered from the first
    call (`kvjax.register` makes one), since what is written into a file afterwards does not run.

    Returns:
      The checksum; "" for a class of kvjax; None without a file, as in an interactive session.
    """
    names = {cls.__module__ for cls in method.__mro__}
    waiting = sorted(name for name in names if name.partition(".")[0] not in _VERSIONED)
    packages = {name.partition(".")[0] for name in waiting}
    sources: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        place = getattr(module, "__file__", None)
        if name in names and (place is None or not os.path.isfile(place)):
            return None
        if name in sources or not _is_own(place, name, packages):
            continue
        sources[name] = Path(place).read_bytes()
        waiting.extend(_imports(module, sources[name]))  # pyright: ignore[reportArgumentType]  # it has a file
    return _checksum(*(sources[name] for name in sorted(sources))) if sources else ""


def _is_own(place: str | None, name: str, packages: set[str]) -> TypeGuard[str]:
    """Returns whether a module belongs to a method of one's own: see `source_of`.

    Args:
      place: its file.
      name: its name.
      packages: names of the outermost packages of the method's classes.
    """
    package = name.partition(".")[0]
    if package in _VERSIONED or place is None or not place.endswith(".py"):
        return False
    return package in packages or _INSTALLED.isdisjoint(Path(place).parts)


def _imports(module: ModuleType, source: bytes) -> Iterator[str]:
    """Yields the names of modules that a module imports anywhere, and some names in modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # a relative import that was never reached
                base = importlib.util.resolve_name(
                    "." * node.level + (node.module or ""), module.__package__
                )
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _checksum(*contents: str | bytes) -> str:
    """Returns a checksum of texts or contents of files, in their order."""
    digest = hashlib.sha256()
    for content in contents:
        data = content.encode() if isinstance(content, str) else content
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]
