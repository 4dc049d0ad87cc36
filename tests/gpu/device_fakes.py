"""A process as `make device` starts it, and a list of entries that do what theirs can do."""

from __future__ import annotations

import os
import time
from pathlib import Path

ABOUT = {"device": "a GPU", "kvjax": "0", "platform": "gpu", "environment": {}}


def serve(pipe, errors, tiny):
    """Does what the kind of an entry says."""
    pipe.send(ABOUT)
    while True:
        try:
            kind, options = pipe.recv()
        except EOFError:
            return
        if kind == "slow":
            time.sleep(60)
        if kind == "ends":
            Path(errors).write_text("out of memory\n")
            os._exit(3)
        raises = "failed", {"reason": "Traceback\nValueError: wrong"}
        pipe.send(raises if kind == "raises" else ("done", {"result": options}))


def fakes(device, *kinds):
    """A list of entries of these kinds."""
    return [device.Entry(f"{number} {kind}", kind, {}) for number, kind in enumerate(kinds)]
