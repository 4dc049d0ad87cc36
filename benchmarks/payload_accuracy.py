"""What keys and values in fewer bits change under every method, on the bundled model.

    python benchmarks/payload_accuracy.py --out benchmarks/results/payload_accuracy.json

Every evictor, merger and recall method, and the full cache, by itself and with `Quantize` in each
form: 8 bits, float8, 4 bits with groups of keys along a channel (KIVI's) and within a token. A row
has the right answers to the needles that `kvjax compare` asks for, over all depths, with the
Wilson interval; nats per token of held-out text beyond those of the same method without `Quantize`
(the same windows as `kvjax compare`'s, their ends read through the cache step by step); and the
bytes of one prompt's cache over those of the full cache. A chain that cannot work is a row too,
with the reason. `kvjax compare --method` takes the text of any row.

A dense layer of a recall method would keep its keys and values as they are: here no layer is dense.

The model has four layers of four KV heads of 32 channels, so that a group of 4-bit values within a
token is all of its channels: the figures say how the forms compare here, not what they do to a
large model.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import numpy as np
from common import write

import kvjax
from kvjax.evaluation import Grid, Proportion, continuation_nll, is_right
from kvjax.evaluation.comparison.material import Material
from kvjax.generation.continuation import decoder, new_text
from kvjax.models import demo, from_pretrained, load_tokenizer

TASK = "needle"
ROWS, WINDOWS = 15, 8  # cases of a batch, and windows of held-out text
METHODS = {
    "none": ("full",),
    "evicts": (
        "streaming_llm", "h2o", "snapkv", "pyramidkv", "pyramidinfer", "kvcrush(snapkv)",
        "cam(streaming_llm)",
    ),
    "merges": ("chelsea", "kvmerger"),
    "recalls": (
        "clusterkv(dense_layers=())", "quest(dense_layers=())", "infinigen(dense_layers=())",
    ),
}  # fmt: skip
FORMS = {
    "8 bits": "quantize",
    "float8": "quantize(bits='float8')",
    "4 bits, channel": "quantize(bits=4)",
    "4 bits, token": "quantize(bits=4, key_axis='token')",
}


def composed(method: str, form: str, kind: str) -> str:
    """The chain's text: a recall method comes behind what stores."""
    parts = (form, method) if kind == "recalls" else (method, form)
    return f"chain({', '.join(parts)})"


class Measure:
    """Measures transforms on the cases and windows of one grid."""

    def __init__(self, model, material: Material):
        self.model, self.material = model, material
        self.length, self.depths = material.grid.lengths[0], material.grid.depths
        self.end_tokens = (material.tokenizer.eos_token_id,)
        self.decode = decoder(material.tokenizer)
        # Once, for all forms alike.
        self.calibrated = functools.cache(
            lambda tx: kvjax.calibrated(tx, model, [material.sample()])
        )

    def __call__(self, text: str, exact: dict[str, object] | None = None) -> dict[str, object]:
        """A row, or why there is none; `exact`: the row of the method without `Quantize`."""
        try:
            transform = kvjax.parse(text, self.budget)
            kvjax.bind(transform, self.model.num_layers)
        except ValueError as error:
            return {"refused": str(error)}
        start = time.perf_counter()
        found = self.answers(self.calibrated(transform)) | self.nll(self.calibrated(transform))
        jax.clear_caches()
        if exact is not None:
            found["nll_over_exact"] = round(found["nll"] - exact["nll"], 5)
            found["right_over_exact"] = found["right"] - exact["right"]
        return {**found, "seconds": round(time.perf_counter() - start, 1)}

    @property
    def budget(self) -> int | float:
        """That of every method."""
        return self.material.grid.candidates[-1].budget

    def answers(self, transform) -> dict[str, object]:
        """Right answers and bytes, so many cases at a time."""
        cases = self.material.task(TASK, self.length).cases
        most_new, right = self.material.most_new(TASK, self.length), 0
        result = None
        for first in range(0, len(cases), ROWS):
            batch = cases[first : first + ROWS]
            result = kvjax.generate(
                self.model, [case.prompt for case in batch], transform=transform,
                max_new_tokens=most_new, end_tokens=self.end_tokens,
            )  # fmt: skip
            right += sum(
                is_right(new_text(self.decode, case.prompt, tokens), case.answers[0])
                for case, tokens in zip(batch, result.tokens, strict=True)
            )
        found = Proportion(right, len(cases))
        return {
            "right": found.right,
            "cases": found.cases,
            "interval": [round(end, 4) for end in found.interval],
            "bytes_over_full": round(result.cache_bytes / result.full_cache_bytes, 4),
        }

    def nll(self, transform) -> dict[str, float]:
        """Nats per token of held-out text."""
        rows, prompt = self.material.windows(self.length)
        nll = continuation_nll(self.model, transform, rows[:WINDOWS], prompt)
        return {"nll": round(float(nll.astype(np.float64).mean()), 5)}


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=75)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--out")
    args = parser.parse_args()
    grid = Grid.of(
        methods=["h2o"], budgets=[args.budget], lengths=[args.length], tasks=[TASK],
        cases=args.cases,
    )  # fmt: skip
    tokenizer = load_tokenizer(demo.directory())
    measure = Measure(
        from_pretrained(demo.directory()), Material(grid, tokenizer, demo.held_out_text())
    )
    rows = []
    for kind, methods in METHODS.items():
        for method in methods:
            exact = measure(method)
            rows.append({"method": method, "kind": kind, "form": "exact", **exact})
            print(rows[-1], flush=True)
            for form, text in FORMS.items():
                chain = composed(method, text, kind)
                rows.append({"method": chain, "kind": kind, "form": form, **measure(chain, exact)})
                print(rows[-1], flush=True)
    write(
        args.out,
        {
            "benchmark": "payload_accuracy",
            "model": "bundled",
            "task": TASK,
            "budget": args.budget,
            "length": args.length,
            "depths": list(grid.depths),
            "cases": args.cases,
            "new_tokens": measure.material.most_new(TASK, args.length),
            "rows": rows,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
