"""A document is read once and saved; questions about it are asked later."""

from __future__ import annotations

import contextlib
import io
import json
import shutil

import pytest
from rich.filesize import decimal

import kvjax
from kvjax.cli.main import main
from kvjax.cli.read_command import _print_document
from kvjax.cli.saved import Room, Saved, absolute_model
from kvjax.cli.sizes import Whole
from kvjax.cli.templates import Dialogue
from kvjax.generation.context_files import context_about
from kvjax.generation.continuation import TextDecoder, new_text
from kvjax.models import demo, from_pretrained, load_tokenizer
from tests.cli.commands import error, output
from tests.support.attending import same_arrays

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 4


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
    for answer, question in zip(asked["results"], questions, strict=True):
        ids = Dialogue(tokenizer).question(question)
        result = kvjax.generate(model, [tokens + ids], max_new_tokens=20)
        assert answer["question"] == question and answer["prompt_tokens"] == len(ids)
        assert answer["new_tokens"] == len(result.tokens[0])
        assert answer["text"] == new_text(TextDecoder(tokenizer), ids, result.tokens[0])

    assert main(["ask", str(tmp_path / "out"), questions[1], "--max-new", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and asked["results"][1]["text"].startswith(out[:-1])
    assert " + 5 tokens" in err
    held = kvjax.load_context(tmp_path / "out", model).awake().occupancy
    assert f"before the questions: {decimal(held.kept_bytes)} for the document (" in err
    sums = [asked[name] for name in ("kept_bytes", "room_bytes")]
    assert sum(sums) == asked["cache_bytes"] and asked["kept_slots"] == len(tokens)
    assert before == {path: path.read_bytes() for path in before}, "the folder is untouched"

    said = error(capsys, "ask", tmp_path / "out", "Who?", "word " * 60)
    assert "question 2 has " in said and said.endswith("read a larger --max-questions\n")
    said = error(capsys, "ask", tmp_path / "out", "One", "--max-new", "21")
    assert "--max-new must be at most 20, got 21: give kvjax read a larger --max-new" in said


def test_three_questions_compile_nothing_after_four(capsys, compiled, read, tmp_path):
    """Draws do not depend on how many there are."""
    read("--max-questions", "32", "--max-new", "8")
    questions = "One day, Lily", "The dog said", "Lily saw", "Her mom"

    def ask(*questions):
        asked = output(capsys, "ask", tmp_path / "out", *questions, "--temperature", "1", "--json")
        return json.loads(asked)["results"]

    four = ask(*questions)
    compiled.clear()
    three = ask(*questions[:3])
    assert not compiled
    assert three == four[:3]
    assert main(["ask", str(tmp_path / "out"), *questions[:3], "--temperature", "1"]) == 0
    out, err = capsys.readouterr()
    assert [out.count(answer["text"]) > 0 for answer in three] == [True] * 3
    assert out.count("---") == 3 and f" + {sum(x['new_tokens'] for x in three)} tokens" in err


def test_what_is_kept_is_told(capsys, document, tinystories, tmp_path):
    args = ["read", document, "--out", tmp_path / "out", "--model", tinystories]
    said = output(capsys, *args, "--method", "streaming_llm", "--budget", "16")
    tokens = len(load_tokenizer(tinystories)(TEXT).input_ids)
    assert said.startswith(f"{tmp_path / 'out'}: {tokens} tokens with streaming_llm in ")
    first, second, third = said.splitlines()
    assert " at rest, " in first and first.endswith("% of the full cache in float32")
    assert second.startswith("16 slots per head; ")
    assert second.endswith(" while it answers, with room for questions and answers")
    assert third.endswith(f"or kvjax chat {tmp_path / 'out'}, goes on from it")


def test_what_is_told_of_a_full_codebook(capsys):
    row = {
        "prompt_tokens": 1234, "cache_bytes": 5 * 10**5, "full_cache_bytes": 10**6,
        "overflow": 0.125,
    }  # fmt: skip
    _print_document("book", row, "codebook")
    out, err = capsys.readouterr()
    assert out == (
        "book: 1,234 tokens with codebook in 500.0 kB at rest, 50.0% of the full cache in float32\n"
    )
    assert err.startswith(
        "up to 12.5% of the vectors found no entry near enough in a full codebook"
    )
    _print_document("book", {**row, "overflow": 0.0}, "codebook")
    assert capsys.readouterr() == (out, "")


def test_bytes_choose_a_method(capsys, document, tinystories, tmp_path):
    args = ["read", document, "--out", tmp_path / "out", "--model", tinystories]
    record = json.loads(output(capsys, *args, "--bytes", "0.7", "--json"))
    assert record["method"] == kvjax.unparse(kvjax.smallest(0.7, head_dim=16))
    for more in (("--method", "h2o"), ("--budget", "0.2")):
        assert "give one or the other" in error(capsys, *args, "--bytes", "0.5", *more)
    assert "share must lie in (0, 1], got 2.0" in error(capsys, *args, "--bytes", "2")


@pytest.mark.slow
def test_questions_have_the_room_of_the_method(capsys, document, tinystories, tmp_path):
    """Unless more is asked for, which is refused before the document is read."""
    args = ["read", document, "--out", tmp_path / "out", "--model", tinystories]
    method = ["--method", "kvzip(room=24)", "--max-new", "4"]
    said = error(capsys, *args, *method, "--max-questions", "25")
    assert "--max-questions must be at most 24, which KVzip(" in said and ", got 25" in said
    assert not (tmp_path / "out").exists()
    said = error(capsys, *args, "--method", "kvzip(room=0)")
    assert "--max-questions must be at most 0, which KVzip(" in said

    assert main([str(arg) for arg in (*args, *method, "--json")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["max_questions"] == 24
    assert "a question may have 24 tokens, which KVzip(" in err
    asked = json.loads(output(capsys, "ask", tmp_path / "out", "word " * 10, "--json"))
    (answer,) = asked["results"]
    assert 16 < answer["prompt_tokens"] <= 24
    record = json.loads(output(capsys, *args, *method, "--max-questions", "9", "--json"))
    assert record["max_questions"] == 9


@pytest.mark.slow
def test_room_is_no_more_than_was_asked_for(read, tmp_path):
    """A method with room for 256 tokens of questions gets what may be asked, and no padding."""
    sizes = "--max-questions", "64", "--max-new", "8"
    record = read("--method", "kvzip", "--budget", "20", *sizes)
    assert (record["kept_slots"], record["room_slots"]) == (20, 0)
    assert record["kept_bytes"] + record["room_bytes"] == record["cache_bytes"]
    assert context_about(tmp_path / "out")["method"] == "kvzip"
    few = "--max-questions", "16", "--max-new", "8"
    fewer = read(*few, "--method", "kvzip(room=16)", "--budget", "20")
    assert fewer["cache_bytes"] == record["cache_bytes"]
    slot, left = divmod(record["awake_bytes"] - fewer["awake_bytes"], 64 - 16)
    assert slot > 0 and not left
    # A slot that is awake has masses and pins, too.
    assert 0 <= fewer["awake_bytes"] - fewer["cache_bytes"] - (16 + 8) * slot < 20 * slot
    record = read("--max-questions", "3", "--max-new", "8")
    assert record["kept_slots"] == record["prompt_tokens"]


@pytest.mark.slow
def test_a_form_that_takes_no_more_and_loses_nothing_is_named(capsys, read, document, tinystories):
    """As of a text so short that a share of it and the room are nearly all of it."""
    record = read("--method", "kvzip", "--budget", "0.5")
    whole = record["whole"]
    assert whole["method"] == "quantize" and whole["cache_bytes"] < record["awake_bytes"]
    assert read("--method", "quantize")["awake_bytes"] == whole["cache_bytes"]
    assert read("--method", "full")["whole"] is None
    assert read("--method", "h2o", "--budget", "16")["whole"] is None
    args = ["read", document, "--out", document.parent / "out", "--model", tinystories]
    assert main([str(arg) for arg in (*args, "--method", "kvzip", "--budget", "0.5")]) == 0
    err = capsys.readouterr().err
    assert "kvzip and its room take no fewer bytes than quantize, which keeps every " in err
    assert err.count("\n") == 1


def test_an_earlier_context_is_replaced(read, tmp_path):
    """What an interrupted read has left, too."""
    read()
    (tmp_path / "out" / "2.orbax-checkpoint-tmp" / "arrays.orbax-checkpoint-tmp").mkdir(
        parents=True
    )
    assert read("--method", "streaming_llm", "--budget", "16")["method"] == "streaming_llm"
    assert context_about(tmp_path / "out")["method"] == "streaming_llm"


def test_other_folders_are_refused(capsys, no_weights, document, tmp_path):
    out = tmp_path / "own"
    out.mkdir()
    (out / "letter.txt").write_text("a letter")
    assert f"{out} is in the way, and stays as it is" in error(
        capsys, "read", document, "--out", out
    )
    assert (out / "letter.txt").read_text() == "a letter"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(
    capsys, monkeypatch, no_weights, document
):
    out = document / "deep" / "own"
    said = f"cannot write to {out}: {document} is not a directory"
    assert said in error(capsys, "read", document, "--out", out)
    monkeypatch.setattr("os.access", lambda *_: False)
    said = f"no permission for {document.parent}"
    assert said in error(capsys, "read", document, "--out", document.parent / "own")


def test_contexts_of_other_programs(capsys, monkeypatch, no_weights, tmp_path):
    whole = {"model": None, "document": None, "method": "full", "budget": None, "raw": True}
    turns = {"system": None, "ended_by": [], "max_new": 8, "seed": 0}

    def said(about: dict) -> str:
        monkeypatch.setattr("kvjax.cli.saved.context_about", lambda _: about)
        return error(capsys, "ask", "somewhere", "why")

    lacking = "somewhere was not written by kvjax read or kvjax chat: it lacks budget, doc"
    assert lacking in said({"model": None})
    for damaged in (
        {"reading": {"read": 1}},
        {"conversation": turns},
        {"conversation": {**turns, "sampling": {"temperature": -1.0}}},
    ):
        assert "the description in somewhere is damaged: " in said(whole | damaged)
    moved = f"the model of somewhere is no longer at {tmp_path / 'moved'}: --model says where"
    assert moved in said({**whole, "model": str(tmp_path / "moved")})


def test_a_form_that_keeps_all_is_named_only_where_all_is_in_reach(tinystories):
    """A document beyond the model's 512 positions could not be kept as a whole."""
    model, few = from_pretrained(tinystories), kvjax.KVzip(0.1)
    assert Whole.instead_of_context(model, few, 100, 8).method == "quantize"
    moving = kvjax.StreamingLLM(64, reposition=True)
    assert Whole.instead_of_context(model, moving, 505, 8) is None


def test_which_model_a_context_has(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_model("model") == str(tmp_path / "model")
    assert absolute_model("owner/name") == "owner/name", "an id of the hub"
    assert absolute_model(None) is None, "the bundled one"
    for model in (str(tmp_path / "model"), "owner/name", None):
        saved = Saved(model, None, "full", None, raw=True)
        assert saved.model_name(None, "folder") == model
        assert saved.model_name("another", "folder") == "another"


def test_what_fits_into_the_room_of_a_conversation():
    for positions, written in ((None, 4), (100, 4), (10, 2), (8, 0)):
        room = Room(prompt=8, new=4, positions=positions)
        assert room.after([5] * 8) == written
        assert room.after([5] * 9) == 0


@pytest.mark.exhaustive  # the commands of README.md do nearly the same
def test_the_bundled_model_answers_about_a_document(capsys, tmp_path):
    bundled = demo.document()
    (tmp_path / "document.txt").write_text(bundled.text)
    args = ["read", tmp_path / "document.txt", "--out", tmp_path / "out", "--method", "full"]
    assert json.loads(output(capsys, *args, "--json"))["model"] == "bundled"
    args = ["ask", tmp_path / "out", bundled.question, "--max-new", "8", "--json"]
    (found,) = json.loads(output(capsys, *args))["results"]
    assert found["text"].strip().startswith(bundled.answer)


# Pieces


def test_pieces_give_one_context_however_often_it_is_stopped(
    capsys, read, tinystories, document, tmp_path, monkeypatch
):
    """Behind any piece, the last one too: the same command goes on from there."""
    options = "--method", "snapkv", "--budget", "24", "--max-questions", "32", "--piece", "16"
    record, out = read(*options), tmp_path / "out"
    tokens = record["prompt_tokens"]
    whole = kvjax.load_context(out, from_pretrained(tinystories))
    assert Saved.of(out).unfinished is None
    shutil.rmtree(out)

    save, saved = kvjax.save_context, []

    def then_stop(*args, **named):
        save(*args, **named)
        saved.append(int(args[1].length[0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(kvjax, "save_context", then_stop)
    args = "read", document, "--out", out, "--model", tinystories, *options
    for piece in range(1, tokens // 16 + 3):
        with contextlib.suppress(KeyboardInterrupt):
            main([str(arg) for arg in args])
        assert saved[-1] == min(16 * piece, tokens)
        if piece == 2:
            monkeypatch.setattr(kvjax, "save_context", save)
            assert main(["ask", str(out), "One day"]) == 0
            assert "out holds the first 32 of" in capsys.readouterr().err
            monkeypatch.setattr("sys.stdin", io.StringIO(""))
            assert main(["chat", str(out)]) == 0
            assert "out holds the first 32 of" in capsys.readouterr().err
            monkeypatch.setattr(kvjax, "save_context", then_stop)
    again = kvjax.load_context(out, from_pretrained(tinystories))
    same_arrays(whole, again)


@pytest.mark.parametrize("changed", [("--budget", "25"), ("--piece", "32"), ("--max-new", "9"), ()])
def test_another_command_begins_anew(read, document, tmp_path, monkeypatch, changed):
    options = ["--method", "snapkv", "--budget", "24", "--piece", "16"]
    save, saved = kvjax.save_context, []
    with monkeypatch.context() as patch:
        patch.setattr(kvjax, "save_context", lambda *args, **named: (save(*args, **named), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            read(*options)
    monkeypatch.setattr(
        kvjax, "save_context", lambda *args, **_: saved.append(int(args[1].length[0]))
    )
    if not changed:  # the same command of a version in which SnapKV's window is another
        monkeypatch.setattr(kvjax.SnapKV.__init__, "__defaults__", (8, 7, "max", "mean"))
    read(*options, *changed)
    assert saved[0] == (32 if "--piece" in changed else 16)


@pytest.mark.slow
def test_a_document_of_more_tokens_than_positions(capsys, read, document, tinystories, tmp_path):
    """Tokens have positions in the cache by one method; others are refused at once."""
    document.write_text(TEXT * 16)
    size = "--budget", "64", "--max-questions", "32", "--max-new", "8", "--piece", "128"
    args = "read", document, "--out", tmp_path / "out", "--model", tinystories, *size
    said = error(capsys, *args, "--method", "streaming_llm")
    assert "the model has 512 positions, got a prompt of " in said
    assert ": StreamingLLM(budget=64" in said and "streaming_llm(reposition=True)" in said
    assert not (tmp_path / "out").exists()
    record = read(*size, "--method", "streaming_llm(reposition=True)")
    assert record["prompt_tokens"] > 512 and record["kept_slots"] == 64
    asked = json.loads(output(capsys, "ask", tmp_path / "out", "One day", "--json"))
    assert asked["results"][0]["new_tokens"] == 8
