"""Text from a language model through a compressed cache: one compiled prompt pass, one loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from kvjax.attention.attend import flush, flush_interval
from kvjax.attention.layer import Cache, layer_caches
from kvjax.budgets.budgets import check_count
from kvjax.cache.slots import memory_bytes, nbytes
from kvjax.compose.chain import bind
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.progress import listening, report_layers
from kvjax.generation.sampling import Sampling
from kvjax.generation.steps import decode_step, init_caches, pad, read_prompt
from kvjax.protocol import Full, KVTransform
from kvjax.storage.offload import RecallStatistics, recall_statistics

_STREAM_SECONDS = 0.1  # how often a streaming loop comes back to the host, about


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
      prompt_tokens: prompt length per row.
      ttft_s: seconds of the prompt pass up to the first token, without compilation.
      tpot_s: seconds per further token (a step for all rows); None if there was none. With
        `on_tokens` it includes that callback.
      compile_s: seconds of tracing and compiling; next to nothing on a second call.
      cache_bytes: bytes of all cache arrays after the prompt, index structures included.
      full_cache_bytes: what `Full` would hold for the same padded prompt and new tokens.
      memory_bytes: `cache_bytes` by the kind of memory: `"device"`, and `"pinned_host"` for what
        `Offload` keeps there.
      recall: how often offloaded caches had what a step selected, and what crossed; None where
        nothing is offloaded.
      dropped: tokens that found no free slot and were lost, summed over layers, rows and lists of
        slots (one per KV head, or per query head for methods that need that). 0 unless a method
        keeps more than its `extent` promises.
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


def generate(
    model: LanguageModel | FunctionalModel,
    prompts: Sequence[Sequence[int]],
    *,
    transform: KVTransform | None = None,
    max_new_tokens: int = 128,
    end_tokens: Sequence[int] = (),
    sampling: Sampling | None = None,
    seed: int = 0,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    on_layer: Callable[[int], None] | None = None,
    buckets: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
) -> Generation:
    """Continues prompts through a cache that `transform` compresses.

    Prompts are padded to one of a few lengths and read in one compiled pass; all decoding runs in
    one compiled loop with donated caches. A second call with prompts of the same bucket compiles
    nothing.

    Args:
      model: an NNX module or callable with the signature of `LanguageModel`, or a
        `FunctionalModel`.
      prompts: token ids of each row; rows may differ in length.
      transform: how to compress; `Full()` by default.
      max_new_tokens: most new tokens per row.
      end_tokens: a row is finished when one of them comes; it is not part of the result.
      sampling: greedy by default.
      seed: of the draws, below 2**32; each row draws with its own key.
      on_tokens: called with the new tokens per row as they come, about ten times a second.
      on_layer: called with the number of each layer once it has read the prompt, in order, from
        another thread. What it raises is raised here after the prompt pass.
      buckets: padded prompt lengths to choose from; by default four per power of two, from 64 on.
      dtype: of keys and values; see `init_cache`.

    Raises:
      TypeError, ValueError: before anything is computed: no prompts, an empty one, a token outside
        the vocabulary, more tokens than the model has positions or the buckets hold.

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
    sampling = Sampling() if sampling is None else sampling
    functional = as_functional(model)
    layers = bind(Full() if transform is None else transform, functional.num_layers)
    check_count("max_new_tokens", max_new_tokens, 1)
    check_count("seed", seed, 0)
    if seed >= 2**32:  # JAX would drop the upper bits
        raise ValueError(f"seed must be below 2**32, got {seed}")
    check_prompts(functional, prompts, layers, max_new_tokens)
    size = _bucket(max(map(len, prompts)), functional.max_positions, buckets)
    tokens, positions = map(jnp.asarray, pad(prompts, size))
    ends = tuple(int(token) for token in end_tokens)
    plan = _Plan(layers, max_new_tokens, dtype, sampling, ends)
    key = jax.random.key(seed)
    with listening(on_layer) as listener:
        given = plan, functional, tokens, positions, key, listener
        _, compile_prompt = _timed(lambda: _read_prompt.lower(*given).compile())
        loop, ttft = _timed(lambda: jax.block_until_ready(_read_prompt(*given)))
    # Only now: where the caches lie, and so which loop is compiled, follows from the parameters.
    _, compile_loop = _timed(lambda: _compile_loop(plan, functional, loop, key))
    loop, seconds = _timed(lambda: _run(plan, functional, loop, key, on_tokens))

    rows = [[int(token) for token in row if token >= 0] for row in np.asarray(loop.tokens)]
    ended = [bool(row) and row[-1] in ends for row in rows]
    decoded = int(loop.step) - 1
    full = (Full(),) * len(layers)
    full_caches = jax.eval_shape(
        lambda: init_caches(functional, full, *tokens.shape, max_new_tokens, dtype)
    )
    return Generation(
        tokens=[row[:-1] if end else row for row, end in zip(rows, ended, strict=True)],
        ended=ended,
        prompt_tokens=[len(prompt) for prompt in prompts],
        ttft_s=ttft,
        tpot_s=seconds / decoded if decoded else None,
        compile_s=compile_prompt + compile_loop,
        cache_bytes=nbytes(loop.caches),
        full_cache_bytes=nbytes(full_caches),
        memory_bytes=memory_bytes(loop.caches),
        recall=recall_statistics(loop.caches),
        dropped=sum(int(part.kv.dropped.sum()) for part in layer_caches(loop.caches)),
    )


def _compile_loop(plan: _Plan, model: FunctionalModel, loop: _Loop, key: Array) -> None:
    """Compiles the decode loop and, where there is something to flush, the flush."""
    _decode.lower(plan, model, loop, jnp.int32(plan.max_new), key).compile()
    interval = flush_interval(loop.caches)
    if interval is not None and interval < plan.max_new:
        for cache in loop.caches:  # JAX lowers equal layers once
            _flush_layer.lower(cache, interval).compile()


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


@dataclass(frozen=True)
class _Plan:
    """Everything static: one compiled prompt pass and one compiled loop per value."""

    layers: tuple[KVTransform, ...]
    max_new: int
    dtype: DTypeLike | None
    sampling: Sampling
    end_tokens: tuple[int, ...]

    def ends(self, tokens: Int[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.isin(tokens, jnp.array(self.end_tokens, jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    """What the decode loop carries; donated from call to call."""

    caches: tuple[Cache, ...]
    token: Int[Array, " B"]  # newest token, not yet in the caches
    position: Int[Array, " B"]  # its position
    tokens: Int[Array, "B N"]  # new tokens so far, -1 where there are none
    done: Bool[Array, " B"]
    step: Int[Array, ""]  # new tokens so far


@functools.partial(jax.jit, static_argnums=0)
def _read_prompt(plan: _Plan, model: FunctionalModel, tokens, positions, key, listener) -> _Loop:
    """The caches after the prompt, and the first new token; layers report to the listener."""
    logits, caches = read_prompt(model, plan.layers, tokens, positions, plan.max_new, plan.dtype)
    if listener is not None:
        report_layers(caches, listener)
    length = positions.max(-1) + 1
    token = plan.sampling.choose(logits, _row_keys(key, length))
    new = jnp.full((len(tokens), plan.max_new), -1, jnp.int32).at[:, 0].set(token)
    return _Loop(caches, token, length, new, plan.ends(token), jnp.ones((), jnp.int32))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(plan: _Plan, model: FunctionalModel, loop: _Loop, until: Int[Array, ""], key) -> _Loop:
    """Goes on until `until` new tokens are there or every row is finished."""

    def step(loop: _Loop) -> _Loop:
        at = jnp.where(loop.done, -1, loop.position)
        logits, caches = decode_step(model, plan.layers, loop.caches, loop.token, at)
        position = loop.position + 1
        token = plan.sampling.choose(logits, _row_keys(key, position))
        kept = jnp.where(loop.done, -1, token)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, kept[:, None], loop.step, 1)
        done = loop.done | plan.ends(token)
        return _Loop(caches, token, position, tokens, done, loop.step + 1)

    return jax.lax.while_loop(lambda x: (x.step < until) & ~x.done.all(), step, loop)


# Of one layer: layers whose caches are alike share the compiled code.
_flush_layer = jax.jit(flush, static_argnums=1, donate_argnums=0)


def _row_keys(key: Array, position: Int[Array, " B"]) -> Array:
    """A key per row and position."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(position)))
    return jax.vmap(jax.random.fold_in)(keys, position)


def _run(plan: _Plan, model: FunctionalModel, loop: _Loop, key, on_tokens) -> _Loop:
    """The decode loop in calls that end where caches are flushed, or come back with tokens."""
    interval = flush_interval(loop.caches) or plan.max_new
    sent, step, chunk = 0, 1, plan.max_new if on_tokens is None else 1
    while True:
        if on_tokens is not None:
            new = np.asarray(loop.tokens)[:, sent:step].tolist()
            skip = {-1, *plan.end_tokens}
            on_tokens([[token for token in row if token not in skip] for row in new])
            sent = step
        if step == plan.max_new or bool(loop.done.all()):
            return loop
        # Step n comes after n - 1 decode steps.
        until = min(step + chunk, plan.max_new, (step - 1) // interval * interval + interval + 1)
        start, before = time.perf_counter(), step
        loop = jax.block_until_ready(_decode(plan, model, loop, jnp.int32(until), key))
        step = int(loop.step)
        if on_tokens is not None:
            per_token = (time.perf_counter() - start) / max(step - before, 1)
            chunk = int(np.clip(_STREAM_SECONDS / per_token, 1, 256))
        if (step - 1) % interval == 0 and step < plan.max_new:
            flushed = tuple(_flush_layer(cache, interval) for cache in loop.caches)
            loop = dataclasses.replace(loop, caches=flushed)


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
            raise ValueError(
                f"token ids must lie in [0, {model.vocab_size}), got {wrong} in row {row}"
            )
    limit, longest = model.max_positions, max(len(prompt) for prompt in prompts)
    beyond = all(layer.needs.reposition for layer in layers)
    if limit is not None and (longest > limit or (longest + max_new > limit and not beyond)):
        raise ValueError(
            f"the model has {limit} positions, got a prompt of {longest} tokens and "
            f"{max_new} new ones"
        )
