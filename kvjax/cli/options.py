"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import argparse
import ast
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.cli.inputs import unix_text
from kvjax.cli.terminal import print_line
from kvjax.messages import brief
from kvjax.registry import expression

if TYPE_CHECKING:
    from kvjax.evaluation.cells.grid import Candidate

BUDGET = 0.1  # default of --budget


def add_model(parser: argparse.ArgumentParser, default: str = "the bundled model") -> None:
    """Adds the options that name a model."""
    parser.add_argument("--model", metavar="MODEL",
        help="folder of a Hugging Face model, its hub id, a GGUF file, or smollm2, "
        "qwen2.5-coder-0.5b or gemma-3-270m, whose packages are installed "
        f"(default: {default})")  # fmt: skip
    parser.add_argument("--allow-nonfinite", action="store_true",
        help="load weights that are NaN or infinite")  # fmt: skip


def add_method(
    parser: argparse.ArgumentParser, default: str = "snapkv", whole: str = "the prompt"
) -> None:
    """Adds the options of compression; `whole` names what a budget may be a share of."""
    parser.add_argument("--method", metavar="NAME", default=default,
        help="a method of `kvjax methods` or a composition of them "
        f"(default: {default})")  # fmt: skip
    add_budget(parser, f"what to keep: slots per head (256) or a share of {whole} (0.2); for every "
        "part of --method that takes a budget and is not given its own")  # fmt: skip
    # None lets `candidate` tell a given budget, which may change nothing, from the default.
    parser.set_defaults(budget=None)


def add_budget(parser: argparse.ArgumentParser, about: str = "as for kvjax generate") -> None:
    """Adds the option of a budget."""
    parser.add_argument("--budget", metavar="N_OR_FRACTION", type=budget, default=BUDGET,
        help=f"{about} (default: {BUDGET})")  # fmt: skip


def candidate(args: argparse.Namespace) -> Candidate:
    """Returns the method of `add_method` with its budget.

    If a given budget changes nothing, a line on standard error says so. With `--json`, the record's
    budget is null instead.
    """
    # Imported here and below: `kvjax ask` measures nothing.
    from kvjax.evaluation.cells.grid import Candidate

    budget = args.budget
    chosen = Candidate.of(args.method, BUDGET if budget is None else budget)
    if budget is not None and chosen.budget is None and not getattr(args, "json", False):
        print_line(
            f"--budget {budget} changes nothing: {args.method} takes no budget, or names its own",
            "dim",
        )
    return chosen


def add_template(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds the options of the chat template; `text` names the text in the help."""
    parser.add_argument("--system", metavar="TEXT", type=unix_text,
        help="a system message before everything else")  # fmt: skip
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--raw", action="store_true",
        help=f"feed {text} as it is, without the model's chat template")  # fmt: skip
    template.add_argument("--chat", action="store_true",
        help="use the chat template, as is done by default where the model has one; it is an "
        "error if there is none")  # fmt: skip


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the options of sampling."""
    add = parser.add_argument
    add("--model-sampling", action="store_true",
        help="choose tokens as the model's generation_config.json or GGUF file asks, except for "
        "the options given; by default the choice is greedy")  # fmt: skip
    add("--temperature", metavar="T", type=float, help="temperature; 0 is greedy (default: 0)")
    add("--top-k", metavar="K", type=int, help="draw from the K most likely tokens")
    add("--top-p", metavar="P", type=float,
        help="draw from the most likely tokens whose probabilities add up to P")  # fmt: skip
    add("--min-p", metavar="P", type=float,
        help="draw from tokens at least P times as likely as the likeliest")  # fmt: skip
    add("--repetition-penalty", metavar="R", type=float,
        help="above 1, makes tokens that occurred before less likely (default: 1)")  # fmt: skip
    add("--seed", metavar="N", type=seed, default=0, help="seed of sampling (default: 0)")


def number(text: str, expected: str) -> int | float:
    """Parses an integer or a decimal; `expected` describes it in errors."""
    for value_type in (int, float):
        with contextlib.suppress(ValueError):
            return value_type(text)
    raise argparse.ArgumentTypeError(f"must be {expected}, got {brief(text.strip())}")


def budget(text: str) -> int | float:
    """Parses a budget: a number of slots, or a share."""
    return number(text, "a number of slots (256) or a share of the prompt (0.2)")


def seed(text: str) -> int:
    """Parses a seed."""
    # JAX accepts larger seeds but drops their upper bits.
    if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to 2**32 - 1, got {brief(text)}"
        )
    return int(text)


def stop_text(text: str) -> str:
    """Checks a text that ends a row."""
    if not text:
        raise argparse.ArgumentTypeError("must be a text, got ''")
    return text


def add_list(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    value_type: Callable[[str], Any],
    default: Any,
    about: str,
    metavar: str = "LIST",
    **rest: Any,
) -> None:
    """Adds an option whose help ends with its default."""
    default_text = ",".join(map(str, default)) or "none" if isinstance(default, tuple) else default
    default_text = "all that suit the model" if default is None else default_text
    help_text = f"{about} (default: {default_text})"
    parser.add_argument(
        name, metavar=metavar, type=value_type, default=default, help=help_text, **rest
    )


def add_methods(
    parser: argparse.ArgumentParser, default: tuple[str, ...] | None, full: bool
) -> None:
    """Adds the option of methods; `full` means that the full cache is always among them."""
    about = "methods of `kvjax methods` and compositions between commas, or all"
    add_list(parser, "--method", value_type=method_list, default=default,
        dest="methods", about=f"{about}; full is always there" if full else about)  # fmt: skip


def add_budgets(parser: argparse.ArgumentParser, default: tuple[int | float, ...]) -> None:
    """Adds the option of budgets."""
    add_list(parser, "--budget", value_type=number_list, default=default,
        dest="budgets", about="shares of the prompt (0.1) or slots per head (64)")  # fmt: skip


def method_list(text: str) -> list[str]:
    """Parses methods separated by commas, whose arguments may have commas too; `all` is every one.

    Example:
      >>> from kvjax.cli.options import method_list
      >>> method_list("h2o, every(snapkv, steps=64)")
      ['h2o', 'every(snapkv, steps=64)']
    """
    if text.strip() == "all":
        from kvjax.evaluation.cells.grid import ALL_METHODS

        return list(ALL_METHODS)
    source = f"[{text}]"
    try:
        node = expression(source)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(node, ast.List) or not node.elts:
        raise argparse.ArgumentTypeError(f"must be methods between commas, got {brief(text)}")
    methods = [ast.get_source_segment(source, part) or "" for part in node.elts]
    if methods != ["all"] and [method.casefold() for method in methods] == ["all"]:
        raise argparse.ArgumentTypeError(f"unknown method {brief(text)}; did you mean all?")
    if "all" in methods:
        raise argparse.ArgumentTypeError(f"all must stand alone, got {brief(text)}")
    return methods


def number_list(text: str) -> list[int | float]:
    """Parses integers and decimals separated by commas."""
    return [number(part, "numbers between commas") for part in text.split(",")]


def depth_list(text: str) -> list[float]:
    """Parses depths separated by commas, or a number of depths spread evenly from 0 to 1."""
    from kvjax.evaluation.cells.grid import MOST_DEPTHS

    depths = number_list(text)
    if len(depths) > 1 or isinstance(depths[0], float):
        return depths
    if not 2 <= depths[0] <= MOST_DEPTHS:
        raise argparse.ArgumentTypeError(
            f"must be a number of depths, at least 2 and at most {MOST_DEPTHS}, or depths "
            f"such as 0,0.5,1, got {brief(text)}"
        )
    return np.linspace(0.0, 1.0, depths[0]).tolist()


def name_list(text: str) -> list[str]:
    """Parses names separated by commas."""
    return [part.strip() for part in text.split(",")]
