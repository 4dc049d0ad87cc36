"""The parser of the command line, which asks a command for its options when that is given."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import kvjax
from kvjax.messages import brief, did_you_mean, printable

COMMANDS = {
    "generate": "continue prompts through a compressed cache",
    "read": "read a document once, for many questions",
    "ask": "ask questions about a document that was read",
    "chat": "talk with a model whose history is compressed",
    "compare": "measure what methods keep: answers, perplexity, attention, bytes",
    "eval": "run published tasks through compressed caches",
    "bench": "measure what methods cost: times and bytes, beside the machine's own",
    "show": "show what kvjax compare or kvjax eval found",
    "diagnose": "find the smallest cache that holds for a text of yours",
    "plan": "what devices will hold, and how many requests fit",
    "methods": "list the methods of compression",
}
"""The commands, and what each one does. Each is a module of this folder, `generate_command` ..."""


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        """Raises it; a choice that is not known gets a hint."""
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong is not None:
            if message.startswith("argument COMMAND"):
                message = f"there is no command '{printable(wrong[1], 200)}'"
            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        raise ValueError(f"{message} (see {self.prog} --help)")


class _Whole(Parser):
    """The parser of all commands, which knows what was perhaps meant."""

    commands: dict[str, Parser]

    def parse_args(  # type: ignore[override]  # namespaces of the caller's are not needed
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parses as any parser does; an option that is not known gets a hint."""
        words = sys.argv[1:] if args is None else args
        command = next((word for word in words if not word.startswith("-")), None)
        if command in self.commands:
            _add_options(command, self.commands[command])
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            of_command = self.commands.get(parsed.command, self)
            wrong = next((word for word in rest if word.startswith("-")), rest[0])
            known = [name for action in of_command._actions for name in action.option_strings]
            of_command.error(
                f"unrecognized arguments: {printable(' '.join(rest), 200)}"
                f"{did_you_mean(wrong.partition('=')[0], known)}"
            )
        return parsed


def parser() -> Parser:
    """The parser of all commands; `run` is the command's function.

    A command's module is imported when that command is given: most import JAX, and help about all
    commands must not take as long.
    """
    whole = _Whole(
        prog="kvjax", allow_abbrev=False, description="Language models with a compressed KV cache."
    )
    whole.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    whole.set_defaults(run=lambda args: whole.print_help())
    added = whole.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    whole.commands = added.choices
    for name, about in COMMANDS.items():
        added.add_parser(
            name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
            help=about,
        )  # fmt: skip
    return whole


@contextlib.contextmanager
def naming_options(args: argparse.Namespace) -> Iterator[None]:
    """Errors of the library that are raised within the block name options of the command.

    The library names its arguments. One with an underscore is no other word, and the option takes
    its place. Others may be parameters of a method, too: the option is put before a message that
    ends with what it was given.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        message = _with_options(str(error), args)
        if type(error) not in (ValueError, TypeError) or message == str(error):
            raise
        raise type(error)(message) from error


def _with_options(message: str, args: argparse.Namespace) -> str:
    for name, option in getattr(args, "option_names", {}).items():
        if "_" in name:
            message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w./])", option, message)
            continue
        value = getattr(args, name, None)
        values = value if isinstance(value, list) else [value]  # which are checked one by one
        about = rf"((a|an|float) )*{name.removesuffix('s')}s? must .*, got "
        if re.match(about, message) and message.endswith(
            tuple(f", got {brief(x)}" for x in values)
        ):
            return f"argument {option}: {message}"
    return message


def _add_options(command: str, parser: Parser) -> None:
    """Adds what the parser of a command lacks before the command is given."""
    module = importlib.import_module(f"kvjax.cli.{command}_command")
    parser.description, parser.epilog = module.DESCRIPTION, module.EXAMPLES
    module.add_options(parser)
    names = {
        action.dest: next(name for name in action.option_strings if name.startswith("--"))
        for action in parser._actions
        if action.option_strings
    } | getattr(module, "ARGUMENTS", {})
    parser.set_defaults(run=module.run, option_names=names)
    parser.add_argument("--import", metavar="MODULE", action="append", default=[], dest="imports",
        help="a module, or a .py file, that registers methods with kvjax.register; may be "
        "given several times")  # fmt: skip
    if command != "chat":
        parser.add_argument("--json", action="store_true",
            help="print one JSON object, nothing else")  # fmt: skip
