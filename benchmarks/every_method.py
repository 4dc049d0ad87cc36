"""Runs every method on a real model: the commands behind the tables of methods.

    python benchmarks/every_method.py qwen --model FILE --text essays.txt \\
        --wikitext wikitext2.test.txt --squad dev-v2.0.json --code code.txt --cases 50 \\
        --out benchmarks/results/qwen
    python benchmarks/every_method.py smollm2 --model FOLDER --text essays.txt \\
        --wikitext wikitext2.test.txt --longbench FOLDER --out benchmarks/results/smollm2

Runs `kvjax eval` several times, each into a folder of its own below `--out`, and writes the
commands with the seconds that they took to `commands.json`. It can be interrupted and called again
at any time: finished cells are kept, and seconds add up. `--only NAME` runs one of the parts. The
texts are Paul Graham's essays as RULER has them, the test set of WikiText-2, SQuAD's questions,
Python code, and LongBench's files.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import environment, parser_of

from kvjax.evaluation.cells.grid import ALL_METHODS
from kvjax.files import write_whole

METHODS = (
    *ALL_METHODS, "quest(spread=None)", "quantize", "quantize(bits=4)",
    "chain(quantize, clusterkv)", "chain(quantize(bits=4), clusterkv)",
)  # fmt: skip
# Options of the papers' methods beside their defaults, and what their papers compare them with.
OPTIONS = (
    "full", "h2o", "snapkv", "pyramidkv", "layer_budget",
    "chelsea", "chelsea(chunk=16)", "chelsea(chunk='whole')",
    "chelsea(ratio_0=1.0, decay=0.25, steps=3, floor=0.25)", "chelsea(outlier_threshold=0.8)",
    "kvmerger", "kvmerger(pivot='random')", "kvmerger(weights='mean')", "kvmerger(sigma='literal')",
    "kvmerger(sigma=0.5)", "kvmerger(sigma=1.0)", "kvmerger(sigma=2.5)", "kvmerger(sigma=5.0)",
    "kvmerger(sigma=6.0)", "kvmerger(value_scale='paper')",
    "kvcrush(snapkv)", "kvcrush(snapkv, kmeans=True)", "kvcrush(snapkv, granularity='chunk')",
    "kvcrush(snapkv, granularity='page')", "kvcrush(h2o)", "kvcrush(h2o, anchor='mean')",
    "kvcrush(h2o, anchor='alternate')", "kvcrush(h2o, kmeans=True)",
    "kvcrush(h2o, granularity='page')", "kvcrush(pyramidkv)",
    "spindlekv", "spindlekv(capacity=0.5)", "spindlekv(unfold=True)",
    "spindlekv(capacity=0.5, unfold=True)", "spindlekv(capacity=0.5, magnitude=False)",
)  # fmt: skip
# For needles that are statements, as in the papers: methods with their papers' settings, and those
# that the papers compare them with.
HIDDEN = (
    "full", "streaming_llm", "h2o", "snapkv", "pyramidkv", "pyramidinfer", "cam(streaming_llm)",
    "chelsea", "chelsea(outlier_threshold=0.8)", "kvmerger", "kvmerger(epsilon=0.75)",
    "kvmerger(sigma=5.0)", "kvmerger(sigma='literal')", "kvcrush(snapkv)", "layer_budget",
    "spindlekv", "spindlekv(unfold=True)", "clusterkv", "quest(spread=None)",
)  # fmt: skip
SIX = ("streaming_llm", "h2o", "snapkv", "kvmerger", "clusterkv", "quest")
BUDGETS = "0.1,0.2,0.5"  # unless a part says otherwise
# The memory of one prompt is kept for the next: a third of the time would go into page faults.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
}  # fmt: skip
NEEDLES = ("niah_single_2", "niah_multikey_1")


Parts = dict[str, list[str]]


def arguments(
    tasks: Sequence[str], methods: str, lengths: str, cases: int, *rest: str, budget: str
) -> list[str]:
    """Returns arguments of `kvjax eval` but the model's and the folder's."""
    return [
        *tasks, "--method", methods, "--budget", budget, "--lengths", lengths,
        "--cases", str(cases), *rest,
    ]  # fmt: skip


def smollm2(args: argparse.Namespace) -> Parts:
    """Returns the parts of SmolLM2-135M-Instruct, by name."""
    run = functools.partial(arguments, budget=args.budget)
    every, six, options = ",".join(METHODS), ",".join(SIX), ",".join(OPTIONS)
    essays, wiki = ["--text", args.text], ["--text", args.wikitext]
    short, chat = ("--max-new", "16"), ("--max-new", "32", "--chat")
    listed = ("--max-new", "64", "--chat")
    summary = ("--max-new", "128", "--data", args.longbench)
    return {
        "needles": run(NEEDLES, every, "2048", 100, *essays, *short),
        "perplexity": run(("perplexity", "attention"), every, "2048", 30, *wiki),
        "variables": run(("vt",), every, "2048", 50, *essays, *chat),
        "lengths_needles": run(NEEDLES, six, "1024,4096", 20, *essays, *short),
        "lengths_perplexity": run(("perplexity",), six, "1024,4096", 20, *wiki),
        "options": run(("perplexity",), options, "2048", 10, *wiki, budget="0.2"),
        # The full cache is at the floor of these two, so that no method can be ranked by them.
        "words": run(("cwe",), every, "2048", 50, *essays, *listed),
        "multi_news": run(("multi_news",), every, "2048", 50, *wiki, *summary),
    }


def qwen(args: argparse.Namespace) -> Parts:
    """Returns the parts of Qwen2.5-Coder-0.5B-Instruct, by name."""
    run = functools.partial(arguments, budget=args.budget)
    every, six, options = ",".join(METHODS), ",".join(SIX), ",".join(OPTIONS)
    essays, wiki = ["--text", args.text], ["--text", args.wikitext]
    # These take a pass over the prompt for themselves.
    alone = {"kvzip", "by_head(kvzip)", "own_queries"}
    as_smollm2 = ",".join(method for method in METHODS if method not in alone)
    parts = {
        "short_needles": run(NEEDLES[:1], as_smollm2, "2048", args.cases, *essays,
                             "--max-new", "10"),
        "options": run(NEEDLES[:1], options, "2048", args.cases, *essays, "--max-new", "10",
                       "--question", "inside", budget="0.2"),
        "needles": run(NEEDLES[:1], every, "4096", args.cases, *essays, "--max-new", "10"),
        "squad": run(("squad",), every, "4096", args.cases, "--data", args.squad,
                     "--question", "after"),
        "perplexity": run(("perplexity",), every, "4096", args.cases, *wiki),
        "several_needles": run(NEEDLES[1:], every, "4096", args.cases, *essays, "--max-new", "10"),
        "code": run(("perplexity",), every, "4096", args.cases, "--text", args.code),
        "variables": run(("vt",), every, "4096", args.cases, *essays, "--max-new", "32", "--chat"),
        "words": run(("cwe",), every, "4096", args.cases, *essays, "--max-new", "64", "--chat"),
        "lengths_needles": run(NEEDLES[:1], six, "8192,16384,32000", 10, *essays,
                               "--max-new", "10"),
    }  # fmt: skip
    parts["statement"] = run(
        ("statement",), ",".join(HIDDEN), "1024,2048", 5, *essays, "--question", "inside",
        budget="0.15,0.35,0.5",
    )  # fmt: skip
    # Tables of the pages name a folder of results, so that no two may be called alike.
    return {f"{name}_qwen": words for name, words in parts.items()}


SUITES = {"smollm2": smollm2, "qwen": qwen}


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "out")
    parser.add_argument("suite", choices=tuple(SUITES))
    parser.add_argument("--model", required=True, help="folder or file of the suite's model")
    parser.add_argument("--text", required=True, help="what RULER's needles are hidden in")
    parser.add_argument("--wikitext", required=True, help="text of the perplexity")
    parser.add_argument("--longbench", default="", help="folder with multi_news.jsonl (smollm2)")
    parser.add_argument("--squad", default="", help="questions in SQuAD's format (qwen)")
    parser.add_argument("--code", default="", help="text of Python code (qwen)")
    parser.add_argument("--cases", type=int, default=50, help="per task and question (qwen)")
    parser.add_argument("--budget", default=BUDGETS, help="budgets of the parts with every method")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="parts to run")
    args = parser.parse_args()
    out, every = Path(args.out), SUITES[args.suite](args)
    for name in args.only or every:
        if name not in every:
            parser.error(f"the parts are {', '.join(every)}, got {name}")
        out.mkdir(parents=True, exist_ok=True)
        words = ["eval", *every[name], "--out", str(out / name)]
        run_command(out / "commands.json", name, words, args.model)


def run_command(path: Path, name: str, words: Sequence[str], model: str) -> None:
    """Runs a command of kvjax for a model, and notes it without paths of a machine.

    Args:
      path: where all seconds that it has taken so far are noted.
      name: of the part that it is.
      words: its arguments but the model's, the command first.
    """
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kvjax.cli.main", *words, "--model", model],
        env={**os.environ, **ALLOCATOR},
    )  # fmt: skip
    noted = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    before = noted["parts"].get(name, {"seconds": 0.0})["seconds"]
    shown = [Path(word).name if os.path.exists(word) else word for word in (*words, model)]
    command = shlex.join(["kvjax", *shown[:-1], "--model", shown[-1]])
    seconds = round(before + time.monotonic() - start, 1)
    noted["parts"][name] = {
        "command": command, "seconds": seconds, "environment": environment()
    }  # fmt: skip
    write_whole(path, json.dumps(noted, indent=1) + "\n")
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
