"""What each part of SpindleKV does to the answers and to the bytes, on the bundled model.

    python benchmarks/spindlekv_ablation.py --out benchmarks/results/spindlekv_ablation.json

Eviction alone, the codebook alone, and both; with heads unfolded and not, with magnitudes and
without (the paper's ablations). A row has the right answers to the needles that `kvjax compare`
asks for, with the Wilson interval, nats per token of held-out text, and the reserve of keys and
values after a prompt of that text: bytes of the entries there are, indices and magnitudes over
those of the full cache (`used`), and the paper's equation 15.

The model has four layers of four KV heads of 32 channels, so that an index and a magnitude weigh
more here than the paper's 2 / 128 of a vector: the figures say how the parts compare, not what they
do to a large model.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from common import write
from payload_accuracy import TASK, WINDOWS, Measure

import kvjax
from kvjax.evaluation import Grid
from kvjax.evaluation.comparison.material import Material
from kvjax.generation.model import as_functional
from kvjax.generation.steps import read_prompt
from kvjax.models import demo, from_pretrained, load_tokenizer
from kvjax.storage.references import CodebookPayload

# No book is full: what a capacity does is another question.
CODEBOOK = "capacity=1.0"
ROWS = {
    "full": "full",
    "eviction only": "layer_budget",
    "eviction only, unfolded": "layer_budget(unfold=True)",
    "codebook only": f"codebook({CODEBOOK})",
    "codebook only, no magnitudes": f"codebook({CODEBOOK}, magnitude=False)",
    "SpindleKV": f"spindlekv({CODEBOOK})",
    "SpindleKV, unfolded": f"spindlekv({CODEBOOK}, unfold=True)",
    "SpindleKV, no magnitudes": f"spindlekv({CODEBOOK}, magnitude=False)",
    "SpindleKV, unfolded, no magnitudes": f"spindlekv({CODEBOOK}, unfold=True, magnitude=False)",
}


def reserve(model, transform: kvjax.KVTransform, rows: np.ndarray) -> dict[str, float]:
    """The reserve of all layers after a prompt, where there are codebooks."""
    functional = as_functional(model)
    layers = kvjax.bind(transform, functional.num_layers)
    batch, length = rows.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), rows.shape)
    _, caches = jax.jit(lambda model, t, at: read_prompt(model, layers, t, at, max_new=1))(
        functional, jnp.asarray(rows, jnp.int32), positions
    )
    if not isinstance(caches[0].kv.k, CodebookPayload):
        kept = sum(int(cache.kv.live.sum()) for cache in caches)
        lists = sum(cache.kv.shape[1] // cache.kv.unfolded for cache in caches)
        return {"used": round(kept / (batch * length * lists), 4)}
    found = kvjax.reserve_ratio(caches, np.full(batch, length))
    return {name: round(getattr(found, name), 4) for name in ("used", "equation_15")}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--reserves", type=float, nargs="+", default=[0.4, 0.2])
    parser.add_argument("--out")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(demo.directory()), from_pretrained(demo.directory())
    rows = []
    for share in args.reserves:
        grid = Grid.of(
            methods=["h2o"], budgets=[share], lengths=[args.length], tasks=[TASK],
            cases=args.cases,
        )  # fmt: skip
        material = Material(grid, tokenizer, demo.held_out_text())
        measure = Measure(model, material)
        windows = material.windows(args.length)[0][:WINDOWS]
        for name, text in ROWS.items():
            found = measure(text)
            held = reserve(model, kvjax.parse(text, share), windows)
            rows.append({"reserve": share, "name": name, "method": text, **found, **held})
            print(rows[-1], flush=True)
    write(
        args.out,
        {
            "benchmark": "spindlekv_ablation",
            "model": "bundled",
            "task": TASK,
            "length": args.length,
            "cases": args.cases,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
