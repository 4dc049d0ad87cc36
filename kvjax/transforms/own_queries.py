"""OwnQueries: keeps the tokens that a document's own queries look at, in the pass that reads it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
from kvjax.transforms.pooling import check_kernel, pool
from pallas_kernels.base.logits import capped

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


class _Pieces(NamedTuple):
    """Holds a document in N pieces of P tokens, or one of them without the first axis.

    Args:
      turned: queries as a repetition would have them, in float32.
      query: queries as they are.
      keys: of the tokens.
      there: whether there is a token.
      sink: whether it is a sink.
    """

    turned: Float[Array, "N B H G P D"]
    query: Float[Array, "N B H G P D"]
    keys: Float[Array, "N B H P D"]
    there: Bool[Array, "N B H P"]
    sink: Bool[Array, "N B H P"]


@named("own_queries")
@dataclass(frozen=True)
class OwnQueries(DocumentBudget):
    """Keeps the document tokens that the document itself uses, and those that it would quote.

    The document's own queries tell both while it is read, so that nothing is read twice. A token is
    used as much as those that follow attend to it on average. For a document of L tokens, token s,
    counted from 0, and the query heads g of a KV head,

        used[s] = Σ_{t ≥ s} mean_g p[g, t, s] / max(L − s, 32).

    A *virtual repetition* tells what would be quoted. If the document were repeated behind itself,
    the repetition would have nearly the same queries, turned by RoPE to positions that are L
    higher, q'. The document is cut into pieces of 256 tokens. The query at t attends with q' to the
    sinks and to its piece, and with q to the piece up to t, which stands for what the repetition
    has written so far:

        quoted[s] = max_{g, t} softmax_j([q'_t · k_j for sinks and piece; q_t · k_j for j ≤ t])[s]

    over all t in the piece of s. It is 0 for sinks, which draw attention without being quoted.

    Both are multiplied by the size of a token's value relative to its head's, `‖v_s‖ / median_s
    ‖v_s‖`. Then `quoted` is averaged over `kernel` neighbouring tokens, and the score is

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
      kernel: number of neighbouring tokens, odd, over which `quoted` is averaged, with zeros beyond
        both ends of a document; 3.
      piece: tokens of a piece; 256.

    Raises:
      TypeError, ValueError: as in `DocumentBudget`; `use` is outside [0, 1], `kernel` is even, or
        `piece` is below 1.

    Example:
      >>> import kvjax
      >>> kvjax.OwnQueries(budget=0.1).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      765

    References:
      KVzip, arXiv 2505.23416, scores tokens by a repetition, H2O, arXiv 2306.14048, by sums of
      attention, and VATP, arXiv 2406.12335, by attention times the size of values. The composition
      is kvjax's own.

    Deviations from the paper:
      There is no paper. Where `attend` gets no `rope`, queries stay as they are, since a layer
      without positions has the same ones in a repetition. A model that rotates queries itself
      should give its `rope` to `attend`, or set `use=1`. A sliding window limits what is used, and
      not what is quoted.
    """

    use: float = 0.5
    kernel: int = 3
    piece: int = 256

    card = Card(
        acts="prompt", when="document", small={"sinks": 2, "window": 2, "room": 4, "piece": 8},
        unscored=("room",), profiled_by=KVzip,
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_part("use", self.use)
        check_kernel(self.kernel)
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
        quoted = pool(quoted[:, :, None], cache, document, self.kernel, "avg")[:, :, 0]
        return quoted ** (1 - self.use) * used**self.use

    def _quoted(
        self,
        cache: KVCache,
        step: Step,
        document: Bool[Array, "B H S"],
        in_order: Int[Array, "B H S"],
    ) -> Float[Array, "B H S"]:
        """Returns the largest probability that each token receives in the virtual repetition."""
        is_sink = cache.live & (cache.position < self.sinks)
        sinks = sorted_slots(is_sink, cache.position)[..., : self.sinks]
        sink_keys = take_slots(step.keys, sinks).astype(jnp.float32)
        sink_there = take_slots(is_sink, sinks)[:, :, None, None]
        so_far = jnp.tril(jnp.ones((1, 1, 1, self.piece, self.piece), bool))

        def of_piece(piece: _Pieces) -> Float[Array, "B H P"]:
            asked = (piece.there & ~piece.sink)[:, :, None, None]
            repeated = piece.there[:, :, None, None] & so_far
            to_piece = _logits(piece.turned, piece.keys, asked, step)
            logits = [
                _logits(piece.turned, sink_keys, sink_there, step),
                to_piece,
                _logits(piece.query, piece.keys, repeated, step),
            ]
            if step.options.sinks is not None:
                learned = step.options.sinks.reshape(1, *to_piece.shape[1:3], 1, 1)
                logits.append(jnp.broadcast_to(learned, (*to_piece.shape[:4], 1)))
            # The logits are not joined, which would copy them.
            each = (jax.nn.logsumexp(x, axis=-1, keepdims=True) for x in logits)
            total = functools.reduce(jnp.logaddexp, each)
            of_tokens = piece.there[:, :, None, :, None]
            # The largest probability is the exponential of the largest logarithm.
            return jnp.exp(jnp.where(of_tokens, to_piece - total, -jnp.inf).max((2, 3)))

        received = jax.lax.map(of_piece, self._pieces(cache, step, document, in_order, is_sink))
        received = jnp.moveaxis(received, 0, 2).reshape(*cache.shape[:2], -1)[..., : cache.slots]
        return write_slots(jnp.zeros(cache.shape, jnp.float32), in_order, received)

    def _pieces(
        self,
        cache: KVCache,
        step: Step,
        document: Bool[Array, "B H S"],
        in_order: Int[Array, "B H S"],
        is_sink: Bool[Array, "B H S"],
    ) -> _Pieces:
        """Cuts the document into pieces."""
        query = step.record.slots["query"].astype(jnp.float32)
        turned = query
        if step.rope is not None:
            # Turning a query once more adds to its angle. Its length has been scaled already.
            rope = dataclasses.replace(step.rope, factor=1.0)
            batch, heads, slots, group, _ = query.shape
            length = document.sum(-1, dtype=jnp.int32)
            by = jnp.broadcast_to(length[..., None], (batch, heads, slots * group))
            turned = rope.rotate(query.reshape(*by.shape, -1), by).reshape(query.shape)
        more = -in_order.shape[2] % self.piece

        def cut(x: Array) -> Array:
            x = take_slots(x, in_order)
            x = jnp.pad(x, ((0, 0), (0, 0), (0, more), *((0, 0),) * (x.ndim - 3)))
            return jnp.moveaxis(x.reshape(*x.shape[:2], -1, self.piece, *x.shape[3:]), 2, 0)

        keys = step.keys.astype(jnp.float32)
        pieces = _Pieces(*map(cut, (turned, query, keys, document, is_sink)))
        turned, query = jnp.moveaxis(pieces.turned, 4, 3), jnp.moveaxis(pieces.query, 4, 3)
        return pieces._replace(turned=turned, query=query)


def _followers(
    document: Bool[Array, "B H S"], in_order: Int[Array, "B H S"]
) -> Float[Array, "B H S"]:
    """Returns how many of a document's queries see each token, itself included, or 32 if fewer."""
    length = document.sum(-1, keepdims=True)
    followers = length - jax.lax.broadcasted_iota(length.dtype, in_order.shape, 2)
    followers = jnp.maximum(followers, LEAST_FOLLOWERS).astype(jnp.float32)
    return write_slots(jnp.ones(in_order.shape), in_order, followers)


def _logits(
    q: Float[Array, "B H G P D"],
    k: Float[Array, "B H N D"],
    seen: Bool[Array, "B H #1 #P N"],
    step: Step,
) -> Float[Array, "B H G P N"]:
    """Returns the logits of an attention, -inf where a key is not seen."""
    scale, _, soft_cap = step.options.mask
    logits = capped(jnp.einsum("bhgpd,bhnd->bhgpn", q, k) * scale, soft_cap)
    return jnp.where(seen, logits, -jnp.inf)
