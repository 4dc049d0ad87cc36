"""Fidelity of a method's attention to the full cache's: recall, and error of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.attend import attend
from kvjax.attention.dropped import check_dropped
from kvjax.attention.flush import flush_interval
from kvjax.attention.layer import Cache
from kvjax.checks import check_count
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.devices import automatic
from kvjax.generation.context import Context
from kvjax.generation.documents import Document
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import check_prompts
from kvjax.generation.steps import scan_steps
from kvjax.protocol import Full, KVTransform

from .full_run import FullRun, Truth, Turn
from .recording import holds, looked_at, record, unrecord


@automatic()
def recall_rate(
    attention: Float[Array, "B Q L"],
    kept: Int[Array, "B H S"],
    budget: int | Int[Array, "B H"],
) -> Float[Array, "B H"]:
    """Returns the share of the most attended tokens that a cache kept or selected.

    The attention of a KV head is `a[s] = Σ_g p[g, s]`, summed over the G = Q / H query heads of its
    group. T is the set of the `budget` tokens with the highest a; ties go to the lower position.
    Then `recall = |T ∩ kept| / |T|`.

    T holds only tokens that got any attention. So padding and tokens outside a sliding window never
    count, and a row with fewer tokens than the budget is measured against all its tokens. If T is
    empty, the recall is 1.

    Args:
      attention: probabilities of the full cache by token position, `[B, Q, L]`; 0 where a row has
        no token.
      kept: token positions that were kept or selected, `[B, H, S]`, -1 = none. A position that
        occurs twice counts once.
      budget: number of tokens in T, 1 to L; or one number per row and KV head, `[B, H]`, where any
        number from L on means all tokens.

    Returns:
      Recall in [0, 1], `[B, H]` float32.

    Raises:
      TypeError: `budget` is neither an int nor an array of ints, or `kept` has no ints.
      ValueError: the shapes do not match, or an int budget is outside 1 to L.

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
    """Computes `recall_rate` from a mark for each token that was kept."""
    batch, kv_heads, length = held.shape
    total = attention.reshape(batch, kv_heads, -1, length).astype(jnp.float32).sum(2)
    # The second argsort inverts the first one, and so gives the rank of each position.
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
    """Returns the relative error of an attention output, `‖output − full‖₂ / ‖full‖₂` per row.

    The norms are taken over all axes but the rows (heads, tokens and channels) in float32. If the
    full output of a row is 0, the error is 0 if `output` is 0 too, and else infinite.

    Args:
      output: output of the compressed cache, `[B, Q, T, D]` or any shape with rows first.
      full: output of the full cache for the same queries, of the same shape.

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
    distance, size = (jnp.linalg.norm(x, axis=1) for x in (output - full, full))
    return jnp.where(distance == 0, 0.0, distance / size)  # 0 / 0 counts as no error


class Fidelity(NamedTuple):
    """Fidelity of a method's attention to the full cache's, layer by layer.

    `measure_fidelities` returns one for each method. L layers, B rows, H KV heads.

    Args:
      recall: `recall_rate` of each layer, row and KV head, `[L, B, H]`.
      error: `attention_error` of each layer and row, `[L, B]`.
      head_error: `attention_error` of each KV head, taken over the outputs of its query heads,
        `[L, B, H]`.

    Example:
      >>> import numpy as np
      >>> from kvjax.evaluation import Fidelity
      >>> error = np.array([[0.25], [0.5]])  # 2 layers, 1 row
      >>> fidelity = Fidelity(recall=np.ones((2, 1, 2)), error=error,
      ...                     head_error=np.array([[[0.0, 0.25]], [[0.5, 0.25]]]))
      >>> float(fidelity.error.mean()), int(fidelity.error.mean(1).argmax())  # the worst layer
      (0.375, 1)
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
    document: Document | None = None,
) -> list[Fidelity]:
    """Measures recall and attention error of methods at the first tokens after a prompt.

    The model reads the prompts once for all methods (see `kvjax.evaluation.ReadOnce`) and decodes
    greedily with the full cache. In each layer of that run, the new token's query, key and value go
    to the full cache and to each method's cache of the same layer. Methods that select by the query
    that the layer below predicts get that query too. So every layer is judged alone: an error of a
    lower layer does not reach the queries of a higher one and is not counted again. (A method that
    drops hidden states between layers, such as PyramidInfer, still changes what its higher layers
    read.)

    Recall is about the slots that attention looked at before anything was evicted for the new
    token: all live slots and the new token's own, or those that the method selected. A merged slot
    counts as the token whose position it has.

    Questions at the end of the prompts are compressed with them. `questions` are not: they follow
    the compressed prompts as a further turn, and the new tokens come after that turn. Each layer
    gets the turn's inputs from the run with the full cache.

    Code is compiled once for each kind of layer, longest prompt and question, batch and number of
    new tokens. The run with the full cache is compiled once for all methods.

    Args:
      model: as for `kvjax.generate`.
      transforms: the methods.
      prompts: token ids of each row; rows may differ in length.
      budget: number of the most attended tokens that should have been kept, see `recall_rate`; at
        most the longest row's tokens and the new ones. None: as many as the method looked at, per
        layer, row and head.
      new_tokens: number of decode steps to average over; the first one by default.
      questions: token ids that follow the prompt of each row; none by default.
      document: as in `kvjax.read`.

    Returns:
      For each method, means over the new tokens.

    Raises:
      TypeError, ValueError: raised before anything is computed, if `kvjax.generate` raises for the
        prompts and questions, if the numbers of questions and prompts differ, if a budget or number
        of tokens is out of range, or if a transform keeps keys unrotated and the model gives
        `attend` rotated ones.

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
    run = FullRun(
        functional, prompts, transforms, new_tokens=new_tokens, questions=questions,
        document=document,
    )  # fmt: skip
    return [judge(run, run.context(transform), budget) for transform in transforms]


def check_run(
    model: FunctionalModel,
    transforms: Sequence[KVTransform],
    prompts: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]] | None,
    new_tokens: int,
) -> int:
    """Checks the inputs of a `FullRun`; returns the number of tokens of the longest row."""
    for transform in transforms:
        bind(transform, model.num_layers)  # raises for a transform that does not fit the model
    check_count("new_tokens", new_tokens, 1)
    # The full cache reads the prompts too, so they must fit the model's positions even if a method
    # could go beyond them.
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
    """Measures a method's caches against a run.

    Args:
      run: the run with the full cache.
      context: the run's prompts in the caches of the method.
      budget: as in `measure_fidelities`.

    Raises:
      RuntimeError: as `kvjax.check_dropped`.
    """
    # Layers are judged one by one but flushed together, as often as the most frequent one needs.
    interval = flush_interval(context.held)
    turns = run.turns or [None] * len(context.layers)
    layers = zip(context.layers, context.caches, turns, run.truth, strict=True)
    figures = []
    for layer, cache, turn, truth in layers:
        cache, *of_layer = _judge_layer(layer, budget, interval, cache, turn, truth, run.start)
        check_dropped(cache)
        figures.append(of_layer)
    return Fidelity(*(np.stack(part) for part in zip(*figures, strict=True)))


@compiled(static_argnums=(0, 1, 2))
def _judge_layer(
    layer: KVTransform,
    budget: int | None,
    interval: int | None,
    cache: Cache,
    turn: Turn | None,
    truth: Truth,
    start: Int[Array, " B"],
) -> tuple[Cache, Float[Array, "B H"], Float[Array, " B"], Float[Array, "B H"]]:
    """Feeds a layer's cache with the full run; returns it, recall, error and error by head."""
    if turn is not None:
        _, cache = attend(
            cache, turn.query, turn.key, turn.value, turn.position,
            phase="prompt", rope=turn.rope, sinks=turn.options.sinks, **turn.options.static,
        )  # fmt: skip

    def step(position, cache, truth):
        cache, figures = _judge_step(layer, cache, truth, position, budget)
        return position + 1, cache, figures

    _, cache, figures = scan_steps(step, start, cache, truth, interval)
    return cache, *(x.mean(0) for x in figures)


def _judge_step(layer: KVTransform, cache: Cache, truth: Truth, position, budget: int | None):
    """Feeds a layer's cache with a new token; returns it, its recall, error and error by head."""
    inputs = truth.record
    out, cache = attend(
        record(cache), inputs.query, inputs.key, inputs.value, position[:, None],
        phase="decode", rope=inputs.rope, predicted_query=inputs.predicted,
        sinks=inputs.options.sinks, implementation=inputs.implementation, **inputs.options.static,
    )  # fmt: skip
    cache, records = unrecord(cache)
    held = looked_at(layer, cache, records, truth.attention.shape[-1])
    recall = _recall(truth.attention, held, held.sum(-1) if budget is None else budget)
    batch, heads = held.shape[:2]
    by_head = (x.reshape(batch, heads, -1) for x in (out, truth.output))
    head_error = jax.vmap(attention_error, in_axes=1, out_axes=1)(*by_head)
    return cache, (recall, attention_error(out, truth.output), head_error)
