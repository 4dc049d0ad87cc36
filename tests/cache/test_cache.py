"""Cache operations against a model of tokens in lists, under random sequences of operations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvjax
from kvjax.cache.rearrange import widen as widen_slots
from kvjax.cache.slots import Column, empty_cache, ranks
from pallas_kernels import Mask, Queries, Seen, decode_attention
from tests.support.tolerances import close

ROWS, HEADS, SLOTS, DIM, NEW = 2, 2, 6, 3, 4
SHAPE = (ROWS, HEADS, SLOTS)

append, evict, merge = jax.jit(kvjax.kit.append), jax.jit(kvjax.kit.evict), jax.jit(kvjax.kit.merge)
compact = jax.jit(kvjax.kit.compact, static_argnums=1)
widen = jax.jit(widen_slots, static_argnums=1)
examples = settings(max_examples=60, deadline=None)


# --- the model ------------------------------------------------------------------------------------


class Model:
    """Slots of every (row, head) as a list of tokens (dicts) and None."""

    def __init__(self):
        self.slots = {(b, h): [None] * SLOTS for b in range(ROWS) for h in range(HEADS)}
        self.dropped = dict.fromkeys(self.slots, 0)
        self.length = [0] * ROWS

    def append(self, k, v, positions):
        for (b, h), slots in self.slots.items():
            for t, position in enumerate(positions[b].tolist()):
                if position < 0:
                    continue
                self.length[b] = max(self.length[b], position + 1)
                if None not in slots:
                    self.dropped[b, h] += 1
                    continue
                slots[slots.index(None)] = {
                    "position": position, "k": k[b, h, t], "v": v[b, h, t], "mass": 1.0,
                    "pinned": False, "count": 1.0, "own": np.full(2, 7.0),
                }  # fmt: skip

    def evict(self, keep):
        for (b, h), slots in self.slots.items():
            for s, token in enumerate(slots):
                if token and not (keep[b, h, s] or token["pinned"]):
                    slots[s] = None

    def pin(self, pinned):
        self.each(lambda at, token: token.update(pinned=bool(pinned[at])))

    def write_columns(self, count, own):
        self.each(lambda at, token: token.update(count=count[at], own=own[at]))

    def each(self, change):
        for (b, h), slots in self.slots.items():
            for s, token in enumerate(slots):
                if token:
                    change((b, h, s), token)

    def merge(self, into, weights=None):
        for (b, h), slots in self.slots.items():
            before = [dict(token) if token else None for token in slots]
            for s, token in enumerate(before):
                if not token:
                    continue
                members = [i for i, m in enumerate(before) if m and into[b, h, i] == s]
                if not members:
                    slots[s] = None
                elif len(members) > 1:
                    own = [before[i] for i in members]
                    mass = np.array([m["mass"] for m in own])
                    w = mass if weights is None else weights[b, h, members].astype(np.float64)
                    slots[s] = {
                        **token,
                        "k": np.average([m["k"] for m in own], axis=0, weights=w),
                        "v": np.average([m["v"] for m in own], axis=0, weights=w),
                        "mass": mass.sum(),
                        "count": sum(m["count"] for m in own),  # "own" stays: merge="keep"
                        "pinned": any(m["pinned"] for m in own),
                    }

    def compact(self, size):
        for (b, h), slots in self.slots.items():
            live = sorted((t for t in slots if t), key=lambda token: token["position"])
            self.dropped[b, h] += max(len(live) - size, 0)
            self.slots[b, h] = (live + [None] * size)[:size]

    def widen(self, size):
        for slots in self.slots.values():
            slots.extend([None] * (size - len(slots)))


def agree(cache: kvjax.kit.KVCache, model: Model) -> None:
    """Slot by slot: what is live, where, with what, and the bookkeeping around it."""
    found = {
        "k": cache.k.read(), "v": cache.v.read(), "mass": np.exp(np.asarray(cache.log_mass)),
        "count": cache.column("count"), "own": cache.column("own"),
    }  # fmt: skip
    found = {name: np.asarray(x) for name, x in found.items()}
    assert np.isfinite(found["k"]).all() and np.isfinite(found["v"]).all()
    np.testing.assert_array_equal(cache.length, model.length)
    names = ("live", "position", "pinned", "dropped", "used")
    kept = {name: np.asarray(getattr(cache, name)) for name in names}
    for (b, h), slots in model.slots.items():
        assert cache.slots == len(slots)
        at, live = f"row {b}, head {h}", [token is not None for token in slots]
        expected = {
            "live": live,
            "position": [token["position"] if token else -1 for token in slots],
            "pinned": [bool(token and token["pinned"]) for token in slots],
            "dropped": model.dropped[b, h],
            "used": max((s + 1 for s, x in enumerate(live) if x), default=0),
        }
        for name, x in expected.items():
            np.testing.assert_array_equal(kept[name][b, h], x, f"{at}, {name}")
        for name, x in found.items():
            tokens = [token[name] for token in slots if token]
            if tokens:
                close(x[b, h][live], np.stack(tokens), what=f"{at}, {name}")


def start() -> kvjax.kit.KVCache:
    cache = empty_cache(
        ROWS, HEADS, DIM, SLOTS, max_prompt=64, max_new=0, dtype=jnp.float32, group=2
    )
    cache = cache.with_column("count", jnp.zeros(SHAPE), fill=1.0)
    return cache.with_column("own", jnp.zeros((*SHAPE, 2)), fill=7.0, merge="keep")


# --- random operations ----------------------------------------------------------------------------

masks = hnp.arrays(bool, SHAPE)
numbers = st.floats(-4, 4, width=32)


def floats(shape, elements=numbers):
    return hnp.arrays(np.float32, shape, elements=elements)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), hnp.arrays(bool, (ROWS, NEW)), st.integers(0, 99)),
        st.tuples(st.just("append one"), hnp.arrays(bool, (ROWS, 1)), st.integers(0, 99)),
        st.tuples(st.just("evict"), masks),
        st.tuples(st.just("pin"), masks),
        st.tuples(st.just("columns"), floats(SHAPE), floats((*SHAPE, 2))),
        st.tuples(
            st.just("merge"),
            hnp.arrays(np.int32, SHAPE, elements=st.integers(0, 3)),
            st.booleans(),
            st.none() | floats(SHAPE, st.floats(0.125, 8, width=32)),
        ),
        st.tuples(st.just("compact")),
    ),
    min_size=1,
    max_size=7,
)  # fmt: skip


def targets(live: np.ndarray, labels: np.ndarray, last: bool) -> np.ndarray:
    """A target per slot: one live slot of those with its label. Free slots say anything."""
    into = labels.copy()
    for b, h in np.ndindex(ROWS, HEADS):
        for s in np.flatnonzero(live[b, h]):
            same = np.flatnonzero(live[b, h] & (labels[b, h] == labels[b, h, s]))
            into[b, h, s] = same[-1 if last else 0]
    return into


def apply(cache, model, kind, *given):
    if kind.startswith("append"):
        valid, seed = given
        steps = np.cumsum(valid, 1) - 1
        positions = np.where(valid, np.array(model.length)[:, None] + steps, -1).astype(np.int32)
        rng = np.random.default_rng(seed)
        k, v = rng.normal(size=(2, ROWS, HEADS, valid.shape[1], DIM)).astype(np.float32)
        cache, slots = append(cache, *(jnp.asarray(x) for x in (k, v, positions)))
        model.append(k, v, positions)
        stored = np.asarray(slots) < SLOTS
        assert not (stored & (positions < 0)[:, None]).any(), "padding was stored"
    elif kind == "evict":
        cache = evict(cache, jnp.asarray(given[0]))
        model.evict(given[0])
    elif kind == "pin":
        cache = cache.replace(pinned=jnp.asarray(given[0]) & cache.live)
        model.pin(given[0])
    elif kind == "columns":
        for name, values in zip(("count", "own"), given, strict=True):
            cache = cache.with_column(name, jnp.asarray(values))
        model.write_columns(*given)
    elif kind == "merge":
        labels, last, weights = given
        into = targets(np.asarray(cache.live), labels, last)
        cache = merge(cache, jnp.asarray(into), None if weights is None else jnp.asarray(weights))
        model.merge(into, weights)
    else:
        cache = compact(cache, SLOTS)
        model.compact(SLOTS)
    return cache, model


def replay(sequence):
    cache, model = start(), Model()
    for operation in sequence:
        cache, model = apply(cache, model, *operation)
        agree(cache, model)
    return cache, model


@examples
@given(operations)
def test_any_sequence_of_operations(sequence):
    replay(sequence)


@examples
@given(operations, st.sampled_from([2, 4, 9]))
def test_sequences_in_other_sizes(sequence, size):
    """Compacted, and then widened, which leaves slots where they are."""
    cache, model = replay(sequence)
    model.compact(size)
    cache = compact(cache, size)
    agree(cache, model)
    model.widen(9)
    agree(widen(cache, 9), model)


# --- laws -----------------------------------------------------------------------------------------


def filled(seed: int, duplicates: np.ndarray | None = None) -> kvjax.kit.KVCache:
    """A full cache of random tokens; slots with equal `duplicates` have equal keys."""
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, *SHAPE, DIM)).astype(np.float32)
    if duplicates is not None:
        k = np.take_along_axis(k, duplicates[..., None], axis=2)
    positions = jnp.tile(jnp.arange(SLOTS, dtype=jnp.int32), (ROWS, 1))
    cache, _ = append(start(), jnp.asarray(k), jnp.asarray(v), positions)
    return cache


@jax.jit
def attention(cache, q):
    now = jnp.full((ROWS, 1), SLOTS, jnp.int32)
    rows, seen = (cache.k.read(), cache.v.read()), Seen(cache.log_mass, cache.position)
    return decode_attention(Queries(q, now), *rows, seen, Mask(0.5))[0]


labels_with_free = st.tuples(
    hnp.arrays(np.int32, SHAPE, elements=st.integers(0, 2)),
    masks,
    st.booleans(),
    st.integers(0, 99),
)  # fmt: skip


@examples
@given(labels_with_free)
def test_merging_equal_keys_leaves_attention_unchanged(drawn):
    labels, keep, last, seed = drawn
    cache = evict(filled(seed, labels), jnp.asarray(keep))
    into = targets(np.asarray(cache.live), labels, last)
    q = np.random.default_rng(seed).normal(size=(ROWS, HEADS, 2, 1, DIM)).astype(np.float32)
    merged = merge(cache, jnp.asarray(into))
    close(attention(merged, jnp.asarray(q)), attention(cache, jnp.asarray(q)), "rounding")


@examples
@given(operations)
def test_merging_nothing_is_bit_identical(sequence):
    cache, _ = replay(sequence)
    itself = jnp.broadcast_to(jnp.arange(SLOTS, dtype=jnp.int32)[None, None], SHAPE)
    for before, after in zip(
        jax.tree.leaves(cache), jax.tree.leaves(merge(cache, itself)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


# --- single facts ---------------------------------------------------------------------------------


def test_a_free_slot_may_hold_anything_finite_when_merging():
    cache = evict(filled(0), jnp.asarray(np.broadcast_to(np.arange(SLOTS) < 3, SHAPE)))
    dirty = cache.k.read().at[:, :, 3:].set(3e38)
    dirty_cache = cache.replace(k=dataclasses.replace(cache.k, data=dirty))
    into = jnp.zeros(SHAPE, jnp.int32)  # free slots point at slot 0 too
    a, b = (merge(c, into) for c in (cache, dirty_cache))
    np.testing.assert_array_equal(a.k.read()[:, :, 0], b.k.read()[:, :, 0])
    close(np.exp(np.asarray(a.log_mass))[:, :, 0], np.full((ROWS, HEADS), 3.0))


def test_bfloat16_payloads_merge_in_float32():
    cache = empty_cache(1, 1, 2, 512, max_prompt=512, max_new=0, dtype=jnp.bfloat16)
    positions = jnp.arange(512, dtype=jnp.int32)[None]
    rows = jnp.ones((1, 1, 512, 2), jnp.bfloat16)
    cache, _ = append(cache, rows, rows, positions)
    merged = merge(cache, jnp.zeros((1, 1, 512), jnp.int32))
    assert merged.k.dtype == jnp.bfloat16
    close(merged.k.read()[0, 0, 0], np.ones(2), "exact")  # 512 ones in bfloat16 would give 256
    close(np.exp(np.asarray(merged.log_mass))[0, 0, 0], 512.0)


def test_a_column_starts_at_its_fill_again_when_a_slot_is_reused():
    cache = filled(0).with_column("count", jnp.full(SHAPE, 9.0))
    cache = evict(cache, jnp.zeros(SHAPE, bool))
    k = jnp.ones((ROWS, HEADS, 1, DIM))
    cache, slots = append(cache, k, k, jnp.full((ROWS, 1), SLOTS, jnp.int32))
    np.testing.assert_array_equal(slots, np.zeros((ROWS, HEADS, 1)))
    np.testing.assert_array_equal(cache.column("count")[:, :, 0], np.ones((ROWS, HEADS)))
    np.testing.assert_array_equal(cache.column("own")[:, :, 0], np.full((ROWS, HEADS, 2), 7.0))


def test_columns_of_any_dtype_move_with_their_slots():
    values = jnp.arange(np.prod(SHAPE), dtype=jnp.uint32).reshape(SHAPE)
    cache = filled(0)
    cache = cache.replace(columns={**cache.columns, "bits": Column(values, 0, "keep")})
    keep = np.zeros(SHAPE, bool)
    keep[..., 2:4] = True
    small = compact(evict(cache, jnp.asarray(keep)), 2)
    assert small.column("bits").dtype == jnp.uint32
    np.testing.assert_array_equal(small.column("bits"), np.asarray(values)[..., 2:4])


def test_no_prefix_sum_of_constants_is_left_to_the_compiler():
    """For GPUs, XLA took a minute to compute that of a new cache of a million slots."""

    def read(k, positions):
        cache = kvjax.init_cache(
            kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=8, max_new=0
        )
        return kvjax.kit.append(cache.kv, k, k, positions)

    lowered = jax.jit(read).lower(jnp.zeros((1, 1, 3, 4)), jnp.arange(3)[None])
    assert "optimization_barrier" in lowered.as_text()


def test_a_merge_without_weights_keeps_the_targets_own_rows():
    cache = kvjax.init_cache(
        kvjax.Full(), batch=1, kv_heads=1, head_dim=2, max_prompt=3, max_new=0
    ).kv
    rows = jnp.arange(6.0).reshape(1, 1, 3, 2)
    cache, _ = append(cache, rows, -rows, jnp.arange(3)[None])
    merged = merge(cache, jnp.array([[[1, 1, 2]]]), jnp.array([[[0.0, 0.0, 1.0]]]))
    np.testing.assert_array_equal(merged.k.read(), rows)
    np.testing.assert_array_equal(np.exp(merged.log_mass), [[[0, 2, 1]]])


@examples
@given(st.data())
def test_ranks_are_places_among_the_live_slots(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    position = rng.permuted(np.tile(np.arange(SLOTS) * 7, (ROWS, HEADS, 1)), axis=-1)
    live = data.draw(hnp.arrays(bool, SHAPE))
    found = np.asarray(ranks(jnp.asarray(live), jnp.asarray(position)))
    for row, head in np.ndindex(ROWS, HEADS):
        text = sorted(position[row, head][live[row, head]].tolist())
        own = found[row, head][live[row, head]]
        assert own.tolist() == [text.index(at) for at in position[row, head][live[row, head]]]
