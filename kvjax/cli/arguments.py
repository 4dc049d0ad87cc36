"""Parser of the command line. A command's module adds its options when the command is given."""

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
    "show": "show the results of kvjax compare or kvjax eval",
    "diagnose": "find the smallest cache that suffices for a text of yours",
    "profile": "measure which share of a cache each head of a model needs",
    "plan": "say what devices will hold, and how many requests fit",
    "methods": "list the methods of compression",
}
"""Commands with their help texts. Each is a module of this folder, such as `generate_command`."""


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, like all errors of the user."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError; an unknown choice gets a hint."""
        match = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if match is not None:
            if message.startswith("argument COMMAND"):
                message = f"there is no command '{printable(match[1], 200)}'"
            message += did_you_mean(match[1], re.findall(r"[\w.-]+", match[2]))
        raise ValueError(f"{message} (see {self.prog} --help)")


class _CommandLine(Parser):
    """The parser of all commands, with hints for unknown options."""

    commands: dict[str, Parser]

    def parse_args(  # type: ignore[override]  # namespaces of the caller's are not needed
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parses as any parser does; an unknown option gets a hint."""
        words = sys.argv[1:] if args is None else args
        # Options are added before parsing, so that `--help` shows them.
        command = next((word for word in words if not word.startswith("-")), None)
        if command in self.commands:
            _add_options(command, self.commands[command])
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            command_parser = self.commands.get(parsed.command, self)
            unknown = next((word for word in rest if word.startswith("-")), rest[0])
            known = [name for action in command_parser._actions for name in action.option_strings]
            command_parser.error(
                f"unrecognized arguments: {printable(' '.join(rest), 200)}"
                f"{did_you_mean(unknown.partition('=')[0], known)}"
            )
        return parsed


def parser() -> Parser:
    """Returns the parser of all commands, whose results have the command's function as `run`.

    A command's module is imported only when that command is given. Most modules import JAX, which
    would slow down the help on all commands.
    """
    main_parser = _CommandLine(
        prog="kvjax", allow_abbrev=False, description="Language models with a compressed KV cache."
    )
    main_parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    main_parser.set_defaults(run=lambda args: main_parser.print_help())
    subparsers = main_parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    main_parser.commands = subparsers.choices
    for name, about in COMMANDS.items():
        subparsers.add_parser(
            name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
            help=about,
        )  # fmt: skip
    return main_parser


@contextlib.contextmanager
def naming_options(args: argparse.Namespace) -> Iterator[None]:
    """Rewrites errors of the library within the block so that they name options of the command.

    The library's messages name arguments. An argument with an underscore cannot be another word, so
    the option replaces it. Other arguments may be parameters of a method too: the option is put
    before the message, and only if the message ends with the option's value.
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
        values = value if isinstance(value, list) else [value]  # the items of a list are checked
        about = rf"((a|an|float) )*{name.removesuffix('s')}s? must .*, got "
        if re.match(about, message) and message.endswith(
            tuple(f", got {brief(x)}" for x in values)
        ):
            return f"argument {option}: {message}"
    return message


def _add_options(command: str, parser: Parser) -> None:
    """Imports a command's module, and adds its description and options to the parser."""
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
