"""Comparisons: what is measured, and what is told meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import compiled_code
from kvjax.evaluation import Fidelity, Grid, compare, memory
from kvjax.evaluation.cells.grid import Unit
from kvjax.evaluation.comparison import compare as compare_module
from kvjax.evaluation.comparison.compare import _Measure
from kvjax.evaluation.comparison.material import Material
from kvjax.generation.model import as_functional
from kvjax.models import load_tokenizer, random_decoder, read_config
from tests.evaluation.fidelity.test_fidelity import tiny_model
from tests.support.small_comparisons import TEXT, material_of, results


def measure_of(folder: Path, **grid) -> tuple[_Measure, tuple]:
    """Makes the measure of a small grid, and its candidates."""
    grid = {"lengths": [192], "tasks": ["needle"], **grid}
    grid = Grid.of(methods=["h2o"], budgets=[0.25], **grid)
    model = random_decoder(read_config(folder))
    material = Material(grid, load_tokenizer(folder), TEXT)
    return _Measure(material, as_functional(model), ()), grid.candidates


def test_live_slots_are_a_mean_over_lists():
    """One head of a layer holds 8 slots, and the one beside it all 24."""
    groups = kvjax.HeadGroups((((0,), kvjax.Full()), ((1,), kvjax.StreamingLLM(budget=8))))
    transform = kvjax.PerLayer(lambda layer, _: groups if layer else kvjax.StreamingLLM(budget=8))
    context = kvjax.read(tiny_model(), [[1] * 24], transform=transform, max_new=1)
    assert context.occupancy.kept_slots == pytest.approx(np.mean([8, *2 * [(24 + 8) / 2]]))


def test_a_whole_run(command, tmp_path, capsys):
    """Nothing is replaced: files, figures that are known, and the same bytes again."""
    out = tmp_path / "out"
    options = {"method": "h2o", "lengths": 192, "budget": 0.25, "cases": 2}
    options["question"] = "inside,after"
    assert command(**options) == 0
    assert "h2o" in capsys.readouterr().out
    assert command(**options, out=tmp_path / "again") == 0
    found = results(out)
    assert found == results(tmp_path / "again")
    assert (out / "results.csv").read_bytes() == (tmp_path / "again/results.csv").read_bytes()
    rows = {(row["task"], row["question"], row["method"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 + 2 + 2
    full, h2o = (rows["perplexity", None, name] for name in ("full", "h2o"))
    assert full["difference"]["mean"] == 0 and h2o["difference"]["mean"] != 0
    assert full["score"]["mean"] == pytest.approx(np.mean(full["quarters"]), abs=1e-5)
    assert full["cache_bytes"] == full["full_cache_bytes"]
    full, h2o = (rows["attention", None, name] for name in ("full", "h2o"))
    assert full["recall"] == 1 and full["score"]["mean"] < 1e-5
    assert 0 < h2o["recall"] < 1 and h2o["score"]["mean"] > 1e-3
    assert h2o["layer_recall"] == [h2o["recall"]] and h2o["failed"] is None
    for question in ("inside", "after"):
        h2o = rows["needle", question, "h2o"]
        assert h2o["score"]["cases"] == 2 and h2o["slots"] == 48
        assert 0.2 < h2o["cache_bytes"] / h2o["full_cache_bytes"] < 0.4
    assert rows["needle", "inside", "h2o"]["live_slots"] == 48
    assert rows["needle", "inside", "full"]["live_slots"] == 192
    assert 100 < rows["needle", "after", "full"]["live_slots"] < 192, "the question comes later"


def test_answers_are_those_of_generate(folder):
    """With the question inside: as one call of `generate`. After it: as a further turn."""
    tokenizer, model = load_tokenizer(folder), random_decoder(read_config(folder))
    measure, candidates = measure_of(folder, cases=2)
    material = measure.material
    cases, new = material.task("needle", 192).cases, material.most_new("needle", 192)
    for question in ("inside", "after"):
        unit = Unit("needle", 192, question, 0, 2)
        for one, found in measure.unit(unit, candidates):
            options = {"max_new_tokens": new, "end_tokens": ()}
            if question == "inside":
                prompts = [case.prompt for case in cases]
                result = kvjax.generate(model, prompts, transform=one.transform, **options)
            else:
                prompts = [case.context for case in cases]
                context = kvjax.read(
                    model, prompts, transform=one.transform, max_prompt=256, max_new=new
                )
                asked = [case.question for case in cases]
                result = kvjax.generate(model, asked, context=context, **options)
            expected = [
                tokenizer.decode([*case.prompt, *tokens]).removeprefix(
                    tokenizer.decode(case.prompt)
                )
                for case, tokens in zip(cases, result.tokens, strict=True)
            ]
            assert found["texts"] == expected
            assert found["depths"] == [0.0, 0.25] and found["new_tokens"] == [new] * 2


def test_contexts_are_made_for_their_texts_and_not_for_padding(folder, monkeypatch):
    """A model that decides by the length of a text sees that of prompt, question and answer."""
    lengths = []

    class Once(kvjax.evaluation.ReadOnce):
        def __init__(self, *args, max_length, **options):
            lengths.append(max_length)
            raise NotImplementedError

    monkeypatch.setattr(compare_module, "ReadOnce", Once)
    measure, candidates = measure_of(folder, cases=1)
    material = measure.material
    (case, *_), new = material.task("needle", 192).cases, material.most_new("needle", 192)
    for question in ("inside", "after"):
        found = dict(measure.unit(Unit("needle", 192, question, 0, 1), candidates))
        assert all(cell["failed"].startswith("NotImplementedError") for cell in found.values())
    assert lengths == [len(case.prompt) + new, len(case.context) + len(case.question) + new]


def test_seeds_change_the_cases(folder):
    def cases(seed, count=2):
        return material_of(folder, seed=seed, cases=count).task("needle", 192).cases

    assert len({tuple(case.prompt) for seed in range(4) for case in cases(seed)}) == 8
    assert cases(0, 5)[:2] == cases(0), "more cases leave the first as they are"


def test_more_cases_leave_the_length_of_answers_as_it_is(folder, monkeypatch):
    """Those of a case, and those on whose prompts attention is measured."""
    whole = Material._task

    def longer_at_the_end(self, name, length):
        task = whole(self, name, length)
        first, last = task.cases[:4], task.cases[4:]
        last = [dataclasses.replace(case, max_new=50) for case in last]
        return dataclasses.replace(task, cases=(*first, *last))

    monkeypatch.setattr(Material, "_task", longer_at_the_end)
    few, many = (material_of(folder, cases=cases) for cases in (4, 6))
    assert few.attention_prompts(192) == many.attention_prompts(192)
    assert many.most_new("needle", 192) == 50 == many.most_new("needle", 192, first=4)
    assert many.most_new("needle", 192, stop=4) == few.most_new("needle", 192) < 50


def test_every_grid_calibrates_on_the_same_tokens(folder):
    """Or a folder to which shorter prompts were added would hold two calibrations of a method."""
    sample = material_of(folder, lengths=[192]).sample()
    assert len(sample) == 2048
    for lengths in ([192, 2000], [2000]):
        material = material_of(folder, lengths=lengths)
        assert material.sample() == sample and material.sample(512) == sample[:512]


def test_windows_of_the_text(folder):
    tokenizer = load_tokenizer(folder)
    material = material_of(folder, lengths=[200, 2000], cases=8)
    rows, prompt = material.windows(200)
    assert rows.shape == (8, 200) and prompt == 150
    assert material.windows(2000)[1] == 2000 - 128
    assert (rows[:, 0] == 0).all(), "the start token"
    texts = [tokenizer.decode(row[1:]) for row in rows]
    assert all(text in TEXT for text in texts) and texts[0] == TEXT[:199]
    assert len(set(texts)) > 1
    fewer, _ = material_of(folder, lengths=[200, 2000], cases=3).windows(200)
    np.testing.assert_array_equal(fewer, rows[:3])


def test_attention_is_measured_on_the_text_where_no_task_asks(folder):
    material = material_of(folder, tasks=["perplexity", "attention"], cases=3)
    rows, prompt = material.windows(192)
    prompts, new = material.attention_prompts(192)
    assert new == 1 and np.array_equal(prompts, rows[: len(prompts), :prompt])
    assert 0 < len(prompts) <= 3


def test_prompts_of_ruler_hold_their_answers(folder):
    tokenizer = load_tokenizer(folder)
    first, second = material_of(folder, tasks=["niah_single_1"], lengths=[1500]).task(
        "niah_single_1", 1500
    ).cases  # fmt: skip
    for case in (first, second):
        (answer,) = case.answers
        assert answer in tokenizer.decode(case.context) and len(case.prompt) <= 1500
    assert first.answers != second.answers


def test_a_model_without_some_tokens_of_the_text(folder):
    """They stand behind the prompts that are looked at first."""
    tokenizer, config = load_tokenizer(folder), read_config(folder)
    rare = max(tokenizer("à").input_ids)
    grid = Grid.of(tasks=["attention"], lengths=[192], methods=["full"])
    material = Material(grid, tokenizer, TEXT + "à")
    material.check(config)
    with pytest.raises(ValueError, match=f"the model has {rare} tokens, got {rare} in the text"):
        material.check(dataclasses.replace(config, vocab_size=rare))


@pytest.mark.parametrize("error", [0.25, np.inf])
def test_means_per_layer(error):
    """Over rows and heads; what is not finite is no measurement."""
    recall = np.array([[[1.0, 0.5]], [[0.0, 0.5]]])
    found = Fidelity(recall, np.array([[0.5], [error]]), np.zeros((2, 1, 2)))
    if error == 0.25:
        expected = {"recall": [0.75, 0.25], "error": [0.5, 0.25], "cases": 1}
        assert compare_module._per_layer(found) == expected
        return
    with pytest.raises(ValueError, match=r"attention error .*inf"):
        compare_module._per_layer(found)


def test_a_measurement_that_fails_leaves_the_others(folder, monkeypatch):
    """A prompt pass, a calibration, a method: each failure is of its own cells alone."""
    measure, candidates = measure_of(folder, cases=2)
    unit = Unit("perplexity", 192, None, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "context_nll", lambda *_: np.full((2, 4), np.nan))
        found = [record["failed"] for _, record in measure.unit(unit, candidates)]
        assert len(found) == 2 and all("loss is nan" in reason for reason in found)
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "ReadOnce", lambda *_, **__: 1 / 0)
        found = [record["failed"] for _, record in measure.unit(unit, candidates)]
        assert found == ["ZeroDivisionError: division by zero"] * 2
    measure.calibrated = lambda transform: 1 / 0 if transform != kvjax.Full() else transform
    records = {one.method: record for one, record in measure.unit(unit, candidates)}
    assert "ZeroDivisionError" in records["h2o"]["failed"] and "failed" not in records["full"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are counted on Linux")
@pytest.mark.parametrize("runs_out", ["memory", "maps"])
def test_compiled_code_is_dropped_before_memory_runs_out(
    command, measured, monkeypatch, tmp_path, runs_out
):
    dropped, little = [], tmp_path / "little"
    clear = lambda: dropped.append(len(measured))  # noqa: E731
    monkeypatch.setattr(compiled_code, "clear_compiled_functions", clear)
    assert command(lengths=192) == 0 and not dropped
    if runs_out == "memory":
        little.write_text("MemTotal:       100 kB\n")
        monkeypatch.setattr(memory, "_MEMORY", little)
    else:
        counts = itertools.cycle([51, 0])  # before and after it is dropped
        little.write_text("100\n")
        monkeypatch.setattr(compiled_code, "_MOST_MAPS", little)
        monkeypatch.setattr(compiled_code, "memory_maps", lambda: next(counts))
        compiled_code._compiled_since.set()  # cells compile nothing here
    measured.clear()
    assert command(lengths=256) == 0
    # Maps are counted where something has been compiled.
    assert dropped if runs_out == "maps" else dropped == list(range(1, len(measured) + 1))


def test_progress(folder, measured):
    calls = []
    compare(
        random_decoder(read_config(folder)), load_tokenizer(folder), TEXT, methods=["h2o"],
        budgets=[0.5], lengths=[192, 256], tasks=["needle"], questions=["inside"], cases=8,
        on_progress=lambda *call: calls.append(call),
    )  # fmt: skip
    done, totals, what = zip(*calls, strict=True)
    assert len(calls) == len(measured) / 2 + 1 and len(set(totals)) == 1
    assert done[0] == 0 and done[-1] == totals[0]
    assert all(b > a for a, b in itertools.pairwise(done))
    assert what[0] == "needle · 192 tokens · question inside · cases 1-4"
