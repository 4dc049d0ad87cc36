"""Methods, kernels and families have what CONTRIBUTING.md asks for, and its tests exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import kvjax
import pallas_kernels
from kvjax.models.families import FAMILIES
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.models.family_cases import NAMED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

ALL = METHODS | WRAPPERS | STORAGE
FROM_PAPERS = {name: kind for name, kind in ALL.items() if re.search("arXiv|ICML", kind.card.paper)}
KERNELS = [
    name
    for name in pallas_kernels.__all__
    if inspect.isfunction(function := getattr(pallas_kernels, name))
    and "implementation" in inspect.signature(function).parameters
]


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE))))
def test_tests_that_the_page_names_exist(test):
    file, _, function = test.partition("::")
    assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8")


def room(kind: type[kvjax.KVTransform]) -> str:
    """The name of the file or of the folder that a method has for itself in `kvjax/transforms`."""
    return kind.__module__.removeprefix("kvjax.transforms.").partition(".")[0]


@pytest.mark.parametrize("name", FROM_PAPERS)
def test_a_method_is_documented(name):
    documented = inspect.getdoc(ALL[name]) or ""
    assert "References:" in documented and "Deviations from the paper:" in documented


@pytest.mark.parametrize("name", [name for name in FROM_PAPERS if name not in STORAGE])
def test_a_method_has_a_reference_and_tests(name):
    for file in (f"references/{room(ALL[name])}.py", f"transforms/test_{room(ALL[name])}.py"):
        assert (ROOT / "tests" / file).is_file()


@pytest.mark.parametrize("name", ALL)
def test_a_method_is_public(name):
    assert getattr(kvjax, ALL[name].__qualname__, None) is ALL[name]


def test_pages_count_the_published_methods():
    papers = {kind.card.paper for name, kind in FROM_PAPERS.items() if name not in STORAGE}
    count = "twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
    number = count[len(papers) - 12]
    assert f"{number} published methods" in README
    assert f"{number} methods from the literature" in (ROOT / "docs/index.md").read_text("utf-8")


def test_benchmarks_with_a_main_run_it():
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ("\ndef main(" in text) == ('\nif __name__ == "__main__":' in text), path.name


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_tested_compiled_and_measured(name):
    for pattern in "tests/kernels/test_*.py", "tests/gpu/gpu_programs.py", "benchmarks/kernel*.py":
        assert any(name in path.read_text(encoding="utf-8") for path in ROOT.glob(pattern))


def test_a_family_has_cases():
    by_themselves = {"llama", "mistral", "chatglm"}  # tests/models/test_models_llama.py, and glm's
    assert set(FAMILIES) == set(NAMED) | by_themselves


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_in_the_pages(name):
    assert f"`{name}`" in (ROOT / "docs/guides/models.md").read_text(encoding="utf-8")
