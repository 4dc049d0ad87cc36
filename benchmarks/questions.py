"""Many questions about one document: read once and asked together, against read every time.

    python benchmarks/questions.py --model FOLDER --text book.txt --out \\
        benchmarks/results/questions_smollm2.json

A document of `--tokens` tokens is read into a context, and `--questions` questions are asked as one
batch. Then `--separate` of them are asked one by one, each after reading the document again.
Everything is compiled before. `time_ratio` divides the seconds of reading once and asking all by
those of reading each time, whose mean is taken for the questions that were not asked separately;
`bytes_ratio` divides the caches of all rows by as many full ones. `equal` counts answers that are
the same token for token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import save, write

import kvjax
from kvjax.models import from_pretrained, load_tokenizer

METHODS = (
    "full", "snapkv", "h2o", "streaming_llm", "pyramidkv", "pyramidinfer", "kvmerger", "chelsea",
    "clusterkv", "quest", "infinigen", "kvcrush(snapkv)", "cam(streaming_llm)",
    "every(snapkv, steps=64)", "chain(snapkv, quantize)", "chain(snapkv, quantize(bits=4))",
    "chain(snapkv, codebook)", "spindlekv", "chain(clusterkv, offload)",
)  # fmt: skip
NEW, QUESTION = 16, 24  # tokens of an answer, and of a question
CALIBRATION = 1024  # tokens of the document that InfiniGen is calibrated on


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the seconds it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - start


def measure(model, document: list[int], questions: list[list[int]], transform, separate: int):
    """A row of the table.

    Args:
      model: a decoder.
      document, questions: token ids.
      transform: the method.
      separate: how many questions are asked after reading the document again.
    """
    size = {"transform": transform, "max_prompt": len(document) + 64, "max_new": 64}

    def read():
        return kvjax.read(model, [document], **size)

    def ask(context, asked):
        return kvjax.generate(model, asked, context=context, max_new_tokens=NEW, end_tokens=())

    ask(read(), questions)  # compiles
    ask(read(), questions[:1])
    context, read_seconds = timed(read)
    together, asked_seconds = timed(lambda: ask(context, questions))
    alone = [
        timed(lambda question=question: ask(read(), [question]))
        for question in questions[:separate]
    ]
    each = float(np.mean([seconds for _, seconds in alone]))
    equal = [one.tokens[0] == together.tokens[n] for n, (one, _) in enumerate(alone)]
    return {
        "read_s": round(read_seconds, 3),
        "asked_s": round(asked_seconds, 3),
        "read_and_asked_each_s": round(each, 3),
        "time_ratio": round((read_seconds + asked_seconds) / (each * len(questions)), 3),
        "document_bytes": context.nbytes,
        "bytes_ratio": round(together.cache_bytes / together.full_cache_bytes, 4),
        "separate": separate,
        "equal": sum(equal),
    }


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file of at least as many tokens")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--separate", type=int, default=16)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), from_pretrained(args.model)
    ids = tokenizer(Path(args.text).read_text()).input_ids
    most = args.tokens + args.questions * QUESTION
    if len(ids) < most:
        parser.error(f"the text must have {most} tokens, got {len(ids)}")
    document, rest = ids[: args.tokens], ids[args.tokens :]
    # Of different lengths, so that rows are ragged.
    questions = [
        rest[n * QUESTION : n * QUESTION + QUESTION - n % 8] for n in range(args.questions)
    ]
    rows: list[dict[str, object]] = []
    shape = {
        "model": Path(args.model).name, "document_tokens": args.tokens,
        "questions": args.questions, "new_tokens": NEW, "budget": args.budget,
    }  # fmt: skip
    result = {"benchmark": "questions", "shape": shape, "rows": rows}
    for name in args.methods:
        jax.clear_caches()
        transform = kvjax.parse(name, args.budget)
        transform = kvjax.calibrated(transform, model, [document[:CALIBRATION]])
        found = measure(model, document, questions, transform, args.separate)
        rows.append({"method": name, **found})
        save(args.out, result)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
