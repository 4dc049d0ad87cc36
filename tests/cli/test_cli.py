"""The command line: text and figures, one line for every error, nothing else on the terminal."""

from __future__ import annotations

import dataclasses
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
from kvjax.cli.main import main
from kvjax.cli.options import candidate
from kvjax.generation.continuation import Continuation
from kvjax.models import demo
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.cli.commands import error, output

ROOT = Path(__file__).parents[2]
LILY = ", a little girl named Lily lived in a small house with her mom, dad, and her dog, Spot"
FIELDS = {
    "model", "text", "method", "budget", "prompt_tokens", "new_tokens", "ttft_s", "tpot_s",
    "compile_s", "cache_bytes", "full_cache_bytes", "memory_bytes", "recall",
    "dropped", "finish_reason",
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
    assert record["dropped"] == 0
    assert min(record["tpot_s"], record["ttft_s"], record["compile_s"]) > 0

    assert main(args) == 0
    out, err = capsys.readouterr()
    assert out == record["text"] + "\n", "streamed, it is the same text"
    assert err.startswith("6 + 134 tokens") and " · compiled in " in err
    assert " · cache " in err and err.endswith("(100.0%)\n") and err.count("\n") == 1


@dataclasses.dataclass(frozen=True)
class KeepsTooMuch(kvjax.KVTransform):
    """Promises seven slots and evicts nothing."""

    def extent(self, extent: kvjax.Extent) -> kvjax.Extent:
        return extent.keep(4).hold(7)


def test_lost_tokens_are_told(capsys, monkeypatch, tinystories):
    monkeypatch.setitem(METHODS, "keeps_too_much", KeepsTooMuch)
    args = story(tinystories, "--method", "keeps_too_much", "--max-new", "3")
    record = json.loads(output(capsys, *args, "--json"))
    # Six tokens of the prompt and two new ones.
    config = models.read_config(tinystories)
    assert record["dropped"] == config.num_layers * config.kv_heads
    assert main(args) == 0
    figures, lost = capsys.readouterr().err.splitlines()
    assert figures.startswith("6 + 3 tokens")
    assert lost.startswith(f"keeps_too_much lost {record['dropped']} tokens"), lost


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
        """A run of byte tokens that is no text becomes one sign per byte."""
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    @staticmethod
    def words(ids):
        """Sentencepiece: a space before every word, and none at the start of a text."""
        return "".join(f" w{i}" for i in ids).removeprefix(" ")


@given(st.text(min_size=1), st.text(), st.integers(1, 5))
def test_pieces_join_to_whole_characters(prompt, text, size):
    new = list(text.encode())
    continuation = Continuation(Pieces.bytes, list(prompt.encode()))
    pieces = [continuation.add(new[i : i + size]) for i in range(0, len(new), size)]
    assert "".join([*pieces, continuation.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(), st.integers(1, 5))
def test_pieces_of_a_byte_fallback_decoder(text, size):
    new = list(text.encode())
    continuation = Continuation(Pieces.fallback, [])
    pieces = [continuation.add(new[i : i + size]) for i in range(0, len(new), size)]
    assert "".join([*pieces, continuation.finish()]) == text


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

ASKED = {"question", "expected", "correct", "full"}


@pytest.fixture
def short_document(monkeypatch):
    """A document that is read quickly, with an answer that it does not have."""
    text = "The code of the amber falcon is 482130. The sky is blue. " * 4
    short = demo.Document(text, "\n\nAnswer: The code of the amber falcon is", "999999")
    monkeypatch.setattr(demo, "document", lambda: short)


def rows(text: str, first: str) -> list[list[str]]:
    """The words of all lines that start with one word."""
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


def ask(capsys) -> dict:
    """What `kvjax generate` tells about its own question, as JSON and as text that agree."""
    record = json.loads(output(capsys, "generate", "--json"))
    document = demo.document()
    assert set(record) == FIELDS | ASKED
    assert set(record["full"]) == FIELDS - {"model"} | {"correct"}
    assert record["model"] == "bundled" and record["method"] == "snapkv"
    assert record["budget"] == 0.1 and record["full"]["budget"] is None
    assert record["question"] == document.question.strip()
    assert record["expected"] == document.answer
    assert record["prompt_tokens"] == record["full"]["prompt_tokens"]
    assert record["full"]["cache_bytes"] == record["full_cache_bytes"]

    text = output(capsys, "generate")
    assert f"{record['prompt_tokens']:,} tokens" in text and record["question"] in text
    assert rows(text, "expected") == [["expected", document.answer]]
    for name, own in (("full", record["full"]), ("snapkv", record)):
        answer, figures = rows(text, name)
        assert answer == [name, "right" if own["correct"] else "wrong", *own["text"].split()]
        assert figures[1] == ("-" if own["budget"] is None else "0.1")
        assert ("100.0%" in figures) == (name == "full")
        assert figures.count("ms") + figures.count("s") == 2, figures
    return record


@pytest.mark.slow
def test_the_question_is_answered(capsys):
    record = ask(capsys)
    assert 3500 < record["prompt_tokens"] < 4500
    assert record["cache_bytes"] < 0.15 * record["full"]["cache_bytes"]
    assert record["correct"] and record["full"]["correct"]
    assert record["text"].strip().startswith(demo.document().answer)


def test_a_short_question_is_answered(capsys, monkeypatch, short_document):
    right = demo.document()._replace(answer="482130")
    monkeypatch.setattr(demo, "document", lambda: right)
    assert ask(capsys)["full"]["correct"]


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.slow
def test_a_wrong_answer_is_called_wrong(capsys, monkeypatch, short_document, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    args = ["generate", "--method", "streaming_llm(sinks=2)", "--budget", "8", "--max-new", "40"]
    text = output(capsys, *args)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert rows(text, "expected") == [["expected", "999999"]]
    assert rows(text, "full")[0][1] == "wrong"
    assert rows(text, "streaming_llm(sinks=2)")[0][1] == "wrong"
    record = json.loads(output(capsys, *args, "--json"))
    assert record["correct"] is record["full"]["correct"] is False
    assert record["text"] != record["full"]["text"]


# Lists and help


def test_methods_as_json(capsys):
    listed = json.loads(output(capsys, "methods", "--json"))
    for kinds, names in (("methods", METHODS), ("wrappers", WRAPPERS), ("storage", STORAGE)):
        assert set(listed.pop(kinds)) == set(names)
    assert not listed
    snapkv = json.loads(output(capsys, "methods", "--json"))["methods"]["snapkv"]
    assert snapkv["paper"] == kvjax.SnapKV.paper and snapkv["summary"].startswith(
        "Keeps the prompt"
    )
    parameters = {p["name"]: p.get("default", "none") for p in snapkv["parameters"]}
    assert parameters["budget"] == "none" and parameters["window"] == 16


# Budgets and methods


@pytest.mark.parametrize(
    ("args", "budget", "transform"),
    [
        ([], 0.1, kvjax.SnapKV(0.1)),
        (["--budget", "256"], 256, kvjax.SnapKV(256)),
        (["--budget", "1.0", "--method", "h2o"], 1.0, kvjax.H2O(1.0)),
        (["--method", "full", "--budget", "64"], None, kvjax.Full()),
        (["--method", "h2o(budget=64)"], None, kvjax.H2O(64)),
        (["--method", "every(snapkv, steps=4)"], 0.1, kvjax.Every(kvjax.SnapKV(0.1), 4)),
        (
            ["--method", "chain(snapkv(window=16), h2o(budget=64))", "--budget", "99"],
            99,
            kvjax.chain(kvjax.SnapKV(99, window=16), kvjax.H2O(64)),
        ),
    ],
)
def test_which_method_and_budget(args, budget, transform):
    parsed = arguments.parser().parse_args(["generate", "--max-new", "8", *args])
    asked = candidate(parsed)
    assert (asked.budget, asked.transform) == (budget, transform)
    assert type(asked.budget) is type(budget)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "full", "--budget", "0.1"], "--budget 0.1 changes nothing: full takes no"),
        (["--method", "h2o(budget=64)", "--budget", "32"], "--budget 32 changes nothing: h2o("),
        (["--method", "full", "--budget", "0.1", "--json"], ""),
        (["--method", "full"], ""),
        (["--method", "h2o", "--budget", "0.1"], ""),
    ],
)
def test_a_budget_that_changes_nothing(capsys, args, said):
    candidate(arguments.parser().parse_args(["generate", *args]))
    out, err = capsys.readouterr()
    assert not out and err.startswith(said) and bool(err) == bool(said)


# Errors


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "nope"], "unknown method 'nope'"),
        (["--method", "\x1b[2J"], r"got '\x1b[2J'"),
        (["--budget", "20%"], "number of slots (256) or a share of the prompt (0.2), got '20%'"),
        (["--budget", "8"], "budget must be at least 17"),
        (["--model", "\x1b[2J", "--prompt", "a"], r"\x1b[2J is not a directory"),
        (["--max-new", "0"], "--max-new must be at least 1"),
        (["--max-new", "many"], "--max-new"),
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "3"], "--top-k needs a temperature"),
        (["--seed", "4294967296"], "--seed"),
        (["--prompt", " \n"], "the prompt is empty"),
        (["--prompt", "a\udcff"], "not UTF-8"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--prompt-file", "no such file"], "cannot read no such file: No such file"),
        (["--prompt-file", "a\0b"], "null byte"),
        (["--model", "gpt2"], "needs a --prompt"),
        (["--stop", "."], "--stop needs a --prompt"),
        (["--stop", "", "--prompt", "a"], "--stop"),
        (["--prompt", "a", "--prompt", " "], "prompt 2 is empty"),
        (["--chat", "--prompt", "a"], "--chat needs a chat template: the model's tokenizer has no"),
        (["--system", "Be brief.", "--raw", "--prompt", "a"], "--raw leaves it out"),
        (["--chat", "--raw", "--prompt", "a"], "not allowed with"),
        (["--promt", "a"], "did you mean --prompt?"),
        (["--max", "5"], "--max"),
        (["--prompt", "one two " * 5000], "8448 positions"),
        (["--max-new", "8440"], "8448 positions"),
    ],
)
def test_errors_before_anything_is_loaded(capsys, no_weights, args, said):
    assert said in error(capsys, "generate", *args)


def test_errors_of_the_command_itself(capsys):
    assert "there is no command 'frob' (see" in error(capsys, "frob")
    assert "did you mean generate?" in error(capsys, "genrate")
    assert r"\x1b[2J" in error(capsys, "\x1b[2J")
    assert "--frob" in error(capsys, "methods", "--frob")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config.json": None}, "config.json: No such file"),
        ({"config.json": b"{"}, "config.json is not JSON"),
        ({"config.json": b'{"model_type": "gpt2"}'}, "model_type 'gpt2' is not supported"),
        ({"model.safetensors": None}, "has no model.safetensors"),
        ({"model.safetensors": b"x" * 100}, "cannot read"),
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


@pytest.mark.parametrize("name", ["generate", "compare", "read", "ask", "chat"])
def test_weights_that_are_not_finite_need_a_flag(capsys, monkeypatch, tmp_path, name):
    """The flag reaches `from_pretrained`, which stops here."""
    (tmp_path / "text.txt").write_text("Once upon a time. " * 1000)
    about = {"model": None, "document": "a", "method": "full", "budget": None, "raw": True}
    monkeypatch.setattr(kvjax, "context_about", lambda folder: about)
    monkeypatch.chdir(tmp_path)
    args = {
        "generate": ["--prompt", "a"],
        "compare": ["--lengths", "256", "--out", "out"],
        "read": ["text.txt", "--out", "new"],
        "ask": ["folder", "why"],
        "chat": [],
    }[name]
    given = []

    def load(folder, **options):
        given.append(options)
        raise ValueError("no weights today")

    monkeypatch.setattr(models, "from_pretrained", load)
    for flag in ([], ["--allow-nonfinite"]):
        assert "no weights today" in error(capsys, name, *args, *flag)
    assert given == [{"allow_nonfinite": False}, {"allow_nonfinite": True}]
