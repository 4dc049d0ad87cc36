"""What every method does to SmolLM2-135M-Instruct: the commands behind the README's table.

    python benchmarks/smollm2.py --model FOLDER --text essays.txt --wikitext wikitext2.test.txt \\
        --longbench FOLDER --out benchmarks/results/smollm2

Runs `kvjax eval` several times, each into a folder of its own below `--out`, and writes the
commands with the seconds that they took to `commands.json`. It can be interrupted and called again
at any time: finished cells are kept, and seconds add up. `--only NAME` runs one of the parts. The
texts are Paul Graham's essays as RULER has them, the test set of WikiText-2, and LongBench's files.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import environment

from kvjax.evaluation.cells.grid import ALL_METHODS
from kvjax.files import write_whole

METHODS = (
    *ALL_METHODS, "quantize", "quantize(bits=4)", "chain(quantize, clusterkv)",
    "chain(quantize(bits=4), clusterkv)",
)  # fmt: skip
SIX = ("streaming_llm", "h2o", "snapkv", "kvmerger", "clusterkv", "quest")
BUDGETS = "0.1,0.2,0.5"
# The memory of one prompt is kept for the next: a third of the time would go into page faults.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
}  # fmt: skip
NEEDLES = ("niah_single_2", "niah_multikey_1")


def parts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a part → arguments of `kvjax eval` but the model's and the folder's."""
    every, six = ",".join(METHODS), ",".join(SIX)
    essays, wiki = ["--text", args.text], ["--text", args.wikitext]

    def run(tasks: Sequence[str], methods: str, lengths: str, cases: int, *rest: str) -> list[str]:
        return [
            *tasks, "--method", methods, "--budget", BUDGETS, "--lengths", lengths,
            "--cases", str(cases), *rest,
        ]  # fmt: skip

    short, chat = ("--max-new", "16"), ("--max-new", "32", "--chat")
    listed = ("--max-new", "64", "--chat")
    summary = ("--max-new", "128", "--data", args.longbench)
    return {
        "needles": run(NEEDLES, every, "2048", 100, *essays, *short),
        "perplexity": run(("perplexity", "attention"), every, "2048", 30, *wiki),
        "variables": run(("vt",), every, "2048", 50, *essays, *chat),
        "lengths_needles": run(NEEDLES, six, "1024,4096", 20, *essays, *short),
        "lengths_perplexity": run(("perplexity",), six, "1024,4096", 20, *wiki),
        # The full cache is at the floor of these two, so that no method can be ranked by them.
        "words": run(("cwe",), every, "2048", 50, *essays, *listed),
        "multi_news": run(("multi_news",), every, "2048", 50, *wiki, *summary),
    }


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--text", required=True, help="what RULER's needles are hidden in")
    parser.add_argument("--wikitext", required=True, help="text of the perplexity")
    parser.add_argument("--longbench", required=True, help="folder with multi_news.jsonl")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="parts to run")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    out, every = Path(args.out), parts(args)
    for name in args.only or every:
        if name not in every:
            parser.error(f"the parts are {', '.join(every)}, got {name}")
        out.mkdir(parents=True, exist_ok=True)
        words = ["eval", *every[name], "--out", str(out / name)]
        run_command(out / "commands.json", name, words, args.model)


def run_command(path: Path, name: str, words: Sequence[str], model: str) -> None:
    """Runs a command of kvjax for a model, and notes it without paths of a machine.

    Args:
      path: where all seconds that it has taken so far are noted.
      name: of the part that it is.
      words: its arguments but the model's, the command first.
    """
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kvjax.cli.main", *words, "--model", model],
        env={**os.environ, **ALLOCATOR},
    )  # fmt: skip
    noted = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    before = noted["parts"].get(name, {"seconds": 0.0})["seconds"]
    shown = [Path(word).name if os.path.exists(word) else word for word in (*words, model)]
    command = shlex.join(["kvjax", *shown[:-1], "--model", shown[-1]])
    seconds = round(before + time.monotonic() - start, 1)
    noted["parts"][name] = {"command": command, "seconds": seconds}
    noted["environment"] = environment()
    write_whole(path, json.dumps(noted, indent=1) + "\n")
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
