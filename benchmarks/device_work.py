"""How `device.py` measures an entry: a function for each kind, in a process that runs several.

`serve` is that process. It keeps a model's weights and compiled code from entry to entry. Whoever
started it ends it where an entry takes too long, and starts another one for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import device_models as models
import jax
from device_layers import selections
from device_models import LeftOut
from kernel_shapes import LLAMA, SMALL, Shape
from kernels import implementations, rows_of, said

import kvjax
from kvjax.cli import compilation_cache
from kvjax.cli.main import main as kvjax_command
from kvjax.evaluation.speed.machine import environment
from pallas_kernels import tune
from pallas_kernels.attention.tuning import Attention
from pallas_kernels.base.dispatch import OLDEST_GPU, default_device, gpu_capability
from pallas_kernels.base.tiles import Tile, generation, table

ROUNDS = 3
ANSWERED = "full,snapkv(budget=0.1),clusterkv(budget=0.05)"
LAST_LINES = 12  # of an error
TINY_TILE = Tile(tile_bytes=4096, warps=4, stages=2, programs=2, cores=3)


def rates(tiny: bool) -> dict[str, Any]:
    """The best rates of the device."""
    return models.rates()


def kernels(tokens: int, rows: int, group: str, tiny: bool) -> dict[str, Any]:
    """Rows of `kernels.py` for a group at a layer of Llama-3.1-8B; interpreted if tiny."""
    names = ("interpret", "xla") if tiny else implementations()
    if names == ("xla",):
        raise LeftOut(_no_gpu())
    shape = SMALL if tiny else Shape(*LLAMA, tokens, rows)
    return {"rows": rows_of(shape, group, ROUNDS, tiny, names)}


def tiles(operation: str, tiny: bool) -> dict[str, Any]:
    """The best tile of an operation, and how long the tile of the package's table takes."""
    capability = gpu_capability()
    if tiny:
        small = Attention(1, 40, heads=2, channels=32, dtype="float32")
        call = functools.partial(small.call, interpret=True)
        works, tried = (SimpleNamespace(call=call, operands=small.operands),), [TINY_TILE]
        in_table = TINY_TILE
    elif capability is None or capability < OLDEST_GPU:
        raise LeftOut(_no_gpu())
    else:
        works, cores = tune.WORKS[operation], default_device().core_count
        in_table = Tile(**table()[generation(capability)][operation])
        in_table = dataclasses.replace(in_table, cores=cores)
        tried = list(dict.fromkeys([*tune.candidates(works[0], cores), in_table]))
    times = tune.measure_all(works, tried, ROUNDS)  # pyright: ignore[reportArgumentType]  # a small work has what is called
    best, seconds = tune.best(times)
    return {
        "generation": generation(capability),
        "tile": dataclasses.asdict(best),
        "microseconds": [1e6 * x for x in seconds],
        "tile_in_table": dataclasses.asdict(in_table),
        "microseconds_in_table": [1e6 * x for x in times.get(in_table, ())],
        "tried": len(times),
    }


def answers(variable: str, tokens: int, cases: int, tiny: bool) -> dict[str, Any]:
    """Needles that a model finds with some methods, and that the full cache finds."""
    path = os.environ.get(variable)
    if not tiny and (path is None or not os.path.exists(path)):
        raise LeftOut(f"{variable} names no model: set it to its folder or GGUF file")
    words = ["eval", "--lengths", str(tokens), "--cases", str(cases), "--question", "after"]
    if tiny:
        words += ["needle", "--method", "full", "--depths", "0.5"]
    else:
        words += ["niah_single_2", "--method", ANSWERED, "--model", str(path)]
    printed, errors = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        status = kvjax_command([*words, "--json", "--out", folder])
    if status:
        raise RuntimeError(f"kvjax {' '.join(words)} ended with {status}: {errors.getvalue()}")
    found = json.loads(printed.getvalue())
    return {name: found[name] for name in ("settings", "rows")}


def _no_gpu() -> str:
    major, minor = OLDEST_GPU
    return f"needs a CUDA GPU of compute capability {major}.{minor} or newer"


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "rates": rates, "steps": models.steps, "first token": models.first_token,
    "model": models.model_times, "kernels": kernels, "tiles": tiles, "answers": answers,
    "selections": selections,
}  # fmt: skip
"""Kind of an entry → what measures it."""


def serve(pipe: Connection, errors: str, tiny: bool) -> None:
    """Says which device there is, then measures what it is asked for, until the pipe is closed.

    Args:
      pipe: gives a kind and options, and takes a state and what is to be recorded.
      errors: a file for what libraries print.
    """
    begin(errors)
    compilation_cache.enable()
    found = environment()
    pipe.send({
        "device": found["device"], "kvjax": kvjax.__version__, "platform": jax.default_backend(),
        "environment": found,
    })  # fmt: skip
    while True:
        try:
            kind, options = pipe.recv()
        except EOFError:
            return
        pipe.send(outcome(kind, options, tiny))


def begin(errors: str) -> None:
    """Leaves Ctrl-C to the process that started this one, and standard streams to a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


def outcome(kind: str, options: dict[str, Any], tiny: bool) -> tuple[str, dict[str, Any]]:
    """The state of an entry, and its result or the reason why there is none."""
    try:
        return "done", {"result": WORK[kind](**options, tiny=tiny)}
    except LeftOut as left_out:
        return "left out", {"reason": str(left_out)}
    except Exception as error:
        # JAX ends a traceback with words of its own, so what the error says comes once more.
        lines = traceback.format_exc().strip().splitlines()[-LAST_LINES:]
        return "failed", {"reason": "\n".join([*lines, " ".join(said(error).split())])}
