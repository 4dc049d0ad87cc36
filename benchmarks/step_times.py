"""Times of a decode step behind a long document, method by method in turns.

    python benchmarks/step_times.py --model FOLDER --text essays.txt \\
        --out benchmarks/results/step_times_smollm2.json

Each method reads the same document once. In every round each continues it in turn, so that all see
the machine in the same states. `milliseconds` of a step are a median over the rounds, flushes
included; `of_full` is the median of the ratios to the full cache in the same round, with the least
and the greatest.
"""

from __future__ import annotations

import collections
import statistics
import time
from pathlib import Path

from common import parser_of, save

import kvjax
from kvjax.models import from_pretrained, load_tokenizer

METHODS = (
    "full", "quest(budget=0.1, spread=None)", "quest(budget=0.1, spread=1.0)",
    "clusterkv(budget=0.1)",
)  # fmt: skip
NEW, ROOM = 64, 32  # tokens of an answer and of a question, at most


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--text", required=True, help="the document")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 7900])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="the first: full")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model, dtype="float32"), load_tokenizer(args.model)
    text = tokenizer(Path(args.text).read_text(), add_special_tokens=False).input_ids
    rows = [
        {"tokens": length, "method": method, **times}
        for length in args.lengths
        for method, times in times_of(model, text[:length], text[length:][:8], args).items()
    ]
    save(
        args.out,
        {"benchmark": "step_times", "model": Path(args.model).name, "rounds": args.rounds,
         "new_tokens": NEW, "rows": rows},
    )  # fmt: skip


def times_of(model, document: list[int], question: list[int], args) -> dict[str, dict]:
    """Returns the times of each method behind a document."""
    buckets = [len(document), ROOM]
    contexts = {
        method: kvjax.read(
            model, [document], transform=method, max_prompt=len(document) + ROOM, max_new=NEW,
            buckets=buckets,
        )
        for method in args.methods
    }  # fmt: skip
    seconds = collections.defaultdict(list)
    for number in range(args.rounds + 1):
        for method, context in contexts.items():
            stamps = [
                time.perf_counter()
                for _ in kvjax.stream(
                    model, [question], context=context, max_new_tokens=NEW, end_tokens=(),
                    buckets=buckets,
                )
            ]  # fmt: skip
            if number:  # the first round compiles
                seconds[method].append((stamps[-1] - stamps[0]) / (NEW - 1))
    full = seconds[args.methods[0]]
    return {
        method: {
            "milliseconds": round(1e3 * statistics.median(times), 2),
            "of_full": [
                round(choose([x / y for x, y in zip(times, full, strict=True)]), 3)
                for choose in (statistics.median, min, max)
            ],
        }
        for method, times in seconds.items()
    }


if __name__ == "__main__":
    main()
