"""kvjax in lm-evaluation-harness beside the harness's own model `hf`, on the same requests.

    python benchmarks/lm_eval_beside_hf.py --model MODEL --text wikitext2.test.txt \\
        --out benchmarks/results/lm_eval_smollm2.json

Requests are made from the text: beginnings of its paragraphs with four continuations each, of which
one is the text's own; pieces for their whole log-likelihood; and RULER's needles to be found. With
`--limit`, the first ones of each kind are asked. Each side and method runs in a process of its own,
and answers all requests twice (in float64 once): the first time, kvjax compiles. Seconds are those
of the clock and of the process on all its cores, of which the latter hardly depend on what else
runs. `apart` is the largest difference of a log-likelihood from that of `hf` in float32, and `off`
from that of `hf` in float64, in nats. `hf` needs torch and accelerate, and gguf for a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Rows, parser_of

HF = "hf"
SIDES = (
    (HF, None, "float64"), (HF, None, "float32"), ("full", None, "float32"),
    ("snapkv", 0.25, "float32"), ("by_head(kvzip)", 0.2, "float32"), ("quantize", None, "float32"),
)  # fmt: skip
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
BATCH, QUESTIONS, CHOICES, PIECES, NEEDLES = 4, 6, 4, 2, 4
CONTEXT, CONTINUATION, PIECE, PROMPT, WINDOW = 1200, 120, 1200, 1024, 2048
"""Characters of contexts, continuations and pieces; tokens of needles' prompts and of windows."""


def requests_of(model: str, text: str) -> dict[str, list]:
    """Makes the requests of each kind, and the answers that are right."""
    from kvjax.evaluation.tasks import Frame, ruler
    from kvjax.models import load_tokenizer

    tokenizer, draw = load_tokenizer(model), random.Random(0)
    starts = [draw.randrange(len(text) // 2) for _ in range(QUESTIONS + PIECES)]
    parts = []
    for start in starts:
        start = text.index(" ", start)  # words stay whole
        middle = text.index(" ", start + CONTEXT)
        end = text.index(" ", middle + CONTINUATION)
        parts.append((text[start:middle].strip(), text[middle:end]))
    choices, right = [], []
    for number, (context, continuation) in enumerate(parts[:QUESTIONS]):
        others = [x for n, (_, x) in enumerate(parts[:QUESTIONS]) if n != number]
        wrong = draw.sample(others, CHOICES - 1)
        right.append(draw.randrange(CHOICES))
        wrong.insert(right[-1], continuation)
        choices += [(context, x) for x in wrong]
    task = ruler(
        "niah_single_2", tokenizer, text[len(text) // 2 :], length=PROMPT, cases=NEEDLES, seed=0,
        frame=Frame.of(tokenizer, chat=False),
    )  # fmt: skip
    settings = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    return {
        "loglikelihood": choices,
        "loglikelihood_rolling": [(context + rest,) for context, rest in parts[QUESTIONS:]],
        "generate_until": [(tokenizer.decode(case.prompt), settings) for case in task.cases],
        "right": right,
        "needles": [case.answers for case in task.cases],
    }  # fmt: skip


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Answers all requests twice in this process."""
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import get_model  # pyright: ignore[reportMissingImports]

    import kvjax.lm_eval  # noqa: F401  # makes its name known

    requests, start = json.loads(sys.stdin.read()), time.perf_counter()
    settings = {"batch_size": BATCH, "max_length": WINDOW, "dtype": args.dtype}
    if args.side == HF:
        settings |= {"pretrained": args.model, "device": "cpu"}
        path = Path(args.model)
        if path.is_file():
            settings |= {"pretrained": str(path.parent), "gguf_file": path.name}
    else:
        settings |= {"pretrained": args.model, "transform": args.side}
        if args.budget is not None:
            settings["budget"] = args.budget
    model = get_model(HF if args.side == HF else "kvjax").create_from_arg_obj(settings)
    result: dict[str, Any] = {"opened": time.perf_counter() - start}
    for kind in KINDS:
        instances = [Instance(kind, {}, tuple(x), 0) for x in requests[kind]]
        for when in ("first", "again") if args.dtype == "float32" else ("first",):
            clock, processor = time.perf_counter(), time.process_time()
            result[kind] = getattr(model, kind)(instances, disable_tqdm=True)
            result.setdefault(when, {})[kind] = time.perf_counter() - clock
            result.setdefault(f"{when}_processor", {})[kind] = time.process_time() - processor
    # Linux counts kibibytes.
    result["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="folder of the model, or GGUF file")
    parser.add_argument("--text", help="UTF-8 file")
    parser.add_argument("--limit", type=int, help="questions, pieces and needles, at most")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--side", help="answers the requests of standard input in this process")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--dtype")
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(answer(args)))
        return
    requests = requests_of(args.model, Path(args.text).read_text(encoding="utf-8"))
    if args.limit is not None:
        requests = {
            kind: asked[: args.limit * (CHOICES if kind == "loglikelihood" else 1)]
            for kind, asked in requests.items()
        }
    about = {
        "benchmark": "lm_eval_beside_hf", "model": Path(args.model).name,
        "text": Path(args.text).name, "batch_size": BATCH,
        "requests": {kind: len(requests[kind]) for kind in KINDS},
    }  # fmt: skip
    rows = Rows(args.out, about)
    for side, budget, dtype in SIDES:
        if rows.has(side=side, dtype=dtype):
            continue
        command = [sys.executable, __file__, "--model", args.model, "--side", side]
        command += ["--dtype", dtype, *([] if budget is None else ["--budget", str(budget)])]
        done = subprocess.run(
            command, input=json.dumps(requests), stdout=subprocess.PIPE, text=True, check=True
        )
        result = json.loads(done.stdout.splitlines()[-1])
        row = {"side": side, "budget": budget, "dtype": dtype, **figures(result, requests)}
        sides = {x["dtype"]: x for x in [*rows.rows, row] if x["side"] == HF}
        hf, exact = sides.get("float32", row), sides["float64"]
        rows.add(
            **row, apart=largest(row, hf), off=largest(row, exact),
            greedy_apart=differing(row, hf, "greedy"), texts_apart=differing(row, hf, "texts"),
        )  # fmt: skip


def figures(result: dict, requests: dict) -> dict[str, Any]:
    """Returns what a side has answered, what of it is right, and what it took."""
    likely = [score for score, _ in result["loglikelihood"]]
    choices = [likely[n : n + CHOICES] for n in range(0, len(likely), CHOICES)]
    right = list(zip(choices, requests["right"], strict=True))
    texts = result["generate_until"]
    found = [all(x in text for x in answers) for text, answers in
             zip(texts, requests["needles"], strict=True)]  # fmt: skip
    return {
        "loglikelihood": likely,
        "loglikelihood_rolling": result["loglikelihood_rolling"],
        "greedy": [greedy for _, greedy in result["loglikelihood"]],
        "texts": texts,
        "nats": -sum(scores[number] for scores, number in right) / len(right),
        "right": sum(max(scores) == scores[number] for scores, number in right),
        "found": sum(found),
        "opened": round(result["opened"], 2),
        **{
            name: {kind: round(x, 2) for kind, x in result[name].items()}
            for name in ("first", "first_processor", "again", "again_processor")
            if name in result
        },
        "peak_gb": round(result["peak"] / 1e9, 2),
    }


def largest(row: dict, other: dict) -> dict[str, float]:
    """Returns the largest difference of a log-likelihood, by the kind of request."""
    return {
        kind: max(abs(a - b) for a, b in zip(row[kind], other[kind], strict=True))
        for kind in KINDS[:2]
    }


def differing(row: dict, other: dict, name: str) -> int:
    """Returns how many answers differ."""
    return sum(a != b for a, b in zip(row[name], other[name], strict=True))


if __name__ == "__main__":
    main()
