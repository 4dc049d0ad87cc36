"""A batch of prompts of unequal length: read in groups, padded to the longest, and one by one.

    python benchmarks/unequal_prompts.py --model models/demo --out \\
        benchmarks/results/unequal_prompts_bundled.json

The batch has one prompt of `--long` tokens and `--short` prompts of `--tokens` tokens. `groups` is
`kvjax.generate` as it is, `together` pads all rows to the longest, and `one by one` calls it once
for each row. Each of them runs in a process of its own, once to compile and then `--rounds` times.
`first` has the seconds of the first call, `compile` those of them that were tracing and compiling;
`ttft`, `decode`, `cpu` and `grown` are the medians of the others: seconds up to the first tokens,
seconds of all other tokens, seconds of processor time, and by how many bytes the process grew at
most (Linux). `tokens` counts what was read, padding included. `over_groups` divides by the row
`groups`; where other programs use the processor too, compare `cpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIDES = ("groups", "together", "one by one")


def worker(args: argparse.Namespace, side: str) -> None:
    """Measures one side and prints JSON."""
    import numpy as np

    import kvjax
    from kvjax.evaluation.memory import with_peak
    from kvjax.generation import groups, writing
    from kvjax.models import from_pretrained

    if side == "together":
        groups.row_groups = lambda widths: [None]
    model, grouped, read = from_pretrained(args.model), writing.grouped, []

    def watched(*args):
        made = grouped(*args)
        read.extend(group.tokens.size for group in made)
        return made

    writing.grouped = watched
    rng = np.random.default_rng(0)
    lengths = [args.tokens] * args.short
    lengths.insert(args.short // 2, args.long)
    prompts = [rng.integers(model.vocab_size, size=length).tolist() for length in lengths]
    batches = [[prompt] for prompt in prompts] if side == "one by one" else [prompts]

    def run() -> list[kvjax.Generation]:
        return [
            kvjax.generate(
                model, batch, transform=kvjax.parse(args.method, args.budget), end_tokens=(),
                max_new_tokens=args.new,
            )
            for batch in batches
        ]  # fmt: skip

    start = time.perf_counter()
    results = run()
    first = time.perf_counter() - start
    compiled = sum(result.compile_s for result in results)
    ttft, decode, cpu, grown = [], [], [], []
    for _ in range(args.rounds):
        read.clear()
        start = time.process_time()
        results, peak = with_peak(run)
        cpu.append(time.process_time() - start)
        ttft.append(sum(result.ttft_s for result in results))
        decode.append(sum(result.tpot_s * (args.new - 1) for result in results))
        grown.append(peak)
    row = {
        "side": side, "tokens": sum(read), "first": first,
        "compile": compiled, "ttft": statistics.median(ttft), "decode": statistics.median(decode),
        "cpu": statistics.median(cpu), "grown": None if None in grown else statistics.median(grown),
        "cache_bytes": sum(result.cache_bytes for result in results),
    }  # fmt: skip
    print(json.dumps(row))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--short", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--method", default="full")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker is not None:
        worker(args, args.worker)
        return
    from common import write

    rows = []
    for side in SIDES:
        line = [sys.executable, __file__, *sys.argv[1:], "--worker", side]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        least = (rows or [row])[0]
        compared = ("tokens", "first", "ttft", "decode", "cpu", "grown", "cache_bytes")
        over = {name: round(row[name] / least[name], 2) for name in compared if least[name]}
        rows.append({**row, "over_groups": over})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    names = ("long", "short", "tokens", "new", "method", "budget", "rounds")
    shape = {"model": Path(args.model).name, **{name: vars(args)[name] for name in names}}
    write(args.out, {"benchmark": "unequal_prompts", "shape": shape, "rows": rows})


if __name__ == "__main__":
    main()
