"""Commands at a terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The terminal sends a Ctrl-C to the processes that it is the controlling one of.
_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A process of Python at a terminal of its own.

    Args:
      command: the arguments of Python.
      env: variables besides those of this process.
    """

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
        """What a user types, and what terminals send for it."""
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """What is shown from the last call on until the text has come."""
        end = time.monotonic() + seconds
        while text not in self._shown:
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} has not come: {self._shown!r}"
            self._shown += self._read()
        before, found, self._shown = self._shown.partition(text)
        return before + found

    def interrupt_until(self, text: str, seconds: float = 120, again: float = 10) -> None:
        """Types Ctrl-C, and once more every `again` seconds, until the text is shown.

        Python's readline notices a Ctrl-C only while it waits for a key. One that comes while it
        still handles the key before is noticed with the next key, or the next Ctrl-C.
        """
        end = time.monotonic() + seconds
        while True:
            self.type("\x03")
            try:
                self.wait_for(text, again)
                return
            except AssertionError:
                if time.monotonic() > end:
                    raise

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """The exit code, and what is shown from the last call on."""
        shown = self._shown
        while piece := self._read():
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

    def _read(self) -> str:
        try:
            return os.read(self._ours, 2**16).decode(errors="replace")
        except OSError:  # the process has ended
            return ""
