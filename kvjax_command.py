"""The command `kvjax` as it is installed: ready for Ctrl-C before anything else is imported.

This module is no part of the package `kvjax`, since to import anything of that imports JAX, which
takes seconds.
"""

import ctypes
import gc
import os
import signal
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's `mallopt`
_LARGEST_KEPT = 2**25  # bytes of the largest allocation that glibc can keep


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
    _keep_freed_memory()
    from kvjax.cli.main import main as run

    code = run()
    # The interpreter gives signals back to the system before it ends, which would kill it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _keep_freed_memory() -> None:
    """Lets the C library keep what is freed for what is needed next, where it is glibc.

    XLA on CPU takes memory anew for each layer that reads a prompt. Given back to the system and
    got again each time, it takes a seventh of the time to the first token.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


if __name__ == "__main__":
    sys.exit(main())
