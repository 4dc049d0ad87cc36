"""Ctrl-C in a conversation: it clears a line that is typed, or ends an answer that is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Within the block a first Ctrl-C raises nothing: the value says whether it came.

    A second one ends the process. Where the parent process ignores Ctrl-C, so does the block.
    """
    came = threading.Event()

    def notice(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # takes the second one
        came.set()

    with _handled(notice):
        yield came.is_set


class Cleared(Exception):
    """A Ctrl-C while a line was being typed."""


@contextlib.contextmanager
def clearing(typed: Callable[[], str]) -> Iterator[None]:
    """Within the block a Ctrl-C raises `Cleared` if something has been typed.

    Otherwise it raises KeyboardInterrupt, so that readline leaves the terminal as it was.
    """

    def clear(*_: object) -> None:
        raise Cleared if typed() else KeyboardInterrupt

    with _handled(clear):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    """Within the block it handles a Ctrl-C, unless the parent process ignores them."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
