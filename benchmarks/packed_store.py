"""One packed store of pages for all heads of a layer, beside rectangles of heads: a decode step.

    python benchmarks/packed_store.py --profile heads.safetensors --head-dim 64 --group 3 \\
        --out benchmarks/results/packed_store_smollm2.json

`by_head` stores the heads of a layer in up to three rectangles of slots. A packed store would have
pages of 64 or 128 slots, each of one head, and a table that says of which. A row of the file has,
for a budget and a size of pages, the median milliseconds of one attention over all layers in both,
in turns, and the bytes in float32 of keys and values: those of the tokens, of rectangles and of
pages. Attention over pages is a product for each page, and one softmax over the pages of a head.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import Rows
from safetensors.numpy import load_file

from kvjax.budgets.profile import layouts, shares

TOKENS, BUDGETS, PAGES, ROUNDS = 8192, (0.05, 0.1, 0.2), (64, 128), 30


def over_rectangles(q, layers):
    """Attention of a step in all layers, each of whose heads are in rectangles."""
    outs = []
    for rectangles in layers:
        for heads, k, v in rectangles:
            logits = jnp.einsum("hgd,hsd->hgs", q[heads], k)
            outs.append(jnp.einsum("hgs,hsd->hgd", jax.nn.softmax(logits), v))
    return sum(out.sum() for out in outs)


def over_pages(q, layers):
    """Attention of a step in all layers, each of which has pages of its heads."""
    total, heads = 0.0, q.shape[0]
    for owner, k, v in layers:
        logits = jnp.einsum("pgd,psd->pgs", q[owner], k)
        top = jax.ops.segment_max(logits.max(-1), owner, heads, indices_are_sorted=True)
        weights = jnp.exp(logits - top[owner][..., None])
        mass = jax.ops.segment_sum(weights.sum(-1), owner, heads, indices_are_sorted=True)
        out = jnp.einsum("pgs,psd->pgd", weights, v)
        out = jax.ops.segment_sum(out, owner, heads, indices_are_sorted=True)
        total += (out / mass[..., None]).sum()
    return total


def measure(each: np.ndarray, page: int, head_dim: int, group: int) -> dict:
    """Returns milliseconds and bytes of both, for the shares of all layers' heads."""
    jax.clear_caches()
    rng, heads = np.random.default_rng(0), each.shape[1]
    slots = np.maximum((each * TOKENS).astype(int), 5)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    ranks, rectangles = np.argsort(-each, axis=1, kind="stable"), {}
    for layout in layouts(each, 10_000):
        for layer in layout.layers:
            rectangles[layer] = []
            for of_ranks, _ in layout.rectangles:
                chosen = ranks[layer, list(of_ranks)]
                # Layers of a layout have equal rectangles: the largest of them.
                most = max(slots[n, ranks[n, list(of_ranks)]].max() for n in layout.layers)
                shape = len(chosen), int(most), head_dim
                rectangles[layer].append((jnp.asarray(chosen), numbers(*shape), numbers(*shape)))
    pages = []
    for layer in range(len(each)):
        owner = np.repeat(np.arange(heads), -(-slots[layer] // page))
        shape = len(owner), page, head_dim
        pages.append((jnp.asarray(owner), numbers(*shape), numbers(*shape)))
    q = numbers(heads, group, head_dim)
    stores = {
        "rectangles": (jax.jit(over_rectangles), [rectangles[n] for n in range(len(each))]),
        "pages": (jax.jit(over_pages), pages),
    }
    seconds, compiling = {name: [] for name in stores}, {}
    for number in range(1 + ROUNDS):
        for name, (function, layers) in stores.items():
            start = time.perf_counter()
            function(q, layers).block_until_ready()
            spent = time.perf_counter() - start
            if number:
                seconds[name].append(spent)
            else:
                compiling[name] = round(spent, 2)
    taken = {"tokens": int(slots.sum()) * head_dim * 8}
    for name, (_, layers) in stores.items():
        arrays = [x for x in jax.tree.leaves(layers) if x.ndim == 3]
        taken[name] = sum(x.nbytes for x in arrays)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "ms": {name: round(1e3 * x, 3) for name, x in medians.items()},
        "pages_over_rectangles": round(medians["pages"] / medians["rectangles"], 3),
        "compiling_s": compiling, "bytes": taken,
    }  # fmt: skip


def main() -> None:
    """Measures the rows that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", required=True, help="file of kvjax profile")
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--group", type=int, required=True, help="query heads of a KV head")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    table = load_file(args.profile)["table"]
    settings = {"tokens": TOKENS, "head_dim": args.head_dim, "group": args.group}
    rows = Rows(args.out, {"benchmark": "packed_store", "settings": settings})
    for budget in BUDGETS:
        for page in PAGES:
            if not rows.has(budget=budget, page=page):
                row = measure(shares(table, budget), page, args.head_dim, args.group)
                rows.add(budget=budget, page=page, **row)


if __name__ == "__main__":
    main()
