"""A mesh of eight virtual devices, and two processes that share one, give what one device gives."""

import json
import os
import socket
import subprocess
import sys

import pytest

from kvjax.registry import METHODS as ALL
from tests.conftest import QUICK, ROOT
from tests.devices.contexts import CHECKS
from tests.devices.many_devices import NEW
from tests.support.marks import some_slow

METHODS = tuple(
    name + "(dense_layers=())" * hasattr(kind, "dense_layers") for name, kind in ALL.items()
)
# One of each kind: evicting at a prompt's end and in steps, merging, by layer with a book, a stored
# form, and selecting from host memory.
KINDS = (
    "h2o", "chelsea", "spindlekv", "quantize(bits=4, key_axis='channel')",
    "chain(clusterkv(dense_layers=()), offload)",
)  # fmt: skip
# Further options that draw, compare heads, or look at all of a row.
OPTIONS = (
    "pyramidinfer(budget=96)", "kvmerger(pivot='random')",
    "quest(dense_layers=(), per_query_head=True)", "layer_budget(unfold=True)",
    "cam(snapkv, expected=False)", "kvcrush(h2o, pick='random')",
    "spindlekv(unfold=True)", "every(pyramidinfer(budget=96, interval=None), steps=8)",
    "when_full(snapkv, room=8)", "kvcrush(snapkv, anchor='median')",
    "kvcrush(snapkv, anchor='mean', granularity=4)", "kvcrush(snapkv, kmeans=True)", "codebook",
    "chain(snapkv, quantize)", "chain(quest(dense_layers=(), per_query_head=True), offload)",
    "chain(quantize, quest(dense_layers=()), offload(recent_steps=0))",
)  # fmt: skip
BOOKS = ("spindlekv", "codebook")  # each device makes whole books: it gets all heads' vectors

MOST_SECONDS = 1200  # a process that waits for another one that has ended would wait for ever


def start(module: str, devices: int, *args: str) -> subprocess.Popen:
    """A program of its own that has so many virtual devices."""
    flags = f"{QUICK} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", f"tests.devices.{module}", *args],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen) -> dict:
    """What it printed: JSON objects, put together."""
    try:
        out, err = process.communicate(timeout=MOST_SECONDS)
    finally:
        process.kill()  # one that waits for another process ignores SIGTERM
    assert process.returncode == 0, err[-4000:]
    found = {}
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def check(found: dict, methods: tuple[str, ...]) -> None:
    assert tuple(found) == methods
    for method, own in found.items():
        assert own["same"] and own["different"], method
        assert own["bytes"][0] == own["bytes"][1], method
        for program, moved in own["moved"].items():
            if program == "the prompt pass" and any(book in method for book in BOOKS):
                continue
            assert moved < own["store"], (method, program, moved)


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(KINDS, id="kinds", marks=pytest.mark.slow),
        pytest.param(METHODS, id="methods", marks=pytest.mark.exhaustive),
        pytest.param(OPTIONS, id="options", marks=pytest.mark.exhaustive),
    ],
)
def test_a_mesh_equals_one_device(methods):
    """Token for token, and no program gathers or exchanges as much as one layer's keys."""
    check(finished(start("many_devices", 8, *methods)), methods)


# What is nearest to every use of a mesh; all other checks run before a release.
NEAREST = (
    "questions", "saved and loaded", "a budget by head", "rows that cannot be divided", "placed",
    "refused", "kernels",
)  # fmt: skip
OTHERS = tuple(name for name in CHECKS if name not in NEAREST)


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(NEAREST, id="nearest", marks=pytest.mark.slow),
        pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_what_goes_with_a_mesh(checks):
    """Contexts, further turns, streams, draws, saved contexts, heads that cannot be divided."""
    found = finished(start("contexts", 8, *checks))
    assert len(found) == len(checks) and all(found.values()), found


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize(
    "method",
    some_slow(
        ("kvcrush(snapkv)", "infinigen(dense_layers=())"), exhaustive={"infinigen(dense_layers=())"}
    ),
)
def test_two_processes_equal_one(method):
    """Rows are divided between the processes, then heads."""
    port = free_port()
    both = [start("two_processes", 4, str(number), port, method) for number in range(2)]
    alone = finished(start("two_processes", 8, "alone", port, method))
    for found in map(finished, both):
        assert {own["devices"] for own in found.values()} == {8}
        assert {name: own["tokens"] for name, own in found.items()} == {
            name: own["tokens"] for name, own in alone.items()
        }
        assert all(len(row) == NEW for own in found.values() for row in own["tokens"])


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(("kvcrush(snapkv)",), id="evicts", marks=pytest.mark.exhaustive),
        pytest.param(
            ("quantize(bits=4, key_axis='channel')", "chain(clusterkv(dense_layers=()), offload)"),
            id="others", marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_two_processes_save_and_load_as_one(tmp_path, methods):
    """What either has saved, the other loads, bit for bit; files tell of no mesh."""
    port, folder = free_port(), str(tmp_path)
    finished(start("saved_contexts", 8, "before", port, folder, *methods))
    both = [start("saved_contexts", 4, part, port, folder, *methods) for part in ("0", "1")]
    first, second = map(finished, both)
    assert tuple(first) == methods and first == second
    after = finished(start("saved_contexts", 8, "after", port, folder, *methods))
    for method in methods:
        assert len(first[method]) == 15 and len(after[method]) == 8
        for name, own in (first[method] | after[method]).items():
            _, is_tokens, context = name.partition("tokens of ")
            expected = after[method][f"tokens of {context}"] if is_tokens else True
            assert own == expected, (method, name)
        assert len({tuple(row) for row in after[method]["tokens of rows"]}) > 1
