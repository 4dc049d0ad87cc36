"""Lines of input for `kvjax chat`, and its handling of Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from kvjax.cli.inputs import standard_input
from kvjax.cli.terminal import print_line

LEAVING = "press Ctrl-C again to leave; /save NAME keeps the conversation"
"""Line that is shown before a further Ctrl-C ends the process."""


class Interrupts:
    """Counts presses of Ctrl-C while the process works, so that none ends it unannounced.

    The first press asks for an end of the work, the second one shows `LEAVING`, and the third one
    ends the process at once, even while it compiles.
    """

    def __init__(self) -> None:
        self._count = 0

    def came(self) -> bool:
        """Returns whether Ctrl-C was pressed since the last `take`."""
        return self._count > 0

    def take(self) -> bool:
        """Returns whether Ctrl-C was pressed since the last call, and counts from zero again."""
        came, self._count = self.came(), 0
        if came and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, self.press)
        return came

    def press(self, *_: object) -> None:
        """Handles a press; takes the arguments of a signal's handler."""
        self._count += 1
        if self._count == 2:
            # Before the line is shown: a third press that answers it at once must not be lost.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(OSError):  # `print` fails in a handler that interrupts `print`
                os.write(2, f"\n{LEAVING}\n".encode())


@contextlib.contextmanager
def interrupts_counted() -> Iterator[Interrupts]:
    """Counts presses of Ctrl-C within the block, unless the parent process ignores them."""
    interrupts = Interrupts()
    with _interrupts_to(interrupts.press):
        yield interrupts


def lines(interrupts: Interrupts) -> Iterator[str]:
    """Yields the lines of standard input; at a terminal, pasted lines make one line.

    At a terminal, Ctrl-C clears a line that has been begun. At an empty one it shows `LEAVING`, and
    raises KeyboardInterrupt if it is pressed again before anything is typed. So does a press that
    came after the last answer. Without a terminal, Ctrl-C raises KeyboardInterrupt.

    Args:
      interrupts: counts the presses between two lines.

    Raises:
      ValueError: standard input is closed or is not UTF-8 text.
    """
    read = _typed(interrupts) if standard_input().isatty() else _piped()
    for line in read:
        yield line.rstrip("\n")


def _piped() -> Iterator[str]:
    """Yields the lines of a file or a pipe."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    while True:
        try:
            with _interrupts_to(end):
                line = standard_input().readline()
        except UnicodeDecodeError as error:
            raise ValueError("standard input is not UTF-8 text") from error
        if not line:
            return
        yield line


def _typed(interrupts: Interrupts) -> Iterator[str]:
    """Yields the lines that are typed at a terminal; earlier ones come back with the arrow keys."""
    # Imported here, since only this command at a terminal needs it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    output = create_output(always_prefer_tty=True)  # standard output may be a file
    # Terminals would be asked for the cursor's place, which menus need, and some never answer.
    output.enable_cpr = False  # type: ignore[attr-defined]  # of terminals other than Windows'
    session: PromptSession[str] = PromptSession([("ansicyan", "> ")], output=output)
    announced = False  # whether the next Ctrl-C leaves

    def typed(*_: object) -> None:
        nonlocal announced
        announced = False

    session.default_buffer.on_text_changed += typed
    while True:
        if interrupts.take():
            print_line(LEAVING, "dim")
            announced = True
        try:
            line = session.prompt()
        except KeyboardInterrupt:
            if session.default_buffer.text:
                announced = False
                continue
            if announced:
                raise
            interrupts.press()
            continue
        except EOFError:
            return
        announced = False
        yield line


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
