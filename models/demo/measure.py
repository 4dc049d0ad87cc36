"""Measures the bundled model: `python -m kvjax.models.demo.measure --out FILE`.

With the full cache, on needles, keys and text that it never saw: exact answers per task and length,
and perplexity on held-out text against counts of words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.evaluation import OWN_TASKS, Haystack, Proportion, is_right
from kvjax.evaluation.tasks.wording import HELD_OUT_WORDING, WORDINGS
from kvjax.models import Decoder, demo, from_pretrained, load_tokenizer

from .corpus import python_documents, split_documents
from .ngrams import KneserNey
from .training import forward

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROWS = 4  # cases read together
_WINDOW = 1024  # tokens that the perplexity's text is cut into


def exact_answers(
    model: Decoder,
    tokenizer: Any,
    haystack: Haystack,
    task: str,
    length: int,
    cases: int,
    **how: Any,
) -> dict[str, Any]:
    """Share of `cases` answered exactly with the full cache, evenly over `DEPTHS`."""
    made = [
        haystack.case(task, length=length, depth=DEPTHS[i % len(DEPTHS)], seed=i, **how)
        for i in range(cases)
    ]
    new, end, right = max(case.max_new for case in made), model.config.eos_token_ids, 0
    for first in range(0, cases, _ROWS):
        rows = made[first : first + _ROWS]
        result = kvjax.generate(
            model, [row.prompt for row in rows], buckets=(length,),
            max_new_tokens=new, end_tokens=end,
        )  # fmt: skip
        texts = [tokenizer.decode(tokens) for tokens in result.tokens]
        right += sum(is_right(text, row.answers[0]) for text, row in zip(texts, rows, strict=True))
    return {
        "task": task,
        "length": length,
        "cases": cases,
        "right": right / cases,
        "interval": list(Proportion(right, cases).interval),
    }


def model_nll(model: Decoder, tokens: np.ndarray) -> float:
    """Nats per token with the full cache, in windows that each begin with the start token."""
    rows = tokens[: len(tokens) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    start = np.full((len(rows), 1), model.config.bos_token_id)
    positions = np.arange(_WINDOW)[None]

    @jax.jit
    def nll(row: jax.Array) -> jax.Array:
        logits = forward(model, row[None, :-1], positions)
        chances = jax.nn.log_softmax(logits[0])
        return -chances[np.arange(_WINDOW), row[1:]]

    return float(np.mean([nll(row) for row in np.concatenate((start, rows), axis=1)]))


def text_figures(model: Decoder, tokenizer: Any) -> dict[str, float]:
    """Nats per token of the held-out text: the model, a unigram and a 5-gram model."""
    held_out = tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids
    training, _ = split_documents(python_documents())
    known = [i for text in training for i in tokenizer(text, add_special_tokens=False).input_ids]
    size = model.vocab_size
    figures = {
        "unigram": KneserNey(known, 1, size).nll(held_out).mean(),
        "5-gram": KneserNey(known, 5, size).nll(held_out).mean(),
        "model": model_nll(model, np.array(held_out)),
        "bytes_per_token": len(demo.held_out_text().encode()) / len(held_out),
    }
    return {name: float(value) for name, value in figures.items()}


def measure(
    folder: Path, *, tasks: Sequence[str], lengths: Sequence[int], cases: int
) -> dict[str, Any]:
    """The model card's figures for these tasks and lengths.

    Several needles are asked for in the held-out wording too.
    """
    model, tokenizer = from_pretrained(folder), load_tokenizer(folder)
    haystack = Haystack(tokenizer, demo.held_out_text())
    wordings = [(task, WORDINGS[0]) for task in tasks]
    if "multi_needle" in tasks:
        wordings.append(("multi_needle", HELD_OUT_WORDING))
    answers = []
    for length in lengths:
        for task, wording in wordings:
            found = exact_answers(model, tokenizer, haystack, task, length, cases, wording=wording)
            answers.append({**found, "question": wording.question})
            print(answers[-1], flush=True)
    return {
        "answers": answers,
        "nats_per_token": text_figures(model, tokenizer),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "kvjax": kvjax.__version__},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.models.demo.measure", description="Measures kvjax's bundled model."
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--model", type=Path, default=demo.directory(), help="folder (bundled)")
    parser.add_argument("--cases", type=int, default=200, help="per task and length (200)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tasks", nargs="+", choices=OWN_TASKS, default=OWN_TASKS)
    args = parser.parse_args(argv)
    try:
        figures = measure(args.model, tasks=args.tasks, lengths=args.lengths, cases=args.cases)
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"measure: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
