"""kvpress (PyTorch) and kvjax on a CPU: kept positions, seconds, memory and answers, in one run.

    python benchmarks/vs_kvpress.py --model FOLDER --text wiki.txt --out \\
        benchmarks/results/vs_kvpress_smollm2.json

It makes an environment for kvpress (`--environment`, otherwise a temporary folder) and installs
pinned versions there (`vs_kvpress_processes.py`). pip downloads PyTorch for GPUs, unless
`PIP_EXTRA_INDEX_URL` is https://download.pytorch.org/whl/cpu. Each row is a method, a share of the
prompt and a prompt length. Both frameworks get the same weights in float32, the same tokens, as
many slots and as many threads on the same cores, each in a process of its own
(`vs_kvpress_worker.py`) that has run the request once.

- `first_s`, `per_token_s`: the least of `--rounds` calls, one framework after the other.
  `times_as_fast` divides kvpress's seconds by kvjax's. A call is measured again if other processes
  took more than `--others` of the cores meanwhile; `calls` has what they took. Frameworks do not
  suffer alike: PyTorch's threads wait for each other in a loop.
- `peak_bytes`: the greatest resident memory of a new process during its first call; kvjax has the
  programs from a compilation cache. `loaded_bytes`: what was resident once the model was loaded.
- `positions`: the sets of kept positions per layer and KV head at the prompt's end. `equal` of
  `lists` sets are equal, in `contained` one holds the other, `common` is the share of positions
  that both keep, of the smaller set. `gap`: by how much, relatively, kvpress's score of a token
  that it alone keeps exceeds that of a token that kvjax alone keeps, at most. It says how near a
  tie was that fell differently.
- `same_tokens`: new tokens of the text that are equal before the first different one.
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
kvpress's begins to count attention when the prompt has been read. Quest, ClusterKV and the other
methods of kvjax are not in kvpress.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import save, write
from quiet import when_quiet
from vs_kvpress_processes import SIDES, Setting, Worker, make_environment

import kvjax
from kvjax.budgets.budgets import check_count, check_number
from kvjax.evaluation import Haystack, is_right
from kvjax.files import read_json
from kvjax.models import load_tokenizer

NEEDLE_TOKENS = 16  # new tokens of an answer
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


def compression_ratio(slots: int, tokens: int) -> float:
    """The ratio at which kvpress keeps `slots`: it takes `int(tokens · (1 - ratio))`.

    Example:
      >>> int(1000 * (1 - (1 - 59 / 1000))), int(1000 * (1 - compression_ratio(59, 1000)))
      (58, 59)
    """
    return 1 - (slots + 1e-6) / tokens


def pyramid_beta(slots: int) -> float:
    """kvjax's `beta` for the pyramid of `PYRAMID_BETA` in kvpress.

    The last layer has `slots / PYRAMID_BETA` in kvpress and `W + (slots - W) / beta` in kvjax; the
    mean is the same, and so is every layer between.

    Raises:
      ValueError: kvpress has no pyramid for so few slots.
    """
    if slots <= PYRAMID_BETA * PYRAMID_WINDOW:
        least = PYRAMID_BETA * PYRAMID_WINDOW
        raise ValueError(f"a pyramid must have more than {least} slots on average, got {slots}")
    return (slots - PYRAMID_WINDOW) / (slots / PYRAMID_BETA - PYRAMID_WINDOW)


def expressions(method: str, share: float | None, tokens: int) -> dict[str, str]:
    """The method of each side, keeping the same number of slots."""
    if method == "full":
        return dict(zip(SIDES, METHODS[method], strict=True))
    slots = int(share * tokens)
    names = {"slots": slots, "ratio": compression_ratio(slots, tokens)}
    names["beta"] = pyramid_beta(slots) if method == "pyramidkv" else None
    texts = (text.format(**names) for text in METHODS[method])
    return dict(zip(SIDES, texts, strict=True))


Positions = Sequence[Sequence[Sequence[int]]]  # of each layer and KV head


class Lists(NamedTuple):
    """What is found about one layer's KV head: see `compare_positions`."""

    equal: bool
    contained: bool
    common: int
    smaller: int
    gap: float


def compare_lists(kvpress: Sequence[int], kvjax: Sequence[int], score: Sequence[float]) -> Lists:
    """Kept positions of one KV head, and kvpress's scores of all positions."""
    theirs, ours = set(kvpress), set(kvjax)
    common, smaller = len(theirs & ours), min(len(theirs), len(ours))
    gap = 0.0
    if theirs - ours and ours - theirs:
        best = max(score[at] for at in theirs - ours)
        worst = min(score[at] for at in ours - theirs)
        gap = (best - worst) / abs(best)
    return Lists(theirs == ours, common == smaller, common, smaller, gap)


def compare_positions(
    kvpress: Positions, kvjax: Positions, scores: Sequence[Sequence[Sequence[float]]]
) -> dict[str, float]:
    """The figures of `positions`: see the top of this file.

    Raises:
      ValueError: the sides have different numbers of layers or KV heads.
    """
    heads = [[len(layer) for layer in side] for side in (kvpress, kvjax)]
    if heads[0] != heads[1]:
        raise ValueError(f"both sides must have the same layers and KV heads, got {heads}")
    found = [
        compare_lists(theirs, ours, score)
        for layers in zip(kvpress, kvjax, scores, strict=True)
        for theirs, ours, score in zip(*layers, strict=True)
    ]
    return {
        "lists": len(found),
        "equal": sum(one.equal for one in found),
        "contained": sum(one.contained for one in found),
        "common": sum(one.common for one in found) / sum(one.smaller for one in found),
        "gap": max(one.gap for one in found),
    }


def heavy_hitters(score: Sequence[float], slots: int) -> list[int]:
    """What H2O keeps, from attention per query that could see a token.

    Example:
      >>> heavy_hitters([0.1, 0.5, 0.6, 0.7, 0.2, 0.1], slots=4)
      [1, 2, 4, 5]
    """
    count, oldest_recent = len(score), len(score) - (slots - slots // 2)
    total = [each * (count - at) for at, each in enumerate(score)]
    best = sorted(range(oldest_recent), key=lambda at: total[at], reverse=True)[: slots // 2]
    return sorted(best) + list(range(oldest_recent, count))


def same_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are equal before the first different one."""
    pairs = zip(a, b, strict=True)
    return next((number for number, (x, y) in enumerate(pairs) if x != y), len(a))


def measure(setting: Setting, methods: dict[str, str], prompt: list[int]) -> dict[str, Any]:
    """Positions, seconds and memory of a row."""
    workers = setting.workers(methods)
    request = {"what": "generate", "prompt": prompt, "new": setting.new}
    texts = {side: worker.ask(**request)["tokens"] for side, worker in workers.items()}
    row: dict[str, Any] = {"same_tokens": same_start(*texts.values())}
    if methods["kvpress"] != "None":
        kept = {side: worker.ask("kept", prompt=prompt) for side, worker in workers.items()}
        row |= positions(methods, *kept.values())
    row |= seconds(workers, request, setting)
    for worker in workers.values():
        worker.close()
    return row | memory(setting, methods, request)


def positions(
    methods: dict[str, str], kvpress: dict[str, Any], kvjax: dict[str, Any]
) -> dict[str, Any]:
    """The comparison of positions, for H2O also with what kvpress's attention leads to."""
    theirs, ours, scores = kvpress["positions"], kvjax["positions"], kvpress["scores"]
    row = {"positions": compare_positions(theirs, ours, scores)}
    if "ObservedAttentionPress" in methods["kvpress"]:
        slots = len(ours[0][0])
        by_sum = [[heavy_hitters(score, slots) for score in layer] for layer in scores]
        row["positions_by_sum"] = compare_positions(by_sum, ours, scores)
    return row


def seconds(
    workers: dict[str, Worker], request: dict[str, Any], setting: Setting
) -> dict[str, Any]:
    """The least seconds of both sides, which take turns in beginning."""
    pids = [os.getpid(), *(worker.pid for worker in workers.values())]
    calls: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(setting.rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            ask = functools.partial(workers[side].ask, **request)
            answer, others = when_quiet(ask, pids, setting.others)
            call = {name: round(answer[name], 5) for name in ("first_s", "per_token_s")}
            calls[side].append(call | {"others": round(others, 4)})
            print(side, calls[side][-1], file=sys.stderr, flush=True)
    row: dict[str, Any] = {"calls": calls}
    for name in ("first_s", "per_token_s"):
        least = {side: min(call[name] for call in calls[side]) for side in SIDES}
        row[name] = least | {"times_as_fast": round(least["kvpress"] / least["kvjax"], 3)}
    return row


def memory(setting: Setting, methods: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
    """Resident memory of new processes, one after the other."""
    row: dict[str, Any] = {"loaded_bytes": {}, "peak_bytes": {}}
    for side in SIDES:
        worker = Worker(setting.python[side], side, methods[side], setting)
        worker.ask(**request)
        for name, value in worker.ask("memory").items():
            row[name][side] = value
        worker.close()
    return row


def answers(setting: Setting, methods: dict[str, str], cases: list, tokenizer: Any) -> dict:
    """Right answers of both sides, and in how many cases their tokens are the same."""
    workers = setting.workers(methods)
    right, same = dict.fromkeys(SIDES, 0), 0
    for case in cases:
        request = {"what": "generate", "prompt": case.prompt, "new": NEEDLE_TOKENS}
        tokens = {side: worker.ask(**request)["tokens"] for side, worker in workers.items()}
        same += len({tuple(each) for each in tokens.values()}) == 1
        for side, each in tokens.items():
            right[side] += is_right(tokenizer.decode(each), case.answers[0])
    for worker in workers.values():
        worker.close()
    return {"cases": len(cases), "right": right, "same": same}


def keys_of(methods: Sequence[str], shares: Sequence[float], tokens: Sequence[int]) -> list[dict]:
    """What the rows are about; the full cache has no share."""
    return [
        {"method": method, "share": share, "tokens": count}
        for count in tokens
        for method in methods
        for share in ([None] if method == "full" else shares)
    ]


def earlier_rows(out: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier run has written to the same file.

    Raises:
      ValueError: it had other settings, or the file cannot be read.
    """
    if out is None or not out.exists():
        return []
    before = read_json(out)
    if before.get("settings") != settings:
        raise ValueError(f"{out} must have the settings {settings}, got {before.get('settings')}")
    return before["rows"]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--text", required=True, help="UTF-8 file, longer than the longest prompt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2])
    parser.add_argument("--cases", type=int, default=15, help="needles at the shortest length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32, help="tokens of a timed call")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--others", type=float, default=0.03, help="share of the cores, at most")
    parser.add_argument("--environment", type=Path, help="folder of kvpress's environment")
    parser.add_argument("--out", type=Path, help="rows that it has already are not measured again")
    args = parser.parse_args(given)
    try:
        for name, least in (("cases", 0), ("rounds", 1), ("new", 2), ("threads", 1)):
            check_count(f"--{name}", getattr(args, name), least)
        check_number("--others", args.others, above=0, most=1)
        for share in args.shares:
            check_number("a share of --shares", share, above=0, most=1)
        for count in args.tokens:
            check_count("a length of --tokens", count, 1)
        for key in keys_of(args.methods, args.shares, args.tokens):
            eval(expressions(**key)["kvjax"], {**vars(kvjax)})
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    """Runs it."""
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.environment or Path(temporary)
        run(args, make_environment(folder), folder / "compiled")


def run(args: argparse.Namespace, python: Path, compiled: Path) -> None:
    """Measures the rows that the file does not have yet."""
    tokenizer, text = load_tokenizer(args.model), Path(args.text).read_text()
    ids = tokenizer(text).input_ids
    if len(ids) < max(args.tokens):
        raise SystemExit(f"--text must have {max(args.tokens)} tokens, got {len(ids)}")
    haystack, shortest = Haystack(tokenizer, text), min(args.tokens)
    cases = [
        haystack.case("needle", length=shortest, depth=(seed + 0.5) / args.cases, seed=seed)
        for seed in range(args.cases)
    ]
    setting = Setting(
        {"kvpress": python, "kvjax": sys.executable}, args.model, args.threads, args.rounds,
        args.new, args.others, compiled,
    )  # fmt: skip
    full = setting.workers(dict(zip(SIDES, METHODS["full"], strict=True)))
    settings = {
        "model": Path(args.model).name, "text": Path(args.text).name, "dtype": "float32",
        "threads": args.threads, "rounds": args.rounds, "new_tokens": args.new,
        "versions": {side: worker.ask("versions") for side, worker in full.items()},
    }  # fmt: skip
    for worker in full.values():
        worker.close()
    rows = earlier_rows(args.out, settings)
    result = {"benchmark": "vs_kvpress", "settings": settings, "rows": rows}
    done = [{name: row[name] for name in ("method", "share", "tokens")} for row in rows]
    for key in keys_of(args.methods, args.shares, args.tokens):
        if key in done:
            continue
        methods = expressions(**key)
        row = key | {"texts": methods} | measure(setting, methods, ids[: key["tokens"]])
        if cases and key["tokens"] == shortest:
            row["answers"] = answers(setting, methods, cases, tokenizer)
        rows.append(row)
        save(args.out, result)
        print(json.dumps(row), file=sys.stderr, flush=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
