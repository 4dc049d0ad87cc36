"""The process of a command: its streams, Ctrl-C, progress at a terminal, what it imports."""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvjax.cli import arguments, generate_command
from kvjax.cli.chat_input import LEAVING
from kvjax.cli.main import main
from tests.cli.commands import one_line, output

ROOT = Path(__file__).parents[2]
posix = pytest.mark.skipif(os.name != "posix", reason="shells, signals and terminals of POSIX")
FULL_DISK = Path("/dev/full")
FULL = pytest.mark.skipif(not FULL_DISK.exists(), reason="no such device")


def test_version_and_help(capsys):
    assert output(capsys, "--version").startswith("kvjax ")
    assert output(capsys) == output(capsys, "--help")
    for name in arguments.COMMANDS:
        assert name in output(capsys, "--help")
        assert output(capsys, name, "--help").startswith(f"usage: kvjax {name}")
    for name in ("--model", "--prompts", "--stop", "--raw", "--budget", "--min-p", "--json"):
        assert name in output(capsys, "generate", "--help")


@posix
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--version <&- 2>&-", 0, None),
        ("--version 1</dev/null", 2, "Bad file descriptor"),
        ("--frob >&- 2>&-", 2, None),
        pytest.param("--version >/dev/full", 2, "No space left on device", marks=FULL),
        pytest.param("--frob 2>/dev/full", 2, None, marks=FULL),
    ],
)
def test_streams_that_cannot_be_written(line, code, said):
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    shell = ["sh", "-c", f"{sys.executable} -m kvjax {line}"]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == code
    assert (said in one_line(done.stderr)) if said else done.stderr == ""


def test_an_error_does_not_go_to_standard_output(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert main(["methods", "--frob"]) == 2
    assert capsys.readouterr().out == ""


@FULL
@pytest.mark.parametrize(
    ("stream", "args", "said"),
    [
        ("sys.stdout", ["--version"], "kvjax: error: No space left on device\n"),
        ("sys.stderr", ["--frob"], ""),
    ],
)
def test_a_full_disk(capsys, monkeypatch, stream, args, said):
    with FULL_DISK.open("w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(stream, full)
        assert main(args) == 2
        print("what is written later is lost", file=full)  # and raises no more
    assert capsys.readouterr() == ("", said)


@posix
def test_a_reader_that_is_gone(capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        assert main(["--version"]) == 1
        print("what is written later is lost", file=pipe)
    assert capsys.readouterr() == ("", "")


@posix
def test_a_closed_pipe():
    line = [sys.executable, "-m", "kvjax", "--version"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(line, cwd=ROOT, env=env, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_a_terminal_that_knows_ascii_only():
    done = subprocess.run(
        [sys.executable, "-m", "kvjax", "methods"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii()


def test_a_keyboard_interrupt_that_python_raised(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "run", interrupt)
    assert main(["generate"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def process(monkeypatch):
    """Puts back what the command sets for the whole process."""
    handler, thresholds = signal.getsignal(signal.SIGINT), gc.get_threshold()
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    monkeypatch.setattr("sys.argv", ["kvjax", "--version"])
    yield
    signal.signal(signal.SIGINT, handler)
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("before", "after"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
    ids=["python's", "ignored"],
)
def test_what_is_set_before_jax_is_imported(capsys, before, after):
    signal.signal(signal.SIGINT, before)
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "kvjax" / "__main__.py"), run_name="__main__")
    assert done.value.code == 0 and capsys.readouterr().out.startswith("kvjax ")
    assert signal.getsignal(signal.SIGINT) is after
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3" and gc.get_threshold()[0] == 100_000


@pytest.mark.usefixtures("process")
def test_the_module_of_the_command_is_a_command(capsys):
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "kvjax" / "cli" / "main.py"), run_name="__main__")
    assert done.value.code == 0 and capsys.readouterr().out.startswith("kvjax ")


@posix
@pytest.mark.parametrize(
    ("rounds", "ignored", "code", "said"),
    [(10**8, False, -signal.SIGINT, b""), (10**6, True, 0, b"done\n")],
    ids=["minutes", "ignored"],
)
def test_an_interrupt_while_no_python_runs(rounds, ignored, code, said):
    """As in a compiler: a handler of Python's would not be called before the code returns."""
    script = f"""if True:
        import hashlib, signal, sys
        from kvjax.__main__ import main
        from kvjax.cli import methods_command

        def run(args):
            print("started", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
            print("done")

        methods_command.run = run
        sys.argv = ["kvjax", "methods"]
        signal.signal(signal.SIGINT, signal.{"SIG_IGN" if ignored else "default_int_handler"})
        sys.exit(main())
    """
    line = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (said, b"")
    assert process.returncode == code


# Terminals

# The terminal sends a Ctrl-C to the processes that it is the controlling one of.
_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A process of Python at a terminal of its own, with further variables."""

    def __init__(self, *command: str, **env: str):
        import pty

        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CONTROLLED, *map(str, command)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
            env={**os.environ, "TERM": "xterm", **env},
        )  # fmt: skip
        os.close(theirs)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """What is shown from the last call on until the text has come."""
        end = time.monotonic() + seconds
        while text not in self._shown:
            assert self._ready(end), f"{text!r} has not come: {self._shown!r}"
            self._shown += self._read()
        before, found, self._shown = self._shown.partition(text)
        return before + found

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """The exit code, and what is shown from the last call on."""
        shown, end = self._shown, time.monotonic() + seconds
        while True:
            assert self._ready(end), f"it has not ended: {shown!r}"
            if not (piece := self._read()):
                break
            shown += piece
        code = self.process.wait(seconds)
        os.close(self._ours)
        self._ours = -1
        return code, shown

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        if self._ours >= 0:
            self.process.kill()
            self.end()

    def _ready(self, end: float) -> bool:
        """Whether something is shown, or the process ends, before a time."""
        return bool(select.select([self._ours], [], [], max(0, end - time.monotonic()))[0])

    def _read(self) -> str:
        try:
            return os.read(self._ours, 2**16).decode(errors="replace")
        except OSError:  # the process has ended
            return ""


SHORT_DOCUMENT = """if True:
    import sys
    from kvjax.models import demo
    demo.document = lambda: demo.Document("The sky is blue. " * 9, "The sky is", "blue")
    from kvjax.cli.main import main
    sys.exit(main())
"""


@posix
@pytest.mark.slow
def test_progress_at_a_terminal():
    shell = Terminal("-c", SHORT_DOCUMENT, "generate", "--max-new", "4", COLUMNS="120")
    code, shown = shell.end()
    assert code == 0
    for part in (
        "loading the bundled model",
        "compiling and running the prompt pass of layer 1 of 4 for full",
        "compiling the decode loop for snapkv",
    ):
        assert part in shown, shown
    assert "\x1b[?25l" not in shown, "the cursor is never hidden: Ctrl-C ends the process at once"
    args = "generate", "--prompt", "The", "--max-new", "1", "--json", "--method", "full"
    code, shown = Terminal("-c", SHORT_DOCUMENT, *args).end()
    assert code == 0 and json.loads(shown)["new_tokens"] == 1, "nothing but JSON"


@pytest.mark.parametrize("value", [None, "0"])
def test_the_compiler_is_silent_unless_it_is_asked(value):
    env = {name: x for name, x in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    env |= {} if value is None else {"TF_CPP_MIN_LOG_LEVEL": value}
    code = (
        "import os, sys, types\n"
        "class Main(types.ModuleType):\n"
        "    main = staticmethod(lambda: print(os.environ['TF_CPP_MIN_LOG_LEVEL']))\n"
        "for name in ('kvjax.cli', 'kvjax.cli.main'): sys.modules[name] = Main(name)\n"
        "from kvjax.__main__ import main; main()"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=env)
    assert (done.stdout.strip(), done.stderr) == (value or "3", "")


# Lines

TYPED = """
import signal, time
from kvjax.cli.chat_input import interrupts_counted, lines
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the command does
try:
    with interrupts_counted() as interrupts:
        for line in lines(interrupts):
            print("said", repr(line), flush=True)
            while line == "work" and not interrupts.came():
                time.sleep(0.01)
            while line == "for ever":
                time.sleep(0.01)
        print("done", flush=True)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.fixture
def terminal():
    """Starts processes at terminals."""
    made: list[Terminal] = []

    def start(*command: str, **env: str) -> Terminal:
        made.append(Terminal(*command, **env))
        return made[-1]

    yield start
    for one in made:
        one.kill()


@posix
def test_lines_that_are_pasted_together_are_one(terminal):
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
        shell.type("\x03")
        assert LEAVING not in shell.wait_for("> ")
    shell.type("whole\r")
    shell.wait_for("said 'whole'")


@posix
def test_two_interrupts_in_a_row_leave(terminal):
    shell = terminal("-c", TYPED)
    shell.wait_for("> ")
    shell.type("\x03")
    shell.wait_for(LEAVING)
    shell.wait_for("> ")
    shell.type("a")  # whatever is typed between two interrupts parts them
    shell.wait_for("a")
    shell.type("\x7f\x03")
    shell.wait_for(LEAVING)
    shell.wait_for("> ")
    shell.type("went on\r")
    shell.wait_for("said 'went on'")
    shell.wait_for("> ")
    shell.type("\x03")
    shell.wait_for(LEAVING)
    shell.wait_for("> ")
    shell.type("\x03")
    assert shell.end()[0] == 130


@posix
def test_no_interrupt_leaves_unannounced(terminal):
    """Wherever it comes: within an answer, behind it, or while it does not end."""
    shell = terminal("-c", TYPED)
    shell.wait_for("> ")
    shell.type("work\r")
    shell.wait_for("said 'work'")
    shell.type("\x03\x03")
    shell.wait_for(LEAVING)
    shell.wait_for("> ")
    shell.type("for ever\r")
    shell.wait_for("said 'for ever'")
    shell.type("\x03")
    time.sleep(0.2)  # the terminal takes two at once for one
    shell.type("\x03")
    shell.wait_for(LEAVING)
    shell.type("\x03")
    assert shell.end()[0] == -signal.SIGINT


@posix
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux, whose screen is looked at")
def test_a_long_text_is_shown_as_it_was_pasted(tmp_path):
    """More lines than the screen has, wider than it, and no line end behind the last one."""
    text = "\n".join(f"line {n} " + "of many words " * 9 for n in range(60)) + "\nthe end"
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "text").write_text(text)

    def tmux(*command: str) -> str:
        line = ["tmux", "-S", tmp_path / "socket", "-f", "/dev/null", *command]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def screen(last: str) -> str:
        end = time.monotonic() + 60
        while not (shown := tmux("capture-pane", "-p").rstrip()).endswith(last):
            assert time.monotonic() < end, shown
            time.sleep(0.1)
        return shown

    tmux("new-session", "-d", "-x", "100", "-y", "20", sys.executable, str(tmp_path / "typed.py"))
    try:
        screen(">")
        tmux("load-buffer", str(tmp_path / "text"))
        tmux("paste-buffer", "-p")
        shown = [line.rstrip() for line in screen("the end").splitlines()]
        wrapped = [
            line[at : at + 100].rstrip()
            for line in text.splitlines()
            for at in range(0, len(line), 100)
        ]
        assert shown == wrapped[-len(shown) :]
    finally:
        tmux("kill-server")
