"""Comparisons: what they count, how they go on and grow, what they refuse."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import kvjax
from kvjax.cli.arguments import depth_list, method_list
from kvjax.cli.main import main
from kvjax.cli.terminal import Display
from kvjax.evaluation import Estimate, Grid, Proportion, compare, read_results
from kvjax.evaluation.cells import files
from kvjax.evaluation.cells.grid import Cell, Unit
from kvjax.evaluation.comparison import compare as compare_module
from kvjax.evaluation.comparison.compare import _Measure
from kvjax.models import DecoderConfig, RopeConfig, load_tokenizer, random_decoder
from kvjax.models.demo.export import save_pretrained
from tests.support.comparisons import draw_nothing

TEXT = "The harbour master kept a ledger of everything that came in. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of one layer with a token per byte."""
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    config = DecoderConfig(
        vocab_size=len(alphabet), hidden_size=16, intermediate_size=16, num_layers=1, query_heads=2,
        kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512,
        tie_embeddings=True, bos_token_id=0, eos_token_ids=(1,),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    save_pretrained(random_decoder(config), tokenizer, path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def command(folder, text, tmp_path):
    """`kvjax compare` with a small grid, in which options can be changed."""

    def run(*flags: str, **changes) -> int:
        options = {
            "model": folder, "text": text, "methods": "h2o,streaming_llm(budget=64)",
            "budgets": "0.25,0.5", "lengths": "192,256", "depths": "0,1",
            "tasks": "needle,perplexity,attention", "question": "inside", "cases": 4,
            "out": tmp_path / "out", **changes,
        }  # fmt: skip
        return main(["compare", *flags, *(f"--{name}={value}" for name, value in options.items())])

    return run


CANDIDATES = [("full", None), ("h2o", 0.25), ("h2o", 0.5), ("streaming_llm(budget=64)", None)]


def made_up(cell: Cell) -> dict:
    """What is found in a cell: numbers that follow from it alone."""
    count = cell.stop - cell.first
    sizes = {"cache_bytes": int(1000 * (cell.budget or 1)), "full_cache_bytes": 1000}
    if cell.task == "attention":
        return {"recall": [0.5, 1.0], "error": [0.25, 0.125], "cases": count, "seconds": 0.5}
    if cell.task == "perplexity":
        more = 0.0 if cell.method == "full" else 0.001 * cell.length / 64
        losses = [2.0 + 0.1 * number + more for number in range(cell.first, cell.stop)]
        return {"scores": losses, "quarters": [1.0, 2.0, 3.0, 4.0], **sizes, "seconds": 0.25}
    share = 1.0 if cell.method == "full" else min(cell.budget or 0.0, 1.0)
    numbers = range(cell.first, cell.stop)
    return {
        "scores": [float((number % 4) < round(4 * share)) for number in numbers],
        "depths": [float(number % 2) for number in numbers],
        "texts": [f" {number}" for number in numbers], "prompt_tokens": [cell.length] * count,
        "new_tokens": [2] * count, "live_slots": 10.0, "dropped": 0, **sizes, "seconds": 0.125,
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch) -> list:
    """Replaces the measurements by numbers that follow from the cell; the cells measured.

    Pictures are not drawn.
    """
    draw_nothing(monkeypatch)
    cells = []

    def unit(self, unit, candidates):
        for one in candidates:
            cells.append(Cell(*unit, *one.key))
            yield one, made_up(cells[-1])

    monkeypatch.setattr(_Measure, "unit", unit)
    monkeypatch.setattr(_Measure, "_rows", lambda self, length: 4)
    return cells


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvjax: error: ") and err.count("\n") == 1, (out, err)
    return err


def results(path: Path) -> dict:
    return json.loads((path / "results.json").read_text())


# What is measured


def test_a_whole_run(command, tmp_path, capsys):
    """Nothing is replaced: files, figures that are known, and the same bytes again."""
    out = tmp_path / "out"
    options = {"methods": "h2o", "lengths": 192, "budgets": 0.25, "cases": 2}
    options["question"] = "inside,after"
    assert command(**options) == 0
    assert "h2o" in capsys.readouterr().out
    assert command(**options, out=tmp_path / "again") == 0
    for name in ("results.json", "results.csv"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    found = results(out)
    rows = {(row["task"], row["question"], row["method"]): row for row in found["rows"]}
    assert len(rows) == 2 * 2 + 2 + 2
    full, h2o = (rows["perplexity", None, name] for name in ("full", "h2o"))
    assert full["difference"]["mean"] == 0 and h2o["difference"]["mean"] != 0
    assert full["score"]["cases"] == 2 and len(full["quarters"]) == 4
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
    times = json.loads((out / "timings.json").read_text())
    assert times["versions"]["jax"] == jax.__version__
    assert "seconds" not in (out / "results.json").read_text(), "they are in timings.json alone"


def test_answers_are_those_of_generate(folder):
    """With the question inside: as one call of `generate`. After it: as a further turn."""
    tokenizer, model = load_tokenizer(folder), random_decoder(_config(folder))
    grid = Grid.of(methods=["h2o"], budgets=[0.25], lengths=[192], tasks=["needle"], cases=2)
    material = compare_module.Material(grid, tokenizer, TEXT)
    measure = _Measure(material, compare_module.as_functional(model), ())
    cases, new = material.task("needle", 192).cases, material.most_new("needle", 192)
    for question in ("inside", "after"):
        unit = Unit("needle", 192, question, 0, 2)
        for one, found in measure.unit(unit, grid.candidates):
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


def test_right_answers_are_counted_and_every_method_sees_the_same_cases(
    folder, monkeypatch, tmp_path
):
    tokenizer = load_tokenizer(folder)
    prompts = {}

    def answer(model, given, *, context, **options):
        told = [tokenizer.decode(prompt).split(" is ")[1][:6] for prompt in given]
        seen = prompts.setdefault(repr(context.transform), [])
        texts = []
        for prompt, right in zip(given, told, strict=True):
            seen.append(tuple(prompt))
            wrong = context.transform != kvjax.Full() and len(seen) % 4 == 0
            texts.append("0" * 6 if wrong else f" {right}. ")
        tokens = [tokenizer(text).input_ids[1:] for text in texts]
        return kvjax.Generation(
            tokens, [False] * len(given), [192] * len(given), 0.1, 0.01, 0.0, 400, 800,
            {"device": 400}, None, 0,
        )  # fmt: skip

    class Once:
        """Contexts that know their prompts."""

        def __init__(self, model, given, transforms, **options):
            self.given = given

        def context(self, transform):
            return Context(transform, self.given)

    class Context:
        def __init__(self, transform, given):
            self.transform, self.given, self.caches = transform, given, ()

    def with_prompts(model, questions, *, context, **options):
        assert questions is None, "the question is inside"
        return answer(model, context.given, context=context, **options)

    monkeypatch.setattr(compare_module, "ReadOnce", Once)
    monkeypatch.setattr(compare_module, "generate", with_prompts)
    monkeypatch.setattr(compare_module, "_live_slots", lambda context: 5.0)
    found = compare(
        random_decoder(_config(folder)), tokenizer, TEXT, methods=["h2o"], budgets=[0.5],
        lengths=[192, 256], depths=[0.0, 1.0], tasks=["needle"], questions=["inside"], cases=8,
    )  # fmt: skip
    shares = {(row.length, row.method): row.score for row in found.rows()}
    assert shares[192, "full"] == Estimate.of([1.0] * 8) == shares[256, "full"]
    assert shares[192, "h2o"].mean == 0.75 and shares[192, "h2o"].cases == 8
    (row,) = [row for row in found.rows() if row.candidate == ("h2o", 0.5) and row.length == 192]
    assert {depth: one.cases for depth, one in row.depths.items()} == {0.0: 4, 1.0: 4}
    assert row.difference.mean == -0.25
    first, second = prompts.values()
    assert first == second and len(set(first)) == 16
    assert {len(prompt) for prompt in first} == {192, 256}


def _config(folder):
    from kvjax.models import read_config

    return read_config(folder)


def material_of(folder, **grid):
    grid = {"lengths": [192], "tasks": ["needle"], "depths": [0.5], "cases": 2, **grid}
    return compare_module.Material(Grid.of(**grid), load_tokenizer(folder), TEXT)


def test_seeds_change_the_cases(folder):
    def cases(seed, **grid):
        return material_of(folder, seed=seed, **grid).task("needle", 192).cases

    assert cases(0) == cases(0)
    assert len({tuple(case.prompt) for seed in range(4) for case in cases(seed)}) == 8
    assert cases(0, cases=5)[:2] == cases(0), "more cases leave the first as they are"


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


def test_a_measurement_that_fails_leaves_the_others(folder, monkeypatch):
    """A prompt pass, a calibration, a method: each failure is of its own cells alone."""
    grid = Grid.of(methods=["h2o"], budgets=[0.25], lengths=[192], tasks=["needle"], cases=2)
    material = compare_module.Material(grid, load_tokenizer(folder), TEXT)
    measure = _Measure(material, compare_module.as_functional(random_decoder(_config(folder))), ())
    unit = Unit("perplexity", 192, None, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "context_nll", lambda *_: np.full((2, 4), np.nan))
        found = [record["failed"] for _, record in measure.unit(unit, grid.candidates)]
        assert len(found) == 2 and all("loss is nan" in reason for reason in found)
    with monkeypatch.context() as patch:
        patch.setattr(compare_module, "ReadOnce", lambda *_, **__: 1 / 0)
        found = [record["failed"] for _, record in measure.unit(unit, grid.candidates)]
        assert found == ["ZeroDivisionError: division by zero"] * 2
    measure.calibrated = lambda transform: 1 / 0 if transform != kvjax.Full() else transform
    records = {one.method: record for one, record in measure.unit(unit, grid.candidates)}
    assert "ZeroDivisionError" in records["h2o"]["failed"] and "failed" not in records["full"]


def test_intervals_are_wilsons():
    def wilson(k, n, z=1.959963984540054):
        p = k / n
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)

    for k, n in [(0, 4), (4, 4), (3, 7), (196, 200)]:
        assert Proportion(k, n).interval == pytest.approx(wilson(k, n), abs=1e-12)


def test_estimates():
    """Wilson's interval of right and wrong answers, a bootstrap's of other scores."""
    one = Estimate.of([1.0, 0.0, 1.0, 1.0])
    assert one == (0.75, *Proportion(3, 4).interval, 4)
    scores = np.random.default_rng(1).normal(2.0, 0.5, 400)
    found = Estimate.of(scores.tolist())
    expected = stats.norm.interval(0.95, scores.mean(), scores.std() / 20)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.01)
    assert found == Estimate.of(scores.tolist()), "the same again"
    assert Estimate.of([0.3]) == (0.3, 0.3, 0.3, 1)


# Grids


def test_candidates_of_a_grid():
    grid = Grid.of(
        methods=["snapkv", "full", " h2o ", "snapkv", "h2o(budget=64)", "chain(snapkv, h2o)"],
        budgets=[0.5, 64, 0.5],
    )
    assert [(one.method, one.budget) for one in grid.candidates] == [
        ("full", None), ("snapkv", 0.5), ("snapkv", 64), ("h2o", 0.5), ("h2o", 64),
        ("h2o(budget=64)", None), ("chain(snapkv, h2o)", 0.5), ("chain(snapkv, h2o)", 64),
    ]  # fmt: skip
    assert grid.candidates[2].transform == kvjax.SnapKV(64)
    kinds = [type(one.budget) for one in grid.candidates[1:3]]
    assert kinds == [float, int]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"methods": "snapkv"}, TypeError, "methods must be a sequence"),
        ({"methods": [kvjax.SnapKV(64)]}, TypeError, "must be text"),
        ({"budgets": 0.5}, TypeError, "budgets must be a sequence"),
        ({"lengths": []}, ValueError, "lengths must not be empty"),
        ({"depths": ["0"]}, TypeError, "depth must be a number"),
        ({"questions": ["before"]}, ValueError, "asked inside or after, got 'before'"),
        ({"max_new": 0}, ValueError, "max_new must be at least 1"),
        ({"budgets": [1, 1.0], "methods": ["streaming_llm(sinks=0)"]}, ValueError, "told apart"),
    ],
)
def test_grids_that_are_refused(change, error, said):
    with pytest.raises(error, match=said):
        Grid.of(**change)


def test_lists_of_the_command_line():
    assert method_list(" h2o,every(snapkv(window=16), steps=64) ") == [
        "h2o", "every(snapkv(window=16), steps=64)",
    ]  # fmt: skip
    assert depth_list("5") == [0, 0.25, 0.5, 0.75, 1]
    assert depth_list("1.0") == [1.0] and depth_list("0,1") == [0, 1]


# Files


def test_files(command, measured, tmp_path, capsys):
    assert command() == 0
    out = tmp_path / "out"
    found = results(out)
    assert found["settings"]["methods"] == [list(one) for one in CANDIDATES]
    assert found["settings"]["tasks"]["needle"] == {"metric": "accuracy", "floor": 0.0}
    assert found["at_floor"] == []
    assert len(found["rows"]) == 2 * 3 * 4
    rows = {
        (row["task"], row["length"], row["method"], row["budget"]): row for row in found["rows"]
    }
    row = rows["needle", 256, "h2o", 0.5]
    low, high = Proportion(2, 4).interval
    assert row["score"] == {"mean": 0.5, "low": round(low, 6), "high": round(high, 6), "cases": 4}
    assert row["difference"]["mean"] == -0.5 and row["slots"] == 128 and row["question"] == "inside"
    assert set(row["depths"]) == {"0.0", "1.0"} and row["depths"]["0.0"]["cases"] == 2
    assert (row["cache_bytes"], row["full_cache_bytes"]) == (500, 1000)
    row = rows["perplexity", 192, "h2o", 0.25]
    assert row["difference"]["mean"] == pytest.approx(0.003) and row["quarters"] == [1, 2, 3, 4]
    assert row["score"]["mean"] == pytest.approx(2.153) and row["question"] is None
    row = rows["attention", 192, "h2o", 0.25]
    assert row["recall"] == 0.75 and row["score"]["mean"] == 0.1875
    with open(out / "results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found["rows"])
    (line,) = [
        line
        for line in lines
        if [line[name] for name in ("task", "length", "method", "budget")]
        == ["needle", "256", "h2o", "0.5"]
    ]
    assert (line["score"], line["cases"], line["cache_bytes"], line["failed"]) == (
        "0.5", "4", "500", ""
    )  # fmt: skip
    times = json.loads((out / "timings.json").read_text())
    assert times["seconds"] == pytest.approx(sum(made_up(cell)["seconds"] for cell in measured))
    assert not list(out.glob("*.part"))
    assert files.as_json(read_results(out)) == found, "what is read again is the same"


def test_json_on_the_command_line(command, measured, tmp_path, capsys):
    assert command("--json") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert record.pop("out") == str(tmp_path / "out")
    assert record.pop("timings")["versions"]["kvjax"] == kvjax.__version__
    assert record == results(tmp_path / "out")


def test_eval_is_the_same_with_tasks_of_ones_own(folder, text, measured, tmp_path, capsys):
    out = tmp_path / "eval"
    command = [
        "eval", "needle", "perplexity", "--model", folder, "--text", text, "--method", "h2o",
        "--budget", "0.5", "--lengths", "192", "--question", "after", "--cases", "3", "--out", out,
    ]  # fmt: skip
    assert main(list(map(str, command))) == 0
    assert [(cell.task, cell.question, cell.stop) for cell in measured] == [
        ("needle", "after", 3), ("needle", "after", 3), ("perplexity", None, 3),
        ("perplexity", None, 3),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["eval", "needle", "nothing"]) == 2
    assert "unknown task 'nothing'; there are needle, " in one_line(capsys)


def test_lost_tokens_are_told(command, measured, monkeypatch, tmp_path, capsys):
    assert command("--json") == 0 and capsys.readouterr().err == ""
    unit = _Measure.unit

    def losing(self, given, candidates):
        for one, found in unit(self, given, candidates):
            lost = 3 if one.budget == 0.5 and given.task == "needle" else 0
            yield one, {**found, "dropped": lost}

    monkeypatch.setattr(_Measure, "unit", losing)
    assert command("--json", out=tmp_path / "other") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("h2o 0.5 lost 6 tokens that found no free slot")  # of two cells


# Going on, growing, and failing


def interrupt_at(monkeypatch, number: int):
    """The `number`-th cell does not come back."""
    whole, calls = _Measure.unit, []

    def interrupted(self, unit, candidates):
        for found in whole(self, unit, candidates):
            calls.append(unit)
            if len(calls) == number:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(_Measure, "unit", interrupted)


@pytest.mark.parametrize(
    ("number", "torn"), [(1, b""), (6, b'{"cell": ["nee'), (15, b'{"cell": ["needle", 192')]
)
@pytest.mark.fast_cases('6-{"cell": ["nee')
def test_going_on_after_an_interruption(
    command, measured, monkeypatch, tmp_path, capsys, number, torn
):
    options = {"cases": 8}
    assert command(out=tmp_path / "whole", **options) == 0
    every = list(measured)
    assert len(every) == 2 * 4 * (2 + 2 + 1)
    measured.clear()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        interrupt_at(patch, number)
        assert command(**options) == 130
    out, err = capsys.readouterr()
    assert out == "" and "the same command goes on" in err
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} <= {"settings.json", "cells.jsonl"}
    with open(out / "cells.jsonl", "ab") as file:
        file.write(torn)
    before = list(measured)
    measured.clear()
    assert command(**options) == 0
    assert before[-1] == measured[0], "the cell that was interrupted is measured again"
    assert before[:-1] + measured == every, "and no other"
    for name in ("results.json", "results.csv"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    measured.clear()
    assert command(**options) == 0 and measured == [], "nothing is left to do"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a process is killed by a signal")
def test_killed_at_any_moment(folder, text, tmp_path):
    """Nothing is replaced: a run that is killed again and again ends in the same bytes."""
    line = [
        sys.executable, "-m", "kvjax.cli.main", "compare", "--model", folder, "--text", text,
        "--methods", "h2o,quest(page=8)", "--budgets", "0.25,0.5", "--lengths", "192",
        "--depths", "0,1", "--tasks", "needle,perplexity,attention", "--cases", "20",
    ]  # fmt: skip
    line = list(map(str, line))
    start = time.monotonic()
    assert subprocess.run([*line, "--out", tmp_path / "whole"], capture_output=True).returncode == 0
    whole, kills = time.monotonic() - start, 0
    rng, path = random.Random(7), tmp_path / "out" / "cells.jsonl"
    for _ in range(8):
        process = subprocess.Popen([*line, "--out", tmp_path / "out"], stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.0) * whole)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills, "no run was killed"
    assert path.exists(), "no kill came after the first cell"
    subprocess.run([*line, "--out", tmp_path / "out"], check=True, capture_output=True)
    for name in ("results.json", "results.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_comparison_grows(command, measured, tmp_path, capsys):
    """More methods, budgets, lengths, tasks, questions and cases: only what is missing is done."""
    assert command() == 0
    everything = set(measured)
    changes = [
        {"methods": "h2o,snapkv(window=8)"}, {"budgets": "0.25,0.75"}, {"lengths": "320"},
        {"tasks": "chain", "lengths": "320"}, {"question": "after"}, {"cases": 12}, {"cases": 13},
    ]  # fmt: skip
    for change in changes:
        measured.clear()
        assert command(**change) == 0
        assert measured and not everything & set(measured), "nothing is measured twice"
        everything |= set(measured)
    found = results(tmp_path / "out")
    settings = found["settings"]
    assert settings["lengths"] == [192, 256, 320] and settings["cases"] == 13
    assert settings["questions"] == ["inside", "after"]
    assert list(settings["tasks"]) == ["needle", "perplexity", "attention", "chain"]
    assert [tuple(one) for one in settings["methods"]] == [
        *CANDIDATES, ("snapkv(window=8)", 0.25), ("snapkv(window=8)", 0.5), ("h2o", 0.75),
    ]  # fmt: skip
    rows = {
        (row["task"], row["length"], row["question"], row["method"], row["budget"]): row
        for row in found["rows"]
    }
    one = rows["needle", 192, "inside", "h2o", 0.5]
    # Cases 1 to 4 came first, then 5 to 8 and 9 to 12, then the 13th.
    assert one["score"]["cases"] == 13 and one["score"]["mean"] == pytest.approx(7 / 13, abs=1e-6)
    assert sum(depth["cases"] for depth in one["depths"].values()) == 13
    measured.clear()
    assert command() == 0 and measured == [], "the first command has nothing to do"
    assert results(tmp_path / "out") == found


def test_a_failed_cell(command, measured, monkeypatch, tmp_path, capsys):
    assert command(out=tmp_path / "whole") == 0
    capsys.readouterr()
    unit = _Measure.unit

    def failing(self, given, candidates):
        for one, found in unit(self, given, candidates):
            if (one.budget, given.length) == (0.5, 192) and given.task != "perplexity":
                found = {"failed": "RuntimeError: no luck", "seconds": 0.0}
            yield one, found

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(_Measure, "unit", failing)
        assert command() == 1
    said = capsys.readouterr().out
    assert "h2o 0.5" in said and "RuntimeError: no luck" in said
    found = results(out)
    failed = [row for row in found["rows"] if row["failed"]]
    assert [(row["task"], row["length"], row["budget"]) for row in failed] == [
        ("needle", 192, 0.5), ("attention", 192, 0.5),
    ]  # fmt: skip
    assert all(row["score"] is None and "no luck" in row["failed"] for row in failed)
    with open(out / "results.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["failed"]]
    assert [line["score"] for line in lines] == ["", ""]

    measured.clear()
    assert command() == 0, "failed cells are tried again"
    assert {(cell.task, cell.budget, cell.length) for cell in measured} == {
        ("needle", 0.5, 192), ("attention", 0.5, 192),
    }  # fmt: skip
    assert len(measured) == 2
    for name in ("results.json", "results.csv"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_everything_failed(command, monkeypatch, tmp_path, capsys):
    draw_nothing(monkeypatch)

    def failing(self, unit, candidates):
        yield from ((one, {"failed": "ValueError: no", "seconds": 0.0}) for one in candidates)

    monkeypatch.setattr(_Measure, "unit", failing)
    assert command() == 1
    out = capsys.readouterr().out
    assert "ValueError: no" in out and "more that failed" in out
    assert all(row["score"] is None for row in results(tmp_path / "out")["rows"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are counted on Linux")
def test_compiled_code_is_dropped_before_memory_maps_run_out(
    command, measured, monkeypatch, tmp_path
):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(len(measured)))
    assert command(lengths=192) == 0 and not cleared
    few = tmp_path / "max_map_count"
    few.write_text("100\n")
    monkeypatch.setattr(compare_module, "_MOST_MAPS", few)
    measured.clear()
    assert command(lengths=256) == 0
    assert cleared == list(range(1, len(measured) + 1)), "after every cell"


def test_a_full_cache_at_the_floor_is_said(command, measured, monkeypatch, tmp_path):
    unit = _Measure.unit

    def poor(self, given, candidates):
        for one, found in unit(self, given, candidates):
            if given.task == "needle":
                found = {**found, "scores": [0.0] * len(found["scores"])}
            yield one, found

    monkeypatch.setattr(_Measure, "unit", poor)
    assert command(lengths=192) == 0
    found = read_results(tmp_path / "out")
    assert [panel for panel in found.panels() if found.at_floor(panel)] == [
        ("needle", 192, "inside")
    ]
    assert results(tmp_path / "out")["at_floor"] == [["needle", 192, "inside"]]


# Bad input


def refused(capsys, tmp_path, code: int) -> str:
    """The one line of an error that left nothing behind."""
    assert code == 2
    assert not (tmp_path / "out").exists()
    return one_line(capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "nope"}, "unknown method 'nope'"),
        ({"methods": ""}, "methods between commas"),
        ({"methods": "snapkv("}, "methods between commas"),
        ({"methods": "h2o](1"}, "methods between commas"),
        ({"methods": "snapkv(foo=1)"}, "no parameter 'foo'"),
        ({"methods": "every(h2o, steps=3)"}, "Every repeats a method"),
        ({"budgets": "0"}, "budget must be"),
        ({"budgets": "0.1,1.5"}, "(0, 1]"),
        ({"budgets": "-0.1"}, "(0, 1]"),
        ({"budgets": "nan"}, "(0, 1]"),
        ({"budgets": "0.1,,0.2"}, "numbers between commas, got ''"),
        ({"budgets": "20%"}, "numbers between commas, got '20%'"),
        ({"budgets": "8", "methods": "snapkv"}, "budget must be at least 17"),
        ({"question": "before"}, "asked inside or after, got 'before'"),
        ({"max-new": "0"}, "max_new must be at least 1"),
        ({"tasks": "gsm8k"}, "gsm8k needs data"),
        ({"lengths": "0"}, "length must be at least 1"),
        ({"lengths": "192.0"}, "length must be an int"),
        ({"lengths": "10"}, "a prompt of 10 tokens is too short: what is hidden in it and the"),
        ({"lengths": "10000000000"}, "length must be at most 2147483647"),
        ({"methods": "all,foo"}, "all must stand alone, got 'all,foo'"),
        ({"methods": "foo,h2o,"}, "unknown method 'foo'"),
        ({"methods": "(" * 20_000}, "must have at most 10000 characters"),
        ({"budgets": "99999999999999999999"}, "budget must be at most 2147483647 slots, got 9999"),
        ({"budgets": "4000000000", "methods": "full"}, "budget must be at most 2147483647"),
        ({"depths": "1000000000"}, "at least 2 and at most 1000, or depths such as 0,0.5,1, got"),
        ({"depths": ",".join(["0.5"] * 1001)}, "1000 depths at most, got 1001"),
        ({"cases": 10**12}, "cases must be at most 100000, got 1000000000000"),
        ({"seed": "9" * 5_000}, "must be an integer from 0 to 2**32 - 1"),
        ({"lengths": "192,600"}, "the model has 512 positions, got a prompt of 600 tokens"),
        ({"lengths": "512"}, "the model has 512 positions"),
        ({"lengths": "100000"}, "the text must have at least 100000"),
        ({"depths": "1.5"}, "depth must lie between 0 and 1"),
        ({"depths": "0,nan"}, "depth must lie between 0 and 1"),
        ({"depths": "1"}, "a number of depths, at least 2"),
        ({"tasks": "needle,haystack"}, "unknown task 'haystack'"),
        ({"tasks": ""}, "unknown task ''"),
        ({"cases": 0}, "cases must be at least 1"),
        ({"cases": "many"}, "--cases"),
        ({"seed": -1}, "--seed"),
        ({"text": "no such file"}, "cannot read no such file"),
        ({"text": "."}, "cannot read .: Is a directory"),
        ({"model": "/no/such/folder"}, "/no/such/folder is not a directory"),
    ],
)
def test_errors_before_anything_is_loaded(command, capsys, monkeypatch, tmp_path, changes, said):
    from kvjax import models

    monkeypatch.setattr(models, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert said in refused(capsys, tmp_path, command(**changes))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ab\xff", "is not UTF-8 text: byte 2 is 0xff"),
        (b" \n", "is empty"),
        (b"Too short.", "the text must have at least"),
    ],
)
def test_texts_that_are_no_filler(command, capsys, tmp_path, content, said):
    (tmp_path / "text.txt").write_bytes(content)
    assert said in refused(capsys, tmp_path, command(text=tmp_path / "text.txt"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_models_that_do_not_load(command, folder, capsys, tmp_path, name):
    broken = tmp_path / "model"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(b"{" if file.name == name else file.read_bytes())
    refused(capsys, tmp_path, command(model=broken))


def test_folders_that_cannot_be_written_to(command, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for path, said in [("file", "it is not a directory"), ("file/out", "file is not a directory")]:
        assert said in refused(capsys, tmp_path, command(out=tmp_path / path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "no permission" in refused(capsys, tmp_path, command(out=tmp_path / "out"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_something_else(command, measured, capsys, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.csv").write_text("mine")
    assert command() == 2
    assert "holds a results.csv of something else" in one_line(capsys)
    assert [path.name for path in out.iterdir()] == ["results.csv"]
    assert (out / "results.csv").read_text() == "mine"


def test_a_folder_with_other_settings(command, folder, measured, capsys, tmp_path):
    assert command() == 0
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other_text = tmp_path / "other.txt"
    other_text.write_text(TEXT.replace("harbour", "station"))
    capsys.readouterr()
    changes = [
        ({"seed": 1}, "seed"), ({"text": other_text}, "text"), ({"depths": "0,0.5"}, "depths"),
        ({"max-new": 3}, "max_new"),
    ]  # fmt: skip
    for change, name in changes:
        assert command(**change) == 2
        assert f"holds a comparison with other {name}: choose" in one_line(capsys)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    kept = json.loads((out / "settings.json").read_text())
    kept["settings"]["strange\x1b[2J"] = 1
    (out / "settings.json").write_text(json.dumps(kept))
    assert command() == 2
    assert r"with other strange\x1b[2J: choose" in one_line(capsys)
    for damaged in (
        "[]",
        "{",
        '{"a":' * 100_000,
        '{"settings": {}}',
        '{"asked": {}, "settings": {}}',
    ):
        (out / "settings.json").write_text(damaged)
        assert command() == 2
        assert "settings.json is not the settings of a comparison: " in one_line(capsys)


def test_other_weights_are_another_model(folder, measured, tmp_path):
    tokenizer, config = load_tokenizer(folder), _config(folder)
    again = functools.partial(
        compare, tokenizer=tokenizer, text=TEXT, methods=["full"], lengths=[192], depths=[0.5],
        tasks=["needle"], questions=["inside"], cases=2, out=tmp_path / "out",
    )  # fmt: skip
    again(random_decoder(config))
    again(random_decoder(config))
    with pytest.raises(ValueError, match="with other weights"):
        again(random_decoder(config, seed=1))


CELL = Cell("perplexity", 192, None, 0, 2, "full", None)
FOUND = {
    "scores": [2.0, 3.0], "quarters": [1.0, 2.0, 3.0, 4.0], "cache_bytes": 5,
    "full_cache_bytes": 5, "seconds": 0.1,
}  # fmt: skip
ASKED = {
    "methods": [["full", None]],
    "tasks": {"perplexity": {"metric": "nats per token", "floor": None}},
    "lengths": [192], "questions": ["inside"], "cases": 2,
}  # fmt: skip
ANSWERS = made_up(Cell("needle", 192, "inside", 0, 2, "full", None))


def damaged(change: dict | None = None, found: dict = FOUND, cell=CELL) -> dict:
    return {"cell": cell, "found": {**found, **(change or {})}}


DAMAGED = {
    "cut": (b'{"cell": ["perplexity", 192, nu', "Expecting value"),
    "no text": (b"\xff", "decode"),
    "empty": (b"{}", "expected an object with cell and found"),
    "a number": (b"5", "expected an object with cell and found"),
    "cell": (damaged(cell=5), "cell must be a list"),
    "other cell": (damaged(cell=["x", *CELL[1:]]), "no comparison"),
    "nested cell": (damaged(cell=[*CELL[:5], [], None]), "no comparison"),
    "length": (damaged(cell=["needle", "192", *CELL[2:]]), "no comparison"),
    "found": ({"cell": CELL, "found": 5}, "must be an object, got 5"),
    "found, empty": ({"cell": CELL, "found": {}}, "scores of found must"),
    "nan": (damaged({"scores": [math.nan, 1.0]}), "scores of found must be finite numbers"),
    "bytes": (damaged({"cache_bytes": "x"}), "cache_bytes of found must be a finite number"),
    "too few": (damaged({"scores": [1.0]}), "scores of found must be a list with one entry"),
    "text": (
        damaged(
            {"recall": ["x"], "cases": 1}, {"error": [1.0], "seconds": 1}, ["attention", *CELL[1:]]
        ),
        "recall of found must be finite numbers",
    ),
    "no texts": (
        damaged({"texts": None}, ANSWERS, ["needle", *CELL[1:]]),
        "texts of found must be a list",
    ),
    "nested": (b'{"a":' * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_journal(name, tmp_path):
    line, said = DAMAGED[name]
    settings = {"seed": 0}
    journal = files.Journal(tmp_path, settings, ASKED)
    journal.add(CELL, FOUND)
    assert files.Journal(tmp_path, settings, ASKED).finished == {CELL: FOUND}
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with pytest.raises(
        ValueError, match=r"cells\.jsonl is damaged in line 2 \(.*\): rem"
    ) as caught:
        files.Journal(tmp_path, settings, ASKED)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_journal_is_one_line(command, measured, capsys, tmp_path):
    assert command() == 0
    capsys.readouterr()
    path = tmp_path / "out" / "cells.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert command() == 2
    assert "cells.jsonl is damaged in line 1 " in one_line(capsys)


@pytest.mark.parametrize(
    ("broken", "name"), [("fsync", "cells.jsonl"), ("replace", "settings.json")]
)
def test_a_full_disk_names_the_file(monkeypatch, tmp_path, broken, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        files.Journal(tmp_path, {}, ASKED).add(CELL, FOUND)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder that takes no files")
def test_a_place_that_takes_no_folder(command, measured, capsys):
    assert command(out="/proc/kvjax") == 2
    assert "/proc/kvjax" in one_line(capsys)


# Progress


def test_progress(folder, measured):
    calls = []
    compare(
        random_decoder(_config(folder)), load_tokenizer(folder), TEXT, methods=["h2o"],
        budgets=[0.5], lengths=[192, 256], tasks=["needle"], questions=["inside"], cases=8,
        on_progress=lambda *call: calls.append(call),
    )  # fmt: skip
    done, totals, what = zip(*calls, strict=True)
    assert len(calls) == len(measured) / 2 + 1 and len(set(totals)) == 1
    assert done[0] == 0 and done[-1] == totals[0]
    assert all(b > a for a, b in itertools.pairwise(done))
    assert what[0] == "needle · 192 tokens · question inside · cases 1-4"


def test_the_bar(capsys):
    bar = Display(wanted=False)
    bar.show(0, None, "loading the model")
    bar.show(30, 120, "snapkv 0.1 · needle · 1,024 tokens · depth 0.5")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(bar.get_renderable())
    shown = console.export_text()
    assert "25%" in shown and "elapsed" in shown
    assert "snapkv 0.1 · needle · 1,024 tokens · depth 0.5" in shown


def test_all_methods_are_every_one_there_is():
    from kvjax.registry import METHODS, WRAPPERS

    names = {text.partition("(")[0] for text in method_list("all")}
    assert names == {*METHODS, *WRAPPERS} - {"every", "when_full", "everywhere"}
    assert len(Grid.of(methods=method_list(" all "), budgets=[0.1]).candidates) == len(names)
