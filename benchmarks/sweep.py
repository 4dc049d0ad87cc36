"""One prompt pass for many methods against a prompt pass for each: `kvjax.ReadOnce`.

    python benchmarks/sweep.py --model FOLDER --text book.txt --out \\
        benchmarks/results/sweep_smollm2.json

A prompt of `--tokens` tokens is read once, compressed by 12 methods at 3 budgets each, and each of
the 36 caches answers with `--new` tokens. Beside it, each method and budget reads the prompt and
answers by itself. Both are compiled before they are measured. `factor` divides the seconds of the
separate runs by those of the sweep. `equal` counts the answers that are the same token for token.

With `--separate N`, N of the 36 run by themselves and the time of the others is taken as their
mean; the N are spread over methods and budgets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from common import write

import kvjax
from kvjax.evaluation.cells.grid import Candidate
from kvjax.models import from_pretrained, load_tokenizer

METHODS = (
    "streaming_llm", "h2o", "snapkv", "pyramidkv", "chelsea", "kvmerger", "kvcrush(snapkv)",
    "cam(streaming_llm)", "clusterkv", "quest", "layer_budget", "chain(snapkv, quantize)",
)  # fmt: skip
BUDGETS = (0.1, 0.2, 0.5)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file of at least as many tokens")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--separate", type=int, default=36)
    parser.add_argument("--out")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), from_pretrained(args.model)
    prompt = tokenizer(Path(args.text).read_text()).input_ids[: args.tokens]
    if len(prompt) < args.tokens:
        parser.error(f"the text must have {args.tokens} tokens, got {len(prompt)}")
    every = [Candidate.of(method, budget) for method in METHODS for budget in BUDGETS]
    size = {"max_prompt": args.tokens, "max_new": 64}

    def answer(context: kvjax.Context) -> list[int]:
        result = kvjax.generate(
            model, None, context=context, donate=True, max_new_tokens=args.new, end_tokens=()
        )
        return result.tokens[0]

    def sweep() -> list[list[int]]:
        once = kvjax.ReadOnce(model, [prompt], [one.transform for one in every], **size)
        return [answer(once.context(one.transform)) for one in every]

    def alone(one: Candidate) -> list[int]:
        return answer(kvjax.read(model, [prompt], transform=one.transform, **size))

    stride = len(every) / args.separate
    chosen = [int(number * stride) for number in range(args.separate)]
    sweep()
    start = time.perf_counter()
    together = sweep()
    sweep_seconds = time.perf_counter() - start
    rows = []
    for number in chosen:
        one = every[number]
        alone(one)
        start = time.perf_counter()
        tokens = alone(one)
        seconds = round(time.perf_counter() - start, 3)
        rows.append({**one.named(), "seconds": seconds, "equal": tokens == together[number]})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    separate = sum(row["seconds"] for row in rows) / len(rows) * len(every)
    write(args.out, {
        "benchmark": "sweep",
        "command": " ".join(["python", "benchmarks/sweep.py", *_named(args)]),
        "shape": {
            "model": Path(args.model).name, "tokens": args.tokens, "new_tokens": args.new,
            "methods": METHODS, "budgets": BUDGETS,
        },
        "sweep_s": round(sweep_seconds, 3),
        "separate_s": round(separate, 3),
        "factor": round(separate / sweep_seconds, 2),
        "separate": args.separate,
        "equal": sum(row["equal"] for row in rows),
        "rows": rows,
    })  # fmt: skip


def _named(args: argparse.Namespace) -> list[str]:
    """The options that say what was measured, without paths of a machine."""
    return [f"--tokens {args.tokens}", f"--new {args.new}", f"--separate {args.separate}"]


if __name__ == "__main__":
    main()
