"""The command `kvjax`, and `python -m kvjax`: ready for Ctrl-C before JAX is imported."""

import gc
import os
import signal
import sys


def main() -> int:
    """Runs `kvjax.cli.main.main` on the process's arguments and returns its exit code.

    A Ctrl-C while that is imported ends the process at once, with exit code 130 and no output. One
    that comes when the command is done changes nothing. Where the parent process ignores Ctrl-C, as
    shells do for background jobs, the command ignores it too.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # No exception is raised: what is imported might catch it, or show a traceback.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # XLA writes to standard error by itself, such as when something takes long to compile. What is
    # an error for the user, JAX raises. XLA looks at the variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # JAX makes many objects while it traces. With Python's threshold of 700 new ones, the search
    # for unreachable cycles among them takes a fourth of that time.
    gc.set_threshold(100_000)
    from kvjax.cli.main import main as run

    code = run()
    # The interpreter gives signals back to the system before it ends, which would kill it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
