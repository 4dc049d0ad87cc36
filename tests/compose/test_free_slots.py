"""What stands in free slots reaches nothing: NaN and infinities there change no number of a row."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.payload import Dense
from kvjax.storage.codebook.payload import CodebookPayload
from kvjax.storage.offload.payload import Offloaded, to_host
from kvjax.storage.offload.transform import Resident
from kvjax.storage.quantize.payload import Quantized
from kvjax.storage.recent import Recent
from tests.compose.test_conformance import (
    CASES,
    LENGTHS,
    STEPS,
    WIDTH,
    names,
    same_slots,
    standard,
    tokens,
)
from tests.support.attending import Tokens, decode, flushed, new_cache, parts, prompt, right, run
from tests.support.cases import EXHAUSTIVE
from tests.support.marks import some_slow
from tests.support.tolerances import close

# Every form of storage, and every kind of method: for them infinities are tried, too.
KINDS = ("full", "h2o", "clusterkv", "h2o_quantize", "snapkv_quantize_channel", "h2o_codebook")
# Infinities of one kind; those of others, and negative ones, run before a release.
LIKE_OTHERS = [(name, "inf") for name in KINDS if name != "clusterkv"]
FAST = ("full", "h2o", "kvmerger", "quantize")


def bad_numbers(chosen, infinite, *fast: str):
    """NaN for all of the cases, which those in `fast` are not slow for, and infinities for some.

    Negative ones run before a release only.
    """
    negative = [(name, "-inf") for name in infinite]
    cases = [(name, "nan") for name in chosen] + [(name, "inf") for name in infinite] + negative
    return pytest.mark.parametrize(
        ("name", "bad"),
        some_slow(
            cases,
            *((name, "nan") for name in fast),
            exhaustive=[*((name, "nan") for name in EXHAUSTIVE), *negative, *LIKE_OTHERS],
        ),
    )


# --- writing into free slots ----------------------------------------------------------------------


def spoiled(cache, bad: float):
    """The cache with `bad` wherever it holds a number of a key or value that no live slot has."""

    def of_layer(layer):
        if not isinstance(layer, kvjax.LayerCache):
            return layer  # what a reading holds beside its slots
        kv, live = layer.kv, np.asarray(layer.kv.live)
        changes = {"k": spoiled_payload(kv.k, live, bad), "v": spoiled_payload(kv.v, live, bad)}
        state = jax.tree.map(
            lambda x: spoiled_resident(x, kv.slots, bad) if isinstance(x, Resident) else x,
            layer.state,
            is_leaf=lambda x: isinstance(x, Resident),
        )
        return dataclasses.replace(layer, kv=kv.replace(**changes), state=state)

    return jax.tree.map(of_layer, cache, is_leaf=lambda x: isinstance(x, kvjax.LayerCache))


def put(x, free: np.ndarray, bad: float) -> jax.Array:
    """`x [B, H, S, ...]`, or of groups of slots, with `bad` in the entries without a live slot."""
    x = np.array(x)
    own = free.reshape(*x.shape[:3], -1).all(-1)
    if x.dtype == np.uint8:  # the bits of float8, or bytes of scales, which are huge then
        x[own] = 0x7F
    elif np.issubdtype(x.dtype, np.floating):
        x[own] = bad
    return jnp.asarray(x)


def spoiled_payload(payload, live: np.ndarray, bad: float):
    if isinstance(payload, Dense):
        return Dense(put(payload.data, ~live, bad))
    if isinstance(payload, Quantized):
        body = live if payload.recent is None else live & ~held(payload.recent, live.shape)
        more = payload.encoded.values.shape[2] - live.shape[2]
        free = ~np.pad(body, ((0, 0), (0, 0), (0, more)))
        float8 = payload.form.bits == "float8"
        values = put(payload.encoded.values, free, bad) if float8 else payload.encoded.values
        others = (None if x is None else put(x, free, bad) for x in payload.encoded[1:])
        encoded = type(payload.encoded)(values, *others)
        recent = payload.recent and spoiled_recent(payload.recent, live, bad)
        return dataclasses.replace(payload, encoded=encoded, recent=recent)
    if isinstance(payload, Offloaded):
        body = live & ~held(payload.recent, live.shape)
        more = payload.store.shape[2] - live.shape[2]
        free = ~np.pad(body, ((0, 0), (0, 0), (0, more)))
        store = to_host(put(payload.store, free, bad))
        recent = spoiled_recent(payload.recent, live, bad)
        return dataclasses.replace(payload, store=store, recent=recent)
    assert isinstance(payload, CodebookPayload)
    entries, index = np.array(payload.entries), np.array(payload.index)
    for row in range(len(index)):
        unused = np.setdiff1d(np.arange(entries.shape[2]), index[row][live[row]])
        entries[row, 0, unused] = bad
        index[row][~live[row]] = unused[-1]
    magnitude = payload.magnitude
    magnitude = None if magnitude is None else put(magnitude, ~live, bad)
    return dataclasses.replace(
        payload, entries=jnp.asarray(entries), index=jnp.asarray(index), magnitude=magnitude
    )


def held(recent: Recent, shape: tuple[int, ...]) -> np.ndarray:
    """Which slots have their row among the recent ones."""
    out = np.zeros((*shape[:2], shape[2] + 1), bool)
    np.put_along_axis(out, np.asarray(recent.slots), True, axis=2)
    return out[..., :-1]


def spoiled_recent(recent: Recent, live: np.ndarray, bad: float) -> Recent:
    slots = np.asarray(recent.slots)
    own = np.take_along_axis(np.pad(live, ((0, 0), (0, 0), (0, 1))), slots, axis=2)
    return dataclasses.replace(recent, rows=put(recent.rows, ~own, bad))


def spoiled_resident(resident: Resident, slots: int, bad: float) -> Resident:
    if resident.slots is None:
        return resident
    free = np.asarray(resident.slots) == slots
    k, v = (put(x, free, bad) for x in (resident.k, resident.v))
    return dataclasses.replace(resident, k=k, v=v)


# --- what comes out -------------------------------------------------------------------------------


def same(name: str, out, cache, expected_out, expected, what: str, rows: int = 3):
    """Outputs are those of the other cache, and so are its tokens and all that they carry."""
    assert np.isfinite(out).all(), f"{name}, {what}: not finite"
    close(out, expected_out, what=what)
    same_slots(name, cache, range(rows), expected, range(rows))


@functools.cache
def turns(name: str) -> tuple:
    """A prompt, steps with flushes, and a further turn with a step: outputs and caches."""
    return tuple(followed(name, lambda cache: cache))


def followed(name: str, change):
    """Outputs and caches call by call, each call on what `change` makes of the cache before."""
    transform = CASES[name]
    cache, starts = standard(name).prompt_cache, np.array(LENGTHS)
    for step in range(6):
        out, cache = decode(transform, change(cache), tokens(), (starts + step)[:, None])
        cache = flushed(change(cache), step + 1)
        yield f"step {step}", out, cache
    starts, counts = starts + 6, np.array((6, 4, 1))
    for last in (False, True):
        positions = right(starts, counts, 8) if not last else right(starts + counts, (0, 1, 1), 8)
        out, cache = prompt(transform, change(cache), tokens(), positions, last=last)
        yield f"turn, last={last}", out, cache
    now = (starts + counts + np.array((0, 1, 1)))[:, None]
    out, cache = decode(transform, change(cache), tokens(), now)
    yield "step after the turn", out, cache


@bad_numbers(CASES, KINDS, *FAST)
def test_what_stands_in_free_slots_reaches_nothing(name, bad):
    """Before a step, a flush, each chunk of a further turn, and the step after it."""
    spoil = functools.partial(spoiled, bad=float(bad))
    for mine, expected in zip(followed(name, spoil), turns(name), strict=True):
        what, out, cache = mine
        same(name, np.asarray(out), cache, expected[1], expected[2], what)


@bad_numbers(CASES, KINDS, *FAST)
def test_an_empty_cache_may_hold_anything(name, bad):
    """A prompt in chunks, whose free slots are spoiled between them too."""
    transform, expected = CASES[name], standard(name)
    positions = right([0, 0, 0], LENGTHS, WIDTH)
    cache, outs = new_cache(transform), []
    for start in range(0, WIDTH, 8):
        chunk, last = positions[:, start : start + 8], start == WIDTH - 8
        out, cache = prompt(transform, spoiled(cache, float(bad)), tokens(), chunk, last=last)
        outs.append(np.asarray(out))
    out = np.concatenate(outs, axis=2)
    same(name, out, cache, expected.prompt_out, expected.prompt_cache, "prompt")


# --- with kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names(KINDS, "h2o"))
def test_what_stands_in_free_slots_reaches_nothing_with_kernels(name):
    """One step of every kernel that reads a cache, interpreted."""
    transform, cache = CASES[name], standard(name).prompt_cache
    step = functools.partial(decode, transform, tokens=tokens(), implementation="interpret")
    now = np.array(LENGTHS)[:, None]
    expected_out, expected = step(cache, positions=now)
    out, cache = step(spoiled(cache, np.nan), positions=now)
    same(name, np.asarray(out), cache, expected_out, expected, "step")


# --- tokens that hold NaN and are evicted ---------------------------------------------------------


@functools.cache
def one_row(name: str):
    """A row of 24 tokens and some decoding."""
    return run(CASES[name], tokens().rows([0]), right([0], [WIDTH], WIDTH), STEPS)


def held_at(name: str, cache, position: int) -> bool:
    """Whether any KV head holds the token."""
    held = [part.cache.kv.position for part in parts(CASES[name], cache)]
    return any((np.asarray(x) == position).any() for x in held)


def equals_but_for_a_token(name, position: int, bad: str, side: str, first: int):
    """From step `first` on a row is what it would be had the token's key or value been finite."""
    given, expected = Tokens(*(x.copy() for x in tokens().rows([0]))), one_row(name)
    getattr(given, side)[:, :, position] = float(bad)
    changed = run(CASES[name], given, right([0], [WIDTH], WIDTH), STEPS)
    for step in range(first, STEPS):
        out, cache = changed.outs[step], changed.caches[step]
        same(name, out, cache, expected.outs[step], expected.caches[step], f"step {step}", rows=1)
    if first:
        assert not np.isfinite(changed.outs[0]).all(), "the token is live in the first step"


# What they decide does not depend on values.
AT_THE_END = (
    "streaming_llm", "reposition", "h2o", "snapkv", "pyramidkv", "kvcrush", "chain", "h2o_quantize",
    "h2o_codebook", "snapkv_quantize_channel",
)  # fmt: skip
IN_A_STEP = ("streaming_llm", "reposition", "h2o", "chain", "h2o_quantize", "h2o_quantize_token")


@bad_numbers(AT_THE_END, ["h2o"], "h2o", "streaming_llm")
def test_a_value_that_a_prompts_end_evicts_is_gone(name, bad):
    cache = one_row(name).prompt_cache
    position = next(x for x in range(WIDTH) if not held_at(name, cache, x))
    equals_but_for_a_token(name, position, bad, "v", 0)


@bad_numbers(IN_A_STEP, ["h2o"], "h2o", "streaming_llm")
def test_a_value_that_a_step_evicts_is_gone(name, bad):
    equals_but_for_a_token(name, **evicted_in_a_step(name), bad=bad, side="v")


@bad_numbers(["streaming_llm", "reposition"], ["streaming_llm"], "streaming_llm")
def test_a_key_that_is_evicted_is_gone(name, bad):
    """Of methods that decide by position alone: others have no score of a row that saw NaN."""
    cache = one_row(name).prompt_cache
    position = next(x for x in range(WIDTH) if not held_at(name, cache, x))
    equals_but_for_a_token(name, position, bad, "k", 0)
    equals_but_for_a_token(name, **evicted_in_a_step(name), bad=bad, side="k")


def evicted_in_a_step(name: str) -> dict[str, int]:
    """A token that a step evicts, and the first step that does not see it any more."""
    given = one_row(name)
    for position in range(WIDTH):
        gone = [not held_at(name, cache, position) for cache in given.all_caches]
        if not gone[0] and any(gone[:-2]):
            return {"position": position, "first": gone.index(True)}
    raise AssertionError(f"{name} evicts nothing")
