"""What a method keeps of the full cache's attention: its recall, and the error of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.attend import attend
from kvjax.attention.flush import flush_interval
from kvjax.attention.layer import Cache
from kvjax.checks import check_count
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.devices import automatic
from kvjax.generation.context import Context
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import check_prompts
from kvjax.generation.steps import scan_steps
from kvjax.protocol import Full, KVTransform

from .full_run import FullRun, Truth, Turn
from .recording import holds, looked_at, record, recorded, unrecord


@automatic()
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


@automatic()
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
      head_error: the same of each KV head: of the outputs of its query heads alone, `[L, B, H]`.
    """

    recall: Float[np.ndarray, "L B H"]
    error: Float[np.ndarray, "L B"]
    head_error: Float[np.ndarray, "L B H"]


@automatic()
def measure_fidelities(
    model: LanguageModel | FunctionalModel,
    transforms: Sequence[KVTransform],
    prompts: Sequence[Sequence[int]],
    *,
    budget: int | None = None,
    new_tokens: int = 1,
    questions: Sequence[Sequence[int]] | None = None,
) -> list[Fidelity]:
    """Recall and attention error of methods at the first tokens after a prompt.

    The model reads the prompts once, for all methods together (see `kvjax.evaluation.ReadOnce`),
    and goes on greedily with the full cache. In each layer of that run the new token's query, key
    and value go to the full cache and to each method's cache of the same layer, and with them the
    query that the layer below predicts, for methods that select by it. So every layer is judged
    alone: what a lower layer gets wrong does not reach the queries of a higher one and is not
    counted again. (A method that drops hidden states between layers, as PyramidInfer does, still
    changes what its higher layers read.)

    Recall compares with what attention looked at before anything was evicted for the new token: all
    live slots and the new token's own, or those that the method selected. A merged slot counts as
    the token whose position it has.

    Questions that stand at the end of the prompts are compressed with them. `questions` are not:
    they follow the compressed prompts as a further turn, whose tokens each layer gets as the full
    cache's run gives them, and the new tokens come after that.

    Code is compiled once for each kind of layer, longest prompt and question, batch and number of
    new tokens. The full cache's run is compiled once for all methods.

    Args:
      model: as for `kvjax.generate`.
      transforms: the methods.
      prompts: token ids of each row; rows may differ in length.
      budget: tokens with the most attention that should have been kept, see `recall_rate`; at most
        the longest row's tokens and the new ones. None: as many as the method looked at, per
        layer, row and head.
      new_tokens: decode steps to average over; the first one by default.
      questions: token ids that follow the prompt of each row; none by default.

    Returns:
      For each method, means over the new tokens.

    Raises:
      TypeError, ValueError: before anything is computed: what `kvjax.generate` raises for prompts
        and questions, another number of questions than of prompts, a budget or number of tokens out
        of range, a transform that keeps keys unrotated with a model that gives `attend` rotated
        ones.

    Example:
      >>> import kvjax
      >>> from kvjax.evaluation import measure_fidelities
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> methods = [kvjax.Full(), kvjax.H2O(budget=8)]
      >>> full, h2o = measure_fidelities(
      ...     model, methods, [list(range(32))], questions=[[4, 2]])
      >>> full.head_error.shape, bool(h2o.error.min() > 0)
      ((2, 1, 2), True)
    """
    functional = as_functional(model)
    longest = check_run(functional, transforms, prompts, questions, new_tokens)
    if budget is not None:
        check_count("budget", budget, 1)
        if budget > longest + new_tokens:
            raise ValueError(
                f"budget must be at most the {longest + new_tokens} tokens of the longest row, "
                f"got {budget}"
            )
    run = FullRun(functional, prompts, transforms, new_tokens=new_tokens, questions=questions)
    return [judge(run, run.context(transform), budget) for transform in transforms]


def check_run(
    model: FunctionalModel,
    transforms: Sequence[KVTransform],
    prompts: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]] | None,
    new_tokens: int,
) -> int:
    """Tokens of the longest row; raises where a `FullRun` cannot be made of these."""
    for transform in transforms:
        bind(transform, model.num_layers)
    check_count("new_tokens", new_tokens, 1)
    # The full cache reads the prompts too, whatever positions a method could go beyond.
    check_prompts(model, prompts, (Full(),), new_tokens)
    if questions is None:
        return max(map(len, prompts))
    if len(questions) != len(prompts):
        raise ValueError(
            f"there must be a question for each of the {len(prompts)} prompts, got {len(questions)}"
        )
    check_prompts(model, questions, (Full(),), new_tokens)
    rows = [[*prompt, *question] for prompt, question in zip(prompts, questions, strict=True)]
    check_prompts(model, rows, (Full(),), new_tokens)
    return max(map(len, rows))


def judge(run: FullRun, context: Context, budget: int | None = None) -> Fidelity:
    """Recall and error of a method's caches that hold the prompts of a run; see there."""
    interval = flush_interval(context.caches)
    turns = run.turns or [None] * len(context.layers)
    of_layers = zip(context.layers, context.caches, turns, run.truth, strict=True)
    judged = [
        _judge_layer(layer, budget, interval, cache, turn, truth, run.start)
        for layer, cache, turn, truth in of_layers
    ]
    return Fidelity(*(np.stack(part) for part in zip(*judged, strict=True)))


@compiled(static_argnums=(0, 1, 2))
def _judge_layer(
    layer: KVTransform,
    budget: int | None,
    interval: int | None,
    cache: Cache,
    turn: Turn | None,
    truth: Truth,
    start: Int[Array, " B"],
) -> tuple[Float[Array, "B H"], Float[Array, " B"], Float[Array, "B H"]]:
    """Recall, error and error by head of one layer's cache, fed with the full run."""
    if turn is not None:
        _, cache = attend(
            layer, cache, turn.query, turn.key, turn.value, turn.position,
            phase="prompt", rope=turn.rope, sinks=turn.options.sinks, **turn.options.static,
        )  # fmt: skip

    def step(position, cache, truth):
        cache, figures = _judge_step(layer, cache, truth, position, budget)
        return position + 1, cache, figures

    _, _, figures = scan_steps(step, start, cache, truth, interval)
    return tuple(x.mean(0) for x in figures)


def _judge_step(layer: KVTransform, cache: Cache, truth: Truth, position, budget: int | None):
    """A layer's cache after a new token, its recall, its error and its error by head."""
    fed = truth.record
    out, cache = attend(
        recorded(layer), record(cache), fed.query, fed.key, fed.value, position[:, None],
        phase="decode", rope=fed.rope, predicted_query=fed.predicted, sinks=fed.options.sinks,
        **fed.kernel_options,
    )  # fmt: skip
    cache, records = unrecord(cache)
    held = looked_at(layer, records, truth.attention.shape[-1])
    recall = _recall(truth.attention, held, held.sum(-1) if budget is None else budget)
    batch, heads = held.shape[:2]
    by_head = (x.reshape(batch, heads, -1) for x in (out, truth.output))
    head_error = jax.vmap(attention_error, in_axes=1, out_axes=1)(*by_head)
    return cache, (recall, attention_error(out, truth.output), head_error)
