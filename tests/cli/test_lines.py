"""What is typed, pasted and interrupted at a terminal, and lines that come from elsewhere."""

from __future__ import annotations

import io
import os

import pytest

from kvjax.cli.lines import lines
from tests.cli.pseudo_terminal import Terminal

posix = pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
TYPED = """
import signal
from kvjax.cli.lines import lines
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the command does
try:
    for line in lines():
        print("said", repr(line), flush=True)
    print("done", flush=True)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.fixture
def terminal():
    """Starts processes at terminals."""
    pytest.importorskip("readline")
    made: list[Terminal] = []

    def start(*command: str, **env: str) -> Terminal:
        made.append(Terminal(*command, **env))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def needs_pasting() -> None:
    import readline

    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit knows no bracketed paste")


@posix
def test_lines_that_are_pasted_together_are_one(terminal):
    needs_pasting()
    shell = terminal("-c", TYPED)
    shell.wait_for("> ")
    shell.type("\x1b[200~First paragraph.\r\rSecond: é.\r\x1b[201~\r")
    shell.wait_for(r"said 'First paragraph.\n\nSecond: é.'")
    shell.type("one\rtwo\r")
    shell.wait_for("said 'one'")
    shell.wait_for("said 'two'")
    shell.wait_for("> ")  # before it the terminal itself takes a Ctrl-D
    shell.type("\x04")
    shell.wait_for("done")
    assert shell.end()[0] == 0


@posix
def test_an_interrupt_clears_the_line(terminal):
    shell = terminal("-c", TYPED)
    shell.wait_for("> ")
    for _ in range(2):
        shell.type("half a li")
        shell.wait_for("half a li")
        shell.interrupt_until("> ")
    shell.type("whole\r")
    shell.wait_for("said 'whole'")
    shell.wait_for("> ")
    shell.type("\x03")
    assert shell.end()[0] == 130


def test_lines_of_a_file(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo"))
    assert list(lines()) == ["one", "", "two"]


def test_no_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        next(lines())
