"""The page about writing a method runs as it is printed, and its methods are what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kvjax
from tests.support.attending import Tokens, right, run, slots_of

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-method.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
CHECK = re.compile(r"^kvjax\.testing\.check\((.*)\)$", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def names():
    """What the page's blocks define, one after the other, without its checks."""
    page = ModuleType("page")
    sys.modules["page"] = page  # where dataclasses look annotations up
    for block in BLOCKS:
        exec(compile(CHECK.sub("", block), str(PAGE), "exec"), vars(page))
    yield vars(page)
    del sys.modules["page"]


def test_the_first_method_has_twelve_lines():
    """Its statements, without blank lines and the docstring."""
    method = BLOCKS[0].partition("@dataclass")
    lines = [line.strip() for line in (method[1] + method[2]).splitlines()]
    assert len([line for line in lines if line and not line.startswith('"""')]) == 12
    assert "## An evictor in twelve lines" in PAGE.read_text()


CHECKS = [call for block in BLOCKS for call in CHECK.findall(block)]


FAST = "TOVA(budget=12)", "kvjax.KVCrush(SmallKeys(budget=16), representatives=4)"


@pytest.mark.parametrize(
    "call", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in CHECKS]
)
def test_the_methods_of_the_page_conform(names, call):
    kvjax.testing.check(eval(call, names))


def test_small_keys_keeps_the_smallest(names):
    tokens = Tokens.random()
    done = run(names["SmallKeys"](budget=10, window=4), tokens, right([0] * 3, (24, 17, 5), 24), 0)
    for row, length in enumerate((24, 17)):
        for head in range(2):
            norms = np.linalg.norm(tokens.k[row, head, : length - 4].astype(np.float64), axis=-1)
            expected = sorted([*np.argsort(norms)[:6].tolist(), *range(length - 4, length)])
            kept = slots_of(done.prompt_cache, row, head)["position"].tolist()
            assert kept == expected


def test_merge_left_conserves_mass(names):
    done = run(names["MergeLeft"](budget=10), Tokens.random(), right([0] * 3, (24, 17, 5), 24), 0)
    for row, length in enumerate((24, 17, 5)):
        found = slots_of(done.prompt_cache, row, 0)
        np.testing.assert_allclose(np.exp(found["log_mass"]).sum(), length, rtol=1e-5)
        assert len(found["position"]) == min(10, length)
