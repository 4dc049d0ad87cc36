"""Compiling for GPUs that are not there: what needs no CUDA plugin."""

from __future__ import annotations

import sys

import jax
import pytest

from tests.gpu import compile_for_gpus
from tests.support.hlo_text import Program

# A loop that writes a row into a store of 4 x 8 in place; `%s` stands for one more line of it.
LOOP = """\
HloModule jit_steps, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%%put (store: bf16[4,8], row: bf16[1,8], at: s32[]) -> bf16[4,8] {
  %%store = bf16[4,8]{1,0} parameter(0)
  %%flat = bf16[32]{0} bitcast(%%store)
  %%same = bf16[4,8]{1,0} bitcast(%%flat)
  %%row = bf16[1,8]{1,0} parameter(1)
  %%at = s32[] parameter(2)
  %%zero = s32[] constant(0)
  ROOT %%written = bf16[4,8]{1,0} dynamic-update-slice(%%same, %%row, %%at, %%zero)
}

%%widen (part: bf16[4,8]) -> f32[4,8] {
  %%part = bf16[4,8]{1,0} parameter(0)
  ROOT %%wide = f32[4,8]{1,0} convert(%%part)
}

%%both (one: bf16[4,8], two: bf16[1,8], three: s32[]) -> (f32[1,8], bf16[4,8]) {
  %%one = bf16[4,8]{1,0} parameter(0)
  %%two = bf16[1,8]{1,0} parameter(1)
  %%three = s32[] parameter(2)
  %%twice = f32[1,8]{1,0} convert(%%two)
  %%nought = s32[] constant(0)
  %%changed = bf16[4,8]{1,0} dynamic-update-slice(%%one, %%two, %%three, %%nought)
  ROOT %%pair = (f32[1,8]{1,0}, bf16[4,8]{1,0}) tuple(%%twice, %%changed)
}

%%body (carry: (s32[], bf16[4,8], bf16[1,8])) -> (s32[], bf16[4,8], bf16[1,8]) {
  %%carry = (s32[], bf16[4,8]{1,0}, /*index=2*/bf16[1,8]{1,0}) parameter(0)
  %%i = s32[] get-tuple-element(%%carry), index=0
  %%k = bf16[4,8]{1,0} get-tuple-element(%%carry), index=1
  %%new = bf16[1,8]{1,0} get-tuple-element(%%carry), index=2
  %%out = (bf16[1,8]{1,0}, f32[1]{0}) custom-call(%%new, %%k), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(steps)/while/body/split_attention"}
  %%next = bf16[1,8]{1,0} get-tuple-element(%%out), index=0
%s
  %%kept = bf16[4,8]{1,0} fusion(%%k, %%next, %%i), kind=kLoop, calls=%%put
  ROOT %%done = (s32[], bf16[4,8]{1,0}, bf16[1,8]{1,0}) tuple(%%i, %%kept, %%next)
}

%%more (state: (s32[], bf16[4,8], bf16[1,8])) -> pred[] {
  %%state = (s32[], bf16[4,8]{1,0}, bf16[1,8]{1,0}) parameter(0)
  ROOT %%yes = pred[] constant(true)
}

ENTRY %%main (cache: bf16[4,8], q: bf16[1,8]) -> bf16[4,8] {
  %%cache = bf16[4,8]{1,0} parameter(0)
  %%q = bf16[1,8]{1,0} parameter(1)
  %%none = s32[] constant(0)
  %%begin = (s32[], bf16[4,8]{1,0}, bf16[1,8]{1,0}) tuple(%%none, %%cache, %%q)
  %%end = (s32[], bf16[4,8]{1,0}, bf16[1,8]{1,0}) while(%%begin), condition=%%more, body=%%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %%result = bf16[4,8]{1,0} get-tuple-element(%%end), index=1
}
"""  # noqa: E501


def program(line: str = "") -> Program:
    return Program(LOOP % line)


def test_what_is_written_in_place_is_no_copy():
    one = program()
    assert not one.copies(32, "the_kernel") and not one.talks() and not one.waits()
    assert one.to_host() == ([], [])
    assert one.kernels("split_attention") == 1 and not one.kernels("join_parts")


@pytest.mark.parametrize(
    "line",
    [
        "  %bad = bf16[4,8]{1,0} copy(%k)",
        "  %bad = f32[4,8]{1,0} fusion(%k), kind=kLoop, calls=%widen",
        "  %bad = f32[2,32]{1,0} broadcast(%new), dimensions={}",
        "  %bad = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]) copy-start(%k)",
    ],
)
def test_copies_of_a_store_are_found(line):
    assert program(line).copies(32, "the_kernel") == [line.strip()]


@pytest.mark.parametrize(
    "line",
    [
        "  %fine = bf16[1,8]{1,0} copy(%new)",
        "  %fine = bf16[4,8]{0,1} bitcast(%k)",
        "  %fine = (f32[1,8]{1,0}, bf16[4,8]{1,0}) fusion(%k, %new, %i), kind=kLoop, calls=%both",
        "  %fine = ((bf16[4,8]{1,0}, s32[]), bf16[1,8]{1,0}, u32[]) "
        "fusion-start(%k, %i), kind=kLoop, calls=%put",
    ],
)
def test_what_is_small_or_in_place_is_none(line):
    assert not program(line).copies(32, "the_kernel")


def test_what_goes_to_host_memory_is_found():
    moved = "  %far = (bf16[1,8]{1,0:S(5)}, bf16[1,8]{1,0}, u32[]) copy-start(%new)"
    written = "  %far = bf16[4,8]{1,0:S(5)} fusion(%k, %new, %i), kind=kLoop, calls=%put"
    assert program(moved).to_host() == ([moved.strip()], [])
    assert program(written).to_host() == ([], [written.strip()])


@pytest.mark.parametrize(
    "line",
    [
        "  %told = ((f32[1]{0}), token[]) infeed(%token)",
        '  %told = () custom-call(%new), custom_call_target="xla_ffi_python_gpu_callback"',
    ],
)
def test_what_the_host_takes_part_in_is_found(line):
    assert program(line).talks() == [line.strip()]


def test_loops_of_unknown_length_are_counted():
    line = "  %inner = (s32[], bf16[4,8]{1,0}, bf16[1,8]{1,0}) while(%carry), condition=%more, "
    assert len(program(line + "body=%body").waits()) == 1


def test_launches_are_counted():
    """Two in each of four rounds; in a loop of unknown length once, with its predicate's none."""
    assert program().launches() == 8
    assert program("  %more_work = bf16[1,8]{1,0} copy(%new)").launches() == 12
    unknown = LOOP.replace(', backend_config={"known_trip_count":{"n":"4"}}', "") % ""
    assert Program(unknown).launches() == 2


def test_what_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="expected the text of an HLO module, got 'nothing'"):
        Program("nothing")


def test_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(compile_for_gpus, "installed", lambda module: False)
    assert compile_for_gpus.main([]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert "needs jax[cuda13] 0.11 or newer, on Python 3.12 or newer" in said.err
    assert f"got jax {jax.__version__} on Python {sys.version.split()[0]}" in said.err


def test_devices_are_described():
    assert {path.stem for path in compile_for_gpus.GPUS.iterdir()} == {"a100", "h200", "l4"}
    with pytest.raises(SystemExit):
        compile_for_gpus.main(["--devices", "t4"])


def test_the_kernels_own_output_is_no_copy():
    line = '  %out = f32[4,8]{1,0} custom-call(%k), custom_call_target="the_kernel"'
    assert not program(line).copies(32, "the_kernel")
    assert program(line).copies(32, "another") == [line.strip()]
