"""How kernels get to a GPU: Pallas by way of Triton, decided here for all of them.

JAX 0.10.2 to 0.12 lower a Pallas kernel by way of Triton; since 0.11 they say that it will go. A
kernel's file takes `pallas_call`, `load`, `store` and `debug_barrier` from here and nothing of
Triton's from JAX, so that another route is a change of this file. Where the lowering is gone,
everything runs by XLA, and `check_route` says why a kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas.triton import CompilerParams, debug_barrier, load, store
except ImportError:  # a JAX without the lowering
    CompilerParams = debug_barrier = load = store = None

VERSIONS = "0.10.2 to 0.12"  # of JAX, that have it


def has_route() -> bool:
    """Whether this JAX can lower kernels.

    Example:
      >>> from pallas_kernels.base.route import has_route
      >>> has_route()
      True
    """
    return CompilerParams is not None


def check_route() -> None:
    """Raises RuntimeError where this JAX cannot lower kernels, and says which can."""
    if not has_route():
        raise RuntimeError(
            f"kernels need a JAX that lowers Pallas by way of Triton, {VERSIONS}, got "
            f"{jax.__version__}: install one of these, or take implementation='xla'"
        )


def pallas_call(
    kernel: Callable[..., None], *, num_warps: int = 4, num_stages: int = 2, **options: Any
) -> Callable[..., Any]:
    """`pl.pallas_call` on this route.

    Args:
      kernel: its body, which reads with `load` and writes with `store`.
      num_warps, num_stages: of a program; what kernels take that are not tuned.
      options: all else that `pl.pallas_call` takes.

    Raises:
      RuntimeError: this JAX cannot lower kernels.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_kernels.base import route
      >>> def double(x, out):
      ...     at = jnp.arange(4)
      ...     route.store(out.at[at], 2 * route.load(x.at[at]))
      >>> shape = jax.ShapeDtypeStruct((4,), jnp.float32)
      >>> route.pallas_call(double, out_shape=shape, interpret=True)(jnp.ones(4)).tolist()
      [2.0, 2.0, 2.0, 2.0]
    """
    check_route()
    parameters = CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(kernel, compiler_params=parameters, **options)
