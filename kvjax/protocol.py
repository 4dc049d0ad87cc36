"""The protocol: a transform is a value whose fields are the hyper-parameters of a method.

Its methods are pure functions over a `KVCache` and the transform's own state. They decide; the
library carries out (see `kvjax.decisions`). Every one has an identity default, so that a method
defines only what it does. Because a transform is a frozen dataclass it is hashable (equal
transforms share compiled code), prints as the expression that makes it, and is re-budgeted by
`dataclasses.replace`.

There are three moments at which a method may decide something:

- `on_prompt`: a prompt is complete.
- `on_flush`: every M decode steps, M being the least `Extent.interval` of all layers.
- `on_step`: after the attention of every decode step.

A method that overrides one of them takes part in that moment; nothing else has to be declared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import of_rows, sum_into, take_slots
from kvjax.cache.record import NotNoted, Record
from kvjax.cache.rope import Rope
from kvjax.cache.slots import KVCache, NotAskedFor
from kvjax.messages import brief
from kvjax.serialization import named, pytree_node
from pallas_kernels import Mask
from pallas_kernels.base.annotations import NoneElsewhere

if TYPE_CHECKING:
    from kvjax.decisions import Decision

MethodHeads = tuple[int, ...] | tuple[tuple[int, ...], ...] | None
"""KV heads of a method: the same in all layers, or those of each layer; None: all of them."""

State = Any
"""A pytree of arrays that a transform keeps beside the slots; they never index by slot."""

Phase = Literal["prompt", "probe", "decode"]
Moment = Literal["prompt", "flush", "step"]
GroupReduce = Literal["mean", "max", "sum"]
Situation = Literal[
    "lossless", "later", "document", "now", "endless", "sentences", "baseline", "composed"
]

PASSED = "passed"  # the column in which a transform marks prompt tokens that go to the next layer


@dataclass(frozen=True)
class Card:
    """Facts about a method that compute nothing: the class attribute `card` of a transform.

    The table of methods in README.md and `docs/methods/index.md`, `kvjax methods` and the tests of
    all methods are made from it. The first line of its docstring says what the method keeps.

    Args:
      acts: when it acts, such as "prompt, every step".
      paper: its name there and the arXiv number, or the conference.
      when: the situation in which to take it, a key of `kvjax.cli.situations.SITUATIONS`.
      examples: options of `kvjax generate` with which to take it.
      small: arguments with which it has something to do in a prompt of 24 tokens, for tests, which
        set `budget` to 12 and `dense_layers` to none themselves.
      unscored: parameters that change no score, so that a profile of heads (`ByHead`) serves all.
      profiled_by: the method by whose scores `ByHead` shares the budget of this one among heads;
        None: by its own.
      couples_heads: whether what it decides for a head depends on other heads of the layer, for
        methods that `ByHead` takes.

    Example:
      >>> import kvjax
      >>> kvjax.SnapKV.card.paper
      'SnapKV, arXiv 2404.14469'
    """

    acts: str = ""
    paper: str = ""
    when: Situation | None = None
    examples: tuple[str, ...] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    unscored: tuple[str, ...] = ()
    profiled_by: type[KVTransform] | None = None
    couples_heads: bool = False


class Stage(IntEnum):
    """Place of a transform in a chain, whose parts must stand in this order.

    Example:
      >>> import kvjax
      >>> tx = kvjax.chain(kvjax.SnapKV(budget=0.5), kvjax.Quest(budget=64), kvjax.Offload())
      >>> [part.stage.name for part in tx.parts]
      ['EVICT', 'RECALL', 'PLACE']
    """

    EVICT = 0  # evicts or merges
    REPRESENT = 1  # stores keys and values in another form
    RECALL = 2  # reads a selection
    PLACE = 3  # keeps them in another memory


@dataclass(frozen=True)
class Extent:
    """Static bounds on the live slots of a row and head; composes through a chain.

    Args:
      prompt: most live slots when a prompt is complete.
      new: most new tokens of a row.
      limit: most live slots at any time while decoding, the newest token included; None: whatever
        `prompt + new` allows.
      longest: most prompt tokens of a row; None: `prompt`, where nothing has compressed yet.
      later: slots of `prompt` that the longest prompt leaves free, for prompts that come later.
      turn: most tokens of a turn that is not a document, beside what is kept of documents; a longer
        one is refused. None: such turns are prompts as others are.
      pinned: most pinned slots, which stand outside the budget of every evictor.
      interval: M, decode steps after which something is done with the new tokens (`on_flush`, and
        the encoding of payloads); None: nothing is.
      passed: most prompt tokens that a model must take to the next layer; None: all.
      window: the newest positions that a query may see, where nothing else is held (`Ring`); None:
        the method does not limit them.

    Example:
      >>> import kvjax
      >>> kvjax.H2O(budget=64).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      65
    """

    prompt: int
    new: int
    limit: int | None = None
    longest: int | None = None
    later: int = 0
    turn: int | None = None
    pinned: int = 0
    interval: int | None = None
    passed: int | None = None
    window: int | None = None

    def __post_init__(self):
        for name in ("prompt", "limit", "pinned", "interval"):
            slots = getattr(self, name)
            if not isinstance(slots, int | np.integer | None):
                raise TypeError(
                    f"an extent takes numbers of slots, got {name} = {brief(slots)}: "
                    "kvjax.kit.most_slots(budget, extent.longest_prompt, minimum) makes one of a "
                    "share"
                )

    @property
    def total(self) -> int:
        """Capacity of a cache of this extent."""
        total = self.prompt + self.new
        return total if self.limit is None else min(total, self.limit)

    @property
    def longest_prompt(self) -> int:
        """Most prompt tokens of a row, whatever has been compressed since."""
        return self.prompt if self.longest is None else self.longest

    @property
    def kept(self) -> int:
        """Most live slots when a prompt that comes alone is complete."""
        return min(self.prompt - self.later, self.total)

    def keep(self, slots: int, turn: int | None = None) -> Extent:
        """Returns the extent of which at most `slots`, and the pinned ones, remain of a prompt.

        All tokens go to the next layer.

        Args:
          slots: most slots that are kept.
          turn: slots beside them for turns that are not documents; None: these have none.
        """
        alone = min(self.prompt, slots + self.pinned)
        kept = min(self.prompt, alone + (turn or 0))
        return dataclasses.replace(
            self, prompt=kept, longest=self.longest_prompt, later=kept - alone, turn=turn,
            passed=None,
        )  # fmt: skip

    def every(self, steps: int) -> Extent:
        """Returns the extent with an interval of `steps`, or itself if its interval is shorter."""
        least = steps if self.interval is None else min(self.interval, steps)
        return dataclasses.replace(self, interval=least)

    def hold(self, slots: int) -> Extent:
        """Returns the extent with at most `slots`, and the pinned ones, live while decoding."""
        slots = slots + self.pinned
        limit = slots if self.limit is None else min(self.limit, slots)
        return dataclasses.replace(self, limit=limit)

    def pin(self, slots: int) -> Extent:
        """Returns the extent with up to `slots` more pinned, beside what parts before it hold."""
        limit = None if self.limit is None else self.limit + slots
        return dataclasses.replace(self, limit=limit, pinned=self.pinned + slots)


class Asking(NamedTuple):
    """Model, tokenizer and length from which a probe makes the tokens that look at documents.

    They are used on the host. `kvjax.read` and `generate` make them.

    Args:
      model: the `FunctionalModel` that reads the documents.
      encode: returns the token ids of a text, without special tokens; None: no tokenizer was given
        (`document` of `kvjax.read`), and a probe does without words.
      length: most tokens of a row, the document and those before it included. The tokens that look
        stand behind them.

    Example:
      >>> import kvjax, numpy as np
      >>> class Summary(kvjax.kit.Received):
      ...     instructions = ("Sum up the text.",)
      ...     def pieces(self, documents, width, asking):
      ...         return np.tile(asking.encode(*self.instructions), (len(documents), 1, 1))
      >>> asking = kvjax.kit.Asking(model=None, encode=lambda text: [7, 8], length=64)
      >>> Summary().pieces([[1, 2, 3], [4, 5]], width=3, asking=asking).tolist()
      [[[7, 8]], [[7, 8]]]
    """

    model: Any
    encode: Callable[[str], Sequence[int]] | None
    length: int


class Inputs(NamedTuple):
    """Holds what entered a layer with some tokens.

    A model gives it to `kvjax.attend`, which passes it on to probes that ask for it.

    Args:
      states: what its queries, keys and values are projections of, `[B, T, C]`.
      norm: Euclidean norm of the residual stream before the layer's own norm, `[B, T]`; None: the
        model does not give it.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> x = jnp.full((1, 3, 16), 2.0)  # the residual stream of three tokens
      >>> norm = jnp.linalg.norm(x, axis=-1)
      >>> inputs = kvjax.kit.Inputs(states=4 * x / norm[..., None], norm=norm)  # RMSNorm
      >>> inputs.states[0, :, 0].tolist(), inputs.norm.tolist()
      ([1.0, 1.0, 1.0], [[8.0, 8.0, 8.0]])
    """

    states: Float[Array, "B T C"]
    norm: Float[Array, "B T"] | None = None


class Chunk(NamedTuple):
    """Tokens of a document as they are read in one layer.

    Args:
      query: queries as the attention has them, `[B, Q, T, D]`.
      positions: token positions, -1 for padding, `[B, T]`.
      slots: the slot of each token, `[B, H, T]`; a number behind the last slot for padding.
      inputs: what entered the layer; None: the probe does not ask for it.
      received: attention that each slot received from these queries, summed over them, in float32,
        by query head of its KV head, `[B, H, G, S]`; None: the probe does not ask for it.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.kit import Chunk, write_slots
      >>> chunk = Chunk(query=jnp.full((1, 4, 2, 9), 2.0), positions=jnp.array([[0, 1]]),
      ...               slots=jnp.array([[[0, 1], [0, 1]]]), inputs=None, received=None)
      >>> sizes = jnp.linalg.norm(chunk.query, axis=-1).reshape(1, 2, 2, 2).max(2)  # [B, H, T]
      >>> write_slots(jnp.zeros((1, 2, 3)), chunk.slots, sizes).tolist()  # by slot, for a record
      [[[6.0, 6.0, 0.0], [6.0, 6.0, 0.0]]]
    """

    query: Float[Array, "B Q T D"]
    positions: Int[Array, "B T"]
    slots: Int[Array, "B H T"]
    inputs: Inputs | NoneElsewhere
    received: Float[Array, "B H G S"] | NoneElsewhere


@dataclass(frozen=True)
class Probe:
    """Makes a record of a document for a method, and may look at the document afterwards.

    A document is a prompt about which questions may come later: the first prompt of a context, or
    any prompt of `kvjax.read`. A probe notes arrays of the document's own tokens. Then tokens of
    its choice may look: they attend to the document and to each other, and are not stored. This
    class notes nothing, and tells documents from other prompts by its empty record. A method names
    its probe in `Needs(probe=...)`, and reads what it has noted in `Step.record`.

    A probe is a value, as a transform is: hashable, and equal to others with equal fields.

    Class attributes:
      inputs: whether it notes what enters a layer (`Chunk.inputs`).
      received: whether it notes the attention that the document's own queries pay
        (`Chunk.received`).
      instructions: texts that it asks with, so that what was learnt with other words is told apart.

    Example:
      >>> from dataclasses import dataclass
      >>> import jax.numpy as jnp, kvjax
      >>> from kvjax.kit import Chunk, Probe, Record
      >>> @dataclass(frozen=True)
      ... class Attended(Probe):
      ...     received = True
      ...     def empty(self, cache):
      ...         return Record(slots={"sum": jnp.zeros(cache.shape)})
      ...     def read(self, record, chunk):
      ...         return Record(slots={"sum": record.slots["sum"] + chunk.received.mean(2)})
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, query_heads=2, head_dim=4,
      ...                          max_prompt=2, max_new=0).kv
      >>> chunk = Chunk(jnp.ones((1, 2, 2, 4)), jnp.array([[0, 1]]), jnp.array([[[0, 1]]]),
      ...               inputs=None, received=jnp.array([[[[1.5, 0.5], [1.0, 1.0]]]]))
      >>> Attended().read(Attended().empty(cache), chunk).slots["sum"].tolist()
      [[[1.25, 0.75]]]
    """

    inputs: ClassVar[bool] = False
    received: ClassVar[bool] = False
    instructions: ClassVar[tuple[str, ...]] = ()

    def pieces(
        self, documents: Sequence[Sequence[int]], width: int, asking: Asking
    ) -> Int[np.ndarray, "B P R"] | None:
        """Makes the tokens that look, in pieces, each of which sees the document and itself.

        Args:
          documents: token ids of rows that are read together.
          width: tokens that the documents are padded to. Programs are compiled for the shape of the
            pieces, so it should depend on this and not on the documents themselves.
          asking: what helps to make them.

        Returns:
          Token ids, -1 for padding; None: no tokens look.
        """
        return None

    def empty(self, cache: KVCache) -> Record:
        """Makes the record before anything has been noted.

        Args:
          cache: the slots of the layer before the prompt.
        """
        return Record()

    def read(self, record: Record, chunk: Chunk) -> Record:
        """Returns the record with a chunk of the document noted; a short document is one chunk."""
        return record

    def look(self, record: Record, received: Float[Array, "B H G S"]) -> Record:
        """Returns the record with the attention noted that a piece of looking tokens has paid.

        Args:
          received: the largest probability that each slot received from a query of the piece, in
            float32, by query head of its KV head.
        """
        return record


class Needs(NamedTuple):
    """Requests of a transform to an attention call; `attend` computes nothing else.

    Args:
      accumulated_attention: the sum of the attention that each slot receives in all calls, in the
        column "attention", `[B, H, S, G]`.
      query_window: number of each row's last prompt queries that `Step.query` holds.
      query_share: share of `max_prompt`; `Step.query` holds at least that many queries and one.
      decode_queries: whether `Step.query` goes on with the queries of decoding.
      decode_mass: the probability that each slot received in a decode step, as `Step.mass`.
      unrotated_keys: the cache stores keys without RoPE, rotated when they are read.
      reposition: keys are rotated at their rank among the live slots and not at their position.
      predicted_query: `View.predicted`, where a model can give it.
      probe: probe that makes the record of a document, `Step.record`; None: documents are treated
        as other prompts.
      unfold: every query head has slots of its own: H is then Q, and a token's key and value are
        stored once for each query head of their KV head.
      writes_values: its decisions give slots other values, by merging or adding. If that happens
        in decode steps or at many flushes, and values are not stored as float32, the cache has a
        column for the remainders of rounding (`kvjax.cache.remainders`).
      reordered_slots: a prompt's end moves slots of earlier prompts without freeing any, so that
        no stored form may encode slots in groups.

    Example:
      >>> import kvjax
      >>> kvjax.SnapKV(budget=64, window=16).needs.query_window
      16
    """

    accumulated_attention: bool = False
    query_window: int = 0
    query_share: float = 0.0
    decode_queries: bool = False
    decode_mass: bool = False
    unrotated_keys: bool = False
    reposition: bool = False
    predicted_query: bool = False
    unfold: bool = False
    writes_values: bool = False
    reordered_slots: bool = False
    probe: Probe | None = None

    def union(self, other: Needs) -> Needs:
        """Returns the requests of both.

        Raises:
          ValueError: they have different probes; one reading of a document takes one.
        """
        probes = [needs.probe for needs in (self, other) if needs.probe is not None]
        if len(set(probes)) > 1:
            raise ValueError(
                f"one reading of a document has one probe, got {' and '.join(map(repr, probes))}"
            )
        pairs = {
            name: max(getattr(self, name), getattr(other, name))
            for name in self._fields
            if name != "probe"
        }
        return Needs(**pairs, probe=probes[0] if probes else None)

    def queries(self, max_prompt: int) -> int:
        """Size of the window of prompt queries."""
        share = 1 + int(self.query_share * max_prompt) if self.query_share else 0
        return max(self.query_window, share)

    def asks_for(self, name: str) -> bool:
        """Tells whether a field of `Step` or `View`, or a column, is asked for (`REQUESTS`)."""
        return any(getattr(self, request) for request in REQUESTS[name])


ATTENTION = "attention"  # the column of accumulated attention
REQUESTS = {  # what a method can read only if one of these fields of `Needs` asks for it
    "mass": ("decode_mass",),
    "query": ("query_window", "query_share"),
    "query_position": ("query_window", "query_share"),
    "record": ("probe",),
    "predicted": ("predicted_query",),
    ATTENTION: ("accumulated_attention",),
}


def on_request(**arrays: Any) -> dict[str, Any]:
    """Returns the `requested` of a `Step` or `View`: None for all that these are not."""
    return {name: arrays.get(name) for name in REQUESTS}


def _asked_for(requested: dict[str, Any], name: str) -> Any:
    """Returns an array that was computed because a method asked for it.

    Raises:
      NotAskedFor: the method that reads has not asked for it.
    """
    if name not in requested:
        raise NotAskedFor(name)
    return requested[name]


@pytree_node
@dataclass(frozen=True)
class AttentionOptions:
    """Options by which a layer's attention makes its logits and weights.

    Args:
      scale: factor of `q·k`; None: `head_dim ** -0.5` (static).
      window: a query sees the newest `window` positions; None: all of them (static).
      soft_cap: c of `c · tanh(logit / c)`; None: logits are not capped (static).
      sinks: one more logit of each query head, in float32; None: there are none.
    """

    scale: float | NoneElsewhere = field(default=None, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    sinks: Float[Array, " Q"] | NoneElsewhere = None

    @property
    def static(self) -> dict[str, Any]:
        """Scale, window and soft cap by name, as `init_cache` takes them."""
        return self.mask._asdict()

    @property
    def mask(self) -> Mask:
        """Scale, window and soft cap as the operations of `pallas_kernels` take them."""
        return Mask(self.scale, self.window, self.soft_cap)

    def of_heads(self, index: Int[Array, " N"]) -> AttentionOptions:
        """Takes the sinks of some of the query heads."""
        sinks = None if self.sinks is None else self.sinks[index]
        return dataclasses.replace(self, sinks=sinks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Step:
    """Account of a prompt, a flush or a decode step, for a transform that decides after it.

    Args:
      rows: the rows that it concerns: those that had tokens in the prompt or in the step; at a
        flush, all of them. Decisions about other rows are not carried out.
      keys: rotated keys of all slots as attention sees them, `[B, H, S, D]`, for methods that evict
        or merge; None in a decode step, and for methods that store, index or place, which read
        `cache.k`.
      length_before: tokens of each row before the prompt, `[B]`; None at other moments.
      document_length: tokens of each row's whole document, `[B]`, of which this prompt is a piece;
        None where it is not known to be one.
      rope: as given to `attend`; None where q and k came rotated.
      moment: `"prompt"`, `"flush"` or `"step"` (static).
      options: scale, window, soft cap and sinks of the attention.
      room: at a flush, the decode steps until the next one, for whose tokens there must be free
        slots afterwards (static).
      implementation: of the operations in `pallas_kernels`, as given to `attend` or `flush`
        (static).
      output: of the attention of a decode step, `[B, Q, T, D]`; None at other moments.
      requested: what was computed because `Needs` asks for it, by the name of the property below
        that gives it. A method sees only what its own `needs` ask for: a property raises TypeError
        where it was not asked for, and is None at moments that do not have it.

    Example:
      >>> from dataclasses import dataclass
      >>> import kvjax
      >>> from kvjax.kit import Keep, Needs, by_query_head, window_attention
      >>> @dataclass(frozen=True)
      ... class Looked(kvjax.kit.HeldBudget):  # what the newest query attends to (TOVA)
      ...     budget: int
      ...     minimum = 1
      ...     @property
      ...     def needs(self) -> Needs:
      ...         return Needs(query_window=1, decode_mass=True)
      ...     def on_step(self, cache, state, step):
      ...         if step.moment == "prompt":
      ...             return Keep(state, by_query_head(window_attention(cache, step, 1))), state
      ...         return Keep(state, step.mass), state
      >>> Looked(budget=64).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      65
    """

    rows: Bool[Array, " B"]
    keys: Float[Array, "B H S D"] | NoneElsewhere = None
    length_before: Int[Array, " B"] | NoneElsewhere = None
    document_length: Int[Array, " B"] | None = None
    rope: Rope | None = None
    moment: Moment = field(metadata={"static": True})
    options: AttentionOptions
    room: int = field(default=0, metadata={"static": True})
    implementation: str | None = field(default=None, metadata={"static": True})
    output: Float[Array, "B Q T D"] | None = None
    requested: dict[str, Any] = field(default_factory=dict)

    @property
    def mass(self) -> Float[Array, "B Q S"] | NoneElsewhere:
        """Attention probability that each slot received in a decode step, per query head.

        It is `[B, Q, S]` float32, for `Needs.decode_mass`; None at other moments.
        """
        return _asked_for(self.requested, "mass")

    @property
    def query(self) -> Float[Array, "B Q W D"] | NoneElsewhere:
        """Each row's last W queries of this prompt, rotated, oldest first, `[B, Q, W, D]`.

        They are for `Needs.query_window` and `query_share`, and are carried across the chunks of a
        prompt. Under `Every` and `WhenFull` they go on with the queries of decoding; otherwise this
        is None while decoding.
        """
        return _asked_for(self.requested, "query")

    @property
    def query_position(self) -> Int[Array, "B W"] | NoneElsewhere:
        """Positions of `query`, -1 where there were fewer, `[B, W]`."""
        return _asked_for(self.requested, "query_position")

    @property
    def record(self) -> Record | NoneElsewhere:
        """Record that the method's probe has made of a document, for `Needs.probe`.

        It is None for prompts that are not documents, such as questions, and at other moments.
        """
        record = _asked_for(self.requested, "record")
        return None if record is None else record.naming_what_is_missing()

    def of_rows(self, new: State, old: State) -> State:
        """Returns the state with `new` in the rows concerned and `old` in the others.

        Args:
          new, old: states of the same structure, whose arrays are `[B, ...]`.
        """
        return of_rows(self.rows, new, old)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """View of a cache that attention will have: all slots, or a selection of N.

    A selection has K lists: one per KV head, or one per query head (K = Q).

    Args:
      cache: the cache, the new token in it.
      slots: slot of each new token, `[B, H, T]`; `cache.slots` where none was stored.
      index: slots to see, `[B, K, N]`, -1 = none; None = all of them in place.
      fixed: how many entries at the front every list of a cache has, such as sinks (static).
      rows: keys and values of the selection, `[B, K, N, D]` each, if a transform has fetched them
        already; entries that are none have anything there. None: attention reads them.
      window: sliding window of the attention, as given to `attend`: what lies outside it is not
        worth selecting (static).
      implementation: of the operations in `pallas_kernels`, as given to `attend` (static).
      requested: what there is because `Needs` asks for it, as in `Step`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=2, head_dim=4, max_prompt=8,
      ...                          max_new=0).kv
      >>> view = kvjax.kit.View(cache, slots=jnp.array([[[7], [7]]]))
      >>> view = view.take(jnp.array([[[7, 2, 5], [7, 0, -1]]]))  # as `select` returns it
      >>> view.take(jnp.array([[[0, 2], [0, 2]]])).index.tolist()  # of what the first one has left
      [[[7, 5], [7, -1]]]
    """

    cache: KVCache
    slots: Int[Array, "B H T"]
    index: Int[Array, "B K N"] | None = None
    fixed: int = field(default=0, metadata={"static": True})
    rows: tuple[Array, Array] | None = None
    window: int | None = field(default=None, metadata={"static": True})
    implementation: str | None = field(default=None, metadata={"static": True})
    requested: dict[str, Any] = field(default_factory=dict)

    @property
    def predicted(self) -> Float[Array, "B Q T D"] | None:
        """Expectation of the query before this layer began, rotated, `[B, Q, T, D]`.

        It is the layer's query weights times the input of the attention before it, for
        `Needs.predicted_query`; None where the model does not give it.
        """
        return _asked_for(self.requested, "predicted")

    def take(self, index: Int[Array, "B K N"], fixed: int = 0) -> View:
        """Returns a view of a selection of this view's entries; no rows are read.

        Args:
          index: entries of this view, which are slots where it has all of them; -1: none.
          fixed: as the field.

        Raises:
          TypeError: the index has another dtype or other axes.
        """
        if index.ndim != 3 or not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                "view.take takes slot numbers [B, K, N] as integers, got "
                f"{index.dtype} of shape {index.shape}"
            )
        if self.index is not None:
            chosen = take_slots(self.index, jnp.maximum(index, 0))
            index = jnp.where(index >= 0, chosen, -1)
        return dataclasses.replace(self, index=index, fixed=fixed, rows=None)

    def per_slot(self, x: Array, fill: float) -> Array:
        """Returns a per-slot array `[B, H, S]` at this view's entries, `[B, K, N]`.

        A view of all slots returns the array as it is.

        Args:
          x: one number for each slot.
          fill: value at entries that are none.
        """
        if self.index is None:
            return x
        return jnp.where(self.index >= 0, take_slots(x, jnp.maximum(self.index, 0)), fill)

    def to_slots(self, x: Float[Array, "B K G N"]) -> Float[Array, "B K G S"]:
        """Brings what entries received to their slots; slots that were not read get 0."""
        if self.index is None:
            return x
        slots = self.cache.slots
        index = jnp.where(self.index >= 0, self.index, slots)
        return jnp.moveaxis(sum_into(index, jnp.moveaxis(x, 2, 3), slots), 3, 2)


def _equal(first: KVTransform, second: object) -> bool:
    """Tells whether two transforms have equal fields, and floats in the same ones."""
    if type(second) is not type(first):
        return NotImplemented
    names = [field.name for field in dataclasses.fields(first)]
    pairs = [(getattr(first, name), getattr(second, name)) for name in names]
    return all(a == b and isinstance(a, float) == isinstance(b, float) for a, b in pairs)


@dataclass(frozen=True)
class KVTransform:
    """A method of compression as a value. All methods default to doing nothing.

    A subclass is a frozen dataclass, whose fields are hashable.

    Class attributes:
      stage: where it stands in a chain.
      card: what lists, pages and tests say of it.

    Raises:
      TypeError: a subclass has a field with the name of a member of its base class.

    Example:
      >>> from dataclasses import dataclass
      >>> import jax, jax.numpy as jnp, kvjax
      >>> @dataclass(frozen=True)
      ... class EvenPositions(kvjax.KVTransform):
      ...     def extent(self, extent):
      ...         return extent.keep((extent.longest_prompt + 1) // 2)
      ...     def on_prompt(self, cache, state, step):
      ...         return kvjax.kit.Retain(cache.position % 2 == 0), state
      >>> cache = kvjax.init_cache(EvenPositions(), batch=1, kv_heads=1, head_dim=4, max_prompt=6,
      ...                          max_new=0)
      >>> rows = jnp.ones((1, 1, 6, 4))
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(6)[None], phase="prompt")
      >>> cache.kv.position.tolist()
      [[[0, 2, 4]]]
    """

    stage: ClassVar[Any] = Stage.EVICT  # a `Stage`, or a property of one
    card: ClassVar[Card] = Card()

    def __init_subclass__(cls, **kwargs):
        """Refuses fields that would replace a member of a base class without a word.

        Gives the class an equality that tells 1 from 1.0: a budget of one token is not a budget of
        everything, and equal transforms share compiled code.
        """
        super().__init_subclass__(**kwargs)
        if "__eq__" not in cls.__dict__:
            cls.__eq__ = _equal
        for name, annotation in inspect.get_annotations(cls).items():
            new = name not in cls.__dataclass_fields__ and "ClassVar" not in str(annotation)
            if new and any(hasattr(base, name) for base in cls.__bases__):
                raise TypeError(
                    f"{cls.__name__} has a field {name!r}, which is a member of "
                    f"{cls.__bases__[0].__name__}: give it another name"
                )

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the transform of one layer: layer budgets and dense layers live here.

        Args:
          layer: number of the layer, from 0.
          num_layers: number of the model's layers.
        """
        return self

    def in_chain(
        self, before: tuple[KVTransform, ...], after: tuple[KVTransform, ...]
    ) -> KVTransform:
        """Returns the transform as it works between these parts of a chain.

        Raises:
          ValueError: it cannot work there.
        """
        return self

    def extent(self, extent: Extent) -> Extent:
        """Returns a static bound on live slots, given the bound before this transform."""
        return extent

    @property
    def needs(self) -> Needs:
        """Requests to `attend`, which computes nothing else."""
        return Needs()

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, State]:
        """Adds columns, chooses the payload, and makes the transform's own state.

        Numbers that differ between layers (seeds, projections) belong in the state, so that
        layers are equal values and share compiled code.

        Arrays of the state are `[B, ...]`, and `[B, H, ...]` where they differ by head. An array
        that all rows share is `[H, ...]` of two axes or more where it differs by head. So a mesh
        can divide them. A method that looks across heads at other moments asks
        `kvjax.kit.all_heads`.
        """
        return cache, ()

    def select(
        self, view: View, state: State, query: Float[Array, "B Q T D"]
    ) -> tuple[View, State]:
        """Chooses the slots to look at, a static number of them, before a decode step's attention.

        Args:
          view: the view that parts of a chain before this one have left; the new token is in it.
          state: the transform's own state.
          query: queries of the step, rotated where the cache's keys are.

        Returns:
          `view.take(index)`, and the new state.
        """
        return view, state

    def on_prompt(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Decides what to do when a prompt is complete.

        Args:
          cache: the slots, with the prompt's tokens and those of earlier turns, as far as parts of
            a chain before this one have left them.
          state: the transform's own state.
          step: the moment's account: the rows concerned, keys, and what `needs` asks for.

        Returns:
          A decision, which the library carries out, or None for nothing; and the new state.
        """
        return None, state

    def on_flush(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Decides what to do with the tokens that have come since the last flush.

        `Step.room` says for how many more tokens there must be free slots. Otherwise as
        `on_prompt`.
        """
        return None, state

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Decides what to do after the attention of a decode step.

        It runs at every step, so it evicts one slot at most, and makes no pass over keys. Arguments
        and results are those of `on_prompt`; the new token is in the cache.
        """
        return None, state


@pytree_node
class Wrapped(NamedTuple):
    """State of a wrapper that has no state itself: the state of its base.

    A wrapper that does remember something has a NamedTuple of its own with a field `base`.
    """

    base: State


@dataclass(frozen=True)
class Wrapper(KVTransform):
    """A transform around another one, `base`; forwards everything that it does not change.

    Example:
      >>> from dataclasses import dataclass, replace
      >>> import jax, jax.numpy as jnp, kvjax
      >>> @dataclass(frozen=True)
      ... class WithFirst(kvjax.kit.Wrapper):  # the first token stays, in place of another one
      ...     def on_prompt(self, cache, state, step):
      ...         keep, state = super().on_prompt(cache, state, step)
      ...         return replace(keep, always=cache.position == 0), state
      >>> tx = WithFirst(kvjax.SnapKV(budget=4, window=2, kernel=1))
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=1, head_dim=4, max_prompt=6, max_new=0)
      >>> rows = jnp.broadcast_to(jnp.arange(6.0)[:, None], (1, 1, 6, 4))  # later keys draw more
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(6)[None], phase="prompt")
      >>> cache.kv.position.tolist()
      [[[0, 3, 4, 5]]]
    """

    base: KVTransform

    @property
    def inner(self) -> KVTransform:
        """Transform that calls are forwarded to: the base, or what the wrapper makes of it."""
        return self.base

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the wrapper around the base of this layer, or `Full` if that is the base."""
        base = self.base.for_layer(layer, num_layers)
        return base if isinstance(base, Full) else dataclasses.replace(self, base=base)

    def extent(self, extent: Extent) -> Extent:
        """Bounds slots as the base does."""
        return self.inner.extent(extent)

    @property
    def needs(self) -> Needs:
        """Needs of the base."""
        return self.inner.needs

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, State]:
        """Makes the base's columns and state."""
        cache, base = self.inner.init(cache, layer)
        return cache, Wrapped(base)

    def select(self, view: View, state: State, query: Array) -> tuple[View, State]:
        """Selects as the base does."""
        view, base = selected_by(self.inner, view, state.base, query)
        return view, state._replace(base=base)

    def on_prompt(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Decides as the base does, at every moment: `on_flush` and `on_step` are this too."""
        decision, base = decided_by(self.inner, cache, state.base, step)
        return decision, state._replace(base=base)

    on_flush = on_step = on_prompt


def takes_part(transform: KVTransform, moment: Moment) -> bool:
    """Tells whether a transform, or the base of a wrapper, overrides the method of a moment."""
    name = f"on_{moment}"
    method = getattr(type(transform), name)
    if isinstance(transform, Wrapper) and method is getattr(Wrapper, name):
        return takes_part(transform.base, moment)
    return method is not getattr(KVTransform, name)


def is_bound(transform: KVTransform) -> bool:
    """Returns whether `for_layer` gives the transform itself."""
    if type(transform).for_layer is KVTransform.for_layer:
        return True
    try:
        return transform.for_layer(0, 1) == transform
    except Exception:  # it was made for a model of more layers, or somebody's function was
        return False


def decided_by(
    transform: KVTransform, cache: KVCache, state: State, step: Step
) -> tuple[Decision | None, State]:
    """Lets a transform decide at the moment of a step, from what its own `needs` ask for.

    Raises:
      TypeError: it reads something else that another part of a chain has asked for, or nobody.
    """
    needs, member = transform.needs, f"on_{step.moment}"
    step = dataclasses.replace(step, requested=_seen_with(needs, step.requested))
    with _naming(transform, member):
        return getattr(transform, member)(_cache_with(needs, cache), state, step)


def selected_by(
    transform: KVTransform, view: View, state: State, query: Float[Array, "B Q T D"]
) -> tuple[View, State]:
    """Lets a transform select, from what its own `needs` ask for: see `decided_by`."""
    needs = transform.needs
    seen = dataclasses.replace(
        view, cache=_cache_with(needs, view.cache), requested=_seen_with(needs, view.requested)
    )
    with _naming(transform, "select"):
        made = transform.select(seen, state, query)
    check_made(made, View, f"{type(transform).__name__}.select", "a view, as view.take(index),")
    chosen, state = made
    cache = chosen.cache.replace(withheld=view.cache.withheld)
    return dataclasses.replace(chosen, cache=cache, requested=view.requested), state


def check_made(made: object, kind: Any, whose: str, expected: str) -> None:
    """Raises TypeError unless a member of a method has returned a value of a kind and a state.

    Args:
      whose: the member.
      expected: how the message calls the kind.
    """
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], kind):
        return
    shown = type(made).__name__
    if isinstance(made, tuple):
        shown = f"({', '.join(type(part).__name__ for part in made)})"
    raise TypeError(f"{whose} must return {expected} and a state, in this order, got {shown}")


def _seen_with(needs: Needs, requested: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in requested.items() if needs.asks_for(name)}


def _cache_with(needs: Needs, cache: KVCache) -> KVCache:
    """Returns the cache whose accumulated attention can be read only if the needs ask for it."""
    return cache if needs.asks_for(ATTENTION) else cache.replace(withheld=(ATTENTION,))


@contextlib.contextmanager
def _naming(transform: KVTransform, member: str) -> Iterator[None]:
    """Makes an error that names the member which reads an array, and the request for it."""
    try:
        yield
    except NotAskedFor as error:
        (name,) = error.args
        requests = " or ".join(f"Needs({request}=...)" for request in REQUESTS[name])
        raise TypeError(
            f"{type(transform).__name__}.{member} reads {name!r}, for which its `needs`, or those "
            f"of a wrapper around it, do not ask: they must be {requests}"
        ) from error
    except NotNoted as error:
        raise TypeError(f"{type(transform).__name__}.{member}: {error}") from error


def accumulated_attention(cache: KVCache) -> Float[Array, "B Q S"]:
    """Returns the attention that each slot has received so far, from each query head.

    Args:
      cache: cache of a method whose `Needs` ask for the sum.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.H2O(budget=8), batch=1, kv_heads=1, query_heads=2,
      ...                          head_dim=4, max_prompt=3, max_new=0)
      >>> rows = jnp.ones((1, 2, 3, 4))
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> _, cache = attend(
      ...     cache, rows, rows[:, :1], rows[:, :1], jnp.arange(3)[None], phase="prompt")
      >>> kvjax.kit.accumulated_attention(cache.kv).sum(-1).tolist()  # 1 from each of 3 queries
      [[3.0, 3.0]]
    """
    batch, kv_heads, slots = cache.shape
    attention = jnp.moveaxis(cache.column(ATTENTION), -1, 2)
    return attention.reshape(batch, kv_heads * cache.group, slots)


def check_transform(transform: object, where: str) -> None:
    """Raises TypeError for anything that is not a transform."""
    if not isinstance(transform, KVTransform):
        hint = " (give an instance, not the class)" if isinstance(transform, type) else ""
        if isinstance(transform, str):
            hint = " (kvjax.parse makes a transform of a text)"
        raise TypeError(f"{where} takes transforms, got {transform!r}{hint}")
    for name in (part.name for part in dataclasses.fields(transform)):
        value = getattr(transform, name)
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"{name} of {type(transform).__name__} must be hashable, as a tuple is and a "
                f"list or an array is not, got {brief(value)}"
            ) from error


@named("full")
@dataclass(frozen=True)
class Full(KVTransform):
    """Keeps every token; all other methods are compared with it.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.Full(), num_layers=2)
      (Full(), Full())
    """

    card = Card(acts="never", when="baseline")
