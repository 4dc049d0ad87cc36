"""The command line: `kvjax generate`, `kvjax compare`, `kvjax methods`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from kvjax.cli.arguments import parser
from kvjax.cli.inputs import import_module
from kvjax.messages import printable, quiet

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
        with quiet():
            if hasattr(sys.stdout, "reconfigure"):  # "?" for what the terminal cannot encode
                sys.stdout.reconfigure(errors="replace")
            args = parser().parse_args(argv)
            for module in getattr(args, "imports", ()):
                import_module(module)
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
        message = printable(" ".join(str(error).split()), most=4000) or type(error).__name__
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


if __name__ == "__main__":
    sys.exit(main())
