"""Memory that reading a long prompt takes, method by method, in a process of its own each.

    python benchmarks/prompt_memory.py --model FOLDER --text book.txt --out \\
        benchmarks/results/prompt_memory_smollm2.json

Each process loads the model and reads the text twice: the first time compiles. `grown` is by how
much the process's greatest resident memory (Linux) in the second reading is above what it was
before, when memory that was free had been given back. Processes differ: `grown` is the least of
`--rounds` processes, `all_grown` has them all. `layers` is what XLA says of the compiled function
of each kind of layer: temporary memory and outputs. `over_full` divides `grown` by that of the full
cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

METHODS = ("full", "snapkv", "h2o", "chelsea", "kvmerger", "clusterkv", "pyramidinfer")


def worker(model_folder: str, text: str, method: str, budget: float, tokens: int) -> None:
    """Measures one method and prints JSON."""
    import jax
    from common import watch_layers

    import kvjax
    from kvjax.evaluation.memory import with_peak
    from kvjax.models import from_pretrained, load_tokenizer

    model, tokenizer = from_pretrained(model_folder), load_tokenizer(model_folder)
    prompt = tokenizer(Path(text).read_text()).input_ids[:tokens]
    if len(prompt) < tokens:
        raise ValueError(f"the text must have {tokens} tokens, got {len(prompt)}")
    transform = kvjax.calibrated(kvjax.parse(method, budget), model, [])
    options = {"transform": transform, "max_new": 64, "document": tokenizer}
    layers = watch_layers()

    def reading() -> kvjax.Context:
        context = kvjax.read(model, [prompt], **options)
        jax.block_until_ready(context.held)
        return context

    reading()
    context, grown = with_peak(reading)
    row = {
        "method": method,
        "grown": grown,
        "cache_bytes": context.nbytes,
        "layers": [{"temporary": temporary, "outputs": out} for temporary, out in layers],
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(row))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file of at least as many tokens")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.model, args.text, args.worker, args.budget, args.tokens)
        return
    from common import write

    rows = []
    for method in args.methods:
        rows.append(least_of(args, method))
        rows[-1]["over_full"] = round(rows[-1]["grown"] / rows[0]["grown"], 3)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shape = {"model": Path(args.model).name, "tokens": args.tokens, "budget": args.budget}
    write(args.out, {"benchmark": "prompt_memory", "shape": shape, "rows": rows})


def least_of(args: argparse.Namespace, method: str) -> dict:
    """The row of the process that grew least."""
    line = [sys.executable, __file__, "--model", args.model, "--text", args.text]
    line += ["--tokens", str(args.tokens), "--budget", str(args.budget), "--worker", method]
    rows = []
    for _ in range(args.rounds):
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
    least = min(rows, key=lambda row: row["grown"])
    return least | {"all_grown": [row["grown"] for row in rows]}


if __name__ == "__main__":
    main()
