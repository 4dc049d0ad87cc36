"""The command line: one command is run, and every error of the user's is one line."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from kvjax.cli import interrupts
from kvjax.cli.arguments import parser
from kvjax.cli.inputs import import_module
from kvjax.messages import printable, quiet

_CLOSED_PIPE = 1

# Everything that a user can get wrong: the library raises the first two, files and hub the third,
# the others say that there is not enough memory for what was asked.
_USER_ERRORS = (ValueError, TypeError, OSError, OverflowError, MemoryError, RecursionError)


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
    try:
        with quiet():
            if isinstance(sys.stdout, io.TextIOWrapper):  # "?" for what the terminal cannot encode
                sys.stdout.reconfigure(errors="replace")
            args = parser().parse_args(argv)  # imports JAX
            if argv is None:
                interrupts.end_after_interrupt()
            try:
                return _run(args)
            finally:
                if argv is None:
                    # Its exception may have been lost, or another one have taken its place. End the
                    # process at once: JAX can crash when the interpreter shuts down after a
                    # compilation was interrupted.
                    interrupts.end_if_interrupted()
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return interrupts.INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return _CLOSED_PIPE
    except _user_errors() as error:
        print(f"kvjax: error: {_message(error)}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    for module in getattr(args, "imports", ()):
        import_module(module)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _discard_output()  # a full disk, and no file of ours
        raise OSError(error.errno, error.strerror, "standard output") from error
    return code or 0


def _user_errors() -> tuple[type[Exception], ...]:
    """`_USER_ERRORS`, and where JAX has been imported, its error when a device has no memory."""
    errors = sys.modules.get("jax.errors")
    return _USER_ERRORS if errors is None else (*_USER_ERRORS, errors.JaxRuntimeError)


def _message(error: BaseException) -> str:
    """What is wrong, in one line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # without the number in front
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return printable(" ".join(text.split()), most=4000) or type(error).__name__


def _discard_output() -> None:
    """Lets the interpreter flush standard output at its end without a complaint."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
