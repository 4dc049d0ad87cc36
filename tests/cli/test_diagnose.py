"""`kvjax diagnose`: on a user's text, what methods lose, and the smallest cache under an error."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.cli.templates import Dialogue
from kvjax.evaluation import Diagnosis, Fidelity, Finding, Grid, diagnose, overflow_share
from kvjax.models import from_pretrained, load_tokenizer
from tests.cli.commands import error, output

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 4
FEW = ("--method", "streaming_llm", "--budget", "16,64", "--new", "2")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("question", [None, pytest.param("Who is Lily?", marks=pytest.mark.slow)])
def test_json_is_what_diagnose_finds(capsys, tinystories, file, tmp_path, question):
    """The text's own end stands for a question where none is asked."""
    args = ["diagnose", "--prompt-file", file, "--model", tinystories, *FEW, "--error", "0.3"]
    out = tmp_path / "new" / "pictures"
    args += [] if question is None else ["--ask", question, "--question", "after", "--out", out]
    record = json.loads(output(capsys, *args, "--json"))
    tokenizer, model = load_tokenizer(tinystories), from_pretrained(tinystories)
    prompt, where = tokenizer(TEXT).input_ids, "inside"
    prompt, asked = prompt[:-32], prompt[-32:]
    if question is not None:
        prompt, where = tokenizer(TEXT).input_ids, "after"
        asked = Dialogue(tokenizer).question(question)
    expected = diagnose(
        model, [prompt], [asked], where=where, methods=["streaming_llm"], budgets=[16, 64],
        new_tokens=2,
    )  # fmt: skip
    pictures = record.pop("pictures")
    assert record == {"model": tinystories.name, **expected.as_json(0.3)}
    assert len(pictures) == (0 if question is None else 3)
    assert {path.name for path in out.glob("*")} == set(pictures)
    assert [one["budget"] for one in record["findings"]] == [None, 16, 64]
    assert (record["prompt_tokens"], record["question_tokens"]) == (len(prompt), len(asked))


def test_the_table_recommends(capsys, tinystories, file):
    args = ["diagnose", "--prompt-file", file, "--model", tinystories, *FEW]
    found = output(capsys, *args, "--error", "10")
    said = " ".join(found.split())
    assert "streaming_llm" in said and "is compressed with them (inside)" in said
    assert "The smallest cache with an error of no more than 10: streaming_llm 16," in said
    assert "% of their length, and answers may be lost: the default is 0.1." in said
    found = " ".join(output(capsys, *args, "--error", "1e-9").split())
    assert "No cache smaller than the full one has an error of no more than 1e-09." in found
    assert "The least error is " in found


def test_what_is_said_and_drawn(capsys, monkeypatch, tinystories, file, tmp_path):
    """Prints a diagnosis that is known throughout: two layers of two heads."""

    def finding(candidate, error, cache_bytes, overflow):
        fidelity = Fidelity(*(np.full(shape, error) for shape in ((2, 1, 2), (2, 1), (2, 1, 2))))
        return Finding(candidate, fidelity, cache_bytes, 1000, overflow)

    candidates = Grid.of(methods=["h2o", "codebook"], budgets=[0.1]).candidates
    numbers = (0.0, 0.25, 0.0625), (1000, 100, 500), (0.0, 0.0, 0.125)
    known = Diagnosis(
        tuple(map(finding, candidates, *numbers)), "after", prompt_tokens=1234, question_tokens=5,
        new_tokens=2, left_out={"kvzip": "it takes too long"},
    )  # fmt: skip
    monkeypatch.setattr("kvjax.cli.diagnose_command.diagnose", lambda *_, **__: known)
    out = tmp_path / "new" / "pictures"
    args = "diagnose", "--prompt-file", file, "--model", tinystories, "--ask", "Who?", "--out", out
    assert main([*map(str, args)]) == 0
    said, err = capsys.readouterr()
    said = " ".join(said.split())
    assert err == "kvzip was left out: it takes too long\n"
    assert "1,234 tokens; a question of 5 tokens is asked when they are compressed (after)" in said
    assert "codebook: up to 12.5% of the vectors found no entry near enough" in said
    best = (
        "The smallest cache with an error of no more than 0.1: codebook, 50.0% of the full cache "
        "with an error of 0.062."
    )
    assert f"{best} Files: {out}/" in said, "an error below the default needs no warning"
    drawn = {path.name for path in out.iterdir()}
    assert {*said.partition(f"{out}/")[2].split(", ")} == drawn and len(drawn) == 3


@pytest.mark.slow
def test_vectors_that_find_no_room_in_a_codebook_are_counted(capsys, tinystories, file, tmp_path):
    """`diagnose` and `read` say how many, where a codebook is full."""
    method = "codebook(capacity=8)"
    args = ["--model", tinystories, "--json"]
    found = json.loads(
        output(capsys, "diagnose", "--prompt-file", file, "--method", method, "--new", "2", *args)
    )
    full, codebook = found["findings"]
    assert full["overflow"] == 0 and 0 < codebook["overflow"] < 1
    out = tmp_path / "out"
    row = json.loads(output(capsys, "read", file, "--out", out, "--method", method, *args))
    tokenizer, model = load_tokenizer(tinystories), from_pretrained(tinystories)
    context = kvjax.read(model, [tokenizer(TEXT).input_ids], transform=method)
    assert row["overflow"] == overflow_share(context.caches) > 0.5
    said = "of the vectors found no entry near enough in a full codebook"
    assert (
        main(["read", str(file), "--out", str(out), "--method", method, *map(str, args[:2])]) == 0
    )
    assert said in " ".join(capsys.readouterr().err.split())


def test_texts_that_do_not_fit(capsys, no_weights, tinystories, tmp_path):
    path = tmp_path / "text.txt"
    args = ["diagnose", "--prompt-file", path, "--model", tinystories]
    path.write_text(" \n")
    assert "the prompt is empty" in error(capsys, *args)
    path.write_text("One day.")
    assert "the prompt must have more than 32 tokens" in error(capsys, *args)
    path.write_text(TEXT * 20)
    assert "positions, got a prompt of" in error(capsys, *args)


def test_a_method_that_repeats_the_text_and_one_with_a_profile(capsys, tinystories, file, tmp_path):
    """The text is repeated as `kvjax read` does; the profile is that of its place in the file."""
    model, heads = from_pretrained(tinystories), tmp_path / "heads.safetensors"
    table = np.ones((model.num_layers, model.kv_heads, 2))
    table[..., 0] = 0.25
    kvjax.save_calibration(
        heads, kvjax.ByHead(kvjax.KVzip(0.5), kvjax.kit.HeadProfile(table)), model
    )
    methods = ["kvzip", f"by_head(kvzip, profile={str(heads)!r})"]
    args = ["diagnose", "--prompt-file", file, "--model", tinystories, "--new", "2"]
    args += ["--method", ", ".join(methods), "--budget", "0.25", "--json"]
    _, plain, by_head = json.loads(output(capsys, *args))["findings"]
    assert 0 < by_head["error"] == pytest.approx(plain["error"], rel=1e-4)
    assert [plain["method"], by_head["method"]] == methods
