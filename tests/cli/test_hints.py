"""Names that are nearly right, in case, in hyphens or in length: a message says what was meant."""

from __future__ import annotations

import pytest

from kvjax.messages import did_you_mean
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.cli.commands import error

READ = ["read", "x.txt", "--out", "x"]


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["gen"], "generate"),
        (["Chat"], "chat"),
        (["DIAGNOSE"], "diagnose"),
        (["generate", "--max", "5"], "--max-new"),
        (["generate", "--MaxNew", "5"], "--max-new"),
        (["generate", "--max_new", "5"], "--max-new"),
        (["generate", "-method", "full"], "--method"),
        (["generate", "--method", "SnapKV"], "snapkv"),
        (["generate", "--method", "SNAPKV(window=8)"], "snapkv"),
        (["generate", "--method", "StreamingLLM"], "streaming_llm"),
        (["generate", "--method", "streaming"], "streaming_llm"),
        (["generate", "--method", "LayerBudgetEviction"], "layer_budget"),
        (["generate", "--method", "Chain(snapkv, quantize)"], "chain"),
        (["generate", "--method", "chain(snapkv, Quantize)"], "quantize"),
        (["generate", "--method", "snapkv(Window=8)"], "window"),
        (["generate", "--method", "snapkv(pooling='Max')"], "max"),
        (["generate", "--method", "quantize(bits='Float8')"], "float8"),
        (["generate", "--method", "quantize(bits=4, key_axis='Token')"], "token"),
        (["generate", "--method", "clusterkv(metric='Cos')"], "cosine"),
        (["compare", "--method", "H2O,snapkv"], "h2o"),
        (["compare", "--method", "All"], "all"),
        (["compare", "--question", "Inside"], "inside"),
        (["compare", "--tasks", "Needle"], "needle"),
        (["eval", "Multi-News"], "multi_news"),
        (["eval", "GSM8k"], "gsm8k"),
        (["diagnose", "--prompt-file", "x", "--question", "After"], "after"),
        (["bench", "--dtype", "BFloat16"], "bfloat16"),
        (["bench", "--shape", "Llama-3.1-8B"], "llama-3.1-8b"),
        (["plan", "--model", "LLAMA_3.1_8b"], "llama-3.1-8b"),
        (["plan", "--model", "mistral"], "mistral-7b-v0.2"),
        (["plan", "--model", "llama-3.1-8b", "--mesh", "Tensor=8"], "tensor"),
        (["plan", "--model", "llama-3.1-8b", "--dtype", "bf16"], "bfloat16"),
        ([*READ, "--method", "Quest"], "quest"),
        (["chat", "--method", "KVCrush(snapkv)"], "kvcrush"),
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
