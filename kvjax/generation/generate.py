"""Text from a language model through a compressed cache: prompts are read, then one loop runs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.attention.attend import flush, flush_interval
from kvjax.attention.layer import Cache, layer_caches
from kvjax.budgets.budgets import check_count
from kvjax.cache.slots import memory_bytes, nbytes
from kvjax.compose.chain import bind
from kvjax.generation.context import Context
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.reading import CacheSize, Compiler, read_prompt
from kvjax.generation.sampling import Numbers, Sampling
from kvjax.generation.steps import decode_step, pad
from kvjax.protocol import Full, KVTransform
from kvjax.storage.offload import RecallStatistics, recall_statistics
from kvjax.transforms.random import check_seed

_STREAM_SECONDS = 0.1  # how often a streaming loop comes back to the host, about
_END_TOKENS = 8  # places for end tokens; more of them are padded to a multiple

Rows = Sequence[Sequence[int] | None]  # token ids of each row; None: the row takes no part


class Sized(Protocol):
    """What prompts are checked against: a model or the configuration of one."""

    vocab_size: int
    max_positions: int | None


@dataclass(frozen=True)
class Generation:
    """New tokens and what they cost.

    Args:
      tokens: new tokens per row, without the end token.
      ended: whether a row came to an end token.
      prompt_tokens: tokens per row that this call read.
      ttft_s: seconds of the prompt pass up to the first token, without compilation.
      tpot_s: seconds per further token (a step for all rows); None if there was none. With
        `on_tokens` it includes that callback.
      compile_s: seconds of tracing and compiling; next to nothing on a second call.
      cache_bytes: bytes of all cache arrays, index structures included.
      full_cache_bytes: what `Full` would hold for the same padded prompt and new tokens.
      memory_bytes: `cache_bytes` by the kind of memory: `"device"`, and `"pinned_host"` for what
        `Offload` keeps there.
      recall: how often offloaded caches had what a step selected, and what crossed; None where
        nothing is offloaded.
      dropped: tokens that found no free slot and were lost, summed over layers, rows and lists of
        slots (one per KV head, or per query head for methods that need that). 0 unless a method
        keeps more than its `extent` promises.
      context: everything that was read and written, end tokens included, to go on from; None
        unless `generate` was given one.
    """

    tokens: list[list[int]]
    ended: list[bool]
    prompt_tokens: list[int]
    ttft_s: float
    tpot_s: float | None
    compile_s: float
    cache_bytes: int
    full_cache_bytes: int
    memory_bytes: dict[str, int]
    recall: RecallStatistics | None
    dropped: int
    context: Context | None = None


def read(
    model: LanguageModel | FunctionalModel,
    prompts: Sequence[Sequence[int]],
    *,
    transform: KVTransform | None = None,
    max_prompt: int | None = None,
    max_new: int = 512,
    dtype: DTypeLike | None = None,
    buckets: Sequence[int] | None = None,
    on_layer: Callable[[int], None] | None = None,
    on_compile: Callable[[str], None] | None = None,
) -> Context:
    """Reads prompts into caches that `transform` compresses, for `generate` to go on from.

    Args:
      model, prompts, transform, dtype, buckets, on_layer, on_compile: as in `generate`.
      max_prompt: most tokens of a row that are read, in this and all further turns; by default
        those of this prompt, padded.
      max_new: most tokens of a row that the model writes, all turns together.

    Raises:
      TypeError, ValueError: as `generate`, and for a `max_prompt` below the longest prompt.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> document = kvjax.read(model, [[1, 2, 3]], transform=kvjax.SnapKV(64), max_prompt=128)
      >>> answers = kvjax.generate(model, [[4, 5], [6]], context=document, max_new_tokens=4)
      >>> len(answers.tokens), document.length.tolist(), answers.context.length.tolist()
      (2, [3], [9, 8])
    """
    functional = as_functional(model)
    transform = Full() if transform is None else transform
    layers = bind(transform, functional.num_layers)
    check_count("max_new", max_new, 1)
    check_prompts(functional, prompts, layers, 0)  # whether a turn fits is seen when it comes
    padded = _bucket(max(map(len, prompts)), functional.max_positions, buckets)
    if max_prompt is not None:
        check_count("max_prompt", max_prompt, 1)
        longest = max(map(len, prompts))
        if max_prompt < longest:
            raise ValueError(
                f"max_prompt must hold the prompt of {longest} tokens, got {max_prompt}"
            )
    most = max(padded, max_prompt or 0)
    size = CacheSize.of(functional, len(prompts), most, max_new, dtype)
    how = transform, layers, size
    return _begin(functional, prompts, padded, *how, Compiler(on_compile), on_layer)


def generate(
    model: LanguageModel | FunctionalModel,
    prompts: Rows | None,
    *,
    transform: KVTransform | None = None,
    max_new_tokens: int = 128,
    end_tokens: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    context: Context | None = None,
    donate: bool = False,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    on_layer: Callable[[int], None] | None = None,
    on_compile: Callable[[str], None] | None = None,
    buckets: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
) -> Generation:
    """Continues prompts through a cache that `transform` compresses.

    Prompts are padded to one of a few lengths. Of a model that shows its parts
    (`kvjax.LayeredModel`), they are read layer by layer, so that no more than one layer holds its
    part of the whole prompt; layers that are alike share compiled code. All decoding runs in one
    compiled loop with donated caches. A second call with prompts of the same bucket compiles
    nothing, whatever its `max_new_tokens` (in steps like those of prompts), its end tokens, its
    sampling and its seed.

    With a `context` the prompts are a further turn after what that has read and written. A context
    of one row takes any number of prompts: many questions about one document. A row whose prompt is
    None takes no part: its caches stay as they are, and it gets no tokens. Without prompts (None)
    every row goes on from where it is. When a turn is complete, methods compress what it added or
    everything that is live, as each documents; a turn that does not fit into what the context was
    made for is refused before anything is computed.

    Args:
      model: an NNX module or callable with the signature of `LanguageModel`, or a
        `FunctionalModel`.
      prompts: token ids of each row; rows may differ in length.
      transform: how to compress; `Full()` by default. A context has its own.
      max_new_tokens: most new tokens per row.
      end_tokens: a row is finished when one of them comes; it is not part of the result. By default
        the model's own (`eos_token_ids` of its `config`), if it has any.
      sampling: greedy by default.
      seed: of the draws, below 2**32; each row draws with its own key, by the position.
      context: from `read`, or from an earlier result.
      donate: give the memory of `context` to the result; it cannot be used again.
      on_tokens: called with the new tokens per row as they come, about ten times a second.
      on_layer: called with the number of each layer once it has read the prompt, in order.
      on_compile: called with what is about to be compiled.
      buckets: padded prompt lengths to choose from; by default four per power of two, from 64 on.
      dtype: of keys and values; see `init_cache`.

    Raises:
      TypeError, ValueError: before anything is computed: no prompts, an empty one, a token outside
        the vocabulary, more tokens than the model has positions, the buckets or the context hold.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> result = kvjax.generate(model, [[1, 2, 3]], transform=kvjax.SnapKV(64), max_new_tokens=4)
      >>> len(result.tokens[0])
      4
    """
    steps = _Writing(
        model, prompts, transform=transform, max_new_tokens=max_new_tokens, end_tokens=end_tokens,
        sampling=sampling, seed=seed, context=context, donate=donate, on_layer=on_layer,
        on_compile=on_compile, buckets=buckets, dtype=dtype, streaming=on_tokens is not None,
    )  # fmt: skip
    for new in steps:
        if on_tokens is not None:
            on_tokens(new)
    return steps.result


def stream(model: LanguageModel | FunctionalModel, prompts: Rows | None, **options: Any) -> Stream:
    """New tokens as they come: `generate` as an iterator.

    Args:
      model, prompts: as in `generate`.
      options: those of `generate` but `on_tokens`.

    Returns:
      An iterator over lists of new tokens, one per row, about ten times a second. When it has
      ended, `result` is what `generate` would have returned. Prompts are read when it is made.

    Raises:
      TypeError, ValueError: as `generate`.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> steps = kvjax.stream(model, [[1, 2, 3]], max_new_tokens=4)
      >>> rows = [token for new in steps for token in new[0]]
      >>> rows == steps.result.tokens[0]
      True
    """
    return Stream(_Writing(model, prompts, streaming=True, **options))


class Stream:
    """What `stream` returns: an iterator over new tokens per row, and then a result."""

    def __init__(self, writing: _Writing) -> None:
        self._writing, self._steps = writing, iter(writing)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> list[list[int]]:
        return next(self._steps)

    @property
    def result(self) -> Generation:
        """What `generate` would have returned.

        Raises:
          RuntimeError: there is more to come.
        """
        return self._writing.result


class _Choice(NamedTuple):
    """How tokens are chosen; arrays, so that nothing of it is compiled in."""

    numbers: Numbers
    end_tokens: Int[Array, " E"]
    key: Key[Array, ""]

    def tokens(
        self, logits: Float[Array, "B V"], position: Int[Array, " B"]
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        """A token for each row's position, and whether it ends the row."""
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self.key, jnp.arange(len(position)))
        chosen = self.numbers.choose(logits, jax.vmap(jax.random.fold_in)(keys, position))
        return chosen, jnp.isin(chosen, self.end_tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    """What the decode loop carries; donated from call to call.

    Args:
      logits: after each row's newest token that the caches hold.
      token: the newest token of each row, which the caches do not hold yet.
      position: its position.
      tokens: new tokens so far, -1 where there are none.
      done: rows that get no more tokens.
      step: new tokens so far.
    """

    caches: tuple[Cache, ...]
    logits: Float[Array, "B V"]
    token: Int[Array, " B"]
    position: Int[Array, " B"]
    tokens: Int[Array, "B N"]
    done: Bool[Array, " B"]
    step: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=0)
def _first_tokens(size: int, choice: _Choice, logits, position, active) -> tuple[Array, ...]:
    """Each active row's first token, those so far, and which rows get no more."""
    token, ends = choice.tokens(logits, position)
    first = jnp.where(active, token, -1)
    return token, jnp.full((len(token), size), -1, jnp.int32).at[:, 0].set(first), ends | ~active


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(
    layers: tuple[KVTransform, ...],
    model: FunctionalModel,
    loop: _Loop,
    until: Int[Array, ""],
    choice: _Choice,
) -> _Loop:
    """Goes on until `until` new tokens are there or every row is done."""

    def step(loop: _Loop) -> _Loop:
        done = loop.done
        at = jnp.where(done, -1, loop.position)
        logits, caches = decode_step(model, layers, loop.caches, loop.token, at)
        logits = jnp.where(done[:, None], loop.logits, logits.astype(loop.logits.dtype))
        position = jnp.where(done, loop.position, loop.position + 1)
        token, ends = choice.tokens(logits, position)
        kept = jnp.where(done, -1, token)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, kept[:, None], loop.step, 1)
        token = jnp.where(done, loop.token, token)
        return _Loop(caches, logits, token, position, tokens, done | ends, loop.step + 1)

    return jax.lax.while_loop(lambda x: (x.step < until) & ~x.done.all(), step, loop)


# Of one layer: layers whose caches are alike share the compiled code.
_flush_layer = jax.jit(flush, static_argnums=1, donate_argnums=0)


def _kind(cache: Cache) -> Hashable:
    """What caches that share compiled code have in common."""
    return jax.tree.structure(cache), tuple(x.shape for x in jax.tree.leaves(cache))


class _Writing:
    """One call of `generate`: prompts are read when it is made, iterating writes tokens."""

    def __init__(
        self,
        model: LanguageModel | FunctionalModel,
        prompts: Rows | None,
        *,
        streaming: bool,
        transform: KVTransform | None = None,
        max_new_tokens: int = 128,
        end_tokens: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        context: Context | None = None,
        donate: bool = False,
        on_layer: Callable[[int], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
        buckets: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        self._model = as_functional(model)
        self._compiler, self._streaming = Compiler(on_compile), streaming
        check_count("max_new_tokens", max_new_tokens, 1)
        check_seed(seed)
        ends = _end_tokens(model, end_tokens)
        sampling = Sampling() if sampling is None else sampling
        self._choice = _Choice(sampling.numbers, jnp.asarray(ends), jax.random.key(seed))
        self._ends, self._most, self._keeps = set(ends.tolist()), max_new_tokens, True
        start = time.perf_counter()
        if context is None:
            if prompts is None:
                raise ValueError("generate needs prompts, or a context to go on from")
            self._keeps = False
            transform = Full() if transform is None else transform
            layers = bind(transform, self._model.num_layers)
            check_prompts(self._model, prompts, layers, max_new_tokens)
            padded = _bucket(max(map(len, prompts)), self._model.max_positions, buckets)
            size = CacheSize.of(
                self._model, len(prompts), padded, _bucket(max_new_tokens, None, None), dtype
            )
            how = transform, layers, size
            context = _begin(self._model, prompts, padded, *how, self._compiler, on_layer)
        else:
            if transform is not None:
                raise ValueError("a context has its own transform, got transform= as well")
            check_turn(self._model, context, prompts, max_new_tokens)
            if prompts is not None and context.rows < len(prompts):
                context = context.repeat(len(prompts))
            elif not donate:
                context = context.copy()
            if prompts is not None:
                context = _further(self._model, context, prompts, buckets, self._compiler, on_layer)
        self._active = np.array(
            [prompts is None or prompts[row] is not None for row in range(context.rows)]
        )
        self._read = [0] * context.rows if prompts is None else [len(row or ()) for row in prompts]
        self._context, self._result = context, None
        first = (
            _bucket(max_new_tokens, None, None), self._choice, context.logits, context.length,
            self._active,
        )  # fmt: skip
        self._compiler.compile("the choice of a token", "first", _first_tokens, *first)
        token, tokens, done = jax.block_until_ready(_first_tokens(*first))
        self._ttft = time.perf_counter() - start - self._compiler.seconds
        self._loop = _Loop(
            context.caches, context.logits, token, context.length, tokens, done, jnp.int32(1)
        )
        self._waiting, self._seconds = int(context.waiting), 0.0

    @property
    def result(self) -> Generation:
        """What was written, once all of it is."""
        if self._result is None:
            raise RuntimeError("the result is there when all tokens have come")
        return self._result

    def __iter__(self) -> Iterator[list[list[int]]]:
        """New tokens of each row, without end tokens; all of them at once if not streaming."""
        self._compile_loop()
        step, sent, chunk = 1, 0, 1 if self._streaming else self._most
        while True:
            over = step >= self._most or bool(self._loop.done.all())
            if self._streaming or over:
                new = np.asarray(self._loop.tokens)[:, sent:step].tolist()
                sent = step
                yield [[t for t in row if t >= 0 and t not in self._ends] for row in new]
            if over:
                break
            start, before = time.perf_counter(), step
            self._go_on(min(step + chunk, self._most))
            step = int(self._loop.step)
            seconds = time.perf_counter() - start
            self._seconds += seconds
            if self._streaming:
                chunk = int(np.clip(_STREAM_SECONDS * (step - before) / seconds, 1, 256))
        self._finish()

    def _compile_loop(self) -> None:
        """Compiles the decode loop and, where there is something to flush, the flush."""
        given = self._context.layers, self._model, self._loop, jnp.int32(0), self._choice
        self._compiler.compile("the decode loop", "loop", _decode, *given)
        interval = flush_interval(self._loop.caches)
        if interval is not None and self._waiting + self._most > interval:
            for cache in self._loop.caches:  # JAX lowers equal layers once
                self._compiler.compile("the flush", _kind(cache), _flush_layer, cache, interval)

    def _go_on(self, until: int) -> None:
        """Decode steps up to `until` new tokens, or up to the next flush, which comes first."""
        interval, loop = flush_interval(self._loop.caches), self._loop
        step = int(loop.step)
        if interval is not None:
            if self._waiting >= interval:
                flushed = tuple(_flush_layer(cache, interval) for cache in loop.caches)
                loop, self._waiting = dataclasses.replace(loop, caches=flushed), 0
            until = min(until, step + interval - self._waiting)
        given = self._context.layers, self._model, loop, jnp.int32(until), self._choice
        self._loop = jax.block_until_ready(_decode(*given))
        self._waiting += int(self._loop.step) - step

    def _finish(self) -> None:
        """Makes the result, and lets the caches take the newest tokens where they are kept."""
        loop, context = self._loop, self._context
        rows = [[token for token in row if token >= 0] for row in np.asarray(loop.tokens).tolist()]
        ended = [bool(row) and row[-1] in self._ends for row in rows]
        steps = int(loop.step) - 1
        kept = None
        if self._keeps:
            # One step more, whose choice of a token is dropped.
            self._loop = dataclasses.replace(loop, done=jnp.asarray(~self._active))
            self._go_on(steps + 2)
            loop = self._loop
            kept = dataclasses.replace(
                context,
                caches=loop.caches,
                logits=loop.logits,
                length=loop.position,
                new_tokens=context.new_tokens + np.array([len(row) for row in rows], np.int32),
                waiting=jnp.int32(self._waiting),
            )
        full = (Full(),) * len(context.layers)
        size = context.size
        full_caches = jax.eval_shape(
            lambda: tuple(size.cache(one, layer) for layer, one in enumerate(full))
        )
        self._result = Generation(
            tokens=[row[:-1] if end else row for row, end in zip(rows, ended, strict=True)],
            ended=ended,
            prompt_tokens=self._read,
            ttft_s=self._ttft,
            tpot_s=self._seconds / steps if steps else None,
            compile_s=self._compiler.seconds,
            cache_bytes=nbytes(loop.caches),
            full_cache_bytes=nbytes(full_caches),
            memory_bytes=memory_bytes(loop.caches),
            recall=recall_statistics(loop.caches),
            dropped=sum(int(part.kv.dropped.sum()) for part in layer_caches(loop.caches)),
            context=kept,
        )
        self._loop = None  # frees the caches


def _begin(
    model: FunctionalModel,
    prompts: Sequence[Sequence[int]],
    padded: int,
    transform: KVTransform,
    layers: tuple[KVTransform, ...],
    size: CacheSize,
    compiler: Compiler,
    on_layer: Callable[[int], None] | None,
) -> Context:
    """A context of new caches that hold these prompts."""
    tokens, positions = map(jnp.asarray, pad(prompts, padded))
    logits, caches = read_prompt(model, layers, tokens, positions, size, compiler, on_layer)
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    none, never = np.zeros_like(length), np.int32(0)
    counts = map(jnp.asarray, (length, length, none, never))
    return Context(caches, logits, *counts, transform, layers, size)


def _further(
    model: FunctionalModel,
    context: Context,
    prompts: Rows,
    buckets: Sequence[int] | None,
    compiler: Compiler,
    on_layer: Callable[[int], None] | None,
) -> Context:
    """A context that has read one more prompt of each row that has one; donates the given one."""
    count = np.array([len(row or ()) for row in prompts], np.int32)
    rows = [np.asarray(row or (), np.int32) for row in prompts]
    tokens, places = pad(rows, _bucket(int(count.max()), None, buckets))
    length = np.asarray(context.length)
    positions = np.where(places >= 0, places + length[:, None], -1)
    given = model, context.layers, jnp.asarray(tokens), jnp.asarray(positions)
    logits, caches = read_prompt(*given, context.caches, compiler, on_layer)
    active, waiting = count > 0, context.waiting
    interval = flush_interval(caches)
    if active.all():
        waiting = jnp.int32(0)  # a prompt's end is a flush of its rows
    elif interval is not None:
        for cache in caches:
            compiler.compile("the flush", _kind(cache), _flush_layer, cache, interval)
        caches = tuple(_flush_layer(cache, interval) for cache in caches)
        waiting = jnp.int32(0)
    return dataclasses.replace(
        context,
        caches=caches,
        logits=jnp.where(active[:, None], logits, context.logits),
        length=jnp.asarray(length + count),
        prompt_tokens=context.prompt_tokens + count,
        waiting=waiting,
    )


def _end_tokens(model: object, given: Sequence[int] | None) -> Int[np.ndarray, " E"]:
    """End tokens, the model's own where none are given, padded with -1."""
    if given is None:
        given = getattr(getattr(model, "config", None), "eos_token_ids", ())
    for token in given:
        if not isinstance(token, int | np.integer) or not 0 <= token < 2**31:
            raise ValueError(f"end tokens must be token ids from 0 to 2**31 - 1, got {token!r}")
    places = max(-(-len(given) // _END_TOKENS), 1) * _END_TOKENS
    return np.array([*given, *[-1] * (places - len(given))], np.int32)


def _bucket(length: int, max_positions: int | None, buckets: Sequence[int] | None) -> int:
    """The smallest bucket that holds a prompt: at most a quarter of it is padding from 64 on."""
    if buckets is not None:
        fitting = [size for size in buckets if size >= length]
        if not fitting:
            raise ValueError(f"the longest bucket must hold {length} tokens, got {tuple(buckets)}")
        return min(fitting)
    step = max(64, 2 ** (length.bit_length() - 3))
    size = -(-length // step) * step
    return size if max_positions is None else max(length, min(size, max_positions))


def check_prompts(
    model: Sized,
    prompts: Sequence[Sequence[int]],
    layers: tuple[KVTransform, ...],
    max_new: int,
) -> None:
    """Raises what `generate` would raise for these prompts, before any weight has been loaded.

    Args:
      model: a model, or the configuration of one.
      prompts, max_new: as given to `generate` (`max_new_tokens`).
      layers: one transform per layer.
    """
    if not len(prompts):
        raise ValueError("generate needs at least one prompt, got none")
    for row, prompt in enumerate(prompts):
        _check_row(model, row, prompt)
    limit, longest = model.max_positions, max(len(prompt) for prompt in prompts)
    beyond = all(layer.needs.reposition for layer in layers)
    if limit is not None and (longest > limit or (longest + max_new > limit and not beyond)):
        raise ValueError(
            f"the model has {limit} positions, got a prompt of {longest} tokens and "
            f"{max_new} new ones"
        )


def check_turn(
    model: FunctionalModel, context: Context, prompts: Rows | None, max_new: int
) -> None:
    """Raises what `generate` would raise for a further turn of this context."""
    if any(x.is_deleted() for x in jax.tree.leaves(context.caches)):
        raise ValueError("the context has been given away with donate=True: take the result's")
    own = (model.num_layers, model.kv_heads, model.query_heads, model.head_dim)
    size = context.size
    others = (len(context.layers), size.kv_heads, size.query_heads, size.head_dim)
    if own != others:
        raise ValueError(
            "the context must be of this model: layers, KV heads, query heads and head_dim are "
            f"{others}, the model's {own}"
        )
    if prompts is None:
        count = np.zeros(context.rows, int)
    else:
        if len(prompts) != context.rows and (context.rows > 1 or not len(prompts)):
            raise ValueError(
                f"prompts must be of the context's {context.rows} rows, got {len(prompts)}"
            )
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                _check_row(model, row, prompt)
        count = np.array([len(prompt or ()) for prompt in prompts])
        if not count.any():
            raise ValueError("a turn needs a prompt of one row at least, got None for all")
    active = count > 0 if count.any() else np.ones(len(count), bool)
    limit, beyond = model.max_positions, all(layer.needs.reposition for layer in context.layers)
    for name, known, more, most in (
        ("max_prompt", context.prompt_tokens, count, size.max_prompt),
        ("max_new", context.new_tokens, active * max_new, size.max_new),
        ("positions", context.length, count + active * max_new, None if beyond else limit),
    ):
        total = np.broadcast_to(np.asarray(known), count.shape) + more
        if most is not None and (total[active] > most).any():
            row = int(np.argmax(np.where(active, total, -1)))
            raise ValueError(
                f"the context has {name} = {most}, and row {row} would need {total[row]}: "
                f"{total[row] - more[row]} so far and {more[row]} more"
            )


def _check_row(model: Sized, row: int, prompt: Sequence[int]) -> None:
    if isinstance(prompt, str):
        raise TypeError(f"prompts are token ids, got the text {prompt!r:.40} in row {row}")
    ids = np.asarray(prompt)
    if ids.ndim != 1:
        raise TypeError(f"each prompt must be a sequence of token ids, got {prompt!r:.40}")
    if not ids.size:
        raise ValueError(f"a prompt must have at least one token, row {row} is empty")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"token ids must be integers, got {ids.dtype} in row {row}")
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)][0]
        raise ValueError(f"token ids must lie in [0, {model.vocab_size}), got {wrong} in row {row}")
