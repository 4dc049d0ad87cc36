"""What `kvjax.evaluation.diagnose` finds, and which cache it recommends."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest

import kvjax
from kvjax import ByHead, CaM, KVCrush, Quantize
from kvjax.compose.walks import walk
from kvjax.evaluation import Diagnosis, Fidelity, Finding, diagnose, measure_fidelities
from kvjax.evaluation.cells.grid import Candidate
from kvjax.evaluation.diagnosis import diagnosis, plots
from kvjax.evaluation.diagnosis.diagnosis import suitable
from kvjax.registry import METHODS
from tests.evaluation.fidelity.test_fidelity import KV_HEADS, LAYERS, PROMPTS, QUESTIONS, tiny_model
from tests.support.tolerances import close

# --- the smallest cache ---


def finding(method: str, budget, error: float, cache_bytes: int) -> Finding:
    recall = np.full((LAYERS, 1, KV_HEADS), 0.5, np.float32)
    fidelity = Fidelity(recall, np.full((LAYERS, 1), error, np.float32), 0 * recall + error)
    return Finding(Candidate.of(method, budget), fidelity, cache_bytes, 1000)


def of(*findings: Finding) -> Diagnosis:
    full = finding("full", None, 0.0, 1000)
    return Diagnosis((full, *findings), "inside", 90, 10, 1)


TABLE = (
    finding("snapkv", 0.1, 0.30, 100),
    finding("snapkv", 0.2, 0.15, 200),
    finding("h2o", 0.2, 0.125, 210),
    finding("h2o", 0.5, 0.0625, 500),
    finding("quest", 0.2, 0.01, 1010),
)


@pytest.mark.parametrize(
    ("error", "best"), [(1.0, "snapkv 0.1"), (0.2, "snapkv 0.2"), (0.125, "h2o 0.2")]
)
def test_the_smallest_cache_under_an_error(error, best):
    found = of(*TABLE)
    assert found.smallest(error).name == best
    method, _, budget = best.partition(" ")
    recommended = found.as_json(error)["recommended"]
    assert recommended == {"method": method, "budget": float(budget)}


def test_no_smaller_cache_holds():
    """A method whose cache is as large as the full one is not recommended, however good."""
    assert of(*TABLE).smallest(0.05) is None
    assert of(*TABLE).as_json(0.05)["recommended"] is None
    assert of(finding("quest", 0.2, 0.01, 1000)).smallest(0.5) is None
    assert of().smallest(0.5) is None
    assert of(finding("snapkv", 0.1, np.nan, 100)).smallest(0.5) is None
    equal = finding("snapkv", 0.2, 0.08, 200), finding("h2o", 0.2, 0.06, 200)
    assert of(*equal).smallest(0.1).name == of(*reversed(equal)).smallest(0.1).name == "h2o 0.2"
    with pytest.raises(ValueError, match="error must"):
        of(*TABLE).smallest(float("nan"))


def test_numbers_that_json_lacks():
    record = of(finding("snapkv", 0.1, np.inf, 100)).as_json()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["findings"][1]["error"] is None
    assert record["findings"][1]["error_by_layer"] == [None] * LAYERS


# --- diagnose ---


SHOWN: dict[str, list] = {"inside": [], "after": []}


@functools.cache
def diagnosed(where: str) -> Diagnosis:
    return diagnose(
        tiny_model(), PROMPTS, QUESTIONS, where=where, new_tokens=2,
        methods=["snapkv(window=4)", "streaming_llm"], budgets=[8, 16],
        on_progress=lambda *what: SHOWN[where].append(what),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "after"])
@pytest.mark.slow
def test_fidelity_and_bytes(where):
    """Those of `measure_fidelities`, and of contexts that the prompts were read into."""
    found = diagnosed(where)
    assert (found.prompt_tokens, found.question_tokens, found.where) == (74, 9, where)
    inside = [[*prompt, *asked] for prompt, asked in zip(PROMPTS, QUESTIONS, strict=True)]
    prompts, asked = (inside, None) if where == "inside" else (PROMPTS, QUESTIONS)
    transforms = [one.candidate.transform for one in found.findings]
    expected = measure_fidelities(tiny_model(), transforms, prompts, new_tokens=2, questions=asked)
    longest = max(map(len, prompts))
    for one, fidelity, transform in zip(found.findings, expected, transforms, strict=True):
        for own, other in zip(one.fidelity, fidelity, strict=True):
            close(own, other, "rounding")
        context = kvjax.read(
            tiny_model(), prompts, transform=transform, max_new=2, buckets=[longest],
            max_prompt=longest + (5 if where == "after" else 0),
        )  # fmt: skip
        assert (one.cache_bytes, one.full_cache_bytes) == (context.nbytes, context.full_nbytes)
    assert found.findings[0].error == pytest.approx(0, abs=1e-5)


def test_every_method_is_considered_by_default():
    """Methods of one's own included; those that do not suit are named with the reason."""
    left_out: dict[str, str] = {}
    methods = suitable(2, [0.25], left_out)
    classes = {type(part) for method in methods for part in walk(kvjax.parse(method, 0.25))}
    assert left_out == {} and classes >= {*METHODS.values(), ByHead, CaM, KVCrush, Quantize}
    assert "by_head(kvzip)" not in suitable(2, [16], left_out)
    assert "share of the tokens" in left_out["by_head(kvzip)"]


def test_methods_that_do_not_suit_the_model_are_left_out(monkeypatch):
    monkeypatch.setattr(diagnosis, "suitable", lambda *_: ("full", "streaming_llm", "infinigen"))

    def calibrate(transform):
        if isinstance(transform, kvjax.InfiniGen):
            raise ValueError("the model does not show its queries")
        return transform

    found = diagnose(
        tiny_model(), PROMPTS, QUESTIONS, budgets=[16], new_tokens=2, calibrate=calibrate
    )
    assert [one.candidate.method for one in found.findings] == ["full", "streaming_llm"]
    assert found.as_json()["left_out"] == {"infinigen": "the model does not show its queries"}
    with pytest.raises(ValueError, match="does not show its queries"):
        diagnose(
            tiny_model(), PROMPTS, QUESTIONS, methods=["infinigen"], budgets=[16], new_tokens=2,
            calibrate=calibrate,
        )  # fmt: skip


def test_progress_and_json_are_complete():
    found = diagnosed("inside")
    names = [
        "full", "snapkv(window=4) 8", "snapkv(window=4) 16", "streaming_llm 8", "streaming_llm 16"
    ]  # fmt: skip
    expected = ["reading 83 tokens", *names, "done"]
    assert SHOWN["inside"] == [(number, 6, what) for number, what in enumerate(expected)]
    record = json.loads(json.dumps(found.as_json(0.5), allow_nan=False))
    assert record.keys() == {
        "question", "prompt_tokens", "question_tokens", "new_tokens", "findings",
        "wanted_error", "recommended", "left_out",
    }  # fmt: skip
    assert record["wanted_error"] == 0.5
    for own, one in zip(record["findings"], found.findings, strict=True):
        assert own["method"] == one.candidate.method and own["budget"] == one.candidate.budget
        assert own["cache_bytes"] == one.cache_bytes
        close(np.array(own["error_by_layer"]), one.fidelity.error.mean(1), "accumulated")
        close(np.array(own["error_by_head"]), one.fidelity.head_error.mean(1), "accumulated")
        close(np.array(own["recall_by_head"]), one.fidelity.recall.mean(1), "accumulated")
        assert own["error"] == pytest.approx(np.mean(own["error_by_layer"]), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": "before"}, "where must be one of"),
        ({"questions": [[]], "where": "after"}, "row 0 is empty"),
        ({"methods": ["full"]}, r"methods must name one beside full, got \['full'\]"),
    ],
)
def test_diagnose_refuses(change, message):
    def never(*args, **options):
        pytest.fail("something was computed")

    model = dataclasses.replace(tiny_model(), apply=never)
    given = {"prompts": [[1, 2]], "questions": [[3]], "methods": ["h2o"], "budgets": [4]}
    given |= change
    with pytest.raises(ValueError, match=message):
        diagnose(model, given.pop("prompts"), given.pop("questions"), **given)


# --- pictures ---


def test_pictures_show_the_figures():
    found = diagnosed("inside")
    for what, expected in (("error", "head_error"), ("recall", "recall")):
        mesh = plots.by_head(found, what).axes[0].collections[0].get_array()
        rows = [getattr(one.fidelity, expected).mean(1) for one in found.findings[1:]]
        close(np.asarray(mesh), np.reshape(rows, (len(rows), -1)), "rounding")
    lines = plots.error_vs_bytes(found, 10.0).axes[0].lines
    named = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in lines}
    snapkv = found.findings[1:3]
    close(named["snapkv(window=4)"][0], [one.share for one in snapkv], "rounding")
    close(named["snapkv(window=4)"][1], [one.error for one in snapkv], "rounding")
    assert f"smallest: {found.smallest(10.0).name}" in named


def test_no_error_is_drawn(tmp_path):
    """Logarithms have no zero."""
    names = plots.draw(of(finding("snapkv", 0.5, 0.0, 500)), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names) and len(names) == 3
