"""Comparisons: what they count, how they go on after an interruption, what they refuse."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import os
import sys
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import kvjax
from kvjax.cli.arguments import depth_list, method_list
from kvjax.cli.compare_table import print_report
from kvjax.cli.main import main
from kvjax.cli.terminal import Display
from kvjax.evaluation import Grid, Proportion, compare, files, plots
from kvjax.evaluation.compare import _Measure
from kvjax.evaluation.grid import Cell
from kvjax.models import DecoderConfig, RopeConfig, load_tokenizer, random_decoder
from kvjax.models.demo.export import save_pretrained

TEXT = "The harbour master kept a ledger of everything that came in. " * 40
COMPARE = sys.modules["kvjax.evaluation.compare"]  # in the package, the name is the function's


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
            "budgets": "0.25,0.5", "lengths": "192,256", "depths": "0,1", "tasks": "needle",
            "cases": 4, "out": tmp_path / "out", **changes,
        }  # fmt: skip
        return main(["compare", *flags, *(f"--{name}={value}" for name, value in options.items())])

    return run


CANDIDATES = [("full", None), ("h2o", 0.25), ("h2o", 0.5), ("streaming_llm(budget=64)", None)]


@pytest.fixture
def measured(monkeypatch) -> list:
    """Replaces the measurements by numbers that follow from the cell; the cells measured."""
    cells = []

    def retrieval(self, transform, cell):
        cells.append(cell)
        share = 1.0 if cell.method == "full" else min(cell.budget or 0.0, 1.0)
        return {
            "right": round(4 * share), "cases": 4, "cache_bytes": int(1000 * (cell.budget or 1)),
            "full_cache_bytes": 1000, "ttft_s": [0.5, 0.1, 0.2, 0.4], "tpot_s": [0.003],
        }  # fmt: skip

    def perplexity(self, transform, cell):
        cells.append(cell)
        return {"nll": 2.0 if cell.method == "full" else 2.0 + 0.001 * cell.length / 64}

    def fidelity(self, transform, cell):
        cells.append(cell)
        return {"recall": [0.5, 1.0], "error": [0.25, 0.125]}

    for name, fake in [
        ("retrieval", retrieval),
        ("perplexity", perplexity),
        ("fidelity", fidelity),
    ]:
        monkeypatch.setattr(_Measure, name, fake)
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
    assert command(**options) == 0
    assert "h2o" in capsys.readouterr().out
    assert command(**options, out=tmp_path / "again") == 0
    for name in ("results.json", "results.csv"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    found = results(out)
    full, h2o = found["caches"]
    assert full["nll_difference"] == 0 and full["perplexity_ratio"] == 1
    assert full["recall"] == 1 and full["attention_error"] < 1e-5
    assert full["cache_bytes"] == full["full_cache_bytes"]
    assert 0 < h2o["recall"] < 1 and h2o["attention_error"] > 1e-3
    assert h2o["nll_difference"] != 0 and h2o["failed"] is None
    assert h2o["perplexity_ratio"] == pytest.approx(math.exp(h2o["nll_difference"]), abs=1e-5)
    assert h2o["layer_recall"] == [h2o["recall"]]
    assert 0.2 < h2o["cache_bytes"] / h2o["full_cache_bytes"] < 0.4
    assert len(found["cells"]) == 2 * 2
    assert all(cell["accuracy"]["cases"] == 2 for cell in found["cells"])
    times = json.loads((out / "timings.json").read_text())
    assert times["versions"]["jax"] == jax.__version__
    assert all(0 < row["tpot_s"] < row["ttft_s"] < 60 for row in times["caches"])
    assert "_s" not in "".join(full), "times are in timings.json alone"


def generation(tokens: list[int]) -> kvjax.Generation:
    return kvjax.Generation(
        [tokens], [False], [192], 0.1, 0.01, 0.0, 100, 200, {"device": 100}, None, 0
    )


def test_right_answers_are_counted_and_every_method_sees_the_same_cases(
    folder, monkeypatch, tmp_path
):
    tokenizer = load_tokenizer(folder)
    told = {}  # answers by prompt, from the needle itself
    prompts = {}

    def answer(model, given, *, transform, **options):
        (prompt,) = given
        prompts.setdefault(repr(transform), []).append(prompt)
        told_in = tokenizer.decode(prompt).split(" is ")[1][:6]
        told[tuple(prompt)] = told_in
        wrong = transform != kvjax.Full() and len(prompts[repr(transform)]) % 4 == 0
        return generation(tokenizer("0" * 6 if wrong else f" {told_in}. ").input_ids[1:])

    monkeypatch.setattr(COMPARE, "generate", answer)
    monkeypatch.setattr(_Measure, "perplexity", lambda *_: {"nll": 1.0})
    monkeypatch.setattr(_Measure, "fidelity", lambda *_: {"recall": [1.0], "error": [0.0]})
    found = compare(
        random_decoder(_config(folder)), tokenizer, TEXT, methods=["h2o"], budgets=[0.5],
        lengths=[192, 256], depths=[0.0, 1.0], tasks=["needle"], cases=4,
    )  # fmt: skip
    full, h2o = found.averages()
    assert full.accuracy == {"needle": Proportion(16, 16)}
    assert h2o.accuracy == {"needle": Proportion(12, 16)}
    assert [row.accuracy for row in found.rows() if row.method == "h2o"] == [Proportion(3, 4)] * 4
    first, second = prompts.values()
    assert first == second and len({*map(tuple, first)}) == 16
    assert {len(prompt) for prompt in first} == {192, 256}


def _config(folder):
    from kvjax.models import read_config

    return read_config(folder)


def test_seeds_change_the_cases(folder):
    tokenizer = load_tokenizer(folder)

    def cases(seed):
        grid = Grid.of(lengths=[192], depths=[0.5], tasks=["needle"], cases=2, seed=seed)
        return COMPARE.Material(grid, tokenizer, TEXT).cases("needle", 192, 0.5)

    assert cases(0) == cases(0)
    assert len({tuple(case.prompt) for seed in range(4) for case in cases(seed)}) == 8


def test_windows_of_the_text(folder):
    tokenizer = load_tokenizer(folder)
    grid = Grid.of(lengths=[200, 2000], depths=[0.5], tasks=["needle"])
    material = COMPARE.Material(grid, tokenizer, TEXT)
    rows, prompt = material.windows(200)
    assert rows.shape == (8, 200) and prompt == 150
    assert material.windows(2000)[1] == 2000 - 128
    assert (rows[:, 0] == 0).all(), "the start token"
    texts = [tokenizer.decode(row[1:]) for row in rows]
    assert all(text in TEXT for text in texts) and texts[0] == TEXT[:199]
    assert texts[-1] == TEXT[-199:]


def test_intervals_are_wilsons():
    def wilson(k, n, z=1.959963984540054):
        p = k / n
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)

    for k, n in [(0, 4), (4, 4), (3, 7), (196, 200)]:
        assert Proportion(k, n).interval == pytest.approx(wilson(k, n), abs=1e-12)


def test_percentages_do_not_round_to_all_or_nothing():
    shown = {(0, 9): "0", (9, 9): "100", (1, 3): "33", (999, 1000): "99.9", (9999, 10000): "99.9"}
    shown |= {(1, 300): "0.3", (1, 10_000): "0.1", (199, 200): "99.5"}
    for found, percent in shown.items():
        assert Proportion(*found).percent == percent


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
    (cell,) = [
        cell
        for cell in found["cells"]
        if (cell["method"], cell["budget"], cell["length"], cell["depth"]) == ("h2o", 0.5, 256, 1)
    ]
    low, high = Proportion(2, 4).interval
    assert cell["accuracy"] == {
        "right": 2, "cases": 4, "share": 0.5, "interval": [round(low, 6), round(high, 6)]
    }  # fmt: skip
    average = found["averages"][2]
    assert (average["method"], average["budget"]) == ("h2o", 0.5)
    assert average["accuracy"]["needle"]["right"] == 8
    assert average["nll_difference"] == pytest.approx(0.0035)  # mean of 0.003 and 0.004
    assert average["recall"] == 0.75 and average["attention_error"] == 0.1875
    assert (average["cache_bytes"], average["full_cache_bytes"]) == (1000, 2000)
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["cells"]) == 4 * 2 * 2
    (row,) = [
        row for row in rows if (row["budget"], row["length"], row["depth"]) == ("0.5", "256", "1.0")
    ]
    assert (row["method"], row["right"], row["accuracy"], row["failed"]) == ("h2o", "2", "0.5", "")
    assert float(row["nll_difference"]) == pytest.approx(0.004) and row["cache_bytes"] == "500"
    times = json.loads((out / "timings.json").read_text())
    assert times["caches"][0]["ttft_s"] == pytest.approx(0.3), "the median"
    assert not list(out.glob("*.part"))


def test_json_on_the_command_line(command, measured, tmp_path, capsys):
    assert command("--json") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert record.pop("out") == str(tmp_path / "out")
    assert record.pop("timings")["versions"]["kvjax"] == kvjax.__version__
    assert record == results(tmp_path / "out")


def test_lost_tokens_are_told(command, measured, monkeypatch, tmp_path, capsys):
    assert command("--json") == 0 and capsys.readouterr().err == ""
    retrieval = _Measure.retrieval

    def losing(self, transform, cell):
        return {**retrieval(self, transform, cell), "dropped": 3 if cell.budget == 0.5 else 0}

    monkeypatch.setattr(_Measure, "retrieval", losing)
    assert command("--json", out=tmp_path / "other") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("h2o 0.5 lost 12 tokens that found no free slot")  # of four cells


# Going on, and failing


def interrupt_at(monkeypatch, measure: str, number: int):
    """The `number`-th call of a measurement does not come back."""
    whole, calls = getattr(_Measure, measure), []

    def interrupted(self, transform, cell):
        calls.append(cell)
        found = whole(self, transform, cell)
        if len(calls) == number:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(_Measure, measure, interrupted)


@pytest.mark.parametrize(
    ("measure", "number", "torn"),
    [
        ("retrieval", 1, b""),
        ("retrieval", 6, b'{"cell": ["retr'),
        ("fidelity", 3, b'{"cell": ["fidelity", "h2o", 0.5, 192, null, null], "found": {}}'),
    ],
)
@pytest.mark.fast_cases('retrieval-6-{"cell": ["retr')
def test_going_on_after_an_interruption(
    command, measured, monkeypatch, tmp_path, capsys, measure, number, torn
):
    assert command(out=tmp_path / "whole") == 0
    every = list(measured)
    measured.clear()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        interrupt_at(patch, measure, number)
        assert command() == 130
    out, err = capsys.readouterr()
    assert out == "" and "the same command goes on" in err
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} <= {"settings.json", "cells.jsonl"}
    with open(out / "cells.jsonl", "ab") as file:
        file.write(torn)
    before = list(measured)
    measured.clear()
    assert command() == 0
    assert before[-1] == measured[0], "the cell that was interrupted is measured again"
    assert before[:-1] + measured == every, "and no other"
    for name in ("results.json", "results.csv"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    measured.clear()
    assert command() == 0 and measured == [], "nothing is left to do"


def test_a_failed_cell(command, measured, monkeypatch, tmp_path, capsys):
    assert command(out=tmp_path / "whole") == 0
    capsys.readouterr()
    retrieval, fidelity = _Measure.retrieval, _Measure.fidelity

    def failing(self, transform, cell):
        if (cell.budget, cell.length) == (0.5, 192) and (cell.depth or 0) == 0:
            raise RuntimeError("no\nluck")
        return (fidelity if cell.depth is None else retrieval)(self, transform, cell)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(_Measure, "retrieval", failing)
        patch.setattr(_Measure, "fidelity", failing)
        assert command() == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.split()[:2] == ["h2o", "0.5"]]
    assert line.split().count("failed") == 3  # needle, recall, error
    assert "failed: h2o 0.5 · needle · 192 tokens · depth 0: RuntimeError: no luck" in said
    found = results(out)
    failed = [cell for cell in found["cells"] if cell["failed"]]
    assert [(cell["method"], cell["budget"], cell["depth"]) for cell in failed] == [("h2o", 0.5, 0)]
    assert failed[0]["accuracy"] is None and failed[0]["failed"] == "RuntimeError: no luck"
    average = found["averages"][2]
    assert average["accuracy"] == {"needle": None} and average["recall"] is None
    assert average["nll_difference"] == pytest.approx(0.0035), "what did not fail is there"
    with open(out / "results.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["failed"]]
    first, second = rows  # of the second only the recall failed
    assert (first["right"], first["accuracy"], first["interval_low"]) == ("", "", "")
    assert (second["right"], second["recall"]) == ("2", "")
    assert "fidelity: RuntimeError: no luck" in second["failed"]
    assert (out / "accuracy_vs_budget.png").exists()

    measured.clear()
    assert command() == 0, "failed cells are tried again"
    assert {(cell.measure, cell.budget, cell.length) for cell in measured} == {
        ("retrieval", 0.5, 192), ("fidelity", 0.5, 192),
    }  # fmt: skip
    assert len(measured) == 2
    for name in ("results.json", "results.csv"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_everything_failed(command, monkeypatch, tmp_path, capsys):
    for name in ("retrieval", "perplexity", "fidelity"):
        monkeypatch.setattr(_Measure, name, lambda *_: 1 / 0)
    assert command() == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out and "0%" not in out
    assert "more that failed" in out
    assert all(cell["accuracy"] is None for cell in results(tmp_path / "out")["cells"])


def test_a_loss_that_is_no_number_is_a_failure(folder, monkeypatch):
    monkeypatch.setattr(COMPARE, "continuation_nll", lambda *_: np.full((8, 4), np.nan))
    grid = Grid.of(lengths=[192], depths=[0.5], tasks=["needle"])
    measure = _Measure(COMPARE.Material(grid, load_tokenizer(folder), TEXT), None, ())
    cell = next(cells for _, cells in grid.groups())[-2]
    assert cell.measure == "perplexity"
    assert "loss is nan" in COMPARE._try(measure, kvjax.Full(), cell)["failed"]


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
        ({"budgets": "8", "methods": "snapkv"}, "budget must be at least 33"),
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
        ({"cases": 5}, "cases"), ({"seed": 1}, "seed"), ({"budgets": "0.25"}, "methods"),
        ({"text": other_text}, "text"), ({"depths": "0,0.5"}, "depths"),
    ]  # fmt: skip
    for change, name in changes:
        assert command(**change) == 2
        assert f"holds a comparison with other {name}: choose" in one_line(capsys)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    settings = json.loads((out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps({**settings, "strange\x1b[2J": 1}))
    assert command() == 2
    assert r"with other strange\x1b[2J: choose" in one_line(capsys)
    for damaged in ("[]", "{", '{"a":' * 100_000):
        (out / "settings.json").write_text(damaged)
        assert command() == 2
        assert "settings.json is not the settings of a comparison: " in one_line(capsys)


def test_other_weights_are_another_model(folder, measured, tmp_path):
    tokenizer, config = load_tokenizer(folder), _config(folder)
    again = functools.partial(
        compare, tokenizer=tokenizer, text=TEXT, methods=["full"], lengths=[192], depths=[0.5],
        tasks=["needle"], out=tmp_path / "out",
    )  # fmt: skip
    again(random_decoder(config))
    again(random_decoder(config))
    with pytest.raises(ValueError, match="with other weights"):
        again(random_decoder(config, seed=1))


FOUND = {"nll": 2.0, "seconds": 0.1}
DAMAGED = {
    "cut": (b'{"cell": ["perplexity", "full", nu', "Expecting value"),
    "no text": (b"\xff", "decode"),
    "empty": (b"{}", "expected an object with cell and found"),
    "a number": (b"5", "expected an object with cell and found"),
    "cell": ({"cell": 5, "found": FOUND}, "cell must be a list"),
    "other cell": ({"cell": ["x", "full", None, 192], "found": FOUND}, "no comparison"),
    "nested cell": ({"cell": ["perplexity", [], None, 192], "found": FOUND}, "no comparison"),
    "found": ({"cell": ["perplexity", "full", None, 192], "found": 5}, "must be an object, got 5"),
    "found, empty": ({"cell": ["perplexity", "full", None, 192], "found": {}}, "nll of found must"),
    "nan": (
        {"cell": ["perplexity", "full", None, 192], "found": {**FOUND, "nll": math.nan}},
        "nll of found must be a finite number, got nan",
    ),
    "text": (
        {"cell": ["fidelity", "full", None, 192], "found": {"recall": ["x"], "seconds": 1}},
        "recall of found must be finite numbers",
    ),
    "nested": (b'{"a":' * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_journal(name, tmp_path):
    line, said = DAMAGED[name]
    settings = {"seed": 0}
    cell = Cell("perplexity", "full", None, 192)
    journal = files.Journal(tmp_path, settings)
    journal.add(cell, FOUND)
    assert files.Journal(tmp_path, settings).finished == {cell: FOUND}
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with pytest.raises(
        ValueError, match=r"cells\.jsonl is damaged in line 2 \(.*\): rem"
    ) as caught:
        files.Journal(tmp_path, settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_journal_is_one_line(command, measured, capsys, tmp_path):
    assert command() == 0
    capsys.readouterr()
    path = tmp_path / "out" / "cells.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert command() == 2
    assert "cells.jsonl is damaged in line 1 " in one_line(capsys)


def test_a_cell_of_another_grid_counts_for_nothing(command, measured, tmp_path):
    assert command() == 0
    found = {"cell": ["perplexity", "other", 0.5, 192], "found": FOUND}
    with open(tmp_path / "out" / "cells.jsonl", "a") as file:
        file.write(json.dumps(found) + "\n")
    assert command() == 0


@pytest.mark.parametrize(
    ("broken", "name"), [("fsync", "cells.jsonl"), ("replace", "settings.json")]
)
def test_a_full_disk_names_the_file(monkeypatch, tmp_path, broken, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        files.Journal(tmp_path, {}).add(Cell("perplexity", "full", None, 192), FOUND)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder that takes no files")
def test_a_place_that_takes_no_folder(command, measured, capsys):
    assert command(out="/proc/kvjax") == 2
    assert "/proc/kvjax" in one_line(capsys)


# Pictures and terminal


def test_pictures(command, measured, tmp_path):
    assert command(budgets="0.25,0.5,64") == 0
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {
        "accuracy_vs_budget.png", "bytes_vs_accuracy.png", "heatmap_full.png", "heatmap_h2o.png",
        "heatmap_streaming_llm_budget=64.png",
    }  # fmt: skip
    for name in names:
        pixels = matplotlib.image.imread(tmp_path / "out" / name)[..., :3]
        assert min(pixels.shape[:2]) > 300
        assert 0.005 < (pixels < 0.9).any(-1).mean() < 0.9, f"{name} is blank"


@pytest.fixture
def found(folder, monkeypatch, measured):
    """Results of two tasks, with one cell that failed."""
    retrieval = _Measure.retrieval

    def failing(self, transform, cell):
        if (cell.budget, cell.depth, cell.task) == (0.5, 1.0, "needle"):
            raise RuntimeError("no luck")
        return retrieval(self, transform, cell)

    monkeypatch.setattr(_Measure, "retrieval", failing)
    return compare(
        random_decoder(_config(folder)), load_tokenizer(folder), TEXT,
        methods=["h2o", "streaming_llm", "h2o(budget=32)"], budgets=[0.25, 0.5, 0.75],
        lengths=[384], depths=[0.0, 1.0], tasks=["needle", "chain"], cases=4,
    )  # fmt: skip


def test_lines_of_the_pictures(found):
    for draw, label in [(plots.accuracy_vs_budget, "budget"), (plots.bytes_vs_accuracy, "bytes")]:
        figure = draw(found)
        needle, chain = figure.axes
        assert (needle.get_title(), chain.get_title()) == ("needle", "chain")
        assert label in needle.get_xlabel() and "95 %" in needle.get_ylabel()
        bars = {bar.get_label(): bar for bar in needle.containers}
        assert set(bars) == {"h2o", "streaming_llm", "h2o(budget=32)"}
        styles = [(bar[0].get_marker(), bar[0].get_linestyle()) for bar in bars.values()]
        assert len({mark for mark, _ in styles}) == 3
        (labels,) = [[text.get_text() for text in legend.texts] for legend in figure.legends]
        assert labels == ["full cache", "h2o", "streaming_llm", "h2o(budget=32)"]
        y = bars["h2o"][0].get_ydata()
        assert y[0] == 0.25 and math.isnan(y[1]) and y[2] == 0.75, "a failed cell is a gap"
        (line,) = bars["h2o"][2]
        low, high = Proportion(2, 8).interval
        assert line.get_segments()[0][:, 1] == pytest.approx([low, high])
        own = {bar.get_label(): bar for bar in chain.containers}["h2o"][0].get_ydata()
        assert not np.isnan(np.array(own, float)).any()
    ticks = [text.get_text() for text in plots.accuracy_vs_budget(found).axes[0].get_xticklabels()]
    assert ticks == ["0.25", "0.5", "0.75"]


def test_fields_of_the_heat_map(found):
    figure = plots.heatmap(found, "h2o")
    panels = figure.axes[:6]
    assert [axes.get_title() for axes in panels[:2]] == [
        "needle, budget 0.25",
        "needle, budget 0.5",
    ]
    texts = [[text.get_text() for text in axes.texts] for axes in panels]
    assert texts[0] == ["25%\n1/4", "25%\n1/4"]
    assert texts[1] == ["50%\n2/4", "failed"], "depth 0 is above depth 1"
    assert panels[0].get_ylabel().startswith("depth") and "tokens" in panels[3].get_xlabel()


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_the_table_fits_the_terminal(found, columns):
    console = Console(width=columns, record=True, highlight=False, file=io.StringIO())
    print_report(console, found, Path("folder"))
    text = console.export_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns and "…" not in text
    for heading in ("method", "budget", "needle", "chain", "Δ nats", "recall", "error", "TPOT"):
        assert heading in text
    rows = [line.split() for line in lines]
    for budget in ("0.25", "0.5", "0.75"):
        assert any(row[:2] == ["streaming_llm", budget] for row in rows)
    (first,) = [row for row in rows if row[:2] == ["h2o", "0.25"] and "failed" not in row][:1]
    assert first[2:6] == ["25", "7-60", "25", "7-60"]
    assert [row for row in rows if row[:2] == ["h2o", "0.5"] and row[2] == "failed"]
    assert "over 8 cases (4 at each of 2 depths" in " ".join(text.split())
    assert "question is inside the compressed prompt" in " ".join(text.split())
    assert "folder/results.json" in text


def test_progress(folder, measured):
    calls = []
    compare(
        random_decoder(_config(folder)), load_tokenizer(folder), TEXT, methods=["h2o"],
        budgets=[0.5], lengths=[192, 256], depths=[0.5], tasks=["needle"], cases=4,
        on_progress=lambda *call: calls.append(call),
    )  # fmt: skip
    done, totals, what = zip(*calls, strict=True)
    assert len(calls) == len(measured) + 1 and len(set(totals)) == 1
    assert done[0] == 0 and done[-1] == totals[0]
    assert all(b > a for a, b in itertools.pairwise(done))
    assert what[0] == "full · needle · 192 tokens · depth 0.5"


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
