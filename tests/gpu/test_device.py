"""`make device`: a list that runs on a GPU for as long as there is one, tried here without one."""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.generation import decode_loop
from kvjax.generation.model import as_functional
from kvjax.generation.new_caches import CacheSize, states_of
from kvjax.generation.prompt_pass import LayerPass, _read_layer, cache_shapes
from kvjax.models import abstract_decoder
from kvjax.models.shapes import shape_config
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from pallas_kernels.base import dispatch
from tests.gpu.device_fakes import ABOUT, fakes, serve
from tests.support.lowering import KERNEL, lower_for_cuda
from tests.support.marks import slow

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
METHODS = runpy.run_path(str(BENCHMARKS / "device_entries.py"))["METHODS"]
ROWS = 8  # of whole models


@pytest.fixture
def device(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("device")
    monkeypatch.setattr(module, "LIMIT", 0.6)
    monkeypatch.setattr(module, "WEIGHTS", 0.0)
    monkeypatch.setattr(module, "LEAST", 0.0)
    # Signals are the test runner's.
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


def run(device, monkeypatch, folder, every, *arguments):
    """The rows that a run adds."""
    monkeypatch.setattr(device, "entries", lambda tiny: every)
    before = len(rows_of(folder))
    assert device.main(["--out", str(folder), *arguments], serve) == 0
    return rows_of(folder)[before:]


def rows_of(folder):
    """Of all whole lines."""
    path = folder / "records.jsonl"
    return list(map(json.loads, path.read_text().split("\n")[:-1])) if path.exists() else []


def test_an_error_is_written_and_the_list_goes_on(device, monkeypatch, tmp_path):
    every = fakes(device, "fine", "raises", "fine")
    rows = run(device, monkeypatch, tmp_path, every)
    assert [row["state"] for row in rows] == ["done", "failed", "done"]
    assert rows[1]["reason"].endswith("ValueError: wrong")
    assert "1 raises: ValueError: wrong" in (tmp_path / "README.md").read_text()
    assert [row["entry"] for row in run(device, monkeypatch, tmp_path, every)] == ["1 raises"]


@pytest.mark.slow  # processes begin many times
def test_what_goes_wrong_is_written_and_the_list_goes_on(device, monkeypatch, tmp_path, capsys):
    every = fakes(device, "fine", "raises", "slow", "ends", "fine")
    rows = run(device, monkeypatch, tmp_path, every)
    assert [row["state"] for row in rows] == ["done", "failed", "late", "failed", "done"]
    reasons = [row.get("reason") for row in rows]
    assert reasons[1].endswith("ValueError: wrong")
    assert reasons[2] == "did not finish in 1 s"
    assert reasons[3] == "the process ended with 3\nout of memory"
    page = (tmp_path / "README.md").read_text()
    assert "3 ends: out of memory" in page and "2 slow: did not finish in 1 s" in page

    # What was never tried comes first, then what is not done; what is done is not run again.
    rows = run(device, monkeypatch, tmp_path, [*every, device.Entry("new", "fine", {})])
    assert [row["entry"] for row in rows] == ["new", "1 raises", "2 slow", "3 ends"]
    capsys.readouterr()
    assert not run(device, monkeypatch, tmp_path, every, "--list")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:-1]] == ["done", "failed", "late", "failed", "done"]
    assert shown[-1].startswith("2 done, 2 failed, 1 late; at most ")
    assert [x["entry"] for x in run(device, monkeypatch, tmp_path, every, "--only", "raises")] == [
        "1 raises"
    ]
    again = run(device, monkeypatch, tmp_path, every, "--only", "fine", "--again")
    assert [row["entry"] for row in again] == ["0 fine", "4 fine"]


def test_another_version_and_another_device_are_run_by_themselves(device, monkeypatch, tmp_path):
    every = fakes(device, "fine")
    (row,) = run(device, monkeypatch, tmp_path, every)
    for other in {"kvjax": "1"}, {"device": "another GPU"}:
        (tmp_path / "records.jsonl").write_text(json.dumps({**row, **other}) + "\n")
        assert len(run(device, monkeypatch, tmp_path, every)) == 1


def test_time_that_is_over_ends_the_list(device, monkeypatch, tmp_path):
    rows = run(device, monkeypatch, tmp_path, fakes(device, "slow", "fine"), "--minutes", "0.01")
    assert [row["entry"] for row in rows] in ([], ["0 slow"])


KILLED = """
import sys
sys.path.insert(0, {benchmarks!r})
import device
from tests.gpu.device_fakes import fakes, serve
if __name__ == "__main__":
    device.entries = lambda tiny: fakes(device, "fine", "slow", "fine")
    device.main(["--out", {folder!r}], serve)
"""


@pytest.mark.parametrize("signal", ["KILL", *slow("TERM", "INT")])
def test_a_run_that_was_ended_goes_on(device, monkeypatch, tmp_path, signal):
    script = tmp_path / "run.py"
    script.write_text(KILLED.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, stdout=subprocess.PIPE, env=environment
    ) as process:
        process.stdout.readline()  # the first entry is done
        process.send_signal(getattr(device.signal, f"SIG{signal}"))
    assert process.returncode == {"KILL": -9, "TERM": 143, "INT": 0}[signal]
    assert [row["entry"] for row in rows_of(tmp_path)] == ["0 fine"]
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"entry": "1 sl')  # as if it had been writing
    rows = run(device, monkeypatch, tmp_path, fakes(device, "fine", "fine", "fine"))
    assert [row["entry"] for row in rows] == ["1 fine", "2 fine"]


FILE = """
import time

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "the whole message"

def test_hangs():
    time.sleep({seconds})
"""


@pytest.mark.slow  # pytest begins several times
def test_files_of_tests_say_which_failed(device, monkeypatch, tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(FILE.format(seconds=0))
    every = [device.Entry("some", "tests", {"path": str(path)}, together=True)]
    monkeypatch.setattr(device, "LIMIT", 30.0)
    (row,) = run(device, monkeypatch, tmp_path, every)
    assert (row["state"], row["reason"]) == ("failed", "1 of 3 failed")
    (failed,) = row["result"]["failed"]
    assert failed.endswith("test_some.py::test_fails")
    assert "the whole message" in (tmp_path / "failures.txt").read_text()
    path.write_text(FILE.format(seconds=0).replace("1 == 2", "True"))
    (row,) = run(device, monkeypatch, tmp_path, every)
    assert row["state"] == "done" and row["result"] == {"passed": 3, "skipped": 0, "failed": []}

    path.write_text("import nothing_there")
    (row,) = run(device, monkeypatch, tmp_path, every, "--again")
    assert row["state"] == "failed" and "nothing_there" in row["reason"]


@pytest.mark.slow  # pytest begins several times
def test_a_file_that_takes_too_long_is_run_in_parts(device, monkeypatch, tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(FILE.format(seconds=60).replace("1 == 2", "True"))
    every = [device.Entry("some", "tests", {"path": str(path)}, together=True)]
    monkeypatch.setattr(device, "LIMIT", 4.0)
    (row,) = run(device, monkeypatch, tmp_path, every)
    assert row["state"] == "late" and "in " in row["reason"]
    assert row["reason"].endswith("test_some.py::test_hangs")
    assert row["result"]["passed"] == len(row["passed_tests"]) == 2
    path.write_text(FILE.format(seconds=0))  # where test_fails would fail, if it ran again
    monkeypatch.setattr(device, "LIMIT", 30.0)
    (row,) = run(device, monkeypatch, tmp_path, every)
    assert row["state"] == "done" and row["result"]["passed"] == 3


def test_tables_say_what_is_known(device, tmp_path):
    from device_entries import kernels, on_shape
    from device_page import device_tables

    every = [on_shape("steps", method, 8192, 1) for method in METHODS[:5]]
    every += [kernels(8192, 1, "dense"), device.Entry("a file", "tests", {"path": "tests/a/b.py"})]
    rows = [
        {"state": "done", "result": {"step_ms": 2.5, "tokens_per_s": 400.0, "held_bytes": 2e10}},
        {"state": "late", "reason": "did not finish in 60 s"},
        {"state": "failed", "reason": "Traceback\nValueError: wrong"},
        {"state": "left out", "reason": "takes 200 GB"},
        None,
        {"state": "done", "result": {"rows": [
            {"operation": "decode_attention", "implementation": name, "microseconds": 100.0}
            for name in ("pallas", "cudnn")
        ]}},
        {"state": "failed", "result": {"passed": 3, "failed": ["b.py::c"], "skipped": 0},
         "reason": "1 of 4 failed"},
    ]  # fmt: skip
    with (tmp_path / "records.jsonl").open("w") as file:
        for entry, row in zip(every, rows, strict=True):
            if row is not None:
                file.write(json.dumps({"entry": entry.name, "device": "NVIDIA A", **row}) + "\n")
    tables = device_tables(tmp_path, every)
    cells = [
        "3.2 ms", "", "3.2 ms", "2.5 ms, 400 / s, 20 GB", "did not finish in 60 s", "failed",
        "takes 200 GB", "not measured",
    ]  # fmt: skip
    steps = [line.split(" | ") for line in tables["device_steps"].splitlines()[2:]]
    assert [line[2].removesuffix("|").strip() for line in steps] == cells
    assert all(line[0] == "| A" for line in steps)
    assert "| A | `tests/a` | 1 of 1 | 3 | `b.py::c` |" in tables["device_tests"]
    assert tables["device_tiles"].splitlines()[2] == "| not measured |  |  |"
    earlier = "| a decode step over all slots | H200 | 1.08 ms | 1.27 ms | 1.08 ms | 4.05 TB |"
    assert earlier in tables["device_kernels"]


def test_the_list_is_what_there_is(device):
    from device_entries import KERNELS, LIMIT, NEW_KERNELS, TUNED, entries, first
    from device_work import WORK
    from kernel_sides import GROUPS

    from pallas_kernels.tune import WORKS

    for every in map(entries, (False, True)):
        assert len({entry.name for entry in every}) == len(every)
        assert {entry.kind for entry in every} == {*WORK, "tests"}
        paths = [entry.options["path"] for entry in every if entry.kind == "tests"]
        assert all((ROOT / path).is_file() for path in paths)
    assert set(TUNED) == set(WORKS)
    assert {group for *_, group in KERNELS + NEW_KERNELS} | {"dense"} == set(GROUPS)
    assert LIMIT * len(list(first())) <= 60 * device.MINUTES


def test_without_a_gpu_it_says_what_it_needs(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(ABOUT, "platform", "cpu")  # in this process: the other one has its own
    monkeypatch.setattr(device.Worker, "about", lambda self: ABOUT)
    for arguments, message in (
        (["--out", str(tmp_path)], "needs a GPU, or --tiny; got a GPU"),
        (["--tiny"], "--tiny needs an --out"),
        (["--minutes", "0"], "--minutes must be above 0, got 0"),
        (["--only", "nothing of this kind"], "no entry has nothing of this kind"),
    ):
        with pytest.raises(SystemExit) as raised:
            device.main(arguments, serve)
        assert raised.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_whole_models_lower_for_cuda(device, monkeypatch, method):
    """The decode loop and the pass of a prompt through a layer choose kernels by themselves."""
    from device_models import NEW, transform_of

    monkeypatch.setattr(dispatch, "gpu_capability", lambda: (9, 0))
    if "offload" in method and HOST_MEMORY not in memory_kinds():
        pytest.skip("no host memory")
    config = shape_config("llama-3.1-8b", 3)  # two layers of Quest and ClusterKV are dense
    model, transform = as_functional(abstract_decoder(config)), transform_of(method, config)
    layers = kvjax.bind(transform, config.num_layers)
    size = CacheSize.of(model, ROWS, 131_072, NEW, "bfloat16", 131_072)
    numbers, flags = jax.ShapeDtypeStruct((ROWS,), "int32"), jax.ShapeDtypeStruct((ROWS,), "bool")
    vocabulary = ROWS, config.vocab_size
    loop = decode_loop._Loop(
        caches=cache_shapes(model, layers, size), token=numbers, position=numbers, done=flags,
        logits=jax.ShapeDtypeStruct(vocabulary, "float32"), broken=flags,
        tokens=jax.ShapeDtypeStruct((ROWS, 64), "int32"),
        seen=jax.ShapeDtypeStruct(vocabulary, "bool"), step=jax.ShapeDtypeStruct((), "int32"),
    )  # fmt: skip
    key = decode_loop._key(0, None)
    choice = decode_loop._Choice(kvjax.Sampling().numbers, np.full(8, -1, np.int32), key)
    steps = functools.partial(decode_loop._decode, layers)
    assert KERNEL in lower_for_cuda(steps, model, loop, np.int32(3), choice)
    if "kvzip" in method:
        return  # its prompts are read together with what looks at them
    one, layer = size._replace(batch=1), layers[-1]
    how = LayerPass(model.parts.blocks[-1], layer, one, model.attention(2), last=True)
    read = functools.partial(_read_layer, how)
    x = jax.ShapeDtypeStruct((1, 131_072, config.hidden_size), "bfloat16")
    positions = jax.ShapeDtypeStruct((1, 131_072), "int32")
    states = jax.eval_shape(functools.partial(states_of, layer, one, 2))
    parameters = list(model.parts.split(model.params))[-1]
    assert KERNEL in lower_for_cuda(read, parameters, states, None, x, positions)


@pytest.mark.slow
def test_all_kinds_run_at_tiny_sizes(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "device.py"), "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert {row["state"] for row in rows} == {"done"}, done.stdout
    page = (tmp_path / "README.md").read_text()
    assert page.count("| cpu |") > 10 and "**Not tried**: 0" in page
