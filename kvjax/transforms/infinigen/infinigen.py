"""InfiniGen: what attention will look at, predicted from few channels (arXiv 2406.19707)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.cache.payload import write_slots
from kvjax.cache.selection import keep_best, newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_number
from kvjax.decisions import Mark
from kvjax.devices import all_heads
from kvjax.protocol import KVTransform, Needs, Step, View
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from kvjax.transforms.recall import Recall, of_lists
from pallas_kernels.base.dispatch import GPU_KERNELS, choose_implementation

PARTIAL_KEYS = "partial_keys"  # the column k P
EXACT: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST}  # of products with partial keys


@dataclass(frozen=True)
class InfiniGen(Recall):
    """Keeps everything, and attends to the tokens whose attention scores are predicted to be high.

    A calibration gives each KV head a projection P `[D, r]` to a few channels in which queries and
    keys are strongest. Every slot has its partial key, `k P`, beside the key. A decode step scores
    every earlier token s,

        score[s] = 1/G Σ_g (q[g] P) · (k[s] P) / √D,

    and attends to the `count` best (ties go to the lower position) and to the step's own token.
    With n the most earlier tokens of any head of a row,

        count = min(⌊mean over heads of #{s: score[s] ≥ max score − α}⌋, ⌊budget · n⌋), at least 1,

    the same for all heads of the row. q is a prediction itself where the model gives one: the
    layer's query weights times the input of the attention before it, so that slots can be fetched
    while the layer below is computed. Other models' own query is used. In attention with a sliding
    window, the earlier tokens are those inside it.

    Args:
      budget: most earlier tokens to attend to: a share of the row's tokens so far, 0.2 as in the
        paper, or a number.
      alpha: distance from the highest score within which a token counts; None: `count` is what
        `budget` allows. The paper takes 5 for Llama and 4 for OPT; where attention sinks score far
        above everything else, that leaves little but the sinks.
      calibration: of this model, from `kvjax.calibrate_infinigen`. In `HeadGroups`, one with the
        heads of the group.
      per_query_head: every query head chooses its own tokens; else the mean over the group decides
        for a KV head.
      dense_layers: layers that stay as they are. Give `()` to a model of two layers.

    Raises:
      TypeError, ValueError: a number out of range; from `bind`, a calibration of a model of other
        layers; from `init_cache`, none, or one of other heads.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> calibration = kvjax.calibrate_infinigen(model, [list(range(64))])
      >>> layers = kvjax.bind(kvjax.InfiniGen(calibration=calibration), model.num_layers)
      >>> [type(layer).__name__ for layer in layers]
      ['Full', 'Full', 'InfiniGen']

    References:
      Lee et al., InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
      Cache Management, OSDI 2024, arXiv 2406.19707.

    Deviations from the paper:
      `alpha` is None by default, and the first term of `count` is left out. Channels are chosen
      once, on the sample, and not at each prompt. The projection is applied to rotated queries and
      keys, not to their weights. With grouped queries the default is one choice per KV head.
      Nothing is prefetched, and no pool of limited size evicts: with `Offload`, a step fetches what
      it selects.
    """

    budget: Budget = 0.2
    alpha: float | None = None
    calibration: InfiniGenCalibration | None = None
    per_query_head: bool = False
    dense_layers: tuple[int, ...] = (0, 1)

    minimum: ClassVar[int] = 1
    paper: ClassVar[str] = "InfiniGen, arXiv 2406.19707"
    needs = property(lambda self: Needs(predicted_query=True))

    def __post_init__(self):
        super().__post_init__()
        check_budget(self.budget, self.minimum, "one token")
        if self.alpha is not None:
            check_number("alpha", self.alpha, above=0)
        if not isinstance(self.calibration, InfiniGenCalibration | None):
            raise TypeError(
                "calibration must be what kvjax.calibrate_infinigen returns, got "
                f"{self.calibration!r:.80}"
            )

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Itself, or `Full` for a dense layer."""
        found = self.calibration
        # One that is bound already is asked for the only layer of one, to see whether it is.
        if found is not None and num_layers not in (found.num_layers, 1):
            raise ValueError(
                f"a calibration for another model: {found!r}, expected {num_layers} layers"
            )
        return super().for_layer(layer, num_layers)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Float[Array, "H D r"]]:
        """A column for partial keys, and the layer's projections as the state."""
        projections = self._projections(cache, layer)
        longest = min(most_slots(self.budget, cache.slots, self.minimum), cache.slots)
        # One entry more is that of the step's own token.
        cache = self.with_lists(cache, max(longest, 1) + 1)
        shape = (*cache.shape, projections.shape[-1])
        partial = jnp.zeros(shape, cache.k.dtype)  # rounded as keys are, and as costly to read
        return cache.with_column(PARTIAL_KEYS, partial, merge="keep"), projections

    def _projections(self, cache: KVCache, layer: int) -> Float[Array, "H D r"]:
        """Those of a layer, checked against the cache."""
        found, (_, kv_heads, _, head_dim) = self.calibration, cache.k.shape
        if found is None:
            raise ValueError(
                "InfiniGen needs the calibration of its model: give calibration="
                "kvjax.calibrate_infinigen(model, sample)"
            )
        if (found.kv_heads, found.head_dim) != (kv_heads, head_dim):
            raise ValueError(
                f"a calibration for another model: {found!r}, expected {kv_heads} KV heads of "
                f"{head_dim} channels"
            )
        if layer >= found.num_layers:
            raise ValueError(f"a calibration for another model: {found!r}, given layer {layer}")
        return jnp.asarray(found.projections[layer])

    def select(self, view: View, state: Array, query: Array) -> tuple[View, Array]:
        """The tokens of the highest predicted scores, and the step's own."""
        cache, slots, length = self._add(view, state), view.slots, view.cache.lists[1]
        own = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2) == slots
        seen = cache.live if view.window is None else newest(cache, view.window)
        earlier = seen & ~own
        score = self._scores(cache, state, query if view.predicted is None else view.predicted)
        count = self._count(cache, score, earlier)
        earlier, position = (of_lists(x, cache) for x in (earlier, cache.position))
        unroll = choose_implementation(view.implementation, for_tpu=True) in GPU_KERNELS
        best = keep_best(score, earlier, position, count, unroll=unroll)
        new = of_lists(jnp.where(slots < cache.slots, slots, -1), cache)
        index = jnp.concatenate((_listed(best, length - 1), new), axis=-1)
        return dataclasses.replace(view, cache=cache).take(index), state

    def _add(self, view: View, projections: Array) -> KVCache:
        """The cache with the partial key of the new token.

        Not in `on_step`: written after the scores are read, in an order that XLA does not see in
        the data, the whole column would be copied at every step.
        """
        cache, slots = view.cache, view.slots
        new = _project(cache.k.read(jnp.minimum(slots, cache.slots - 1)), projections)
        return cache.with_column(PARTIAL_KEYS, write_slots(cache.column(PARTIAL_KEYS), slots, new))

    def _scores(self, cache: KVCache, projections: Array, query: Array) -> Float[Array, "B K S"]:
        """Predicted scores of all slots, of each list."""
        query = query.reshape(*cache.shape[:2], cache.group, -1).astype(jnp.float32)
        if not self.per_query_head:
            query = query.mean(2, keepdims=True)  # the mean of q·k is the mean q times k
        keys = cache.column(PARTIAL_KEYS).astype(jnp.float32)
        score = jnp.einsum("bhgr,bhsr->bhgs", _project(query, projections), keys, **EXACT)
        return score.reshape(score.shape[0], -1, cache.slots) / cache.k.shape[3] ** 0.5

    def _count(
        self, cache: KVCache, score: Float[Array, "B K S"], earlier: Bool[Array, "B H S"]
    ) -> Int[Array, " B"]:
        """How many earlier tokens every list of a row gets."""
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
        """Partial keys of all slots."""
        # Not `step.keys`: an earlier part of a chain may have merged slots since.
        partial = _project(cache.k.read(), state).astype(cache.k.dtype)
        return Mark({PARTIAL_KEYS: partial}), state


def _project(x: Float[Array, "B H N D"], projections: Float[Array, "H D r"]) -> Array:
    """`x P`, head by head, in float32."""
    return jnp.einsum("bhnd,hdr->bhnr", x.astype(jnp.float32), projections, **EXACT)


def _listed(chosen: Bool[Array, "B K S"], length: int) -> Int[Array, "B K N"]:
    """Numbers of the chosen slots, ascending, padded with -1."""
    slot = jnp.arange(chosen.shape[2], dtype=jnp.int32)
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1, length)
    put = jax.vmap(
        jax.vmap(lambda place: jnp.full(length, -1, jnp.int32).at[place].set(slot, mode="drop"))
    )
    return put(place)
