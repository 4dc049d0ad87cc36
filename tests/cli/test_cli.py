"""The command line: text and figures, one line for every error, nothing else on the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax import models
from kvjax.cli import arguments, methods_command
from kvjax.cli.bundled_question import _print_answers
from kvjax.cli.main import main
from kvjax.cli.options import candidate
from kvjax.generation.continuation import Continuation
from kvjax.models import demo
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.cli.commands import error, output
from tests.generation.test_generate import KeepsTooMuch

ROOT = Path(__file__).parents[2]
LILY = ", a little girl named Lily lived in a small house with her mom, dad, and her dog, Spot"
FIELDS = {
    "model", "text", "method", "budget", "prompt_tokens", "new_tokens", "ttft_s", "tpot_s",
    "compile_s", "cache_bytes", "full_cache_bytes", "memory_bytes", "recall",
    "finish_reason",
}  # fmt: skip


# Text


def story(tinystories, *args) -> list[str]:
    return ["generate", "--model", str(tinystories), "--prompt", "Once upon a time", *args]


def test_known_continuation(capsys, tinystories):
    args = story(tinystories, "--method", "full", "--max-new", "200")
    record = json.loads(output(capsys, *args, "--json"))
    assert set(record) == FIELDS
    assert record["text"].startswith(LILY)
    assert record["new_tokens"] == 134 and record["prompt_tokens"] == 6
    assert record["method"] == "full" and record["budget"] is None
    assert record["cache_bytes"] == record["full_cache_bytes"] > 0
    assert record["memory_bytes"] == {"device": record["cache_bytes"]} and record["recall"] is None
    assert min(record["tpot_s"], record["ttft_s"], record["compile_s"]) > 0

    assert main(args) == 0
    out, err = capsys.readouterr()
    assert out == record["text"] + "\n", "streamed, it is the same text"
    assert err.startswith("6 + 134 tokens") and " · compiled in " in err
    assert " · cache " in err and err.endswith("(100.0%) with full\n") and err.count("\n") == 1


def test_lost_tokens_are_told(capsys, monkeypatch, tinystories):
    monkeypatch.setitem(METHODS, "keeps_too_much", KeepsTooMuch)
    args = story(tinystories, "--method", "keeps_too_much(slots=4)", "--max-new", "12")
    # Six tokens of the prompt and eleven new ones take one slot more than it promises.
    assert main(args) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kvjax: error: caches[0] lost tokens that found no free slot"), line


@pytest.mark.slow
def test_infinigen_is_calibrated_on_the_prompt(capsys):
    args = ["generate", "--prompt", "Once upon a time " * 40, "--max-new", "4"]
    record = json.loads(output(capsys, *args, "--method", "infinigen", "--json"))
    assert record["new_tokens"] == 4


@pytest.mark.slow
def test_prompt_file_and_method(capsys, tinystories, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("Once upon a time\r\nthere was a café. ".encode() * 6)
    args = ["generate", "--model", tinystories, "--prompt-file", file, "--max-new", 10]
    args += ["--method", "snapkv(window=8)", "--budget", "24", "--temperature", "0.8", "--json"]
    record = json.loads(output(capsys, *args))
    assert record["method"] == "snapkv(window=8)" and record["budget"] == 24
    assert record["cache_bytes"] < record["full_cache_bytes"]
    again, other = (json.loads(output(capsys, *args, "--seed", seed)) for seed in (0, 5))
    assert again["text"] == record["text"] != other["text"]


@pytest.mark.slow
def test_nothing_but_figures_on_standard_error(tinystories):
    """Without PyTorch, transformers has something to say."""
    code = (
        "import sys; sys.modules['torch'] = None; "
        "from kvjax.cli.main import main; main(sys.argv[1:])"
    )
    args = [sys.executable, "-c", code, *story(tinystories, "--max-new", "4")]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("6 + 4 tokens")
    assert done.stdout == LILY[:2] + done.stdout[2:]


class Pieces:
    """Decoders with the habits that lose or break text when tokens are decoded one by one."""

    @staticmethod
    def bytes(ids):
        return bytes(ids).decode("utf-8", errors="replace")

    @staticmethod
    def fallback(ids):
        """A run of byte tokens that is not text becomes one sign per byte."""
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    @staticmethod
    def words(ids):
        """Sentencepiece: a space before every word, and none at the start of a text."""
        return "".join(f" w{i}" for i in ids).removeprefix(" ")


@pytest.mark.parametrize("decode", [Pieces.bytes, Pieces.fallback])
@given(st.text(min_size=1), st.text(), st.integers(1, 5))
def test_pieces_join_to_whole_characters(decode, prompt, text, size):
    new, before = list(text.encode()), list(prompt.encode()) if decode is Pieces.bytes else []
    continuation = Continuation(decode, before)
    pieces = [continuation.add(new[i : i + size]) for i in range(0, len(new), size)]
    assert "".join([*pieces, continuation.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_end_is_shown():
    continuation = Continuation(Pieces.bytes, [65])
    assert continuation.add([66, 0xE4, 0xBD]) == "B"
    assert continuation.finish() == "\ufffd"
    assert continuation.finish() == "" and continuation.text == "B\ufffd"


def test_the_space_before_the_first_word_stays():
    continuation = Continuation(Pieces.words, list(range(100)))
    assert [continuation.add([7]), continuation.add([8, 9])] == [" w7", " w8 w9"]
    assert Continuation(Pieces.words, []).add([7]) == "w7"


# The bundled model


def rows(text: str, first: str) -> list[list[str]]:
    """The words of all lines that start with one word."""
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


@pytest.mark.parametrize("answer", ["482130", pytest.param("999999", marks=pytest.mark.slow)])
def test_the_question_of_the_bundled_model(capsys, monkeypatch, answer):
    """JSON and text agree, and a wrong answer is called wrong."""
    text = "The code of the amber falcon is 482130. The sky is blue. " * 4
    document = demo.Document(text, "\n\nAnswer: The code of the amber falcon is", answer)
    monkeypatch.setattr(demo, "document", lambda: document)
    monkeypatch.setenv("COLUMNS", "60")
    record = json.loads(output(capsys, "generate", "--json"))
    assert set(record) == FIELDS | {"question", "expected", "correct", "full"}
    assert set(record["full"]) == FIELDS - {"model"} | {"correct"}
    assert record["model"] == "bundled" and record["method"] == "snapkv"
    assert record["budget"] == 0.1 and record["full"]["budget"] is None
    assert record["question"] == document.question.strip() and record["expected"] == answer
    assert record["prompt_tokens"] == record["full"]["prompt_tokens"]
    assert record["full"]["cache_bytes"] == record["full_cache_bytes"]
    assert record["full"]["correct"] is (answer == "482130")

    shown = output(capsys, "generate")
    assert max(map(len, shown.splitlines())) <= 60 and "…" not in shown
    words = " ".join(shown.split())
    assert f"{record['prompt_tokens']:,} tokens" in words
    assert " ".join(record["question"].split()) in words
    assert rows(shown, "expected") == [["expected", answer]]
    for name, result in (("full", record["full"]), ("snapkv", record)):
        answered = rows(shown, name)[0]
        assert answered[:2] == [name, "right" if result["correct"] else "wrong"]


def test_bytes_in_host_memory_are_told(capsys):
    record = {
        "prompt_tokens": 1234, "text": " 12", "correct": True, "budget": None, "ttft_s": 1.0,
        "tpot_s": None, "cache_bytes": 5 * 10**6, "full_cache_bytes": 5 * 10**6,
    }  # fmt: skip
    records = {
        "full": {**record, "memory_bytes": {"device": 5 * 10**6}},
        "offload": {**record, "memory_bytes": {"device": 10**6, "pinned_host": 4 * 10**6}},
    }
    _print_answers(demo.Document("", "Which?", "12"), 16, records)
    shown = capsys.readouterr().out
    assert "read a document and a question, 1,234 tokens" in shown
    assert "4.0 MB of offload are in host memory." in shown and "of full are in" not in shown
    right, costs = rows(shown, "offload")
    assert right == "offload right 12".split()
    assert costs == "offload - 5.0 MB 100.0% 1.00 s -".split()


# Lists and help


def test_methods_as_json(capsys):
    listed = json.loads(output(capsys, "methods", "--json"))
    known = {"methods": METHODS, "wrappers": WRAPPERS, "storage": STORAGE}
    assert {kind: set(names) for kind, names in listed.items()} == {
        kind: set(names) for kind, names in known.items()
    }
    snapkv = listed["methods"]["snapkv"]
    assert snapkv.items() <= json.loads(output(capsys, "methods", "snapkv", "--json")).items()
    assert snapkv["paper"] == kvjax.SnapKV.card.paper and snapkv["summary"].startswith(
        "Keeps the prompt"
    )
    parameters = {p["name"]: p.get("default", "none") for p in snapkv["parameters"]}
    assert parameters["budget"] == "none" and parameters["window"] == 16


# Budgets and methods


@pytest.mark.parametrize(
    ("args", "budget", "transform", "said"),
    [
        ([], 0.1, kvjax.SnapKV(0.1), ""),
        (["--budget", "1.0", "--method", "h2o"], 1.0, kvjax.H2O(1.0), ""),
        (["--method", "full", "--budget", "0.1"], None, kvjax.Full(), "0.1"),
        (["--method", "full", "--budget", "0.1", "--json"], None, kvjax.Full(), ""),
        (["--method", "h2o(budget=64)"], None, kvjax.H2O(64), ""),
        (["--method", "h2o(budget=64)", "--budget", "64"], None, kvjax.H2O(64), "64"),
        (
            ["--method", "chain(snapkv(window=16), h2o(budget=64))", "--budget", "99"],
            99,
            kvjax.chain(kvjax.SnapKV(99, window=16), kvjax.H2O(64)),
            "",
        ),
    ],
)
def test_which_method_and_budget(capsys, args, budget, transform, said):
    """A line says that a budget which was given changes nothing."""
    asked = candidate(arguments.parser().parse_args(["generate", *args]))
    assert (asked.budget, asked.transform) == (budget, transform)
    assert type(asked.budget) is type(budget)
    out, err = capsys.readouterr()
    assert out == "" and bool(err) == bool(said)
    assert not said or err.startswith(f"--budget {said} changes nothing: {args[1]} takes no budget")


# Errors


GENERATE, READ, ASK = ["generate"], ["read", "text.txt", "--out", "out"], ["ask", ".", "why"]
BENCH, SHAPE = ["bench"], ["bench", "--shape", "llama-3.1-8b"]
DIAGNOSE = ["diagnose", "--prompt-file", "text.txt"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*GENERATE, "--method", "nope"], "unknown method 'nope'"),
        ([*GENERATE, "--method", "\x1b[2J"], r"got '\x1b[2J'"),
        ([*GENERATE, "--budget", "20%"], "slots (256) or a share of the prompt (0.2), got '20%'"),
        ([*GENERATE, "--model", "\x1b[2J", "--prompt", "a"], r"\x1b[2J is not a directory"),
        ([*GENERATE, "--max-new", "many"], "--max-new"),
        ([*GENERATE, "--seed", "4294967296"], "--seed"),
        ([*GENERATE, "--prompt", " \n"], "the prompt is empty"),
        ([*GENERATE, "--prompt", "a\udcff"], "not UTF-8"),
        ([*GENERATE, "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        ([*GENERATE, "--prompt-file", "no such file"], "cannot read no such file: No such file"),
        ([*GENERATE, "--prompt-file", "a\0b"], "null byte"),
        ([*GENERATE, "--model", "gpt2"], "needs a --prompt"),
        ([*GENERATE, "--stop", "."], "--stop needs a --prompt"),
        ([*GENERATE, "--stop", "", "--prompt", "a"], "--stop"),
        ([*GENERATE, "--prompt", "a", "--prompt", " "], "prompt 2 is empty"),
        ([*GENERATE, "--chat", "--prompt", "a"], "--chat needs a chat template: the model's token"),
        ([*GENERATE, "--system", "Hi.", "--raw", "--prompt", "a"], "--raw leaves it out"),
        ([*GENERATE, "--max", "5"], "--max"),
        ([*GENERATE, "--prompt", "one two " * 5000], "8448 positions"),
        ([*GENERATE, "--max-new", "8440"], "8448 positions"),
        (["read", "no such file", "--out", "out"], "cannot read no such file"),
        ([*READ, "--max-questions", "0"], "--max-questions"),
        ([*READ, "--max-new", "99999"], "8448 positions"),
        ([*READ, "--chat"], "--chat needs a chat template"),
        (
            [*READ, "--method", "kvzip(room=24)", "--max-questions", "25"],
            "--max-questions must be at most 24, which KVzip(",
        ),
        (["ask", "nothing", "why"], "nothing is not the folder of a context"),
        (ASK, "is not the folder of a context"),
        ([*ASK, "--max-new", "0"], "--max-new must be at least 1"),
        (["chat", "--max-prompt", "0"], "--max-prompt must be at least 1"),
        (["chat", "--max-prompt", "9000"], "--max-prompt must be below the model's 8448 positions"),
        (["chat", "--json"], "unrecognized arguments: --json"),
        ([*BENCH, "--new", "1"], "--new must be at least 2"),
        ([*BENCH, "--batch", "1,0"], "--batch must be at least 1"),
        (
            [*BENCH, "--batch", "many"],
            "argument --batch: must be numbers between commas, got 'many'",
        ),
        ([*BENCH, "--layers", "2"], "--layers needs a --shape"),
        ([*BENCH, "--tokens", "1000000000"], "--tokens must be at most 8448"),
        ([*SHAPE, "--model", "smollm2"], "give --model or --shape, not both"),
        ([*SHAPE, "--layers", "33"], "layers must be at most 32"),
        ([*SHAPE, "--layers", "2", "--method", "quest"], "quest leaves all 2 layers as they are"),
        ([*DIAGNOSE, "--error", "0"], "--error must be finite and above 0, got 0.0"),
        ([*DIAGNOSE, "--method", "nothing"], "nothing"),
        ([*DIAGNOSE, "--method", "x for x in y"], "methods between commas, got 'x for x in y'"),
        ([*DIAGNOSE, "--method", "h2o,all"], "all must stand alone, got 'h2o,all'"),
        ([*DIAGNOSE, "--budget", "2.5"], "a float budget must lie in (0, 1], got 2.5"),
        ([*DIAGNOSE, "--ask", "  "], "the question is empty"),
        ([*DIAGNOSE, "--out", "text.txt/pictures"], "is not a directory"),
    ],
)
def test_errors_before_weights_are_loaded(capsys, monkeypatch, tmp_path, no_weights, args, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Once upon a time there was a girl. " * 9)
    assert said in error(capsys, *args)


def test_errors_of_the_command_itself(capsys):
    assert "there is no command 'frob' (see" in error(capsys, "frob")
    assert "did you mean generate?" in error(capsys, "genrate")
    assert r"\x1b[2J" in error(capsys, "\x1b[2J")
    assert "--frob" in error(capsys, "methods", "--frob")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config.json": None}, "config.json: No such file"),
        ({"model.safetensors": None}, "has no model.safetensors"),
        ({"tokenizer.json": b"{{{"}, "cannot load the tokenizer"),
        ({"tokenizer.json": None}, "has no vocabulary"),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, "cannot load the tokenizer"),
    ],
)
def test_models_that_do_not_load(capsys, broken_copy, changes, said):
    for name, content in changes.items():
        if content is None:
            (broken_copy / name).unlink()
        else:
            (broken_copy / name).write_bytes(content)
    assert said in error(capsys, "generate", "--model", broken_copy, "--prompt", "a")


def test_bugs_are_not_hidden(monkeypatch):
    monkeypatch.setattr(methods_command, "run", lambda args: {}["a bug"])
    with pytest.raises(KeyError):
        main(["methods"])


@pytest.mark.parametrize(
    "args", [["generate", "--prompt", "a"], ["compare", "--lengths", "256", "--out", "out"]]
)
def test_weights_that_are_not_finite_need_a_flag(capsys, monkeypatch, tmp_path, args):
    """The flag reaches `from_pretrained`, which stops here."""
    monkeypatch.chdir(tmp_path)
    given = []

    def load(folder, **options):
        given.append(options)
        raise ValueError("no weights today")

    monkeypatch.setattr(models, "from_pretrained", load)
    for flag in ([], ["--allow-nonfinite"]):
        assert "no weights today" in error(capsys, *args, *flag)
    assert given == [{"allow_nonfinite": False}, {"allow_nonfinite": True}]
