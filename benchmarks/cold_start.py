"""What a whole `kvjax generate` process costs with nothing compiled, and the next ones.

    python benchmarks/cold_start.py --model FOLDER --prompt-file text.txt --out \\
        benchmarks/results/cold_start_smollm2.json

For each method: a process with an empty folder of compiled code, a second one, and a third one with
another `--max-new` and `--temperature`. `beyond_cpu_s` is by how many CPU seconds, of all threads,
the first process exceeds the second: what compiling costs. `compile_s` is what the command says.
With `--rounds` each is run as often, in turns, and each figure is the least: what else the machine
does can only add to it.

`--before` is how an earlier kvjax is called, as `"PYTHON -P -m kvjax.cli"`, which then makes the
same new tokens in the same rounds. `same_text` says whether they are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from common import save, write

METHODS = (
    "full", "snapkv", "h2o", "quest", "chelsea", "kvmerger", "kvcrush(snapkv)", "clusterkv",
    "spindlekv",
)  # fmt: skip
NEW_TOKENS = 64
OTHER = ["--max-new", "48", "--temperature", "0.7"]
COMMAND = [sys.executable, "-P", "-m", "kvjax"]
FIGURES = ("compile_s", "ttft_s", "tpot_s", "cache_bytes")


def process(kvjax: list[str], args: list[str], cache: str) -> tuple[dict[str, float], str]:
    """CPU seconds and figures of one process, and the text that it makes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "KVJAX_CACHE": cache}
    command = [*kvjax, "generate", *args, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    record = json.loads(done.stdout)
    found = {"cpu_s": cpu, **{name: record[name] for name in FIGURES}}
    return {name: round(value, 4) for name, value in found.items()}, record["text"]


def least(found: list[dict[str, float]]) -> dict[str, float]:
    """The least of each figure."""
    return {name: min(one[name] for one in found) for name in found[0]}


def measure(method: str, args: argparse.Namespace) -> dict[str, object]:
    """A row of the result."""
    given = ["--model", args.model, "--prompt-file", args.prompt_file]
    given += ["--method", method, "--budget", args.budget]
    usual = [*given, "--max-new", str(NEW_TOKENS)]
    found: dict[str, list[dict[str, float]]] = {}
    same = True
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name in ("first", "second"):
                figures, text = process(COMMAND, [*usual, "--raw"], cache)
                found.setdefault(name, []).append(figures)
            figures, _ = process(COMMAND, [*given, *OTHER, "--raw"], cache)
            found.setdefault("third", []).append(figures)
        if args.before is not None:
            figures, earlier = process(shlex.split(args.before), usual, "")
            found.setdefault("before", []).append(figures)
            same &= earlier == text
    processes = {name: least(rows) for name, rows in found.items()}
    row = {"method": method, **processes}
    row["beyond_cpu_s"] = round(processes["first"]["cpu_s"] - processes["second"]["cpu_s"], 2)
    if args.before is not None:
        row["same_text"] = same
        for name in ("ttft_s", "tpot_s"):
            own = min(processes[run][name] for run in ("first", "second"))
            row[f"{name[:-2]}_over_before"] = round(own / processes["before"][name], 3)
    return row


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--prompt-file", required=True)
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", metavar="COMMAND", help="how to call an earlier kvjax")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    shape = {
        "model": Path(args.model).name, "budget": args.budget, "max_new": NEW_TOKENS,
        "rounds": args.rounds,
    }  # fmt: skip
    result = {"benchmark": "cold_start", "shape": shape, "rows": rows}
    for method in args.methods:
        rows.append(measure(method, args))
        save(args.out, result)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
