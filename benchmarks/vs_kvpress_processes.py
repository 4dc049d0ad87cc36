"""The processes of `vs_kvpress.py`: an environment with kvpress, and a worker of each framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("kvpress==0.5.5", "torch==2.13.0", "transformers==5.2.0")
SIDES = ("kvpress", "kvjax")
WORKER = Path(__file__).with_name("vs_kvpress_worker.py")


class Setting(NamedTuple):
    """What all rows share.

    Args:
      python: of each side.
      model: folder of a Hugging Face model.
      threads: of each side.
      rounds: timed calls of each side.
      new: tokens of a timed call.
      others: share of the cores that other processes may take in a timed call.
      compiled: folder of compiled programs.
    """

    python: dict[str, Path | str]
    model: str
    threads: int
    rounds: int
    new: int
    others: float
    compiled: Path

    def workers(self, methods: dict[str, str]) -> dict[str, Worker]:
        """A process of each side."""
        return {side: Worker(self.python[side], side, methods[side], self) for side in SIDES}


class Worker:
    """A process of one side."""

    def __init__(self, python: Path | str, side: str, method: str, setting: Setting) -> None:
        command = [python, WORKER, side, "--model", setting.model]
        command += ["--threads", str(setting.threads), "--method", method]
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(setting.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | compiled,
        )  # fmt: skip
        self.pid = self._process.pid

    def ask(self, what: str, **request: object) -> dict[str, Any]:
        """The answer to a request."""
        self._process.stdin.write(json.dumps({"do": what, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a process ended, see its message above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()


def make_environment(folder: Path) -> Path:
    """An environment with kvpress; returns its Python. What is there already stays."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python
