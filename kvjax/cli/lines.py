"""Lines of input for `kvjax chat`, and its handling of Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from kvjax.cli.inputs import standard_input


class _Cleared(Exception):
    """A Ctrl-C came while a line was being typed."""


def lines() -> Iterator[str]:
    """Yields the lines of standard input; at a terminal, pasted lines make one line.

    At a terminal, Ctrl-C clears a line that has been begun. Otherwise it raises KeyboardInterrupt,
    so that readline leaves the terminal as it was.

    Raises:
      ValueError: standard input is closed or is not UTF-8 text.
    """
    at_terminal = standard_input().isatty()
    current_line = _enable_editing() if at_terminal else str

    def clear(*_: object) -> None:
        raise _Cleared if current_line() else KeyboardInterrupt

    while True:
        try:
            with _interrupts_to(clear):
                line = input("> " if at_terminal else "")
        except _Cleared:
            print()
            continue
        except EOFError:
            if at_terminal:
                print()
            return
        except UnicodeDecodeError as error:
            raise ValueError("standard input is not UTF-8 text") from error
        yield line.rstrip("\n")


def _enable_editing() -> Callable[[], str]:
    """Enables line editing; returns a function that returns the line typed so far."""
    try:
        import readline
    except ImportError:  # not every Python has it
        return str
    # Lines that are pasted together make one line; by default, Python's readline splits them.
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline.get_line_buffer


@contextlib.contextmanager
def interrupt_noticed() -> Iterator[Callable[[], bool]]:
    """Lets a first Ctrl-C within the block pass without an exception.

    The value is a function that returns whether Ctrl-C was pressed. A second one ends the process.
    If the parent process ignores Ctrl-C, the block does too.
    """
    interrupted = threading.Event()

    def notice(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # for the second Ctrl-C
        interrupted.set()

    with _interrupts_to(notice):
        yield interrupted.is_set


@contextlib.contextmanager
def _interrupts_to(handler: Callable[..., None]) -> Iterator[None]:
    """Lets a function handle Ctrl-C within the block, unless the parent process ignores it."""
    previous = signal.getsignal(signal.SIGINT)
    # Python lets the main thread alone set handlers.
    if previous is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
