"""ClusterKV against its reference: the index, the lists, the outputs of every step."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import ClusterKV, chain
from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.random import layer_key, uniform
from tests.references import clusterkv as reference
from tests.support.attending import Tokens, right, run
from tests.support.marks import some_slow
from tests.support.method_pair import RecallingPair
from tests.support.tolerances import close
from tests.support.watched import found

KV_HEADS, GROUP, DIM = 2, 3, 8
SINKS, INTERVAL, NEW_CLUSTERS = 5, 16, 3
MAX_PROMPT, STEPS = 96, 56
LAYER = 3
SMALL = {
    "tokens_per_cluster": 7, "sinks": SINKS, "interval": INTERVAL, "new_clusters": NEW_CLUSTERS,
    "dense_layers": (),
}  # fmt: skip
slow = pytest.mark.slow


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
    """A row of a batch, clustered every `interval` steps of the batch and not by its own tokens."""

    def __init__(self, tx: ClusterKV, most: int):
        fields = (
            "tokens_per_cluster", "sinks", "interval", "new_clusters", "iterations", "chunk",
            "clusters", "metric", "per_query_head", "group_reduce",
        )  # fmt: skip
        options = {name: getattr(tx, name) for name in fields}
        super().__init__(tx.budget, drawn(tx.seed), most_clusters=most, **options)

    def update(self):
        pass

    flush = reference.ClusterKV.make_room

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


def short_floats(x) -> np.ndarray:
    """What bfloat16 has of them, as float32."""
    return np.asarray(x, jnp.bfloat16).astype(np.float32)


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


class ClusterPair(RecallingPair):
    """Compares the index too, after a first prompt."""

    def __init__(self, lengths, *, before=None, steps=STEPS, seed=0, **changes):
        tx = clusterkv(**changes)
        capacity = (
            chain(before or kvjax.Full(), tx).extent(kvjax.kit.Extent(MAX_PROMPT, steps)).total
        )
        most = most_clusters(tx, capacity, steps)
        super().__init__(
            tx, lambda: Row(tx, most), before=before, rows=len(lengths), heads=(KV_HEADS, GROUP),
            max_prompt=MAX_PROMPT, max_new=steps, width=MAX_PROMPT, layer=LAYER, seed=seed,
        )  # fmt: skip
        assert self.clusters.sizes.shape[2] == most
        # Keys around a few directions, with lengths of their own.
        directions = self.rng.normal(size=(6, DIM)) * 2
        subjects = directions[self.rng.integers(6, size=self.k.shape[:-1])]
        self.k = short_floats(subjects + self.rng.normal(size=self.k.shape))
        self.v = short_floats(self.v)
        self.prompt(lengths)

    @property
    def clusters(self) -> Clusters:
        return jax.device_get(found(self.cache, Clusters))

    def _decode_token(self, positions):
        for row, position in enumerate(positions):
            if position >= 0:
                self.q[row, :, position] = self.of_rows[row].queries(self.rng)
        super()._decode_token(positions)

    def _check_slots(self, row, where):
        """The order of slots, sinks, sizes, starts and centroids are the reference's."""
        super()._check_slots(row, where)
        if self.of_rows[row].stale:  # the prompt goes on
            return
        clusters = self.clusters
        for head, index in enumerate(self.of_rows[row].indices):
            what = f"{where}, head {head}"
            members = [cluster.members for cluster in index.clusters]
            layout = [*index.sinks, *(p for each in members for p in each), *index.unclustered]
            position = self.host.position[row, head]
            assert position[: len(layout)].tolist() == layout, what
            assert (position[len(layout) :] == -1).all(), what
            assert clusters.sinks[row, head] == len(index.sinks), what
            assert clusters.number[row, head] == len(members), what
            counted = len(index.sinks) + sum(map(len, members))
            assert clusters.clustered[row, head] == counted, what
            sizes = clusters.sizes[row, head]
            assert sizes[: len(members)].tolist() == [len(each) for each in members], what
            assert (sizes[len(members) :] == 0).all(), what
            for c in np.flatnonzero(sizes):
                begin = clusters.starts[row, head, c]
                assert position[begin : begin + sizes[c]].tolist() == members[c], what
            centroids = clusters.centroids[row, head, np.flatnonzero(sizes)]
            expected = [cluster.centroid for cluster in index.clusters if cluster.members]
            close(centroids, np.reshape(expected, (-1, DIM)), "rounding", what)


def with_gaps(both: ClusterPair, steps: int, stops=None, nobody=range(0)) -> ClusterPair:
    """A tenth of all steps is empty for a row, and from some step on the row `stops[row]` is."""
    empty = np.random.default_rng(0).random((steps, both.rows)) < 0.1
    for step in range(steps):
        over = [row for row, at in (stops or {}).items() if step >= at]
        everyone = range(both.rows) if step in nobody else ()
        both.decode(1, (*np.flatnonzero(empty[step]), *over, *everyone))
    return both


# --- the index and the lists ----------------------------------------------------------------------

LENGTHS = (90, 41, 3, 6)  # SINKS = 5: the third has fewer tokens, the fourth one more


BY_BUDGET = {"tokens_per_cluster": None, "new_clusters": None}
CASES = {
    "l2": {"metric": "l2"},
    "inner product": {"metric": "inner_product", "per_query_head": True},
    "share": {"budget": 0.3},
    "smallest budget": {"budget": SINKS + 1, "per_query_head": True},
    "no sinks": {"sinks": 0, "budget": 1},
    "an interval of one": {"interval": 1},
    "fewer tokens than new clusters": {"interval": 2, "new_clusters": 4},
    "one round": {"iterations": 1, "tokens_per_cluster": 3},
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


# Options that decide little; they run before a release.
LITTLE = {
    "share", "no sinks", "an interval of one", "one round", "the mean of a group",
    "the largest budget", "the largest clusters", "nothing new is clustered",
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(CASES, "chunks", exhaustive=LITTLE))
def test_options(name):
    both = ClusterPair((50, 5, 6, 0), seed=3, **CASES[name])
    both.decode(STEPS)


@slow
def test_clusters_follow_the_budget_and_the_length_of_each_row():
    """120 slots: 1,280 / 120 tokens a cluster would be 11, more than a twelfth of the budget."""
    tx = ClusterKV(120, interval=32, dense_layers=())
    tokens, positions = Tokens.random(length=1312), right([0] * 3, (1280, 1080, 100), 1280)
    caches = run(tx, tokens, positions, 32, max_prompt=1280, max_new=32).all_caches
    first, last = (found(caches[at], Clusters) for at in (0, -1))
    assert first.per_cluster.tolist() == [10, 9, 8]
    of_chunks = [102 + 26, 114 + 6, 13]
    assert first.number[:, 0].tolist() == of_chunks
    assert (last.number[:, 0] - np.array(of_chunks)).tolist() == [3, 4, 4]


def test_the_default_size_of_clusters_has_three_bounds():
    lengths, budgets = np.array([1, 90, 1280, 2000, 8000, 32000]), np.array([17, 120, 400, 2048])
    for length, budget in itertools.product(lengths, budgets):
        size = ClusterKV(int(budget))._per_cluster(length, budget)
        assert size == reference.tokens_per_cluster(int(length), int(budget))


@slow
def test_tokens_join_the_last_cluster_where_there_is_no_room_for_others():
    """A row may get its tokens in more steps than `max_new`, few of them in each interval."""
    both = ClusterPair((90, 50), seed=4, steps=24, interval=8, new_clusters=2, clusters=3)
    for step in range(80):
        both.decode(1, [0] * (step % 8 > 1) + [1] * (step >= 24))
    assert both.clusters.number.tolist() == [[9, 9]] * 2
    assert len(both.of_rows[0].indices[0].clusters[-1].members) > 10


TURNS = {
    "int": {},
    "share": {"budget": 0.4},
    "all at once": {"chunk": None},
    "a number of clusters outright": {"clusters": 4},
    "room for few clusters": {"tokens_per_cluster": 40},
}


@pytest.mark.parametrize("name", some_slow(TURNS, "int"))
def test_further_turns(name):
    """Clusters stay, and what is in none yet is clustered beside them; else everything is anew."""
    both = with_gaps(ClusterPair((40, 20, 0, 5), seed=6, **TURNS[name]), 19, stops={1: 3})
    before = both.clusters
    both.prompt((12, 0, 9, 1))
    now, first = both.clusters, before.number[0, 0]
    stayed = (now.starts[0, 0, :first] == before.starts[0, 0, :first]).all()
    assert stayed == (name != "a number of clusters outright")
    np.testing.assert_array_equal(now.number[1], before.number[1])
    both.decode(20).prompt((3, 5, 2, 8)).decode(17)


@slow
def test_many_short_turns_are_clustered_anew_when_there_is_no_room_for_more_clusters():
    both, counts = ClusterPair((30, 12), seed=6, interval=STEPS + 1), []
    for _ in range(21):
        counts.append(both.prompt((3, 2)).clusters.number[:, 0])
    more = np.diff(np.array(counts), axis=0)
    assert (more == 1).any() and (more < 0).any(), "it grows, and is made anew"
    both.decode(5)


# --- over a cache that holds less than the prompt -------------------------------------------------

BEFORE = {
    "evicted": kvjax.SnapKV(20, window=4, kernel=3),
    "merged in clusters of one": kvjax.KVMerger(12, recent=0.5),
}


@pytest.mark.parametrize(
    ("name", "interval"), [*((name, INTERVAL) for name in BEFORE), ("evicted", STEPS + 1)]
)
@slow
def test_after_another_method(name, interval):
    """What evicts in a further turn makes everything be clustered anew."""
    given = {"budget": 14, "interval": interval, "tokens_per_cluster": 2}
    both = ClusterPair((70, 30, 3, 6), before=BEFORE[name], seed=8, **given)
    if name.startswith("merged"):
        assert (np.asarray(both.cache.kv.log_mass)[0] > 0.5).any(), "nothing was merged"
    with_gaps(both, STEPS - 10, stops={1: 30})
    if name == "evicted":
        both.prompt((20, 10, 0, 1)).decode(5)


@slow
def test_the_budget_of_a_row_is_a_share_of_its_prompt_and_not_of_what_is_left():
    before = kvjax.SnapKV(30, window=4, kernel=3)
    both = ClusterPair((80, 60), before=before, seed=9, budget=0.25)
    assert both.clusters.budget.tolist() == [20, 15]
    both.decode(4)


def test_the_first_two_layers_are_dense():
    assert kvjax.bind(ClusterKV(24), 3)[:2] == (kvjax.Full(), kvjax.Full())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": SINKS}, r"at least 6 \(sinks \+ 1.*got 5"),
        ({"metric": "dot"}, "'l2'.*got 'dot'"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"seed": 2**32}, "below"),
    ],
    ids=str,
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        clusterkv(**changes)
