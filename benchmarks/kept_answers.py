"""Answers of compositions that keep part of a document: prose and needles against bytes.

    python benchmarks/kept_answers.py --model FOLDER --text essays.txt --data dev-v2.0.json \\
        --sample wikitext2.valid.txt --out benchmarks/results/kept_answers_smollm2.json

Documents have 1,400 tokens, and all questions come when they have been read and compressed. Ten
passages of SQuAD have ten questions each (`prose`); twelve documents of essays have four needles
each, of which each is asked for (`several`), and twelve have a single one (`single`). Needles are
spread evenly over a document.

- `recovery` of prose, in per cent: (nothing kept − method) / (nothing kept − full), of the losses
  of right answers in nats per token, with an interval over passages. With nothing kept, sinks stay.
- `single`, `several`: share of the needles that greedy decoding writes, with intervals. `by_depth`:
  those of both, by quarters of the document.
- `bytes`: of the context at rest, in the composition's own storage, as a share of those of the full
  cache, both in bfloat16.

Methods that score documents answer from the slots of the full cache (`kept_documents.py`): a test
shows that they answer as real storage does. All others use their own storage. Each document is read
once for each probe. Rows go into `--cells`, a document and a composition at a time, and a run that
was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import Rows, parser_of, save
from kept_documents import Compositions, ReadDocument, bytes_at_rest, method_of

import kvjax
from kvjax.evaluation import Estimate, answer_nll, is_right
from kvjax.evaluation.tasks import Frame, squad
from kvjax.evaluation.tasks.encoder import Encoder, sentences_of
from kvjax.evaluation.tasks.wording import HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, WORDINGS

QUESTIONS, NEEDLES = 10, 4  # questions of a passage, and needles of a document with several
NEW, ROOM = 24, 96  # tokens of an answer and of a question, at most
SINKS = 4  # that stay where nothing else does

OWN, KVZIP = "own_queries", "kvzip"
FOUR, EIGHT = "quantize(bits=4, group=64)", "quantize"
THREE_TWO, FOUR_TWO = "quantize(bits=2, key_bits=3)", "quantize(bits=2, key_bits=4)"


def scored(method: str, budget: float, form: str = "", **options: object) -> str:
    """Returns the text of a method that scores documents, and of the form that it is stored in."""
    listed = "".join(f", {name}={value}" for name, value in options.items())
    text = f"{method}(budget={budget}, room={ROOM}{listed})"
    return f"chain({text}, {form})" if form else text


def by_head(method: str, budget: float, form: str = "", **options: object) -> str:
    """Returns the text of the composition in which heads share the budget by a profile."""
    return f"by_head({scored(method, budget, form, **options)})"


# Some 1.5, 3 and 6 % of the bytes come first.
FRONTIER = (
    *(by_head(OWN, budget, THREE_TWO) for budget in (0.068, 0.14, 0.29)),
    by_head(OWN, 0.25, FOUR_TWO),
    *(by_head(OWN, budget, FOUR) for budget in (0.19, 0.3, 0.5)),
    *(by_head(OWN, budget) for budget in (0.1, 0.2)),
    *(by_head(KVZIP, budget) for budget in (0.1, 0.2)), by_head(KVZIP, 0.14, THREE_TWO),
    "snapkv(budget=0.2)", "h2o(budget=0.2)", "quantize(bits=4)", EIGHT,
    "chain(quantize(bits=4), clusterkv(budget=0.2))",
)  # fmt: skip
# One part at a time, at a tenth of the tokens.
PARTS = (
    by_head(OWN, 0.1), by_head(OWN, 0.1, use=0.0), by_head(OWN, 0.1, use=1.0),
    by_head(OWN, 0.1, use=0.33), by_head(OWN, 0.1, use=0.67), by_head(OWN, 0.1, piece=512),
    by_head(OWN, 0.1, piece=1408), scored(OWN, 0.1),
    by_head(KVZIP, 0.1), by_head(KVZIP, 0.1, values=False), by_head(KVZIP, 0.1, kernel=1),
    scored(KVZIP, 0.1),
)  # fmt: skip
SETS = {"frontier": FRONTIER, "parts": PARTS}


class Document(NamedTuple):
    """A document and its questions.

    Args:
      kind: `prose`, `single` or `several`.
      questions: token ids of each.
      answers: token ids and text of each.
      depths: share of the document before each answer; empty for prose.
    """

    kind: str
    number: int
    tokens: list[int]
    questions: list[list[int]]
    answers: list[tuple[list[int], str]]
    depths: list[float]


def passages(tokenizer: Any, data: str, length: int, count: int) -> Iterator[Document]:
    """Yields passages of SQuAD with ten questions each."""
    frame = Frame.of(tokenizer, chat=False)
    task = squad(
        tokenizer, data=data, length=length, cases=QUESTIONS * (count + 5), frame=frame,
        questions=QUESTIONS,
    )  # fmt: skip
    of_passages = itertools.groupby(task.cases, key=lambda case: case.details["passage"])
    # Some passages have fewer questions.
    whole = (each for _, of_one in of_passages if len(each := list(of_one)) == QUESTIONS)
    for number, cases in enumerate(itertools.islice(whole, count)):
        answers = [(list(case.details["answer_tokens"]), case.answers[0]) for case in cases]
        yield Document(
            "prose", number, cases[0].context, [case.question for case in cases], answers, []
        )


def haystacks(
    tokenizer: Any, text: str, length: int, count: int, needles: int
) -> Iterator[Document]:
    """Yields essays with needles at evenly spread depths."""
    encoder, sentences = Encoder(tokenizer), sentences_of(text)
    wording = WORDINGS[0]
    for number in range(count):
        rng = np.random.default_rng((number, needles))
        adjectives = rng.choice(HELD_OUT_ADJECTIVES, needles, replace=False)
        nouns = rng.choice(HELD_OUT_NOUNS, needles, replace=False)
        keys = [f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]
        values = [str(value) for value in rng.integers(100_000, 1_000_000, needles)]
        wanted = (np.arange(needles) + rng.random(needles)) / needles
        hidden = [wording.needle(*pair) for pair in zip(keys, values, strict=True)]
        room = length - ROOM - sum(len(encoder.next(each)) for each in hidden)
        tokens = list(Frame.of(tokenizer, chat=False).before)
        start, read, done, depths = int(rng.integers(len(sentences) // 2)), 0, 0, []
        for sentence in sentences[start:]:
            while done < needles and wanted[done] * room <= read:
                depths.append(len(tokens))
                tokens += encoder.next(hidden[done])
                done += 1
            more = encoder.next(f" {sentence}")
            if read + len(more) > room:
                break
            tokens, read = [*tokens, *more], read + len(more)
        for each in hidden[done:]:
            depths.append(len(tokens))
            tokens += encoder.next(each)
        yield Document(
            "several" if needles > 1 else "single", number, tokens,
            [list(encoder.next(wording.ask(key))) for key in keys],
            [(list(encoder.next(f" {value}.")), value) for value in values],
            [depth / len(tokens) for depth in depths],
        )  # fmt: skip


class Measure(Compositions):
    """The model, its profile, and what compositions take and answer."""

    def __init__(self, args: argparse.Namespace, texts: list[str]) -> None:
        super().__init__(args.model, args.sample, ["full", *texts], args.length, ROOM, NEW)
        self.full_bytes = bytes_at_rest(self.model, kvjax.Full(), self.length)

    def context(self, text: str, document: Document, once: ReadDocument) -> kvjax.Context:
        """Returns the document as a composition keeps it; `nothing` keeps its sinks."""
        if text == "nothing":
            sinks = np.arange(len(document.tokens)) < SINKS
            shape = self.model.num_layers, self.model.kv_heads, sinks.size
            return once.kept(np.broadcast_to(sinks, shape), kvjax.Full())
        transform = self.transforms[text]
        if method_of(transform) is None:
            return once.context(transform)
        return once.kept_by(transform)

    def asked(self, document: Document, context: kvjax.Context) -> list[float]:
        """Returns the loss of each right answer, or whether each needle is written."""
        if document.kind == "prose":
            answers = [tokens for tokens, _ in document.answers]
            return answer_nll(self.model, context, answers, document.questions).tolist()
        # A single question is asked as often as there are several, since one program serves both.
        questions = (document.questions * NEEDLES)[:NEEDLES]
        longest = max(len(tokens) for tokens, _ in document.answers)
        written = kvjax.generate(
            self.model, questions, context=context.repeat(NEEDLES), max_new_tokens=longest + 1,
            end_tokens=(),
        ).tokens[: len(document.questions)]  # fmt: skip
        texts = self.tokenizer.batch_decode(np.asarray(written))
        return [
            float(is_right(text, value))
            for text, (_, value) in zip(texts, document.answers, strict=True)
        ]

    def bytes(self, text: str) -> float:
        """Returns the share of the full cache's bytes in bfloat16 that a composition keeps."""
        kept = bytes_at_rest(self.model, self.transforms[text], self.length)
        return kept / self.full_bytes


def summary(rows: list[dict], text: str) -> dict[str, Any]:
    """Returns what all documents together say of a composition."""
    by_method: dict[str, dict[tuple[str, int], dict]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["kind"], row["number"]] = row
    mine, full, nothing = (by_method.get(name, {}) for name in (text, "full", "nothing"))
    prose = [key for key in mine if key[0] == "prose"]
    lost, worth, groups, losses = [], [], [], []
    for key in prose:
        three = (each[key]["scores"] for each in (mine, full, nothing))
        for score, all_kept, none_kept in zip(*three, strict=True):
            lost.append(none_kept - score)
            worth.append(none_kept - all_kept)
            groups.append(key[1])
            losses.append(score)
    result: dict[str, Any] = {}
    if prose:
        recovery = Estimate.ratio(lost, worth, groups)
        result["loss"] = float(np.mean(losses))
        result["recovery"] = {
            name: round(100 * value, 1)
            for name, value in recovery._asdict().items() if name != "cases"
        }  # fmt: skip
    by_depth: list[list[float]] = [[] for _ in range(4)]
    for kind in ("single", "several"):
        found = [
            (score, depth)
            for key, row in mine.items() if key[0] == kind
            for score, depth in zip(row["scores"], row["depths"], strict=True)
        ]  # fmt: skip
        for score, depth in found:
            by_depth[min(int(4 * depth), 3)].append(score)
        if found:
            result[kind] = Estimate.of([score for score, _ in found])._asdict()
    if any(by_depth):
        result["by_depth"] = [float(np.mean(each)) if each else None for each in by_depth]
    return result


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "data", "out", "cells")
    parser.add_argument("--text", required=True, help="what needles are hidden in")
    parser.add_argument("--sample", required=True, help="text from which the profile is made")
    parser.add_argument("--length", type=int, default=1408, help="tokens of a prompt at most")
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--haystacks", type=int, default=12, help="of each kind")
    parser.add_argument("--no-single", action="store_true", help="no documents with one needle")
    parser.add_argument("--set", choices=tuple(SETS), default="frontier", help="compositions")
    parser.add_argument("--methods", nargs="+", help="compositions in place of a set")
    args = parser.parse_args()
    texts = list(args.methods or SETS[args.set])
    measure = Measure(args, texts)
    text, tokenizer = Path(args.text).read_text(), measure.tokenizer
    needles = [NEEDLES] if args.no_single else [1, NEEDLES]
    documents = [
        *passages(tokenizer, args.data, args.length, args.passages),
        *(
            document
            for count in needles
            for document in haystacks(tokenizer, text, args.length, args.haystacks, count)
        ),
    ]
    # Documents of all kinds come early, so that a part of the run tells something.
    documents.sort(key=lambda document: document.number)
    about = {
        "benchmark": "kept_answers", "model": Path(args.model).name, "tokens": args.length,
        "passages": args.passages, "haystacks": args.haystacks,
    }  # fmt: skip
    rows = Rows.of(args, about)
    for document in documents:
        key = {"kind": document.kind, "number": document.number}
        left = [each for each in ("full", "nothing", *texts) if not rows.has(method=each, **key)]
        if not left:
            continue
        once = measure.read(document.tokens)
        for each in left:
            scores = measure.asked(document, measure.context(each, document, once))
            scores = [round(score, 4) for score in scores]
            rows.add(method=each, **key, scores=scores, depths=document.depths)
    result = [
        {"method": each, "bytes": round(measure.bytes(each), 4), **summary(rows.rows, each)}
        for each in texts
    ]
    ends = [{"method": each, **summary(rows.rows, each)} for each in ("full", "nothing")]
    print(json.dumps(result, indent=1))
    save(args.out, {**about, "rows": [*ends, *result]})


if __name__ == "__main__":
    main()
