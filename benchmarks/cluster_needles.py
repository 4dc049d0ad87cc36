"""Needles that ClusterKV finds on a real model, by the size of clusters, the choice and the budget.

    python benchmarks/cluster_needles.py --model FOLDER --text tinyshakespeare.txt --out \\
        benchmarks/results/cluster_needles_smollm2.json

Each case is a text of `--lengths` tokens with a sentence that tells a code of six digits, and the
question for it. The question is `inside` what is read and compressed, or comes `after` it, as a
further prompt. A case is read once for all methods (`kvjax.ReadOnce`). `right` says of each method
whether the first number that it writes is the code; the last rows count them.

A run that was stopped goes on where it was, given the same arguments.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from common import Rows

import kvjax
from kvjax.evaluation import Haystack, is_right
from kvjax.models import from_pretrained, load_tokenizer

PAPER = "tokens_per_cluster=80, new_clusters=4, iterations=20, chunk=None"
METHODS = {
    "full": (),
    f"clusterkv({PAPER}, group_reduce='mean')": (0.2,),
    f"clusterkv({PAPER}, per_query_head=True)": (0.2,),
    f"clusterkv({PAPER})": (0.2,),
    "clusterkv(tokens_per_cluster=32)": (0.1,),
    "clusterkv(tokens_per_cluster=16, group_reduce='mean')": (0.1,),
    "clusterkv(tokens_per_cluster=16, chunk=None, iterations=20)": (0.1,),
    "clusterkv(tokens_per_cluster=16)": (0.05, 0.1),
    "clusterkv": (0.05, 0.1, 0.2),
    "clusterkv(per_query_head=True)": (0.05,),
    "chain(quantize(bits=4), clusterkv)": (0.05, 0.1),
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
    return Needle(case.prompt[:at], case.prompt[at:], case.answer)


def answers(
    model, own: Needle, inside: bool, length: int, transforms: dict[str, kvjax.KVTransform]
):
    """What each method writes."""
    text, question = (own.text + own.question, None) if inside else (own.text, [own.question])
    most = length + 64
    once = kvjax.ReadOnce(
        model, [text], list(transforms.values()), max_prompt=most, max_new=ANSWER, buckets=(most,)
    )
    for name, transform in transforms.items():
        context = once.context(transform)
        done = kvjax.generate(
            model, question, context=context, max_new_tokens=ANSWER, end_tokens=(), donate=True
        )
        yield name, done.tokens[0]


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
        f"{name} {share}".strip(): kvjax.parse(name, share or None)
        for name, shares in METHODS.items()
        for share in shares or ("",)
    }
    about = {"model": Path(args.model).name, "text": Path(args.text).name, "methods": METHODS}
    rows = Rows(args.out, {"benchmark": "cluster_needles", **about, "cases": args.cases})
    for length in args.lengths:
        for question in ("inside", "after"):
            key, count = {"length": length, "question": question}, dict.fromkeys(transforms, 0)
            for number in range(args.cases):
                if rows.has(**key, case=number):
                    continue
                own = needle(haystack, tokenizer, length, number, args.cases)
                found = answers(model, own, question == "inside", length, transforms)
                right = {
                    name: is_right(tokenizer.decode(tokens), own.answer) for name, tokens in found
                }
                rows.add(**key, case=number, right=right)
            for row in rows.rows:
                if "case" in row and {**row, **key} == row:
                    count = {name: count[name] + row["right"][name] for name in count}
            if not rows.has(**key, cases=args.cases):
                rows.add(**key, cases=args.cases, right=count)


if __name__ == "__main__":
    main()
