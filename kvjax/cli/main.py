"""The command line: `kvjax generate`, `kvjax compare`, `kvjax methods`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

import jax

import kvjax
from kvjax.cli import compare_command, generate_command, methods_command, user_modules
from kvjax.cli.generation_request import DEFAULT_BUDGET
from kvjax.evaluation import grid

_CLOSED_PIPE, _INTERRUPTED = 1, 130
_GRACE_SECONDS = 1  # to clean up after a Ctrl-C

# Everything that a user can get wrong: the library raises the first two, files and hub the third,
# the others say that there is not enough memory for what was asked.
_USER_ERRORS = (
    ValueError, TypeError, OSError, OverflowError, MemoryError, RecursionError,
    jax.errors.JaxRuntimeError,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` defaults to the process's arguments.

    Returns:
      The exit code: 0, 2 after an error of the user's (one line on standard error), 130 after
      Ctrl-C, 1 when standard output was closed or a cell of a comparison failed.

    Example:
      >>> from kvjax.cli.main import main
      >>> main(["--version"])
      kvjax 0.1.0
      0
    """
    if argv is None:
        sys.unraisablehook = _end_if_interrupted
        _end_after_interrupt()
    try:
        with _quiet():
            if hasattr(sys.stdout, "reconfigure"):  # "?" for what the terminal cannot encode
                sys.stdout.reconfigure(errors="replace")
            args = _parser().parse_args(argv)
            for module in getattr(args, "imports", ()):
                user_modules.import_module(module)
            code = args.run(args)
            if argv is None and _interrupted():
                os._exit(_INTERRUPTED)
            sys.stdout.flush()
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        if argv is None:
            # End the process at once: JAX can crash when the interpreter shuts down after a
            # compilation was interrupted.
            os._exit(_INTERRUPTED)
        return _INTERRUPTED
    except BrokenPipeError:
        # Or the interpreter would complain when it flushes standard output at its end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except _USER_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"kvjax: error: {message}", file=sys.stderr)
        return 2
    return code or 0


def _end_if_interrupted(lost: sys.UnraisableHookArgs) -> None:
    """Ends the process after a Ctrl-C that came while Python could not raise: in a finalizer."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        os._exit(_INTERRUPTED)
    sys.__unraisablehook__(lost)


def _end_after_interrupt() -> None:
    """Ends the process a second after a Ctrl-C whose exception was lost.

    Python raises it wherever it happens to be, and in some places, such as finalizers, it is lost.
    """
    if not hasattr(signal, "setitimer"):  # not POSIX
        return

    def interrupt(*_: object) -> NoReturn:
        signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, lambda *_: os._exit(_INTERRUPTED))
    signal.signal(signal.SIGINT, interrupt)


def _interrupted() -> bool:
    """Whether a Ctrl-C has come that was lost."""
    return hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_REAL)[0] > 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines and warnings of the libraries underneath: an error is one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="kvjax", allow_abbrev=False, description="Language models with a compressed KV cache."
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    parser.set_defaults(run=lambda args: parser.print_help())
    added = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_generate(added)
    _add_compare(added)
    methods = added.add_parser(
        "methods", allow_abbrev=False, help="list the methods of compression",
        description="Lists the methods of compression with their parameters and papers.",
    )  # fmt: skip
    _add_import(methods)
    methods.add_argument("--json", action="store_true", help="print one JSON object")
    methods.set_defaults(run=methods_command.methods)
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--import", metavar="MODULE", action="append", default=[], dest="imports",
        help="a module, or a .py file, that registers methods with kvjax.register; may be given "
        "several times"
    )  # fmt: skip


def _add_generate(added) -> None:
    parser = added.add_parser(
        "generate", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        help="continue a prompt through a compressed cache",
        description="Continues a prompt through a compressed cache. The text goes to standard\n"
        "output, figures to standard error. Without --model, the bundled model continues\n"
        "it. Without a prompt as well, the bundled model answers a question about a long\n"
        "document, with the method and with the full cache.",
        epilog="examples:\n"
        "  kvjax generate\n"
        "  kvjax generate --model DIR --prompt 'Once upon a time' --budget 256\n"
        "  kvjax generate --model DIR --prompt-file book.txt --method streaming_llm\n"
        "  kvjax generate --model DIR --prompt Hello --method 'every(snapkv, steps=64)'\n"
        "  kvjax generate --import mine.py --method mine",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", metavar="DIR_OR_ID",
        help="folder of a Hugging Face model, or its hub id (default: the bundled model)"
    )  # fmt: skip
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 file with it, read as it is")
    add("--method", metavar="NAME", default="snapkv",
        help="a method of `kvjax methods` or a composition of them (default: snapkv)")  # fmt: skip
    _add_import(parser)
    add("--budget", metavar="N_OR_FRACTION", type=_budget,
        help="what to keep: slots per head (256) or a share of the prompt (0.2); for every part "
        f"of --method that takes a budget and is not given its own (default: {DEFAULT_BUDGET})"
    )  # fmt: skip
    add("--max-new", metavar="N", type=int,
        help="most new tokens (default: 128, for the bundled question 16)")  # fmt: skip
    add("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    add("--top-k", metavar="K", type=int, help="draw from the K most likely tokens")
    add(
        "--top-p", metavar="P", type=float, help="draw from the most likely tokens that add up to P"
    )
    add(
        "--min-p",
        metavar="P",
        type=float,
        help="draw from tokens at least P times as likely as the likeliest",
    )
    add("--seed", metavar="N", type=_seed, default=0, help="of the draws (default: 0)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=generate_command.generate)


def _add_compare(added) -> None:
    parser = added.add_parser(
        "compare", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        help="measure what methods keep: answers, perplexity, bytes, times",
        description="Runs methods over budgets, prompt lengths and depths: which questions about\n"
        "a long text are still answered, what held-out text costs, bytes and times.\n"
        "Prints a table and writes results.json, results.csv, timings.json and pictures.\n"
        "An interrupted run goes on when the same command is given again.",
        epilog="examples:\n"
        "  kvjax compare\n"
        "  kvjax compare --methods snapkv,h2o --budgets 0.1,0.2 --cases 20\n"
        "  kvjax compare --model DIR --text book.txt --lengths 4096 --depths 0,0.5,1",
    )  # fmt: skip

    def add(name: str, kind, default, about: str, metavar: str = "LIST") -> None:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = f"{about} (default: {shown})"
        parser.add_argument(name, metavar=metavar, type=kind, default=default, help=help_text)

    parser.add_argument("--model", metavar="DIR_OR_ID",
        help="folder of a Hugging Face model, or its hub id (default: the bundled model)"
    )  # fmt: skip
    parser.add_argument("--text", metavar="FILE",
        help="UTF-8 text that the model does not know (default: a bundled one)"
    )  # fmt: skip
    add("--methods", compare_command.method_list, grid.METHODS,
        "methods of `kvjax methods` and compositions, or all; full is always there")  # fmt: skip
    _add_import(parser)
    add("--budgets", compare_command.number_list, grid.BUDGETS,
        "shares of the prompt (0.1) or slots per head (64)")  # fmt: skip
    add("--lengths", compare_command.number_list, grid.LENGTHS, "tokens of a prompt")
    add("--depths", compare_command.depth_list, grid.DEPTHS,
        "where in the text the answer is, 0 to 1, or how many such places")  # fmt: skip
    add("--tasks", compare_command.name_list, grid.DEFAULT_TASKS,
        f"of {', '.join(grid.TASKS)}")  # fmt: skip
    add("--cases", int, grid.CASES, "per task, method, budget, length and depth", "N")
    add("--seed", _seed, 0, "of the cases", "N")
    add("--out", str, compare_command.DEFAULT_OUT, "folder of the results", "DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.set_defaults(run=compare_command.compare)


def _budget(text: str) -> int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise argparse.ArgumentTypeError(
        f"must be a number of slots (256) or a share of the prompt (0.2), got {text!r}"
    )


def _seed(text: str) -> int:
    # JAX would take larger ones and drop their upper bits.
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 2**32 - 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
