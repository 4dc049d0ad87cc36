"""Errors name the options of the command, and say what was meant by a name that is nearly right."""

from __future__ import annotations

import argparse

import pytest

from kvjax.cli.arguments import naming_options
from kvjax.cli.main import main
from kvjax.messages import did_you_mean
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.cli.commands import error, one_line

PLAN = ["plan", "--model", "smollm2-135m"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "--temperature", "-1"], "argument --temperature: temperature must be"),
        (["generate", "--top-k", "5"], "--top-k needs a temperature above 0"),
        (["generate", "--top-k", "0", "--temperature", "1"], "--top-k must be at least 1, got 0"),
        (["generate", "--min-p", "2", "--temperature", "1"], "--min-p must lie in (0, 1], got 2"),
        (["generate", "--budget", "2.5"], "argument --budget: a float budget must lie in (0, 1]"),
        (["generate", "--budget", "3"], "argument --budget: budget must be at least 17"),
        (["chat", "--top-p", "2", "--temperature", "1"], "--top-p must lie in (0, 1], got 2.0"),
        (["compare", "--max-new", "0"], "--max-new must be at least 1, got 0"),
        (["compare", "--lengths", "512,0"], "argument --lengths: length must be at least 1, got 0"),
        (["compare", "--cases", "0"], "argument --cases: cases must be at least 1, got 0"),
        (["compare", "--depths", "0.5,2.0"], "argument --depths: depth must lie between 0 and 1"),
        (["compare", "--budget", "0.1,2.5"], "argument --budget: a float budget must lie in"),
        (["eval", "vt", "--max-new", "0"], "--max-new must be at least 1, got 0"),
        (["bench", "--shape", "smollm2-135m", "--layers", "31"], "argument --layers: layers must"),
        ([*PLAN, "--tokens", "0"], "--tokens must be at least 1, got 0"),
        ([*PLAN, "--new", "0"], "--new must be at least 1, got 0"),
        ([*PLAN, "--memory", "0"], "argument --memory: memory must be"),
        ([*PLAN, "--bandwidth", "nan"], "argument --bandwidth: bandwidth must be"),
        ([*PLAN, "--batch", "1,0"], "argument --batch: batch must be at least 1, got 0"),
    ],
)
def test_options_are_named(capsys, no_weights, args, said):
    found = error(capsys, *args)
    assert found.startswith(f"kvjax: error: {said}")
    assert "_" not in found


@pytest.mark.parametrize(
    "method", ["h2o(budget=0)", "chain(snapkv, kvmerger(seed=-1))", "snapkv(window=0)"]
)
def test_parameters_of_methods_are_no_options(capsys, no_weights, method):
    found = error(capsys, "generate", "--method", method)
    assert " must be " in found and "--budget" not in found and "--seed" not in found


def test_what_is_no_name_of_an_argument_stays():
    args = argparse.Namespace(option_names={"max_new": "--max-new", "seed": "--seed"}, seed=3)
    kept = [
        "cannot read /home/max_new/x", "max_new.txt is empty", "got 'max_new'", "my_max_new is 3",
        "seed must be 4, got 5", "a seed of 3, got 3",
    ]  # fmt: skip
    for message in kept:
        with pytest.raises(ValueError) as caught, naming_options(args):
            raise ValueError(message)
        assert str(caught.value) == message
    with pytest.raises(TypeError, match=r"^--max-new must be an int$"), naming_options(args):
        raise TypeError("max_new must be an int")
    with pytest.raises(KeyError, match="max_new"), naming_options(args):
        raise KeyError("max_new")


def test_other_errors_stay_what_they_are(capsys, tmp_path):
    assert main(["generate", "--prompt-file", str(tmp_path / "max_new.txt")]) == 2
    assert f"cannot read {tmp_path}/max_new.txt" in one_line(capsys.readouterr().err)


# Names that are nearly right


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["DIAGNOSE"], "diagnose"),
        (["generate", "--MaxNew", "5"], "--max-new"),
        (["generate", "-method", "full"], "--method"),
        (["generate", "--method", "StreamingLLM"], "streaming_llm"),
        (["generate", "--method", "Chain(snapkv, quantize)"], "chain"),
        (["generate", "--method", "chain(snapkv, Quantize)"], "quantize"),
        (["generate", "--method", "snapkv(Window=8)"], "window"),
        (["generate", "--method", "quantize(bits='Float8')"], "float8"),
        (["compare", "--method", "All"], "all"),
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
