"""What a Ctrl-C does: it ends the process soon, or the answer that is being written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code after a Ctrl-C."""

_GRACE_SECONDS = 1  # to clean up after a Ctrl-C
_interrupted = threading.Event()  # by a Ctrl-C


def end_after_interrupt() -> None:
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


def end_if_interrupted() -> None:
    """Ends the process after a Ctrl-C; one that comes from now on ends it too."""
    if _interrupted.is_set():
        _end()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: _end())


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Within the block a first Ctrl-C raises nothing: the value says whether it came.

    A second one ends the process. Where the parent process ignores Ctrl-C, so does the block.
    """
    came = threading.Event()

    def notice(*_: object) -> None:
        if came.is_set():
            _end()
        came.set()

    with _handled(notice):
        yield came.is_set


class Cleared(Exception):
    """A Ctrl-C while a line was being typed."""


@contextlib.contextmanager
def clearing(typed: Callable[[], str]) -> Iterator[None]:
    """Within the block a Ctrl-C raises `Cleared` if something has been typed, else what it did."""
    before = signal.getsignal(signal.SIGINT)

    def clear(*given: Any) -> None:
        if typed():
            raise Cleared
        if callable(before):
            before(*given)

    with _handled(clear):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    """Within the block it handles a Ctrl-C, unless the parent process ignores them."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    waking = signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)


def _watch(coming: int) -> None:
    """Waits for a Ctrl-C among the signals that come, and ends the process a second later."""
    while os.read(coming, 1) != bytes([signal.SIGINT]):
        pass
    time.sleep(_GRACE_SECONDS)
    _end()


def _end() -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():  # a display may have hidden the cursor
            os.write(sys.stderr.fileno(), b"\x1b[?25h")
    os._exit(INTERRUPTED)
