"""Calls of the attention kernel by operations: over rows in any form, with probabilities."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.forms import Rows
from pallas_kernels.attention.kernel import split_attention
from pallas_kernels.attention.tpu_kernel import tpu_attention
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.logits import Mask, Queries, Seen, visible_slots
from pallas_kernels.base.seen_blocks import hull
from pallas_kernels.base.tiles import Launch


def stored_attention(
    queries: Queries,
    k: Rows,
    v: Rows,
    seen: Seen,
    mask: Mask,
    launch: Launch | None,
    *,
    probabilities: bool,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"] | None]:
    """Computes `decode_attention` of rows in any form by a kernel.

    Args:
      launch: of the kernel for GPUs; None: the kernel for TPUs.
      dtype: dtype of the output.
    """
    end, first = seen.end, None
    # With a given `end` and no window, the slots need not be searched for bounds.
    if end is None or mask.window is not None:
        first, last = _range(seen, queries.position, mask.window)
        end = last if end is None else jnp.minimum(end, last)
    args = queries, k, v, seen._replace(first=first, end=end), mask
    options = {"with_logits": probabilities, "dtype": dtype}
    if launch is None:
        out, lse, logits = tpu_attention(*args, **options)
    else:
        out, lse, logits = split_attention(*args, launch, **options)
    if not probabilities:
        return out, lse, None
    visible = visible_slots(seen, queries.position, mask.window)
    slot = jnp.arange(seen.places, dtype=jnp.int32)[None, None]
    # Logits of slots outside of `[first, end)` were never written.
    looked_at = slot < end[..., None]
    if first is not None:
        looked_at &= slot >= first[..., None]
    return out, lse, probabilities_of(logits, lse, visible & looked_at[:, :, None])


def probabilities_of(
    logits: Float[Array, "B H G T S"],
    lse: Float[Array, "B H G T"],
    visible: Bool[Array, "B H T S"],
) -> Float[Array, "B H G T S"]:
    """Returns probabilities; 0 where a query does not see a slot, whatever its logit is."""
    return jnp.where(visible[:, :, None], jnp.exp(logits - lse[..., None]), 0.0)


def join_attention(
    parts: list[tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"]]],
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], list[Float[Array, "B H G T"]]]:
    """Joins attention over parts of the slots to attention over all; also returns the weights.

    Args:
      parts: outputs and log-sum-exps of each part.

    Returns:
      Outputs and log-sum-exps over all slots, and the weight of each part.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.call import join_attention
      >>> out, lse = jnp.ones((2, 1, 1, 1, 1, 1)), jnp.zeros((2, 1, 1, 1, 1))
      >>> out, _, weights = join_attention([(out[0], lse[0]), (3 * out[1], lse[1])])
      >>> out.item(), [w.item() for w in weights]
      (2.0, [0.5, 0.5])
    """
    total = jax.nn.logsumexp(jnp.stack([lse for _, lse in parts]), axis=0)
    weights = [jnp.where(lse > -jnp.inf, jnp.exp(lse - total), 0.0) for _, lse in parts]
    out = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    return out, total, weights  # pyright: ignore[reportReturnType]  # `sum` gives 0 for no parts alone


@overload
def join_sinks(
    sinks: Array | None, lse: Array, out: Array, *probabilities: Array | None
) -> tuple[Array, Array, *tuple[Array | NoneElsewhere, ...]]: ...
@overload
def join_sinks(
    sinks: Array | None, lse: Array, out: None, *probabilities: Array | None
) -> tuple[Array, None, *tuple[Array | NoneElsewhere, ...]]: ...
def join_sinks(
    sinks: Float[Array, " Q"] | None,
    lse: Float[Array, "B K G T"],
    out: Float[Array, "B K G T D"] | None,
    *probabilities: Float[Array, "B K G T N"] | None,
) -> tuple[Array, Array | None, *tuple[Array | None, ...]]:
    """Adds a learned sink of each query head to attention over slots.

    A sink is one more column of the softmax, without a value. With logits x and
    `lse = log Σ exp(x)`, a slot's weight is `exp(x[s]) / (exp(sink) + Σ exp(x))`, which is
    `softmax_s(x) · σ(lse − sink)`: outputs and probabilities shrink by one factor. They are
    normalised first, so that a sink far above all logits takes no digits from them in 16 bits.

    Args:
      sinks: logits of the sinks, Q = K · G; None: nothing changes.
      lse, out: of attention over slots; an output of None stays None.
      probabilities: of the slots; None stays None.

    Returns:
      Log-sum-exps that include the sinks, outputs and probabilities, in their dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.call import join_sinks
      >>> lse, out = jnp.log(jnp.full((1, 1, 1, 1), 2.0)), jnp.full((1, 1, 1, 1, 1), 6.0)
      >>> lse, out = join_sinks(jnp.zeros(1), lse, out)
      >>> round(jnp.exp(lse).item(), 4), round(out.item(), 4)
      (3.0, 4.0)
    """
    if sinks is None:
        return lse, out, *probabilities
    sinks = sinks.astype(jnp.float32).reshape(1, *lse.shape[1:3], 1)
    # A query that sees nothing gives 0, whatever its sink is.
    share = jnp.where(lse > -jnp.inf, jax.nn.sigmoid(lse - sinks), 0.0)[..., None]

    def shrunk(x: Array | None) -> Array | None:
        return None if x is None else (share * x.astype(jnp.float32)).astype(x.dtype)

    return jnp.logaddexp(lse, sinks), shrunk(out), *map(shrunk, probabilities)


def _range(seen: Seen, query_position: Int[Array, "B T"], window: int | None):
    """Returns first and end of the slots that any query of a row sees, `[B, H]` each."""
    newest = query_position.max(1)[:, None, None]
    visible = seen.live & (seen.position <= newest)
    if window is not None:
        none = jnp.iinfo(query_position.dtype).max
        oldest = jnp.where(query_position >= 0, query_position, none).min(1)[:, None, None]
        visible &= seen.position > oldest - window
    return hull(visible, 2)
