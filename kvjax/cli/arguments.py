"""What the commands take: their options, and the types of these."""

from __future__ import annotations

import argparse
import ast
import contextlib
from collections.abc import Callable
from typing import NoReturn

import numpy as np

import kvjax
from kvjax.cli import compare_command, generate_command, methods_command
from kvjax.evaluation import grid
from kvjax.messages import brief
from kvjax.registry import expression


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def parser() -> Parser:
    """The parser of all commands; `run` is the command's function."""
    whole = Parser(
        prog="kvjax", allow_abbrev=False, description="Language models with a compressed KV cache."
    )
    whole.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    whole.set_defaults(run=lambda args: whole.print_help())
    added = whole.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable, about: str, description: str, examples: str = ""):
        own = added.add_parser(
            name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
            help=about, description=description, epilog=examples,
        )  # fmt: skip
        own.set_defaults(run=run)
        return own

    _add_generate_options(command(
        "generate", generate_command.generate, "continue a prompt through a compressed cache",
        "Continues a prompt through a compressed cache. The text goes to standard\n"
        "output, figures to standard error. Without --model, the bundled model continues\n"
        "it. Without a prompt as well, the bundled model answers a question about a long\n"
        "document, with the method and with the full cache.",
        "examples:\n"
        "  kvjax generate\n"
        "  kvjax generate --model DIR --prompt 'Once upon a time' --budget 256\n"
        "  kvjax generate --model DIR --prompt-file book.txt --method streaming_llm\n"
        "  kvjax generate --model DIR --prompt Hello --method 'every(snapkv, steps=64)'\n"
        "  kvjax generate --import mine.py --method mine",
    ))  # fmt: skip
    _add_compare_options(command(
        "compare", compare_command.compare,
        "measure what methods keep: answers, perplexity, bytes, times",
        "Runs methods over budgets, prompt lengths and depths: which questions about\n"
        "a long text are still answered, what held-out text costs, bytes and times.\n"
        "Prints a table and writes results.json, results.csv, timings.json and pictures.\n"
        "An interrupted run goes on when the same command is given again.",
        "examples:\n"
        "  kvjax compare\n"
        "  kvjax compare --methods snapkv,h2o --budgets 0.1,0.2 --cases 20\n"
        "  kvjax compare --model DIR --text book.txt --lengths 4096 --depths 0,0.5,1",
    ))  # fmt: skip
    command(
        "methods", methods_command.methods, "list the methods of compression",
        "Lists the methods of compression with their parameters and papers.",
    )  # fmt: skip
    for own in added.choices.values():
        own.add_argument("--import", metavar="MODULE", action="append", default=[], dest="imports",
            help="a module, or a .py file, that registers methods with kvjax.register; may be "
            "given several times")  # fmt: skip
        own.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return whole


def _add_model(own: Parser) -> None:
    own.add_argument("--model", metavar="DIR_OR_ID", help="folder of a Hugging Face model, or its "
        "hub id (default: the bundled model)")  # fmt: skip


def _add_generate_options(own: Parser) -> None:
    _add_model(own)
    prompt = own.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 file with it, read as it is")
    add = own.add_argument
    add("--method", metavar="NAME", default="snapkv",
        help="a method of `kvjax methods` or a composition of them (default: snapkv)")  # fmt: skip
    add("--budget", metavar="N_OR_FRACTION", type=_budget, default=0.1,
        help="what to keep: slots per head (256) or a share of the prompt (0.2); for every part of "
        "--method that takes a budget and is not given its own (default: 0.1)")  # fmt: skip
    add("--max-new", metavar="N", type=int,
        help="most new tokens (default: 128, for the bundled question 16)")  # fmt: skip
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    add("--top-k", metavar="K", type=int, help="draw from the K most likely tokens")
    add("--top-p", metavar="P", type=float,
        help="draw from the most likely tokens that add up to P")  # fmt: skip
    add("--min-p", metavar="P", type=float,
        help="draw from tokens at least P times as likely as the likeliest")  # fmt: skip
    add("--seed", metavar="N", type=_seed, default=0, help="of the draws (default: 0)")


def _add_compare_options(own: Parser) -> None:
    _add_model(own)
    own.add_argument("--text", metavar="FILE",
        help="UTF-8 text that the model does not know (default: a bundled one)")  # fmt: skip

    def add(name: str, kind: Callable, default, about: str, metavar: str = "LIST") -> None:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = f"{about} (default: {shown})"
        own.add_argument(name, metavar=metavar, type=kind, default=default, help=help_text)

    add("--methods", method_list, grid.METHODS,
        "methods of `kvjax methods` and compositions, or all; full is always there")  # fmt: skip
    add("--budgets", number_list, grid.BUDGETS,
        "shares of the prompt (0.1) or slots per head (64)")  # fmt: skip
    add("--lengths", number_list, grid.LENGTHS, "tokens of a prompt")
    add("--depths", depth_list, grid.DEPTHS,
        "where in the text the answer is, 0 to 1, or how many such places")  # fmt: skip
    add("--tasks", name_list, grid.DEFAULT_TASKS, f"of {', '.join(grid.TASKS)}")
    add("--cases", int, grid.CASES, "per task, method, budget, length and depth", "N")
    add("--seed", _seed, 0, "of the cases", "N")
    add("--out", str, "kvjax-compare", "folder of the results", "DIR")


def method_list(text: str) -> list[str]:
    """Methods separated by commas, which may contain commas themselves; `all` for every method.

    Example:
      >>> from kvjax.cli.arguments import method_list
      >>> method_list("h2o, every(snapkv, steps=64)")
      ['h2o', 'every(snapkv, steps=64)']
    """
    if text.strip() == "all":
        return list(grid.ALL_METHODS)
    source = f"[{text}]"
    try:
        node = expression(source)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(node, ast.List) or not node.elts:
        raise argparse.ArgumentTypeError(f"must be methods between commas, got {brief(text)}")
    methods = [ast.get_source_segment(source, part) or "" for part in node.elts]
    if "all" in methods:
        raise argparse.ArgumentTypeError(f"all must stand alone, got {brief(text)}")
    return methods


def number_list(text: str) -> list[int | float]:
    """Integers and decimals separated by commas."""
    return [_number(part, "numbers between commas") for part in text.split(",")]


def depth_list(text: str) -> list[float]:
    """Depths separated by commas, or the number of depths to spread evenly from 0 to 1."""
    depths = number_list(text)
    if len(depths) > 1 or isinstance(depths[0], float):
        return depths
    if not 2 <= depths[0] <= grid.MOST_DEPTHS:
        raise argparse.ArgumentTypeError(
            f"must be a number of depths, at least 2 and at most {grid.MOST_DEPTHS}, or depths "
            f"such as 0,0.5,1, got {brief(text)}"
        )
    return np.linspace(0.0, 1.0, depths[0]).tolist()


def name_list(text: str) -> list[str]:
    """Names separated by commas."""
    return [part.strip() for part in text.split(",")]


def _number(text: str, what: str) -> int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise argparse.ArgumentTypeError(f"must be {what}, got {brief(text.strip())}")


def _budget(text: str) -> int | float:
    return _number(text, "a number of slots (256) or a share of the prompt (0.2)")


def _seed(text: str) -> int:
    # JAX would take larger ones and drop their upper bits.
    if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to 2**32 - 1, got {brief(text)}"
        )
    return int(text)
