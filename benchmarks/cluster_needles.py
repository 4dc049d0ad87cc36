"""Needles that ClusterKV finds on a real model, by the size of clusters, the choice and the budget.

    python benchmarks/cluster_needles.py --model FOLDER --text tinyshakespeare.txt --out \\
        benchmarks/results/cluster_needles_smollm2.json

Each of `--cases` is a text of so many tokens with a sentence that tells a code of six digits, and
the question for it. The question is `inside` what is read and compressed, or comes `after` it, as a
further prompt. The cases are read once for all methods (`kvjax.ReadOnce`). `right` counts those in
which the first number that the method writes is the code, `cases` says of each whether it is.

A run that was stopped goes on where it was, given the same arguments.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

from common import Rows

import kvjax
from kvjax.evaluation import Haystack, is_right
from kvjax.models import from_pretrained, load_tokenizer

PAPER = "tokens_per_cluster=80, new_clusters=4, iterations=20, chunk=None"
METHODS = {
    "full": (),
    "clusterkv": (0.05, 0.1, 0.2),
    f"clusterkv({PAPER}, group_reduce='mean')": (0.2,),
    "clusterkv(tokens_per_cluster=16)": (0.05, 0.1),
    "clusterkv(per_query_head=True)": (0.05,),
    "chain(quantize(bits=4), clusterkv)": (0.05, 0.1),
    f"clusterkv({PAPER}, per_query_head=True)": (0.2,),
    "clusterkv(tokens_per_cluster=16, chunk=None, iterations=20)": (0.1,),
    "clusterkv(tokens_per_cluster=16, group_reduce='mean')": (0.1,),
    "clusterkv(tokens_per_cluster=32)": (0.1,),
}
ANSWER = 9  # tokens: six digits, and what ends the number


class Needle(NamedTuple):
    """A text, the question about it, and the answer."""

    text: list[int]
    question: list[int]
    answer: str


def needle(haystack: Haystack, tokenizer, length: int, number: int, count: int) -> Needle:
    """Case `number` of `count`, which are spread over all depths."""
    case = haystack.case("needle", length=length, depth=(number + 0.5) / count, seed=number)
    head = tokenizer("\n\nQuestion: What is the code of the", add_special_tokens=False).input_ids
    at = max(i for i in range(length) if case.prompt[i : i + len(head)] == head)
    return Needle(case.prompt[:at], case.prompt[at:], case.answers[0])


def read_once(model, cases: list[Needle], inside: bool, length: int, transforms):
    """The cases as they are compressed."""
    prompts = [own.text + own.question * inside for own in cases]
    size = {"max_prompt": length + 64, "max_new": ANSWER, "buckets": (length,)}
    return kvjax.ReadOnce(model, prompts, transforms, **size)


def written(model, once: kvjax.ReadOnce, transform, questions: list[list[int]] | None):
    """The tokens that a method writes to each case."""
    return kvjax.generate(
        model, questions, context=once.context(transform), max_new_tokens=ANSWER, end_tokens=(),
        donate=True,
    ).tokens  # fmt: skip


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file in which codes are hidden")
    parser.add_argument("--out", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--cases", type=int, default=15)
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model), load_tokenizer(args.model)
    haystack = Haystack(tokenizer, Path(args.text).read_text())
    transforms = {
        (name, share): kvjax.parse(name, share)
        for name in METHODS
        for share in METHODS[name] or (None,)
    }
    about = {"model": Path(args.model).name, "text": Path(args.text).name}
    rows = Rows(args.out, {"benchmark": "cluster_needles", **about})
    for length, question in itertools.product(args.lengths, ("inside", "after")):
        key, once = {"length": length, "question": question}, None
        cases = [needle(haystack, tokenizer, length, n, args.cases) for n in range(args.cases)]
        for (name, share), transform in transforms.items():
            own = {**key, "method": name, "budget": share}
            if rows.has(**own):
                continue
            inside = question == "inside"
            if once is None:
                once = read_once(model, cases, inside, length, list(transforms.values()))
            asked = None if inside else [case.question for case in cases]
            texts = map(tokenizer.decode, written(model, once, transform, asked))
            right = [is_right(text, case.answer) for text, case in zip(texts, cases, strict=True)]
            rows.add(**own, right=sum(right), cases=right)


if __name__ == "__main__":
    main()
