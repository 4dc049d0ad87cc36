"""What a method keeps of the full cache's attention: its recall, and the error of its output."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.attend import attend
from kvjax.attention.layer import Cache
from kvjax.budgets.budgets import check_count
from kvjax.compose.chain import bind
from kvjax.compose.wrappers import HeadGroups
from kvjax.generation.checks import check_prompts
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.steps import pad, read_prompt, scan_steps
from kvjax.protocol import Full, KVTransform

from .recording import Truth, full_run, holds, looked_at, record, recorded, unrecord


def recall_rate(
    attention: Float[Array, "B Q L"],
    kept: Int[Array, "B H S"],
    budget: int | Int[Array, "B H"],
) -> Float[Array, "B H"]:
    """Share of the tokens with the most attention that a cache kept or selected.

    With a KV head's attention `a[s] = Σ_g p[g, s]`, summed over the G = Q / H query heads of its
    group, and T the `budget` tokens of highest a (ties go to the lower position):
    `recall = |T ∩ kept| / |T|`. T holds only tokens that got any attention. So padding, and what
    lies outside a sliding window, never counts, and a row with fewer tokens than the budget is
    measured against all of its own. If T is empty, the recall is 1.

    Args:
      attention: probabilities of the full cache by token position, `[B, Q, L]`; 0 where a row has
        no token.
      kept: token positions that were kept or selected, `[B, H, S]`, -1 = none. A position that
        occurs twice counts once.
      budget: how many tokens make up T, 1 to L; or one number per row and KV head, `[B, H]`, where
        anything from L on means all tokens.

    Returns:
      Recall in [0, 1], `[B, H]` float32.

    Raises:
      TypeError: `budget` is neither an int nor an array of ints, `kept` has no ints.
      ValueError: shapes that do not fit, or an int budget outside 1 to L.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.evaluation import recall_rate
      >>> attention = jnp.array([[[0.5, 0.1, 0.3, 0.1]]])
      >>> recall_rate(attention, kept=jnp.array([[[0, 3, -1]]]), budget=2).tolist()
      [[0.5]]

    References:
      Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression,
      arXiv 2412.03213, Figure 11.
    """
    _check_recall(attention, kept, budget)
    return _recall(attention, holds(kept, attention.shape[-1]), budget)


def _recall(attention, held: Bool[Array, "B H L"], budget) -> Float[Array, "B H"]:
    """`recall_rate` for tokens that are marked."""
    batch, kv_heads, length = held.shape
    total = attention.reshape(batch, kv_heads, -1, length).astype(jnp.float32).sum(2)
    rank = jnp.argsort(jnp.argsort(-total, axis=-1, stable=True), axis=-1)
    top = (rank < jnp.broadcast_to(budget, held.shape[:2])[..., None]) & (total > 0)
    hits = (top & held).sum(-1, dtype=jnp.float32)
    count = top.sum(-1, dtype=jnp.float32)
    return jnp.where(count > 0, hits / jnp.maximum(count, 1.0), 1.0)


def _check_recall(attention, kept, budget) -> None:
    if attention.ndim != 3 or kept.ndim != 3 or attention.shape[0] != kept.shape[0]:
        raise ValueError(
            "attention must be [B, Q, L] and kept [B, H, S] with the same B, got "
            f"{attention.shape} and {kept.shape}"
        )
    (_, query_heads, length), kv_heads = attention.shape, kept.shape[1]
    if query_heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {query_heads} and {kv_heads}"
        )
    if not jnp.issubdtype(kept.dtype, jnp.integer):
        raise TypeError(f"kept must hold token positions as integers, got {kept.dtype}")
    if not isinstance(budget, jax.Array | np.ndarray):
        check_count("budget", budget, 1)
        if budget > length:
            raise ValueError(f"budget must be at most the {length} tokens of a row, got {budget}")
    elif budget.shape != kept.shape[:2]:
        raise ValueError(f"budget must be an int or [B, H] = {kept.shape[:2]}, got {budget.shape}")
    elif not jnp.issubdtype(budget.dtype, jnp.integer):
        raise TypeError(f"budget must hold integers, got {budget.dtype}")


def attention_error(
    output: Float[Array, "B ..."], full: Float[Array, "B ..."]
) -> Float[Array, " B"]:
    """Relative error of an attention output, `‖output − full‖₂ / ‖full‖₂` for each row.

    The norms go over everything but the rows: heads, tokens and channels, in float32. If the
    full output of a row is 0, the error is 0 where the other is 0 too, and else infinite.

    Args:
      output: of the compressed cache, `[B, Q, T, D]` or any shape with rows first.
      full: of the full cache for the same queries, of the same shape.

    Returns:
      One number per row, `[B]` float32.

    Raises:
      ValueError: the shapes differ, or the arrays have no axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.evaluation import attention_error
      >>> full = jnp.array([[3.0, 4.0], [0.0, 0.0]])
      >>> attention_error(jnp.array([[3.0, 3.0], [0.0, 0.0]]), full).round(3).tolist()
      [0.20000000298023224, 0.0]
    """
    if output.shape != full.shape or not full.ndim:
        raise ValueError(
            f"output and full must have one shape, rows first, got {output.shape} and {full.shape}"
        )
    output, full = (x.reshape(len(x), -1).astype(jnp.float32) for x in (output, full))
    off, size = (jnp.linalg.norm(x, axis=1) for x in (output - full, full))
    return jnp.where(off == 0, 0.0, off / size)


class Fidelity(NamedTuple):
    """What a method keeps of the full cache's attention, layer by layer.

    Args:
      recall: `recall_rate` of each layer, row and KV head, `[L, B, H]`.
      error: `attention_error` of each layer and row, `[L, B]`.
    """

    recall: Float[np.ndarray, "L B H"]
    error: Float[np.ndarray, "L B"]


def measure_fidelity(
    model: LanguageModel | FunctionalModel,
    transform: KVTransform,
    prompts: Sequence[Sequence[int]],
    budget: int | None = None,
    new_tokens: int = 1,
) -> Fidelity:
    """Recall and attention error of a method at the first tokens after a prompt.

    The model reads the prompts once with the full cache and once with `transform`, and goes on
    greedily with the full cache. In each layer of that run the new token's query, key and value go
    to the full cache and to the method's cache of the same layer, and with them the query that the
    layer below predicts, for methods that select by it. So every layer is judged alone:
    what a lower layer gets wrong does not reach the queries of a higher one and is not counted
    again. (A method that drops hidden states between layers, as PyramidInfer does, still changes
    what its higher layers read.)

    Recall compares with what attention looked at before anything was evicted for the new token: all
    live slots and the new token's own, or those that the method selected. A merged slot counts as
    the token whose position it has.

    Code is compiled once for each transform, longest prompt, batch and number of new tokens. The
    full cache's run is compiled once for all transforms.

    Args:
      model: as for `kvjax.generate`.
      transform: the method.
      prompts: token ids of each row; rows may differ in length.
      budget: tokens with the most attention that should have been kept, see `recall_rate`; at most
        the longest prompt's tokens and the new ones. None: as many as the method looked at, per
        layer, row and head.
      new_tokens: decode steps to average over; the first one by default.

    Returns:
      Means over the new tokens.

    Raises:
      TypeError, ValueError: before anything is computed: what `kvjax.generate` raises for prompts,
        a budget or number of tokens out of range, a transform that keeps keys unrotated with a
        model that gives `attend` rotated ones.

    Example:
      >>> import kvjax
      >>> from kvjax.evaluation import measure_fidelity
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> found = measure_fidelity(model, kvjax.StreamingLLM(budget=8), [list(range(32))])
      >>> found.recall.shape, found.error.shape, bool(found.error.min() > 0)
      ((2, 1, 2), (2, 1), True)
    """
    functional = as_functional(model)
    bind(transform, functional.num_layers)  # whether it can be
    check_count("new_tokens", new_tokens, 1)
    # The full cache reads the prompts too, whatever positions the method could go beyond.
    check_prompts(functional, prompts, (Full(),), new_tokens)
    longest = max(len(prompt) for prompt in prompts)
    if budget is not None:
        check_count("budget", budget, 1)
        if budget > longest + new_tokens:
            raise ValueError(
                f"budget must be at most the {longest + new_tokens} tokens of the longest row, "
                f"got {budget}"
            )
    layers = bind(transform, functional.num_layers, functional.windows, longest + new_tokens)
    tokens, positions = pad(prompts)
    rotated = not any(map(_late, layers))
    truth = full_run(rotated, new_tokens, functional, tokens, positions)
    found = _method_run(layers, budget, functional, tokens, positions, truth)
    return Fidelity(*map(np.asarray, found))


def _late(layer: KVTransform) -> bool:
    """Whether a layer rotates its keys when they are read."""
    parts = [tx for _, tx in layer.groups] if isinstance(layer, HeadGroups) else [layer]
    return any(part.needs.unrotated_keys for part in parts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _method_run(
    layers, budget: int | None, model: FunctionalModel, tokens, positions, truth: tuple[Truth, ...]
) -> tuple[Float[Array, "L B H"], Float[Array, "L B"]]:
    """Recall and error of a method's caches, fed with the full run."""
    _, caches = read_prompt(model, layers, tokens, positions, max_new=len(truth[0].output))

    def step(position, caches, truth):
        found = [
            _judge(*each, position, budget) for each in zip(layers, caches, truth, strict=True)
        ]
        caches, recall, error = zip(*found, strict=True)
        return position + 1, caches, (jnp.stack(recall), jnp.stack(error))

    _, _, found = scan_steps(step, positions.max(-1) + 1, caches, truth)
    return tuple(x.mean(0) for x in found)


def _judge(layer: KVTransform, cache: Cache, truth: Truth, position, budget: int | None):
    """One layer's cache after the new token, its recall and its error."""
    own = truth.record
    out, cache = attend(
        recorded(layer), record(cache), own.query, own.key, own.value, position[:, None],
        phase="decode", rope=own.rope, predicted_query=own.predicted, **own.options,
    )  # fmt: skip
    cache, records = unrecord(cache)
    held = looked_at(layer, records, truth.attention.shape[-1])
    recall = _recall(truth.attention, held, held.sum(-1) if budget is None else budget)
    return cache, recall, attention_error(out, truth.output)
