"""Seconds and bytes of `by_head(...)` beside the full cache and SnapKV, in one process.

    python benchmarks/small_cache_times.py --model FOLDER --text book.txt \\
        --profile heads.safetensors --out benchmarks/results/small_cache_times_smollm2.json

- `reading`: seconds in which `kvjax.read` reads a document, method by method in turns, so that
  drift of the machine hits all alike; medians, and their ratios to the full cache's.
- `step`: seconds of a decode step, likewise.
- `compiling`: seconds of the first call minus those of the second, from nothing: of reading a
  document, of reading a question, and of the decode loop. `again` counts programs that a further
  question and document of other lengths compile.
- `bytes`: of a context, with room for 64 tokens of questions and 32 new ones, and without this
  room; as shares of the full cache's with and without it.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax
from common import Rows, parser_of

import kvjax
from kvjax.models import from_pretrained, load_tokenizer

READ_TOKENS, STEP_TOKENS, BYTES_TOKENS, COMPILED_TOKENS = (1024, 4000), 7900, 4096, 1024
WHAT = "compiling", "bytes", "reading", "step"
ROOM, NEW = 64, 32  # tokens of questions and answers
BUDGET = 0.05
COMPILED: list[str] = []  # an entry for each program that XLA compiles


def _notice(event: str, duration_secs: float, **details: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(str(details))


jax.monitoring.register_event_duration_secs_listener(_notice)


def methods(model: Any, profile: str) -> dict[str, kvjax.KVTransform]:
    """The methods by name."""
    kvzip = f"kvzip(budget={BUDGET}, room={ROOM})"
    inside = {
        "by_head": kvzip,
        "by_head, 8 bits": f"chain({kvzip}, quantize)",
        "by_head, own queries": kvzip.replace("kvzip", "own_queries"),
    }
    texts = {"full": "full", "snapkv": f"snapkv(budget={BUDGET})", "kvzip": kvzip}
    texts |= {name: f"by_head({text}, profile={profile!r})" for name, text in inside.items()}
    return {name: kvjax.calibrated(kvjax.parse(text), model, []) for name, text in texts.items()}


class Measure:
    """The model, its text and the methods."""

    def __init__(self, folder: str, text: str, profile: str, names: list[str] | None) -> None:
        self.model, tokenizer = from_pretrained(folder), load_tokenizer(folder)
        self.ids = tokenizer(Path(text).read_text()).input_ids
        self.tokenizer = tokenizer
        every = methods(self.model, profile)
        self.methods = {name: every[name] for name in names or every}

    def read(self, name: str, tokens: int, start: int = 0) -> kvjax.Context:
        """A document in the cache of a method."""
        return kvjax.read(
            self.model, [self.ids[start : start + tokens]], transform=self.methods[name],
            max_prompt=tokens + ROOM, max_new=NEW, document=self.tokenizer,
        )  # fmt: skip

    def ask(self, context: kvjax.Context, length: int = 24) -> Any:
        """An answer to some tokens."""
        return kvjax.generate(
            self.model, [self.ids[-length:]], context=context, max_new_tokens=NEW, end_tokens=(),
        )  # fmt: skip

    def reading(self, tokens: int, rounds: int) -> dict[str, Any]:
        """Seconds of reading, by method."""
        seconds: dict[str, list[float]] = {name: [] for name in self.methods}
        for number in range(1 + rounds):  # the first compiles
            for name in self.methods:
                start = time.perf_counter()
                jax.block_until_ready(self.read(name, tokens).held)
                if number:
                    seconds[name].append(time.perf_counter() - start)
        return _medians(seconds)

    def step(self, names: tuple[str, ...], tokens: int, rounds: int) -> dict[str, Any]:
        """Seconds of a step, by method."""
        contexts = {name: self.read(name, tokens) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(1 + rounds):
            for name, context in contexts.items():
                result = self.ask(context)
                if number:
                    seconds[name].append(result.tpot_s)
        return _medians(seconds)

    def compiling(self, name: str, tokens: int) -> dict[str, Any]:
        """Seconds of compiling, from nothing."""
        jax.clear_caches()
        seconds: dict[str, list[float]] = {"document": [], "question and loop": []}
        for _ in range(2):
            start = time.perf_counter()
            context = self.read(name, tokens)
            jax.block_until_ready(context.held)
            seconds["document"].append(time.perf_counter() - start)
            start = time.perf_counter()
            self.ask(context)
            seconds["question and loop"].append(time.perf_counter() - start)
        before = len(COMPILED)
        self.ask(self.read(name, tokens, 500), 17)
        compiled = {part: round(first - second, 2) for part, (first, second) in seconds.items()}
        return {**compiled, "again": len(COMPILED) - before}

    def bytes(self, name: str, tokens: int) -> dict[str, float]:
        """Bytes of a context, as shares of the full cache's."""
        context = self.read(name, tokens)
        awake = context.awake()
        return {
            "bytes": awake.nbytes,
            "share": round(awake.nbytes / awake.full_nbytes, 4),
            "without_room": round(context.nbytes / context.full_nbytes, 4),
        }


def _medians(seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {name: round(each / medians["full"], 3) for name, each in medians.items()}
    return {"seconds": {name: round(x, 5) for name, x in medians.items()}, "over_full": ratios}


def main() -> None:
    """Measures the rows that the file does not have yet."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--text", required=True, help="UTF-8 file of at least 10,000 tokens")
    parser.add_argument("--profile", required=True, help="file of kvjax profile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--read", type=int, nargs="+", default=READ_TOKENS, help="tokens to read")
    parser.add_argument("--method", nargs="+", help="names of methods, `full` among them")
    args = parser.parse_args()
    measure = Measure(args.model, args.text, args.profile, args.method)
    settings = {"model": Path(args.model).name, "budget": BUDGET, "rounds": args.rounds}
    rows = Rows(args.out, {"benchmark": "small_cache_times", "settings": settings})

    def lacks(what: str, **key: object) -> bool:
        return what in args.only and not rows.has(what=what, **key)

    for name in ("snapkv", "by_head"):  # first, as long as nothing is compiled
        if lacks("compiling", method=name):
            row = measure.compiling(name, COMPILED_TOKENS)
            rows.add(what="compiling", method=name, tokens=COMPILED_TOKENS, **row)
    for name in measure.methods:
        if lacks("bytes", method=name):
            row = measure.bytes(name, BYTES_TOKENS)
            rows.add(what="bytes", method=name, tokens=BYTES_TOKENS, **row)
    for tokens in args.read:
        if lacks("reading", tokens=tokens):
            rows.add(what="reading", tokens=tokens, **measure.reading(tokens, args.rounds))
    if lacks("step"):
        names = ("full", "snapkv", "by_head", "by_head, 8 bits")
        rows.add(what="step", tokens=STEP_TOKENS, **measure.step(names, STEP_TOKENS, args.rounds))


if __name__ == "__main__":
    main()
