"""How many of the tokens with the most attention are recalled, on the bundled model.

    python benchmarks/recall_rate.py --out benchmarks/results/recall_rate.json

Recall is `|I ∩ I*| / B`: I what a decode step selected, I* the B tokens with the most attention in
the full cache. It is given for ClusterKV, Quest and InfiniGen over budgets, and for ClusterKV over
the number of clusters and the metric of k-means, as in Figure 11 of its paper. Every layer is
judged with the queries of the full cache, and none is dense; means are over the layers from the
third on, which the methods treat as theirs by default, and over all. Then, generating with default
dense layers, the share of selections that were on the device already, for R = 1 and 2.

The model has four layers of four KV heads of 32 channels and was trained on 2,048 tokens: the
figures say how the methods compare here, not what they do to a large model.
"""

from __future__ import annotations

import argparse
import dataclasses

import jax
import numpy as np
from common import write

import kvjax
from kvjax.evaluation import measure_fidelity
from kvjax.models import demo, from_pretrained, load_tokenizer

FIRST_LAYER = 2  # those before are dense by default


def rows_of_text(count: int, length: int) -> tuple[list[list[int]], list[int]]:
    """Rows of the bundled held-out text, and a sample from its end for calibration."""
    tokens = load_tokenizer(demo.directory())(demo.held_out_text()).input_ids
    sample = tokens[-1024:]
    starts = np.linspace(0, len(tokens) - 1024 - length, count).astype(int)
    return [tokens[start : start + length] for start in starts], sample


def recall(model, transform, prompts, budget: int, steps: int) -> dict[str, float]:
    """Mean recall over layers, rows, heads and steps."""
    found = measure_fidelity(model, transform, prompts, budget=budget, new_tokens=steps)
    jax.clear_caches()
    per_layer = found.recall.mean((1, 2))
    return {
        "recall": round(float(per_layer[FIRST_LAYER:].mean()), 4),
        "recall, all layers": round(float(per_layer.mean()), 4),
        "error": round(float(found.error[FIRST_LAYER:].mean()), 4),
    }


def hit_rates(model, prompts, budgets, steps: int) -> list[dict[str, object]]:
    """What offloaded caches had on the device, drawing tokens at temperature 1."""
    rows = []
    for budget in budgets:
        for recent_steps in (1, 2):
            transform = kvjax.chain(kvjax.ClusterKV(budget), kvjax.Offload(recent_steps))
            result = kvjax.generate(
                model, prompts, transform=transform, max_new_tokens=steps,
                sampling=kvjax.Sampling(1.0),
            )  # fmt: skip
            jax.clear_caches()
            rows.append(
                {
                    "budget": budget,
                    "recent_steps": recent_steps,
                    "hit_rate": round(float(result.recall.hit_rate), 4),
                    "fetched_bytes_per_step": round(result.recall.fetched_bytes_per_step),
                    "memory_bytes": result.memory_bytes,
                }
            )
    return rows


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--clusters", type=int, nargs="+", default=[13, 26, 51, 102, 205, 410])
    parser.add_argument("--clusters-budget", type=int, default=256)
    parser.add_argument("--generated", type=int, default=256)
    parser.add_argument("--out")
    args = parser.parse_args()
    model = from_pretrained(demo.directory())
    prompts, sample = rows_of_text(args.rows, args.tokens)
    calibration = kvjax.calibrate_infinigen(model, [sample])
    by_budget, by_clusters = [], []
    for budget in args.budgets:
        methods = {
            "clusterkv": kvjax.ClusterKV(budget, dense_layers=()),
            "clusterkv, 80 tokens a cluster": kvjax.ClusterKV(
                budget, tokens_per_cluster=80, dense_layers=()
            ),
            "quest": kvjax.Quest(budget, dense_layers=()),
            "infinigen": kvjax.InfiniGen(
                budget, alpha=None, calibration=calibration, dense_layers=()
            ),
        }
        methods |= {
            f"{name}, per query head": dataclasses.replace(tx, per_query_head=True)
            for name, tx in methods.items()
            if name in ("clusterkv", "quest", "infinigen")
        }
        for name, transform in methods.items():
            found = recall(model, transform, prompts, budget, args.steps)
            by_budget.append({"method": name, "budget": budget, **found})
            print(by_budget[-1], flush=True)
    for metric in ("cosine", "l2", "inner_product"):
        for clusters in args.clusters:
            transform = kvjax.ClusterKV(
                args.clusters_budget, clusters=clusters, metric=metric, dense_layers=()
            )
            found = recall(model, transform, prompts, args.clusters_budget, args.steps)
            by_clusters.append({"metric": metric, "clusters": clusters, **found})
            print(by_clusters[-1], flush=True)
    write(
        args.out,
        {
            "benchmark": "recall_rate",
            "prompt": {
                "rows": args.rows, "tokens": args.tokens, "decode_steps": args.steps,
                "text": "bundled held-out text",
            },
            "by_budget": by_budget,
            "by_clusters": {"budget": args.clusters_budget, "found": by_clusters},
            "generated_tokens": args.generated,
            "hit_rates": hit_rates(model, prompts, args.budgets, args.generated),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
