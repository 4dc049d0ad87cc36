"""TPU kernels where there is no TPU: interpreted, with races and reads of nothing found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import tpu_kernel
from pallas_kernels.base import dispatch


@contextlib.contextmanager
def interpreted(
    monkeypatch, *, cores: int = 1, block: int = 128, unwritten: str = "nan"
) -> Iterator[None]:
    """A TPU whose kernels are interpreted. What they compute has to be waited for inside.

    Args:
      cores: that it has.
      block: slots of a block.
      unwritten: `"nan"` or `"zero"`, what stands beyond arrays and in what was never written.
    """
    monkeypatch.setattr(dispatch, "on_tpu", lambda: True)
    monkeypatch.setattr(tpu_kernel, "tpu_cores", lambda: cores)
    monkeypatch.setattr(tpu_kernel, "_block", lambda *_: block)
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory=unwritten
    )
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
        races = interpret_pallas_call.races
        assert races is not None, "no kernel for TPUs has run"
        assert not races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
