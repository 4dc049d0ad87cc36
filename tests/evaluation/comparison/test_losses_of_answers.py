"""Comparisons by the loss of right answers: what is measured, and how it is reported."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.evaluation import Cell, Estimate, Grid, Results, answer_nll, compare
from kvjax.evaluation.cells.files import as_csv
from kvjax.evaluation.cells.grid import Unit
from kvjax.evaluation.comparison import compare as compare_module
from kvjax.evaluation.comparison.material import Material
from kvjax.evaluation.report import plots, tables
from kvjax.evaluation.tasks import NATS
from kvjax.generation.model import as_functional
from kvjax.models import from_pretrained, load_tokenizer, random_decoder, read_config
from tests.support.small_comparisons import TEXT
from tests.support.squad_files import article, write
from tests.support.tolerances import close

GRID = {"tasks": ["squad"], "lengths": [280], "cases": 4, "max_new": 1}
METHODS = {"methods": ["snapkv", "h2o"], "budgets": [0.2, 1.0]}


@pytest.fixture
def data(tmp_path) -> Path:
    """Two passages with two questions each, for a tokenizer with a token per byte."""
    return write(tmp_path / "squad.json", article("Ham", 4), article("Kew", 4))


def test_two_questions_about_one_passage(folder, data):
    """Losses are those of reading document and question at once, with the document or without."""
    model, tokenizer = random_decoder(read_config(folder)), load_tokenizer(folder)
    grid = Grid.of(**{**GRID, "cases": 2}, methods=["full"], questions=["after"])
    material = Material(grid, tokenizer, TEXT, data)
    measure = compare_module._Measure(material, as_functional(model), ())
    unit = Unit("squad", 280, "after", 0, 2)
    ((_, found),) = measure.unit(unit, measure.candidates)
    cases = material.task("squad", 280).cases
    assert cases[0].context == cases[1].context and cases[0].question != cases[1].question
    answers = [case.details["answer_tokens"] for case in cases]
    prompts = [case.prompt for case in cases]
    prompts += [case.context[:4] + case.question for case in cases]
    expected = answer_nll(model, kvjax.read(model, prompts, max_new=64), 2 * answers)
    close(np.array([*found["scores"], *found["nothing"]]), expected)
    assert found["passages"] == [0, 0]
    assert found["prompt_tokens"] == [len(case.prompt) for case in cases]
    assert len({*expected.tolist()}) == 4, "equal losses show nothing"


@pytest.mark.slow
def test_losses_are_those_of_answers_after_documents(folder, data, monkeypatch):
    """Each passage is read once; with the question inside, each prompt is."""
    read = []

    class Once(kvjax.evaluation.ReadOnce):
        def __init__(self, model, prompts, *args, **options):
            read.append(len(prompts))
            super().__init__(model, prompts, *args, **options)

    monkeypatch.setattr(compare_module, "ReadOnce", Once)
    model, tokenizer = random_decoder(read_config(folder)), load_tokenizer(folder)
    results = compare(model, tokenizer, TEXT, data=data, **GRID, **METHODS)
    assert sorted(read) == [2, 4]
    material = Material(Grid.of(**GRID), tokenizer, TEXT, data)
    cases = material.task("squad", 280).cases
    assert [case.details["passage"] for case in cases] == [0, 0, 1, 1]
    answers = [case.details["answer_tokens"] for case in cases]
    assert min(map(len, answers)) > 1, "max_new does not limit a given answer"
    records = {(c.question, c.method, c.budget): r for c, r in results.records.items()}
    expected = answer_nll(model, kvjax.read(model, [x.prompt for x in cases], max_new=16), answers)
    for question in ("inside", "after"):
        for one in (("full", None), ("snapkv", 1.0)):
            close(np.array(records[question, *one]["scores"]), expected)
    first = [kvjax.read(model, [case.context[:4] + case.question], max_new=16) for case in cases]
    nothing = [answer_nll(model, x, [y])[0] for x, y in zip(first, answers, strict=True)]
    documents = [kvjax.read(
        model, [case.context], transform="h2o(budget=0.2)", max_prompt=320, max_new=64
    ) for case in cases]  # fmt: skip
    for number, case in enumerate(cases):
        loss = answer_nll(model, documents[number], [answers[number]], [case.question])[0]
        assert records["after", "h2o", 0.2]["scores"][number] == pytest.approx(loss, abs=1e-4)
    assert all(r["nothing"] == pytest.approx(nothing, abs=1e-5) for r in records.values())
    rows = {(row.question, row.method, row.budget): row for row in results.rows()}
    row = rows["after", "h2o", 0.2]
    assert row.score.mean == pytest.approx(np.mean(records["after", "h2o", 0.2]["scores"]))
    assert 0 < row.share < 1 and row.live_slots < rows["after", "full", None].live_slots
    assert row.prompt_tokens == np.mean([len(case.prompt) for case in cases])


def made_up() -> Results:
    """Losses of two passages, where `half` keeps half of what the document is worth."""
    nothing, full = [6.0, 8.0, 5.0, 9.0], [4.0, 5.0, 4.0, 7.0]
    losses = {
        "full": full, "nothing": nothing,
        "half": [(a + b) / 2 for a, b in zip(nothing, full, strict=True)],
    }  # fmt: skip
    others = {
        "nothing": nothing, "passages": [0, 0, 1, 1], "prompt_tokens": [100] * 4,
        "live_slots": 50.0, "cache_bytes": 500, "full_cache_bytes": 1000,
    }  # fmt: skip
    asked = {
        "methods": [[name, None] for name in losses], "lengths": [100], "questions": ["after"],
        "cases": 4, "tasks": {"squad": {"metric": NATS, "floor": None}},
    }  # fmt: skip
    cells = {
        Cell("squad", 100, "after", 0, 4, name, None): {"scores": scores, **others}
        for name, scores in losses.items()
    }
    return Results(asked, cells)


def test_recovery():
    """All of the document's worth with the full cache, and none without the document."""
    rows = {row.method: row for row in made_up().rows()}
    assert rows["full"].recovery == (1.0, 1.0, 1.0, 4)
    assert rows["nothing"].recovery == (0.0, 0.0, 0.0, 4)
    assert rows["half"].recovery == (0.5, 0.5, 0.5, 4)
    assert rows["half"].nothing == 7.0 and rows["half"].score.mean == 6.0
    assert rows["half"].difference.mean == 1.0
    low, mean, high = rows["half"].difference.low, 1.0, rows["half"].difference.high
    assert 0.5 <= low < mean < high <= 1.5


def test_no_recovery_where_a_document_is_worth_nothing():
    results = made_up()
    for cell, record in results.records.items():
        if cell.method == "full":
            record["scores"] = [10.0] * 4  # pyright: ignore[reportIndexIssue]  # a dict here
    assert all(row.recovery is None for row in results.rows())
    assert {row.difference.mean for row in results.rows()} == {0.0, -3.0, -4.0}
    table = tables.tables(results)[0]
    (column,) = [column for column in table.columns if column.heading == "squad recovery"]
    assert [field.text for field in column.fields] == ["-"] * 3


def test_intervals_are_over_passages():
    """Equal scores within a passage tell no more than one of them."""
    scores = np.random.default_rng(0).normal(size=10)
    groups = np.repeat(np.arange(10), 6)
    repeated = Estimate.resampled(np.repeat(scores, 6).tolist(), groups.tolist())
    one = Estimate.resampled(scores.tolist())
    assert repeated.cases == 60 and repeated.mean == pytest.approx(one.mean)
    assert (repeated.low, repeated.high) == pytest.approx((one.low, one.high), abs=0.1)
    independent = Estimate.resampled(np.repeat(scores, 6).tolist())
    assert independent.high - independent.low < 0.6 * (repeated.high - repeated.low)


def test_how_losses_are_shown():
    results = made_up()
    table = tables.tables(results)[0]
    columns = {column.heading: column for column in table.columns}
    assert [field.text for field in columns["squad Δ nats"].fields] == ["5.000", "+2.000", "+1.000"]
    assert [field.text for field in columns["squad recovery"].fields] == ["100%", "0%", "50%"]
    assert columns["squad Δ nats"].under == columns["squad recovery"].under == "after"
    assert list(plots.figures(results)) == ["squad_100"]
    header, *lines = as_csv(results).splitlines()
    half = dict(zip(header.split(","), lines[2].split(","), strict=True))
    assert (half["nothing"], half["recovery"], half["recovery_low"]) == ("7.0", "0.5", "0.5")


@pytest.mark.slow
def test_a_real_model_answers_with_the_passage(data_dir):
    """SmolLM2 finds right answers likelier with a document than without."""
    given = os.environ.get("KVJAX_SMOLLM2")
    if not given or not Path(given).is_dir():
        pytest.skip("no SmolLM2-135M-Instruct: set KVJAX_SMOLLM2 to its folder")
    results = compare(
        from_pretrained(given), load_tokenizer(given), TEXT, methods=["full"],
        tasks=["squad"], lengths=[700], questions=["after"], cases=2,
        data=data_dir / "squad" / "dev-v2.0-part.json",
    )  # fmt: skip
    (full,) = results.rows()
    assert full.recovery[:3] == (1.0, 1.0, 1.0) and full.score.cases == 2
    assert full.score.mean < full.nothing - 0.3
