"""Commands, and what they print."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from rich.console import Console

from kvjax.cli.main import main


def output(capsys, *args) -> str:
    assert main([str(arg) for arg in args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def error(capsys, *args) -> str:
    """The one line that a command fails with."""
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return one_line(err)


def one_line(err: str) -> str:
    assert err.startswith("kvjax: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


def console(width: int = 100) -> Console:
    """A terminal whose text can be read afterwards."""
    return Console(width=width, record=True, highlight=False, file=io.StringIO())


class _Keyboard(io.StringIO):
    """Standard input at a terminal, whose keys come another way."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def keys_typed(monkeypatch: pytest.MonkeyPatch, keys: str) -> Iterator[None]:
    """Lets the block find a terminal at which these keys were typed."""
    monkeypatch.setattr("sys.stdin", _Keyboard())
    with create_pipe_input() as keyboard, create_app_session(input=keyboard):
        keyboard.send_text(keys)
        yield
