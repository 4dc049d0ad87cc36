"""Comparisons that are refused: one line, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import pytest

from kvjax.evaluation import compare
from kvjax.models import load_tokenizer, random_decoder, read_config
from tests.support.small_comparisons import ARTICLE, TEXT, one_line


def refused(capsys, tmp_path, code: int) -> str:
    """The one line of an error that left nothing behind."""
    assert code == 2
    assert not (tmp_path / "out").exists()
    return one_line(capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "nope"}, "unknown method 'nope'"),
        ({"budget": "20%"}, "numbers between commas, got '20%'"),
        ({"budget": "8", "method": "snapkv"}, "budget must be at least 17"),
        ({"tasks": "gsm8k"}, "gsm8k needs data"),
        ({"lengths": "10"}, "a prompt of 10 tokens is too short: what is hidden in it and the"),
        ({"method": "(" * 20_000}, "must have at most 10000 characters"),
        ({"budget": "99999999999999999999"}, "budget must be at most 2147483647, got 9999"),
        ({"depths": "1000000000"}, "at least 2 and at most 1000, or depths such as 0,0.5,1, got"),
        ({"depths": ",".join(["0.5"] * 1001)}, "1000 depths at most, got 1001"),
        ({"seed": "9" * 5_000}, "must be an integer from 0 to 2**32 - 1"),
        ({"lengths": "192,600"}, "the model has 512 positions, got a prompt of 600 tokens"),
        ({"lengths": "100000"}, "the text must have at least 100000"),
        ({"tasks": "nedle"}, "did you mean needle?"),
        ({"text": "no such file"}, "cannot read no such file"),
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


def test_folders_that_cannot_be_written_to(command, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for path, said in [("file", "it is not a directory"), ("file/out", "file is not a directory")]:
        assert said in refused(capsys, tmp_path, command(out=tmp_path / path))
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
    for name, value in (("seed", 1), ("text", other_text), ("depths", "0,0.5"), ("max-new", 3)):
        assert command(**{name: value}) == 2
        assert re.search(f"holds a comparison with other (--)?{name}: choose", one_line(capsys))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    kept = json.loads((out / "settings.json").read_text())
    kept["settings"]["strange\x1b[2J"] = 1
    (out / "settings.json").write_text(json.dumps(kept))
    assert command() == 2
    assert r"with other strange\x1b[2J: choose" in one_line(capsys)
    for damaged, said in [("{", "is not JSON"), ('{"settings": {}}', "is not the settings of a")]:
        (out / "settings.json").write_text(damaged)
        assert command() == 2
        assert f"settings.json {said}" in one_line(capsys)


def test_a_folder_with_other_prompts(command, measured, capsys, tmp_path):
    """Attention is measured on the prompts of the first task, and data sets may change."""
    assert command(lengths=320) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert command(lengths=320, tasks="chain,attention", method="h2o,snapkv(window=8)") == 2
    said = one_line(capsys)
    assert "other prompts (attention · 320 tokens · cases 1-4): choose another folder" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    data = tmp_path / "xsum.jsonl"
    options = {"tasks": "xsum", "data": data, "cases": 1, "out": tmp_path / "news"}
    data.write_text(json.dumps(ARTICLE))
    assert command(**options) == 0 and command(**options) == 0
    data.write_text(json.dumps({**ARTICLE, "summary": "Boats are old."}))
    capsys.readouterr()
    assert command(**options) == 2
    assert "other prompts (xsum · 192 tokens · question inside · cases 1-1)" in one_line(capsys)


def test_short_documents_do_not_hide_windows_that_are_too_long(command, capsys, tmp_path):
    (tmp_path / "xsum.jsonl").write_text(json.dumps(ARTICLE))
    options = {"tasks": "xsum,perplexity", "data": tmp_path, "cases": 1, "lengths": "192,600"}
    assert "got a prompt of 600 tokens" in refused(capsys, tmp_path, command(**options))


def test_other_weights_are_another_model(folder, measured, tmp_path):
    tokenizer, config = load_tokenizer(folder), read_config(folder)
    again = functools.partial(
        compare, tokenizer=tokenizer, text=TEXT, methods=["full"], lengths=[192], depths=[0.5],
        tasks=["needle"], questions=["inside"], cases=2, out=tmp_path / "out",
    )  # fmt: skip
    again(random_decoder(config))
    again(random_decoder(config))
    with pytest.raises(ValueError, match="with other weights:"):
        again(random_decoder(config, seed=1))
    other = random_decoder(dataclasses.replace(config, attention_scale=2.0))
    with pytest.raises(ValueError, match="with other computation:"):
        again(other)
