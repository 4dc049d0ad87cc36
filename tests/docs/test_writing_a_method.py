"""The page about writing a method runs as it is printed, and its methods are what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.registry import METHODS
from kvjax.serialization import TRANSFORMS, from_json, to_json
from tests.generation.test_generate import RAGGED, model
from tests.generation.test_head_profiles import LOOKED_UP, SAMPLE, of_head
from tests.references.repetition import repetition
from tests.support.attending import Tokens, right, run, same_arrays, slots_of
from tests.support.marks import some_slow

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
# Compositions of what other checks have.
LIKE_OTHERS = [call for call in CHECKS if "Quantize" in call or "Every" in call]


@pytest.mark.parametrize("call", some_slow(CHECKS, *FAST, exhaustive=LIKE_OTHERS))
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


def test_the_gate_learns_a_ridge_regression_of_kvzips_scores(names):
    weights = kvjax.calibrated(names["Gate"](0.5), LOOKED_UP, SAMPLE).gate.weights
    for layer, head in np.ndindex(2, 2):
        x, y = [], []
        for text in SAMPLE:
            q, k, v = of_head(text, layer, head)
            at = np.arange(len(text))
            _, score = repetition((k, v, at), [(q, k, v, at + len(text))])
            x.append(np.concatenate((k, v, np.ones((len(text), 1))), axis=1, dtype=np.float64))
            y.append(np.log(score + 1e-6))
        x, y = np.concatenate(x), np.concatenate(y)
        expected = np.linalg.solve(x.T @ x + 1e-2 * np.eye(x.shape[1]), x.T @ y)
        np.testing.assert_allclose(weights[layer, head], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_gate_is_saved_in_a_composition_and_found_by_its_path(names, tmp_path, monkeypatch):
    """Under `by_head`, which learns from what the gate scores, and beside another that learns."""
    monkeypatch.setenv("KVJAX_CACHE", "off")
    monkeypatch.setitem(METHODS, "gate", names["Gate"])
    monkeypatch.setitem(TRANSFORMS, "gate", names["Gate"])
    text = "chain(by_head(gate(budget=0.5)), infinigen(dense_layers=()))"
    tx = kvjax.calibrated(text, model(), RAGGED[:1])
    by_head, infinigen = tx.parts
    learned = by_head.profile, by_head.base.gate, infinigen.calibration
    assert [type(x).__name__ for x in learned] == [
        "HeadProfile", "GateWeights", "InfiniGenCalibration"
    ]  # fmt: skip
    context = kvjax.read(model(), RAGGED[:1], transform=tx)
    assert from_json(to_json(context.layers)) == context.layers
    kvjax.save_context(tmp_path / "context", context, model=model())
    loaded = kvjax.load_context(tmp_path / "context", model())
    assert loaded.transform == tx
    same_arrays(loaded, context)
    answer = kvjax.generate(model(), [[5, 9, 2]], context=loaded, max_new_tokens=3)
    length = len(RAGGED[0])
    # The question is not a document, and stays whole.
    for part in layer_caches(answer.context.caches):
        kept = np.asarray(part.kv.position)
        assert all((kept == at).any(-1).all() for at in range(length, length + 6))
    path = str(tmp_path / "gate")
    kvjax.save_calibration(path, by_head.base, model())
    assert kvjax.load_calibration(path, model()) == by_head.base.gate
    named = names["Gate"](0.1, gate=path)
    assert kvjax.calibrated(named, model(), []).gate == by_head.base.gate
    with pytest.raises(ValueError, match=r"of gate, and gate\(ridge=1.0\) needs one of its own"):
        kvjax.read(model(), RAGGED[:1], transform=names["Gate"](0.5, ridge=1.0, gate=path))
    with pytest.raises(ValueError, match=r"needs gate=, which it learns.*kvjax\.calibrated"):
        kvjax.read(model(), RAGGED[:1], transform=names["Gate"](0.5))
