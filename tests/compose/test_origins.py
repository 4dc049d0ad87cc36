"""Origins of results: versions, files that parameters name, and the source of one's own methods."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvjax
from kvjax.compose.origins import origin, source_of

METHOD = """
import dataclasses
import numpy
import kvjax
from {package}values import SINKS

@dataclasses.dataclass(frozen=True)
class Mine(kvjax.StreamingLLM):
    sinks: int = SINKS
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Writes files, and imports one of them anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def run(name: str, **files: str):
        for file, text in files.items():
            path = tmp_path / f"{file.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for module in set(sys.modules) - before:
            if module.startswith(("mine", "values")):
                del sys.modules[module]
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield run
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_the_source_is_that_of_a_method_and_of_what_it_imports(imported):
    text = METHOD.format(package="")
    first = source_of(imported("mine", mine=text, values="SINKS = 1").Mine)
    assert first and first == source_of(imported("mine").Mine)
    assert first != source_of(imported("mine", values="SINKS = 2").Mine)
    assert first != source_of(imported("mine", values="SINKS = 1", mine=text + "# more").Mine)
    assert first == source_of(imported("mine", mine=text).Mine)


def test_a_package_may_import_within_itself(imported):
    files = {"mine__methods": METHOD.format(package="."), "mine__unused": "ANY = 1"}
    first = source_of(imported("mine.methods", **files, mine__values="SINKS = 1").Mine)
    assert first == source_of(imported("mine.methods", mine__unused="ANY = 2").Mine)
    assert first != source_of(imported("mine.methods", mine__values="SINKS = 2").Mine)


def test_it_is_remembered_as_it_was_registered(imported, monkeypatch):
    monkeypatch.setattr("kvjax.registry.METHODS", dict(kvjax.registry.METHODS))
    method = imported("mine", mine=METHOD.format(package=""), values="SINKS = 1").Mine
    kvjax.register("mine", method)
    Path(sys.modules["values"].__file__).write_text("SINKS = 2")
    registered = source_of(method)
    assert registered != source_of(imported("mine").Mine)
    assert origin(kvjax.chain(method(64), kvjax.Quantize()))["source"] != ""


def test_the_source_of_an_interactive_session_is_unknown(monkeypatch):
    @dataclass(frozen=True)
    class Typed(kvjax.SnapKV):
        """Was typed at a prompt."""

    monkeypatch.setattr(Typed, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert source_of(Typed) is None
    assert origin(kvjax.chain(Typed(64), kvjax.Quantize()))["source"] is None


def test_methods_of_kvjax_have_its_version():
    by_head = kvjax.ByHead(kvjax.KVzip(0.5))
    for transform in (kvjax.Full(), kvjax.Every(kvjax.SnapKV(64), 8), by_head):
        assert origin(transform) == {"kvjax": kvjax.__version__, "source": "", "files": {}}


@dataclass(frozen=True)
class FromFiles(kvjax.SnapKV):
    """A method of one's own that names files."""

    paths: tuple[str | Path, ...] = ()


def test_files_that_parameters_name_count_by_their_content(tmp_path):
    path, other = tmp_path / "heads", tmp_path / "book"
    by_head = kvjax.ByHead(kvjax.KVzip(0.5), str(path))
    assert origin(by_head)["files"] == {}
    path.write_bytes(b"one")
    other.write_bytes(b"three")
    first = origin(kvjax.chain(by_head, kvjax.Quantize()))["files"]
    assert list(first) == [str(path)]
    path.write_bytes(b"two")
    assert origin(by_head)["files"] != first
    path.write_bytes(b"one")
    assert origin(by_head)["files"] == first
    files = origin(FromFiles(64, paths=(str(path), other)))["files"]
    assert files == {**first, str(other): files[str(other)]}
