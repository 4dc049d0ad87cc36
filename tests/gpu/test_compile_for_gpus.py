"""Compiling for devices that are not there: what needs no compiler for them."""

from __future__ import annotations

import sys

import jax
import pytest

from tests.gpu import compile_for_gpus, compiled_loops
from tests.gpu.gpu_programs import methods
from tests.support import ahead_of_time
from tests.support.hlo_text import Program
from tests.tpu import compile_for_tpus
from tests.tpu.tpu_programs import KNOWN, PROMPTS, programs

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


COPIES, TO_HOST, UPDATED_THERE, TALKS, WAITS = "copies", "to host", "updated", "talks", "waits"


def program(line: str = "") -> Program:
    return Program(LOOP % line)


def kinds(program: Program) -> dict[str, list[str]]:
    """Lines of each kind that is looked for."""
    to_host, updated = program.to_host()
    found = {
        COPIES: program.copies(32, "the_kernel"), TO_HOST: to_host, UPDATED_THERE: updated,
        TALKS: program.talks(), WAITS: program.waits(),
    }  # fmt: skip
    return {kind: lines for kind, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("%bad = bf16[4,8]{1,0} copy(%k)", COPIES),
        ("%bad = f32[4,8]{1,0} fusion(%k), kind=kLoop, calls=%widen", COPIES),
        ("%bad = f32[2,32]{1,0} broadcast(%new), dimensions={}", COPIES),
        ("%bad = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]) copy-start(%k)", COPIES),
        ('%out = f32[4,8]{1,0} custom-call(%k), custom_call_target="another"', COPIES),
        ('%out = f32[4,8]{1,0} custom-call(%k), custom_call_target="the_kernel"', None),
        ("%fine = bf16[1,8]{1,0} copy(%new)", None),
        ("%fine = bf16[4,8]{0,1} bitcast(%k)", None),
        ("%fine = (f32[1,8]{1,0}, bf16[4,8]{1,0}) fusion(%k, %new, %i), kind=kLoop, calls=%both",
         None),
        ("%fine = ((bf16[4,8]{1,0}, s32[]), bf16[1,8]{1,0}, u32[]) "
         "fusion-start(%k, %i), kind=kLoop, calls=%put", None),
        ("%far = (bf16[1,8]{1,0:S(5)}, bf16[1,8]{1,0}, u32[]) copy-start(%new)", TO_HOST),
        ("%far = bf16[4,8]{1,0:S(5)} fusion(%k, %new, %i), kind=kLoop, calls=%put", UPDATED_THERE),
        ("%told = ((f32[1]{0}), token[]) infeed(%token)", TALKS),
        ('%told = () custom-call(%new), custom_call_target="xla_ffi_python_gpu_callback"', TALKS),
        ("%inner = (s32[], bf16[4,8]{1,0}, bf16[1,8]{1,0}) while(%carry), condition=%more, "
         "body=%body", WAITS),
    ],
)  # fmt: skip
def test_a_line_of_a_program_is_found(line, kind):
    assert kinds(program(f"  {line}")) == ({kind: [line]} if kind else {})


def test_what_is_written_in_place_is_none_of_them():
    assert kinds(program()) == {}
    assert program().kernels("split_attention") == 1 and not program().kernels("join_parts")


def test_launches_are_counted():
    """Two in each of four rounds; in a loop of unknown length once, with its predicate's none."""
    assert program().launches() == 8
    assert program("  %more_work = bf16[1,8]{1,0} copy(%new)").launches() == 12
    unknown = LOOP.replace(', backend_config={"known_trip_count":{"n":"4"}}', "") % ""
    assert Program(unknown).launches() == 2


@pytest.mark.parametrize(
    ("command", "needs"),
    [(compile_for_gpus, "jax[cuda13] 0.11 or newer, on Python 3.12 or newer, and no GPU"),
     (compiled_loops, "jax[cuda13] 0.11 or newer, on Python 3.12 or newer, and no GPU"),
     (compile_for_tpus, "jax[tpu] 0.11 or newer, on Python 3.12 or newer, and no TPU")],
)  # fmt: skip
def test_it_says_what_is_missing(command, needs, monkeypatch, capsys):
    monkeypatch.setattr(ahead_of_time, "installed", lambda module: False)
    assert command.main([]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert (
        f"needs {needs}; got jax {jax.__version__} on Python {sys.version.split()[0]}" in said.err
    )


MACHINE_CODE = """\
.text.split_attention:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   I2F.S8 R2, R1 ;
%s
        /*0020*/              @!P1 F2FP.BF16.F32.PACK_AB R2, R2, R1 ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_1);
"""


def test_loops_are_found_in_machine_code():
    """A jump to itself ends every program; it is none."""
    adds = ["        /*0018*/                   FADD R2, R2, R1 ;"] * compiled_loops.SHORTEST
    (loop,) = compiled_loops.loops(MACHINE_CODE % "\n".join(adds))
    assert len(loop.instructions) == len(adds) + 3 and loop.conversions == 2
    assert loop.instructions[-2].startswith("F2FP")
    assert not compiled_loops.loops(MACHINE_CODE % adds[0])


def test_devices_are_described():
    assert {path.stem for path in compile_for_gpus.GPUS.iterdir()} == {"a100", "h200", "l4"}
    for command in (compile_for_gpus, compile_for_tpus):
        with pytest.raises(SystemExit):
            command.main(["--devices", "t4"])


def test_every_kind_of_cache_has_a_step_for_tpus():
    found = list(programs())
    names = {one.name for one in found}
    assert len(names) == len(found)
    assert {f"step of {name}" for name in methods()} <= names
    assert set(PROMPTS) | set(KNOWN) <= set(methods())
    assert all(one.kernel for one in found if "kernel" in one.name)
    assert all(one.store_bytes > 1e5 for one in found)
