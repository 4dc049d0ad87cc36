"""`kvjax profile`, and profiles that other commands make and find again."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.cli.opened import calibrated
from kvjax.cli.terminal import Display
from kvjax.generation.calibration import sample_of
from kvjax.models import demo, from_pretrained, load_tokenizer
from tests.cli.commands import error, output
from tests.support.marks import some_slow

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 12


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_the_file_has_what_is_printed(capsys, text, model, tinystories, tmp_path):
    out = tmp_path / "a new folder" / "heads.safetensors"
    arguments = "profile", "--model", tinystories, "--text", text, "--method", "snapkv"
    record = json.loads(output(capsys, *arguments, "--out", out, "--json"))
    sample = sample_of(load_tokenizer(tinystories)(TEXT, add_special_tokens=False).input_ids, 512)
    profile = kvjax.calibrated(kvjax.ByHead(kvjax.SnapKV(0.5)), model, sample).profile
    assert kvjax.load_calibration(out, model) == profile
    assert (record["model"], record["method"]) == (tinystories.name, "snapkv")
    assert (record["layers"], record["kv_heads"]) == profile.table.shape[:2]
    assert (record["pieces"], record["tokens"]) == (len(sample), len(sample[0]))
    assert record["bytes"] == out.stat().st_size and record["seconds"] > 0
    for budget in (0.05, 0.1, 0.2):
        each = kvjax.budgets.profile.shares(profile.table, budget)
        assert record["largest_share"][str(budget)] == each.max()
        assert record["median_share"][str(budget)] == np.median(each)
    said = output(capsys, *arguments, "--out", tmp_path / "again").splitlines()
    assert said[0].startswith(f"{tmp_path / 'again'}: {profile.table.shape[0]} layers of ")
    assert said[3] == (
        f"at 0.2: the head that needs most keeps {each.max():.1%} of its tokens, the median head "
        f"{np.median(each):.1%}"
    )


def test_what_commands_learn_from_a_model(capsys, model, tinystories, tmp_path, monkeypatch):
    """A profile depends on the model alone, is made once and told; the rest is from the prompt."""
    tokenizer, prompt = load_tokenizer(tinystories), list(range(5, 70))
    by_head, infinigen = kvjax.ByHead(kvjax.SnapKV(0.5)), kvjax.InfiniGen(16)

    def learned(transform, prompt=None):
        return calibrated(transform, model, tokenizer, 512, Display(wanted=False), prompt)

    assert learned(infinigen) == infinigen and learned(kvjax.Full()) == kvjax.Full()
    assert learned(infinigen, prompt) == kvjax.calibrated(infinigen, model, [prompt]) != infinigen
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    first = learned(by_head)
    said = capsys.readouterr().err
    assert said.startswith("calibrated by_head(snapkv) from 3 pieces of the bundled model's text")
    assert said.endswith(f"kept for the next time in {tmp_path / 'cache' / 'calibrations'}\n")
    assert learned(by_head) == first and capsys.readouterr().err == ""
    held_out = tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids
    monkeypatch.setenv("KVJAX_CACHE", "off")
    assert kvjax.calibrated(by_head, model, sample_of(held_out, 512)) == first


@pytest.mark.slow
def test_a_profile_is_written_and_read(capsys, text, tmp_path):
    out = tmp_path / "a new folder" / "heads.safetensors"
    arguments = "profile", "--text", text, "--method", "snapkv", "--out", out
    record = json.loads(output(capsys, *arguments, "--json"))
    profile = kvjax.load_calibration(out, from_pretrained(demo.directory()))
    assert (record["method"], record["layers"], record["kv_heads"]) == ("snapkv", 4, 4)
    assert profile.table.shape[:2] == (4, 4)
    assert record["bytes"] == out.stat().st_size
    each = kvjax.budgets.profile.shares(profile.table, 0.1)
    assert record["largest_share"]["0.1"] == each.max()
    assert record["median_share"]["0.1"] == np.median(each)
    said = output(capsys, *arguments)
    assert "4 layers of 4 KV heads by the scores of snapkv" in said and "at 0.05: " in said

    method = f"by_head(snapkv, profile='{out}')"
    args = "read", text, "--out", tmp_path / "read", "--budget", "0.3"
    record = json.loads(output(capsys, *args, "--method", method, "--json"))
    plain = json.loads(output(capsys, *args, "--method", "snapkv", "--json"))
    assert 0.8 < record["cache_bytes"] / plain["cache_bytes"] < 1.5
    answers = json.loads(output(capsys, "ask", tmp_path / "read", "Who?", "--json"))
    assert answers["results"]


@pytest.mark.parametrize("method", some_slow(("snapkv", "kvzip"), exhaustive={"kvzip"}))
def test_a_profile_is_made_at_first_use_and_found_then(capsys, text, tmp_path, monkeypatch, method):
    """It is the same for every text that is read, and a line says that it was made."""
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kvjax.cli.compilation_cache.enable", lambda: None)
    said = []
    for document in (text, tmp_path / "other.txt"):
        document.write_text(TEXT.replace("Lily", "Rose") if said else TEXT)
        args = "read", document, "--out", tmp_path / "read", "--method", f"by_head({method})"
        assert main([str(x) for x in (*args, "--budget", "0.3")]) == 0
        said.append(capsys.readouterr().err)
    assert f"calibrated by_head({method}) from 3 pieces" in said[0]
    assert str(tmp_path / "cache" / "calibrations") in said[0]
    assert "calibrated" not in said[1]
    assert len(list((tmp_path / "cache" / "calibrations").iterdir())) == 1


def test_refused(capsys, text, tmp_path):
    assert "ByHead takes a method that compresses prompts" in error(
        capsys, "profile", "--text", text, "--method", "streaming_llm", "--out", tmp_path / "x"
    )
    assert "got the folder" in error(capsys, "profile", "--out", tmp_path)
    assert f"cannot write to {text}" in error(capsys, "profile", "--out", text / "heads")
    text.write_text("Hi.")
    assert "of each piece of --text" in error(
        capsys, "profile", "--text", text, "--out", tmp_path / "x"
    )
    assert "holds no calibration" in error(
        capsys, "read", text, "--out", tmp_path / "read", "--budget", "0.3",
        "--method", f"by_head(kvzip, profile='{text}')",
    )  # fmt: skip
