"""Ranks methods by the errors of `kvjax diagnose`, and by what models then do with their caches.

    python benchmarks/diagnose_order.py --model FILE --text wikitext2.valid.txt \\
        --out benchmarks/results/diagnose_order_qwen.json

Three kinds of prompts of one length are read: windows of a text ("text"), and windows with a needle
whose question is inside what is compressed ("inside") or asked afterwards ("after"). For every
method and budget, relative error of the attention outputs and recall are those of
`kvjax.evaluation.diagnose`. Then the model is fed what should come next: of a text, its next
tokens; of a question, the answer. `nats` is the loss per token, and `right` the share of answers of
which every token is the most likely one, as a greedy answer has them.

`rank_correlation` is Spearman's between the predictions (`error`, a mean; `worst_heads`, the error
that a tenth of the KV heads exceed; `missed`, 1 - recall) and the losses (`nats`, and `wrong`
answers), of all methods and budgets but the full cache, and within each budget. `text_error` is the
error on the windows of text, as one has it who has no needles.

Rows go into `--cells`, a method and a budget at a time, and a run that was stopped goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from common import Rows, parser_of, save
from scipy.stats import spearmanr

import kvjax
from kvjax.evaluation import answer_losses
from kvjax.evaluation.fidelity.fidelity import judge
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.evaluation.tasks.wording import HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, WORDINGS
from kvjax.generation.model import FunctionalModel, as_functional
from kvjax.models import from_pretrained, load_tokenizer

METHODS = (
    "streaming_llm", "h2o", "snapkv", "pyramidkv", "chelsea", "kvmerger", "kvcrush(snapkv)",
    "clusterkv", "quest(spread=None)",
)  # fmt: skip
BUDGETS = (0.1, 0.2, 0.5)
PARTS = ("text", "inside", "after")
NEW = 16

Key = tuple[str, float]
Figures = dict[Key, float]


class Prompts(NamedTuple):
    """Rows that are read, what each is asked then (None: nothing), and what should come next."""

    read: list[list[int]]
    asked: list[list[int]] | None
    expected: list[list[int]]


def windows(tokens: Sequence[int], rows: int, length: int) -> Prompts:
    """Returns windows of a text, spread over it."""
    starts = np.linspace(0, len(tokens) - length - NEW, rows).astype(int).tolist()
    read = [list(tokens[start : start + length]) for start in starts]
    return Prompts(
        read, None, [list(tokens[start + length : start + length + NEW]) for start in starts]
    )


def needles(tokenizer: Any, tokens: Sequence[int], rows: int, length: int, after: bool) -> Prompts:
    """Returns windows with a number that belongs to a key, at depths spread from 0 to 1."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    rng, wording = np.random.default_rng(0), WORDINGS[0]
    read, asked, expected = [], [], []
    for depth in np.linspace(0, 1, rows):
        key = f"{rng.choice(HELD_OUT_ADJECTIVES)} {rng.choice(HELD_OUT_NOUNS)}"
        value = str(rng.integers(100_000, 1_000_000))
        hidden, question = encode(wording.needle(key, value)), encode(wording.ask(key))
        room = length - len(hidden) - len(question)
        start = int(rng.integers(len(tokens) - room))
        text, place = list(tokens[start : start + room]), round(depth * room)
        context = [*text[:place], *hidden, *text[place:]]
        read.append(context if after else context + question)
        asked.append(question)
        expected.append(encode(f" {value}"))
    return Prompts(read, asked if after else None, expected)


def measure(
    model: FunctionalModel, run: FullRun, prompts: Prompts, transform: kvjax.KVTransform
) -> dict[str, float]:
    """Returns what diagnose says of a method, and what the model does with its caches."""
    context = run.context(transform)
    fidelity = judge(run, context)
    losses = answer_losses(model, context, prompts.expected, prompts.asked)
    figures = {
        "error": fidelity.error.mean(),
        "worst_heads": np.quantile(fidelity.head_error.mean(1), 0.9),
        "recall": fidelity.recall.mean(),
        "nats": losses.nats.sum() / sum(map(len, prompts.expected)),
        "right": losses.greedy.mean(),
    }
    return {name: round(float(value), 5) for name, value in figures.items()}


def correlations(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns rank correlations of predictions and losses, for each kind of prompts."""

    def figures(part: str, name: str) -> Figures:
        return {
            (row["method"], row["budget"]): row[name]
            for row in rows
            if row["part"] == part and row["method"] != "full"
        }

    def complement(shares: Figures) -> Figures:
        return {key: 1 - share for key, share in shares.items()}

    result = {}
    for part in PARTS:
        predictions = {name: figures(part, name) for name in ("error", "worst_heads")}
        predictions["missed"] = complement(figures(part, "recall"))
        measured = {"nats": figures(part, "nats")}
        if part != "text":
            predictions["text_error"] = figures("text", "error")
            measured["wrong"] = complement(figures(part, "right"))
        result[part] = {
            f"{name} and {loss}": ranks(predicted, losses)
            for (name, predicted), (loss, losses) in itertools.product(
                predictions.items(), measured.items()
            )
        }
    return result


def ranks(predicted: Figures, losses: Figures) -> dict[str, float | None]:
    """Returns Spearman's correlation over all budgets, and within each."""
    parts = {str(budget): [key for key in losses if key[1] == budget] for budget in BUDGETS}
    return {
        name: rank(predicted, losses, keys) for name, keys in {"all": [*losses], **parts}.items()
    }


def rank(predicted: Figures, losses: Figures, keys: Sequence[Key]) -> float | None:
    """Returns Spearman's correlation, or None where one side is constant."""
    first, second = ([side[key] for key in keys] for side in (predicted, losses))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return round(float(spearmanr(first, second).statistic), 3)  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out", "cells")
    parser.add_argument("--text", required=True, help="what prompts are cut from")
    parser.add_argument("--rows", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model = as_functional(from_pretrained(args.model, dtype="float32"))
    tokens = tokenizer(Path(args.text).read_text()).input_ids
    shape = {
        "model": Path(args.model).name, "text": Path(args.text).name, "rows": args.rows,
        "length": args.length, "new": NEW,
    }  # fmt: skip
    rows = Rows.of(args, {"benchmark": "diagnose_order", "shape": shape})
    candidates = [("full", None), *itertools.product(METHODS, BUDGETS)]
    for part in PARTS:
        left = {
            (method, budget): kvjax.parse(method, budget=budget)
            for method, budget in candidates
            if not rows.has(part=part, method=method, budget=budget)
        }
        if not left:
            continue
        if part == "text":
            prompts = windows(tokens, args.rows, args.length)
        else:
            prompts = needles(tokenizer, tokens, args.rows, args.length, part == "after")
        run = FullRun(
            model, prompts.read, list(left.values()), new_tokens=NEW, questions=prompts.asked
        )
        for (method, budget), transform in left.items():
            figures = measure(model, run, prompts, transform)
            rows.add(part=part, method=method, budget=budget, **figures)
        del run
        jax.clear_caches()
    save(args.out, {**rows.about, "rows": rows.rows, "rank_correlation": correlations(rows.rows)})


if __name__ == "__main__":
    main()
