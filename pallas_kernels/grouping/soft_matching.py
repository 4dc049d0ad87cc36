"""Bipartite soft matching within chunks: to each token of set A, the most similar one of set B."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.tiles import tile_of
from pallas_kernels.grouping.best_match import NO_NUMBER, Every, best_match
from pallas_kernels.grouping.cosine import inverse_length, round_cosine

# Rows of A that meet all of their chunk's B at once: bounds the memory of very long chunks.
BLOCK = 512


def soft_matching(
    keys: Float[Array, "B H N D"],
    count: Int[Array, "B H"],
    *,
    chunk: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H N"], Int[Array, "B H N"]]:
    """The edge of every token of set A: its most similar token of set B in the same chunk.

    Tokens 0 … count − 1 are cut into chunks of `chunk`. Of each, the even offsets are set A and the
    odd ones set B; similarity is the cosine `a·b / (|a| |b|)`, 0 for a zero key. Ties go to the
    lower token. What stands from `count` on is not looked at.

    Cosines are rounded as those of `pair_cosine` are: the similarity of keys that are equal, or
    positive multiples of each other, is exactly 1.

    Args:
      keys: in the order of their tokens. Their lengths do not matter.
      count: tokens per row and head.
      chunk: tokens per chunk, at least 2.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      Float32 similarity of each token's edge, `-inf` where it has none (tokens of set B, an A
      without any B, nothing there), and the token that the edge leads to, itself where there is no
      edge.

    Raises:
      ValueError: shapes that do not fit each other, a chunk of less than 2; an unknown
        implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import soft_matching
      >>> keys = jnp.array([[[[1.0, 0.0], [0.0, 1.0], [0.0, 3.0], [2.0, 0.0]]]])
      >>> similarity, partner = soft_matching(keys, jnp.array([[4]]), chunk=4)
      >>> similarity.tolist(), partner.tolist()
      ([[[1.0, -inf, 1.0, -inf]]], [[[3, 1, 1, 3]]])
    """
    chosen = choose_implementation(implementation, keys)
    if chunk < 2:
        raise ValueError(f"chunk must be at least 2, got {chunk}")
    if keys.ndim != 4:
        raise ValueError(f"keys must be [B, H, N, D], got {keys.shape}")
    if count.shape != keys.shape[:2]:
        raise ValueError(f"count must have shape {keys.shape[:2]}, got {count.shape}")
    size = max(2, min(chunk, keys.shape[2]))
    if chosen == "xla":
        return _by_xla(keys, count, size)
    return _by_kernel(keys, count, size, chosen == "interpret")


def _by_kernel(
    keys: Float[Array, "B H N D"], count: Int[Array, "B H"], size: int, interpret: bool
) -> tuple[Float[Array, "B H N"], Int[Array, "B H N"]]:
    """`soft_matching` in chunks of `size`, which reads the keys where they are."""
    token = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None]
    there = token < count[..., None]
    similarity, partner = best_match(
        keys, keys, there, Every(size, 0, 2), Every(size, 1, 2), "rounded_cosine",
        tile=tile_of("best_match"), interpret=interpret,
    )  # fmt: skip
    similarity = jnp.where(there, similarity, -jnp.inf)
    return similarity, jnp.where(similarity > -jnp.inf, partner, token)


def _by_xla(
    keys: Float[Array, "B H N D"], count: Int[Array, "B H"], size: int
) -> tuple[Float[Array, "B H N"], Int[Array, "B H N"]]:
    """The XLA reference, in chunks of `size`."""
    tokens = keys.shape[2]
    keys = _whole_chunks(keys, size)
    chunked = keys.reshape(*keys.shape[:2], -1, size, keys.shape[-1]).astype(jnp.float32)
    token = jnp.arange(keys.shape[2], dtype=jnp.int32).reshape(1, 1, -1, size)
    there = token < count[:, :, None, None]
    b = chunked[..., 1::2, :]
    has_b, b_token, b_scale = there[..., 1::2], token[..., 1::2], inverse_length(b)

    def edges(a: Float[Array, "B H C A D"]) -> tuple[Array, Array]:
        dots = jnp.einsum(
            "bhcad,bhced->bhcae", a, b,
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
        cosine = dots * inverse_length(a)[..., None] * b_scale[..., None, :]
        cosine = round_cosine(cosine, keys.shape[-1])
        cosine = jnp.where(jnp.isnan(cosine), NO_NUMBER, cosine)
        cosine = jnp.where(has_b[..., None, :], cosine, -jnp.inf)
        best = cosine.max(-1)
        # The first maximum by two plain reductions: several times faster on CPU than argmax.
        at_best = cosine == best[..., None]
        last = jnp.iinfo(jnp.int32).max
        return best, jnp.where(at_best, b_token[..., None, :], last).min(-1)

    similarity, partner = _in_blocks(edges, chunked[..., 0::2, :])
    similarity = _spread(similarity, size, -jnp.inf)
    similarity = jnp.where(there, similarity, -jnp.inf)
    partner = jnp.where(similarity > -jnp.inf, _spread(partner, size, 0), token)
    return tuple(x.reshape(*keys.shape[:3])[..., :tokens] for x in (similarity, partner))


def _in_blocks(edges, a: Float[Array, "B H C A D"]) -> tuple[Array, Array]:
    """`edges(a)`, at most `BLOCK` of the A of each chunk at a time."""
    rows = a.shape[3]
    if rows <= BLOCK:
        return edges(a)
    blocks = -(-rows // BLOCK)
    a = jnp.pad(a, ((0, 0),) * 3 + ((0, blocks * BLOCK - rows), (0, 0)))
    a = jnp.moveaxis(a.reshape(*a.shape[:3], blocks, BLOCK, a.shape[-1]), 3, 0)
    found = jax.lax.map(edges, a)  # [blocks, B, H, C, BLOCK]
    return tuple(jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1)[..., :rows] for x in found)


def _spread(x: Array, size: int, fill: float) -> Array:
    """What belongs to the even offsets of each chunk, `[..., A]`, at its place among all."""
    low, high = 0, size - (2 * x.shape[-1] - 1)
    config = [(0, 0, 0)] * (x.ndim - 1) + [(low, high, 1)]
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), config)


def _whole_chunks(keys: Float[Array, "B H N D"], size: int) -> Array:
    missing = -keys.shape[2] % size
    return jnp.pad(keys, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else keys
