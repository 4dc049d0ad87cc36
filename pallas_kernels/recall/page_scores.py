"""Scores of pages for a query, by two bounds of each channel of their keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import dot, program_part, zero
from pallas_kernels.base.tiles import SMALLEST, power_of_two

# Bytes of a tile of one bound: 64 pages of 128 channels in 16 bits. 4 warps hold such a tile of
# each bound without spilling registers, and a few thousand pages make enough tiles for a device.
TILE_BYTES = 16384


def page_scores(
    q: Float[Array, "B H G D"],
    low: Float[Array, "B H P D"],
    high: Float[Array, "B H P D"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B H G P"]:
    """Returns `Σ_c max(q_c low_c, q_c high_c)` in float32.

    It is an upper bound of a page's `q·k` if no key is outside the bounds. Products are computed in
    the dtype of `low`. The kernel reads the stored bounds once.

    Args:
      q: queries, grouped under their KV head.
      low, high: bounds of each channel of a page's keys; finite, even where there is no page.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      The score of each page for each query, float32.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import page_scores
      >>> low, high = jnp.array([[[[-1.0, 0.0]]]]), jnp.array([[[[2.0, 3.0]]]])
      >>> page_scores(jnp.array([[[[1.0, 1.0], [-1.0, -1.0]]]]), low, high).tolist()
      [[[[5.0], [1.0]]]]
    """
    chosen = choose_implementation(implementation, low, high)
    if q.ndim != 4 or low.ndim != 4:
        raise ValueError(f"q must be [B, H, G, D] and low [B, H, P, D], got {q.shape}, {low.shape}")
    expected = (*q.shape[:2], low.shape[2], q.shape[3])
    for name, x in (("low", low), ("high", high)):
        if x.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {x.shape}")
    if chosen != "xla":
        return _score(q, low, high, chosen == "interpret")
    # q is cast to the dtype of the bounds, which would otherwise be widened in every step.
    q = q.astype(low.dtype)

    def products(
        q: Float[Array, "B H G D"], bound: Float[Array, "B H P D"]
    ) -> Float[Array, "B H G P"]:
        return jnp.einsum(
            "bhgd,bhpd->bhgp", q, bound,
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip

    # The greater product is the one with `high` where q is positive, and with `low` elsewhere.
    return products(jnp.maximum(q, 0), high) + products(jnp.minimum(q, 0), low)


def _score(q, low, high, interpret: bool) -> Float[Array, "B H G P"]:
    """Scores pages by one launch; a program takes a group's query heads and a tile of pages."""
    batch, heads, group, channels = q.shape
    pages = low.shape[2]
    score = jax.ShapeDtypeStruct((batch, heads, group, pages), jnp.float32)
    if not score.size:
        return jnp.zeros(score.shape, score.dtype)
    padded = max(SMALLEST, power_of_two(channels))
    tile = max(SMALLEST, min(TILE_BYTES // (padded * low.dtype.itemsize), power_of_two(pages)))
    return route.pallas_call(
        functools.partial(_kernel, tile=tile, padded=padded),
        grid=(batch, heads, pl.cdiv(pages, tile)),
        in_specs=[program_part(x, (0, 1)) for x in (q, low, high)],
        out_specs=program_part(score, (0, 1)),
        out_shape=score,
        interpret=interpret,
        name="page_scores",
    )(q, low, high.astype(low.dtype))


def _kernel(q, low, high, score, *, tile: int, padded: int):
    """Scores a tile of pages."""
    (group, channels), pages = q.shape, low.shape[0]
    head = jnp.arange(max(SMALLEST, power_of_two(group)), dtype=jnp.int32)
    page = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
    channel = jnp.arange(padded, dtype=jnp.int32)

    def load(ref, row, rows: int):
        wanted = (row < rows)[:, None] & (channel < channels)[None, :]
        return route.load(
            ref.at[row[:, None], channel[None, :]], mask=wanted, other=zero(ref.dtype)
        )

    queries = load(q, head, group).astype(low.dtype)
    lowest, highest = load(low, page, pages), load(high, page, pages)
    # Matrix units have no maximum of products. Split q by sign instead: positive parts meet `high`,
    # negative parts meet `low`.
    upper = dot(jnp.maximum(queries, 0), highest.T) + dot(jnp.minimum(queries, 0), lowest.T)
    wanted = (head < group)[:, None] & (page < pages)[None, :]
    route.store(score.at[head[:, None], page[None, :]], upper, mask=wanted)
