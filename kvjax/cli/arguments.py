"""What the commands take: their options, and the types of these."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np

import kvjax
from kvjax.cli import (
    ask_command,
    chat_command,
    compare_command,
    generate_command,
    methods_command,
    options,
    plan_command,
    read_command,
)
from kvjax.evaluation import grid
from kvjax.messages import brief, printable
from kvjax.registry import expression


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise ValueError(f"{message} (see {self.prog} --help)")


class _Whole(Parser):
    """The parser of all commands, which knows what was perhaps meant."""

    commands: dict[str, Parser]

    def error(self, message: str) -> NoReturn:
        """Raises it; a command that is not known gets a hint."""
        wrong = re.search(r"argument COMMAND: invalid choice: '(.*?)'", message)
        if wrong is not None:
            given = printable(wrong[1], 200)
            message = f"there is no command '{given}'{_guess(given, self.commands)}"
        super().error(message)

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """The same as of any parser; an option that is not known gets a hint."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            own = self.commands.get(parsed.command, self)
            wrong = next((word for word in rest if word.startswith("-")), rest[0])
            known = [name for action in own._actions for name in action.option_strings]
            own.error(
                f"unrecognized arguments: {printable(' '.join(rest), 200)}"
                f"{_guess(wrong.partition('=')[0], known)}"
            )
        return parsed


def _guess(word: str, known: Iterable[str]) -> str:
    """A question about the word that was perhaps meant."""
    close = difflib.get_close_matches(word[:40], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def parser() -> Parser:
    """The parser of all commands; `run` is the command's function."""
    whole = _Whole(
        prog="kvjax", allow_abbrev=False, description="Language models with a compressed KV cache."
    )
    whole.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    whole.set_defaults(run=lambda args: whole.print_help())
    added = whole.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    whole.commands = added.choices

    def command(name: str, run: Callable, about: str, description: str, examples: str = ""):
        own = added.add_parser(
            name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
            help=about, description=description, epilog=examples,
        )  # fmt: skip
        own.set_defaults(run=run)
        return own

    _add_generate_options(command(
        "generate", generate_command.generate, "continue prompts through a compressed cache",
        "Continues prompts through a compressed cache. The text goes to standard output,\n"
        "figures to standard error. A model with a chat template takes each prompt as a\n"
        "user's message, unless --raw is given. Without --model, the bundled model\n"
        "continues the prompt. Without a prompt as well, it answers a question about a\n"
        "long document, with the method and with the full cache.",
        "examples:\n"
        "  kvjax generate\n"
        "  kvjax generate --model DIR --prompt 'Once upon a time' --budget 256\n"
        "  kvjax generate --model DIR --prompt-file book.txt --method streaming_llm\n"
        "  kvjax generate --model DIR --prompt Hello --method 'every(snapkv, steps=64)'\n"
        "  kvjax generate --model DIR --prompts questions.jsonl --stop 'Question:' --json\n"
        "  kvjax generate --import mine.py --method mine",
    ))  # fmt: skip
    _add_read_options(command(
        "read", read_command.read, "read a document once, for many questions",
        "Reads a document into a compressed cache and saves that in a folder, for\n"
        "kvjax ask. A folder of an earlier kvjax read is replaced.",
        "examples:\n"
        "  kvjax read book.txt --out book --model DIR --method quest --budget 0.2\n"
        "  kvjax ask book 'Who is Ishmael?' 'What is the name of the ship?'",
    ))  # fmt: skip
    _add_ask_options(command(
        "ask", ask_command.ask, "ask questions about a document that was read",
        "Answers questions about a document that kvjax read has read, all of them in one\n"
        "batch. The folder stays as it is, and no question knows of another.",
    ))  # fmt: skip
    _add_chat_options(command(
        "chat", chat_command.chat, "talk with a model whose history is compressed",
        "A conversation whose whole history is one compressed cache. A line is a turn;\n"
        f"{chat_command.HELP}\n"
        "Ctrl-C ends an answer that is being written.",
        "examples:\n"
        "  kvjax chat --model DIR\n"
        "  kvjax chat --model smollm2\n"
        "  kvjax chat --model DIR --method h2o --budget 512 --system 'Be brief.'",
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
    _add_plan_options(command(
        "plan", plan_command.run, "what devices will hold, and how many requests fit",
        "Places a model and its caches on devices that need not be there, and says what\n"
        "each holds: weights, caches by method, how many requests fit, and the least time\n"
        "of a decode step by the bytes that it moves. No weights are read.",
        "examples:\n"
        "  kvjax plan --model llama-3.1-8b\n"
        "  kvjax plan --model llama-3.1-70b --mesh tensor=8 --batch 1 8 32\n"
        "  kvjax plan --model DIR --mesh data=8,tensor=8 --tokens 32768\n"
        "      --method full snapkv 'chain(snapkv, quantize(bits=4))' --budget 0.2",
    ))  # fmt: skip
    command(
        "methods", methods_command.methods, "list the methods of compression",
        "Lists the methods of compression with their parameters and papers.",
    )  # fmt: skip
    for name, own in added.choices.items():
        own.add_argument("--import", metavar="MODULE", action="append", default=[], dest="imports",
            help="a module, or a .py file, that registers methods with kvjax.register; may be "
            "given several times")  # fmt: skip
        if name != "chat":
            own.add_argument("--json", action="store_true",
                help="print one JSON object, nothing else")  # fmt: skip
    return whole


def _add_generate_options(own: Parser) -> None:
    options.add_model(own)
    prompt = own.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", action="append",
        help="text to continue; may be given several times")  # fmt: skip
    prompt.add_argument("--prompt-file", metavar="FILE",
        help="UTF-8 file with it, read as it is; - is standard input")  # fmt: skip
    prompt.add_argument("--prompts", metavar="FILE",
        help="UTF-8 file with a prompt in each line, as text or as JSON: strings, or objects with "
        "a \"prompt\"; - is standard input")  # fmt: skip
    options.add_template(own, "the prompt")
    options.add_method(own)
    own.add_argument("--max-new", metavar="N", type=int,
        help="most new tokens (default: 128, for the bundled question 16)")  # fmt: skip
    own.add_argument("--stop", metavar="TEXT", type=options.stop_text, action="append", default=[],
        help="ends the text, and is no part of it; may be given several times")  # fmt: skip
    options.add_sampling(own)


def _add_read_options(own: Parser) -> None:
    own.add_argument("document", metavar="DOCUMENT", help="UTF-8 file; - is standard input")
    own.add_argument("--out", metavar="FOLDER", required=True, help="where it is saved")
    options.add_model(own)
    options.add_template(own, "the document")
    options.add_method(own)
    own.add_argument("--max-questions", metavar="TOKENS", type=int, default=256,
        help="room for the tokens of a question (default: 256)")  # fmt: skip
    own.add_argument("--max-new", metavar="N", type=int, default=128,
        help="room for the tokens of an answer (default: 128)")  # fmt: skip


def _add_ask_options(own: Parser) -> None:
    own.add_argument("folder", metavar="FOLDER", help="of kvjax read")
    own.add_argument("questions", metavar="QUESTION", nargs="+", help="about the document")
    options.add_model(own, "the one that read the document")
    own.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what kvjax read made room for)")  # fmt: skip
    options.add_sampling(own)


def _add_chat_options(own: Parser) -> None:
    options.add_model(own)
    options.add_template(own, "what is said")
    options.add_method(own)
    own.add_argument("--max-prompt", metavar="TOKENS", type=int,
        help="room for all that is said to the model, and as much again for all that it answers "
        "(default: 4096, or half of the model's positions)")  # fmt: skip
    own.add_argument("--max-new", metavar="N", type=int, default=512,
        help="most tokens of an answer (default: 512)")  # fmt: skip
    options.add_sampling(own)


def _add_compare_options(own: Parser) -> None:
    options.add_model(own)
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
    add("--seed", options.seed, 0, "of the cases", "N")
    add("--out", str, "kvjax-compare", "folder of the results", "DIR")


def _add_plan_options(own: Parser) -> None:
    add = own.add_argument
    add("--model", metavar="DIR_OR_SHAPE", required=True,
        help="folder with config.json, such a file, or llama-3.1-8b, -70b or -405b")  # fmt: skip
    add("--mesh", metavar="SIZES", type=plan_command.mesh_sizes, default={"tensor": 1},
        help="devices that divide rows (data) and heads (tensor), as data=2,tensor=4 (default: "
        "one device)")  # fmt: skip
    add("--memory", metavar="GB", type=float, default=plan_command.MEMORY,
        help="of each device (default: 80)")  # fmt: skip
    add("--bandwidth", metavar="GB/S", type=float, default=plan_command.BANDWIDTH,
        help="of each device's memory (default: 3350, an NVIDIA H100 SXM's)")  # fmt: skip
    add("--tokens", metavar="N", type=int, default=131072,
        help="of a request's prompt (default: 131072)")  # fmt: skip
    add("--new", metavar="N", type=int, default=512, help="new tokens (default: 512)")
    add("--batch", metavar="N", type=int, nargs="+", default=[1, 8, 32],
        help="requests at a time (default: 1 8 32)")  # fmt: skip
    add("--method", metavar="NAME", nargs="+", default=plan_command.METHODS,
        help="methods of `kvjax methods` and compositions (default: full snapkv)")  # fmt: skip
    add("--budget", metavar="N_OR_FRACTION", type=options.budget, default=0.1,
        help="as for kvjax generate (default: 0.1)")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of weights, keys and values (default: bfloat16)")  # fmt: skip


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
    return [options.number(part, "numbers between commas") for part in text.split(",")]


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
