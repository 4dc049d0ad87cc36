"""RULER's tasks where part of a document is kept and the question comes after it.

    python benchmarks/kept_ruler.py --model FILE --text essays.txt --data dev-v2.0.json \\
        --sample wikitext2.valid.txt --out benchmarks/results/kept_ruler_qwen.json

One row a method, as kvpress shows RULER: for each share of the tokens, the mean over the tasks, in
per cent. `tasks` has each task's mean. Answers come from the slots of the full cache, of which a
composition keeps some (`kept_documents.py`), and all shares of a method answer as rows of one call.
HotpotQA's articles, RULER's thirteenth task, are not at hand.

Rows go into `--cells`, a case and a method at a time, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import Rows, parser_of, save
from kept_documents import Compositions, ReadDocument, together

import kvjax
from kvjax.evaluation.tasks import RULER_QA, RULER_TASKS, Case, Frame, ruler

SHARES = 0.5, 0.25, 0.125, 0.0625
NEW, ROOM = 128, 160  # tokens of an answer and of a question, at most
METHODS = {
    "own_queries": "by_head(own_queries(budget={}))",
    "own_queries, 4 bits": "by_head(chain(own_queries(budget={}), quantize(bits=4)))",
    "kvzip": "by_head(kvzip(budget={}))",
}
FULL = "full"
TASKS = (*RULER_TASKS, RULER_QA)


class Measure(Compositions):
    """The model, its compositions, and what they score in a case."""

    def __init__(self, args: argparse.Namespace) -> None:
        texts = [text.format(share) for text in METHODS.values() for share in SHARES]
        super().__init__(args.model, args.sample, texts, args.length, ROOM, NEW)

    def texts(self, method: str, case: Case, once: ReadDocument) -> list[str]:
        """Returns the answer of each share of a method; the full cache has one."""
        if method == FULL:
            shape = self.model.num_layers, self.model.kv_heads, len(case.context)
            contexts = [once.kept(np.ones(shape, bool), kvjax.Full())] * len(SHARES)
        else:
            texts = [METHODS[method].format(share) for share in SHARES]
            contexts = [once.kept_by(self.transforms[text]) for text in texts]
        answers = kvjax.generate(
            self.model, [case.question] * len(SHARES), context=together(contexts),
            max_new_tokens=NEW, end_tokens=(), buckets=[ROOM],
        ).tokens  # fmt: skip
        # One program serves all tasks, though some have fewer new tokens.
        texts = self.tokenizer.batch_decode(np.asarray(answers)[:, : case.max_new])
        return texts[:1] if method == FULL else texts


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "data", "out", "cells")
    parser.add_argument("--text", required=True, help="what needles are hidden in")
    parser.add_argument("--sample", required=True, help="text from which the profile is made")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--cases", type=int, default=2, help="of each task")
    args = parser.parse_args()
    measure = Measure(args)
    frame = Frame.of(measure.tokenizer, chat=False)
    tasks = [
        ruler(
            name, measure.tokenizer, Path(args.text).read_text(), length=args.length,
            cases=args.cases, seed=0, frame=frame, data=args.data,
        )
        for name in TASKS
    ]  # fmt: skip
    about = {
        "benchmark": "kept_ruler", "model": Path(args.model).name, "tokens": args.length,
        "cases": args.cases,
    }  # fmt: skip
    rows = Rows.of(args, about)
    for number in range(args.cases):
        for task in tasks:
            case, key = task.cases[number], {"task": task.name, "number": number}
            left = [each for each in (FULL, *METHODS) if not rows.has(method=each, **key)]
            if not left:
                continue
            once = measure.read(case.context)
            for method in left:
                scores = [
                    task.score(text, case)  # pyright: ignore[reportOptionalCall]  # tasks of RULER have scores
                    for text in measure.texts(method, case, once)
                ]
                rows.add(method=method, **key, scores=scores)
    save(args.out, {**about, "shares": SHARES, "rows": means(rows.rows)})


def means(rows: Sequence[dict]) -> list[dict]:
    """Returns the mean of each method over the tasks, in per cent, and each task's."""
    result = []
    for method in (FULL, *METHODS):
        tasks = {
            task: np.mean(
                [row["scores"] for row in rows if (row["method"], row["task"]) == (method, task)], 0
            )
            for task in TASKS
        }
        of_tasks = {task: (100 * score).round(1).tolist() for task, score in tasks.items()}
        mean = (100 * np.mean(list(tasks.values()), 0)).round(1).tolist()
        result.append({"method": method, "mean": mean, "tasks": of_tasks})
    return result


if __name__ == "__main__":
    main()
