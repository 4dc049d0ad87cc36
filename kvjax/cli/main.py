"""The command line: one command is run, and every error of the user's is one line."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from kvjax.cli import interrupts
from kvjax.cli.arguments import naming_options, parser
from kvjax.cli.inputs import import_module
from kvjax.messages import printable, quiet

_CLOSED_PIPE = 1
_NOT_WRITTEN = (errno.ENOSPC, errno.EBADF)  # a full disk, a stream that is none to write to

# Everything that a user can get wrong: the library raises the first two, files and hub the third,
# the next three say that there is not enough memory for what was asked, and the last one that a
# model's logits are no numbers.
_USER_ERRORS = (
    ValueError, TypeError, OSError, OverflowError, MemoryError, RecursionError, FloatingPointError,
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
    _replace_closed_streams(whole_process=argv is None)
    try:
        with quiet(), _output():
            args = parser().parse_args(argv)  # imports JAX
            if argv is None:
                interrupts.end_after_interrupt()
            try:
                for module in getattr(args, "imports", ()):
                    import_module(module)
                with naming_options(args):
                    return args.run(args) or 0
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
        _discard(sys.stdout)
        return _CLOSED_PIPE
    except _user_errors() as error:
        try:
            print(f"kvjax: error: {_message(error)}", file=sys.stderr)
        except OSError:  # a full disk or a closed pipe
            _discard(sys.stderr)
        return 2


def _replace_closed_streams(whole_process: bool) -> None:
    """Standard error that is closed takes what nobody sees, in place of an exception.

    In a process of our own the numbers of closed streams are taken too. The next file that is
    opened would get them, and with it what libraries write to the terminal.
    """
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    if whole_process:
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Within the block standard output can be written to; an error of writing names it."""
    if sys.stdout is None:
        raise ValueError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):  # "?" for what the terminal cannot encode
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename is not None:
            raise
        _discard(sys.stdout)
        raise OSError(error.errno, error.strerror, "standard output") from error


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


def _discard(stream: TextIO) -> None:
    """Lets the interpreter flush a standard stream at its end without a complaint."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
