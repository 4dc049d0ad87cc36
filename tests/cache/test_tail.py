"""Caches with a tail against slots in lists: where tokens go, and in what order they come."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvjax
from kvjax.cache.slots import append_to_tail, empty_cache, settle
from kvjax.storage.offload import HOST_MEMORY, Offloaded, memory_kinds
from kvjax.transforms.recall import begin_tail
from tests.support.attending import OPTIONS

ROWS, HEADS, DIM = 2, 2, 3
MAX_PROMPT, MAX_NEW = 6, 7
SLOTS = MAX_PROMPT + MAX_NEW

compiled = functools.partial(jax.jit, compiler_options=OPTIONS)
evict, to_tail = compiled(kvjax.evict), compiled(append_to_tail)
settled = compiled(settle)
PHASES = tuple(x for x in Phase if x is not Phase.shrink)  # an example takes long
PAYLOADS = ["dense"] + ["offloaded"] * (HOST_MEMORY in memory_kinds())


@compiled
def append_prompt(cache, *tokens):
    """What `attend` does when a prompt comes."""
    return kvjax.append(cache.replace(k=cache.k.open(), v=cache.v.open()), *tokens)


@functools.partial(jax.jit, static_argnums=1, compiler_options=OPTIONS)
def finish_prompt(cache, slots):
    """What `attend` does at a prompt's end."""
    cache = kvjax.compact(cache, slots)
    start = cache.tail.start
    return cache.replace(k=cache.k.close(start), v=cache.v.close(start))


# --- the model ------------------------------------------------------------------------------------


class Model:
    """Slots of every (row, head): tokens as dicts, and None."""

    def __init__(self, size: int | None, slots: int = SLOTS):
        self.slots = {(b, h): [None] * slots for b in range(ROWS) for h in range(HEADS)}
        self.dropped = dict.fromkeys(self.slots, 0)
        self.length = [0] * ROWS
        self.start = self.count = self.steps = 0
        self.size = size if size is not None and size <= MAX_NEW else None

    def put(self, at, slot, k, v, position):
        if slot >= len(self.slots[at]):
            self.dropped[at] += 1
            return
        self.slots[at][slot] = {"position": position, "k": k, "v": v, "own": 7.0, "pinned": False}

    def append(self, k, v, positions):
        """A prompt: every token to the lowest free slot."""
        for (b, h), slots in self.slots.items():
            for t, position in enumerate(positions[b].tolist()):
                if position >= 0:
                    self.put((b, h), slots.index(None), k[b, h, t], v[b, h, t], position)
        self.length = np.maximum(self.length, positions.max(1) + 1).tolist()

    def fits(self) -> bool:
        """Whether the tail has a slot for one more step."""
        return self.steps < MAX_NEW and self.count < (self.size or MAX_NEW)

    def append_to_tail(self, k, v, positions):
        fits = self.fits()
        for b, h in self.slots:
            if positions[b, 0] >= 0:
                slot = self.start + self.count if fits else len(self.slots[b, h])
                self.put((b, h), slot, k[b, h, 0], v[b, h, 0], int(positions[b, 0]))
        self.length = np.maximum(self.length, positions.max(1) + 1).tolist()
        self.count += fits
        self.steps += fits

    def evict(self, keep):
        self.each(lambda at, token: None if not (keep[at] or token["pinned"]) else token)

    def mark(self, own, pinned):
        self.each(lambda at, token: {**token, "own": own[at], "pinned": bool(pinned[at])})

    def each(self, change):
        for (b, h), slots in self.slots.items():
            for s, token in enumerate(slots):
                slots[s] = change((b, h, s), token) if token else None

    def sort(self, slots: range, order):
        """The tokens of these slots of every (row, head), by order and then by position."""
        out = {}
        for (b, h), own in self.slots.items():
            keys = [(0 if order is None else int(order[b, h, i])) for i in range(len(slots))]
            tokens = [(key, own[s]) for key, s in zip(keys, slots, strict=True) if own[s]]
            out[b, h] = [t for _, t in sorted(tokens, key=lambda x: (x[0], x[1]["position"]))]
        return out

    def compact(self, order, size: int):
        tokens = self.sort(range(len(next(iter(self.slots.values())))), order)
        for at, own in tokens.items():
            self.dropped[at] += max(len(own) - size, 0)
            tokens[at] = own[:size]
        self.start, self.count, self.steps = max(map(len, tokens.values())), 0, 0
        for at, own in tokens.items():
            own = [None] * (self.start - len(own)) + own
            self.slots[at] = own + [None] * (size - len(own))

    def settle(self, order):
        slots = len(next(iter(self.slots.values())))
        if self.size is None or self.count < self.size or self.start + self.size > slots:
            return
        block = range(self.start, self.start + self.size)
        for at, own in self.sort(block, order).items():
            own += [None] * (self.size - len(own))
            self.slots[at][self.start : self.start + self.size] = own
        self.start, self.count = self.start + self.size, 0


@compiled
def arrays(cache) -> dict:
    """All that the model knows of, and how high the used slots reach."""
    return {
        "position": cache.position, "k": cache.k.read(), "v": cache.v.read(),
        "own": cache.column("own"), "pinned": cache.pinned, "log_mass": cache.log_mass,
    }  # fmt: skip


def agree(cache, model: Model) -> None:
    assert int(cache.tail.start) == model.start and int(cache.tail.count) == model.count
    assert cache.order is None
    np.testing.assert_array_equal(cache.length, model.length)
    found = {name: np.asarray(x) for name, x in arrays(cache).items()}
    assert np.isfinite(found["k"]).all() and np.isfinite(found["v"]).all()
    used, dropped = np.asarray(cache.used), np.asarray(cache.dropped)
    for at, slots in model.slots.items():
        assert cache.slots == len(slots)
        live = np.array([token is not None for token in slots])
        assert dropped[at] == model.dropped[at], at
        assert used[at] == max(np.flatnonzero(live) + 1, default=0), at
        mine = {name: x[at] for name, x in found.items()}
        np.testing.assert_array_equal(mine["log_mass"], np.where(live, 0.0, -np.inf))
        assert (mine["position"][~live] == -1).all() and not mine["pinned"][~live].any(), at
        for name in ("position", "k", "v", "own", "pinned") if live.any() else ():
            expected = np.array([token[name] for token in slots if token])
            np.testing.assert_array_equal(mine[name][live], expected, f"{at}, {name}")


# --- operations -----------------------------------------------------------------------------------


def start(size, payload: str):
    cache = empty_cache(
        ROWS, HEADS, DIM, SLOTS, max_prompt=MAX_PROMPT, max_new=MAX_NEW, dtype=jnp.float32
    )
    cache = begin_tail(cache, size, (HEADS, 4))
    cache = cache.with_column("own", jnp.full((ROWS, HEADS, SLOTS), 7.0), fill=7.0, merge="keep")
    if payload == "offloaded":
        k, v = (Offloaded.zeros(cache.k.shape, cache.tail_slots, jnp.float32) for _ in range(2))
        cache = cache.replace(k=k, v=v)
    return cache, Model(size)


def random_tokens(seed, positions):
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, ROWS, HEADS, positions.shape[1], DIM)).astype(np.float32)
    return k, v, positions.astype(np.int32)


def read_prompt(cache, model, valid, keep, own, pinned, order, seed):
    """New tokens, some of all evicted, some pinned, and all of them moved."""
    steps = np.cumsum(valid, 1) - 1
    positions = np.where(valid, np.array(model.length)[:, None] + steps, -1)
    given = random_tokens(seed, positions)
    cache, _ = append_prompt(cache, *map(jnp.asarray, given))
    model.append(*given)
    cache = cache.replace(pinned=jnp.asarray(pinned) & cache.live)
    cache = cache.with_column("own", jnp.asarray(own))
    model.mark(own, pinned)
    cache = evict(cache, jnp.asarray(keep))
    model.evict(keep)
    cache = cache.replace(order=None if order is None else jnp.asarray(order))
    cache = finish_prompt(cache, SLOTS)
    model.compact(order, SLOTS)
    return cache, model


def step(cache, model, valid, order, seed):
    positions = np.where(valid, np.array(model.length), -1)[:, None]
    given = random_tokens(seed, positions)
    cache, slots = to_tail(cache, *map(jnp.asarray, given))
    expected = model.start + model.count if model.fits() else SLOTS
    model.append_to_tail(*given)
    stored = valid & (expected < SLOTS)
    expected = np.where(stored, expected, SLOTS)[:, None, None]
    np.testing.assert_array_equal(slots, np.broadcast_to(expected, slots.shape))
    if cache.settles and order is not None:
        order = order[..., : cache.tail.size]
        cache = cache.replace(order=jnp.asarray(order))
    else:
        order = None
    cache = settled(cache, jnp.array(True))
    model.settle(order)
    return cache, model


flags = hnp.arrays(bool, (ROWS, HEADS, SLOTS))
orders = st.none() | hnp.arrays(np.int32, (ROWS, HEADS, SLOTS), elements=st.integers(-1, 3))
owned = hnp.arrays(np.float32, (ROWS, HEADS, SLOTS), elements=st.floats(-4, 4, width=32))
seeds = st.integers(0, 99)
prompts = st.tuples(hnp.arrays(bool, (ROWS, MAX_PROMPT)), flags, owned, flags, orders, seeds)
steps = st.lists(st.tuples(hnp.arrays(bool, ROWS), orders, seeds), max_size=MAX_NEW)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("size", [1, 3, MAX_NEW, MAX_NEW + 1, None])
@settings(max_examples=20, deadline=None, phases=PHASES)
@given(prompts, steps, prompts)
def test_a_prompt_some_steps_and_a_prompt(size, payload, first, then, last):
    cache, model = start(size, payload)
    agree(cache, model)
    cache, model = read_prompt(cache, model, *first)
    agree(cache, model)
    for each in then:
        cache, model = step(cache, model, *each)
        agree(cache, model)
    free = min(own.count(None) for own in model.slots.values())
    if free >= MAX_PROMPT:
        agree(*read_prompt(cache, model, *last))


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("size", [2, None])
def test_decoding_without_a_prompt(size, payload):
    cache, model = start(size, payload)
    for number in range(MAX_NEW):
        cache, model = step(cache, model, np.array([True, number % 2 == 0]), None, number)
        agree(cache, model)
    tokens = MAX_NEW // 2 * 2
    assert int(cache.tail.start) == (tokens if size else 0)


def test_a_tail_without_any_token():
    """Every row got padding: the slots stay free, and the tail moves on all the same."""
    cache, model = start(3, "dense")
    full = np.ones((ROWS, HEADS, SLOTS), bool)
    own = np.zeros((ROWS, HEADS, SLOTS), np.float32)
    valid = np.ones((ROWS, MAX_PROMPT), bool)
    cache, model = read_prompt(cache, model, valid, full, own, ~full, None, 0)
    for number in range(4):
        cache, model = step(cache, model, np.zeros(ROWS, bool), None, number)
    agree(cache, model)
    assert int(cache.tail.start) == MAX_PROMPT + 3 and int(cache.live.sum()) == 24


def test_tokens_beyond_the_last_slot_are_counted():
    cache, model = start(None, "dense")
    for number in range(SLOTS + 3):
        cache, model = step(cache, model, np.array([True, number < SLOTS]), None, number)
    agree(cache, model)
    assert cache.dropped.tolist() == [[9, 9], [6, 6]]


def test_settle_waits_for_what_it_is_told():
    cache, model = start(2, "dense")
    for number in range(2):
        positions = np.full((ROWS, 1), number, np.int32)
        given = random_tokens(number, positions)
        cache, _ = to_tail(cache, *map(jnp.asarray, given))
        model.append_to_tail(*given)
    agree(settled(cache, jnp.array(False)), model)
    model.settle(None)
    agree(settled(cache, jnp.array(True)), model)


def test_compact_to_fewer_slots_counts_what_is_lost():
    cache, model = start(2, "dense")
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]])
    given = random_tokens(0, positions)
    cache, _ = append_prompt(cache, *map(jnp.asarray, given))
    model.append(*given)
    cache = finish_prompt(cache, 4)
    model.compact(None, 4)
    agree(cache, model)
    assert cache.dropped.tolist() == [[2, 2], [0, 0]]
    assert cache.position[1, 0].tolist() == [-1, -1, 0, 1]


def test_sizes_of_tails():
    for size, settles, slots in [(3, True, 3), (MAX_NEW, True, 7), (8, False, 7), (None, False, 7)]:
        cache, _ = start(size, "dense")
        assert (cache.settles, cache.tail_slots) == (settles, slots)
    full = kvjax.init_cache(
        kvjax.Full(), batch=1, kv_heads=1, head_dim=2, max_prompt=4, max_new=2
    ).kv
    assert full.tail is None and not full.settles
