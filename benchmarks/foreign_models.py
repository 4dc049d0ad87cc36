"""Gemma 3 270M in the packages of others, whose weights are those of kvjax's own port.

    python benchmarks/foreign_models.py --package tunix --model gemma-3-270m-q4_k_m.gguf \\
        --out benchmarks/results/foreign_models.json

It runs in an environment that has the package; `tests/foreign/run.sh` makes one for each, and runs
the tests. Two texts that are longer than the windows of 512 are read, and 16 tokens are written, in
float32. `loop`: their own loop, with caches of kvjax, writes the tokens that kvjax's port writes in
a loop of that kind, which calls `kvjax.flush` itself. `generate`: `kvjax.generate` writes the same
tokens on their model and on the port. `alike`: their loop writes what `kvjax.generate` does; loops
that feed a prompt's last token once more take the first new token from the compressed cache, and
may differ there. What `kvjax.generate` writes on the port stands in rows of its own, and is
computed once. `lines`: of the adapter, without blank ones, comments and docstrings.
"""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Rows, parser_of

import kvjax
from kvjax.models import from_pretrained

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "examples" / "adapters")]
DISTRIBUTIONS = {"gemma": "gemma", "tunix": "google-tunix", "keras_hub": "keras-hub"}
NEW = 16
READ = "by_head(kvzip(budget=0.25))"


def code_lines(path: Path) -> int:
    """Counts the lines that hold code."""
    tree = ast.parse(path.read_text())
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    code = (line.strip() for number, line in lines if number not in strings)
    return sum(bool(line) and not line.startswith("#") for line in code)


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "out")
    parser.add_argument("--package", required=True, choices=DISTRIBUTIONS)
    parser.add_argument("--model", required=True, help="GGUF file of Gemma 3 270M")
    args = parser.parse_args()
    support = importlib.import_module("tests.foreign.port")
    package = importlib.import_module(f"tests.foreign.with_{args.package}")
    port, texts = from_pretrained(args.model), support.texts_beyond_the_window(Path(args.model))
    theirs = package.converted(port)
    about = {
        "benchmark": "foreign_models", "model": Path(args.model).name, "new": NEW,
        "prompts": [len(text) for text in texts],
    }  # fmt: skip
    rows, distribution = Rows(args.out, about), DISTRIBUTIONS[args.package]
    of_package = {
        "package": distribution, "version": version(distribution),
        "lines": code_lines(Path(package.adapter.__file__)),
    }  # fmt: skip

    def read(model: Any) -> list[list[int]]:
        return support.read_and_asked(model, texts, 0.25, port.num_layers)

    def written(model: Any, method: str) -> list[list[int]]:
        if method == READ:
            return read(model)
        options = {"transform": method, "max_new_tokens": NEW, "end_tokens": ()}
        return kvjax.generate(model, texts, **options).tokens

    for method in (*support.REAL, READ):
        if not rows.has(package="kvjax", method=method):
            rows.add(package="kvjax", method=method, tokens=written(port, method))
        if rows.has(package=distribution, method=method):
            continue
        expected = next(
            row["tokens"] for row in rows.rows
            if (row["package"], row["method"]) == ("kvjax", method)
        )  # fmt: skip
        ours, loop, goes = written(package.functional(theirs), method), None, None
        if method != READ:  # their loops read no document twice
            loop = package.their_loop(theirs, method, texts, NEW)
            goes = loop == (
                expected if package.FED_AGAIN is None  # as `kvjax.generate` goes
                else support.by_hand(port, method, texts, NEW, package.FED_AGAIN)[0]
            )  # fmt: skip
        rows.add(
            **of_package, method=method, loop=goes, generate=ours == expected,
            alike=None if loop is None else loop == ours, tokens=loop or ours,
        )  # fmt: skip


if __name__ == "__main__":
    main()
