"""What each default of a method is worth: variants of its parameters on one model.

    python benchmarks/defaults.py --model FOLDER --text wiki.txt --haystack plays.txt --out \\
        benchmarks/results/defaults_smollm2.json

The model reads three sets of prompts once, with the full cache, and every variant compresses them:

* four texts of 2,000 tokens. `error` is the relative error of attention outputs at the next token,
  each layer judged alone as `measure_fidelity` judges it, the mean over layers and texts, and
  `worst_layer` the greatest mean of a layer. `nats` is the negative log-likelihood of the 128
  tokens that follow, through the compressed caches, and `nats_of_texts` that of each text.
* 20 prompts of 1,024 tokens with the question inside, ten with one needle and ten with eight.
  `inside` counts right answers.
* the same prompts without their question, which is asked once the caches are compressed. `after`
  counts right answers.

The first variant of a suite is the default. A row that the file holds already is not measured
again, so that a run which was stopped goes on. `--suites` chooses some.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import save, write

import kvjax
from kvjax.evaluation import Haystack, attention_error, context_nll, is_right
from kvjax.evaluation.fidelity.full_run import FullRun, Truth
from kvjax.generation.model import as_functional
from kvjax.models import from_pretrained, load_tokenizer
from kvjax.protocol import KVTransform

TEXTS, PROMPT, CONTINUATION = 4, 2000, 128
CASES, LENGTH, ANSWER = 10, 1024, 9  # of each of two tasks; tokens of a prompt, and of an answer
ROOM = 1088  # tokens of a prompt and its question


@dataclass(frozen=True)
class H2OWithRecent(kvjax.H2O):
    """H2O with another share of the budget for the newest tokens than a half."""

    share: float = 0.5

    def on_step(self, cache, state, step):
        """Keeps the newest tokens and those that have received the most attention."""
        keep, state = super().on_step(cache, state, step)
        newest = jnp.maximum((state * self.share).astype(jnp.int32), 1)
        return dataclasses.replace(keep, newest=newest), state


SUITES: dict[str, tuple[int | float, tuple[str, ...]]] = {
    # a budget, and variants
    "full": (1.0, ("full",)),
    "quest": (0.2, (
        "quest", "quest(first_page=False)", "quest(page=8)", "quest(page=32)",
        "quest(per_query_head=True)",
    )),
    # A step reads the least and the greatest key of every page too: 6 % of the cache with pages of
    # 16 tokens, 13 % with pages of 8. These read as many bytes as 0.2 with pages of 16.
    "quest of the same bytes": (0.1375, ("quest(page=8)",)),
    "quest of a tenth": (0.1, ("quest", "quest(page=8)")),
    "quest of a tenth's bytes": (0.0375, ("quest(page=8)",)),
    "kvcrush": (0.2, (
        "kvcrush(snapkv)", "kvcrush(snapkv, share=0.1)", "kvcrush(snapkv, share=0.5)",
        "kvcrush(snapkv, anchor='mean')", "kvcrush(snapkv, anchor='alternate')",
        "kvcrush(snapkv, pick='random')",
    )),
    "kvcrush of half": (0.5, ("kvcrush(snapkv)", "kvcrush(snapkv, share=0.1)")),
    "kvmerger": (0.1, (
        "kvmerger", "kvmerger(recent=46)", "kvmerger(recent=128)", "kvmerger(heavy=0)",
        "kvmerger(heavy=0.03)", "kvmerger(sigma=5.0)", "kvmerger(sigma=2.5)",
        "kvmerger(value_scale='none')",
    )),
    "kvmerger of few slots": (51, (
        "kvmerger", "kvmerger(recent=11)", "kvmerger(recent=25)", "kvmerger(recent=38)",
    )),
    "snapkv": (0.2, (
        "snapkv", "snapkv(window=64, kernel=5, pooling='avg')", "snapkv(window=32)",
        "snapkv(window=8)", "snapkv(kernel=5, pooling='avg')", "snapkv(kernel=1)",
        "snapkv(group_reduce='max')",
    )),
    "snapkv of half": (0.5, (
        "snapkv", "snapkv(window=64, kernel=5, pooling='avg')", "snapkv(window=32)",
        "snapkv(window=8)", "snapkv(kernel=5, pooling='avg')", "snapkv(kernel=1)",
    )),
    "chelsea": (0.2, (
        "chelsea", "chelsea(sinks=4)", "chelsea(recent=32)", "chelsea(recent=128)",
        "chelsea(chunk=64)", "chelsea(chunk='whole')",
    )),
    "streaming_llm": (0.2, (
        "streaming_llm", "streaming_llm(sinks=0)", "streaming_llm(sinks=1)",
        "streaming_llm(sinks=16)",
    )),
    "h2o": (0.2, (
        "h2o", "h2o_with_recent(share=0.1)", "h2o_with_recent(share=0.25)",
        "h2o_with_recent(share=0.75)",
    )),
    "pyramidkv": (0.2, (
        "pyramidkv", "pyramidkv(beta=5)", "pyramidkv(beta=2)", "pyramidkv(window=32)",
    )),
    "pyramidinfer": (0.2, (
        "pyramidinfer", "pyramidinfer(newest=0.05)", "pyramidinfer(emphasis=1.0)",
    )),
    "infinigen": (0.2, (
        "infinigen", "infinigen(alpha=5.0)", "infinigen(alpha=8.0)", "infinigen(alpha=12.0)",
        "infinigen(per_query_head=True)",
    )),
    "cam": (0.2, (
        "cam(streaming_llm)", "cam(streaming_llm, merge_tokens=32)",
        "cam(streaming_llm, expected=True)",
    )),
    "layer_budget": (0.2, (
        "layer_budget", "layer_budget(window=16)", "layer_budget(window=64)",
        "layer_budget(beta=0.2)",
    )),
}  # fmt: skip


def variant(name: str, budget: int | float) -> KVTransform:
    """A method by its text."""
    if name.startswith("h2o_with_recent"):
        return H2OWithRecent(budget, share=float(name.split("=")[1][:-1]))
    return kvjax.parse(name, budget)


class Sets(NamedTuple):
    """What a model has read, for variants to compress.

    Args:
      texts: texts, followed by `continuation [4, 128]`; `truth` is what every layer does next.
      inside: prompts with their questions.
      after: the same without `questions`.
      answers: of both.
    """

    texts: kvjax.ReadOnce
    continuation: np.ndarray
    truth: tuple[Truth, ...]
    inside: kvjax.ReadOnce
    after: kvjax.ReadOnce
    questions: list[list[int]]
    answers: list[str]


def read_sets(model, tokenizer, text: str, plays: str, transforms: list[KVTransform]) -> Sets:
    """Reads the three sets with the full cache."""
    ids = tokenizer(text).input_ids
    starts = np.linspace(0, len(ids) - PROMPT - CONTINUATION, TEXTS).astype(int)
    texts = [ids[start : start + PROMPT] for start in starts]
    follow = [ids[start + PROMPT : start + PROMPT + CONTINUATION] for start in starts]
    haystack, cases = Haystack(tokenizer, plays), []
    for task in ("needle", "multi_needle"):
        depths = np.linspace(0, 1, CASES)
        cases += [
            haystack.case(task, length=LENGTH, depth=float(depth), seed=seed)
            for seed, depth in enumerate(depths)
        ]

    def read(prompts, **size):
        return kvjax.ReadOnce(model, prompts, transforms, **size)

    room = {"max_prompt": ROOM, "max_new": 64}
    return Sets(
        texts=read(texts, buckets=(PROMPT,), max_new=CONTINUATION),
        continuation=np.array(follow, np.int32),
        truth=FullRun(as_functional(model), texts, [kvjax.Full()], new_tokens=1).truth,
        inside=read([case.prompt for case in cases], **room),
        after=read([case.context for case in cases], **room),
        questions=[case.question for case in cases],
        answers=[case.answers[0] for case in cases],
    )


def measure(model, tokenizer, sets: Sets, transform: KVTransform) -> dict[str, object]:
    """A row of the table."""
    context = sets.texts.context(transform)
    errors = np.array([
        _error(layer, cache, truth, context.length)
        for layer, cache, truth in zip(context.layers, context.caches, sets.truth, strict=True)
    ])  # fmt: skip
    nats = context_nll(model, context, sets.continuation).mean(1)
    asked = {"max_new_tokens": ANSWER, "end_tokens": (), "donate": True}
    inside = kvjax.generate(model, None, context=sets.inside.context(transform), **asked)
    after = kvjax.generate(model, sets.questions, context=sets.after.context(transform), **asked)

    def right(generation: kvjax.Generation) -> int:
        pairs = zip(generation.tokens, sets.answers, strict=True)
        return sum(is_right(tokenizer.decode(tokens), answer) for tokens, answer in pairs)

    return {
        "error": round(float(errors.mean()), 4),
        "worst_layer": round(float(errors.mean(1).max()), 3),
        "nats": round(float(nats.mean()), 4),
        "nats_of_texts": [round(float(x), 4) for x in nats],
        "inside": right(inside),
        "after": right(after),
    }


@functools.partial(jax.jit, static_argnums=0)
def _error(layer: KVTransform, cache, truth: Truth, position) -> jax.Array:
    """Of one layer, at the first new token."""
    own = jax.tree.map(lambda x: x[0], truth.record)
    out, _ = kvjax.attend(
        layer, cache, own.query, own.key, own.value, position[:, None], phase="decode",
        rope=own.rope, predicted_query=own.predicted, **own.options,
    )  # fmt: skip
    return attention_error(out, truth.output[0])


def _calibrated(transform: KVTransform, found) -> KVTransform:
    """With a calibration, if it is InfiniGen."""
    if not isinstance(transform, kvjax.InfiniGen):
        return transform
    return dataclasses.replace(transform, calibration=found)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file of 10,000 tokens or more")
    parser.add_argument("--haystack", required=True, help="UTF-8 file that needles are hidden in")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), from_pretrained(args.model)
    text, plays = Path(args.text).read_text(), Path(args.haystack).read_text()
    out = Path(args.out)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    done = {(row["suite"], row["method"]) for row in rows}
    missing = {
        (suite, name): variant(name, SUITES[suite][0])
        for suite in args.suites
        for name in SUITES[suite][1]
        if (suite, name) not in done
    }
    if any(suite == "infinigen" for suite, _ in missing):
        sample = [tokenizer(text).input_ids[-PROMPT:]]
        found = kvjax.calibrate_infinigen(model, sample)
        missing = {cell: _calibrated(tx, found) for cell, tx in missing.items()}
    shape = {
        "model": Path(args.model).name, "texts": TEXTS, "text_tokens": PROMPT,
        "continuation_tokens": CONTINUATION, "needles": 2 * CASES, "needle_tokens": LENGTH,
    }  # fmt: skip
    result = {"benchmark": "defaults", "shape": shape, "rows": rows}
    sets = read_sets(model, tokenizer, text, plays, list(missing.values())) if missing else None
    for (suite, name), transform in missing.items():
        found = measure(model, tokenizer, sets, transform)
        rows.append({"suite": suite, "method": name, "budget": SUITES[suite][0], **found})
        save(args.out, result)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        jax.clear_caches()
    write(args.out, result)


if __name__ == "__main__":
    main()
