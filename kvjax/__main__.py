"""Runs the command `kvjax`, or `python -m kvjax`; Ctrl-C ends it from the first moment on."""

import gc
import os
import signal
import sys


def main() -> int:
    """Runs `kvjax.cli.main.main` on the process's arguments and returns its exit code.

    A Ctrl-C ends the process at once, also while XLA compiles. Where the parent process ignores
    Ctrl-C, as shells do for background jobs, the command ignores it too.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Python's own handler waits for compiled code to return, and raises an exception.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # XLA writes to standard error, such as when something takes long to compile. Errors that
    # concern the user are raised by JAX. XLA looks at the variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # JAX makes many objects while it traces. With Python's threshold of 700 new ones, the search
    # for unreachable cycles among them takes a fourth of that time.
    gc.set_threshold(100_000)
    from kvjax.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
