"""Compiling for TPUs that are not there: what needs no libtpu."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import jax
import pytest

from tests.gpu.gpu_programs import methods, struct
from tests.support.hlo_text import Program
from tests.tpu import compile_for_tpus
from tests.tpu.compile_for_tpus import Outcome
from tests.tpu.tpu_programs import KNOWN, PROMPTS, TPUProgram, programs

STORE = struct((100, 100), "float32")
TEXT = """\
HloModule jit_step

ENTRY %main (cache: f32[100,100]) -> f32[100,100] {
  ROOT %cache = f32[100,100]{1,0} parameter(0)
}
"""
LOOP = """\
HloModule jit_steps

%body (cache: f32[100,100]) -> f32[100,100] {
  %cache = f32[100,100]{1,0} parameter(0)
  ROOT %next = f32[100,100]{1,0} bitcast(%cache)
}

%more (cache.1: f32[100,100]) -> pred[] {
  %cache.1 = f32[100,100]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (cache.2: f32[100,100]) -> f32[100,100] {
  %cache.2 = f32[100,100]{1,0} parameter(0)
  ROOT %end = f32[100,100]{1,0} while(%cache.2), condition=%more, body=%body
}
"""
TALK = TEXT.replace("  ROOT", "  %told = ((f32[1]{0}), token[]) infeed(%token)\n  ROOT")


def program(kernel=None, known=None) -> TPUProgram:
    return TPUProgram("step of it", lambda x: x, (STORE,), (STORE,), kernel, known)


def faults(one=None, text=TEXT, kept=40_000) -> list[str]:
    memory = SimpleNamespace(alias_size_in_bytes=kept)
    return list(compile_for_tpus.faults_of(one or program(), Program(text), memory))


def test_a_step_that_keeps_its_cache_is_well():
    assert faults() == []


def test_a_cache_that_is_copied_is_found():
    (fault,) = faults(kept=39_999)
    assert fault.startswith("donated: 0.0 MB come out in their own memory")


def test_a_kernel_that_is_not_there_is_missed_and_a_copy_is_found():
    copy = "%other = f32[100,100]{1,0} copy(%cache)"
    inside = LOOP.replace("  ROOT %next", f"  {copy}\n  ROOT %next")
    assert faults(program(kernel="the_kernel"), inside) == [
        "no kernel the_kernel in it", f"as large as a store: {copy}"
    ]  # fmt: skip
    assert faults(program(), inside) == []
    before = LOOP.replace("  ROOT %end", f"  {copy}\n  ROOT %end")
    assert faults(program(kernel="the_kernel"), before) == ["no kernel the_kernel in it"]


@pytest.mark.parametrize(
    "line",
    [
        "%got = (f32[100,100]{1,0:S(1)}, f32[100,100]{1,0}, u32[]) copy-start(%cache)",
        "%got = f32[100,100]{1,0:T(8,128)S(1)} custom-call(%cache, %cache), "
        'custom_call_target="ConcatBitcast"',
    ],
)
def test_reading_into_fast_memory_is_no_copy(line):
    def found(line):
        inside = LOOP.replace("  ROOT %next", f"  {line}\n  ROOT %next")
        return faults(program(kernel="the_kernel"), inside)[1:]

    assert found(line) == []
    elsewhere = line.replace("S(1)", "")
    assert found(elsewhere) == [f"as large as a store: {elsewhere}"]


def test_what_the_host_takes_part_in_is_found():
    (fault,) = faults(text=TALK)
    assert fault.startswith("with the host: %told")


@pytest.mark.parametrize(
    ("found", "known", "expected"),
    [
        ([], None, ([], [])),
        (["slow"], None, (["slow"], [])),
        (["slow", "wrong"], "slow", (["wrong"], ["slow"])),
        ([], "slow", (["is well, but is said not to be: slow"], [])),
    ],
)
def test_what_is_known_is_no_fault_as_long_as_it_is_so(found, known, expected):
    assert compile_for_tpus.divide(found, known) == expected


def test_bytes_are_reported_over_those_of_the_arguments():
    outcome = Outcome([], ["slow"], 1.25, 40_000_000, 100_000_000.0, 3_000_000)
    line, more = compile_for_tpus.lines("v5e", program(), outcome)
    assert line.split() == (
        "known v5e step of it 1.2 s, read 2.50 of 40.0 MB, temporary 3.0 MB".split()
    )
    assert more.strip() == "slow"
    row = json.loads(json.dumps(compile_for_tpus.row("v5e", program(), outcome)))
    assert row["read"] == 2.5 and row["device"] == "v5e" and row["known"] == ["slow"]


def test_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(compile_for_tpus, "installed", lambda module: False)
    assert compile_for_tpus.main([]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert "needs jax[tpu] 0.11 or newer, on Python 3.12 or newer, and no TPU" in said.err
    assert f"got jax {jax.__version__} on Python {sys.version.split()[0]}" in said.err


def test_a_device_that_is_not_known_is_refused():
    with pytest.raises(SystemExit):
        compile_for_tpus.main(["--devices", "v1"])


def test_every_kind_of_cache_has_a_step():
    found = list(programs())
    names = {one.name for one in found}
    assert len(names) == len(found)
    assert {f"step of {name}" for name in methods()} <= names
    assert set(PROMPTS) | set(KNOWN) <= set(methods())
    assert all(one.kernel for one in found if "kernel" in one.name)
    assert all(one.store_bytes > 1e5 for one in found)
