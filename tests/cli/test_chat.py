"""A conversation at the terminal: its history is one context, and it survives what goes wrong."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

import kvjax
from kvjax.cli.chat_command import HELP
from kvjax.cli.chat_input import LEAVING
from kvjax.cli.main import main
from kvjax.cli.templates import Dialogue
from kvjax.generation.continuation import TextDecoder, new_text
from kvjax.generation.generate import Stream
from kvjax.models import from_pretrained, load_tokenizer
from tests.cli.commands import keys_typed

CUT = "the answer was cut by --max-new\n"


@pytest.fixture
def chat(capsys, monkeypatch, tinystories):
    """Says lines to the model, and returns what is printed."""

    def run(*lines: str, options: tuple = (), model=tinystories) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        args = ["chat", "--model", model, "--method", "full", "--max-new", 12, *options]
        assert main([str(arg) for arg in args]) == 0
        return capsys.readouterr()

    return run


def test_each_turn_goes_on_from_what_was_said(chat, tinystories):
    said = "Once upon a time", " Then Lily", " The end"
    tokenizer, model = load_tokenizer(tinystories), from_pretrained(tinystories)
    dialogue, decode = Dialogue(tokenizer), TextDecoder(tokenizer)
    tokens: list[int] = []
    answers = []
    for text in said:
        tokens += dialogue.turn(text, ()) if tokens else dialogue.prompt(text)
        result = kvjax.generate(model, [tokens], max_new_tokens=12)
        answers.append(new_text(decode, tokens, result.tokens[0]))
        tokens += result.tokens[0]

    lines = said[0], "/bytes", *said[1:], "", "/reset", "/bytes", said[0]
    out, err = chat(*lines, options=("--seed", "7"))  # the likeliest tokens are no draws
    (held,) = re.findall(r"18 tokens; the cache takes .*", out)
    first, second, third = answers
    empty = "the cache holds nothing yet"
    assert out == "".join(f"{x}\n" for x in (first, held, second, third, empty, first))
    assert err == CUT * 4 and "100.0% of a full one" in held
    assert held.endswith("room for 250 more tokens and 244 of answers")
    assert " for what was said (18 slots per head) and " in held


def test_a_form_that_takes_no_more_and_loses_nothing_is_named(chat):
    options = ("--method", "kvzip", "--budget", "0.5")
    assert "kvzip and its room take no fewer bytes than quantize, which" in chat(options=options)[1]
    assert "no less" not in chat(options=("--method", "h2o", "--budget", "16"))[1]


def test_commands_of_the_conversation(chat):
    out, err = chat("/byte", " /quit ", "never said")
    assert out == ""
    assert err.startswith("/byte is not a command, ") and "; did you mean /bytes?\n" in err
    assert err.endswith(f"{HELP}\n") and len(HELP) <= 80 and len(LEAVING) <= 80
    assert chat() == ("", "")


def test_a_terminal_is_told_the_commands(capsys, monkeypatch, tinystories):
    with keys_typed(monkeypatch, "/bytes\r/quit\rnever said\r"):
        assert main(["chat", "--model", str(tinystories), "--method", "full"]) == 0
    out, err = capsys.readouterr()
    assert err == f"{HELP}\n" and "the cache holds nothing yet\n" in out


@pytest.mark.parametrize(
    "line", ["/etc/hosts maps names", "/usr/bin", "/tmp is full", "/quit now", " /tmp"]
)
def test_a_line_that_is_no_command_is_said(chat, line):
    out, err = chat(line)
    assert out and err == CUT


def test_what_does_not_fit_is_said_and_changes_nothing(chat):
    options = ("--max-prompt", "12")
    first, bytes_before, bytes_after, second = chat(
        "Once upon a time", "/bytes", "one two three " * 20, "/bytes", "/reset", "Once upon a time",
        options=options,
    )[0].splitlines()  # fmt: skip
    assert bytes_before == bytes_after and first == second
    err = chat("Once upon a time", "one two three " * 20, options=options)[1].removeprefix(CUT)
    assert err.startswith("the conversation is full: ") and err.count("\n") == 1
    assert "room for 58 more tokens and 0 of answers; /reset begins a new conversation, and" in err


def test_a_turn_without_room_is_refused_and_changes_nothing(chat):
    options = ("--method", "kvzip(room=8)", "--budget", "24")
    first, before, after, second = chat(
        "Once upon a time", "/bytes", "one two three " * 4, "/bytes", "Then", options=options,
    )[0].splitlines()  # fmt: skip
    expected = chat("Once upon a time", "Then", options=options)[0].splitlines()
    assert [first, second] == expected and before == after
    refused = chat("Once upon a time", "one two three " * 4, options=options)[1].splitlines()[-1]
    assert "at most 8 tokens to fit into the cache of KVzip(" in refused
    assert refused.endswith("in row 0")


def test_answers_have_room_too(chat):
    out, err = chat("Once upon a time", " a", "b", options=("--max-prompt", "16"))
    assert len(out.splitlines()) == 2, "the second answer takes what is left"
    assert err.splitlines()[:2] == [
        CUT.rstrip(),
        "the answer was cut: room for 57 more tokens and 0 of answers",
    ]
    assert "and 0 of answers; /reset begins" in err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["h2o", "every(snapkv(window=2), steps=4)"])
def test_a_share_is_one_of_what_the_conversation_has_room_for(chat, method):
    """A fifth of 256 tokens is 51, of which three turns need fewer."""
    said = "Once upon a time", " Then Lily", " The end"
    expected = chat(*said)[0]
    assert chat(*said, options=("--method", method, "--budget", "0.2"))[0] == expected
    few = chat(*said, options=("--method", method, "--budget", "6"))[0]
    assert few != expected, "a few slots answer alike: this shows nothing"


def test_a_turn_follows_the_end_token_that_came(chat, monkeypatch, broken_copy):
    """Behind an answer that the configuration's token ended comes what the template has there."""
    (broken_copy / "chat_template.jinja").write_text(
        "{{ bos_token }} {% for m in messages %}{{ m['content'] }}"
        "{{ '' if loop.last else '<unk>' }}{% endfor %}"
    )
    turns = []
    turn = Dialogue.turn

    def noted(self, text, ended_by):
        turns.append((tuple(ended_by), turn(self, text, ended_by)))
        return turns[-1][1]

    monkeypatch.setattr(Dialogue, "turn", noted)
    options = ("--max-new", "200")
    chat("Once upon a time", "Then", model=broken_copy, options=options)
    chat("Once upon a time", "Then", model=broken_copy, options=("--max-new", "4"))
    ended, cut = turns
    assert ended[0] == (2,) and cut[0] == ()
    assert ended[1] == cut[1]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_ends_the_answer_and_not_the_conversation(chat, monkeypatch):
    whole = chat("Once upon a time")[0]
    plain, count = Stream.__next__, iter(range(100))

    def next_and_interrupt(self):
        if next(count) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self)

    monkeypatch.setattr(Stream, "__next__", next_and_interrupt)
    handler = signal.getsignal(signal.SIGINT)
    first, held, second = chat("Once upon a time", "/bytes", " Then Lily")[0].splitlines()
    assert first and whole.startswith(first) and len(first) < len(whole.strip())
    assert int(held.split()[0]) < 18 and second
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_third_interrupt_ends_the_process():
    code = """if True:
        import os, signal
        from kvjax.cli.chat_input import interrupts_counted
        with interrupts_counted() as interrupts:
            for press in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                print(interrupts.came(), flush=True)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        -signal.SIGINT, "True\nTrue\n", f"\n{LEAVING}\n",
    )  # fmt: skip


@pytest.mark.slow
def test_a_chat_model_takes_part(chat, smollm2):
    said = "What is the capital of France?", "And of Italy?"
    out, _ = chat(*said, "/bytes", model=smollm2, options=("--method", "h2o", "--budget", "128"))
    assert "Paris" in out and "Rome" in out
    tokenizer = load_tokenizer(smollm2)
    assert json.dumps(out).count(tokenizer.eos_token) == 0
