"""The command line: `kvjax generate`, `kvjax compare`, `kvjax methods`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import jax

from kvjax.cli.arguments import parser
from kvjax.cli.inputs import import_module
from kvjax.messages import printable, quiet

_CLOSED_PIPE, _INTERRUPTED = 1, 130
_GRACE_SECONDS = 1  # to clean up after a Ctrl-C
_interrupted = threading.Event()  # by a Ctrl-C

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
        _end_after_interrupt()
    try:
        try:
            return _run(argv)
        finally:
            if argv is None:
                # Its exception may have been lost, or another one have taken its place. End the
                # process at once: JAX can crash when the interpreter shuts down after a compilation
                # was interrupted.
                _end_if_interrupted()
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return _CLOSED_PIPE
    except _USER_ERRORS as error:
        print(f"kvjax: error: {_message(error)}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str] | None) -> int:
    with quiet():
        if hasattr(sys.stdout, "reconfigure"):  # "?" for what the terminal cannot encode
            sys.stdout.reconfigure(errors="replace")
        args = parser().parse_args(argv)
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


def _end_after_interrupt() -> None:
    """Ends the process at most a second after a Ctrl-C, unless the parent process ignores it.

    Python raises KeyboardInterrupt wherever it happens to be. In some places, such as finalizers,
    it is lost, and nowhere is it raised while compiled code runs, such as XLA's compiler. Another
    thread therefore waits for the signal too.
    """
    if not hasattr(signal, "setitimer"):  # not POSIX
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return

    def interrupt(*_: object) -> NoReturn:
        if _interrupted.is_set():  # the second one
            _end()
        _interrupted.set()
        raise KeyboardInterrupt

    def lost(given: sys.UnraisableHookArgs) -> None:
        if isinstance(given.exc_value, KeyboardInterrupt):
            _end()
        sys.__unraisablehook__(given)

    coming, signals = os.pipe()
    os.set_blocking(signals, False)
    threading.Thread(target=_watch, args=(coming,), daemon=True).start()
    signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = lost


def _watch(coming: int) -> None:
    """Waits for a Ctrl-C among the signals that come, and ends the process a second later."""
    while os.read(coming, 1) != bytes([signal.SIGINT]):
        pass
    time.sleep(_GRACE_SECONDS)
    _end()


def _end_if_interrupted() -> None:
    """Ends the process after a Ctrl-C; one that comes from now on ends it too."""
    if _interrupted.is_set():
        _end()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: _end())


def _end() -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():  # a display may have hidden the cursor
            os.write(sys.stderr.fileno(), b"\x1b[?25h")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
