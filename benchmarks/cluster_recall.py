"""What clustering in chunks finds, beside k-means over all keys at once.

    python benchmarks/cluster_recall.py --model FOLDER --text wikitext2.valid.txt --out \\
        benchmarks/results/cluster_recall_smollm2.json

Both have 16 tokens a cluster. `chunks` is ClusterKV as it is by default, `plain` k-means in 20
rounds over the whole prompt, as in the paper. `recall` is the mean share of the tokens with the
most attention that were among the selected ones, and `error` the relative error of attention
outputs, at the next tokens, over all layers and KV heads (`measure_fidelities`).

A prompt that is longer than the model's positions is read with YaRN, which stretches them: keys and
queries are those of the model then, and its text need not be good.

A run that was stopped goes on where it was, given the same arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

import jax
from common import Rows

import kvjax
from kvjax import LanguageModel
from kvjax.evaluation import measure_fidelities
from kvjax.models import from_pretrained, load_tokenizer

METHODS = {
    "chunks": "clusterkv(tokens_per_cluster=16)",
    "plain": "clusterkv(tokens_per_cluster=16, chunk=None, iterations=20)",
}
BUDGETS = (0.05, 0.1, 0.2)
NEXT = 8


def load(folder: Path, tokens: int) -> LanguageModel:
    """The model, with room for so many tokens."""
    config = json.loads((folder / "config.json").read_text())
    positions = config["max_position_embeddings"]
    if tokens <= positions:
        return from_pretrained(folder)
    factor = math.ceil(tokens / positions)
    config["max_position_embeddings"] = factor * positions
    config["rope_scaling"] = {
        "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": positions,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as longer:
        for file in folder.iterdir():
            if file.name != "config.json":
                (Path(longer) / file.name).symlink_to(file.resolve())
        (Path(longer) / "config.json").write_text(json.dumps(config))
        return from_pretrained(longer)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file, long enough")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8128, 32_512])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    text = args.text.read_text()[: 8 * max(args.lengths)]
    tokens = load_tokenizer(args.model)(text).input_ids
    about = {"model": args.model.name, "text": args.text.name, "next_tokens": NEXT}
    rows = Rows(args.out, {"benchmark": "cluster_recall", **about})
    for length in args.lengths:
        named = {
            (name, budget): kvjax.parse(method, budget)
            for name, method in METHODS.items()
            for budget in BUDGETS
        }
        if all(rows.has(length=length, clusters=name, budget=b) for name, b in named):
            continue
        model = load(args.model, length + 2 * NEXT)
        found = measure_fidelities(model, list(named.values()), [tokens[:length]], new_tokens=NEXT)
        for (name, budget), one in zip(named, found, strict=True):
            rows.add(
                length=length, clusters=name, budget=budget,
                recall=round(float(one.recall.mean()), 4), error=round(float(one.error.mean()), 4),
            )  # fmt: skip
        jax.clear_caches()


if __name__ == "__main__":
    main()
