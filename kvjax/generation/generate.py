"""Text from a language model through a compressed cache: one compiled prompt pass, one loop."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from kvjax.attention.attend import flush, flush_interval
from kvjax.attention.layer import Cache, about_to_read, init_cache
from kvjax.budgets.budgets import check_count
from kvjax.cache.slots import memory_bytes, nbytes
from kvjax.compose.chain import bind
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.progress import listening, report_layers
from kvjax.generation.sampling import Sampling
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

    Returns:
      Tokens and measurements.

    Raises:
      TypeError, ValueError: before anything is computed: no prompts, an empty one, a token outside
        the vocabulary, more tokens than the model has positions or the buckets hold.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
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
    tokens, positions = _pad(prompts, functional.max_positions, buckets)
    plan = _Plan(
        functional.apply, layers, functional.kv_heads, functional.query_heads,
        functional.head_dim, tokens.shape[1], max_new_tokens, dtype,
        sampling, tuple(int(token) for token in end_tokens),
    )  # fmt: skip
    key = jax.random.key(seed)
    with listening(on_layer) as listener:
        prompt_args = (
            plan, functional.params, jnp.asarray(tokens), jnp.asarray(positions), key, listener
        )  # fmt: skip
        compile_prompt = _seconds(lambda: _read_prompt.lower(*prompt_args).compile())
        start = time.perf_counter()
        loop = jax.block_until_ready(_read_prompt(*prompt_args))
        ttft = time.perf_counter() - start
    # Only now: where the caches lie, and so which loop is compiled, follows from the parameters.
    steps = jnp.int32(plan.max_new)
    compile_loop = _seconds(lambda: _compile_loop(plan, functional.params, loop, steps, key))
    start = time.perf_counter()
    loop = _run(plan, functional.params, loop, key, on_tokens)
    decoded, seconds = int(loop.step) - 1, time.perf_counter() - start

    new = np.asarray(loop.tokens)
    rows = [[int(token) for token in row if token >= 0] for row in new]
    ended = [bool(row) and row[-1] in plan.end_tokens for row in rows]
    return Generation(
        tokens=[row[:-1] if end else row for row, end in zip(rows, ended, strict=True)],
        ended=ended,
        prompt_tokens=[len(prompt) for prompt in prompts],
        ttft_s=ttft,
        tpot_s=seconds / decoded if decoded else None,
        compile_s=compile_prompt + compile_loop,
        cache_bytes=nbytes(loop.caches),
        full_cache_bytes=_full_bytes(plan, len(prompts)),
        memory_bytes=memory_bytes(loop.caches),
        recall=recall_statistics(loop.caches),
        dropped=_dropped(loop.caches),
    )


def _compile_loop(plan: _Plan, params, loop: _Loop, steps: Int[Array, ""], key: Array) -> None:
    """Compiles the decode loop and, where there is something to flush, the flush."""
    _decode.lower(plan, params, loop, steps, key).compile()
    interval = flush_interval(loop.caches)
    if interval is not None and interval < plan.max_new:
        for cache in loop.caches:
            _flush_layer.lower(cache, interval).compile()


def _dropped(caches: tuple[Cache, ...]) -> int:
    parts = [part for layer in caches for part in (layer if isinstance(layer, tuple) else (layer,))]
    return sum(int(part.kv.dropped.sum()) for part in parts)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class _Plan:
    """Everything static: one compiled prompt pass and one compiled loop per value."""

    apply: Callable
    layers: tuple[KVTransform, ...]
    kv_heads: int
    query_heads: int
    head_dim: int
    max_prompt: int
    max_new: int
    dtype: DTypeLike | None
    sampling: Sampling
    end_tokens: tuple[int, ...]

    def caches(self, layers: tuple[KVTransform, ...], batch: int) -> tuple[Cache, ...]:
        return tuple(
            init_cache(
                layer,
                batch=batch,
                kv_heads=self.kv_heads,
                query_heads=self.query_heads,
                head_dim=self.head_dim,
                max_prompt=self.max_prompt,
                max_new=self.max_new,
                dtype=self.dtype,
                layer=number,
            )
            for number, layer in enumerate(layers)
        )

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
def _read_prompt(plan: _Plan, params, tokens, positions, key, listener) -> _Loop:
    """The caches after the prompt, and the first new token; layers report to the listener."""
    batch, length = tokens.shape[0], positions.max(-1) + 1
    logits, caches = plan.apply(
        params, tokens, positions, about_to_read(plan.caches(plan.layers, batch)),
        layers=plan.layers, phase="prompt", last=True, logits_at=length[:, None] - 1,
    )  # fmt: skip
    if listener is not None:
        report_layers(caches, listener)
    token = plan.sampling.choose(logits[:, -1], _row_keys(key, length))
    new = jnp.full((batch, plan.max_new), -1, jnp.int32).at[:, 0].set(token)
    return _Loop(caches, token, length, new, plan.ends(token), jnp.ones((), jnp.int32))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(plan: _Plan, params, loop: _Loop, until: Int[Array, ""], key) -> _Loop:
    """Goes on until `until` new tokens are there or every row is finished."""

    def step(loop: _Loop) -> _Loop:
        logits, caches = plan.apply(
            params, loop.token[:, None], jnp.where(loop.done, -1, loop.position)[:, None],
            loop.caches, layers=plan.layers, phase="decode", last=True, logits_at=None,
        )  # fmt: skip
        position = loop.position + 1
        token = plan.sampling.choose(logits[:, -1], _row_keys(key, position))
        kept = jnp.where(loop.done, -1, token)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, kept[:, None], loop.step, 1)
        done = loop.done | plan.ends(token)
        return _Loop(caches, token, position, tokens, done, loop.step + 1)

    return jax.lax.while_loop(lambda x: (x.step < until) & ~x.done.all(), step, loop)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _flush_layer(cache: Cache, steps: int) -> Cache:
    """One layer's cache; layers whose caches are alike share the compiled code."""
    return flush(cache, steps)


def _flush(loop: _Loop, steps: int) -> _Loop:
    return dataclasses.replace(loop, caches=tuple(_flush_layer(c, steps) for c in loop.caches))


def _row_keys(key: Array, position: Int[Array, " B"]) -> Array:
    """A key per row and position."""
    rows = jnp.arange(position.shape[0])
    return jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(
        rows, position
    )


def _run(plan: _Plan, params, loop: _Loop, key, on_tokens) -> _Loop:
    """The decode loop in calls that end where caches are flushed, or come back with tokens."""
    interval = flush_interval(loop.caches) or plan.max_new
    sent, step, chunk = 0, 1, plan.max_new if on_tokens is None else 1
    while True:
        if on_tokens is not None:
            sent = _send(plan, loop, sent, on_tokens)
        if step == plan.max_new or bool(loop.done.all()):
            return loop
        # Step n comes after n - 1 decode steps.
        until = min(step + chunk, plan.max_new, (step - 1) // interval * interval + interval + 1)
        start = time.perf_counter()
        loop = jax.block_until_ready(_decode(plan, params, loop, jnp.int32(until), key))
        per_token = (time.perf_counter() - start) / max(int(loop.step) - step, 1)
        step = int(loop.step)
        if (step - 1) % interval == 0 and step < plan.max_new:
            loop = _flush(loop, interval)
        if on_tokens is not None:
            chunk = int(np.clip(_STREAM_SECONDS / per_token, 1, 256))


def _send(plan: _Plan, loop: _Loop, sent: int, on_tokens) -> int:
    """Hands over the tokens from number `sent` on; says how many there are now."""
    step = int(loop.step)
    new = np.asarray(loop.tokens)[:, sent:step]
    skip = {-1, *plan.end_tokens}
    on_tokens([[int(token) for token in row if int(token) not in skip] for row in new])
    return step


def _full_bytes(plan: _Plan, batch: int) -> int:
    full = (Full(),) * len(plan.layers)
    return nbytes(jax.eval_shape(lambda: plan.caches(full, batch)))


def _pad(prompts, max_positions: int | None, buckets) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions padded on the right to a bucket, `[B, T]` each."""
    longest = max(len(prompt) for prompt in prompts)
    size = _bucket(longest, buckets)
    if buckets is None and max_positions is not None:
        size = max(longest, min(size, max_positions))
    tokens = np.zeros((len(prompts), size), np.int32)
    positions = np.full((len(prompts), size), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        positions[row, : len(prompt)] = np.arange(len(prompt))
    return tokens, positions


def _bucket(length: int, buckets: Sequence[int] | None) -> int:
    """The smallest bucket that holds a prompt: at most a quarter of it is padding from 64 on."""
    if buckets is not None:
        fitting = [size for size in buckets if size >= length]
        if not fitting:
            raise ValueError(f"the longest bucket must hold {length} tokens, got {tuple(buckets)}")
        return min(fitting)
    step = max(64, 2 ** (length.bit_length() - 3))
    return -(-length // step) * step


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
