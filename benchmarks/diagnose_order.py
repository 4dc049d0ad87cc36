"""Whether `kvjax diagnose` foresees the order of methods: its errors against what models then do.

    python benchmarks/diagnose_order.py --out benchmarks/results/diagnose_order_bundled.json
    python benchmarks/diagnose_order.py --model FOLDER --text book.txt --rows 8 --length 1024 \\
        --out benchmarks/results/diagnose_order_smollm2.json

Three kinds of prompts of one length are read: windows of a text, which the text itself goes on
from ("text"); and windows with a needle, whose question is inside what is compressed ("inside"), or
asked afterwards ("after"). For every method and budget, relative error of the attention outputs and
recall are those of `kvjax.evaluation.diagnose`. Then the model is fed what should come next: of a
text, its next tokens; of a question, the answer. `nats` is the loss per token, and `right` the
share of answers of which every token is the most likely one, as a greedy answer has them.

`rank_correlation` is Spearman's between the predictions (`error`, a mean; `worst_heads`, the error
that a tenth of the KV heads exceed; `missed`, 1 - recall) and the losses (`nats`, and `wrong`
answers), of all methods and budgets but the full cache, and within each budget. `text_error` is the
error on the windows of text, as one has it who has no needles.
With `--results`, measurements are those of `kvjax eval`: its error of `attention` is ranked against
the scores of every task of the same length that is not at its floor:

    python benchmarks/diagnose_order.py --results benchmarks/results/smollm2/needles \\
        benchmarks/results/smollm2/perplexity --out benchmarks/results/diagnose_order_eval.json

What is finished is kept in the file that is written: the same command goes on there.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import save, write
from scipy.stats import spearmanr

import kvjax
from kvjax.evaluation.cells.grid import Candidate
from kvjax.evaluation.fidelity.fidelity import judge
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.evaluation.tasks.wording import HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, WORDINGS
from kvjax.generation.model import FunctionalModel, as_functional
from kvjax.generation.reading import Compiler
from kvjax.generation.steps import pad
from kvjax.generation.writing import further
from kvjax.models import demo, from_pretrained, load_tokenizer

METHODS = (
    "streaming_llm", "h2o", "snapkv", "pyramidkv", "chelsea", "kvmerger", "kvcrush(snapkv)",
    "clusterkv", "quest",
)  # fmt: skip
PARTS = ("text", "inside", "after")


class Prompts(NamedTuple):
    """Rows that are read, what each is asked then (None: nothing), and what should come next."""

    read: list[list[int]]
    asked: list[list[int]] | None
    expected: list[list[int]]


def windows(tokens: Sequence[int], rows: int, length: int, new: int) -> Prompts:
    """Windows of a text, spread over it."""
    starts = np.linspace(0, len(tokens) - length - new, rows).astype(int)
    read = [list(tokens[start : start + length]) for start in starts]
    return Prompts(
        read, None, [list(tokens[at + length : at + length + new]) for at in starts.tolist()]
    )


def needles(tokenizer, tokens: Sequence[int], rows: int, length: int, after: bool) -> Prompts:
    """Windows with a number that belongs to a key, hidden at depths spread from 0 to 1."""

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


def forced(model: FunctionalModel, context: kvjax.Context, tokens, positions):
    """Loss of each expected token, and whether it is the most likely one; 0 and True for none.

    Layer by layer, so that layers which are alike share compiled code: most of the time of a
    benchmark of many methods is compilation. The context's caches are donated.
    """
    logits, caches = context.logits, list(context.caches)
    interval, found = kvjax.flush_interval(context.caches), []
    for step, (token, position) in enumerate(zip(tokens.T, positions.T, strict=True), 1):
        found.append(_loss(logits, token, position))
        x = _embed(model.parts.embed, model.params, token, position)
        for layer, own in enumerate(model.parts.split(model.params)):
            block, transform = model.parts.blocks[layer], context.layers[layer]
            x, caches[layer] = _step(block, transform, own, x, position, caches[layer])
        logits = _logits(model.parts.head, model.params, x)
        if interval is not None and step % interval == 0:
            caches = list(kvjax.flush(tuple(caches)))
    return tuple(np.stack(part) for part in zip(*found, strict=True))


@jax.jit
def _loss(logits, token, position):
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
    none = position < 0
    return jnp.where(none, 0.0, loss), (logits.argmax(1) == token) | none


@functools.partial(jax.jit, static_argnums=0)
def _embed(embed, params, token, position):
    return embed(params, token[:, None], position[:, None])


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _step(block, transform, own, x, position, cache):
    return block(own, x, position[:, None], cache, layer=transform, phase="decode", last=True)


@functools.partial(jax.jit, static_argnums=0)
def _logits(head, params, x):
    return head(params, x)[:, -1]


def measure(model, run: FullRun, prompts: Prompts, transform, new: int) -> dict[str, float]:
    """What diagnose says of a method, and what the model does with its caches."""
    context = run.context(transform)
    found = judge(run, context)
    if prompts.asked is not None:
        context = ask(model, context, prompts.asked)
    tokens, places = pad(prompts.expected, new)
    positions = np.where(places >= 0, places + np.asarray(context.length)[:, None], -1)
    nats, right = forced(model, context, tokens, positions)
    return {
        "error": round(float(found.error.mean()), 5),
        "worst_heads": round(float(np.quantile(found.head_error.mean(1), 0.9)), 5),
        "recall": round(float(found.recall.mean()), 5),
        "nats": round(float(nats.sum() / (places >= 0).sum()), 5),
        "right": round(float(right.all(0).mean()), 5),
    }


def ask(model: FunctionalModel, context: kvjax.Context, asked: list[list[int]]) -> kvjax.Context:
    """The context after a further turn."""
    return further(model, context, asked, [max(map(len, asked))], Compiler(), None)


def correlations(rows: list[dict]) -> dict[str, dict]:
    """Spearman's rank correlation of predictions and losses, for each kind of prompts."""
    by_part = {
        part: {(row["method"], row["budget"]): row for row in rows if row["part"] == part}
        for part in PARTS
    }
    texts, found = by_part["text"], {}
    for part, own in by_part.items():
        keys = [key for key in own if key[0] != "full" and key in texts]
        predictions = {
            "error": {key: own[key]["error"] for key in keys},
            "worst_heads": {key: own[key]["worst_heads"] for key in keys},
            "missed": {key: 1 - own[key]["recall"] for key in keys},
        }
        measured = {"nats": {key: own[key]["nats"] for key in keys}}
        if part != "text":
            predictions["text_error"] = {key: texts[key]["error"] for key in keys}
            measured["wrong"] = {key: 1 - own[key]["right"] for key in keys}
        found[part] = {
            f"{name} and {what}": ranks(predicted, losses)
            for name, predicted in predictions.items()
            for what, losses in measured.items()
        }
    return found


def of_results(folders: Sequence[str]) -> list[dict]:
    """The same for each task of folders of `kvjax eval`, whose error is that of `attention`."""
    kept = [json.loads((Path(folder) / "results.json").read_text()) for folder in folders]
    at_floor = [panel for one in kept for panel in one["at_floor"]]
    panels: dict[tuple, dict] = {}
    for row in (row for one in kept for row in one["rows"]):
        if row["score"] is not None and row["method"] != "full":
            panel = panels.setdefault((row["task"], row["length"], row["question"]), {})
            panel[row["method"], row["budget"]] = row["score"]["mean"]
    found = []
    for (task, length, question), scores in panels.items():
        if task == "attention" or [task, length, question] in at_floor:
            continue
        errors = panels.get(("attention", length, None), {})
        sign = 1 if task == "perplexity" else -1  # of a loss
        losses = {key: sign * score for key, score in scores.items()}
        panel = {"task": task, "length": length, "question": question}
        found.append({**panel, "error and loss": ranks(errors, losses)})
    return found


def ranks(one: dict, other: dict) -> dict[str, float | None]:
    """Spearman's of what both have, of all budgets and within each."""
    keys = [key for key in one if key in other]
    budgets = sorted({budget for _, budget in keys if budget is not None})
    parts = {str(budget): [key for key in keys if key[1] == budget] for budget in budgets}
    return {name: rank(one, other, own) for name, own in {"all": keys, **parts}.items()}


def rank(one: dict, other: dict, keys: list) -> float | None:
    """Spearman's, None where one side is constant or there are fewer than three."""
    sides = [[side[key] for key in keys] for side in (one, other)]
    if len(keys) < 3 or any(len(set(side)) == 1 for side in sides):
        return None
    return round(float(spearmanr(sides[0], sides[1]).statistic), 3)  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a Hugging Face model (default: the bundled one)")
    parser.add_argument("--text", help="UTF-8 file (default: the bundled held-out text)")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.5])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--results", nargs="+",
        help="folders of kvjax eval: nothing is measured, only ranked")  # fmt: skip
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.results is not None:
        names = [Path(folder).name for folder in args.results]
        result = {"benchmark": "diagnose_order", "results": names}
        write(args.out, {**result, "rank_correlation": of_results(args.results)})
        return
    folder = args.model or demo.directory()
    tokenizer, model = load_tokenizer(folder), as_functional(from_pretrained(folder))
    text = demo.held_out_text() if args.text is None else Path(args.text).read_text()
    tokens = tokenizer(text).input_ids
    shape = {
        "model": Path(folder).name, "text": Path(args.text).name if args.text else "bundled",
        "rows": args.rows, "length": args.length, "new": args.new,
    }  # fmt: skip
    result = {"benchmark": "diagnose_order", "shape": shape, "rows": []}
    if Path(args.out).exists():
        kept = json.loads(Path(args.out).read_text())
        if kept["shape"] != shape:
            parser.error(f"{args.out} holds another shape: {kept['shape']}")
        result["rows"] = kept["rows"]
    candidates = [Candidate.of("full", 0.1)]
    candidates += [Candidate.of(name, budget) for budget in args.budgets for name in args.methods]
    for part in args.parts:
        done = {(row["method"], row["budget"]) for row in result["rows"] if row["part"] == part}
        left = [one for one in candidates if (one.method, one.budget) not in done]
        if not left:
            continue
        if part == "text":
            prompts = windows(tokens, args.rows, args.length, args.new)
        else:
            prompts = needles(tokenizer, tokens, args.rows, args.length, part == "after")
        transforms = [one.transform for one in left]
        run = FullRun(model, prompts.read, transforms, new_tokens=args.new, questions=prompts.asked)
        for one in left:
            found = measure(model, run, prompts, one.transform, args.new)
            result["rows"].append({"part": part, **one.named(), **found})
            save(args.out, result)
            print(json.dumps(result["rows"][-1]), file=sys.stderr, flush=True)
        del run
        jax.clear_caches()
    result["rank_correlation"] = correlations(result["rows"])
    write(args.out, result)


if __name__ == "__main__":
    main()
