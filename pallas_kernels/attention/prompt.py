"""Attention of a prompt over a cache, and the sums and maxima of its softmax's columns.

All operations take slots in any order: positions decide what a query sees. They hold one block of
logits at a time for each program that runs, or on a CPU the weights of a block of queries with all
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.call import join_attention, join_sinks
from pallas_kernels.attention.decode import check_rows
from pallas_kernels.attention.prompt_blocks import (
    add_shares,
    attention_and_columns_by_blocks,
    attention_by_blocks,
    largest_shares,
    maxima_by_blocks,
    sums_by_blocks,
)
from pallas_kernels.attention.prompt_kernel import attention_by_kernel, columns_by_kernel
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import Mask, Queries, Seen
from pallas_kernels.base.tiles import launch_of


@overload
def prompt_attention(
    queries: Queries, k: Float[Array, "B H S D"], v: Float[Array, "B H S D"], seen: Seen,
    mask: Mask, *, implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"]]: ...  # fmt: skip
@overload
def prompt_attention(
    queries: Queries, k: Float[Array, "B H S D"], v: None, seen: Seen,
    mask: Mask, *, implementation: str | None = None,
) -> tuple[None, Float[Array, "B H G T"]]: ...  # fmt: skip
def prompt_attention(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"] | None,
    seen: Seen,
    mask: Mask,
    *,
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
      queries: the queries and their positions. A row of padding gives 0.
      k, v: keys and values of the slots. Without values, only log-sum-exps are computed.
      seen: bias and position of the slots.
      mask: scale, window and soft cap (static).
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      Outputs in the dtype of `v`, None without values, and float32 log-sum-exps (`-inf` for a row
      that sees nothing).

    Raises:
      ValueError: shapes that do not fit each other; a list of slots, or keys that are rotated when
        they are read; an unknown implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, prompt_attention
      >>> q, k = jnp.zeros((1, 1, 1, 3, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v, at = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]]]]), jnp.array([[[0, 1, 2]]])
      >>> seen = Seen(jnp.zeros((1, 1, 3)), at)
      >>> out, lse = prompt_attention(Queries(q, at[0]), k, v, seen, Mask(1.0))
      >>> out[0, 0, 0].tolist(), jnp.exp(lse[0, 0, 0]).round().tolist()
      ([[1.0, 2.0], [2.0, 4.0], [3.0, 3.0]], [1.0, 2.0, 3.0])
    """
    chosen = choose_implementation(implementation, k, v)
    _check(queries, k, v, seen)
    if chosen != "xla":
        launch = launch_of("prompt_attention", chosen)
        return attention_by_kernel(queries, k, v, seen, mask, launch)
    # XLA does not compute an output that is not used, so the keys may stand in for values.
    out, lse = attention_by_blocks(queries, k, k if v is None else v, seen, mask)
    return None if v is None else out, lse


def column_sums(
    queries: Queries,
    k: Float[Array, "B H S D"],
    seen: Seen,
    lse: Float[Array, "B H G T"],
    mask: Mask,
    *,
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
      queries, k, seen, mask, implementation: as in `prompt_attention`.

    Returns:
      The sums, float32.

    Raises:
      ValueError: shapes that do not fit each other; a list of slots, or keys that are rotated when
        they are read; an unknown implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, column_sums, prompt_attention
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> queries, seen = Queries(q, at[0]), Seen(jnp.zeros((1, 1, 2)), at)
      >>> _, lse = prompt_attention(queries, k, None, seen, Mask(1.0))
      >>> column_sums(queries, k, seen, lse, Mask(1.0)).round(4).tolist()
      [[[[1.5, 0.5]]]]
    """
    args = queries, k, seen, lse, mask
    return _columns("column_sums", sums_by_blocks, args, implementation)


def column_maxima(
    queries: Queries,
    k: Float[Array, "B H S D"],
    seen: Seen,
    lse: Float[Array, "B H G T"],
    mask: Mask,
    *,
    implementation: str | None = None,
) -> Float[Array, "B H G S"]:
    """Finds the largest attention probability that each slot receives, in O(S) memory.

    `maxima[s] = max_t exp(logit[t, s] - lse[t])`, with logits as in `prompt_attention`, over the
    queries that see the slot; 0 for a slot that none sees. Padding queries count for nothing. The
    log-sum-exps may be over more slots than these, which then are some columns of a larger softmax.

    Programs of the kernel are those of `column_sums`.

    Args:
      lse: log-sum-exps of the queries' logits.
      queries, k, seen, mask, implementation: as in `prompt_attention`.

    Returns:
      The maxima, float32.

    Raises:
      ValueError: shapes that do not fit each other; a list of slots, or keys that are rotated when
        they are read; an unknown implementation, or one that the GPU is too old for.

    References:
      KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416,
      whose score is the largest of these maxima over the query heads of a KV head.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, column_maxima, prompt_attention
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> queries, seen = Queries(q, at[0]), Seen(jnp.zeros((1, 1, 2)), at)
      >>> _, lse = prompt_attention(queries, k, None, seen, Mask(1.0))
      >>> column_maxima(queries, k, seen, lse, Mask(1.0)).round(4).tolist()
      [[[[1.0, 0.5]]]]
    """
    args = queries, k, seen, lse, mask
    return _columns("column_maxima", maxima_by_blocks, args, implementation)


def _columns(
    operation: str,
    by_blocks: Callable[..., Array],
    args: tuple[Queries, Array, Seen, Array, Mask],
    implementation: str | None,
) -> Float[Array, "B H G S"]:
    """Checks the arguments of `column_sums` or `column_maxima` and computes it."""
    queries, k, seen, lse, _ = args
    chosen = choose_implementation(implementation, k)
    _check(queries, k, None, seen)
    _check_lse("lse", lse, queries)
    if chosen == "xla":
        return by_blocks(*args)
    return columns_by_kernel(operation, *args, launch_of(operation, chosen))


def prompt_attention_and_sums(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    seen: Seen,
    mask: Mask,
    *,
    sinks: Float[Array, " Q"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G S"]]:
    """Computes `prompt_attention` and `column_sums` of the same queries.

    With kernels, these are the two operations: sums need the log-sum-exps of all slots, so that one
    kernel would multiply queries and keys twice as well. XLA computes both at once from the logits
    of a block of queries with all slots, which it holds, so that queries and keys are multiplied
    once: sums add about a quarter to attention's time on a CPU, not a half.

    Args:
      sinks: logits of a learned sink of each query head, `Q = H · G`: a column of the softmax
        without a value, which log-sum-exps and sums count. None: there are none.
      queries, k, v, seen, mask, implementation: as in `prompt_attention`.

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps and float32 sums.

    Raises:
      ValueError: what `prompt_attention` raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, prompt_attention_and_sums
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> args = Queries(q, at[0]), k, k, Seen(jnp.zeros((1, 1, 2)), at)
      >>> prompt_attention_and_sums(*args, Mask(1.0))[2].round(4).tolist()
      [[[[1.5, 0.5]]]]
    """
    chosen, q = choose_implementation(implementation, k, v), queries.q
    _check(queries, k, v, seen)
    if chosen == "xla":
        elsewhere, _ = join_sinks(sinks, jnp.full(q.shape[:-1], -jnp.inf, jnp.float32), None)
        return attention_and_columns_by_blocks(queries, k, v, seen, elsewhere, mask, add=add_shares)
    out, lse = prompt_attention(queries, k, v, seen, mask, implementation=chosen)
    lse, out = join_sinks(sinks, lse, out)
    return out, lse, column_sums(queries, k, seen, lse, mask, implementation=chosen)


def prompt_attention_and_maxima(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    seen: Seen,
    elsewhere: Float[Array, "B H G T"],
    mask: Mask,
    *,
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
      queries, k, v, seen, mask, implementation: as in `prompt_attention`.

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps and float32 maxima.

    Raises:
      ValueError: what `column_maxima` raises, with `elsewhere` in the place of `lse`.

    References:
      KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416,
      where the slots are a document's, and the columns elsewhere those of its repetition.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, prompt_attention_and_maxima
      >>> q, k, at = jnp.zeros((1, 1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4)), jnp.array([[[0, 1]]])
      >>> elsewhere = jnp.log(jnp.array([[[[3.0, 6.0]]]]))
      >>> args = Queries(q, at[0]), k, k, Seen(jnp.zeros((1, 1, 2)), at), elsewhere
      >>> prompt_attention_and_maxima(*args, Mask(1.0))[2].round(4).tolist()
      [[[[0.25, 0.125]]]]
    """
    chosen = choose_implementation(implementation, k, v)
    _check(queries, k, v, seen)
    _check_lse("elsewhere", elsewhere, queries)
    if chosen == "xla":
        return attention_and_columns_by_blocks(
            queries, k, v, seen, elsewhere, mask, add=largest_shares
        )
    out, lse = prompt_attention(queries, k, v, seen, mask, implementation=chosen)
    nothing = jnp.zeros_like(out, jnp.float32), elsewhere
    out, lse, _ = join_attention([(out.astype(jnp.float32), lse), nothing])
    maxima = column_maxima(queries, k, seen, lse, mask, implementation=chosen)
    return out.astype(v.dtype), lse, maxima


def _check(queries: Queries, k: Array, v: Array | None, seen: Seen) -> None:
    check_rows(queries, k, v, seen)
    if queries.q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q must be grouped under the {k.shape[1]} heads of k, got {queries.q.shape}"
        )
    if seen.turn is not None:
        raise ValueError("keys of a prompt must be rotated already, got a rotation of stored keys")


def _check_lse(name: str, lse: Array, queries: Queries) -> None:
    if lse.shape != queries.q.shape[:-1]:
        raise ValueError(f"{name} must have shape {queries.q.shape[:-1]}, got {lse.shape}")
