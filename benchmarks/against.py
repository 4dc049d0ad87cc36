"""Decode steps of this checkout against those of another one, method by method and turn by turn.

    python benchmarks/against.py --other ../before --out against_cpu.json

A process of each checkout reads the same prompt into one attention layer of Llama-3.1-8B's shape.
Then both run loops of 32 steps, one process after the other, so that drift of the machine hits both
alike. Intervals are 32 steps: whatever a method does with new tokens every few steps happens once
in every loop, or in one call after it. `ratio` divides the median of this checkout by that of the
other one; below 1 this checkout is faster.

The other checkout needs a `.venv` of its own, with its own kvjax, and `benchmarks/decode_step.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS, KEPT = 32, 0.2
RECALLED = 1024
METHODS = {
    "full": "Full()",
    "streaming_llm": "StreamingLLM(KEPT)",
    "streaming_llm, reposition": "StreamingLLM(KEPT, reposition=True)",
    "h2o": "H2O(KEPT)",
    "snapkv": "SnapKV(KEPT)",
    "pyramidkv": "PyramidKV(KEPT)",
    "pyramidinfer": "PyramidInfer(KEPT, interval=STEPS)",
    "layer_budget": "LayerBudgetEviction(0.5)",
    "kvmerger": "KVMerger(KEPT)",
    "chelsea": "Chelsea(KEPT, interval=STEPS)",
    "clusterkv": "ClusterKV(RECALLED, interval=STEPS, dense_layers=())",
    "clusterkv, per query head": (
        "ClusterKV(RECALLED, interval=STEPS, dense_layers=(), per_query_head=True)"
    ),
    "quest": "Quest(RECALLED, dense_layers=(), spread=1.0)",
    "cam, h2o": "CaM(H2O(KEPT), merge_tokens=16)",
    "kvcrush, h2o": "KVCrush(H2O(KEPT))",
    "kvcrush, snapkv": "KVCrush(SnapKV(KEPT))",
    "every, snapkv": "Every(SnapKV(KEPT), steps=STEPS)",
    "snapkv, h2o": "chain(SnapKV(0.3), H2O(KEPT))",
    "quantize, 8 bits": "Quantize(8)",
    "quantize, 4 bits, token": "Quantize(4, key_axis='token')",
    "quantize, 4 bits, channel": "Quantize(4, residual=STEPS)",
    "snapkv, quantize 4": "chain(SnapKV(KEPT), Quantize(4, residual=STEPS))",
    "spindlekv": "SpindleKV(0.5, interval=STEPS)",
}


def work(checkout: str, prompt: int, rounds: int) -> None:
    """Answers a method's name with its bytes, and an empty line with the seconds of a loop."""
    sys.path.insert(0, f"{checkout}/benchmarks")
    import decode_step
    import jax
    import jax.numpy as jnp

    import kvjax

    if not Path(kvjax.__file__).is_relative_to(checkout):
        raise SystemExit(f"{sys.executable} imports {kvjax.__file__}, which is not in {checkout}")
    decode_step.MAX_NEW = (rounds + 1) * STEPS
    half = decode_step.HEAD_DIM // 2
    rope = kvjax.Rope(500_000.0 ** -(jnp.arange(half) / half))
    side = answer = None
    for line in sys.stdin:
        if line.strip():
            # Names of kvjax are imported when they are asked for.
            names = {name: getattr(kvjax, name) for name in dir(kvjax)}
            names |= {"KEPT": KEPT, "STEPS": STEPS, "RECALLED": RECALLED}
            transform = kvjax.bind(eval(METHODS[line.strip()], names), 1)[0]
            side = None  # frees what the method before it holds
            side, answer = decode_step.decode_side(
                transform, prompt, steps_per_call=STEPS, rope=rope
            )
        start = time.perf_counter()
        jax.block_until_ready(side())  # pyright: ignore[reportOptionalCall]  # the first line names a method
        print(json.dumps(answer if line.strip() else time.perf_counter() - start), flush=True)


class Worker:
    """A process of a checkout."""

    def __init__(self, checkout: Path, prompt: int, rounds: int):
        command = [checkout / ".venv/bin/python", __file__, "--worker", checkout]
        options = ["--prompt-tokens", str(prompt), "--rounds", str(rounds)]
        self.process: Any = subprocess.Popen(  # with both pipes
            [*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, line: str) -> None:
        """Asks for something; the answer can wait."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> int | float:
        """The answer to the oldest line that has none."""
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a process ended, see its message above")
        return json.loads(answer)


def compare(names: list[str], other: Path, prompt: int, rounds: int) -> list[dict[str, object]]:
    """Milliseconds of a step in both checkouts, and how many times as long this one's takes."""
    here = Path(__file__).resolve().parent.parent
    sides = {"this": Worker(here, prompt, rounds), "other": Worker(other, prompt, rounds)}
    rows = []
    for name in names:
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for worker in sides.values():  # both read their prompts at the same time
            worker.send(name)
        cache_bytes = {side: worker.answer() for side, worker in sides.items()}
        for number in range(rounds):
            order = list(sides) if number % 2 else list(reversed(sides))
            for side in order:
                sides[side].send("")
                seconds[side].append(sides[side].answer())
        medians = {side: statistics.median(each) for side, each in seconds.items()}
        pairs = zip(seconds["this"], seconds["other"], strict=True)
        quarters = statistics.quantiles([mine / its for mine, its in pairs], n=4)
        row = {
            "method": name,
            "text": METHODS[name],
            "milliseconds": {side: round(1e3 * s / STEPS, 3) for side, s in medians.items()},
            "ratio": round(medians["this"] / medians["other"], 3),
            "quarters_of_ratios": [round(x, 3) for x in quarters],
            "cache_bytes": cache_bytes,
        }
        print(name, row["ratio"], row["quarters_of_ratios"], file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout with a .venv of its own")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker is not None:
        return work(args.worker, args.prompt_tokens, args.rounds)
    if args.other is None:
        parser.error("--other is needed")
    rows = compare(args.methods, args.other.resolve(), args.prompt_tokens, args.rounds)
    # Not at the top: it imports kvjax, which in a worker is the other checkout's.
    from common import write

    commit = ["git", "-C", str(args.other), "rev-parse", "--short", "HEAD"]
    write(
        args.out,
        {
            "benchmark": "against",
            "other": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
            "shape": {"prompt_tokens": args.prompt_tokens, "steps_per_round": STEPS},
            "rounds": args.rounds,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
