"""A document is read once and saved; questions about it are asked later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import kvjax
from kvjax.cli import ask_command
from kvjax.cli.main import main
from kvjax.cli.templates import Dialogue
from kvjax.generation.continuation import decoder, new_text
from kvjax.models import demo, from_pretrained, load_tokenizer
from tests.cli.commands import error, output

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 4


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def read(capsys, tinystories, document, tmp_path):
    """Reads the document with the full cache, or as options say, and returns what is printed."""

    def run(*options) -> dict:
        args = ["read", document, "--out", tmp_path / "out", "--model", tinystories]
        return json.loads(output(capsys, *args, "--method", "full", *options, "--json"))

    return run


def test_questions_are_answered_as_after_the_document(capsys, read, tinystories, tmp_path):
    record = read("--max-questions", "32", "--max-new", "20")
    tokenizer = load_tokenizer(tinystories)
    tokens = tokenizer(TEXT).input_ids
    assert record["prompt_tokens"] == len(tokens) and record["raw"]
    assert record["cache_bytes"] == record["full_cache_bytes"] > 0
    assert record["method"] == "full" and record["max_new"] == 20

    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    questions = ["One day, Lily", "The dog said"]
    asked = json.loads(output(capsys, "ask", tmp_path / "out", *questions, "--json"))
    assert asked["model"] == tinystories.name and asked["method"] == "full"
    model = from_pretrained(tinystories)
    for found, question in zip(asked["results"], questions, strict=True):
        own = Dialogue(tokenizer).question(question)
        result = kvjax.generate(model, [tokens + own], max_new_tokens=20)
        assert found["question"] == question and found["prompt_tokens"] == len(own)
        assert found["new_tokens"] == len(result.tokens[0])
        assert found["text"] == new_text(decoder(tokenizer), own, result.tokens[0])

    assert main(["ask", str(tmp_path / "out"), questions[1], "--max-new", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and asked["results"][1]["text"].startswith(out[:-1])
    assert " + 5 tokens" in err
    assert before == {path: path.read_bytes() for path in before}, "the folder is untouched"

    said = error(capsys, "ask", tmp_path / "out", "word " * 60)
    assert "--max-questions" in said
    assert "--max-new" in error(capsys, "ask", tmp_path / "out", "One", "--max-new", "21")


def test_what_is_kept_is_told(capsys, document, tinystories, tmp_path):
    args = ["read", document, "--out", tmp_path / "out", "--model", tinystories]
    said = output(capsys, *args, "--method", "streaming_llm", "--budget", "16")
    tokens = len(load_tokenizer(tinystories)(TEXT).input_ids)
    assert said.startswith(f"{tmp_path / 'out'}: {tokens} tokens with streaming_llm in ")
    assert said.endswith("% of the full cache\n") and said.count("\n") == 1


def test_an_interrupted_read_is_replaced(read, tmp_path):
    step = tmp_path / "out" / "1.orbax-checkpoint-tmp"
    (step / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "out" / ".DS_Store").touch()
    assert read()["method"] == "full"
    assert not step.exists() and kvjax.context_about(tmp_path / "out")["method"] == "full"


KILLED = """
import os, signal, sys
from pathlib import Path
from kvjax.cli.main import main

moment, out = int(sys.argv[1]), Path(sys.argv[2])
states = set()


def stop(frame, event, arg):
    if "orbax" in frame.f_code.co_filename or "saving" in frame.f_code.co_filename:
        states.add(tuple(sorted(out.rglob("*"))))
        if len(states) > moment:
            os.kill(os.getpid(), signal.SIGKILL)


sys.setprofile(stop)
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_read_can_be_given_again(capsys, document, tinystories, tmp_path):
    """Killed when its folder has had 1, 4, ... different contents."""
    args = ["read", document, "--out", tmp_path / "out", "--model", tinystories, "--json"]
    args = [str(arg) for arg in args]
    for moment in (1, 4, 8, 12):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        line = [sys.executable, "-c", KILLED, str(moment), str(tmp_path / "out"), *args]
        done = subprocess.run(line, stdout=subprocess.DEVNULL, timeout=300)
        assert done.returncode == -signal.SIGKILL and (tmp_path / "out").is_dir()
        output(capsys, *args)
    output(capsys, "ask", tmp_path / "out", "Once", "--max-new", "1", "--json")


def test_a_context_that_is_replaced_while_it_is_loaded(capsys, monkeypatch, read, tmp_path):
    read()
    plain = ask_command.load_with_about

    def replaced(*args, **options):
        read("--method", "streaming_llm", "--budget", "16")
        return plain(*args, **options)

    monkeypatch.setattr(ask_command, "load_with_about", replaced)
    said = error(capsys, "ask", tmp_path / "out", "Once")
    assert said.endswith("out has been replaced meanwhile: ask again\n")


@pytest.mark.slow
def test_an_earlier_context_is_replaced(read, tmp_path):
    read()
    assert read("--method", "streaming_llm", "--budget", "16")["method"] == "streaming_llm"
    assert kvjax.context_about(tmp_path / "out")["method"] == "streaming_llm"


def test_other_folders_are_refused(capsys, no_weights, document, tmp_path):
    out = tmp_path / "own"
    for name in ("letter.txt", "2024"):
        out.mkdir()
        (out / name).write_text("a letter")
        said = error(capsys, "read", document, "--out", out)
        assert f"{out} is in the way, and stays as it is" in said
        assert (out / name).read_text() == "a letter"
        shutil.rmtree(out)
    out.write_text("a file")
    assert "is in the way" in error(capsys, "read", document, "--out", out)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["read", "no such file", "--out", "{}/a"], "cannot read no such file"),
        (["read", "{}/document.txt"], "--out"),
        (["read", "{}/document.txt", "--out", "{}/a", "--max-questions", "0"], "--max-questions"),
        (["read", "{}/document.txt", "--out", "{}/a", "--max-new", "99999"], "8448 positions"),
        (["read", "{}/document.txt", "--out", "{}/a", "--method", "nope"], "unknown method"),
        (["read", "{}/document.txt", "--out", "{}/a", "--chat"], "--chat needs a chat template"),
        (["ask", "{}/nothing", "why"], "nothing is no folder of a context"),
        (["ask", "{}", "why"], "is no folder of a context"),
        (["ask", "{}"], "QUESTION"),
        (["ask", "{}", "why", "--max-new", "0"], "--max-new must be at least 1"),
    ],
)
def test_errors_before_weights_are_loaded(capsys, no_weights, document, tmp_path, args, said):
    assert said in error(capsys, *(arg.replace("{}", str(tmp_path)) for arg in args))


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({}, "model is None"),
        ({"model": 3}, "model is 3"),
        (
            {"model": None, "document": "a", "method": "full", "budget": None, "raw": "yes"},
            "raw is 'yes'",
        ),
    ],
)
def test_contexts_of_other_programs(capsys, monkeypatch, no_weights, about, said):
    monkeypatch.setattr(kvjax, "context_about", lambda folder: about)
    found = error(capsys, "ask", "somewhere", "why")
    assert "somewhere was not written by kvjax read" in found and said in found


@pytest.mark.slow
def test_the_bundled_model_answers_about_a_document(capsys, tmp_path):
    bundled = demo.document()
    (tmp_path / "document.txt").write_text(bundled.text)
    args = ["read", tmp_path / "document.txt", "--out", tmp_path / "out", "--method", "full"]
    assert json.loads(output(capsys, *args, "--json"))["model"] == "bundled"
    args = ["ask", tmp_path / "out", bundled.question, "--max-new", "8", "--json"]
    (found,) = json.loads(output(capsys, *args))["results"]
    assert found["text"].strip().startswith(bundled.answer)


@pytest.mark.slow
def test_a_chat_model_answers_about_a_document(capsys, tmp_path, smollm2):
    text = "The ship left the harbour in the morning. " * 20
    (tmp_path / "document.txt").write_text(f"{text}The code of the blue whale is 7351.\n")
    args = ["read", tmp_path / "document.txt", "--out", tmp_path / "out", "--model", smollm2]
    record = json.loads(output(capsys, *args, "--method", "quest", "--budget", "0.5", "--json"))
    assert not record["raw"]
    questions = "What is the code of the blue whale?", "When did the ship leave?"
    args = ["ask", tmp_path / "out", *questions, "--max-new", "24", "--json"]
    first, second = json.loads(output(capsys, *args))["results"]
    assert "7351" in first["text"] and "morning" in second["text"]
