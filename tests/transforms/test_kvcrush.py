"""KVCrush against its reference: bits, distances, representatives, and exactly what is kept."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    H2O,
    Every,
    KVCrush,
    PyramidInfer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    WhenFull,
    chain,
)
from kvjax.cache.slots import append, compact, widen
from kvjax.cache.units import Units
from kvjax.decisions import Keep, carry_out
from kvjax.protocol import Logits, Step, accumulated_attention
from kvjax.transforms.kvcrush.kvcrush import REPRESENTATIVE
from kvjax.transforms.kvcrush.representatives import anchor_bits, cut, nearest_to_centroids
from pallas_kernels import hamming_distance, pack_bits
from tests.references import kvcrush as reference
from tests.references.budgets import rows_budget
from tests.support.attending import Tokens, init_cache, live_count, right, slots_of
from tests.support.marks import some_slow

slow = pytest.mark.slow
SEED, LAYER, LAYERS = 5, 1, 3
KEYS = jax.random.split(jax.random.fold_in(jax.random.key(SEED), LAYER))
LENGTHS, SECOND = (37, 5, 52), (9, 25, 0)  # the last row gets no token of the second prompt
LIMITS = {"max_prompt": 128, "max_new": 16, "head_dim": 8}

BASES = {
    "streaming_llm": StreamingLLM(12, sinks=3),
    "h2o": H2O(13),
    "h2o, a share": H2O(0.3, group_reduce="max"),
    "snapkv": SnapKV(16, window=8),
    "pyramidkv": PyramidKV(16, window=8),
    "pyramidinfer": PyramidInfer(20),
    "every": Every(SnapKV(16, window=8), steps=6),
    "when_full": WhenFull(SnapKV(16, window=8), room=6),
    "chain": chain(SnapKV(20, window=8), H2O(13)),
}
LARGE = {"h2o": H2O(70), "snapkv": SnapKV(80, window=8), "pyramidinfer": PyramidInfer(60)}


def the_method(base: kvjax.KVTransform) -> kvjax.KVTransform:
    """What stands in `Every` and `WhenFull`."""
    return getattr(base, "base", base)


def newest(method: kvjax.KVTransform, length: int) -> int:
    """How many newest tokens a scoring method always keeps."""
    if isinstance(method, H2O):
        budget = rows_budget(method.budget, length, 2)
        return max(budget, 2) - max(budget, 2) // 2
    if isinstance(method, SnapKV):
        return method.window
    lengths = np.array([length])
    return int(method.window(method.observing(lengths), method.budget(lengths))[0])


class Seen(NamedTuple):
    """A prompt's end: the cache before, what the base alone makes of it, and KVCrush."""

    rows: jax.Array
    before: kvjax.KVCache
    alone: kvjax.KVCache
    score: jax.Array | None
    bits: jax.Array
    after: kvjax.KVCache


@functools.partial(jax.jit, static_argnums=0)
def one_prompt(tx, cache, k, v, positions, attention, query, query_position):
    kv = widen(cache.kv, cache.kv.slots + k.shape[2])
    kv, slots = append(kv, k, v, positions)
    if "attention" in kv.columns:
        shape = kv.column("attention").shape
        kv = kv.with_column("attention", jnp.resize(attention, shape))
    rows = (positions >= 0).any(1)
    step = Step(
        rows=rows, slots=slots, mass=None, keys=kv.k.read(), query=query,
        query_position=query_position, rope=None, moment="prompt", logits=Logits(0.5),
    )  # fmt: skip
    base, _ = tx.split
    before = kv.replace(pinned=kv.pinned & ~kv.column(REPRESENTATIVE))
    decision, _ = base.on_prompt(before, cache.state.base, step)
    alone, score, bits = carry_out(decision, before, step), None, None
    if not tx.kmeans:
        scored = isinstance(decision, Keep) and decision.score is not None
        score = decision.score if scored else accumulated_attention(before)
        bits = Units.of(before, tx.unit).join(tx._behaviour(before, decision)[1])
    decision, state = tx.on_prompt(kv, cache.state, step)
    after = carry_out(decision, kv, step)
    kv = compact(after, after.capacity, rows)
    return dataclasses.replace(cache, kv=kv, state=state), Seen(
        rows, before, alone, score, bits, after
    )


class Crushing:
    """A layer that reads prompts, compared with the reference after each."""

    def __init__(self, base, count=5, *, heads=(2, 2), seed=0, **kind):
        tx = KVCrush(base, count, seed=SEED, **kind)
        self.tx, self.heads, self.count = kvjax.bind(tx, LAYERS)[LAYER], heads, count
        self.rng, self.next = np.random.default_rng(seed), np.zeros(3, int)
        self.tokens = Tokens.random(3, 144, heads[0], heads[0] * heads[1], 8, seed)
        shape = {"kv_heads": heads[0], "query_heads": heads[0] * heads[1]}
        self.cache = init_cache(self.tx, batch=3, dtype=jnp.float32, layer=LAYER, **shape, **LIMITS)

    def prompt(self, counts):
        width = max(52, *counts)
        positions = right(self.next, counts, width)
        self.next += counts
        _, k, v, where = self.tokens.at(positions)
        size = self.tx.needs.queries(LIMITS["max_prompt"])
        last = np.sort(positions, axis=1)[:, width - min(size, width) :]
        last = np.pad(last, ((0, 0), (size - last.shape[1], 0)), constant_values=-1)
        query = jnp.asarray(self.rng.normal(size=(3, self.tokens.q.shape[1], size, 8)), "float32")
        attention = jnp.asarray(self.rng.exponential(size=9973), "float32")
        self.cache, seen = one_prompt(
            self.tx, self.cache, k, v, where, attention, query, jnp.asarray(last, jnp.int32)
        )
        seen = jax.device_get(seen)
        self.chosen = [self._check(seen, row) for row in range(3)]
        return self

    def _check(self, seen: Seen, row: int) -> list[list[int]]:
        """Compares a row; returns its representatives."""
        before, after = seen.before, seen.after
        heads = [self._head(seen, row, head) for head in range(self.heads[0])]
        if not seen.rows[row]:  # the base alone has left it as it is
            expected = [head.kept for head in heads], [[] for _ in heads]
        elif self.tx.kmeans:
            expected = self._centroids(before, heads, row)
        else:
            expected = self._crushed(seen, heads, row)
        for h, (kept, chosen) in enumerate(zip(*expected, strict=True)):
            if len(heads[h].kept) == len(heads[h].positions):  # left alone, representatives too
                earlier = before.column(REPRESENTATIVE)[row, h] & before.live[row, h]
                chosen = sorted(before.position[row, h][earlier].tolist())
                kept = sorted(set(heads[h].positions) - set(chosen))
            own = slots_of(self.cache, row, h)
            assert own["position"].tolist() == sorted([*kept, *chosen])
            assert own["position"][own[REPRESENTATIVE]].tolist() == chosen
            np.testing.assert_array_equal(
                after.pinned[row, h], (after.column(REPRESENTATIVE) & after.live)[row, h]
            )
            assert (own["log_mass"] == 0).all()
            np.testing.assert_array_equal(own["k"], self.tokens.k[row, h, own["position"]])
            np.testing.assert_array_equal(own["v"], self.tokens.v[row, h, own["position"]])
        return expected[1]

    def _head(self, seen: Seen, row: int, head: int) -> reference.Head:
        live = np.flatnonzero(seen.before.live[row, head])
        slots = live[np.argsort(seen.before.position[row, head, live])]
        positions = seen.before.position[row, head, slots]
        kept = positions[seen.alone.live[row, head, slots]].tolist()
        group = slice(head * self.heads[1], (head + 1) * self.heads[1])
        if self.tx.kmeans:
            return reference.Head(positions.tolist(), None, None, kept)
        method, length = the_method(self.tx.split[0]), int(self.next[row])
        if hasattr(method, "parts") or isinstance(method, StreamingLLM):
            always = np.zeros(len(positions), bool)  # accumulated attention alone decides
        else:
            always = positions >= length - newest(method, length)
            always |= positions < getattr(method, "sinks", 0)
        return reference.Head(positions.tolist(), seen.score[row, group][:, slots], always, kept)

    def _crushed(self, seen: Seen, heads, row: int):
        size = self.tx.unit * self.heads[0] * self.heads[1]
        kind, method = self.tx.anchor, the_method(self.tx.split[0])
        if kind == "random":
            kind = np.asarray(jax.random.bernoulli(KEYS[0], shape=(1, size)))[0]
        scores = not (hasattr(method, "parts") or isinstance(method, StreamingLLM))
        crushed = reference.crush(
            heads, self.count, kind, the_draw if self.tx.pick == "random" else None, self.tx.unit,
            getattr(method, "group_reduce", "mean") if scores else None,
        )  # fmt: skip
        if self.tx.unit == 1:  # each query head retains as many tokens as its KV head
            ones = np.sum([*crushed.bits.values()], axis=0)
            kept = np.repeat([len(head.kept) for head in heads], self.heads[1])
            np.testing.assert_array_equal(ones, kept)
        bits = seen.bits[row]
        there = np.isin(np.arange(len(bits)), list(crushed.bits))
        assert not bits[~there].any()
        own = anchor_bits(self.tx.anchor, bits[None], there[None], KEYS[0])
        np.testing.assert_array_equal(own[0], crushed.anchor)
        distance = hamming_distance(pack_bits(jnp.asarray(bits)), pack_bits(own))
        for unit, vector in crushed.bits.items():
            np.testing.assert_array_equal(bits[unit], vector, f"unit {unit}")
            assert distance[unit] == crushed.distance[unit]
        return crushed.kept, crushed.representatives

    def _centroids(self, before, heads, row: int):
        kept, chosen = [], []
        for h, head in enumerate(heads):
            gone = [p for p in head.positions if p not in head.kept]
            picked = reference.kmeans(np.float64(self.tokens.k[row, h, gone]), self.count)
            kept.append(sorted(head.kept))
            chosen.append([gone[i] for i in picked])
        return kept, chosen


def the_draw(head: int, unit: int) -> float:
    """The rule of the docstring: a number per seed, layer, KV head and position."""
    return float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEYS[1], head), unit)))


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("name", some_slow(BASES, "h2o"))
def test_over_every_base(name):
    """Ragged rows, and a second prompt in which representatives compete again: by then heads hold
    different tokens in different slots."""
    crushing = Crushing(BASES[name], anchor="mean").prompt(LENGTHS)
    assert [len(head) for head in crushing.chosen[2]] == [5, 5]
    assert len(crushing.chosen[1][0]) == (3 if name == "h2o, a share" else 0)  # of 5 tokens
    crushing.prompt(SECOND)
    assert [len(head) for head in crushing.chosen[0]] == [5, 5]


@pytest.mark.parametrize(
    ("anchor", "pick"),
    [
        ("median", "middle"),
        pytest.param("random", "random", marks=slow),
        pytest.param("alternate", "random", marks=slow),
    ],
)
def test_anchors_and_picks(anchor, pick):
    Crushing(H2O(13), 7, anchor=anchor, pick=pick, heads=(2, 4), seed=1).prompt(LENGTHS)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("h2o", "chunk"),
        pytest.param("snapkv", "page", marks=slow),
        pytest.param("pyramidinfer", 2, marks=slow),
    ],
)
def test_granularity(name, unit):
    """The base takes whole units too."""
    crushing = Crushing(LARGE[name], 70, granularity=unit, anchor="alternate", seed=3)
    crushing.prompt((120, 30, 101)).prompt((4, 90, 0))
    size = crushing.tx.unit
    for head in crushing.chosen[1]:
        assert 0 < len(head) <= 70 // size * size
    kept = live_count(crushing.cache)[1]
    assert (kept <= crushing.tx.extent(kvjax.Extent(128, 0)).prompt).all()


def test_granularity_over_a_base_without_a_score():
    lengths = (120, 30, 101)
    Crushing(StreamingLLM(20), 40, granularity="page", anchor="median", seed=4).prompt(lengths)


def test_kmeans():
    Crushing(BASES["streaming_llm"], 6, kmeans=True, seed=4).prompt(LENGTHS).prompt(SECOND)


@pytest.mark.slow
def test_fewer_evicted_than_representatives_all_return():
    crushing = Crushing(H2O(13), 30, seed=8).prompt(LENGTHS)
    assert slots_of(crushing.cache, 0, 0)["position"].tolist() == list(range(37))
    assert len(crushing.chosen[0][0]) == 37 - 13


@pytest.mark.parametrize(
    ("members", "buckets"),
    [(2_000_000_011, 2048), (999_999, 250_000), (139_999, 70_000), (300, 257)],
)
def test_the_first_rank_of_a_bucket_does_not_overflow(members, buckets):
    start, length = jax.jit(cut, static_argnums=2)(
        jnp.array([[members]]), jnp.array([buckets]), buckets
    )
    expected = np.arange(buckets + 1) * members // buckets
    np.testing.assert_array_equal(start[0, 0], expected[:-1])
    np.testing.assert_array_equal(length[0, 0], np.diff(expected))


def test_centroids_of_equal_keys_still_meet_their_count():
    """All in one cluster: what the empty ones leave goes by position."""
    keys, evicted = jnp.ones((1, 1, 9, 4)), jnp.arange(9)[None, None] > 1
    position = jnp.arange(9, dtype=jnp.int32)[None, None]
    chosen = jax.jit(nearest_to_centroids, static_argnums=4)(
        keys, evicted, position, jnp.array([3]), 3
    )
    assert np.flatnonzero(chosen[0, 0]).tolist() == [2, 3, 4]
