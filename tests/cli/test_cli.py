"""The command line: text and figures, one line for every error, nothing else on the terminal."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax import models
from kvjax.cli import arguments, generate_command, inputs, methods_command
from kvjax.cli.main import main
from kvjax.cli.options import candidate
from kvjax.generation.continuation import Continuation
from kvjax.models import demo
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from kvjax.storage.offload import HOST_MEMORY, memory_kinds
from tests.cli.commands import command, error, one_line, output

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
    times, sizes = err.splitlines()
    assert times.startswith("6 + 134 tokens") and " · compiled in " in times
    assert sizes.startswith("cache ") and sizes.endswith("(100.0%)")


@pytest.mark.slow
@pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no such memory")
def test_offloaded_figures(capsys):
    args = ["generate", "--prompt", "Once upon a time " * 40, "--max-new", "12", "--budget", "64"]
    method = "chain(clusterkv(tokens_per_cluster=8), offload)"
    record = json.loads(output(capsys, *args, "--method", method, "--json"))
    assert set(record["memory_bytes"]) == {"device", HOST_MEMORY}
    assert sum(record["memory_bytes"].values()) == record["cache_bytes"]
    assert 0 < record["recall"]["hit_rate"] < 1 and record["recall"]["steps"] == 11
    assert main([*args, "--method", method]) == 0
    err = capsys.readouterr().err
    assert "in host memory" in err and "% hits" in err and "fetched per token" in err


@pytest.mark.slow
def test_fewer_bits_in_a_chain(capsys):
    args = ["generate", "--prompt", "Once upon a time " * 40, "--max-new", "4", "--budget", "64"]
    method = "chain(snapkv, quantize)"
    record = json.loads(output(capsys, *args, "--method", method, "--json"))
    assert record["method"] == method and record["budget"] == 64 and record["new_tokens"] == 4
    # Four layers of four KV heads of 32 channels, each key and value with a scale. Keys are
    # relative to a mean and a scale of each channel.
    slots, of_slot, of_head, of_layer = 64 + 64, 2 * (32 + 4) + 4 + 4 + 1, 4 + 4 + 2 * 32 * 4, 4
    assert record["cache_bytes"] == 4 * (4 * (slots * of_slot + of_head) + of_layer)


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
    times, sizes, lost = capsys.readouterr().err.splitlines()
    assert times.startswith("6 + 3 tokens") and sizes.startswith("cache")
    assert lost.startswith(f"keeps_too_much lost {record['dropped']} tokens"), lost


@pytest.mark.slow
def test_infinigen_is_calibrated_on_the_prompt(capsys):
    args = ["generate", "--prompt", "Once upon a time " * 40, "--max-new", "4"]
    record = json.loads(output(capsys, *args, "--method", "infinigen", "--json"))
    assert record["new_tokens"] == 4


@pytest.mark.slow
def test_text_is_the_tokenizers(capsys, tinystories):
    tokenizer = models.load_tokenizer(tinystories)
    prompt = tokenizer("Once upon a time").input_ids
    result = kvjax.generate(models.from_pretrained(tinystories), [prompt], max_new_tokens=60)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + result.tokens[0])
    assert whole.startswith(before)
    record = json.loads(
        output(capsys, *story(tinystories, "--method=full", "--max-new=60", "--json"))
    )
    assert record["text"] == whole[len(before) :]


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
    assert done.stderr.count("\n") == 2 and done.stderr.startswith("6 + 4 tokens")
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


@pytest.mark.parametrize("columns", [60, 80, 120])
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


@pytest.mark.slow
def test_full_beside_itself(capsys, short_document):
    args = ["generate", "--method", "full", "--max-new", "3"]
    assert len(rows(output(capsys, *args), "full")) == 2  # answer and figures
    record = json.loads(output(capsys, *args, "--json"))
    assert record["full"]["text"] == record["text"]


@pytest.mark.slow
def test_the_bundled_model_continues_a_text(capsys):
    tokenizer = models.load_tokenizer(demo.directory())
    prompt = tokenizer("A café.\nThe import statement").input_ids
    model = models.from_pretrained(demo.directory())
    (tokens,) = kvjax.generate(model, [prompt], max_new_tokens=6).tokens
    whole = tokenizer.decode(prompt + tokens, skip_special_tokens=True)

    args = ["generate", "--prompt", "A café.\nThe import statement", "--max-new", "6"]
    record = json.loads(output(capsys, *args, "--method", "full", "--json"))
    assert set(record) == FIELDS and record["model"] == "bundled"
    assert "A café.\nThe import statement" + record["text"] == whole
    assert main([*args, "--method", "full"]) == 0
    out, err = capsys.readouterr()
    assert out == record["text"] + "\n"
    assert err.startswith(f"{len(prompt)} + {record['new_tokens']} tokens")


@pytest.mark.slow
def test_draws_from_the_bundled_model(capsys):
    args = ["generate", "--prompt", "The", "--max-new", "12", "--temperature", "1", "--json"]
    texts = [json.loads(output(capsys, *args, "--seed", seed))["text"] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_an_incomplete_bundled_model(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "directory", lambda: tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for args in ([], ["--prompt", "a"]):
        said = error(capsys, "generate", *args)
        assert f"the bundled model in {tmp_path} is incomplete: no model.safetensors, tok" in said
        assert "config.json" not in said


# Lists and help


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_methods_fit_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = output(capsys, "methods").splitlines()
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    for name, kind in (METHODS | WRAPPERS | STORAGE).items():
        assert any(line.split()[:1] == [name] for line in lines), name
        assert kind.paper.split(", arXiv ")[-1] in text
    assert "…" not in text
    assert "window=16" in text and "group_reduce='mean'" in text


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


def test_version_and_help(capsys):
    assert output(capsys, "--version") == f"kvjax {kvjax.__version__}\n"
    assert output(capsys) == output(capsys, "--help")
    for name in ("generate", "read", "ask", "chat", "compare", "diagnose", "plan", "methods"):
        assert name in output(capsys, "--help")
        assert output(capsys, name, "--help").startswith(f"usage: kvjax {name}")
    for name in (
        "--model",
        "--prompt-file",
        "--prompts",
        "--stop",
        "--raw",
        "--budget",
        "--max-new",
        "--min-p",
        "--seed",
        "--json",
    ):
        assert name in output(capsys, "generate", "--help")


@pytest.mark.parametrize("args", [["--help"], ["methods"]])
@pytest.mark.slow
def test_lists_import_nothing_heavy(args):
    code = (
        "import sys; from kvjax.cli.main import main; main(sys.argv[1:]);"
        "print({'torch', 'transformers', 'kvjax.models', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.stdout.endswith("set()\n") and done.stderr == ""


# Budgets and methods


@pytest.mark.parametrize(
    ("args", "budget", "transform"),
    [
        ([], 0.1, kvjax.SnapKV(0.1)),
        (["--budget", "256"], 256, kvjax.SnapKV(256)),
        (["--budget", "0.5"], 0.5, kvjax.SnapKV(0.5)),
        (["--budget", "1.0", "--method", "h2o"], 1.0, kvjax.H2O(1.0)),
        (["--method", "full"], None, kvjax.Full()),
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
        (["--method", "snapkv(foo=1)"], "no parameter 'foo'"),
        (["--method", "snapkv("], "a name or a composition"),
        (["--method", "snapkv\n(1)"], "a name or a composition"),
        (["--method", "every(h2o, steps=3)"], "Every repeats a method"),
        (["--method", "snapkv(window='a')"], "window must be an int"),
        (["--method", "when_full(snapkv)"], "needs room="),
        (["--budget", "20%"], "number of slots (256) or a share of the prompt (0.2), got '20%'"),
        (["--budget", ""], "--budget"),
        (["--budget", "0"], "budget must be at least 17"),
        (["--budget", "8"], "budget must be at least 17"),
        (["--budget", "-0.5"], "(0, 1]"),
        (["--budget", "1.5"], "(0, 1]"),
        (["--budget", "nan"], "(0, 1]"),
        (["--budget", "999999999999999999999"], "budget must be at most 2147483647 slots, got 9"),
        (["--method", "streaming_llm(sinks=10000000000)"], "sinks must be at most 2147483647"),
        (["--method", "clusterkv(seed=())"], "seed must be an int, got ()"),
        (["--method", "snapkv(64)"], "write budget=64"),
        (["--method", "snapkv,h2o"], "write chain(snapkv, h2o)"),
        (["--method", "\x1b[2J"], r"got '\x1b[2J'"),
        (["--model", "\x1b[2J", "--prompt", "a"], r"\x1b[2J is not a directory"),
        (["--max-new", "0"], "--max-new must be at least 1"),
        (["--max-new", "many"], "--max-new"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "inf"], "temperature"),
        (["--temperature", "hot"], "--temperature"),
        (["--temperature", "0", "--top-k", "3"], "--top-k needs a temperature"),
        (["--top-k", "0"], "--top-k must"),
        (["--top-p", "2"], "--top-p must"),
        (["--min-p", "nan"], "--min-p must"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "4294967296"], "--seed"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", " \n"], "the prompt is empty"),
        (["--prompt", "a\udcff"], "not UTF-8"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--prompt-file", "no such file"], "cannot read no such file: No such file"),
        (["--prompt-file", "."], "cannot read .: Is a directory"),
        (["--prompt-file", "a\0b"], "null byte"),
        (["--model", "/no/such/folder", "--prompt", "a"], "/no/such/folder is not a directory"),
        (["--model", "a b", "--prompt", "a"], "a b is not a directory"),
        (["--model", "gpt2"], "needs a --prompt"),
        (["--stop", "."], "--stop needs a --prompt"),
        (["--stop", "", "--prompt", "a"], "--stop"),
        (["--prompt", "a", "--prompt", " "], "prompt 2 is empty"),
        (["--prompts", "a", "--prompt", "b"], "not allowed with"),
        (["--prompts", "no such file"], "cannot read no such file"),
        (["--chat", "--prompt", "a"], "--chat needs a chat template: the model's tokenizer has no"),
        (["--system", "Be brief.", "--prompt", "a"], "--system needs a chat template"),
        (["--system", "Be brief.", "--raw", "--prompt", "a"], "--raw leaves it out"),
        (["--chat", "--raw", "--prompt", "a"], "not allowed with"),
        (["--bogus"], "--bogus"),
        (["--promt", "a"], "did you mean --prompt?"),
        (["--max", "5"], "--max"),
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
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"ab\xff\xfe", "is not UTF-8 text: byte 2 is 0xff"),
    ],
)
def test_prompt_files_that_are_no_prompt(capsys, tmp_path, content, said):
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    assert said in error(capsys, "generate", "--prompt-file", file)


def test_prompt_file_without_permission(capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(inputs.Path, "read_bytes", refuse)
    said = error(capsys, "generate", "--prompt-file", "secret.txt")
    assert "cannot read secret.txt: Permission denied" in said


def test_more_than_the_bundled_model_reads(capsys, no_weights):
    said = error(capsys, "generate", "--prompt", "one two " * 5000)
    assert "8448 positions" in said
    assert "8448 positions" in error(capsys, "generate", "--max-new", "5000")


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


def test_more_than_the_model_reads(capsys, tinystories, no_weights):
    long = ["generate", "--model", tinystories, "--prompt", "one two three " * 400]
    assert "512 positions" in error(capsys, *long)
    short = ["generate", "--model", tinystories, "--prompt", "Once", "--max-new", "600"]
    assert "512 positions" in error(capsys, *short)


@pytest.mark.slow
def test_a_hub_id_without_network():
    start = time.monotonic()
    done = command(
        "generate", "--model", "nobody/nothing", "--prompt", "a",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "nobody/nothing is not a directory, and cannot be downloaded" in one_line(done.stderr)
    assert time.monotonic() - start < 30


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


# The process and its terminal


def test_interrupted(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "run", interrupt)
    assert main(["generate"]) == 130
    assert capsys.readouterr() == ("", "")


def test_logs_and_warnings_come_back(capsys):
    before = logging.root.manager.disable, list(warnings.filters)
    error(capsys, "generate", "--method", "nope")
    assert (logging.root.manager.disable, list(warnings.filters)) == before


@pytest.mark.skipif(os.name != "posix", reason="pipes and signals of POSIX")
@pytest.mark.slow
def test_closed_pipe():
    line = [sys.executable, "-m", "kvjax.cli.main", "methods", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_standard_output_on_a_full_disk():
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "kvjax", "methods", "--json"]
        done = subprocess.run(line, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert one_line(done.stderr).endswith("No space left on device: standard output\n")
    assert done.returncode == 2


def test_a_terminal_that_knows_ascii_only():
    done = command("methods", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii()


# The command, about a document that is read quickly.
SHORT_DOCUMENT = """if True:
    import sys
    from kvjax.models import demo
    demo.document = lambda: demo.Document("The sky is blue. " * 9, "The sky is", "blue")
    from kvjax.cli.main import main
    sys.exit(main())
"""


class Terminal:
    """A process whose standard error is a terminal."""

    def __init__(self, *args, columns=80):
        import pty

        self._ours, theirs = pty.openpty()
        line = [sys.executable, "-c", SHORT_DOCUMENT, *args]
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, env=env)
        os.close(theirs)
        self.shown = ""

    def read(self, until: str | None = None, seconds: float = 120) -> str:
        """What was shown until a text comes, or until the process ends."""
        end = time.monotonic() + seconds
        while until is None or until not in self.shown:
            assert time.monotonic() < end, self.shown
            if not select.select([self._ours], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                data = b""
            if not data:
                assert until is None, self.shown
                break
            self.shown += data.decode(errors="replace")
        return self.shown

    def close(self):
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal():
    opened = []

    def start(*args, **options) -> Terminal:
        opened.append(Terminal(*args, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
@pytest.mark.slow
def test_progress_on_a_terminal(terminal):
    own = terminal("generate", "--max-new", "4", "--method", "streaming_llm")
    shown = own.read()
    assert own.process.wait(60) == 0
    for part in (
        "loading the bundled model",
        "compiling and running the prompt pass of layer 1 of 4 for full",
        "compiling the decode loop for streaming_llm",
        "layer 4 of 4",
        " elapsed",
    ):
        assert part in shown, shown
    assert "0:00:00 left" not in shown
    assert b"\x1b" not in own.process.stdout.read(), "standard output is no terminal"


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
@pytest.mark.slow
def test_json_shows_no_progress(terminal):
    own = terminal("generate", "--prompt", "The", "--max-new", "1", "--json", "--method", "full")
    assert own.read() == ""
    assert own.process.wait(60) == 0
    assert json.loads(own.process.stdout.read())["new_tokens"] == 1


@pytest.mark.slow
def test_an_interrupt_within_a_finalizer_is_not_lost():
    code = """if True:
        import sys
        from kvjax.cli import methods_command
        from kvjax.cli import main as cli

        class Interrupted:
            def __del__(self):
                raise KeyboardInterrupt

        def run(args):
            Interrupted()
            print("went on", flush=True)

        methods_command.run = run
        sys.argv = ["kvjax", "methods"]
        sys.exit(cli.main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("seconds", [0, 60])
@pytest.mark.slow
def test_an_interrupt_that_something_swallows_is_not_lost(seconds):
    code = f"""if True:
        import os, signal, sys, time
        from kvjax.cli import methods_command
        from kvjax.cli import main as cli

        def run(args):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                pass
            time.sleep({seconds})
            print("went on", flush=True)

        methods_command.run = run
        sys.argv = ["kvjax", "methods"]
        sys.exit(cli.main())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 130
    assert done.stdout == ("" if seconds else "went on\n"), "what takes longer is cut short"


def start_command(*args, **options) -> subprocess.Popen:
    """The command as it is installed."""
    line = [sys.executable, "-m", "kvjax", *args]
    return subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.4])
def test_interrupted_while_it_is_imported(seconds):
    for longer in (1, 4, 16):
        process = start_command("generate")
        time.sleep(longer * seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if "init_import_site" not in err:  # else Python itself had not started: a busy machine
            break
    assert (out, err, process.returncode) == ("", "", 130)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.slow
def test_an_interrupt_at_any_time_is_130_or_too_late():
    for tenths in range(5, 25, 4):
        process = start_command("methods", "--json")
        time.sleep(tenths / 10)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert err == "" and process.returncode in (0, 130)
        assert process.returncode == 130 or json.loads(out)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_that_the_parent_ignores_is_ignored():
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'kvjax', 'methods', '--json'])"
    )
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_while_no_python_runs_is_not_lost():
    """As in a compiler: the signal's handler is not called before the code returns."""
    code = """if True:
        import hashlib, sys
        from kvjax.cli import methods_command
        from kvjax.cli import main as cli

        def run(args):
            print("started", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)  # a minute

        methods_command.run = run
        sys.argv = ["kvjax", "methods"]
        sys.exit(cli.main())
    """
    line = [sys.executable, "-c", code]
    start = time.monotonic()
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130 and time.monotonic() - start < 30


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
@pytest.mark.slow
def test_interrupted_while_compiling(terminal):
    own = terminal("generate")
    own.read(until="compiling")
    own.process.send_signal(signal.SIGINT)
    assert "Traceback" not in own.read()
    assert own.process.wait(60) == 130
    assert own.process.stdout.read() == b""
