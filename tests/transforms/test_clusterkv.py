"""ClusterKV against its reference: the index, the lists, the outputs of every step."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import ClusterKV, chain
from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.random import layer_key, uniform
from tests.references import clusterkv as reference
from tests.references.slots import Slots, Token
from tests.support.attending import attend, new_cache, right, slots_of
from tests.support.decode_loops import Steps, Watched, decode_loop, found, listed, read_prompt
from tests.support.tolerances import close

KV_HEADS, GROUP, DIM = 2, 3, 8
SINKS, INTERVAL, NEW_CLUSTERS = 5, 16, 3
MAX_PROMPT, STEPS, SHORT = 96, 400, 56
LAYER = 3
SMALL = {
    "tokens_per_cluster": 7, "sinks": SINKS, "interval": INTERVAL, "new_clusters": NEW_CLUSTERS,
    "dense_layers": (),
}  # fmt: skip


def clusterkv(budget=24, **changes) -> ClusterKV:
    return ClusterKV(budget, **{**SMALL, **changes})


# --- the reference, driven in step with the library -----------------------------------------------


@functools.cache
def numbers(seed, count: int) -> np.ndarray:
    """The library's random numbers of the positions below `count`, [H, count]."""
    position = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (1, KV_HEADS, count))
    return np.asarray(uniform(layer_key(seed, LAYER), position))[0]


def drawn(seed):
    """`draw` of the reference: the positions with the highest numbers, in their order."""

    def draw(head: int, positions: list[int], count: int) -> list[int]:
        number = numbers(seed, MAX_PROMPT + STEPS + 1)[head]
        return sorted(sorted(positions, key=lambda p: (-number[p], p))[:count])

    return draw


class Row(reference.ClusterKV):
    """A row of a batch, clustered every `interval` steps of the batch."""

    def __init__(self, tx: ClusterKV, most: int):
        names = (
            "tokens_per_cluster", "sinks", "interval", "new_clusters", "iterations", "chunk",
            "clusters", "metric", "per_query_head", "group_reduce",
        )  # fmt: skip
        options = {name: getattr(tx, name) for name in names}
        super().__init__(tx.budget, drawn(tx.seed), most_clusters=most, **options)

    def load(self, slots: list[dict], length: int) -> Row:
        """Starts with the live slots of every head, as a method before has left them."""
        self.heads, self.prompt_length = [], length
        for own in slots:
            self.heads.append(Slots())
            columns = (own[name] for name in ("position", "k", "v", "log_mass"))
            self.heads[-1].tokens = [
                Token(int(p), np.float64(k), np.float64(v), np.zeros(1), float(m))
                for p, k, v, m in zip(*columns, strict=True)
            ]
        self.index()
        self.stale = False
        return self

    @property
    def layout(self) -> list[list[int]]:
        """The position in every slot of each head."""
        return [
            [*index.sinks, *(p for c in index.clusters for p in c.members), *index.unclustered]
            for index in self.indices
        ]

    def update(self):
        """Not by its own tokens: see `Both.decode`."""

    def queries(self, rng) -> np.ndarray:
        """Queries [Q, D] whose ranking of clusters no rounding can change; some rank all as one."""
        if rng.random() < 0.05:
            return np.zeros((KV_HEADS * GROUP, DIM), np.float32)
        out = []
        for index in self.indices:
            there = [cluster.centroid for cluster in index.clusters if cluster.members]
            for _ in range(1000):
                q = short_floats(2 * rng.normal(size=(GROUP, DIM)))
                scores = np.reshape(there, (-1, DIM)) @ q.T.astype(np.float64)
                if not self.per_query_head:
                    scores = self.reduce(scores, axis=1, keepdims=True)
                gaps = np.diff(np.sort(scores, axis=0), axis=0)
                if np.all(gaps > 1e-4):
                    break
            else:
                raise AssertionError("no query ranks these clusters clearly")
            out.append(q)
        return np.concatenate(out)


original_similarity = reference.similarity


def clear_similarity(keys, centroids, metric):
    """Fails where float32 might assign otherwise. Then another seed has to be chosen."""
    found = original_similarity(keys, centroids, metric)
    if found.shape[1] > 1:
        top = np.sort(found, axis=1)
        gap = top[:, -1] - top[:, -2]
        clear = (gap == 0) | (gap > 2e-6 * np.maximum(1.0, np.abs(top).max(1)))
        assert clear.all(), f"near tie ({gap.min()}): change the seed"
    return found


clear_choices = mock.patch.object(reference, "similarity", clear_similarity)


def short_floats(x) -> np.ndarray:
    """What bfloat16 has of them, as float32."""
    return np.asarray(x, jnp.bfloat16).astype(np.float32)


def keys_and_values(rng, *shape):
    """Keys around a few directions, with lengths of their own."""
    directions = rng.normal(size=(6, DIM)) * 2
    keys = directions[rng.integers(6, size=shape)] + rng.normal(size=(*shape, DIM))
    values = rng.normal(size=(*shape, DIM))
    return short_floats(keys), short_floats(values)


def most_clusters(tx: ClusterKV, capacity: int, steps: int) -> int:
    """Of a head, with room for the prompts of all lengths and the tokens of so many steps."""
    prompt, new = 1, 0
    for length in range(MAX_PROMPT + 1):
        row = Row(tx, 0)
        row.prompt_length = length
        # The longest prompt may be one of several turns.
        live = capacity if length == MAX_PROMPT else min(length, capacity)
        counts = reference.cluster_counts(live, row.size, 0, row.clusters, row.chunk)
        prompt = max(prompt, sum(counts))
        each = reference.rounded(tx.interval, row.size)
        each = each if tx.new_clusters is None else tx.new_clusters
        new = max(new, min(each, tx.interval))
    return prompt + new * (steps // tx.interval)


class Both:
    """A method and one reference per row, step by step on the same tokens.

    transform: a ClusterKV. before: what stands before it in its chain.
    """

    def __init__(self, transform, lengths, before=None, seed=0, dtype=jnp.float32, steps=STEPS):
        self.clusterkv, self.before = transform, kvjax.Full() if before is None else before
        self.watched = chain(self.before, Watched(transform))
        self.rng, self.dtype, self.steps = np.random.default_rng(seed), dtype, steps
        self.next = np.array(lengths)
        self.sizes = {
            "kv_heads": KV_HEADS, "query_heads": KV_HEADS * GROUP, "head_dim": DIM,
            "max_prompt": MAX_PROMPT, "max_new": steps, "dtype": dtype, "layer": LAYER,
        }  # fmt: skip
        self.cache = new_cache(self.watched, len(lengths), **self.sizes)
        self.since = 0
        most = self.clusters.sizes.shape[2]
        assert most == most_clusters(self.clusterkv, self.cache.kv.capacity, steps)
        self.rows = [Row(self.clusterkv, most) for _ in lengths]
        positions = right([0] * len(lengths), lengths, max(lengths))
        tokens = self._prompt_tokens(positions)
        out, self.cache = read_prompt(self.watched, self.cache, *tokens)
        first = new_cache(self.before, len(lengths), **self.sizes)
        expected, first = read_prompt(self.before, first, *tokens)
        close(out, expected, "exact")
        with clear_choices:
            for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
                row.load([slots_of(first, number, head) for head in range(KV_HEADS)], length)
        self.check_index(self.cache.kv.position, self.clusters)

    @property
    def clusters(self):
        return jax.tree.map(np.asarray, found(self.cache, Clusters))

    def _prompt_tokens(self, positions):
        shape = positions.shape
        q = self.rng.normal(size=(shape[0], KV_HEADS * GROUP, shape[1], DIM))
        k, v = keys_and_values(self.rng, shape[0], KV_HEADS, shape[1])
        return *(jnp.asarray(x, self.dtype) for x in (q, k, v)), jnp.asarray(positions, jnp.int32)

    def turn(self, counts):
        """A further prompt."""
        positions = right(self.next, counts, max(counts))
        tokens = self._prompt_tokens(positions)
        out, self.cache = read_prompt(self.watched, self.cache, *tokens)
        q, k, v, _ = (np.asarray(x, np.float64) for x in tokens)
        with clear_choices:
            for number, row in enumerate(self.rows):
                expected = row.prompt(q[number], k[number], v[number], positions[number])
                there = positions[number] >= 0
                close(np.asarray(out)[number][:, there], expected[:, there], "reference")
        self.next += counts
        self.check_index(self.cache.kv.position, self.clusters)

    def decode(self, steps, pads=()) -> Steps:
        """Steps, of which `pads` = (step, row) give a row nothing."""
        number, pads = len(self.rows), set(pads)
        shape = (steps, number, KV_HEADS)
        k, v = keys_and_values(self.rng, *shape)
        q = np.zeros((steps, number, KV_HEADS * GROUP, DIM), np.float32)
        positions = np.full((steps, number, 1), -1, np.int32)
        expected, indices = [], []
        with clear_choices:
            for step in range(steps):
                for at, row in enumerate(self.rows):
                    if (step, at) in pads:
                        expected.append(None)
                        q[step, at], k[step, at], v[step, at] = 1e4, 1e4, 1e4
                    else:
                        q[step, at] = row.queries(self.rng)
                        now = int(self.next[at])
                        given = (np.float64(x[step, at]) for x in (q, k, v))
                        expected.append(row.decode(*given, now))
                        positions[step, at], self.next[at] = now, now + 1
                if (self.since + step + 1) % self.clusterkv.interval == 0:
                    for row in self.rows:
                        row.make_room(self.clusterkv.interval)
                indices.append(self._expected_index())
        tokens = (*(jnp.asarray(x[..., None, :], self.dtype) for x in (q, k, v)), positions)
        tokens = (*tokens[:3], jnp.asarray(positions))
        self.cache, done = decode_loop(self.watched, self.cache, tokens, self.since)
        self.since += steps
        self._check(done, expected, indices)
        return done

    def _check(self, done: Steps, expected, indices):
        kind = "reference" if self.dtype == jnp.float32 else "bfloat16"
        assert (done.dropped == 0).all()
        for i, each in enumerate(expected):
            step, row = divmod(i, len(self.rows))
            where = f"step {step}, row {row}"
            out = done.out[step, row, :, 0]
            if each is None:
                close(out, np.zeros_like(out), "exact", where)
                continue
            close(out, each[0], kind, where)
            assert [listed(x) for x in done.seen[step, row]] == each[1], where
        for step, index in enumerate(indices):
            clusters = jax.tree.map(lambda x: x[step], done.clusters)  # noqa: B023
            self.check_index(done.position[step], clusters, index, f"step {step}")

    def _expected_index(self):
        """Of each row the layout and, of each head, the number of sinks and the clusters."""
        return [
            (
                row.layout,
                [
                    (len(i.sinks), [(c.centroid, list(c.members)) for c in i.clusters])
                    for i in row.indices
                ],
            )
            for row in self.rows
        ]

    def check_index(self, position, clusters, index=None, what="prompt"):
        """The order of slots, sinks, sizes, starts and centroids are the reference's."""
        index = self._expected_index() if index is None else index
        position = np.asarray(position)
        for row, (layouts, heads) in enumerate(index):
            for head, (layout, (sinks, expected)) in enumerate(zip(layouts, heads, strict=True)):
                where = f"{what}, row {row}, head {head}"
                own = position[row, head]
                assert own[: len(layout)].tolist() == layout, where
                assert (own[len(layout) :] == -1).all(), where
                members = [members for _, members in expected]
                assert clusters.sinks[row, head] == sinks, where
                assert clusters.number[row, head] == len(expected), where
                assert clusters.clustered[row, head] == sinks + sum(map(len, members)), where
                sizes = clusters.sizes[row, head]
                assert sizes[: len(members)].tolist() == [len(x) for x in members], where
                assert (sizes[len(members) :] == 0).all(), where
                for c in np.flatnonzero(sizes):
                    begin = clusters.starts[row, head, c]
                    assert own[begin : begin + sizes[c]].tolist() == members[c], where
                centroids = clusters.centroids[row, head, : len(members)][sizes[: len(members)] > 0]
                mine = [centroid for centroid, members in expected if members]
                close(centroids, np.reshape(mine, (-1, DIM)), "rounding", where)


def padding(rows, steps, stops, seed=0):
    """A tenth of all steps is empty for a row, and from some step on the row `stops[row]` is."""
    rng = np.random.default_rng(seed)
    empty = {tuple(at) for at in np.argwhere(rng.random((steps, rows)) < 0.1).tolist()}
    return empty | {(s, r) for r, at in stops.items() for s in range(at, steps)}


# --- the index and the lists ----------------------------------------------------------------------

LENGTHS = (90, 41, 3, 6)  # SINKS = 5: the third has fewer tokens, the fourth one more


@pytest.mark.parametrize(
    "changes", [{}, {"per_query_head": True, "budget": 0.3}], ids=["kv heads", "query heads"]
)
@pytest.mark.slow
def test_400_steps(changes):
    both = Both(clusterkv(**changes), LENGTHS, seed=1)
    done = both.decode(STEPS)
    assert (np.diff(done.clustered[:, 0, 0]) == INTERVAL).sum() == (STEPS - 1) // INTERVAL
    row = both.rows[0]
    assert all(len(cluster.members) != 0 for cluster in row.indices[0].clusters[-2:])
    lists = {tuple(listed(x)) for x in done.seen[:, 0, 0]}
    assert len(lists) > STEPS * 0.9, "selections vary"


BY_BUDGET = {"tokens_per_cluster": None, "new_clusters": None}
CASES = {
    "l2": {"metric": "l2"},
    "inner product": {"metric": "inner_product", "per_query_head": True},
    "share": {"budget": 0.3},
    "share of everything": {"budget": 1.0, "interval": 9},
    "more clusters than keys": {"clusters": 40},
    "one cluster": {"clusters": 1},
    "smallest budget": {"budget": SINKS + 1, "per_query_head": True},
    "no sinks": {"sinks": 0, "budget": 1},
    "an interval of one": {"interval": 1},
    "fewer tokens than new clusters": {"interval": 2, "new_clusters": 4},
    "one round": {"iterations": 1, "tokens_per_cluster": 3},
    "another seed": {"seed": 7},
    "the mean of a group": {"group_reduce": "mean"},
    "clusters that follow the budget": {**BY_BUDGET, "budget": 120},
    "the largest budget": {**BY_BUDGET, "budget": 2**31 - 1},
    "the largest clusters": {"tokens_per_cluster": 2**31 - 1},
    "chunks": {"chunk": 16, "sinks": 3},
    "chunks of a rest of one token": {"chunk": 7, "tokens_per_cluster": 2},
    "chunks of sinks": {"chunk": 4, "sinks": 9, "new_clusters": None},
    "all at once": {"chunk": None},
    "nothing new is clustered": {"interval": 10_000},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast_cases("nothing new is clustered", "chunks")
def test_options(name):
    both = Both(clusterkv(**CASES[name]), (50, 5, 6, 0), seed=3, steps=SHORT)
    both.decode(SHORT)


def test_clusters_follow_the_budget_and_the_length_of_each_row():
    """120 slots: 1,280 / 120 tokens a cluster would be 11, more than a twelfth of the budget."""
    tx = ClusterKV(120, interval=32, dense_layers=())
    first, then = same_tokens(13, (1280, 1080, 100), 32)
    cache = new_cache(Watched(tx), 3, **{**SIZES, "max_prompt": 1280})
    _, cache = read_prompt(Watched(tx), cache, *first)
    assert found(cache, Clusters).per_cluster.tolist() == [10, 9, 8]
    of_chunks = [102 + 26, 114 + 6, 13]
    assert found(cache, Clusters).number[:, 0].tolist() == of_chunks
    cache, _ = decode_loop(Watched(tx), cache, then)
    new = found(cache, Clusters).number[:, 0] - np.array(of_chunks)
    assert new.tolist() == [3, 4, 4]


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.slow
def test_rows_without_a_token_in_some_steps(per_query_head):
    both = Both(clusterkv(per_query_head=per_query_head), LENGTHS, seed=4, steps=SHORT)
    both.decode(SHORT, padding(4, SHORT, stops={1: 20, 3: 0}))


@pytest.mark.slow
def test_tokens_join_the_last_cluster_where_there_is_no_room_for_others():
    """A row may get its tokens in more steps than `max_new`, few of them in each interval."""
    both = Both(clusterkv(interval=8, new_clusters=2, clusters=3), (90, 50), seed=4, steps=24)
    few = {(step, 0) for step in range(80) if step % 8 > 1}
    both.decode(80, few | {(step, 1) for step in range(24, 80)})
    assert both.clusters.number.tolist() == [[9, 9]] * 2
    assert len(both.rows[0].indices[0].clusters[-1].members) > 10


@pytest.mark.slow
def test_a_step_without_any_token():
    both = Both(clusterkv(), (30, 4), seed=5, steps=SHORT)
    both.decode(SHORT, padding(2, SHORT, stops={}) | {(s, r) for s in range(7, 30) for r in (0, 1)})


TURNS = {
    "int": {},
    "share": {"budget": 0.4},
    "turns longer than a chunk": {"chunk": 8},
    "all at once": {"chunk": None},
    "a number of clusters outright": {"clusters": 4},
    "room for few clusters": {"tokens_per_cluster": 40},
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.fast_cases("int")
def test_further_turns(name):
    """Clusters stay, and what is in none yet is clustered beside them; else everything is anew."""
    both = Both(clusterkv(**TURNS[name]), (40, 20, 0, 5), seed=6, steps=SHORT)
    both.decode(19, padding(4, 19, stops={1: 3}))
    before = both.clusters
    both.turn((12, 0, 9, 1))
    now, first = both.clusters, before.number[0, 0]
    stayed = (now.starts[0, 0, :first] == before.starts[0, 0, :first]).all()
    assert stayed == (name in ("int", "share", "all at once", "room for few clusters"))
    np.testing.assert_array_equal(now.number[1], before.number[1])
    both.decode(20)
    both.turn((3, 5, 2, 8))
    both.decode(17)


@pytest.mark.slow
def test_many_short_turns_are_clustered_anew_when_there_is_no_room_for_more_clusters():
    both = Both(clusterkv(interval=SHORT + 1), (30, 12), seed=6, steps=SHORT)
    numbers = []
    for _ in range(21):
        both.turn((3, 2))
        numbers.append(both.clusters.number[:, 0])
    more = np.diff(np.array(numbers), axis=0)
    assert (more == 1).any() and (more < 0).any(), "it grows, and is made anew"
    both.decode(5)


@pytest.mark.slow
def test_a_turn_after_which_a_method_before_evicts_clusters_everything_anew():
    before = kvjax.SnapKV(24, window=4, kernel=3)
    both = Both(clusterkv(14, tokens_per_cluster=2), (70, 30), before, seed=8, steps=SHORT)
    both.next += (20, 10)
    tokens = both._prompt_tokens(right([70, 30], (20, 10), 20))
    _, both.cache = read_prompt(both.watched, both.cache, *tokens)
    with clear_choices:
        for number, (row, length) in enumerate(zip(both.rows, (90, 40), strict=True)):
            row.indices = []
            row.load([slots_of(both.cache, number, head) for head in range(KV_HEADS)], length)
    both.check_index(both.cache.kv.position, both.clusters)


@pytest.mark.slow
def test_bfloat16():
    both = Both(clusterkv(), (50, 3), seed=7, steps=SHORT, dtype=jnp.bfloat16)
    both.decode(SHORT)


# --- over a cache that holds less than the prompt -------------------------------------------------

BEFORE = {
    "evicted": kvjax.SnapKV(20, window=4, kernel=3),
    "evicted, a share": kvjax.SnapKV(0.5, window=4, kernel=3),
    "merged": kvjax.KVMerger(20),
    "merged in clusters of one": kvjax.KVMerger(12, recent=0.5),
}


@pytest.mark.parametrize(
    ("name", "interval"), [*((name, INTERVAL) for name in BEFORE), ("evicted", SHORT + 1)]
)
@pytest.mark.slow
def test_after_another_method(name, interval):
    before = BEFORE[name]
    transform = clusterkv(14, interval=interval, tokens_per_cluster=2)
    both = Both(transform, (70, 30, 3, 6), before, seed=8, steps=SHORT)
    if name.startswith("merged"):
        assert (np.asarray(both.cache.kv.log_mass)[0] > 0.5).any(), "nothing was merged"
    both.decode(SHORT, padding(4, SHORT, stops={1: 30}))


@pytest.mark.slow
def test_the_budget_of_a_row_is_a_share_of_its_prompt_and_not_of_what_is_left():
    before = kvjax.SnapKV(30, window=4, kernel=3)
    both = Both(clusterkv(0.25), (80, 60), before, seed=9, steps=SHORT)
    assert both.clusters.budget.tolist() == [20, 15]
    both.decode(4)


# --- against the full cache -----------------------------------------------------------------------


def same_tokens(seed, lengths, steps):
    rng, rows = np.random.default_rng(seed), len(lengths)
    q = rng.normal(size=(rows, KV_HEADS * GROUP, max(lengths), DIM))
    k, v = keys_and_values(rng, rows, KV_HEADS, max(lengths))
    first = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    q = rng.normal(size=(steps, rows, KV_HEADS * GROUP, 1, DIM))
    k, v = keys_and_values(rng, steps, rows, KV_HEADS, 1)
    now = np.array(lengths)[None, :, None] + np.arange(steps)[:, None, None]
    first.append(jnp.asarray(right([0] * rows, lengths, max(lengths)), jnp.int32))
    then = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    return first, (*then, jnp.asarray(now, jnp.int32))


SIZES = {
    "kv_heads": KV_HEADS, "query_heads": KV_HEADS * GROUP, "head_dim": DIM,
    "max_prompt": MAX_PROMPT, "max_new": SHORT,
}  # fmt: skip


@functools.cache
def full_outputs():
    first, then = same_tokens(10, (60, 5, 6), SHORT)
    cache, outs = new_cache(kvjax.Full(), 3, **SIZES), []
    _, cache = read_prompt(kvjax.Full(), cache, *first)
    for x in zip(*then, strict=True):
        out, cache = attend(kvjax.Full(), cache, *x, phase="decode")
        outs.append(np.asarray(out))
    return np.stack(outs)


@pytest.mark.parametrize(
    ("interval", "per_query_head"), [(INTERVAL, False), (7, True), (SHORT, False)]
)
@pytest.mark.slow
def test_a_budget_that_covers_everything_equals_full(interval, per_query_head):
    tx = clusterkv(60 + SHORT, interval=interval, per_query_head=per_query_head)
    first, then = same_tokens(10, (60, 5, 6), SHORT)
    _, cache = read_prompt(Watched(tx), new_cache(Watched(tx), 3, **SIZES), *first)
    _, done = decode_loop(Watched(tx), cache, then)
    close(done.out, full_outputs(), "reference")
    tokens = np.array([60, 5, 6])[None, :, None] + np.arange(1, SHORT + 1)[:, None, None]
    np.testing.assert_array_equal(
        (done.seen >= 0).sum(-1), np.broadcast_to(tokens, done.seen.shape[:-1])
    )


def test_a_smaller_budget_does_not():
    first, then = same_tokens(10, (60, 5, 6), SHORT)
    watched = Watched(clusterkv(12))
    _, cache = read_prompt(watched, new_cache(watched, 3, **SIZES), *first)
    _, done = decode_loop(watched, cache, then)
    assert np.abs(done.out - full_outputs())[:, 0].max() > 0.1


@pytest.mark.slow
def test_chunks_equal_the_whole():
    tx, (first, then) = clusterkv(), same_tokens(11, (60, 5, 33), SHORT)
    _, whole = read_prompt(tx, new_cache(tx, 3, **SIZES), *first)
    chunked = new_cache(tx, 3, **SIZES)
    for at in range(0, 60, 20):
        chunk = [x[..., at : at + 20, :] for x in first[:3]] + [first[3][:, at : at + 20]]
        _, chunked = attend(tx, chunked, *chunk, phase="prompt", last=at == 40)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
    np.testing.assert_array_equal(whole.kv.position, chunked.kv.position)
    for name in ("sizes", "starts", "number", "sinks", "clustered", "budget"):
        np.testing.assert_array_equal(*(getattr(x.state[0], name) for x in (whole, chunked)))
    step = [x[0] for x in then]
    close(
        attend(tx, chunked, *step, phase="decode")[0], attend(tx, whole, *step, phase="decode")[0]
    )


def test_layers_draw_for_themselves():
    """Layers are equal values; their draws are in their caches."""
    tx = kvjax.ClusterKV(24, dense_layers=(1,), seed=5)
    first, dense, third = kvjax.bind(tx, 3)
    assert dense == kvjax.Full() and first == third
    for layer in (0, 2):
        assert new_cache(first, layer=layer).state[1] == layer_key(5, layer)
    assert kvjax.bind(kvjax.ClusterKV(24), 3)[:2] == (kvjax.Full(), kvjax.Full())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"budget": SINKS}, ValueError, r"at least 6 \(sinks \+ 1.*got 5"),
        ({"budget": 0.0}, ValueError, r"\(0, 1\], got 0.0"),
        ({"budget": 1.5}, ValueError, "got 1.5"),
        ({"budget": "24"}, TypeError, "got '24'"),
        ({"budget": True}, TypeError, "got True"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"group_reduce": "sum"}, ValueError, "'max', 'mean'.*got 'sum'"),
        ({"tokens_per_cluster": 0}, ValueError, "tokens_per_cluster must be at least 1, got 0"),
        ({"tokens_per_cluster": 80.0}, TypeError, "got 80.0"),
        ({"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"new_clusters": 0}, ValueError, "new_clusters must be at least 1, got 0"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
        ({"clusters": 4.0}, TypeError, "got 4.0"),
        ({"metric": "dot"}, ValueError, "'l2'.*got 'dot'"),
        ({"per_query_head": 1}, TypeError, "per_query_head must be True or False, got 1"),
        ({"dense_layers": [0]}, TypeError, r"got \[0\]"),
        ({"dense_layers": (-1,)}, ValueError, "got -1"),
        ({"seed": -1}, ValueError, "got -1"),
        ({"seed": 2**32}, ValueError, "below"),
    ],
)
def test_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        clusterkv(**changes)


@pytest.mark.parametrize("before", [kvjax.H2O(32), kvjax.StreamingLLM(32)])
def test_not_after_a_method_that_frees_while_decoding(before):
    with pytest.raises(ValueError, match=r"index would go stale"):
        chain(before, clusterkv())


def test_refused_chains_and_wrappers():
    with pytest.raises(ValueError, match="one part of a chain indexes"):
        chain(clusterkv(), clusterkv())
    with pytest.raises(ValueError, match="evict or merge → represent → recall → place"):
        chain(clusterkv(), kvjax.SnapKV(64))
    for wrap in (lambda x: kvjax.Every(x, 4), lambda x: kvjax.WhenFull(x, 4), kvjax.CaM):
        with pytest.raises(ValueError, match="got ClusterKV"):
            wrap(clusterkv())


def test_one_token_a_step():
    tx = clusterkv()
    first, then = same_tokens(12, (9, 5, 6), 2)
    _, cache = read_prompt(tx, new_cache(tx, 3, **SIZES), *first)
    two = [jnp.concatenate((x[0], x[1]), axis=2) for x in then[:3]]
    positions = jnp.concatenate((then[3][0], then[3][1]), axis=1)
    with pytest.raises(ValueError, match="one token a step, got 2"):
        kvjax.attend(tx, cache, *two, positions, phase="decode")


def test_layers_must_be_bound():
    with pytest.raises(ValueError, match="bind"):
        new_cache(kvjax.ClusterKV(64))
