"""Commands, and what they print."""

from __future__ import annotations

import io

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
