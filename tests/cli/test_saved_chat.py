"""Conversations that begin from a document of `kvjax read`, or go on from where they were saved."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.cli.templates import Dialogue
from kvjax.generation.context_files import context_about
from kvjax.generation.continuation import TextDecoder, new_text
from kvjax.models import from_pretrained, load_tokenizer
from tests.cli.commands import error, output
from tests.support.cases import CASES
from tests.support.marks import some_slow

TEXT = "Once upon a time there was a girl named Lily. She had a red ball and a big dog. " * 4
SAID = " Then Lily", " The dog", " One day"


@pytest.fixture
def chat(capsys, monkeypatch):
    """Says lines to a conversation, and returns what is printed."""

    def run(*lines: object, options: tuple = ()) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", *map(str, options)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def new(tinystories):
    """Options of a new conversation."""
    return "--model", tinystories, "--max-new", "6"


@pytest.fixture
def book(capsys, tinystories, tmp_path):
    """Reads the document, and returns the folder."""

    def run(method: str = "full", *more) -> Path:
        document, out = tmp_path / "document.txt", tmp_path / "book"
        document.write_text(TEXT)
        args = ["read", document, "--out", out, "--model", tinystories, "--method", method, *more]
        assert main([*map(str, args)]) == 0
        capsys.readouterr()
        return out

    return run


def test_what_a_document_takes_before_the_first_turn_is_said_to_be_at_rest(chat, book):
    out, err = chat("/bytes", SAID[0], "/bytes", options=(book(),))
    first, *_, last = [line for line in (err + out).splitlines() if "; the cache takes " in line]
    assert " at rest, " in first and " at rest, " not in last


def written(name: str) -> str | None:
    """The text of a case; None if it has none."""
    try:
        text = kvjax.unparse(CASES[name])
        kvjax.parse(text)
    except ValueError:
        return None
    return text.replace("room=4", "room=64")  # in which a turn fits


METHODS = {name: text for name in CASES if (text := written(name)) is not None}


def test_most_cases_can_be_written():
    assert len(METHODS) > 35


# Cases that save different kinds of caches; the others run before a release.
SAVED = {"kvmerger", "clusterkv_offload", "snapkv_quantize_channel"}


@pytest.mark.parametrize("name", some_slow(METHODS, "quantize", exhaustive={*METHODS} - SAVED))
def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(chat, new, tmp_path, name):
    options = *new, "--method", METHODS[name], "--max-prompt", "64"
    whole = chat("Once upon a time", *SAID, "/bytes", options=options)[0]
    chat("Once upon a time", SAID[0], f"/save {tmp_path / 'talk'}", options=options)
    rest = chat(*SAID[1:], "/bytes", options=(tmp_path / "talk",))[0]
    assert rest.count("\n") >= 3 and whole.endswith(rest)


@pytest.mark.parametrize("name", some_slow(METHODS, "kvzip", exhaustive={*METHODS} - {"clusterkv"}))
def test_a_document_is_talked_about(chat, book, tmp_path, name):
    folder = book(METHODS[name])
    whole = chat(*SAID, "/bytes", options=(folder, "--max-new", "6"))[0]
    chat(*SAID[:2], f"/save {tmp_path / 'talk'}", options=(folder, "--max-new", "6"))
    rest = chat(SAID[2], "/bytes", options=(tmp_path / "talk",))[0]
    assert rest.count("\n") >= 2 and whole.endswith(rest)


def test_turns_after_a_document_are_those_of_ask_and_of_a_chat(chat, book, tinystories):
    folder = book("full")
    tokenizer, model = load_tokenizer(tinystories), from_pretrained(tinystories)
    dialogue, decode = Dialogue(tokenizer), TextDecoder(tokenizer)
    tokens, answers = dialogue.document(TEXT), []
    for number, text in enumerate(SAID):
        tokens += dialogue.turn(text, ()) if number else dialogue.question(text)
        result = kvjax.generate(model, [tokens], max_new_tokens=6)
        answers.append(new_text(decode, tokens, result.tokens[0]))
        tokens += result.tokens[0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    out, err = chat(*SAID, "/reset", SAID[0], options=(folder, "--max-new", "6"))
    assert out.splitlines() == [*answers, answers[0]]
    assert before == {path: path.read_bytes() for path in before}, "the document stays as it is"
    assert err.startswith(f"{folder}: ") and "room for 256 more tokens and 128 of answers" in err


@pytest.mark.slow
def test_choices_go_on_as_they_were_made(chat, new, tmp_path):
    """Draws have the seed and the temperature of before, unless others are given."""
    draws = "--temperature", "1.5", "--seed", "7", "--max-new", "9"
    whole = chat("Once upon a time", *SAID[:2], options=(*new, *draws))[0].splitlines()
    chat("Once upon a time", f"/save {tmp_path / 'talk'}", options=(*new, *draws))
    assert chat(*SAID[:2], options=(tmp_path / "talk",))[0].splitlines() == whole[1:]
    other = chat(SAID[0], options=(tmp_path / "talk", "--seed", "8"))[0].splitlines()
    assert other != whole[1:2]


def test_the_end_of_the_answer_before_is_known(chat, broken_copy, tmp_path):
    """A turn behind an answer that ended by itself begins where the template goes on."""
    (broken_copy / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
        "{{ '' if loop.last else '</s>' }}{% endfor %}"
    )
    for most in ("200", "4"):
        options = "--model", broken_copy, "--method", "full", "--max-new", most
        options = *options, "--system", "Be brief."
        folder = tmp_path / most
        whole = chat("Once upon a time", "Then", "/bytes", options=options)[0]
        chat("Once upon a time", f"/save {folder}", options=options)
        assert whole.endswith(chat("Then", "/bytes", options=(folder,))[0])
        ended_by = context_about(folder)["conversation"]["ended_by"]
        assert ended_by == ([2] if most == "200" else [])


def test_where_a_conversation_is_saved(chat, new, book, tmp_path):
    """By itself in its own folder; no other context and no file of others is replaced."""
    talk, document = tmp_path / "talk", book("full")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("a letter")
    _, err = chat(
        "/save", "Once upon a time", "/save", f"/save {document}", f"/save {tmp_path / 'letters'}",
        f"/save {talk}", SAID[0], "/save", "/reset", SAID[0], "/save", options=new,
    )  # fmt: skip
    said = [line for line in err.splitlines() if "cut" not in line]
    assert said == [
        "there is nothing to save yet",
        "/save needs the name of a folder",
        f"{document} holds another context, and stays as it is",
        f"{tmp_path / 'letters'} is in the way, and stays as it is: {tmp_path / 'letters'} is not "
        "the folder of a context: it holds letter.txt",
        *[f"saved: kvjax chat {talk} goes on from here"] * 2,
        "/save needs the name of a folder",
    ]
    held = chat("/bytes", options=(talk,))[0]
    assert chat(SAID[1], "/save", "/reset", "/bytes", options=(talk,))[0].splitlines()[1:] != [held]
    assert "needs the name" in chat("/save", options=(document,))[1], "documents stay as they are"


def test_what_a_context_has_decided(capsys, no_weights, tmp_path):
    said = error(capsys, "chat", tmp_path, "--method", "h2o", "--max-prompt", "64")
    assert "takes no --method and no --max-prompt, since it goes on as it began" in said
    assert f"{tmp_path} is not the folder of a context" in error(capsys, "chat", tmp_path)


def test_a_conversation_that_is_full(chat, book):
    folder = book("full", "--max-questions", "8", "--max-new", "8")
    out, err = chat("Lily", "The dog", "/bytes", options=(folder,))
    assert out.count("\n") == 2
    assert "the conversation is full: " in err and "goes back to what" in err
    assert err.endswith("kvjax read makes more room by --max-questions and --max-new\n")


def test_positions_are_room_too(chat, tinystories, tmp_path):
    """A context of kvjax.read whose sizes go beyond the model's positions."""
    model, tokenizer = from_pretrained(tinystories), load_tokenizer(tinystories)
    positions = model.config.max_positions
    context = kvjax.read(model, [[5] * (positions - 20)], max_prompt=positions, max_new=64)
    about = {
        "model": str(tinystories), "document": "x", "method": "full", "budget": None, "raw": True,
    }  # fmt: skip
    kvjax.save_context(tmp_path / "own", context, model=model, tokenizer=tokenizer, about=about)
    out, err = chat("Lily", " one two" * 9, options=(tmp_path / "own",))
    assert out.count("\n") == 1
    assert "room for 20 more tokens and 64 of answers, 20 of both by the model's positions" in err
    assert "the conversation is full: " in err


def test_a_saved_conversation_is_asked(capsys, chat, new, tmp_path):
    """Every question is its next turn."""
    talk = tmp_path / "talk"
    chat("Once upon a time", SAID[0], f"/save {talk}", options=new)
    answers = [chat(text, options=(talk,))[0].rstrip("\n") for text in SAID[1:]]
    asked = output(capsys, "ask", talk, *SAID[1:], "--json")
    assert [x["text"] for x in json.loads(asked)["results"]] == answers
