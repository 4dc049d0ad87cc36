"""kvpress (PyTorch) and kvjax on a CPU: kept positions, seconds, memory and answers, in one run.

    python benchmarks/vs_kvpress.py --model FOLDER --text wiki.txt --out \\
        benchmarks/results/vs_kvpress_smollm2.json

It makes an environment for kvpress (`--environment`, otherwise a temporary folder) and installs
pinned versions there. pip downloads PyTorch for GPUs, unless `PIP_EXTRA_INDEX_URL` is
https://download.pytorch.org/whl/cpu. Each row is a method and a prompt length. Both frameworks get
the same weights in float32, the same tokens, as many slots and as many threads on the same cores,
each in a process of its own (`vs_kvpress_worker.py`) that has run the request once. Nothing else
should run meanwhile: PyTorch's threads wait for each other in a loop, and suffer more than XLA's.

- `first_s`, `per_token_s`: the least of `--rounds` calls, one framework after the other.
  `times_as_fast` divides kvpress's seconds by kvjax's.
- `peak_bytes`: the greatest resident memory of a new process during its first call; kvjax has the
  programs from a compilation cache.
- `positions`: the sets of kept positions per layer and KV head at the prompt's end. `equal` of
  `lists` sets are equal, in `contained` one holds the other, `common` is the share of positions
  that both keep, of the smaller set. `gap`: by how much, relatively, kvpress's score of a token
  that it alone keeps exceeds that of a token that kvjax alone keeps, at most. It says how near a
  tie was that fell differently.
- `answers`, at the shortest length: of `--cases` needles with the question inside, how many each
  framework answers, and in how many cases both write the same.

Where positions are not equal:

- snapkv: both sum the same products in another order. Scores differ in the last bits of a float32,
  and two tokens at the edge of the budget change places where `gap` is that small.
- pyramidkv: kvpress counts the window in the least layer, `B / beta`, kvjax adds it to `base /
  beta`; `pyramid_beta` turns one into the other. kvpress rounds each layer's slots, kvjax rounds
  them so that they add up: some layers have a slot more or less (`contained`).
- h2o: another method. kvpress's `ObservedAttentionPress` keeps what received the most attention per
  query that could see it, kvjax's `H2O` half by the sum, as in the paper, and half the newest
  tokens. `positions_by_sum` compares kvjax's with what H2O chooses from kvpress's attention. This
  press needs the whole attention matrix of a layer in memory ("eager").

While decoding, kvpress's presses evict nothing; `StreamingLLM` and `H2O` of kvjax hold their
budget. With `reposition`, kvpress rotates what it keeps once, at the prompt's end, and kvjax all
of it at every step, because a token that is evicted moves all later ones. `CaM` has no row:
kvpress's begins to count attention when the prompt has been read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Rows

from kvjax.evaluation import Haystack, is_right
from kvjax.models import load_tokenizer

PACKAGES = ("kvpress==0.5.5", "torch==2.13.0", "transformers==5.2.0")
SIDES = ("kvpress", "kvjax")
SHARE = 0.2  # of the prompt that stays
NEW_TOKENS, NEEDLE_TOKENS = 32, 16  # of a timed call, and of an answer
PYRAMID_WINDOW, PYRAMID_BETA = 8, 20

# Of kvpress and of kvjax; {ratio} is the share that goes, {slots} what stays.
METHODS = {
    "full": ("None", "Full()"),
    "snapkv": (
        "SnapKVPress({ratio}, window_size=64, kernel_size=5)",
        "SnapKV({slots}, window=64, kernel=5, pooling='avg')",
    ),
    "streaming_llm": ("StreamingLLMPress({ratio}, n_sink=4)", "StreamingLLM({slots}, sinks=4)"),
    "streaming_llm, reposition": (
        "KeyRerotationPress(StreamingLLMPress({ratio}, n_sink=4))",
        "StreamingLLM({slots}, sinks=4, reposition=True)",
    ),
    "pyramidkv": (
        f"PyramidKVPress({{ratio}}, window_size={PYRAMID_WINDOW}, kernel_size=5, "
        f"beta={PYRAMID_BETA})",
        f"PyramidKV({{slots}}, window={PYRAMID_WINDOW}, kernel=5, pooling='avg', beta={{beta}})",
    ),
    "h2o": ("ObservedAttentionPress({ratio})", "H2O({slots})"),
}

Positions = Sequence[Sequence[Sequence[int]]]  # of each layer and KV head


def compression_ratio(slots: int, tokens: int) -> float:
    """The ratio at which kvpress keeps `slots`: it takes `int(tokens · (1 - ratio))`."""
    return 1 - (slots + 1e-6) / tokens


def pyramid_beta(slots: int) -> float:
    """kvjax's `beta` for the pyramid of `PYRAMID_BETA` in kvpress.

    The last layer has `slots / PYRAMID_BETA` in kvpress and `W + (slots - W) / beta` in kvjax; the
    mean is the same, and so is every layer between.
    """
    return (slots - PYRAMID_WINDOW) / (slots / PYRAMID_BETA - PYRAMID_WINDOW)


def expressions(method: str, tokens: int) -> dict[str, str]:
    """The method of each side, keeping the same number of slots."""
    slots = int(SHARE * tokens)
    names = {"slots": slots, "ratio": compression_ratio(slots, tokens), "beta": pyramid_beta(slots)}
    return {side: METHODS[method][n].format(**names) for n, side in enumerate(SIDES)}


def compare_positions(
    kvpress: Positions, kvjax: Positions, scores: Sequence[Sequence[Sequence[float]]]
) -> dict[str, float]:
    """The figures of `positions`, from what each side keeps and kvpress's scores of all tokens."""
    layers = zip(kvpress, kvjax, scores, strict=True)
    heads = [head for layer in layers for head in zip(*layer, strict=True)]
    equal, contained, common, smaller, gaps = 0, 0, 0, 0, [0.0]
    for kept_by_kvpress, kept_by_kvjax, score in heads:
        theirs, ours = set(kept_by_kvpress), set(kept_by_kvjax)
        both, least = len(theirs & ours), min(len(theirs), len(ours))
        equal, contained = equal + (theirs == ours), contained + (both == least)
        common, smaller = common + both, smaller + least
        if theirs - ours and ours - theirs:
            best = max(score[at] for at in theirs - ours)
            gaps.append((best - min(score[at] for at in ours - theirs)) / abs(best))
    return {
        "lists": len(heads), "equal": equal, "contained": contained, "common": common / smaller,
        "gap": max(gaps),
    }  # fmt: skip


def heavy_hitters(score: Sequence[float], slots: int) -> list[int]:
    """What H2O keeps, from attention per query that could see a token."""
    count, oldest_recent = len(score), len(score) - (slots - slots // 2)
    total = [each * (count - at) for at, each in enumerate(score)]
    best = sorted(range(oldest_recent), key=lambda at: total[at], reverse=True)[: slots // 2]
    return sorted(best) + list(range(oldest_recent, count))


class Worker:
    """A process of one side."""

    def __init__(self, command: Sequence[str | Path], compiled: Path) -> None:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | cache,
        )  # fmt: skip

    def ask(self, what: str, **request: object) -> dict[str, Any]:
        """The answer to a request."""
        self._process.stdin.write(json.dumps({"do": what, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a process ended, see its message above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.wait()


Start = Callable[[str, str], Worker]  # side and method → a new process


def make_environment(folder: Path) -> Path:
    """An environment with kvpress; returns its Python. What is there already stays."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def measure(start: Start, methods: dict[str, str], prompt: list[int], rounds: int) -> dict:
    """Positions, seconds and memory of a row."""
    workers = {side: start(side, methods[side]) for side in SIDES}
    request = {"what": "generate", "prompt": prompt, "new": NEW_TOKENS}
    for worker in workers.values():  # compiles
        worker.ask(**request)
    row: dict[str, Any] = {}
    if methods["kvpress"] != "None":
        kept = {side: worker.ask("kept", prompt=prompt) for side, worker in workers.items()}
        theirs, ours = (kept[side]["positions"] for side in SIDES)
        scores = kept["kvpress"]["scores"]
        row["positions"] = compare_positions(theirs, ours, scores)
        if "ObservedAttentionPress" in methods["kvpress"]:
            slots = len(ours[0][0])
            by_sum = [[heavy_hitters(score, slots) for score in layer] for layer in scores]
            row["positions_by_sum"] = compare_positions(by_sum, ours, scores)
    calls: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            calls[side].append(workers[side].ask(**request))
    for name in ("first_s", "per_token_s"):
        least = {side: round(min(call[name] for call in calls[side]), 5) for side in SIDES}
        row[name] = least | {"times_as_fast": round(least["kvpress"] / least["kvjax"], 3)}
    for worker in workers.values():
        worker.close()
    row["peak_bytes"] = {}
    for side in SIDES:  # one after the other
        worker = start(side, methods[side])
        worker.ask(**request)
        row["peak_bytes"] |= {side: worker.ask("memory")["peak_bytes"]}
        worker.close()
    return row


def answers(start: Start, methods: dict[str, str], cases: list, tokenizer: Any) -> dict:
    """Right answers of both sides, and in how many cases their tokens are the same."""
    workers = {side: start(side, methods[side]) for side in SIDES}
    right, same = dict.fromkeys(SIDES, 0), 0
    for case in cases:
        request = {"what": "generate", "prompt": case.prompt, "new": NEEDLE_TOKENS}
        tokens = {side: worker.ask(**request)["tokens"] for side, worker in workers.items()}
        same += tokens["kvpress"] == tokens["kvjax"]
        for side, each in tokens.items():
            right[side] += is_right(tokenizer.decode(each), case.answers[0])
    for worker in workers.values():
        worker.close()
    return {"cases": len(cases), "right": right, "same": same}


def main() -> None:
    """Measures the rows that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file, longer than the longest prompt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="at least 1024")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cases", type=int, default=15, help="needles at the shortest length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--environment", type=Path, help="folder of kvpress's environment")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    tokenizer, text = load_tokenizer(args.model), Path(args.text).read_text()
    ids, haystack, shortest = tokenizer(text).input_ids, Haystack(tokenizer, text), min(args.tokens)
    if len(ids) < max(args.tokens):
        parser.error(f"--text must have {max(args.tokens)} tokens, got {len(ids)}")
    cases = [
        haystack.case("needle", length=shortest, depth=(seed + 0.5) / args.cases, seed=seed)
        for seed in range(args.cases)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.environment or Path(temporary)
        python = {"kvpress": make_environment(folder), "kvjax": sys.executable}
        worker = Path(__file__).with_name("vs_kvpress_worker.py")
        given = ["--model", args.model, "--threads", str(args.threads)]

        def start(side: str, method: str) -> Worker:
            command = [python[side], worker, side, *given, "--method", method]
            return Worker(command, folder / "compiled")

        versions = {}
        for side, method in zip(SIDES, METHODS["full"], strict=True):
            process = start(side, method)
            versions[side] = process.ask("versions")
            process.close()
        settings = {
            "model": Path(args.model).name, "text": Path(args.text).name, "dtype": "float32",
            "threads": args.threads, "rounds": args.rounds, "new_tokens": NEW_TOKENS,
            "versions": versions,
        }  # fmt: skip
        rows = Rows(args.out, {"benchmark": "vs_kvpress", "settings": settings})
        for tokens, method in itertools.product(args.tokens, args.methods):
            share = None if method == "full" else SHARE
            if rows.has(method=method, share=share, tokens=tokens):
                continue
            methods = expressions(method, tokens)
            row = measure(start, methods, ids[:tokens], args.rounds)
            if cases and tokens == shortest:
                row["answers"] = answers(start, methods, cases, tokenizer)
            rows.add(method=method, share=share, tokens=tokens, texts=methods, **row)


if __name__ == "__main__":
    main()
