"""The kernel that joins parts of attention once more, in Triton's own language for jax-triton.

Evidence for docs/guides/gpu.md, "Routes": what a kernel becomes that does not go through Pallas.
`pallas_kernels.attention.kernel._join` is the one that kvjax runs. Needs the extra `triton`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.attention.kernel import PARTS
from pallas_kernels.base.tiles import power_of_two

OPTIONS = {"num_warps": 4, "num_stages": 2}


def join_body(
    part_out, part_lse, out, lse,
    parts: tl.constexpr, rows: tl.constexpr, channels: tl.constexpr,
    part_width: tl.constexpr, channel_width: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """One query row: pointers and strides, where Pallas has refs to a program's own block."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = head * parts * rows + row  # the row of the first part; the next is `rows` further on
    every = tl.arange(0, part_width)
    masses = tl.load(part_lse + first + every * rows, mask=every < parts, other=float("-inf"))
    top = tl.max(masses, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(masses - finite), 0)
    channel = tl.arange(0, channel_width)
    acc = tl.zeros((channel_width,), tl.float32)
    for begin in range(0, parts, at_once):
        part = begin + tl.arange(0, at_once)
        own = tl.load(part_lse + first + part * rows, mask=part < parts, other=float("-inf"))
        cell = (first + part * rows)[:, None] * channels + channel[None, :]
        there = (part < parts)[:, None] & (channel < channels)[None, :]
        numbers = tl.load(part_out + cell, mask=there, other=0.0)
        acc += tl.sum(numbers * tl.exp(own - finite)[:, None], 0)
    acc = acc / tl.where(total == 0, 1.0, total)
    at = head * rows + row
    tl.store(out + at * channels + channel, acc.to(out.dtype.element_ty), mask=channel < channels)
    tl.store(lse + at, top + tl.log(total))


join_kernel = triton.jit(join_body)


def sizes(shape: tuple[int, ...]) -> dict[str, int]:
    """The static arguments for outputs of parts `[B, K, P, R, D]`."""
    *_, parts, rows, channels = shape
    return {
        "parts": parts, "rows": rows, "channels": channels, "part_width": power_of_two(parts),
        "channel_width": power_of_two(channels), "at_once": PARTS,
    }  # fmt: skip


def join_by_jax_triton(out: jax.Array, lse: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """`_join` of outputs `[B, K, P, R, D]` and log-sum-exps `[B, K, P, R]`."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    batch, lists, _, rows, channels = out.shape
    return jax_triton.triton_call(
        out, lse, kernel=join_kernel, name="join_parts", grid=(batch * lists, rows),
        out_type=(
            jax.ShapeDtypeStruct((batch, lists, rows, channels), dtype),
            jax.ShapeDtypeStruct((batch, lists, rows), jnp.float32),
        ),
        **sizes(out.shape), **OPTIONS,
    )  # fmt: skip
