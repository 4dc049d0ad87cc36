"""OwnQueries: keeps the tokens that a document's own queries look at, in the pass that reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.record import Record
from kvjax.cache.slots import KVCache, sorted_slots
from kvjax.checks import check_count, check_part
from kvjax.protocol import Card, Chunk, Needs, Probe, Step
from kvjax.serialization import named
from kvjax.transforms.document_budget import DocumentBudget, relative_size
from kvjax.transforms.kvzip.kvzip import KVzip
from pallas_kernels.base.logits import capped, finite_or_zero

# A token that few tokens follow would get a large mean from one of them that looks back.
LEAST_FOLLOWERS = 32


@dataclass(frozen=True)
class DocumentQueries(Probe):
    """Notes the document's queries, and the attention that they pay; nothing looks afterwards.

    The record has, by slot, `"received"`, summed over queries and averaged over the query heads of
    the slot's KV head, `[B, H, S]` float32, and `"query"`, the queries of its token, `[B, H, S, G,
    D]`.
    """

    received: ClassVar[bool] = True

    def empty(self, cache: KVCache) -> Record:
        """Makes the record of a document of which nothing has been read."""
        query = jnp.zeros((*cache.shape, cache.group, cache.k.shape[3]), cache.k.dtype)
        return Record(slots={"received": jnp.zeros(cache.shape, jnp.float32), "query": query})

    def read(self, record: Record, chunk: Chunk) -> Record:
        """Notes a chunk's queries and the attention that they pay to what has been read."""
        query = record.slots["query"]
        batch, heads, _, group, head_dim = query.shape
        new = chunk.query.reshape(batch, heads, group, -1, head_dim).swapaxes(2, 3)
        return Record(
            slots={
                "received": record.slots["received"] + chunk.received.mean(2),
                "query": write_slots(query, chunk.slots, new),
            }
        )


@named("own_queries")
@dataclass(frozen=True)
class OwnQueries(DocumentBudget):
    """Keeps the document tokens that the document itself uses, and those that it would quote.

    The document's own queries tell both while it is read, so that nothing is read twice. The use of
    a token is the mean attention that it receives from itself and the tokens after it. For a
    document of L tokens, token s, counted from 0, and the query heads g of a KV head,

        used[s] = Σ_{t ≥ s} mean_g p[g, t, s] / max(L − s, 32).

    A *virtual repetition* tells what would be quoted. If the document were repeated behind itself,
    the repetition would have nearly the same queries, turned by RoPE to positions that are L
    higher, q'. The document is cut into pieces of 256 tokens. The query at t attends with q' to the
    sinks and to its piece, and with q to the piece up to t, which stands for what the repetition
    has written so far:

        quoted[s] = max_{g, t} softmax_j([q'_t · k_j for sinks and piece; q_t · k_j for j ≤ t])[s]

    over all t in the piece of s. It is 0 for sinks, which draw attention without being quoted.
    Where a document is read as several prompts (`kvjax.read(piece=)`), its repetition stands behind
    all of it, so that queries are turned by the tokens of the whole document; in `used`, L counts
    those of the prompt.

    Both are multiplied by the size of a token's value relative to its head's, `‖v_s‖ / median_s
    ‖v_s‖`. The score is

        score[s] = quoted[s]^(1 − use) · used[s]^use.

    The best `budget` tokens of each head stay. `DocumentBudget` says how several documents share
    it, and what becomes of other prompts. `ByHead` shares a budget among heads by the scores of
    `KVzip`, whose profile is made once for a model. By scores of its own, heads that use all of a
    text a little would take the budget of those that quote.

    `kvjax.read` and `kvjax.generate` know which prompts are documents. A model of one's own calls
    `kvjax.begin_document` before the first tokens of one.

    Args:
      budget, sinks, window, room: as in `DocumentBudget`.
      use: weight of `used`, from 0 to 1; `quoted` has the rest.
      piece: tokens of a piece; 256.

    Raises:
      TypeError, ValueError: as in `DocumentBudget`; `use` is outside [0, 1], or `piece` is below 1.

    Example:
      >>> import kvjax
      >>> kvjax.OwnQueries(budget=0.1).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      765

    References:
      KVzip, arXiv 2505.23416, scores tokens by a repetition, H2O, arXiv 2306.14048, by sums of
      attention, and VATP, arXiv 2406.12335, by attention times the size of values. The composition
      is kvjax's own.

    Deviations from the paper:
      There is no paper. Unlike those of `KVzip`, scores are not averaged over neighbours: a mean
      over three tokens was measured to recover less of the prose (docs/results/documents.md). Where
      `attend` gets no `rope`, queries stay as they are, since a layer without positions has the
      same ones in a repetition. A model that rotates queries itself should give its `rope` to
      `attend`, or set `use=1`. A sliding window limits what is used, and not what is quoted.
    """

    use: float = 0.5
    piece: int = 256

    card = Card(
        acts="prompt", when="document", small={"sinks": 2, "window": 2, "room": 4, "piece": 8},
        unscored=("room",), profiled_by=KVzip,
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_part("use", self.use)
        check_count("piece", self.piece, 1)

    @property
    def needs(self) -> Needs:
        """The document's queries, and the attention that they pay."""
        return Needs(probe=DocumentQueries())

    def scores(
        self, cache: KVCache, state: Any, step: Step, document: Bool[Array, "B H S"]
    ) -> Float[Array, "B H S"]:
        """Scores a document's tokens by what it uses and what it would quote."""
        size = relative_size(cache.v.read(), document)
        in_order = sorted_slots(document, cache.position)  # slots of the document's tokens, first
        used = step.record.slots["received"] / _followers(document, in_order) * size
        quoted = self._quoted(cache, step, document, in_order) * size
        return quoted ** (1 - self.use) * used**self.use

    def _quoted(
        self,
        cache: KVCache,
        step: Step,
        document: Bool[Array, "B H S"],
        in_order: Int[Array, "B H S"],
    ) -> Float[Array, "B H S"]:
        """Returns the largest probability that each token receives in the virtual repetition."""
        length = document.sum(-1, dtype=jnp.int32)
        if step.document_length is not None:
            length = jnp.maximum(length, step.document_length[:, None])
        turned = _turned_back(step.keys, length, step)
        is_sink = cache.live & (cache.position < self.sinks)
        sinks = sorted_slots(is_sink, cache.position)[..., : self.sinks]
        sink_keys = take_slots(turned, sinks)
        sink_there = take_slots(is_sink, sinks)[:, :, None]
        so_far = jnp.tril(jnp.ones((self.piece, self.piece), bool))
        scale, _, soft_cap = step.options.mask
        learned = step.options.sinks

        def of_piece(piece: tuple[Array, Array]) -> Float[Array, "B H P"]:
            slots, there = piece
            query = take_slots(step.record.slots["query"], slots).astype(jnp.float32)
            own_keys = take_slots(step.keys, slots).astype(jnp.float32)
            keys = jnp.concatenate((take_slots(turned, slots), sink_keys, own_keys), 2)
            seen = [(there & ~take_slots(is_sink, slots))[:, :, None], sink_there, so_far]
            seen = [jnp.broadcast_to(x, (*cache.shape[:2], self.piece, x.shape[-1])) for x in seen]
            seen = jnp.concatenate(seen, -1) & there[..., None]
            logits = capped(jnp.einsum("bhpgd,bhnd->bhpgn", query, keys) * scale, soft_cap)
            logits = jnp.where(seen[:, :, :, None], logits, -jnp.inf)
            total = jax.nn.logsumexp(logits, axis=-1)
            if learned is not None:
                total = jnp.logaddexp(total, learned.reshape(1, cache.shape[1], 1, -1))
            # The largest probability is the exponential of the largest logarithm.
            to_piece = logits[..., : self.piece] - finite_or_zero(total)[..., None]
            return jnp.exp(to_piece.max((2, 3)))

        def cut(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % self.piece)))
            return jnp.moveaxis(x.reshape(*x.shape[:2], -1, self.piece), 2, 0)

        pieces = cut(in_order), cut(take_slots(document, in_order))
        received = jnp.moveaxis(jax.lax.map(of_piece, pieces), 0, 2)
        received = received.reshape(*cache.shape[:2], -1)[..., : cache.slots]
        return write_slots(jnp.zeros(cache.shape, jnp.float32), in_order, received)


def _turned_back(
    keys: Float[Array, "B H S D"], length: Int[Array, "B H"], step: Step
) -> Float[Array, "B H S D"]:
    """Returns keys, in float32, as queries meet them that are turned on by so many positions.

    Turning the keys back gives the same products. There are fewer keys than queries, and one angle
    for all of them.
    """
    keys = keys.astype(jnp.float32)
    if step.rope is None:
        return keys
    # Turning a key once more adds to its angle. Its length has been scaled already.
    return dataclasses.replace(step.rope, factor=1.0).rotate(keys, -length[..., None])


def _followers(
    document: Bool[Array, "B H S"], in_order: Int[Array, "B H S"]
) -> Float[Array, "B H S"]:
    """Returns how many of a document's queries see each token, itself included, or 32 if fewer."""
    length = document.sum(-1, keepdims=True, dtype=jnp.int32)
    followers = length - jax.lax.broadcasted_iota(length.dtype, in_order.shape, 2)
    followers = jnp.maximum(followers, LEAST_FOLLOWERS).astype(jnp.float32)
    return write_slots(jnp.ones(in_order.shape, jnp.float32), in_order, followers)
