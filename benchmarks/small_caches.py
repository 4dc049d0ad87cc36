"""How small a cache may be that still answers: the commands behind the table of `by_head(kvzip)`.

    python benchmarks/small_caches.py --model FOLDER --text essays.txt \\
        --sample wikitext2.valid.txt --held-out wikitext2.test.txt --length 2048 \\
        --out benchmarks/results/small_smollm2

All questions are asked when the text has been read. It runs `kvjax profile`, then `kvjax eval`
several times, each into a folder of its own below `--out`, and writes the commands with the seconds
that they took to `commands.json`. It can be interrupted and called again at any time: finished
cells are kept, and seconds add up. `--only NAME` runs some of the parts. The texts are Paul
Graham's essays as RULER has them, and WikiText-2: its validation set for profiles, its test set for
the loss.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common import parser_of
from every_method import NEEDLES, run_command

KVZIP = "kvzip(BUDGET, room=64)"
PROFILES = {  # file → method, and which of the texts it is made from
    "heads.safetensors": ("kvzip", "sample"),
    "heads_of_essays.safetensors": ("kvzip", "text"),
    "heads_kernel_1.safetensors": ("kvzip(kernel=1)", "sample"),
    "heads_without_values.safetensors": ("kvzip(values=False)", "sample"),
    "heads_of_paper.safetensors": ("kvzip(values=False, kernel=1)", "sample"),
    "heads_of_snapkv.safetensors": ("snapkv", "sample"),
    "heads_window_32.safetensors": ("kvzip(window=32)", "sample"),
}


def at(method: str, *budgets: float) -> list[str]:
    """Texts of a method at these budgets."""
    return [method.replace("BUDGET", f"budget={budget}") for budget in budgets]


def by_head(method: str, *budgets: float, file: str = "heads.safetensors") -> list[str]:
    """Texts of a method by head at these budgets."""
    return [f"by_head({text}, profile='{file}')" for text in at(method, *budgets)]


def with_arguments(arguments: str) -> str:
    """Text of KVzip with more arguments."""
    return KVZIP.replace(")", f", {arguments})")


def parts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a part → arguments of `kvjax eval` but the model's and the folder's."""
    length = ["--lengths", str(args.length), "--question", "after"]
    essays = ["--text", args.text, *length, "--max-new", "16"]
    methods = [
        *by_head(KVZIP, 0.2, 0.1, 0.05, 0.02), *by_head(f"chain({KVZIP}, quantize)", 0.05),
        *at(KVZIP, 0.2, 0.05),
        *(f"{name}(budget=0.05)" for name in ("snapkv", "h2o", "clusterkv")),
    ]  # fmt: skip
    without = {
        "heads_kernel_1.safetensors": with_arguments("kernel=1"),
        "heads_without_values.safetensors": with_arguments("values=False"),
        "heads_of_paper.safetensors": with_arguments("values=False, kernel=1"),
        "heads_of_snapkv.safetensors": "snapkv(BUDGET)",
        "heads_of_essays.safetensors": KVZIP,
        "heads_window_32.safetensors": with_arguments("window=32"),
    }
    parts_of_it = [
        *(text for file, method in without.items() for text in by_head(method, 0.05, file=file)),
        *(f"{text[:-1]}, safeguard=0.0)" for text in by_head(KVZIP, 0.1, 0.05)),
    ]  # fmt: skip

    def run(task: str, texts: list[str], cases: int, *rest: str) -> list[str]:
        return [task, "--method", ",".join(texts), "--cases", str(cases), *rest]

    single, several = NEEDLES
    made = {
        "needles": run(single, methods, args.cases, *essays),
        "loss": run("perplexity", methods, min(args.cases, 20), "--text", args.held_out, *length),
        "parts_of_it": run(single, parts_of_it, args.cases, *essays),
        "multikey": run(several, methods, args.cases, *essays),
        "chat": run(single, by_head(KVZIP, 0.1, 0.05), args.cases, *essays, "--chat"),
    }  # fmt: skip
    if args.dataset:
        folder, task = os.path.split(args.dataset.removesuffix(".jsonl"))
        roomy = [text.replace("room=64", "room=256") for text in methods]  # questions are longer
        made["longbench"] = run(task, roomy, args.cases, "--data", folder, *length)
    return made


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--text", required=True, help="what RULER's needles are hidden in")
    parser.add_argument("--sample", required=True, help="text from which profiles are made")
    parser.add_argument("--held-out", required=True, help="text whose loss is measured")
    parser.add_argument("--dataset", help="file of a LongBench task, for the part `longbench`")
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--cases", type=int, default=50, help="of each task")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="parts to run")
    args = parser.parse_args()
    for name in ("model", "text", "sample", "held_out", "dataset"):
        if getattr(args, name) is not None:
            setattr(args, name, os.path.abspath(getattr(args, name)))
    out, every = Path(args.out).absolute(), parts(args)
    names = args.only or list(every)
    for name in names:
        if name not in every:
            parser.error(f"the parts are {', '.join(every)}, got {name}")
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # names of methods have those of the files of profiles in them
    words_of_parts = [word for name in names for word in every[name]]
    for file, (method, text) in PROFILES.items():
        if any(file in word for word in words_of_parts) and not Path(file).exists():
            words = ["profile", "--method", method, "--text", getattr(args, text), "--out", file]
            run_command(Path("commands.json"), file, words, args.model)
    for name in names:
        folder = f"{name}_{out.name}"  # each folder of results has a name of its own
        run_command(
            Path("commands.json"), name, ["eval", *every[name], "--out", folder], args.model
        )


if __name__ == "__main__":
    main()
