"""Standard streams that are closed, full or no streams to write to: one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.cli.arguments import COMMANDS
from kvjax.cli.main import main
from tests.cli.commands import one_line

ROOT = Path(__file__).parents[2]
posix = pytest.mark.skipif(os.name != "posix", reason="a shell of POSIX")


@pytest.mark.parametrize("command", [*COMMANDS, "--help", "--version", "nope"])
def test_standard_output_is_closed(capsys, monkeypatch, no_weights, command):
    monkeypatch.setattr("sys.stdout", None)
    assert main([command]) == 2
    assert one_line(capsys.readouterr().err) == "kvjax: error: standard output is closed\n"


def test_standard_error_is_closed(capsys, monkeypatch):
    """Errors do not go to standard output in its place."""
    monkeypatch.setattr("sys.stderr", None)
    assert main(["methods", "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    monkeypatch.setattr("sys.stderr", None)
    assert main(["methods", "--frob"]) == 2
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdout", None)
    assert main(["methods"]) == 2
    assert capsys.readouterr().out == ""


@posix
@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">&-", 2, "standard output is closed"),
        ("1</dev/null", 2, "Bad file descriptor: standard output"),
        ("2>&-", 0, None),
        (">&- 2>&-", 2, None),
        ("<&- >&- 2>&-", 2, None),
        ("<&-", 0, None),
        pytest.param("--frob 2>/dev/full", 2, None, marks=pytest.mark.skipif(
            not Path("/dev/full").exists(), reason="no such device")),
    ],
)  # fmt: skip
def test_a_shell_redirects(redirected, code, said):
    line = f"{sys.executable} -m kvjax methods --json {redirected}"
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == code
    assert (said in one_line(done.stderr)) if said else done.stderr == ""


@posix
def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path):
    """Libraries write to these numbers."""
    script, file = tmp_path / "script.py", tmp_path / "file"
    script.write_text(f"""if True:
        import sys
        from kvjax.cli import methods_command
        from kvjax.cli.main import main

        def run(args):
            with open({str(file)!r}, "w") as file:
                file.write(str(file.fileno()))

        methods_command.run = run
        sys.argv = ["kvjax", "methods"]
        main()
    """)
    for closed in ("2>&-", "<&- 2>&-"):
        subprocess.run(["sh", "-c", f"{sys.executable} {script} {closed}"], cwd=ROOT, timeout=120)
        assert int(file.read_text()) > 2
