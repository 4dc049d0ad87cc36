"""Compiling for TPUs that are not there: what needs no libtpu."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.gpu.gpu_programs import methods, struct
from tests.support.ahead_of_time import Program
from tests.support.hlo_text import Program as HLO
from tests.tpu import compile_for_tpus
from tests.tpu.compile_for_tpus import Outcome
from tests.tpu.tpu_programs import KNOWN, PROMPTS, programs

STORE = struct((100, 100), "float32")
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
COPY = "%other = f32[100,100]{1,0} copy(%cache)"
FETCH = "%got = (f32[100,100]{1,0:S(1)}, f32[100,100]{1,0}, u32[]) copy-start(%cache)"
CONCATENATED = (
    "%got = f32[100,100]{1,0:T(8,128)S(1)} custom-call(%cache, %cache), "
    'custom_call_target="ConcatBitcast"'
)
TALK = "%told = ((f32[1]{0}), token[]) infeed(%token)"


def program(kernel=None) -> Program:
    return Program("step of it", lambda x: x, (STORE,), (STORE,), kernel=kernel)


def faults(line="", before="", kernel=None, kept=40_000) -> list[str]:
    """Of a loop of steps with a line more in it, or before it."""
    text = LOOP.replace("  ROOT %next", f"  {line}\n  ROOT %next")
    text = text.replace("  ROOT %end", f"  {before}\n  ROOT %end")
    memory = SimpleNamespace(alias_size_in_bytes=kept)
    return list(compile_for_tpus.faults_of(program(kernel), HLO(text), memory))


NONE = "no kernel the_kernel in it"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"line": COPY}, []),  # of programs without a kernel, copies are not asked about
        ({"line": TALK}, ["with the host: %told"]),
        ({"kept": 39_999}, ["donated: 0.0 MB come out in their own memory"]),
        ({"kernel": "the_kernel", "line": COPY}, [NONE, f"as large as a store: {COPY}"]),
        ({"kernel": "the_kernel", "before": COPY}, [NONE]),
        ({"kernel": "the_kernel", "line": FETCH}, [NONE]),  # into fast memory
        ({"kernel": "the_kernel", "line": CONCATENATED}, [NONE]),
        ({"kernel": "the_kernel", "line": FETCH.replace("S(1)", "")}, [NONE, "as large as a sto"]),
    ],
)
def test_faults(changes, expected):
    found = faults(**changes)
    assert len(found) == len(expected)
    assert all(x.startswith(start) for x, start in zip(found, expected, strict=True))


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


def test_every_kind_of_cache_has_a_step():
    found = list(programs())
    names = {one.name for one in found}
    assert len(names) == len(found)
    assert {f"step of {name}" for name in methods()} <= names
    assert set(PROMPTS) | set(KNOWN) <= set(methods())
    assert all(one.kernel for one in found if "kernel" in one.name)
    assert all(one.store_bytes > 1e5 for one in found)
