"""Attention of one or a few new tokens over a cache."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.call import stored_attention
from pallas_kernels.attention.forms import dense_rows
from pallas_kernels.attention.tpu_forms import reads
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import finite_or_zero, live_slots, mask_products, or_one, products
from pallas_kernels.base.mixing import mix_rows


def decode_attention(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    used: Int[Array, "B H"] | None = None,
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
      q: queries, grouped under their KV head. k, v: keys and values of the slots.
      bias: added to the logit, `-inf` where a slot is free (a cache's `log_mass`).
      query_position: token position per query, -1 = padding (such a row gives 0).
      key_position: token position per slot, -1 = free.
      scale: scale of the logits.
      window: a query sees the newest `window` positions. None: all.
      soft_cap: bound of logits before the bias, `c · tanh(logit / c)`. None: no bound.
      used: number of slots after which none is live, if it is known. The kernel then need not
        search the bias and the positions for it; the result is the same without it.
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
        another dtype than bfloat16 and float32, or not stored slot by slot (see `in_rows`).

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import decode_attention
      >>> q, k = jnp.zeros((1, 1, 1, 1, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]]])
      >>> position = jnp.array([[[0, 1, 2]]])
      >>> out, _, p = decode_attention(q, k, v, jnp.zeros((1, 1, 3)), position[0, :, 1:2],
      ...                              position, scale=1.0)
      >>> out.tolist(), p.tolist()
      ([[[[[2.0, 4.0]]]]], [[[[[0.5, 0.5, 0.0]]]]])
    """
    check_rows(q, k, v, bias, query_position, key_position, q.shape[1])
    check_used(used, q)
    rows = dense_rows(k), dense_rows(v)
    chosen = choose_implementation(implementation, k, v, for_tpu=reads(*rows))
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if chosen == "xla":
        out, lse, p = _reference(q, k, v, bias, query_position, key_position, **options)
        return out, lse, p if probabilities else None
    return stored_attention(
        "decode_attention", q, *rows, bias, query_position, key_position,
        end=used, probabilities=probabilities, chosen=chosen, dtype=v.dtype, **options,
    )  # fmt: skip


def check_rows(q, k, v, bias, query_position, key_position, lists: int) -> None:
    """Raises ValueError unless the shapes of the arguments fit those of `q` and `k`."""
    if q.ndim != 5 or k.ndim != 4:
        raise ValueError(
            f"q must be [B, H, G, T, D] and k [B, H, S, D], got {q.shape} and {k.shape}"
        )
    check_slots(q, k.shape[1:3], bias, query_position, key_position, lists)
    expected = (q.shape[0], *k.shape[1:3], q.shape[4])
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            _check_shape(name, x, expected)


def check_slots(q, store: tuple[int, int], bias, query_position, key_position, lists: int) -> None:
    """Raises ValueError unless bias and positions fit `q` and a store of H heads and S slots."""
    batch, tokens, heads = q.shape[0], q.shape[3], store[0]
    if heads < 1 or lists % heads:
        raise ValueError(f"q must be for a multiple of the {heads} heads of k, got {lists}")
    for name, x in (("bias", bias), ("key_position", key_position)):
        _check_shape(name, x, (batch, *store))
    _check_shape("query_position", query_position, (batch, tokens))


def check_used(used: Array | None, q: Array) -> None:
    """Raises ValueError unless `used` is None or `[B, H]`."""
    if used is not None and used.shape != q.shape[:2]:
        raise ValueError(f"used must be [B, H] = {q.shape[:2]}, got {used.shape}")


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")


@jax.jit  # so that a call outside of `jit` does not compile the second sum every time
def _reference(q, k, v, bias, query_position, key_position, *, scale, window, soft_cap):
    """Computes the XLA reference: all slots at once."""
    return attention_by_products(
        q, lambda rows: products(rows, k), lambda weights, _: mix_rows(weights, v),
        bias, query_position, key_position,
        dtype=v.dtype, scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip


def attention_by_products(
    q: Float[Array, "B H G T D"],
    multiply: Callable[[Array], Array],
    mix: Callable[[Array, Array], Array],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    dtype: DTypeLike,
    **options,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"]]:
    """Computes `decode_attention` by XLA over rows in any form.

    Args:
      multiply: returns products `[B, H, R, S]` of query rows `[B, H, R, D]` with all keys.
      mix: returns sums `[B, H, R, D]` of values by weights `[B, H, R, S]`, given which slots are
        live, `[B, H, S]`; weights are 0 elsewhere.
      dtype: dtype of the output.
      options: `scale`, `window` and `soft_cap`.
    """
    rows = q.reshape(*q.shape[:2], -1, q.shape[4])
    logits = mask_products(multiply(rows), bias, key_position, query_position, **options)
    weights, total, lse = _softmax(logits)
    out = mix(weights, live_slots(bias, key_position)) / total
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
