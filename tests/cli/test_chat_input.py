"""Lines of input for `kvjax chat`, of a terminal and of a pipe, and Ctrl-C before and within them.

`test_process.py` starts processes at terminals.
"""

from __future__ import annotations

import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvjax.cli.chat_input import LEAVING, Interrupts, interrupts_counted, lines
from tests.cli.commands import keys_typed


@pytest.fixture(autouse=True)
def handler():
    """Python's own handler of Ctrl-C, which the test finds and leaves."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler


@pytest.fixture
def typed(capsys, monkeypatch):
    """Types keys: returns lines, whether Ctrl-C ended them, and how often that was announced."""

    def run(keys: str, interrupts: Interrupts) -> tuple[list[str], bool, int]:
        said, left = [], False
        with keys_typed(monkeypatch, keys):
            try:
                for line in lines(interrupts):
                    said.append(line)
            except KeyboardInterrupt:
                left = True
        return said, left, capsys.readouterr().err.count(LEAVING)

    return run


@pytest.mark.parametrize(
    ("keys", "said", "left", "announced"),
    [
        ("one\rtwo\r\x04", ["one", "two"], False, 0),
        ("\x1b[200~First.\r\rSecond: é.\r\x1b[201~\r\x04", ["First.\n\nSecond: é."], False, 0),
        ("half\x03whole\r\x04", ["whole"], False, 0),
        ("half\x03\x03\x03", [], True, 1),
        ("\x03\x03", [], True, 1),
        ("\x03a\x7f\x03went on\r\x04", ["went on"], False, 2),
        ("\x03went on\r\x03\x03", ["went on"], True, 2),
    ],
    ids=[
        "lines", "pasted", "line cleared", "cleared, then left", "left", "typed between",
        "line between",
    ],
)  # fmt: skip
def test_keys_at_a_terminal(typed, keys, said, left, announced):
    assert typed(keys, Interrupts()) == (said, left, announced)


def test_a_press_after_the_last_answer_is_the_first_of_two(typed):
    interrupts = Interrupts()
    interrupts.press()
    assert typed("\x03", interrupts) == ([], True, 1)


def test_presses_are_taken_once_and_handled_again_then(capfd, handler):
    with interrupts_counted() as interrupts:
        assert not interrupts.came() and not interrupts.take()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.came() and signal.getsignal(signal.SIGINT) == interrupts.press
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert interrupts.take() and not interrupts.came()
        assert signal.getsignal(signal.SIGINT) == interrupts.press
        assert not interrupts.take()
    assert signal.getsignal(signal.SIGINT) is handler
    assert capfd.readouterr().err == f"\n{LEAVING}\n"


def test_a_press_that_answers_the_announcement_ends_the_process(monkeypatch):
    """However soon it comes: a handler that ran once more would lose it."""
    handlers = []
    monkeypatch.setattr(os, "write", lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
    with interrupts_counted() as interrupts:
        interrupts.press()
        interrupts.press()
    assert handlers == [signal.SIG_DFL]


# Without a terminal


def test_lines_of_a_file(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo"))
    assert list(lines(Interrupts())) == ["one", "", "two"]


def test_an_interrupt_while_a_pipe_is_read_leaves(monkeypatch):
    class Pipe(io.StringIO):
        def readline(self, size=-1):
            signal.raise_signal(signal.SIGINT)
            return "never said\n"

    monkeypatch.setattr("sys.stdin", Pipe())
    with interrupts_counted() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            next(lines(interrupts))
        assert not interrupts.came(), "it asked for no end of an answer"
        assert signal.getsignal(signal.SIGINT) == interrupts.press


def test_input_that_is_no_text(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(ValueError, match="standard input is not UTF-8 text"):
        next(lines(Interrupts()))


def test_no_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        next(lines(Interrupts()))


def test_presses_that_the_parent_process_ignores_stay_ignored(monkeypatch, handler):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_counted() as interrupts:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert list(lines(interrupts)) == ["one"]
        signal.raise_signal(signal.SIGINT)
        assert not interrupts.came()
    assert signal.signal(signal.SIGINT, handler) is signal.SIG_IGN


def test_lines_are_read_in_any_thread(monkeypatch):
    """Python lets the main thread alone handle signals."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: list(lines(Interrupts()))).result() == ["one", "two"]
