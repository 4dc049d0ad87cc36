"""`kvjax read --piece` is killed at random moments, and goes on from what it has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.generation.context_files import holds_context
from kvjax.models import demo, from_pretrained
from tests.support.attending import same_arrays
from tests.support.marks import some_slow

PIECE, MOST_SECONDS = 64, 120
UNFINISHED = "*.orbax-checkpoint-tmp*"  # what Orbax has not written to its end
# Where each run is killed: in the seconds after its start, or in those after a save has begun, the
# n-th of this run. A save takes about a tenth of a second, and a piece less than that.
STARTING, SAVING, READING = (0, 6), (0, 0.03), (0.03, 0.3)
MOMENTS = [
    (0, STARTING), (1, SAVING), (1, READING), (4, SAVING), (0, STARTING), (2, READING),
    (3, SAVING), (5, READING), (0, STARTING), (2, SAVING),
]  # fmt: skip


@pytest.mark.parametrize("kills", some_slow((7, len(MOMENTS)), exhaustive={len(MOMENTS)}))
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_reading_that_is_killed_ends_as_one_that_is_not(tmp_path, monkeypatch, kills):
    """Whenever it is killed, its folder holds nothing or a whole context behind one piece."""
    (tmp_path / "document.txt").write_text(demo.document().text)
    args = [
        "read", str(tmp_path / "document.txt"), "--method", "chain(h2o, quantize)",
        "--budget", "96", "--piece", f"{PIECE}",
    ]  # fmt: skip
    behind = _contexts_behind_pieces([*args, "--out", str(tmp_path / "whole")], monkeypatch)
    out, model, rng = tmp_path / "out", from_pretrained(demo.directory()), np.random.default_rng(0)
    assert len(behind) > 2 * sum(count for count, _ in MOMENTS)

    read, unfinished = 0, 0
    for saves, seconds in MOMENTS[:kills]:
        with _started([*args, "--out", str(out)], tmp_path) as process:
            _wait_for_saves(out, saves, process)
            _wait(out, rng.uniform(*seconds))
            os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, "it had ended before"
        unfinished += out.exists() and any(out.glob(UNFINISHED))
        if not holds_context(out):
            assert read == 0
            continue
        context = kvjax.load_context(out, model)
        length = int(context.length[0])
        assert length >= read, "nothing is lost that was saved"
        read = length
        same_arrays(context, behind[length])
    assert 0 < read < max(behind) and unfinished > 1

    with _started([*args, "--out", str(out)], tmp_path) as process:
        assert process.wait(MOST_SECONDS) == 0
    same_arrays(kvjax.load_context(out, model), behind[max(behind)])
    assert len(list(out.iterdir())) == 1 and holds_context(out)


def _contexts_behind_pieces(args: list[str], monkeypatch) -> dict[int, kvjax.Context]:
    """Returns what a reading saves that is not killed, by the tokens that have been read."""
    behind, save = {}, kvjax.save_context

    def noted(folder: Path, context: kvjax.Context, **named) -> None:
        save(folder, context, **named)
        behind[int(context.length[0])] = context.at_rest()

    with monkeypatch.context() as patch:
        patch.setattr(kvjax, "save_context", noted)
        assert main(args) == 0
    return behind


def _started(args: list[str], folder: Path) -> subprocess.Popen:
    """Starts the command, whose compiled code is kept from one run to the next."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvjax", *args],
        env={**os.environ, "KVJAX_CACHE": str(folder / "cache")}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _wait(out: Path, seconds: float) -> None:
    """Waits for so many seconds; no longer than a few saves take, or a fast machine reads all."""
    before, end = _newest(out), time.monotonic() + seconds
    while time.monotonic() < end and _newest(out) - before < 3:
        time.sleep(0.003)


def _wait_for_saves(out: Path, saves: int, process: subprocess.Popen) -> None:
    """Waits until a running command has begun so many saves."""
    before, end = _newest(out), time.monotonic() + MOST_SECONDS
    while saves and _newest(out) - before < saves:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)


def _newest(out: Path) -> int:
    """Returns the number of the newest save of a folder, begun or complete."""
    return max((int(place.name.split(".")[0]) for place in out.glob("[0-9]*")), default=0)
