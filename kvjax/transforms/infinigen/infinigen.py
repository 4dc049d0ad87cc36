"""InfiniGen: attends to tokens whose scores are predicted from few channels (arXiv 2406.19707)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.cache.payload import write_slots
from kvjax.cache.selection import keep_best, newest
from kvjax.cache.slots import KVCache
from kvjax.calibration import Calibration, Learner
from kvjax.checks import check_number
from kvjax.decisions import Mark
from kvjax.devices import all_heads
from kvjax.protocol import Card, KVTransform, Needs, Step, View
from kvjax.serialization import named
from kvjax.transforms.infinigen.projections import (
    InfiniGenCalibration,
    WithQueries,
    find_projections,
)
from kvjax.transforms.recall import Recall, of_lists
from pallas_kernels.base.dispatch import GPU_KERNELS, choose_implementation

PARTIAL_KEYS = "partial_keys"  # name of the column of partial keys, k P
EXACT: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST}  # for products with partial keys


@named("infinigen")
@dataclass(frozen=True)
class InfiniGen(Recall, Learner):
    """Keeps everything, and attends to the tokens whose attention scores are predicted to be high.

    A calibration gives each KV head a projection P `[D, r]` to the few channels in which queries
    and keys are strongest. Every slot stores its partial key, `k P`, beside the key. A decode step
    scores every earlier token s,

        score[s] = 1/G Σ_g (q[g] P) · (k[s] P) / √D,

    and attends to the `count` best (ties go to the lower position) and to the step's own token. All
    heads of a row have the same count. Let n be the largest number of earlier tokens of any head of
    the row; then

        count = min(⌊mean over heads of #{s: score[s] ≥ max score − α}⌋, ⌊budget · n⌋), at least 1.

    q is a prediction itself where the model gives one: the layer's query weights times the input of
    the attention before it. So slots can be fetched while the layer below is computed. With other
    models, q is the query of the step. In attention with a sliding window, only tokens inside the
    window count as earlier tokens.

    Args:
      budget: most earlier tokens to attend to: a share of the row's tokens so far, 0.2 as in the
        paper, or a number.
      alpha: distance from the highest score within which a token counts; None: `budget` alone
        decides. The paper takes 5 for Llama and 4 for OPT. Where attention sinks score far above
        everything else, such values leave little but the sinks.
      calibration: of this model, or the path of its file; None: `kvjax.calibrated` makes it.
      per_query_head: every query head chooses its own tokens. False: the mean over the group
        decides for a KV head.
      dense_layers: layers that attend to everything. Give `()` to a model of two layers.
      channels: share of the channels that a calibration takes, once for queries and once for keys;
        0.2 as in the authors' code.

    Raises:
      TypeError, ValueError: a number out of range; from `bind`, a calibration of a model with
        another number of layers; from `init_cache`, no calibration, or one of other heads.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> tx = kvjax.calibrated(kvjax.InfiniGen(), model, [list(range(64))])
      >>> layers = kvjax.bind(tx, model.num_layers)
      >>> [type(layer).__name__ for layer in layers]
      ['Full', 'Full', 'InfiniGen']

    References:
      Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
      Cache Management, OSDI 2024, arXiv 2406.19707.

    Deviations from the paper:
      `alpha` is None by default, which leaves out the first term of `count`. Channels are chosen
      once, from the calibration sample, and not at each prompt. The projection is applied to
      rotated queries and keys, not to their weights. With grouped queries the default is one choice
      per KV head. Nothing is prefetched, and there is no pool of limited size that evicts: with
      `Offload`, a step fetches what it selects.
    """

    budget: Budget = 0.2
    alpha: float | None = None
    calibration: InfiniGenCalibration | str | None = None
    per_query_head: bool = False
    dense_layers: tuple[int, ...] = (0, 1)
    channels: float = 0.2

    minimum: ClassVar[int] = 1
    learns = ("calibration", InfiniGenCalibration)
    dtype: ClassVar[str] = "float32"  # what it learns should not depend on how keys are stored
    card = Card(
        acts="prompt, every step", paper="InfiniGen, arXiv 2406.19707", when="later",
        small={"alpha": None}, unscored=("alpha", "per_query_head", "dense_layers"),
    )  # fmt: skip

    @property
    def needs(self) -> Needs:
        """The predicted query."""
        return Needs(predicted_query=True)

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget, self.minimum, "one token")
        if self.alpha is not None:
            check_number("alpha", self.alpha, above=0)
        check_number("channels", self.channels, above=0, most=1)
        self.check_learned()

    def planned(self, model: Any) -> InfiniGen:
        """Returns the method with the largest number of channels that it can learn."""
        channels = min(2 * max(1, int(self.channels * model.head_dim)), model.head_dim)
        shape = model.num_layers, model.kv_heads, model.head_dim, channels
        return self.with_learned(InfiniGenCalibration(np.zeros(shape, np.float32)))

    def reader(self, model: Any, lengths: Sequence[int]) -> KVTransform:
        """Returns the full cache, which is read with all queries."""
        return WithQueries(max(lengths))

    def observe(self, reader: KVTransform, cache: KVCache, state: Any, step: Step) -> tuple:
        """Returns queries and keys, with their positions."""
        return step.query[0], step.query_position[0], cache.k.read()[0], cache.position[0]

    def learn(self, model: Any, observed: Sequence[Sequence[Any]]) -> InfiniGenCalibration:
        """Finds the strongest channels of every head, over all texts."""
        return find_projections(observed, self.channels)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the method itself, or `Full` for a dense layer."""
        # `is_bound` asks for layer 0 of 1, which must not fail for a method that is bound.
        if isinstance(self.calibration, Calibration) and num_layers != 1:
            self.calibration.check_model(num_layers)
        return super().for_layer(layer, num_layers)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Float[Array, "H D r"]]:
        """Makes the column of partial keys; the state is the layer's projections."""
        projections = self._projections(cache, layer)
        longest = min(most_slots(self.budget, cache.slots, self.minimum), cache.slots)
        # One more entry, for the step's own token.
        cache = self.with_lists(cache, max(longest, 1) + 1)
        shape = (*cache.shape, projections.shape[-1])
        # In the dtype of keys: every step reads the whole column.
        partial = jnp.zeros(shape, cache.k.dtype)
        return cache.with_column(PARTIAL_KEYS, partial, merge="keep"), projections

    def _projections(self, cache: KVCache, layer: int) -> Float[Array, "H D r"]:
        """Returns the projections of a layer; raises if they do not fit the cache."""
        calibration, (_, kv_heads, _, head_dim) = self.calibration, cache.k.shape
        if not isinstance(calibration, InfiniGenCalibration):
            raise self.unlearned()
        expected = max(calibration.shape[0], layer + 1), kv_heads, head_dim
        if (*calibration.shape, calibration.head_dim) != expected:
            raise ValueError(
                f"{calibration!r} is of another model: expected {kv_heads} KV heads of {head_dim} "
                f"channels, and a layer {layer}"
            )
        return jnp.asarray(calibration.projections[layer])

    def select(self, view: View, state: Array, query: Array) -> tuple[View, Array]:
        """Selects the tokens with the highest predicted scores, and the step's own token."""
        cache, slots, length = self._with_new_token(view, state), view.slots, view.cache.lists[1]
        new_token = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2) == slots
        visible = cache.live if view.window is None else newest(cache, view.window)
        earlier = visible & ~new_token
        score = self._scores(cache, state, query if view.predicted is None else view.predicted)
        count = self._count(cache, score, earlier)
        earlier, position = (of_lists(x, cache) for x in (earlier, cache.position))
        unroll = choose_implementation(view.implementation, for_tpu=True) in GPU_KERNELS
        best = keep_best(score, earlier, position, count, unroll=unroll)
        new_slot = of_lists(jnp.where(slots < cache.slots, slots, -1), cache)
        index = jnp.concatenate((_slot_list(best, length - 1), new_slot), axis=-1)
        return dataclasses.replace(view, cache=cache).take(index), state

    def _with_new_token(self, view: View, projections: Array) -> KVCache:
        """Writes the partial key of the new token.

        This happens before attention and not in `on_step`. There the column would be written after
        the scores have been read; since the data do not show XLA that order, it would copy the
        whole column in every step.
        """
        cache, slots = view.cache, view.slots
        partial = _project(cache.k.read(jnp.minimum(slots, cache.slots - 1)), projections)
        column = write_slots(cache.column(PARTIAL_KEYS), slots, partial)
        return cache.with_column(PARTIAL_KEYS, column)

    def _scores(self, cache: KVCache, projections: Array, query: Array) -> Float[Array, "B K S"]:
        """Returns the predicted scores of all slots, for each list."""
        query = query.reshape(*cache.shape[:2], cache.group, -1).astype(jnp.float32)
        if not self.per_query_head:
            query = query.mean(2, keepdims=True)  # the mean of q·k is the mean q times k
        keys = cache.column(PARTIAL_KEYS).astype(jnp.float32)
        score = jnp.einsum("bhgr,bhsr->bhgs", _project(query, projections), keys, **EXACT)
        return score.reshape(score.shape[0], -1, cache.slots) / cache.k.shape[3] ** 0.5

    def _count(
        self, cache: KVCache, score: Float[Array, "B K S"], earlier: Bool[Array, "B H S"]
    ) -> Int[Array, " B"]:
        """Returns the number of earlier tokens that every list of a row gets."""
        longest = all_heads(earlier.sum(-1, dtype=jnp.int32), cache.heads).max(-1)
        limit = rows_budget(self.budget, longest, cache.slots, self.minimum)
        if self.alpha is not None:
            earlier = of_lists(earlier, cache)
            highest = jnp.where(earlier, score, -jnp.inf).max(-1, keepdims=True)
            near = earlier & (score >= highest - self.alpha)
            lists = cache.lists[0]
            near = all_heads(near.sum(-1, dtype=jnp.int32), lists).sum(1, dtype=jnp.int32)
            limit = jnp.minimum(near // lists, limit)
        return jnp.maximum(limit, 1)

    def on_prompt(self, cache: KVCache, state: Array, step: Step) -> tuple[Mark, Array]:
        """Computes the partial keys of all slots."""
        # Keys are read from the cache and not taken from `step.keys`: an earlier part of a chain
        # may have merged some since attention saw them.
        partial = _project(cache.k.read(), state).astype(cache.k.dtype)
        return Mark({PARTIAL_KEYS: partial}), state


def _project(x: Float[Array, "B H N D"], projections: Float[Array, "H D r"]) -> Array:
    """Returns `x P`, head by head, in float32."""
    return jnp.einsum("bhnd,hdr->bhnr", x.astype(jnp.float32), projections, **EXACT)


def _slot_list(chosen: Bool[Array, "B K S"], length: int) -> Int[Array, "B K N"]:
    """Lists the numbers of the chosen slots in ascending order, padded with -1."""
    slot = jnp.arange(chosen.shape[2], dtype=jnp.int32)
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1, length)
    scatter = jax.vmap(
        jax.vmap(lambda place: jnp.full(length, -1, jnp.int32).at[place].set(slot, mode="drop"))
    )
    return scatter(place)
