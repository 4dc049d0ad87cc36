"""SnapKV: keeps the prompt tokens that the end of the prompt attends to (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.budgets.budgets import Budget, check_budget
from kvjax.budgets.layers import Table
from kvjax.cache.selection import newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_choice, check_count
from kvjax.decisions import Keep
from kvjax.protocol import Card, GroupReduce, Needs, Step
from kvjax.serialization import named
from kvjax.transforms.held_budget import PromptBudget
from kvjax.transforms.pooling import Pooling, check_kernel, pool
from pallas_kernels import Queries, Seen, column_sums, prompt_attention
from pallas_kernels.attention.call import join_sinks

MOST_WINDOW = 2**16
"""Largest observation window: each of its queries attends over the whole prompt."""


@named("snapkv")
@dataclass(frozen=True)
class SnapKV(PromptBudget):
    """Keeps the prompt tokens that the last prompt queries attend to, and those queries' own.

    The last W tokens of the prompt are the observation window; the tokens before it are the prefix.
    The window's queries attend over all keys. A prefix token's score is the mean over the window of
    the probability that it received, `a[s] = 1/W · Σ_t p[t, s]`. Scores are pooled along positions,
    over `kernel` neighbours within the prefix, for each query head; a KV head takes the mean over
    its group. The best `budget - W` prefix tokens stay, and the W newest. Decoding evicts nothing.

    Args:
      budget: slots kept of the prompt per KV head, window included; generated tokens come on top. A
        float is a share of each row's tokens so far, of which no more than `max_prompt` count.
      window: observation window W. The default is 16, where the published LongBench setting is 32:
        a question is short, and the text before it attends to other things.
      kernel: pooling width, odd; 7, the published LongBench setting.
      pooling: `"max"` (published LongBench setting) or `"avg"`, which counts the zeros beyond both
        ends of the prefix. The authors' code defaults to a kernel of 5 and `"avg"`. Less pooling
        brings attention nearer to the full cache's, but fewer answers are found, because the
        neighbours of an observed token are needed next.
      group_reduce: how the scores of a KV head's query heads are combined; mean by default.

    Raises:
      TypeError, ValueError: `budget` is not a number, below `window + 1` or a share outside (0, 1];
        an even kernel or one above 4,095; a window above 65,536; an unknown pooling or reduction.

    Example:
      >>> import kvjax
      >>> kvjax.SnapKV(budget=0.25).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      1124

    References:
      Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469.

    Deviations from the paper:
      With grouped queries one decision is made per KV head. On a further turn everything live is
      compressed as if it were one prompt.
    """

    budget: Budget
    window: int = 16
    kernel: int = 7
    pooling: Pooling = "max"
    group_reduce: GroupReduce = "mean"

    card = Card(
        acts="prompt", paper="SnapKV, arXiv 2404.14469", when="now",
        examples=("--method snapkv --budget 0.5",), small={"window": 4, "kernel": 3},
    )  # fmt: skip
    minimum = property(lambda self: self.window + 1)  # the smallest workable budget

    @property
    def needs(self) -> Needs:
        """The last queries of a prompt."""
        return Needs(query_window=self.window)

    def __post_init__(self):
        check_count("window", self.window, 1, MOST_WINDOW)
        check_kernel(self.kernel)
        check_choice("pooling", self.pooling, get_args(Pooling))
        check_choice("group_reduce", self.group_reduce, get_args(GroupReduce))
        check_budget(self.budget, self.minimum, "window + 1")

    def on_prompt(self, cache: KVCache, state: Table, step: Step) -> tuple[Keep, Table]:
        """Keeps the newest tokens and the prefix tokens that they attend to most."""
        budget = self.rows_budget(cache, state)
        observed = window_attention(cache, step, self.window) / self.window
        prefix = cache.live & ~newest(cache, self.window)
        score = pool(observed, cache, prefix, self.kernel, self.pooling)
        return Keep(
            budget, by_query_head(score), newest=self.window, reduce=self.group_reduce
        ), state


def by_query_head(score: Float[Array, "B H G S"]) -> Float[Array, "B Q S"]:
    """Reshapes scores of groups to scores of query heads, `[B, H, G, S]` to `[B, Q, S]`.

    Args:
      score: scores of the G query heads of each KV head; Q is H · G.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> kvjax.kit.by_query_head(jnp.zeros((1, 2, 4, 9))).shape
      (1, 8, 9)
    """
    return score.reshape(score.shape[0], -1, score.shape[-1])


def window_attention(
    cache: KVCache, step: Step, window: int, weight: Float[Array, "B W"] | None = None
) -> Float[Array, "B H G S"]:
    """Sums the attention that each slot receives from the last `window` queries of the prompt.

    `Step` may hold more queries, for another part of a chain. With `weight`, each query's
    probabilities are multiplied by its weight; a weight of 0 leaves the query out.

    Args:
      cache: the cache of one layer.
      step: the step of a prompt's end, for a method whose `Needs` ask for `query_window`.
      window: W, number of queries.
      weight: weight of each query, the oldest first; None: 1.

    Returns:
      The sums of each slot in float32, for each of the G query heads of a KV head; free slots have
      0.

    Raises:
      ValueError: `Step` holds fewer queries, since the method's `needs` ask for fewer.

    Example:
      >>> from dataclasses import dataclass
      >>> import jax, jax.numpy as jnp, kvjax
      >>> from kvjax.kit import Keep, Needs, by_query_head, window_attention
      >>> @dataclass(frozen=True)
      ... class LastQuery(kvjax.kit.PromptBudget):
      ...     budget: int
      ...     minimum = 1
      ...     needs = property(lambda self: Needs(query_window=1))
      ...     def on_prompt(self, cache, state, step):
      ...         score = by_query_head(window_attention(cache, step, window=1))
      ...         return Keep(self.rows_budget(cache, state), score), state
      >>> cache = kvjax.init_cache(LastQuery(budget=2), batch=1, kv_heads=1, head_dim=4,
      ...                          max_prompt=6, max_new=0)
      >>> rows = jnp.broadcast_to(jnp.arange(6.0)[:, None], (1, 1, 6, 4))  # later keys draw more
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(6)[None], phase="prompt")
      >>> cache.kv.position.tolist()
      [[[4, 5]]]
    """
    if step.query.shape[2] < window:
        raise ValueError(
            f"window must be at most the {step.query.shape[2]} queries that `needs` ask for "
            f"(Needs.query_window), got {window}"
        )
    batch, kv_heads, _ = cache.shape
    q = step.query[:, :, -window:]
    q = q.reshape(batch, kv_heads, cache.group, *q.shape[2:])
    options: dict[str, Any] = {"mask": step.options.mask, "implementation": step.implementation}
    query_position = step.query_position[:, -window:]
    if weight is not None:
        query_position = jnp.where(weight > 0, query_position, -1)
    queries, seen = Queries(q, query_position), Seen(cache.log_mass, cache.position)
    # Two passes over the keys: a sum over queries needs the log-sum-exp of each query first.
    keys = cast(Array, step.keys)  # which a method that evicts has at a prompt
    _, lse = prompt_attention(queries, keys, None, seen, **options)
    lse, _ = join_sinks(step.options.sinks, lse, None)
    if weight is not None:  # exp(logit - (lse - log weight)) is weight times the probability
        lse = lse - jnp.log(jnp.where(weight > 0, weight, 1.0))[:, None, None]
    return column_sums(queries, keys, seen, lse, **options)
