"""What is said to `kvjax chat`: lines of standard input, or what is typed at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvjax.cli import interrupts
from kvjax.cli.inputs import standard_input


def lines() -> Iterator[str]:
    """The lines of standard input; at a terminal, what is typed or pasted until Enter is pressed.

    At a terminal Ctrl-C clears a line that has been begun.

    Raises:
      ValueError: standard input is closed, or no UTF-8 text.
    """
    at_terminal = standard_input().isatty()
    typed = _editing() if at_terminal else str
    while True:
        try:
            with interrupts.clearing(typed):
                line = input("> " if at_terminal else "")
        except interrupts.Cleared:
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
