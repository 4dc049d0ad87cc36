"""Names that are nearly right, in case, in hyphens or in length: a message says what was meant."""

from __future__ import annotations

import pytest

from kvjax.messages import did_you_mean
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.cli.commands import error


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["DIAGNOSE"], "diagnose"),
        (["generate", "--MaxNew", "5"], "--max-new"),
        (["generate", "-method", "full"], "--method"),
        (["generate", "--method", "StreamingLLM"], "streaming_llm"),
        (["generate", "--method", "streaming"], "streaming_llm"),
        (["generate", "--method", "Chain(snapkv, quantize)"], "chain"),
        (["generate", "--method", "chain(snapkv, Quantize)"], "quantize"),
        (["generate", "--method", "snapkv(Window=8)"], "window"),
        (["generate", "--method", "quantize(bits='Float8')"], "float8"),
        (["compare", "--method", "All"], "all"),
        (["compare", "--question", "Inside"], "inside"),
        (["eval", "Multi-News"], "multi_news"),
        (["diagnose", "--prompt-file", "x", "--question", "After"], "after"),
        (["bench", "--shape", "Llama-3.1-8B"], "llama-3.1-8b"),
        (["plan", "--model", "llama-3.1-8b", "--mesh", "Tensor=8"], "tensor"),
    ],
)
def test_what_was_meant(capsys, monkeypatch, tmp_path, no_weights, args, meant):
    monkeypatch.chdir(tmp_path)
    said = error(capsys, *args)
    assert f"; did you mean {meant}?" in said


def test_the_packaged_model(capsys, monkeypatch, no_weights):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = error(capsys, "generate", "--model", "SmolLM2", "--prompt", "a")
    assert said.endswith("; did you mean smollm2?\n")


@pytest.mark.parametrize("names", [METHODS, WRAPPERS, STORAGE])
def test_every_class_name_leads_to_its_method(names):
    known = (*METHODS, *WRAPPERS, *STORAGE)
    for name, kind in names.items():
        for written in (kind.__name__, kind.__name__.upper(), name.upper(), name.title()):
            assert did_you_mean(written, known) == f"; did you mean {name}?"


def test_nothing_is_guessed_at_random():
    assert did_you_mean("k", ["key"]) == did_you_mean("", ["key"]) == ""
    assert did_you_mean("ab", ["abc1111111", "abd2222222"]) == ""
    assert did_you_mean(None, ["none"]) == "; did you mean none?"
    assert did_you_mean("h3o", ["h2o", 3, None]) == "; did you mean h2o?"
