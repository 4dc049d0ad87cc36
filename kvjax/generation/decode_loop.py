"""Does the work of `generate` and `stream`: reads prompts into a context and decodes tokens."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.attention.dropped import check_dropped
from kvjax.attention.flush import flush_interval
from kvjax.attention.layer import Cache
from kvjax.attention.parts import mesh_of_cache, placed
from kvjax.cache.nbytes import memory_bytes
from kvjax.checks import check_count
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.devices import by_rows, divided, mesh_of, put
from kvjax.generation.calibration import with_named
from kvjax.generation.compiler import Compiler, Programs, Tracer
from kvjax.generation.context import Context, delete
from kvjax.generation.documents import Document
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize, abstract_array
from kvjax.generation.prompt_checks import (
    Rows,
    as_rows,
    bucket,
    check_prompts,
    check_turn,
    end_token_array,
)
from kvjax.generation.sampling import Numbers, Sampling, most_likely
from kvjax.generation.steps import decode_step
from kvjax.generation.turns import Start, compile_flush, first_turn, flush_all, further_turn
from kvjax.protocol import Full, KVTransform
from kvjax.registry import as_transform
from kvjax.storage.offload.transform import RecallStatistics, recall_statistics
from kvjax.transforms.random import GENERATOR, check_seed
from pallas_kernels.base.annotations import NoneElsewhere

_STREAM_SECONDS = 0.1  # about how often a streaming loop comes back to the host
_MAX_STREAM_STEPS = 256  # decode steps between two returns to the host, at most
_SHARED_STREAM_STEPS = 16  # exact number of steps where several processes must agree on it


@dataclass(frozen=True)
class Generation:
    """New tokens and what they cost: the result of `kvjax.generate`.

    Args:
      tokens: new tokens per row, without the end token.
      ended: whether each row came to an end token.
      prompt_tokens: tokens per row that this call read.
      ttft_s: seconds of the prompt pass up to the first token, without compilation.
      tpot_s: seconds per further token (a decode step for all rows); None if there was none. With
        `on_tokens` it includes that callback.
      compile_s: seconds of tracing and compiling; next to nothing on a second call.
      cache_bytes: bytes of all cache arrays as they are allocated: for the padded prompt, with
        room for new tokens and with index structures.
      full_cache_bytes: bytes that `Full` would take for the same padded prompt and new tokens.
        Layers with windows are rings there too.
      memory_bytes: `cache_bytes` by the kind of memory: `"device"`, and `"pinned_host"` for what
        `Offload` keeps there.
      recall: how often the rows that a step selected were already on the device, and how many had
        to be fetched from host memory; None where nothing is offloaded.
      context: caches and logits after this call, from which a later call goes on, end tokens
        included, with their room (see `Context.at_rest`); None unless `generate` was given one.
      ended_by: the end token that each row came to; None for a row that came to none.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> def forward(params, tokens, positions, caches):  # a model that repeats its last token
      ...     x = params[tokens]
      ...     out, cache = caches[0].attend(x[:, :, None], x[:, :, None], x[:, :, None])
      ...     return (x + out[:, :, 0]) @ params.T, (cache,)
      >>> model = kvjax.guests.functional_model(forward, jnp.eye(8), num_layers=1, query_heads=1,
      ...                                       kv_heads=1, head_dim=8, vocab_size=8)
      >>> result = kvjax.generate(model, [[3, 1, 4, 1] * 16], transform="snapkv(budget=32)",
      ...                         max_new_tokens=3, end_tokens=())
      >>> result.tokens, result.ended, result.prompt_tokens
      ([[1, 1, 1]], [False], [64])
      >>> result.cache_bytes < result.full_cache_bytes
      True
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
    context: Context | None = None
    ended_by: list[int | None] = field(default_factory=list)


class _Choice(NamedTuple):
    """The settings by which tokens are chosen: arrays, so that other settings compile nothing."""

    numbers: Numbers
    end_tokens: Int[Array, " E"]
    key: Key[Array, ""]

    def tokens(
        self, logits: Float[Array, "B V"], position: Int[Array, " B"], seen: Bool[Array, "B V"]
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
        """Returns each row's token, whether it ends the row, and whether its logits are finite."""
        # A draw depends on seed, row and position alone, and not on how calls divide the steps.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self.key, jnp.arange(len(position)))
        keys = jax.vmap(jax.random.fold_in)(keys, position)
        chosen, finite = self.numbers.choose(logits, keys, seen)
        return chosen, jnp.isin(chosen, self.end_tokens), finite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    """The state of the decode loop, donated from call to call.

    Args:
      caches: the cache of each layer.
      logits: logits after each row's newest token that the caches hold.
      token: the newest token of each row, which the caches do not hold yet.
      position: the position of that token.
      tokens: new tokens so far, -1 where there are none.
      done: whether a row gets no more tokens.
      seen: which tokens of the vocabulary each row has read or written.
      broken: whether a row's logits were not finite in the last step, which ends the loop.
      step: number of new tokens so far.
    """

    caches: tuple[Cache, ...]
    logits: Float[Array, "B V"]
    token: Int[Array, " B"]
    position: Int[Array, " B"]
    tokens: Int[Array, "B N"]
    done: Bool[Array, " B"]
    seen: Bool[Array, "B V"]
    broken: Bool[Array, " B"]
    step: Int[Array, ""]


@compiled(static_argnums=(0, 1, 2))
def _first_tokens(
    size: int, greedy: bool, mesh: Mesh | None, choice: _Choice, logits, position, seen, active
) -> tuple[Array, ...]:
    """Chooses the first token of each active row.

    Args:
      size: most new tokens that the loop has room for.
      greedy: whether `choice` takes the most likely token. It is static because a draw takes ten
        times as long to compile.

    Returns:
      `token`, `tokens`, `done`, `seen` and `broken` of the `_Loop`.
    """
    if greedy:
        token, finite = most_likely(choice.numbers.penalised(logits, seen))
        ends = jnp.isin(token, choice.end_tokens)
    else:
        token, ends, finite = choice.tokens(logits, position, seen)
    first = jnp.where(active, token, -1)
    tokens = jnp.full((len(token), size), -1, jnp.int32).at[:, 0].set(first)
    token, tokens, done, broken = (
        divided(x, mesh) for x in (token, tokens, ends | ~active, active & ~finite)
    )
    return token, tokens, done, by_rows(_with_tokens(seen, token, active), mesh), broken


def _with_tokens(
    seen: Bool[Array, "B V"], token: Int[Array, " B"], active: Bool[Array, " B"]
) -> Bool[Array, "B V"]:
    """Adds one more token of each active row to the tokens that rows have seen."""
    return jax.vmap(lambda row, token, active: row.at[token].set(row[token] | active))(
        seen, token, active
    )


@compiled(static_argnums=0, donate_argnums=2)
def _decode(
    layers: tuple[KVTransform, ...],
    model: FunctionalModel,
    loop: _Loop,
    until: Int[Array, ""],
    choice: _Choice,
) -> _Loop:
    """Decodes until there are `until` new tokens, every row is done, or logits are not finite.

    On a mesh, logits and caches are divided; what the host reads is on every device.
    """
    mesh = mesh_of_cache(loop.caches[0])

    def step(loop: _Loop) -> _Loop:
        done = loop.done
        # Rows that are done take part with position -1, which leaves their caches as they are.
        token, position = (
            by_rows(x, mesh) for x in (loop.token, jnp.where(done, -1, loop.position))
        )
        logits, caches = decode_step(model, layers, loop.caches, token, position)
        logits = by_rows(logits, mesh)
        logits = jnp.where(done[:, None], loop.logits, logits.astype(loop.logits.dtype))
        position = jnp.where(done, loop.position, loop.position + 1)
        token, ends, finite = (divided(x, mesh) for x in choice.tokens(logits, position, loop.seen))
        new_token = jnp.where(done, -1, token)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, new_token[:, None], loop.step, 1)
        return _Loop(
            caches=caches,
            logits=logits,
            token=jnp.where(done, loop.token, token),
            position=position,
            tokens=tokens,
            done=done | ends,
            seen=by_rows(_with_tokens(loop.seen, token, ~done), mesh),
            broken=~(done | finite),
            step=loop.step + 1,
        )

    def goes_on(loop: _Loop) -> Bool[Array, ""]:
        return (loop.step < until) & ~loop.done.all() & ~loop.broken.any()

    loop = jax.lax.while_loop(goes_on, step, loop)
    read_by_host = ("token", "position", "tokens", "done", "broken", "step")
    replicated = {name: divided(getattr(loop, name), mesh) for name in read_by_host}
    by_row = {name: by_rows(getattr(loop, name), mesh) for name in ("logits", "seen")}
    caches = tuple(map(placed, loop.caches))
    return dataclasses.replace(loop, caches=caches, **by_row, **replicated)


def _key(seed: int, mesh: Mesh | None) -> Key[Array, ""]:
    """Makes the key of the draws, on every device of the mesh."""
    if mesh is None:
        return jax.random.key(seed, impl=GENERATOR)
    replicated = NamedSharding(mesh, PartitionSpec())
    make_key = jax.jit(jax.random.key, static_argnames="impl", out_shardings=replicated)
    return make_key(np.uint32(seed), impl=GENERATOR)


def _active_rows(prompts: Rows | None, rows: int) -> Bool[np.ndarray, " B"]:
    """Marks the rows that take part: all without prompts, else those whose prompt is not None."""
    return np.array([prompts is None or prompts[row] is not None for row in range(rows)])


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `generate` beside model, prompts and context, with their defaults."""

    transform: KVTransform | str | None = None
    max_new_tokens: int = 128
    end_tokens: Sequence[int] | None = None
    sampling: Sampling | None = None
    seed: int = 0
    donate: bool = False
    on_layer: Callable[[int], None] | None = None
    on_compile: Callable[[str], None] | None = None
    buckets: Sequence[int] | None = None
    dtype: DTypeLike | None = None
    document: Document | None = None


class Writing:
    """One call of `generate`, in stages: `read` reads the prompts, iteration decodes tokens.

    Args:
      model: as in `generate`.
      options: as in `generate`.
      streaming: whether iteration yields tokens as they come; else it yields all of them at once.
    """

    def __init__(
        self, model: LanguageModel | FunctionalModel, options: Options, *, streaming: bool
    ) -> None:
        self._model = as_functional(model)
        self._mesh = mesh_of(self._model.params)
        self._compiler = Compiler(options.on_compile, options.on_layer)
        self._options, self._streaming = options, streaming

        check_count("max_new_tokens", options.max_new_tokens, 1)
        check_seed(options.seed)
        end_token_ids = end_token_array(model, options.end_tokens)
        sampling = Sampling() if options.sampling is None else options.sampling
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a kvjax.Sampling, got {sampling!r:.80}")
        self._choice = _Choice(
            numbers=sampling.numbers,
            end_tokens=put(end_token_ids, self._mesh),
            key=_key(options.seed, self._mesh),
        )
        self._end_tokens = set(end_token_ids.tolist())
        self._max_new_tokens = options.max_new_tokens
        # Padded like a prompt, so that few sizes of the loop and of caches are compiled.
        self._room = bucket(options.max_new_tokens, None, None)
        self._result: Generation | None = None
        # Caches at rest that were copied, and are freed when nothing can be refused any more.
        self._given_away: tuple[Cache, ...] = ()

    def read(self, prompts: Rows | None, context: Context | None) -> Writing:
        """Reads the prompts, chooses the first token of each row, and returns itself."""
        prompts = None if prompts is None else as_rows(prompts)
        start, self._keeps_context = time.perf_counter(), context is not None
        if context is None:
            context = self._first_turn(prompts)  # pyright: ignore[reportArgumentType]  # which refuses None
        else:
            context = self._further_turn(prompts, context)
        self._context: Context | NoneElsewhere = context
        self._active = _active_rows(prompts, context.rows)
        self._prompt_tokens = (
            [0] * context.rows if prompts is None else [len(row or ()) for row in prompts]
        )
        self._loop: _Loop | NoneElsewhere = jax.block_until_ready(
            self._first_loop(
                self._compiler, context.held, context.logits, context.length, context.seen,
                self._active,
            )
        )  # fmt: skip
        self._ttft = time.perf_counter() - start - self._compiler.seconds
        self._check_finite()
        self._waiting, self._decode_seconds = int(context.waiting), 0.0
        return self

    def _first_turn(self, prompts: Sequence[Sequence[int]] | None) -> Context:
        """Reads prompts into new caches, with room for the new tokens."""
        model, options = self._model, self._options
        if prompts is None:
            raise ValueError("generate needs prompts, or a context to go on from")
        transform = Full() if options.transform is None else options.transform
        transform = with_named(as_transform(transform, "generate"), model)
        unsized_layers = bind(transform, model.num_layers, model.windows)
        check_prompts(model, prompts, unsized_layers, self._max_new_tokens)
        widths = [bucket(len(row), model.max_positions, options.buckets) for row in prompts]
        max_length = max(map(len, prompts)) + self._max_new_tokens
        size = CacheSize.of(model, len(prompts), max(widths), self._room, options.dtype, max_length)
        layers = bind(transform, model.num_layers, model.windows, size.max_tokens)
        return first_turn(
            model, prompts, Start(transform, layers, size, widths), self._compiler,
            options.document, then=functools.partial(self._trace_loop, layers, prompts),
        )  # fmt: skip

    def _further_turn(self, prompts: Rows | None, context: Context) -> Context:
        """Reads prompts into the caches of a context, which stays as it is unless donated."""
        options = self._options
        if options.transform is not None:
            raise ValueError("a context has its own transform, got transform= as well")
        if options.dtype is not None:
            raise ValueError("a context has its own dtype, got dtype= as well")
        check_turn(self._model, context, prompts, self._max_new_tokens, options.document)
        given, context = context, context.awake(compiler=self._compiler)
        if prompts is not None and context.rows < len(prompts):
            context = context.repeat(len(prompts))
        elif context is given and not options.donate:
            context = context.copy()
        if prompts is not None:
            context = further_turn(
                self._model, context, prompts, options.buckets, self._compiler, options.document,
                then=functools.partial(self._trace_loop, context.layers, prompts),
            )  # fmt: skip
        if options.donate and given.resting and given.rows == context.rows:
            self._given_away = given.held
        return context

    @property
    def result(self) -> Generation:
        """The result of the call, once all tokens have been decoded.

        Raises:
          RuntimeError: there are more tokens to come.
        """
        if self._result is None:
            raise RuntimeError("the result is there only when all tokens have come")
        return self._result

    def stop(self) -> Generation:
        """Ends here, unless all tokens have come, and returns the result of the tokens so far."""
        if self._result is None:
            self._finish()
        return self.result

    def __iter__(self) -> Generator[list[list[int]], None, None]:
        """Yields new tokens of each row without end tokens, all of them at once if not streaming.

        Decode steps run on the device in chunks. While streaming, a chunk is as many steps as take
        about `_STREAM_SECONDS` at the speed of the chunk before it.
        """
        self._compile_loop(self._compiler, self._context.layers, self._loop, self._waiting)
        delete(self._given_away)
        step, sent, chunk = 1, 0, 1 if self._streaming else self._max_new_tokens
        while True:
            over = step >= self._max_new_tokens or bool(np.asarray(self._loop.done).all())
            if self._streaming or over:
                new_tokens = np.asarray(self._loop.tokens)[:, sent:step].tolist()
                sent = step
                yield [
                    [token for token in row if token >= 0 and token not in self._end_tokens]
                    for row in new_tokens
                ]
            if over:
                break
            start, first_step = time.perf_counter(), step
            self._decode_until(min(step + chunk, self._max_new_tokens))
            step = int(self._loop.step)
            seconds = time.perf_counter() - start
            self._decode_seconds += seconds
            self._check_finite()
            if self._streaming:
                steps_in_time = _STREAM_SECONDS * (step - first_step) / seconds
                chunk = int(np.clip(steps_in_time, 1, _MAX_STREAM_STEPS))
                if jax.process_count() > 1:  # each of them measures another time
                    chunk = _SHARED_STREAM_STEPS
        self._finish()

    def _first_loop(
        self, compiler: Programs, caches: tuple[Cache, ...], logits, length, seen, active
    ) -> _Loop:
        """Chooses the first token of each active row."""
        greedy = bool(self._choice.numbers.temperature == 0)
        token, tokens, done, seen, broken = compiler.run(
            "the choice of a token", _first_tokens,
            self._room, greedy, self._mesh, self._choice, logits, length, seen, active,
        )  # fmt: skip
        return _Loop(
            caches=caches,
            logits=logits,
            token=token,
            position=length,
            tokens=tokens,
            done=done,
            seen=seen,
            broken=broken,
            step=put(np.int32(1), self._mesh),
        )

    def _trace_loop(
        self,
        layers: tuple[KVTransform, ...],
        prompts: Rows,
        tracer: Tracer,
        logits: Float[Array, "B V"],
        caches: tuple[Cache, ...],
    ) -> None:
        """Traces all that follows these prompts: `then` of `read_prompt`."""
        rows = len(prompts)
        length = abstract_array((rows,), jnp.int32)
        seen = abstract_array((rows, self._model.vocab_size), jnp.bool_)
        active = _active_rows(prompts, rows)
        loop = self._first_loop(tracer, caches, logits, length, seen, active)
        self._compile_loop(tracer, layers, loop, 0)

    def _compile_loop(
        self, compiler: Programs, layers: tuple[KVTransform, ...], loop: _Loop, waiting: int
    ) -> None:
        """Compiles the decode loop and, if these steps will reach a flush, the flush."""
        until = put(np.int32(0), self._mesh)  # any number: it is an array of the compiled loop
        compiler.compile("the decode loop", _decode, layers, self._model, loop, until, self._choice)
        interval = flush_interval(loop.caches)
        if interval is not None and waiting + self._max_new_tokens > interval:
            compile_flush(compiler, loop.caches, interval)

    def _decode_until(self, until: int) -> None:
        """Flushes if it is time, then decodes up to `until` new tokens or to the next flush."""
        interval, loop = flush_interval(self._loop.caches), self._loop
        step = int(loop.step)
        if interval is not None:
            if self._waiting >= interval:
                flushed = flush_all(loop.caches, interval)
                loop, self._waiting = dataclasses.replace(loop, caches=flushed), 0
            until = min(until, step + interval - self._waiting)
        self._loop = jax.block_until_ready(
            _decode(
                self._context.layers,
                self._model,
                loop,
                put(np.int32(until), self._mesh),
                self._choice,
            )
        )
        self._waiting += int(self._loop.step) - step

    def _check_finite(self) -> None:
        """Raises FloatingPointError if a row's logits were NaN or infinite in the last step."""
        broken = np.asarray(self._loop.broken)
        if broken.any():
            row = int(broken.argmax())
            raise FloatingPointError(
                f"row {row}: the logits for new token {int(self._loop.step)}, at position "
                f"{int(self._loop.position[row])}, are NaN or infinite; the model's weights, or a "
                "cache dtype with too small a range, make numbers that are not finite"
            )

    def _finish(self) -> None:
        """Makes the result; if the context is kept, its caches take the newest token first."""
        loop, context = self._loop, self._context
        rows = [[token for token in row if token >= 0] for row in np.asarray(loop.tokens).tolist()]
        ended_by = [row[-1] if row and row[-1] in self._end_tokens else None for row in rows]
        ended = [end is not None for end in ended_by]
        steps, seen = int(loop.step) - 1, loop.seen
        if self._keeps_context:
            # The newest tokens are not in the caches yet. One more step writes them, and the tokens
            # that it chooses are dropped: from `seen` as well, which it donates, hence the copy.
            seen = seen.copy()
            self._loop = dataclasses.replace(loop, done=put(~self._active, self._mesh))
            self._decode_until(steps + 2)
            loop = self._loop
        context = dataclasses.replace(
            context,
            held=loop.caches,
            logits=loop.logits,
            length=loop.position,
            seen=seen,
            new_tokens=context.new_tokens + np.array([len(row) for row in rows], np.int32),
            waiting=put(np.int32(self._waiting), self._mesh),
        )
        check_dropped(context.held)
        self._result = Generation(
            tokens=[row[:-1] if end else row for row, end in zip(rows, ended, strict=True)],
            ended=ended,
            prompt_tokens=self._prompt_tokens,
            ttft_s=self._ttft,
            tpot_s=self._decode_seconds / steps if steps else None,
            compile_s=self._compiler.seconds,
            cache_bytes=context.nbytes,
            full_cache_bytes=context.full_nbytes,
            memory_bytes=memory_bytes(loop.caches),
            recall=recall_statistics(loop.caches),
            context=context if self._keeps_context else None,
            ended_by=ended_by,
        )
        self._loop = self._context = None  # frees the caches
