"""A page of prose as a newcomer would ask about it, by the command line: bytes, answers, time.

    python benchmarks/newcomer.py --model qwen2.5-coder-0.5b-instruct.gguf --work build/newcomer \\
        --out benchmarks/results/newcomer_qwen.json

The document is the beginning of a page of this repository, at a commit at which it stays. For each
composition, `kvjax read` and `kvjax ask` are run as processes of their own, with their defaults but
for the length of answers. An answer is right if it has all words of `QUESTIONS`. The file is
written composition by composition, and a run that was stopped goes on.

- `read`: what `kvjax read --json` prints. `kept_bytes` and `room_bytes` add up to `cache_bytes`;
  `whole` is the stored form that it names because it keeps every token and takes no more.
- `answers`: what `kvjax ask` prints, and whether it is right.
- `read_processor_s`, `ask_processor_s`: seconds of the processor, opening the model, compiling and
  (once, before the first composition by head) the profile of the model's heads included. Code that
  is compiled stays in the folder `--work`, which is empty at first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Rows, parser_of

HOME = Path(__file__).resolve().parents[1]
PAGE, COMMIT, SIZE = "docs/guides/gpu.md", "65c2422", 6000  # bytes
NEW_TOKENS = 40
QUESTIONS = {
    "Which NVIDIA driver does cuda13 need?": ["580"],
    "Which compute capability must a CUDA GPU have to run Pallas kernels?": ["8.0"],
    "How many of the 172 tests of compiled kernels passed on the H200?": ["171"],
    "Which file decides the route for all kernels?": ["route.py"],
    "Which versions of JAX does kvjax run on?": ["0.10.2", "0.13"],
    "For which GPUs does make aot compile every kernel?": ["H200", "A100", "L4"],
    "For how long was an H200 there?": ["quarter of an hour"],
    "Which JAX is the only one for which jax-triton would serve today?": ["0.11"],
}
"""Questions, and the words of which all must stand in a right answer."""

METHODS = {
    "quantize": [],  # the default
    "by_head(kvzip)": ["--method", "by_head(kvzip)"],
    "quantize(bits=4)": ["--method", "quantize(bits=4)"],
    "by_head(chain(kvzip, quantize))": [
        "--method", "by_head(chain(kvzip, quantize))", "--budget", "0.5",
    ],
    "chain(quantize, clusterkv)": ["--method", "chain(quantize, clusterkv)", "--budget", "0.2"],
    "full": ["--method", "full"],
}  # fmt: skip
"""Compositions, and options of `kvjax read`."""


def run(command: Sequence[object], cache: Path) -> tuple[dict[str, Any], float]:
    """Runs kvjax; returns the object that it prints, and the seconds of the processor."""
    words = [sys.executable, "-m", "kvjax", *map(str, command), "--json"]
    environment = {**os.environ, "KVJAX_CACHE": str(cache)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"kvjax {command[0]} ended with {process.returncode}")
    return json.loads(text), usage.ru_utime + usage.ru_stime


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--work", required=True, help="folder of documents, caches and profiles")
    args = parser.parse_args()
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    show = ["git", "-C", HOME, "show", f"{COMMIT}:{PAGE}"]
    document = work / "document.txt"
    document.write_bytes(subprocess.run(show, check=True, stdout=subprocess.PIPE).stdout[:SIZE])
    about = {
        "model": Path(args.model).name, "document": f"the first {SIZE} bytes of {PAGE} at {COMMIT}",
        "max_new": NEW_TOKENS,
    }  # fmt: skip
    rows = Rows(args.out, about)
    for number, (method, options) in enumerate(METHODS.items()):
        if rows.has(method=method):
            continue
        folder = work / str(number)
        command = ["read", document, "--out", folder, "--model", args.model, *options]
        read, read_s = run(command, work / "cache")
        command = ["ask", folder, *QUESTIONS, "--max-new", NEW_TOKENS]
        asked, ask_s = run(command, work / "cache")
        answers = {
            row["question"]: {
                "text": row["text"],
                "right": all(word in row["text"] for word in QUESTIONS[row["question"]]),
            }
            for row in asked["results"]
        }
        read = {name: x for name, x in read.items() if name not in ("out", "model", "document")}
        rows.add(
            method=method, right=sum(row["right"] for row in answers.values()), read=read,
            answers=answers, read_processor_s=read_s, ask_processor_s=ask_s,
        )  # fmt: skip


if __name__ == "__main__":
    main()
