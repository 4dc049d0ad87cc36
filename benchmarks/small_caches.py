"""How small a cache may be that still answers: the commands behind the table of `by_head(kvzip)`.

    python benchmarks/small_caches.py --model FOLDER --text essays.txt \\
        --sample wikitext2.valid.txt --held-out wikitext2.test.txt --length 2048 --out OUT

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

from smollm2 import NEEDLES, run_command

KVZIP = "kvzip(room=64)"
PROFILES = {  # file → method, and which of the texts it is made from
    "heads.safetensors": ("kvzip", "sample"),
    "heads_without_values.safetensors": ("kvzip(values=False)", "sample"),
    "heads_of_essays.safetensors": ("kvzip", "text"),
}


def by_head(method: str, budget: float, file: str = "heads.safetensors") -> str:
    """Text of a method by head, at one budget."""
    return f"by_head({method.replace('BUDGET', f'budget={budget}')}, profile='{file}')"


KVZIP_AT = "kvzip(BUDGET, room=64)"
FITTED_AT = "kvzip(BUDGET, room=64, fit=True)"
EIGHT_BITS_AT = f"chain({KVZIP_AT}, quantize)"
BUDGETS = (0.2, 0.1, 0.05, 0.03, 0.02)


def parts(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a part → arguments of `kvjax eval` but the model's and the folder's."""
    length = ["--lengths", str(args.length), "--question", "after"]
    essays = ["--text", args.text, *length, "--max-new", "16"]
    methods = [
        *(by_head(KVZIP_AT, budget) for budget in BUDGETS),
        *(by_head(FITTED_AT, budget) for budget in (0.05, 0.03, 0.02)),
        *(by_head(EIGHT_BITS_AT, budget) for budget in (0.1, 0.05)),
        *(f"{KVZIP[:-1]}, budget={budget})" for budget in (0.2, 0.05)),
        *(f"{name}(budget={budget})" for name in ("snapkv", "h2o") for budget in (0.2, 0.05)),
        "clusterkv(budget=0.05)",
    ]  # fmt: skip
    without_values = KVZIP_AT.replace(")", ", values=False)")
    parts_of_it = [
        by_head(KVZIP_AT, 0.05, "heads_of_essays.safetensors"),
        *(
            by_head(without_values, budget, "heads_without_values.safetensors")
            for budget in (0.1, 0.05)
        ),
        *(by_head(KVZIP_AT.replace(")", ", window=32)"), budget) for budget in (0.05,)),
        by_head("snapkv(BUDGET)", 0.1),
    ]  # fmt: skip

    def run(tasks: tuple[str, ...], texts: list[str], cases: int, *rest: str) -> list[str]:
        return [*tasks, "--method", ",".join(texts), "--cases", str(cases), *rest]

    held_out = ["--text", args.held_out, *length]
    return {
        "needles": run(NEEDLES, methods, args.cases, *essays),
        "loss": run(("perplexity",), methods, min(args.cases, 20), *held_out),
        "parts_of_it": run(NEEDLES[:1], parts_of_it, min(args.cases, 20), *essays),
        "chat": run(NEEDLES[:1], methods[1:3], min(args.cases, 20), *essays, "--chat"),
    }


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or GGUF file of the model")
    parser.add_argument("--text", required=True, help="what RULER's needles are hidden in")
    parser.add_argument("--sample", required=True, help="text from which profiles are made")
    parser.add_argument("--held-out", required=True, help="text whose loss is measured")
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--cases", type=int, default=50, help="of each task")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="parts to run")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    for name in ("model", "text", "sample", "held_out"):
        setattr(args, name, os.path.abspath(getattr(args, name)))
    out, every = Path(args.out), parts(args)
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # names of methods have those of the files of profiles in them
    for file, (method, text) in PROFILES.items():
        if not Path(file).exists():
            words = ["profile", "--method", method, "--text", getattr(args, text), "--out", file]
            run_command(Path("commands.json"), file, words, args.model)
    for name in args.only or every:
        if name not in every:
            parser.error(f"the parts are {', '.join(every)}, got {name}")
        run_command(Path("commands.json"), name, ["eval", *every[name], "--out", name], args.model)


if __name__ == "__main__":
    main()
