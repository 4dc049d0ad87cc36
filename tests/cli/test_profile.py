"""`kvjax profile`, and profiles that other commands make and find again."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.models import demo, from_pretrained
from tests.cli.commands import error, output
from tests.support.marks import some_slow

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 12


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


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
