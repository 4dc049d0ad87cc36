"""The route of all kernels to a GPU: Pallas lowered by way of Triton.

JAX 0.10.2 to 0.12 lower a Pallas kernel by way of Triton; JAX has announced its removal since 0.11.
The files of kernels take all that they need of it from here (`pallas_call`, `load`, `store`,
`debug_barrier`, `by_words`, `exp2`), so that another route changes this file alone. Where JAX lacks
the lowering, everything runs by XLA, and `check_route` says why a kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

try:
    from jax.experimental.pallas.triton import (
        CompilerParams,
        debug_barrier,
        elementwise_inline_asm,
        load,
        store,
    )
except ImportError:  # a JAX without the lowering
    CompilerParams = debug_barrier = elementwise_inline_asm = load = store = None

VERSIONS = "0.10.2 to 0.12"  # versions of JAX that have the lowering


def has_route() -> bool:
    """Returns whether this JAX can lower kernels.

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
    """Calls `pl.pallas_call` on this route.

    Args:
      kernel: body of the kernel, which reads with `load` and writes with `store`.
      num_warps, num_stages: warps and stages of a program; the defaults suit untuned kernels.
      options: all other arguments of `pl.pallas_call`.

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
    parameters = CompilerParams(num_warps=num_warps, num_stages=num_stages)  # pyright: ignore[reportOptionalCall]  # `check_route` has looked for it
    return pl.pallas_call(kernel, compiler_params=parameters, **options)


def by_words(asm: str, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    """Runs PTX for every two elements of 16 bits, in a kernel that is compiled.

    Args:
      asm: instructions, in which $0 stands for a word of the result, and $1, $2, ... for those of
        the arrays.
      arrays: arrays of one shape and 16 bits, two elements in a word.
      dtype: that of the result, of 16 bits.
    """
    result = jax.ShapeDtypeStruct(arrays[0].shape, dtype)
    constraints = ",".join(["=r", *["r"] * len(arrays)])
    [words] = elementwise_inline_asm(  # pyright: ignore[reportOptionalCall]  # kernels are refused without it
        asm, args=list(arrays), constraints=constraints, pack=2, result_shape_dtypes=[result]
    )
    return words


def exp2(x: Array, interpret: bool) -> Array:
    """Returns `2**x` in float32 by one instruction; below 2^-126, 0.

    JAX's function takes four for the sake of the numbers down to 2^-149. An interpreted kernel
    takes it all the same.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base import route
      >>> route.exp2(jnp.array([-1.0, -jnp.inf]), interpret=True).tolist()
      [0.5, 0.0]
    """
    if interpret:
        return jnp.exp2(x)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    [power] = elementwise_inline_asm(  # pyright: ignore[reportOptionalCall]  # kernels are refused without it
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[result],
    )  # fmt: skip
    return power
