"""KVzip in kvpress (PyTorch) and in kvjax: scores, kept positions, answers, seconds and bytes.

    python benchmarks/vs_kvpress_kvzip.py --model FOLDER --text essays.txt \\
        --sample wikitext2.valid.txt --out benchmarks/results/vs_kvpress_kvzip_smollm2.json

Environment, processes, threads and weights are those of `vs_kvpress.py`. Documents are the contexts
of needles, and the question is asked when the document has been compressed. Both sides repeat the
document after the same tokens. The file is written row by row, and a run that was stopped goes on.
Profiles for `ByHead` are made from `--sample`.

- `scores`: `median` and `most` are of the relative differences of all scores, of all layers, KV
  heads and tokens. Where `piece` is short, one document is repeated in several pieces; `held` is
  then the share of the best tokens of all heads by kvpress's scores that are so by kvjax's too.
- `positions`: pairs of sets, compared as in `vs_kvpress.py`, of all documents together. `of_model`:
  what KVzipPress keeps, and the best tokens of all layers and heads by kvjax's scores. `of_layer`:
  the same with `layerwise=True`, and the best of each layer. `of_head`: the best of each head by
  kvpress's scores, and what kvjax's KVzip keeps. `by_head`: what KVzipPress keeps, and what kvjax's
  ByHead keeps. `held`: the share of the first sets' positions that the second ones have too.
- `answers`: right answers, and bytes of the caches when the document has been compressed. Those of
  kvjax have room for question and answer.
- `times`: the least of `--rounds` calls, one side after the other, and the greatest resident memory
  of a new process during its first call. `read_s` is the document, with its compression.

Where the sides differ:

- KVzipPress shares its budget among all heads of all layers, or with `layerwise` of a layer, by the
  document's own scores. kvjax's KVzip gives every head the same number of tokens; ByHead shares
  the budget by a profile of the model, so that shapes are known when a document comes.
- KVzipPress evicts nothing: the cache keeps all its rows, and in every step the keys of those that
  are left out are overwritten by one that no query of that step attends to.
- kvjax's default multiplies scores by the size of values (`values=True`) and averages them over
  neighbouring tokens (`kernel=3`).
- The probabilities of a piece's queries are over the whole document and the piece in kvjax, in
  KVzipPress over the first four tokens, the document's part that is repeated, and the piece.
- KVzipPress ends its instruction by the end of a chat message. What begins a chat, such as a system
  prompt, gets no scores, and all but four tokens of it go. Here both sides have the instruction of
  `kvjax.Repetition.of`, and nothing is a chat.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Rows
from vs_kvpress import SIDES, Positions, Worker, compare_positions, make_environment

from kvjax import Repetition
from kvjax.evaluation import Haystack, is_right
from kvjax.models import load_tokenizer

SHARES = (0.5, 0.2, 0.1, 0.05)  # of the document that stays
DOCUMENTS = 2  # of which scores and positions are compared
PIECE, SHORT_PIECE = 2048, 256
SINKS, NEW_TOKENS = 4, 16
PARTS = ("positions", "answers", "times")
PROFILES = {
    "heads.safetensors": "kvzip",
    "heads_without_values.safetensors": "kvzip(values=False, kernel=1)",
}
FULL = {"kvpress": "None", "kvjax": "Full()"}

# {ratio} is the share that goes, {share} what stays.
METHODS = {
    "kvpress": {"KVzipPress": "KVzipPress({ratio})"},
    "kvjax": {
        "kvzip(values=False, kernel=1)": "KVzip({share}, values=False, kernel=1, room=64)",
        "kvzip": "KVzip({share}, room=64)",
        "by_head(kvzip(values=False, kernel=1))": (
            "ByHead(KVzip({share}, values=False, kernel=1, room=64), "
            "'heads_without_values.safetensors')"
        ),
        "by_head(kvzip)": "ByHead(KVzip({share}, room=64), 'heads.safetensors')",
    },
}
COMPARED = {  # of which positions are compared
    "kvpress": ("KVzipPress({ratio})", "KVzipPress({ratio}, layerwise=True)"),
    "kvjax": tuple(
        METHODS["kvjax"][name]
        for name in ("kvzip(values=False, kernel=1)", "by_head(kvzip(values=False, kernel=1))")
    ),
}
TIMED = (("full", None), ("kvzip", 0.2), ("by_head(kvzip)", 0.2), ("by_head(kvzip)", 0.05))


def written(text: str, share: float | None) -> str:
    """An expression of `METHODS` at a share."""
    return text if share is None else text.format(share=share, ratio=round(1 - share, 6))


def best_scores(scores: Sequence, groups: int, count: int) -> list[list[list[int]]]:
    """Positions of the `count` best tokens of each group of heads, sinks first.

    Args:
      scores: `[layers, KV heads, tokens]`.
      groups: 1: all heads of all layers compete; as many as layers: those of a layer; as many as
        layers · KV heads: none.
      count: in each group.
    """
    ranked = np.array(scores, np.float64)
    ranked[..., :SINKS] = np.inf
    order = np.argsort(-ranked.reshape(groups, -1), axis=1, kind="stable")[:, :count]
    kept = np.zeros((groups, ranked.size // groups), bool)
    np.put_along_axis(kept, order, True, axis=1)
    return [[np.flatnonzero(head).tolist() for head in row] for row in kept.reshape(ranked.shape)]


def relative_differences(kvpress: Sequence, kvjax: Sequence) -> dict[str, float]:
    """Median and greatest relative difference of scores."""
    theirs, ours = np.array(kvpress, np.float64), np.array(kvjax, np.float64)
    gap = np.abs(theirs - ours) / np.maximum(np.maximum(theirs, ours), 1e-30)
    return {"median": float(np.median(gap)), "most": float(gap.max())}


def joined(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of several documents: sums, means of shares, and the greatest `gap`."""
    found = {name: sum(each[name] for each in figures) for name in figures[0]}
    means = {name: found[name] / len(figures) for name in ("common", "held")}
    return found | means | {"gap": max(each["gap"] for each in figures)}


def count_kept(positions: Positions) -> int:
    """Tokens that are kept, of all heads."""
    return sum(len(head) for layer in positions for head in layer)


def held(first: Positions, second: Positions) -> float:
    """The share of the first positions that are among the second."""
    layers = zip(first, second, strict=True)
    heads = [head for layer in layers for head in zip(*layer, strict=True)]
    return sum(len(set(a) & set(b)) for a, b in heads) / count_kept(first)


class Comparison:
    """Rows of the result.

    Args:
      start: side and method → a new process.
      cases: needles.
      instruction: what the sides get, see the worker.
      rows: where results go.
    """

    def __init__(self, start: Any, cases: list, instruction: dict, rows: Rows) -> None:
        self.start, self.cases, self.instruction, self.rows = start, cases, instruction, rows

    def compare(self) -> None:
        """Scores and positions."""
        if self.rows.has(part="positions"):
            return
        asked = [(name, share) for share in SHARES for name in (0, 1)]
        figures: dict[float, dict[str, list]] = {share: {} for share in SHARES}
        scores = []
        workers = {side: self.start(side, FULL[side]) for side in SIDES}
        for case in self.cases[:DOCUMENTS]:
            found = {}
            for side, worker in workers.items():
                texts = [written(COMPARED[side][name], share) for name, share in asked]
                request = {"document": case.context, "instruction": self.instruction}
                found[side] = worker.ask("repeated", methods=texts, **request)
            theirs, ours = (np.array(found[side]["scores"]) for side in SIDES)
            scores.append(relative_differences(theirs, ours))
            layers, heads, _ = ours.shape
            for number, (name, share) in enumerate(asked):
                kvpress, kvjax = (found[side]["positions"][number] for side in SIDES)
                groups, label = ((1, "of_model"), (layers, "of_layer"))[name]
                pairs = {label: (kvpress, best_scores(ours, groups, count_kept(kvpress) // groups))}
                if name:
                    whole = found["kvpress"]["positions"][number - 1]
                    pairs["by_head"] = whole, kvjax
                else:
                    each = layers * heads
                    pairs["of_head"] = best_scores(theirs, each, len(kvjax[0][0])), kvjax
                for pair, sets in pairs.items():
                    compared = compare_positions(*sets, found["kvpress"]["scores"])
                    figures[share].setdefault(pair, []).append(compared | {"held": held(*sets)})
        pieces = self.instruction | {"ending": [], "piece": SHORT_PIECE}
        in_pieces = []
        for side, worker in workers.items():
            texts = [written(COMPARED[side][0], SHARES[0])]
            document = self.cases[0].context
            answer = worker.ask("repeated", methods=texts, document=document, instruction=pieces)
            in_pieces.append(answer["scores"])
            worker.close()
        most = {name: max(each[name] for each in scores) for name in scores[0]}
        self.rows.add(part="scores", documents=len(scores), piece=PIECE, **most)
        for share in SHARES:
            count = round(share * np.size(in_pieces[0]))
            both = held(*(best_scores(side, 1, count) for side in in_pieces))
            self.rows.add(
                part="scores", documents=1, piece=SHORT_PIECE, share=share, held=both,
                **relative_differences(*in_pieces),
            )  # fmt: skip
        for share, pairs in figures.items():
            for pair, each in pairs.items():
                row = joined(each)
                self.rows.add(part="positions", share=share, sets=pair, **row)

    def answers(self, tokenizer: Any) -> None:
        """Right answers and bytes, case by case."""
        missing = [n for n in range(len(self.cases)) if not self.rows.has(part="answers", case=n)]
        if not missing:
            return
        methods = {side: [("full", None, FULL[side])] for side in SIDES}
        for side, named in METHODS.items():
            for name, text in named.items():
                methods[side] += [(name, share, written(text, share)) for share in SHARES]
        workers = {side: self.start(side, FULL[side]) for side in SIDES}
        for number in missing:
            case, row = self.cases[number], {}
            for side, worker in workers.items():
                found = worker.ask(
                    "answers", methods=[text for _, _, text in methods[side]],
                    document=case.context, question=case.question, new=NEW_TOKENS,
                    instruction=self.instruction,
                )  # fmt: skip
                row[side] = [
                    {
                        "method": name, "share": share, "text": text,
                        "right": is_right(tokenizer.decode(each["tokens"]), case.answers[0]),
                        "cache_bytes": each["cache_bytes"],
                    }
                    for (name, share, text), each in zip(methods[side], found, strict=True)
                ]  # fmt: skip
            self.rows.add(part="answers", case=number, **row)
        for worker in workers.values():
            worker.close()

    def times(self, rounds: int) -> None:
        """Seconds, memory and bytes."""
        case = self.cases[0]
        request = {
            "document": case.context, "question": case.question, "new": NEW_TOKENS,
            "instruction": self.instruction,
        }  # fmt: skip
        for name, share in TIMED:
            if self.rows.has(part="times", method=name, share=share):
                continue
            texts = list(FULL.values())
            if share is not None:
                both = METHODS["kvpress"]["KVzipPress"], METHODS["kvjax"][name]
                texts = [written(text, share) for text in both]
            workers = [self.start(side, text) for side, text in zip(SIDES, texts, strict=True)]
            for worker in workers:  # compiles
                worker.ask("ask", **request)
            calls = [[worker.ask("ask", **request) for worker in workers] for _ in range(rounds)]
            for worker in workers:
                worker.close()
            row: dict[str, Any] = {}
            for number, side in enumerate(SIDES):
                worker = self.start(side, texts[number])
                worker.ask("ask", **request)
                least = {
                    key: round(min(call[number][key] for call in calls), 5)
                    for key in ("read_s", "question_s", "per_token_s", "cache_bytes")
                }
                row[side] = {"text": texts[number], **least, **worker.ask("memory")}
                worker.close()
            self.rows.add(part="times", method=name, share=share, **row)


def main() -> None:
    """Measures what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file in which needles are hidden")
    parser.add_argument("--sample", required=True, help="text from which profiles are made")
    parser.add_argument("--tokens", type=int, default=1024, help="of document and question")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--environment", type=Path, help="folder of kvpress's environment")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    for name in ("model", "text", "sample", "out"):
        setattr(args, name, os.path.abspath(getattr(args, name)))
    tokenizer = load_tokenizer(args.model)
    haystack = Haystack(tokenizer, Path(args.text).read_text())
    cases = [
        haystack.case("needle", length=args.tokens, depth=(seed + 0.5) / args.cases, seed=seed)
        for seed in range(args.cases)
    ]
    ending = tokenizer("\n\n", add_special_tokens=False).input_ids
    whole = Repetition.of(tokenizer)
    if whole.first[-len(ending) :] != tuple(ending):
        parser.error(f"the instruction must end in the tokens {ending}, got {whole.first}")
    instruction = {
        "first": whole.first[: -len(ending)], "further": whole.further, "ending": ending,
        "piece": PIECE,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.environment or Path(temporary)).absolute()
        python = {"kvpress": make_environment(folder), "kvjax": sys.executable}
        worker = Path(__file__).absolute().with_name("vs_kvpress_worker.py")
        os.chdir(folder)  # names of methods have those of the files of profiles in them
        for file, method in PROFILES.items():
            if not Path(file).exists():
                words = ["--method", method, "--text", args.sample, "--model", args.model]
                command = [sys.executable, "-m", "kvjax.cli.main", "profile", *words, "--out", file]
                subprocess.run(command, check=True)
        given = ["--model", args.model, "--threads", str(args.threads)]

        def start(side: str, method: str) -> Worker:
            command = [python[side], worker, side, *given, "--method", method]
            return Worker(command, folder / "compiled")

        versions = {}
        for side, method in FULL.items():
            process = start(side, method)
            versions[side] = process.ask("versions")
            process.close()
        settings = {
            "model": Path(args.model).name, "text": Path(args.text).name,
            "sample": Path(args.sample).name, "tokens": args.tokens, "dtype": "float32",
            "threads": args.threads, "rounds": args.rounds, "new_tokens": NEW_TOKENS,
            "versions": versions,
        }  # fmt: skip
        rows = Rows(args.out, {"benchmark": "vs_kvpress_kvzip", "settings": settings})
        comparison = Comparison(start, cases, instruction, rows)
        if "positions" in args.parts:
            comparison.compare()
        if "answers" in args.parts:
            comparison.answers(tokenizer)
        if "times" in args.parts:
            comparison.times(args.rounds)


if __name__ == "__main__":
    main()
