"""What ClusterKV's clusters cost on a real model: seconds of clustering, milliseconds of a step.

    python benchmarks/cluster_cost.py --model FOLDER --text wikitext2.valid.txt --out \\
        benchmarks/results/cluster_cost_smollm2.json

`prompt_pass_s` is the prompt pass of the full cache, `compress_s` what makes a method's caches of
all layers from it (for the full cache: a copy), and `percent` their difference to the full cache's
as a share of the prompt pass. `step_ms` is a decode step. Everything is compiled before; figures
are the least of `--rounds`, since other programs only ever add time. `index_bytes` is what a
method's caches hold beyond the full one's.

A run that was stopped goes on where it was, given the same arguments.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
from common import Rows

import kvjax
from kvjax.models import from_pretrained, load_tokenizer

PAPER = "tokens_per_cluster=80, new_clusters=4, iterations=20, chunk=None"
METHODS = (
    "full",
    "clusterkv",
    "clusterkv(tokens_per_cluster=16)",
    "clusterkv(tokens_per_cluster=8)",
    f"clusterkv({PAPER})",
    "clusterkv(tokens_per_cluster=16, chunk=None, iterations=20)",
    "clusterkv(per_query_head=True)",
)
NEW = 33


def seconds(work) -> tuple[Any, float]:
    """What it returns, and how long it took."""
    start = time.perf_counter()
    done = jax.block_until_ready(work())
    return done, time.perf_counter() - start


def measure(model, once: kvjax.ReadOnce, transform: kvjax.KVTransform, rounds: int):
    """Seconds of compression and of a step, and bytes of the caches."""
    compress, step, size = [], [], 0
    for _ in range(rounds + 1):  # the first compiles
        context, each = seconds(lambda: once.context(transform))
        size = context.nbytes
        done = kvjax.generate(
            model, None, context=context, max_new_tokens=NEW, end_tokens=(), donate=True
        )
        compress, step = [*compress, each], [*step, done.tpot_s]
    return min(compress[1:]), min(step[1:]), size


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file of at least as many tokens")
    parser.add_argument("--out", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8128, 2048, 4096, 1024])
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model), load_tokenizer(args.model)
    text = Path(args.text).read_text()[: 8 * max(args.lengths)]
    tokens = tokenizer(text).input_ids
    transforms = {name: kvjax.parse(name, args.budget) for name in METHODS}
    about = {"model": Path(args.model).name, "text": Path(args.text).name}
    about |= {"budget": args.budget, "rounds": args.rounds, "generated": NEW}
    rows = Rows(args.out, {"benchmark": "cluster_cost", **about})
    for length in args.lengths:
        missing = [name for name in METHODS if not rows.has(length=length, method=name)]
        if not missing:
            continue
        size = {"max_prompt": length, "max_new": 64, "buckets": (length,)}

        def read(prompt=tokens[:length], size=size):
            return kvjax.ReadOnce(model, [prompt], list(transforms.values()), **size)

        read()
        once, passed = seconds(read)
        base, _, full_bytes = measure(model, once, transforms["full"], 1)
        for name in missing:
            compress, step, size_of = measure(model, once, transforms[name], args.rounds)
            rows.add(
                length=length, method=name, prompt_pass_s=round(passed, 2),
                compress_s=round(compress, 3), percent=round(100 * (compress - base) / passed, 2),
                step_ms=round(1e3 * step, 2), index_bytes=size_of - full_bytes,
            )  # fmt: skip


if __name__ == "__main__":
    main()
