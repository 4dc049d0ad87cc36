"""How many of the most attended tokens a step reads, in long documents.

    python benchmarks/selected_recall.py --model FILE --text essays.txt \\
        --sample wikitext2.valid.txt --out benchmarks/results/selected_recall_qwen.json

ClusterKV's Figure 11a on another text: a document of essays has four needles, of which one is asked
for, and the answer is decoded with the full cache. In each layer from the third on, `recall` is
`|T ∩ I| / |I|`, where I are the tokens that a method reads, and T as many tokens that receive most
in the full cache. `error` is the distance of attention's output from the full one, in shares of its
size. Both are means over layers, KV heads and steps.

Rows go into `--cells`, a length, a budget and a method at a time, and a run that was stopped goes
on.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from common import Rows, parser_of, save
from kept_answers import NEEDLES, haystacks

import kvjax
from kvjax.evaluation.fidelity.fidelity import judge
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.generation.calibration import sample_of
from kvjax.generation.model import as_functional
from kvjax.models import from_pretrained, load_tokenizer

FIRST_LAYER, STEPS = 2, 8
METHODS = {  # by what they are called; each has all budgets in turn
    "clusterkv": "clusterkv(budget=256)",
    "clusterkv, 80 tokens a cluster": "clusterkv(budget=256, tokens_per_cluster=80, "
    "new_clusters=4, iterations=20, chunk=None, group_reduce='mean')",
    "quest(spread=None)": "quest(budget=256, spread=None)",
    "quest": "quest(budget=256)",
    "infinigen": "infinigen(budget=256, alpha=None)",
}


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out", "cells")
    parser.add_argument("--text", required=True, help="what needles are hidden in")
    parser.add_argument("--sample", required=True, help="text from which InfiniGen calibrates")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_000, 32_000])
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model, dtype="float32"), load_tokenizer(args.model)
    functional, text = as_functional(model), Path(args.text).read_text()
    sample = sample_of(tokenizer(Path(args.sample).read_text()).input_ids, None)
    about = {
        "benchmark": "selected_recall", "model": Path(args.model).name, "steps": STEPS,
        "first_layer": FIRST_LAYER,
    }  # fmt: skip
    rows = Rows.of(args, about)
    # What InfiniGen learns does not depend on the budget.
    methods = {name: kvjax.calibrated(text, model, sample) for name, text in METHODS.items()}
    for length in args.lengths:
        left = {
            (budget, name): dataclasses.replace(methods[name], budget=budget)
            for budget, name in itertools.product(args.budgets, METHODS)
            if not rows.has(tokens=length, budget=budget, method=name)
        }
        if not left:
            continue
        (document,) = haystacks(tokenizer, text, length, 1, NEEDLES)
        run = FullRun(
            functional, [document.tokens], list(left.values()), new_tokens=STEPS,
            questions=document.questions[:1],
        )  # fmt: skip
        for (budget, name), transform in left.items():
            fidelity = judge(run, run.context(transform))
            recall, error = (
                round(float(figure[FIRST_LAYER:].mean()), 4)
                for figure in (fidelity.recall, fidelity.error)
            )
            rows.add(tokens=length, budget=budget, method=name, recall=recall, error=error)
    save(args.out, {**rows.about, "rows": rows.rows})


if __name__ == "__main__":
    main()
