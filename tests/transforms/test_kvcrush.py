"""KVCrush against its reference: representatives, and exactly what is kept."""

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
from kvjax.cache.rearrange import compact, widen
from kvjax.cache.slots import append
from kvjax.decisions import Keep, carry_out
from kvjax.protocol import AttentionOptions, Step, accumulated_attention, on_request
from kvjax.transforms.kvcrush.kvcrush import REPRESENTATIVE
from kvjax.transforms.kvcrush.representatives import member_runs, nearest_to_centroids
from tests.references import kvcrush as reference
from tests.references.budgets import rows_budget
from tests.support.attending import Tokens, init_cache, live_count, right, run, slots_of
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
    before: kvjax.kit.KVCache
    alone: kvjax.kit.KVCache
    score: jax.Array | None
    after: kvjax.kit.KVCache


@functools.partial(jax.jit, static_argnums=0)
def one_prompt(tx, cache, k, v, positions, attention, query, query_position):
    kv = widen(cache.kv, cache.kv.slots + k.shape[2])
    kv, _ = append(kv, k, v, positions)
    if "attention" in kv.columns:
        shape = kv.column("attention").shape
        kv = kv.with_column("attention", jnp.resize(attention, shape))
    rows = (positions >= 0).any(1)
    step = Step(
        rows=rows, keys=kv.k.read(), rope=None, moment="prompt", options=AttentionOptions(0.5),
        requested=on_request(query=query, query_position=query_position),
    )  # fmt: skip
    base, _ = tx.split
    before = kv.replace(pinned=kv.pinned & ~kv.column(REPRESENTATIVE))
    decision, _ = base.on_prompt(before, cache.state.base, step)
    alone, score = carry_out(decision, before, step), None
    if not tx.kmeans:
        scored = isinstance(decision, Keep) and decision.score is not None
        score = decision.score if scored else accumulated_attention(before)
    decision, state = tx.on_prompt(kv, cache.state, step)
    after = carry_out(decision, kv, step)
    kv = compact(after, after.capacity, rows)
    return dataclasses.replace(cache, kv=kv, state=state), Seen(rows, before, alone, score, after)


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
    ("anchor", "pick", "heads"),
    [
        ("median", "middle", (2, 4)),
        pytest.param("alternate", "random", (2, 4), marks=slow),
        pytest.param("random", "random", (5, 7), marks=slow),  # more bits than one word's
    ],
)
def test_anchors_and_picks(anchor, pick, heads):
    Crushing(H2O(13), 7, anchor=anchor, pick=pick, heads=heads, seed=1).prompt(LENGTHS)


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
    assert (kept <= crushing.tx.extent(kvjax.kit.Extent(128, 0)).prompt).all()


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
    start, length = jax.jit(member_runs, static_argnums=2)(
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


# --- budgets, while decoding too ------------------------------------------------------------------

PROMPTS = (30, 17, 16, 9)
# Bases of 16 slots, and how many more they may hold after a step of decoding.
WHOLE = {
    "h2o": (H2O(16), 0),
    "snapkv": (SnapKV(16, window=4), 8),
    "every": (Every(SnapKV(16, window=4), steps=3), 2),
}


def representatives(cache, row: int, head: int) -> list[int]:
    own = slots_of(cache, row, head)
    return own["position"][own[REPRESENTATIVE]].tolist()


@pytest.mark.parametrize(
    ("name", "share"), [*((name, None) for name in WHOLE), ("h2o", 0.1), ("snapkv", 0.68)]
)
@pytest.mark.slow
def test_a_share_adds_up(name, share):
    """B slots in all after the prompt; a row of up to B tokens is kept whole.

    While decoding the representatives stay, outside the base's part of the budget.
    """
    base, more = WHOLE[name]
    transform, count = KVCrush(base, share=share), round(16 * (share or 0.25))
    tokens = Tokens.random(rows=4, seed=14)
    after = run(transform, tokens, right([0] * 4, PROMPTS, 30), 8)
    live, pinned = live_count(after.prompt_cache), np.asarray(after.prompt_cache.kv.pinned).sum(-1)
    for row, length in enumerate(PROMPTS):
        assert (live[row] == min(length, 16)).all()
        assert (pinned[row] == np.clip(length - (16 - count), 0, count)).all()
    assert transform.extent(kvjax.kit.Extent(30, 0)).total == 16
    for cache in after.caches:
        assert (np.asarray(cache.kv.dropped) == 0).all()
        assert (live_count(cache)[0] <= 16 + more).all()
        for row, head in np.ndindex(4, 2):
            chosen = representatives(cache, row, head)
            assert chosen == representatives(after.prompt_cache, row, head)
            assert live_count(cache)[row, head] - len(chosen) <= 16 - count + more


@pytest.mark.parametrize("base", [PyramidKV(16, window=4), PyramidInfer(24)], ids=str)
def test_layers_add_up(base):
    """Each layer's budget is shared out, by prompt length, and the layers add up."""
    layers, plain = kvjax.bind(KVCrush(base, share=0.3), 4), kvjax.bind(base, 4)
    lengths = np.arange(1, 200)
    total = 0
    for layer, whole in zip(layers, plain, strict=True):
        kept, taken = layer.split[0].budget(lengths), layer.split[1](lengths)
        np.testing.assert_array_equal(kept + taken, whole.budget(lengths))
        wanted = np.rint(0.3 * whole.budget(lengths))
        spare = np.maximum(kept + taken - whole.minimum, 0)
        np.testing.assert_array_equal(taken, np.minimum(wanted, spare))
        extent = kvjax.kit.Extent(200, 0)
        assert layer.extent(extent).total == whole.extent(extent).total
        total = total + kept + taken
    assert (total == 4 * base.budget).all()


@pytest.mark.slow
def test_positions_with_gaps_lose_nothing():
    """Beyond `max_prompt + max_new` a token has no bits, and is never a representative."""
    tokens = Tokens.random(rows=1, length=200, seed=16)
    positions = np.array([[*range(10), *range(100, 120)]])
    cache = run(KVCrush(H2O(8), 4, anchor="mean"), tokens, positions, 0).prompt_cache
    assert (np.asarray(cache.kv.dropped) == 0).all() and (live_count(cache) <= 12).all()
    assert (np.asarray(cache.kv.position).max(-1) == 119).all()


@pytest.mark.parametrize(
    ("base", "scored"),
    [
        (H2O(16), True),
        (Every(SnapKV(16, window=4), steps=3), True),
        (StreamingLLM(16), False),
        (chain(SnapKV(20, window=4), H2O(16)), False),
    ],
    ids=str,
)
def test_bits_are_of_the_score_or_of_attention(base, scored):
    """Accumulated attention is asked for only where nothing else gives the bits."""
    asked = KVCrush(base, 4).needs.accumulated_attention
    assert asked == (not scored or base.needs.accumulated_attention)
    assert KVCrush(base, 4, kmeans=True).needs == base.needs


def test_a_layer_that_turns_out_to_keep_everything_is_full():
    tx = KVCrush(kvjax.PerLayer(lambda i, n: kvjax.Full() if i == 0 else H2O(16)), 4)
    assert kvjax.bind(tx, 2) == (kvjax.Full(), KVCrush(H2O(16), 4))


@pytest.mark.slow
def test_around_a_chain_while_decoding():
    """Each part of the chain finds its own state at every step."""
    tx = KVCrush(chain(SnapKV(20, window=4), H2O(12)), 4)
    after = run(tx, Tokens.random(rows=2, seed=17), right([0] * 2, (30, 25), 30), 3)
    assert (live_count(after.caches[-1]) == 16).all()
    chosen = [representatives(cache, 0, 0) for cache in after.all_caches]
    assert len(chosen[0]) == 4 and all(each == chosen[0] for each in chosen)


@pytest.mark.slow
def test_every_chooses_anew():
    """Around KVCrush it lets the representatives compete again, among everything live."""
    tx = Every(KVCrush(SnapKV(16, window=4)), steps=3)
    after = run(tx, Tokens.random(rows=2, seed=10), right([0] * 2, (30, 25), 30), 9)
    chosen = [representatives(cache, 0, 0) for cache in after.all_caches]
    assert all(len(each) == 4 for each in chosen) and len(set(map(tuple, chosen))) > 1


@pytest.mark.parametrize(
    ("transform", "total"),
    [
        (KVCrush(SnapKV(40), 7), 67),
        (KVCrush(Every(SnapKV(40), 9), 7), 56),
        (Every(KVCrush(SnapKV(40), 7), 9), 56),
        (chain(KVCrush(SnapKV(40), 7), H2O(10)), 18),
        (chain(H2O(50), KVCrush(SnapKV(40), 7)), 58),
    ],
    ids=str,
)
def test_representatives_come_on_top(transform, total):
    assert transform.extent(kvjax.kit.Extent(prompt=100, new=20)).total == total


ERRORS = {
    "full": (lambda: KVCrush(kvjax.Full()), ValueError, "evicts.*Full"),
    "both": (lambda: KVCrush(H2O(16), 4, 0.5), ValueError, "not both: got 4 and 0.5"),
    "share of nothing": (
        lambda: KVCrush(chain(H2O(16), SnapKV(40))), ValueError, "budget.*representatives=",
    ),
    "share in a wrapper": (
        lambda: KVCrush(Every(SnapKV(17), 4)), ValueError, r"0.25.*17.*window \+ 1",
    ),
    "less than a page": (lambda: KVCrush(H2O(64), granularity="page"), ValueError, "page"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_refused(case):
    make, error, message = case
    with pytest.raises(error, match=message):
        make()
