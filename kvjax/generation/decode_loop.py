"""Reading prompts into contexts and writing tokens from them: what `generate` and `stream` do."""

from __future__ import annotations

import dataclasses
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

from kvjax.attention.flush import flush_interval
from kvjax.attention.layer import Cache
from kvjax.attention.parts import mesh_of_cache, placed
from kvjax.cache.slots import memory_bytes
from kvjax.checks import check_count
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.devices import by_rows, divided, mesh_of, put
from kvjax.generation.compiler import Compiler
from kvjax.generation.context import Context
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import (
    Rows,
    as_rows,
    bucket,
    check_prompts,
    check_turn,
    end_token_array,
)
from kvjax.generation.prompt_pass import CacheSize
from kvjax.generation.sampling import Numbers, Sampling, most_likely
from kvjax.generation.steps import decode_step
from kvjax.generation.turns import begin, compile_flush, flush_all, further
from kvjax.protocol import Full, KVTransform
from kvjax.storage.offload.transform import RecallStatistics, recall_statistics
from kvjax.transforms.random import GENERATOR, check_seed

_STREAM_SECONDS = 0.1  # how often a streaming loop comes back to the host, about
_STREAM_STEPS = 16  # the same where several processes must agree on it


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
      cache_bytes: bytes of all cache arrays as they are allocated, for the padded prompt and with
        room for new tokens, index structures included.
      full_cache_bytes: what `Full` would hold for the same padded prompt and new tokens, windows of
        layers being rings as well.
      memory_bytes: `cache_bytes` by the kind of memory: `"device"`, and `"pinned_host"` for what
        `Offload` keeps there.
      recall: how often offloaded caches had what a step selected, and what crossed; None where
        nothing is offloaded.
      dropped: tokens that found no free slot and were lost, summed over layers, rows and lists of
        slots (one per KV head, or per query head for methods that need that). 0 unless a method
        keeps more than its `extent` promises.
      context: everything that was read and written, end tokens included, to go on from; None
        unless `generate` was given one.
      ended_by: the end token that each row came to; None for a row that came to none.
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
    ended_by: list[int | None] = field(default_factory=list)


class _Choice(NamedTuple):
    """How tokens are chosen; arrays, so that nothing of it is compiled in."""

    numbers: Numbers
    end_tokens: Int[Array, " E"]
    key: Key[Array, ""]

    def tokens(
        self, logits: Float[Array, "B V"], position: Int[Array, " B"], seen: Bool[Array, "B V"]
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
        """Each row's token, whether it ends the row, and whether the logits are finite."""
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self.key, jnp.arange(len(position)))
        keys = jax.vmap(jax.random.fold_in)(keys, position)
        chosen, finite = self.numbers.choose(logits, keys, seen)
        return chosen, jnp.isin(chosen, self.end_tokens), finite


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
      seen: the tokens that each row has read and written.
      broken: rows whose logits were not finite in the last step, which ends the loop.
      step: new tokens so far.
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
    """Each active row's first token; the tokens so far, which rows get no more, `seen`, `broken`.

    `greedy` says what the choice does as well: a draw compiles ten times as long.
    """
    if greedy:
        token, finite = most_likely(choice.numbers.penalised(logits, seen))
        ends = jnp.isin(token, choice.end_tokens)
    else:
        token, ends, finite = choice.tokens(logits, position, seen)
    first = jnp.where(active, token, -1)
    tokens = jnp.full((len(token), size), -1, jnp.int32).at[:, 0].set(first)
    read = (divided(x, mesh) for x in (token, tokens, ends | ~active, active & ~finite))
    token, tokens, done, broken = read
    return token, tokens, done, by_rows(_with_tokens(seen, token, active), mesh), broken


def _with_tokens(
    seen: Bool[Array, "B V"], token: Int[Array, " B"], active: Bool[Array, " B"]
) -> Bool[Array, "B V"]:
    """The tokens that rows have seen, and one more of each active row."""
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
    """Goes on until `until` new tokens are there or every row is done.

    On a mesh, logits and caches are divided; what the host reads is on every device.
    """
    mesh = mesh_of_cache(loop.caches[0])

    def step(loop: _Loop) -> _Loop:
        done = loop.done
        token, at = (by_rows(x, mesh) for x in (loop.token, jnp.where(done, -1, loop.position)))
        logits, caches = decode_step(model, layers, loop.caches, token, at)
        logits = by_rows(logits, mesh)
        logits = jnp.where(done[:, None], loop.logits, logits.astype(loop.logits.dtype))
        position = jnp.where(done, loop.position, loop.position + 1)
        chosen = choice.tokens(logits, position, loop.seen)
        token, ends, finite = (divided(x, mesh) for x in chosen)
        kept = jnp.where(done, -1, token)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, kept[:, None], loop.step, 1)
        seen = by_rows(_with_tokens(loop.seen, token, ~done), mesh)
        token = jnp.where(done, loop.token, token)
        broken = ~(done | finite)
        return _Loop(
            caches, logits, token, position, tokens, done | ends, seen, broken, loop.step + 1
        )

    def goes_on(loop: _Loop) -> Bool[Array, ""]:
        return (loop.step < until) & ~loop.done.all() & ~loop.broken.any()

    loop = jax.lax.while_loop(goes_on, step, loop)
    read = ("token", "position", "tokens", "done", "broken", "step")
    replicated = {name: divided(getattr(loop, name), mesh) for name in read}
    rows = {name: by_rows(getattr(loop, name), mesh) for name in ("logits", "seen")}
    caches = tuple(map(placed, loop.caches))
    return dataclasses.replace(loop, caches=caches, **rows, **replicated)


def _key(seed: int, mesh: Mesh | None) -> Key[Array, ""]:
    """The key of the draws, on every device."""
    if mesh is None:
        return jax.random.key(seed, impl=GENERATOR)
    where = NamedSharding(mesh, PartitionSpec())
    make = jax.jit(jax.random.key, static_argnames="impl", out_shardings=where)
    return make(np.uint32(seed), impl=GENERATOR)


class Writing:
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
        ends = end_token_array(model, end_tokens)
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a kvjax.Sampling, got {sampling!r:.80}")
        prompts = None if prompts is None else as_rows(prompts)
        self._mesh = mesh = mesh_of(self._model.params)
        self._choice = _Choice(sampling.numbers, put(ends, mesh), _key(seed, mesh))
        self._ends, self._most, self._keeps = set(ends.tolist()), max_new_tokens, True
        room = bucket(max_new_tokens, None, None)
        start = time.perf_counter()
        if context is None:
            if prompts is None:
                raise ValueError("generate needs prompts, or a context to go on from")
            self._keeps = False
            transform = Full() if transform is None else transform
            of_model = self._model.num_layers, self._model.windows
            check_prompts(self._model, prompts, bind(transform, *of_model), max_new_tokens)
            widths = [bucket(len(row), self._model.max_positions, buckets) for row in prompts]
            tokens = max(map(len, prompts)) + max_new_tokens
            size = CacheSize.of(self._model, len(prompts), max(widths), room, dtype, tokens)
            how = transform, bind(transform, *of_model, size.max_tokens), size
            context = begin(self._model, prompts, widths, *how, self._compiler, on_layer)
        else:
            if transform is not None:
                raise ValueError("a context has its own transform, got transform= as well")
            check_turn(self._model, context, prompts, max_new_tokens)
            if prompts is not None and context.rows < len(prompts):
                context = context.repeat(len(prompts))
            elif not donate:
                context = context.copy()
            if prompts is not None:
                context = further(self._model, context, prompts, buckets, self._compiler, on_layer)
        self._active = np.array(
            [prompts is None or prompts[row] is not None for row in range(context.rows)]
        )
        self._read = [0] * context.rows if prompts is None else [len(row or ()) for row in prompts]
        self._context, self._result = context, None
        greedy = bool(self._choice.numbers.temperature == 0)
        first = room, greedy, mesh, self._choice, context.logits, context.length, context.seen
        first = *first, self._active
        self._compiler.compile("the choice of a token", "first", _first_tokens, *first)
        token, tokens, done, seen, broken = jax.block_until_ready(_first_tokens(*first))
        self._ttft = time.perf_counter() - start - self._compiler.seconds
        self._loop = _Loop(
            context.caches, context.logits, token, context.length, tokens, done, seen, broken,
            put(np.int32(1), mesh),
        )  # fmt: skip
        self._check_finite()
        self._waiting, self._seconds = int(context.waiting), 0.0

    @property
    def result(self) -> Generation:
        """What was written, once all of it is."""
        if self._result is None:
            raise RuntimeError("the result is there when all tokens have come")
        return self._result

    def stop(self) -> Generation:
        """The result of the tokens so far, if there is none yet."""
        if self._result is None:
            self._finish()
        return self.result

    def __iter__(self) -> Generator[list[list[int]], None, None]:
        """New tokens of each row, without end tokens; all of them at once if not streaming."""
        self._compile_loop()
        step, sent, chunk = 1, 0, 1 if self._streaming else self._most
        while True:
            over = step >= self._most or bool(np.asarray(self._loop.done).all())
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
            self._check_finite()
            if self._streaming:
                chunk = int(np.clip(_STREAM_SECONDS * (step - before) / seconds, 1, 256))
                if jax.process_count() > 1:
                    chunk = _STREAM_STEPS
        self._finish()

    def _compile_loop(self) -> None:
        """Compiles the decode loop and, where there is something to flush, the flush."""
        none = put(np.int32(0), self._mesh)
        given = self._context.layers, self._model, self._loop, none, self._choice
        self._compiler.compile("the decode loop", "loop", _decode, *given)
        interval = flush_interval(self._loop.caches)
        if interval is not None and self._waiting + self._most > interval:
            compile_flush(self._compiler, self._loop.caches, interval)

    def _go_on(self, until: int) -> None:
        """Decode steps up to `until` new tokens, or up to the next flush, which comes first."""
        interval, loop = flush_interval(self._loop.caches), self._loop
        step = int(loop.step)
        if interval is not None:
            if self._waiting >= interval:
                flushed = flush_all(loop.caches, interval)
                loop, self._waiting = dataclasses.replace(loop, caches=flushed), 0
            until = min(until, step + interval - self._waiting)
        until = put(np.int32(until), self._mesh)
        given = self._context.layers, self._model, loop, until, self._choice
        self._loop = jax.block_until_ready(_decode(*given))
        self._waiting += int(self._loop.step) - step

    def _check_finite(self) -> None:
        """Raises FloatingPointError where a row's logits were no numbers in the last step."""
        broken = np.asarray(self._loop.broken)
        if broken.any():
            row = int(broken.argmax())
            raise FloatingPointError(
                f"row {row}: the logits for new token {int(self._loop.step)}, at position "
                f"{int(self._loop.position[row])}, are NaN or infinite; the model's weights, or a "
                "cache dtype with too small a range, make numbers that are not finite"
            )

    def _finish(self) -> None:
        """Makes the result, and lets the caches take the newest tokens where they are kept."""
        loop, context = self._loop, self._context
        rows = [[token for token in row if token >= 0] for row in np.asarray(loop.tokens).tolist()]
        ended_by = [row[-1] if row and row[-1] in self._ends else None for row in rows]
        ended = [end is not None for end in ended_by]
        steps, seen = int(loop.step) - 1, loop.seen
        if self._keeps:
            seen = seen.copy()  # the loop's own goes on to the step, which chooses a token
            # One step more, whose choice of a token is dropped.
            self._loop = dataclasses.replace(loop, done=put(~self._active, self._mesh))
            self._go_on(steps + 2)
            loop = self._loop
        context = dataclasses.replace(
            context,
            caches=loop.caches,
            logits=loop.logits,
            length=loop.position,
            seen=seen,
            new_tokens=context.new_tokens + np.array([len(row) for row in rows], np.int32),
            waiting=put(np.int32(self._waiting), self._mesh),
        )
        self._result = Generation(
            tokens=[row[:-1] if end else row for row, end in zip(rows, ended, strict=True)],
            ended=ended,
            prompt_tokens=self._read,
            ttft_s=self._ttft,
            tpot_s=self._seconds / steps if steps else None,
            compile_s=self._compiler.seconds,
            cache_bytes=context.nbytes,
            full_cache_bytes=context.full_nbytes,
            memory_bytes=memory_bytes(loop.caches),
            recall=recall_statistics(loop.caches),
            dropped=context.dropped,
            context=context if self._keeps else None,
            ended_by=ended_by,
        )
        self._loop = self._context = None  # frees the caches
