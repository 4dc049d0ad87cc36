"""Attention of one or a few new tokens over a cache."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention.call import stored_attention
from pallas_kernels.attention.forms import dense_rows
from pallas_kernels.attention.tpu_forms import reads
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import (
    Mask,
    Queries,
    Seen,
    capped,
    finite_or_zero,
    masked,
    or_one,
)
from pallas_kernels.base.mixing import mix_rows
from pallas_kernels.base.products import products
from pallas_kernels.base.tiles import launch_of


def decode_attention(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    seen: Seen,
    mask: Mask,
    *,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"] | None]:
    """Computes softmax attention of a few queries over the slots they see, with probabilities.

    `out[t] = Σ_s p[t, s] v[s]` with `p[t] = softmax_s(scale · q[t]·k[s] + bias[s])`. It equals
    `prompt_attention`, for so few queries that their logits over all slots may be held at once.

    The kernel reads the keys and values of live slots once. It divides the slots of a head among as
    many programs as fill the device, and joins their parts in float32. Parts without a live slot
    cost nothing. The number of query heads and head_dim are arbitrary.

    Args:
      queries: the queries and their positions. A row of padding gives 0.
      k, v: keys and values of all slots.
      seen: bias and position of the slots. If their `end` is known, the kernel need not search the
        bias and the positions for it; the result is the same without it.
      mask: scale, window and soft cap (static).
      probabilities: whether to return probabilities (static). The kernel writes them only then.
      implementation: `"pallas"` (the kernel of the device), `"interpret"` (the one for GPUs,
        interpreted on any device), `"xla"`, or None: the kernel on a GPU or TPU that can run it,
        XLA elsewhere.

    Returns:
      Outputs in the dtype of `v` (0 for a row that sees nothing), float32 log-sum-exps (`-inf` for
      such a row), float32 probabilities that each slot received from each query, or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, one that the GPU
        is too old for, or `"pallas"` on a TPU for arrays that its kernel does not read: those of
        another dtype than bfloat16 and float32, or not stored slot by slot (see `in_rows`); a list
        of slots, which `gather_attention` takes.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, decode_attention
      >>> q, k = jnp.zeros((1, 1, 1, 1, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]]])
      >>> seen = Seen(jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 2]]]))
      >>> out, _, p = decode_attention(Queries(q, jnp.array([[1]])), k, v, seen, Mask(1.0))
      >>> out.tolist(), p.tolist()
      ([[[[[2.0, 4.0]]]]], [[[[[0.5, 0.5, 0.0]]]]])
    """
    check_rows(queries, k, v, seen)
    k = seen.turned(k)
    rows = dense_rows(k), dense_rows(v)
    chosen = choose_implementation(implementation, k, v, for_tpu=reads(*rows))
    if chosen == "xla":
        out, lse, p = _reference(queries, k, v, seen, mask)
        return out, lse, p if probabilities else None
    launch = None if chosen == "tpu" else launch_of("decode_attention", chosen)
    return stored_attention(
        queries, *rows, seen._replace(turn=None), mask, launch, probabilities=probabilities,
        dtype=v.dtype,
    )  # fmt: skip


def check_rows(queries: Queries, k: Array, v: Array | None, seen: Seen) -> None:
    """Raises ValueError unless the shapes of the arguments fit those of the queries and `k`."""
    q = queries.q
    if q.ndim != 5 or k.ndim != 4:
        raise ValueError(
            f"q must be [B, H, G, T, D] and k [B, H, S, D], got {q.shape} and {k.shape}"
        )
    check_slots(queries, k.shape[1:3], seen)
    expected = (q.shape[0], *k.shape[1:3], q.shape[4])
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            _check_shape(name, x, expected)


def check_slots(queries: Queries, store: tuple[int, ...], seen: Seen) -> None:
    """Raises ValueError unless what is seen fits the queries and a store of H heads and S slots."""
    batch, lists, _, tokens, _ = queries.q.shape
    if store[0] < 1 or lists % store[0]:
        raise ValueError(f"q must be for a multiple of the {store[0]} heads of k, got {lists}")
    for name, x in (("bias", seen.bias), ("position", seen.position)):
        _check_shape(name, x, (batch, *store))
    _check_shape("the queries' position", queries.position, (batch, tokens))
    if seen.index is not None:
        raise ValueError(f"gather_attention takes an index, got one of shape {seen.index.shape}")
    if seen.end is not None and seen.end.shape != (batch, lists):
        raise ValueError(f"end must be [B, H] = {(batch, lists)}, got {seen.end.shape}")


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")


@jax.jit  # so that a call outside of `jit` does not compile the second sum every time
def _reference(queries: Queries, k: Array, v: Array, seen: Seen, mask: Mask):
    """Computes the XLA reference: all slots at once."""
    return attention_by_products(
        queries, lambda rows: products(rows, k), lambda weights, _: mix_rows(weights, v), seen,
        mask, v.dtype,
    )  # fmt: skip


def attention_by_products(
    queries: Queries,
    multiply: Callable[[Array], Array],
    mix: Callable[[Array, Array], Array],
    seen: Seen,
    mask: Mask,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"]]:
    """Computes `decode_attention` by XLA over rows in any form.

    Args:
      multiply: returns products `[B, H, R, S]` of query rows `[B, H, R, D]` with all keys.
      mix: returns sums `[B, H, R, D]` of values by weights `[B, H, R, S]`, given which slots are
        live, `[B, H, S]`; weights are 0 elsewhere.
      dtype: dtype of the output.
    """
    q = queries.q
    rows = q.reshape(*q.shape[:2], -1, q.shape[4])
    logits = capped(multiply(rows) * mask.scale, mask.soft_cap)
    logits = masked(logits, seen, queries.position, mask.window)
    weights, total, lse = _softmax(logits)
    out = mix(weights, seen.live) / total
    per_query = q.shape[:4]
    p = (weights / total).reshape(*per_query, -1)
    return out.astype(dtype).reshape(q.shape), lse.reshape(per_query), p


def _softmax(
    logits: Float[Array, "B H R S"],
) -> tuple[Float[Array, "B H R S"], Float[Array, "B H R 1"], Float[Array, "B H R 1"]]:
    """Returns weights, the sums that turn them into probabilities, and log-sum-exps.

    A row that sees nothing has weights 0, divided by 1.
    """
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - finite_or_zero(top))
    total = weights.sum(-1, keepdims=True)
    return weights, or_one(total), top + jnp.log(total)
