"""README.md from top to bottom on an empty machine, and the seconds that each step takes.

    python3.13 benchmarks/new_user.py --out benchmarks/results/new_user_python3.13.json

The Python that runs it is the new user's: it needs nothing but its standard library, `git` and
`bash`. The last commit is cloned into a temporary folder, where the home folder, the environment,
pip's cache and the folder of compiled code are empty. Blocks of commands run line by line as they
are printed, and so do the commands in sentences that install, read, ask or chat; the blocks of
Python run one after the other in one process. A step that fails ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(
    r"^```(?P<language>sh|python)\n(?P<block>.*?)^```"
    r"|`(?P<command>(?:kvjax (?:read|ask|chat) |pip install '\.\[(?:gguf|eval))[^`]+)`",
    flags=re.MULTILINE | re.DOTALL,
)
BOOK = "The harbour master kept a ledger of every ship. " * 80
TYPED = "Name a primary colour.\n/quit\n"  # into `kvjax chat`
TIMED = """
import json, sys, time
names, seconds = {"__name__": "__main__"}, []
for block in json.loads(sys.stdin.read()):
    start = time.perf_counter()
    exec(block, names)
    seconds.append(time.perf_counter() - start)
print("@" + json.dumps(seconds))
"""


def steps(readme: str) -> list[tuple[str, str]]:
    """Commands, and blocks of Python, in the order of the page."""
    found = []
    for match in STEP.finditer(readme):
        if match["language"] == "python":
            found.append(("python", match["block"]))
        else:
            lines = (match["block"] or match["command"]).splitlines()
            found += [("sh", line) for line in lines if line]
    return found


def run(command: list[str], folder: Path, environment: dict[str, str], given: str) -> str:
    """What a command prints, which is shown as well; RuntimeError if it fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment, input=given, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(done.stdout[-3000:], flush=True)
    if done.returncode:
        raise RuntimeError(f"{command[-1]} ended with {done.returncode}")
    return done.stdout


def new_user(home: Path, without: list[str]) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Versions, and the seconds of every step but those whose commands are left out."""
    folder = home / "kvjax"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    (folder / "book.txt").write_text(BOOK)
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("XDG_", "JAX_"))}
    python = Path(sys.executable).resolve()
    path = f"{folder / '.venv/bin'}:{home / 'bin'}:{kept['PATH']}"
    environment = {**kept, "HOME": str(home), "PATH": path}
    (home / "bin").mkdir()
    link = home / "bin" / "python3"
    link.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    link.chmod(0o755)
    rows, blocks = [], []
    for language, step in steps((folder / "README.md").read_text(encoding="utf-8")):
        if language == "python":
            blocks.append(step)
        elif step not in without:
            print(f"$ {step}", flush=True)
            start = time.perf_counter()
            run(["bash", "-euo", "pipefail", "-c", step], folder, environment, TYPED)
            rows.append({"command": step, "seconds": round(time.perf_counter() - start, 1)})
    own = str(folder / ".venv/bin/python")
    printed = run([own, "-c", TIMED], folder, environment, json.dumps(blocks))
    for number, seconds in enumerate(json.loads(printed.rpartition("@")[2]), 1):
        rows.append({"command": f"Python, block {number}", "seconds": round(seconds, 1)})
    ask = "import importlib.metadata as m; print(m.version('jax'))"
    jax = subprocess.run([own, "-c", ask], capture_output=True, text=True, check=True)
    return {"python": platform.python_version(), "jax": jax.stdout.strip()}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--without", metavar="COMMAND", action="append", default=[],
        help="a command that is left out, as .venv/bin/pytest")  # fmt: skip
    parser.add_argument("--out", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        versions, rows = new_user(Path(home), args.without)
    about = {"cores": os.cpu_count(), **versions}
    text = json.dumps({"environment": about, "benchmark": "new_user", "rows": rows}, indent=2)
    print(text)
    if args.out is not None:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
