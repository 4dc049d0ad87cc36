"""What is said to `kvjax chat`, by lines, and what a Ctrl-C does meanwhile."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from kvjax.cli.inputs import standard_input


class _Cleared(Exception):
    """A Ctrl-C came while a line was being typed."""


def lines() -> Iterator[str]:
    """The lines of standard input; at a terminal, what is typed or pasted until Enter is pressed.

    At a terminal Ctrl-C clears a line that has been begun. Otherwise it raises KeyboardInterrupt,
    so that readline leaves the terminal as it was.

    Raises:
      ValueError: standard input is closed, or no UTF-8 text.
    """
    at_terminal = standard_input().isatty()
    typed = _editing() if at_terminal else str

    def clear(*_: object) -> None:
        raise _Cleared if typed() else KeyboardInterrupt

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


def _editing() -> Callable[[], str]:
    """Makes what is typed a line that can be edited; the function returns it as it is so far."""
    try:
        import readline
    except ImportError:  # not every Python has it
        return str
    # Lines that are pasted together are one line. Python's readline leaves that out by default.
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline.get_line_buffer


@contextlib.contextmanager
def interrupt_noticed() -> Iterator[Callable[[], bool]]:
    """Within the block a first Ctrl-C raises nothing: the value says whether it came.

    A second one ends the process. Where the parent process ignores Ctrl-C, so does the block.
    """
    came = threading.Event()

    def notice(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # takes the second one
        came.set()

    with _interrupts_to(notice):
        yield came.is_set


@contextlib.contextmanager
def _interrupts_to(handler: Callable[..., None]) -> Iterator[None]:
    """Lets a function handle Ctrl-C within the block, unless the parent process ignores them."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
