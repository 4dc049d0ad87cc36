"""Attention of a prompt over a cache, and the sums and maxima of its softmax's columns.

All operations take slots in any order: positions decide what a query sees. They hold one block of
logits at a time for each program that runs, or on a CPU those of a block of queries with all slots.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.call import beside_sinks, join_attention
from pallas_kernels.attention.decode import check_rows
from pallas_kernels.attention.prompt_blocks import (
    attention_and_maxima_by_blocks,
    attention_and_sums_by_blocks,
    attention_by_blocks,
    maxima_by_blocks,
    sums_by_blocks,
)
from pallas_kernels.attention.prompt_kernel import attention_by_kernel, columns_by_kernel
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.tiles import tile_of


def prompt_attention(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"] | None,
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"] | None, Float[Array, "B H G T"]]:
    """Computes softmax attention of many queries over the slots they see, and log-sum-exps.

    `out[t] = Σ_s softmax_s(logit[t, s]) v[s]` with `logit[t, s] = scale · q[t]·k[s] + bias[s]`,
    over the slots with `0 <= key_position[s] <= query_position[t]` (and `key_position[s] >
    query_position[t] - window`). `soft_cap` bounds the logit before the bias, `c · tanh(logit/c)`.

    A program of the kernel takes a tile of queries of one KV head, and reads the slots from the
    first to the last that any of them may see. These bounds are found on the device, so that the
    host waits for nothing.

    Args:
      q: queries, grouped under their KV head. k, v: keys and values of the slots. Without values
        there is no output, and nothing is multiplied with them.
      bias: added to the logit, `-inf` where a slot is free (a cache's `log_mass`).
      query_position: token position per query, -1 = padding (such a row gives 0).
      key_position: token position per slot, -1 = free.
      scale: scale of the logits.
      window: a query sees the newest `window` positions. None: all.
      soft_cap: bound of logits. None: no bound.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      Outputs in the dtype of `v`, None without values, and float32 log-sum-exps (`-inf` for a row
      that sees nothing).

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import prompt_attention
      >>> q, k = jnp.zeros((1, 1, 1, 3, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v, at = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]]]]), jnp.array([[[0, 1, 2]]])
      >>> out, lse = prompt_attention(q, k, v, jnp.zeros((1, 1, 3)), at[0], at, scale=1.0)
      >>> out[0, 0, 0].tolist(), jnp.exp(lse[0, 0, 0]).round().tolist()
      ([[1.0, 2.0], [2.0, 4.0], [3.0, 3.0]], [1.0, 2.0, 3.0])
    """
    chosen = choose_implementation(implementation, k, v)
    _check(q, k, v, bias, query_position, key_position)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if chosen != "xla":
        return attention_by_kernel(
            q, k, v, bias, query_position, key_position, tile=tile_of("prompt_attention"),
            interpret=chosen == "interpret", **options,
        )  # fmt: skip
    if v is not None:
        return attention_by_blocks(q, k, v, bias, query_position, key_position, **options)
    # XLA does not compute an output that is not used, so the keys may stand in for values.
    _, lse = attention_by_blocks(q, k, k, bias, query_position, key_position, **options)
    return None, lse


def column_sums(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    lse: Float[Array, "B H G T"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B H G S"]:
    """Sums the attention probability that each slot receives from all queries, in O(S) memory.

    `sums[s] = Σ_t exp(logit[t, s] - lse[t])`, with the logits and the log-sum-exps of
    `prompt_attention` on the same arguments. Row statistics come first and column sums second, so
    that the `T × S` matrix never exists. Padding queries add nothing.

    A program of the kernel takes a block of slots and the queries of one head that may see any of
    them. Sums are added in a fixed order, so that a repeated call gives the same numbers.

    Args:
      lse: log-sum-exps of the queries' logits.
      q, k, bias, query_position, key_position, scale, window, soft_cap, implementation: as in
        `prompt_attention`.

    Returns:
      The sums, float32.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import column_sums, prompt_attention
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> bias = jnp.zeros((1, 1, 2))
      >>> _, lse = prompt_attention(q, k, None, bias, at[0], at, scale=1.0)
      >>> column_sums(q, k, bias, lse, at[0], at, scale=1.0).round(4).tolist()
      [[[[1.5, 0.5]]]]
    """
    args = q, k, bias, lse, query_position, key_position
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return _columns("column_sums", sums_by_blocks, args, options, implementation)


def column_maxima(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    lse: Float[Array, "B H G T"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B H G S"]:
    """Finds the largest attention probability that each slot receives, in O(S) memory.

    `maxima[s] = max_t exp(logit[t, s] - lse[t])`, with logits as in `prompt_attention`, over the
    queries that see the slot; 0 for a slot that none sees. Padding queries count for nothing. The
    log-sum-exps may be over more slots than these, which then are some columns of a larger softmax.

    Programs of the kernel are those of `column_sums`.

    Args:
      lse: log-sum-exps of the queries' logits.
      q, k, bias, query_position, key_position, scale, window, soft_cap, implementation: as in
        `prompt_attention`.

    Returns:
      The maxima, float32.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    References:
      KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416,
      whose score is the largest of these maxima over the query heads of a KV head.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import column_maxima, prompt_attention
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> bias = jnp.zeros((1, 1, 2))
      >>> _, lse = prompt_attention(q, k, None, bias, at[0], at, scale=1.0)
      >>> column_maxima(q, k, bias, lse, at[0], at, scale=1.0).round(4).tolist()
      [[[[1.0, 0.5]]]]
    """
    args = q, k, bias, lse, query_position, key_position
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return _columns("column_maxima", maxima_by_blocks, args, options, implementation)


def _columns(
    operation: str,
    by_blocks: Callable[..., Array],
    args: tuple[Array, ...],
    options: dict[str, float | None],
    implementation: str | None,
) -> Float[Array, "B H G S"]:
    """Checks the arguments of `column_sums` or `column_maxima` and computes it."""
    q, k, bias, lse, query_position, key_position = args
    chosen = choose_implementation(implementation, k)
    _check(q, k, None, bias, query_position, key_position)
    if lse.shape != q.shape[:-1]:
        raise ValueError(f"lse must have shape {q.shape[:-1]}, got {lse.shape}")
    if chosen == "xla":
        return by_blocks(*args, **options)
    return columns_by_kernel(
        q, k, bias, lse, query_position, key_position, operation, tile=tile_of(operation),
        interpret=chosen == "interpret", **options,
    )  # fmt: skip


def prompt_attention_and_sums(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    sinks: Float[Array, " Q"] | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G S"]]:
    """Computes `prompt_attention` and `column_sums` of the same queries.

    With kernels, these are the two operations. XLA computes both at once from the logits of a block
    of queries with all slots, so that queries and keys are multiplied once: sums add about a
    seventh to attention's time on a CPU, not a half.

    Args:
      sinks: logits of a learned sink of each query head, `Q = H · G`: a column of the softmax
        without a value, which log-sum-exps and sums count. None: there are none.
      q, k, v, bias, query_position, key_position, scale, window, soft_cap, implementation: as in
        `prompt_attention`.

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps and float32 sums.

    Raises:
      ValueError: what `prompt_attention` raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import prompt_attention_and_sums
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> args = q, k, k, jnp.zeros((1, 1, 2)), at[0], at
      >>> prompt_attention_and_sums(*args, scale=1.0)[2].round(4).tolist()
      [[[[1.5, 0.5]]]]
    """
    args = q, k, v, bias, query_position, key_position
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    chosen = choose_implementation(implementation, k, v)
    _check(*args)
    if chosen == "xla":
        by_head = jnp.full(q.shape[1:3], -jnp.inf) if sinks is None else sinks
        by_query = by_head.astype(jnp.float32).reshape(1, *q.shape[1:3], 1)
        elsewhere = jnp.broadcast_to(by_query, q.shape[:-1])
        return attention_and_sums_by_blocks(*args, elsewhere, **options)
    options["implementation"] = chosen
    out, lse = prompt_attention(*args, **options)
    lse, out = beside_sinks(sinks, lse, out)
    return out, lse, column_sums(q, k, bias, lse, query_position, key_position, **options)


def prompt_attention_and_maxima(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    elsewhere: Float[Array, "B H G T"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G S"]]:
    """Computes attention and `column_maxima` of the same queries, in part of a larger softmax.

    The softmax has columns besides these slots, of which the log-sum-exp `elsewhere[t]` is known:

    - `lse[t] = log(exp(elsewhere[t]) + Σ_s exp(logit[t, s]))`, with logits as in
      `prompt_attention`;
    - `out[t] = Σ_s exp(logit[t, s] - lse[t]) v[s]`, the slots' part of the output;
    - `maxima[s] = max_t exp(logit[t, s] - lse[t])`, as in `column_maxima`.

    With kernels, these are the two operations. XLA computes all of it from the logits of a block of
    queries with all slots, so that queries and keys are multiplied once.

    Args:
      elsewhere: log-sum-exps of the columns besides the slots; `-inf`: there are none.
      q, k, v, bias, query_position, key_position, scale, window, soft_cap, implementation: as in
        `prompt_attention`.

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps and float32 maxima.

    Raises:
      ValueError: what `column_maxima` raises, with `elsewhere` in the place of `lse`.

    References:
      KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416,
      where the slots are a document's, and the columns elsewhere those of its repetition.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import prompt_attention_and_maxima
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> elsewhere = jnp.log(jnp.array([[[[3.0, 6.0]]]]))
      >>> args = q, k, k, jnp.zeros((1, 1, 2)), elsewhere, at[0], at
      >>> prompt_attention_and_maxima(*args, scale=1.0)[2].round(4).tolist()
      [[[[0.25, 0.125]]]]
    """
    args = q, k, v, bias, query_position, key_position
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    chosen = choose_implementation(implementation, k, v)
    _check(*args)
    if elsewhere.shape != q.shape[:-1]:
        raise ValueError(f"elsewhere must have shape {q.shape[:-1]}, got {elsewhere.shape}")
    if chosen == "xla":
        return attention_and_maxima_by_blocks(*args, elsewhere, **options)
    options["implementation"] = chosen
    out, lse = prompt_attention(*args, **options)
    nothing = jnp.zeros_like(out, jnp.float32), elsewhere
    out, lse, _ = join_attention([(out.astype(jnp.float32), lse), nothing])
    maxima = column_maxima(q, k, bias, lse, query_position, key_position, **options)
    return out.astype(v.dtype), lse, maxima


def _check(q, k, v, bias, query_position, key_position) -> None:
    check_rows(q, k, v, bias, query_position, key_position, q.shape[1])
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q must be grouped under the {k.shape[1]} heads of k, got {q.shape}")
