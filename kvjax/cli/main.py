"""Command line: runs a command, and prints errors of the user in one line."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from kvjax.cli.arguments import naming_options, parser
from kvjax.cli.inputs import import_module
from kvjax.messages import printable, quiet

# Errors that a user can cause. The library raises the first two, and files and the hub raise the
# third. The next three mean that a request needs too much memory, and the last one that a model's
# logits are not numbers.
# A RuntimeError says that tokens were lost (`kvjax.check_dropped`), or that a device has no memory.
_USER_ERRORS = (
    ValueError, TypeError, OSError, OverflowError, MemoryError, RuntimeError, FloatingPointError,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; `argv` defaults to the process's arguments.

    Returns:
      The exit code: 0; 2 after an error of the user (one line on standard error); 130 after
      KeyboardInterrupt; 1 if the reader of standard output has closed it, or if a cell of a
      comparison failed.

    Example:
      >>> from kvjax.cli.main import main
      >>> main(["--version"])  # doctest: +ELLIPSIS
      kvjax ...
      0
    """
    if sys.stderr is None:  # print would use standard output instead
        sys.stderr = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):  # prints "?" for characters of other encodings
        sys.stdout.reconfigure(errors="replace")
    try:
        with quiet(), _flushed():
            args = parser().parse_args(argv)  # imports JAX
            for module in getattr(args, "imports", ()):
                import_module(module)
            with naming_options(args):
                return args.run(args) or 0
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except _USER_ERRORS as error:
        try:
            print(f"kvjax: error: {_message(error)}", file=sys.stderr)
        except OSError:  # a full disk or a closed pipe
            _discard(sys.stderr)
        return 2


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Flushes standard output when the block ends: a full disk or closed pipe raises there."""
    try:
        yield
    finally:
        if sys.stdout is not None:
            try:
                sys.stdout.flush()
            except OSError:
                _discard(sys.stdout)
                raise


def _message(error: BaseException) -> str:
    """Returns the message of an error in one line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # leaves out the number in front
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return printable(" ".join(text.split()), most=4000) or type(error).__name__


def _discard(stream: TextIO) -> None:
    """Redirects a standard stream to nowhere, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
