"""Answers against bytes: what a context that is asked later keeps of prose and of needles.

    python benchmarks/frontier.py --model FOLDER --text essays.txt --sample wikitext2.valid.txt \\
        --data dev-v2.0.json --length 1400 --out benchmarks/results/frontier_smollm2

For each composition and each share of the bytes that the full cache takes in bfloat16, the budget
is the one with which the documents' slots take that share, without room for questions. All
questions come after the text. It runs `kvjax profile` and `kvjax eval`, a task at a time, into
folders below `--out`, and can be interrupted and called again at any time. `frontier.json` has a
row for each composition and share: recovery of prose in per cent with its interval, scores of the
needles, and the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from common import environment
from smollm2 import run_command

import kvjax
from kvjax.evaluation.cells.files import read_results
from kvjax.files import write_whole
from kvjax.transforms.smallest import bytes_of_slot

PROFILE = "heads.safetensors"
FORMS = {
    "own queries, 4 bits": "chain(own_queries(BUDGET, room=64), quantize(bits=4))",
    "own queries, keys in 8 bits, values in 4": (
        "chain(own_queries(BUDGET, room=64), quantize(bits=4, key_bits=8))"
    ),
    "own queries, 8 bits": "chain(own_queries(BUDGET, room=64), quantize)",
    "own queries": "own_queries(BUDGET, room=64)",
    "kvzip, 4 bits": "chain(kvzip(BUDGET, room=64), quantize(bits=4))",
    "kvzip": "kvzip(BUDGET, room=64)",
    "snapkv": "snapkv(BUDGET)",
    "h2o": "h2o(BUDGET)",
}
BY_HEAD = tuple(name for name in FORMS if name.startswith(("own", "kvzip")))
SHARES = (0.06, 0.03, 0.015)
MEASURED = {  # shares at which forms are measured; all others at the first two
    "own queries, 4 bits": SHARES, "own queries": (0.06,), "kvzip": (0.06,), "snapkv": (0.06,),
    "h2o": (0.06,), "own queries, 8 bits": (0.06,),
}  # fmt: skip
WHOLE = ("quantize(bits=4)", "quantize")
TASKS = {
    "squad": ("--cases", "30"),
    "niah_single_2": ("--cases", "20", "--max-new", "16"),
    "niah_multikey_1": ("--cases", "20", "--max-new", "16"),
}


def methods(head_dim: int) -> dict[str, tuple[str, float, float]]:
    """Returns, by the text of a method, its name here, its share of the bytes and its budget."""
    full, every = bytes_of_slot(kvjax.Full(), head_dim), {}
    for name, form in FORMS.items():
        for share in MEASURED.get(name, SHARES[:2]):
            slot = bytes_of_slot(kvjax.parse(form.replace("BUDGET", "budget=0.5")), head_dim)
            budget = round(share * full / slot, 4)
            text = form.replace("BUDGET", f"budget={budget}")
            if name in BY_HEAD:
                text = f"by_head({text}, profile='{PROFILE}')"
            every[text] = name, share, budget
    for text in WHOLE:
        share = round(bytes_of_slot(kvjax.parse(text), head_dim) / full, 4)
        every[text] = text, share, 1.0
    return every


def rows(out: Path, every: dict[str, tuple[str, float, float]]) -> list[dict]:
    """Returns the rows of all compositions, from the results of `kvjax eval`."""
    found: dict[str, dict[str, dict]] = {}
    for task in TASKS:
        for row in read_results(out / f"{task}_{out.name}").rows():
            kept = {"score": row.score, "recovery": row.recovery}
            figures = {name: x._asdict() for name, x in kept.items() if x is not None}
            figures["cache_bytes"] = row.cache_bytes
            found.setdefault(row.method, {})[task] = figures
    return [
        {"name": name, "share": share, "budget": budget, "method": text, "tasks": found.get(text)}
        for text, (name, share, budget) in {"full": ("full", 1.0, 1.0), **every}.items()
    ]


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or GGUF file of the model")
    parser.add_argument("--text", required=True, help="what needles are hidden in")
    parser.add_argument("--sample", required=True, help="text from which the profile is made")
    parser.add_argument("--data", required=True, help="file of questions in SQuAD's format")
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--head-dim", type=int, default=64, help="of the model")
    parser.add_argument("--only", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    for name in ("model", "text", "sample", "data"):
        setattr(args, name, os.path.abspath(getattr(args, name)))
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # names of methods have that of the profile in them
    commands = Path("commands.json")
    if not Path(PROFILE).exists():
        words = ["profile", "--method", "kvzip", "--text", args.sample, "--out", PROFILE]
        run_command(commands, PROFILE, words, args.model)
    every = methods(args.head_dim)
    for task in args.only:
        source = ["--data", args.data] if task == "squad" else []
        words = [
            "eval", task, "--method", ",".join(every), "--text", args.text, *source, "--lengths",
            str(args.length), "--question", "after", *TASKS[task], "--out", f"{task}_{out.name}",
        ]  # fmt: skip
        run_command(commands, task, words, args.model)
    if all(Path(f"{task}_{out.name}").exists() for task in TASKS):
        made = {"benchmark": "frontier", "environment": environment(), "rows": rows(out, every)}
        write_whole(Path("frontier.json"), json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
