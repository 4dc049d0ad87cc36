"""What a whole `kvjax generate` process costs with nothing compiled, and the next ones.

    python benchmarks/cold_start.py --model FOLDER --prompt-file text.txt --out \\
        benchmarks/results/cold_start_smollm2.json

For each method: a process with an empty folder of compiled code, a second one, and a third one with
another `--max-new` and `--temperature`. `beyond_cpu_s` is by how many CPU seconds, of all threads,
the first process exceeds the second: what compiling costs. `compile_s` is what the command says.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import save, write

METHODS = (
    "full", "snapkv", "h2o", "quest", "chelsea", "kvmerger", "kvcrush(snapkv)", "clusterkv",
    "spindlekv",
)  # fmt: skip
COMMAND = [sys.executable, "-m", "kvjax_command", "generate"]
FIGURES = ("compile_s", "ttft_s", "tpot_s", "cache_bytes")


def process(args: list[str], cache: str) -> dict[str, float]:
    """CPU seconds, resident memory and figures of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "KVJAX_CACHE": cache}
    done = subprocess.run(
        [*COMMAND, *args, "--json"], env=environment, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    record = json.loads(done.stdout)
    return {"cpu_s": round(cpu, 2), **{name: round(record[name], 4) for name in FIGURES}}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--prompt-file", required=True)
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    shape = {"model": Path(args.model).name, "budget": args.budget, "max_new": 16}
    result = {"benchmark": "cold_start", "shape": shape, "rows": rows}
    for method in args.methods:
        given = ["--model", args.model, "--prompt-file", args.prompt_file, "--raw"]
        given += ["--method", method, "--budget", args.budget]
        with tempfile.TemporaryDirectory() as cache:
            first = process([*given, "--max-new", "16"], cache)
            second = process([*given, "--max-new", "16"], cache)
            other = ["--max-new", "24", "--temperature", "0.7"]
            third = process([*given, *other], cache)
        beyond = round(first["cpu_s"] - second["cpu_s"], 2)
        rows.append({"method": method, "beyond_cpu_s": beyond, "processes": [first, second, third]})
        save(args.out, result)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
