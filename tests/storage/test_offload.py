"""Offloaded equals not offloaded, and no step moves a store."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax import ClusterKV, Offload, chain
from kvjax.attention.prompt import begin
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from kvjax.storage.offload.transform import Resident, recall_statistics
from kvjax.transforms.clusterkv.clusters import Clusters
from tests.support.attending import (
    HEAD_DIM,
    KV_HEADS,
    MAX_NEW,
    Tokens,
    attend,
    decode,
    decoded,
    flush,
    flushed,
    new_cache,
    prompt,
    right,
    run,
    same_arrays,
)
from tests.support.marks import some_slow
from tests.support.tolerances import close
from tests.support.watched import Seen, Watched, found, unseen

pytestmark = pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")

SINKS, INTERVAL, BUDGET = 4, 16, 40
MAX_PROMPT, STEPS = 160, 96
LENGTHS = (160, 71, 3)


def clusterkv(budget=BUDGET, **changes) -> ClusterKV:
    options = {
        "tokens_per_cluster": 12, "sinks": SINKS, "interval": INTERVAL, "new_clusters": 2,
        "dense_layers": (),
    }  # fmt: skip
    return ClusterKV(budget, **{**options, **changes})


OFFLOADED = chain(clusterkv(), Offload(recent_steps=2))
SIZES = {"max_prompt": MAX_PROMPT, "max_new": STEPS}
PROMPT = right([0] * 3, LENGTHS, MAX_PROMPT)
read_all = jax.jit(lambda payload: payload.read())


@functools.cache
def tokens() -> Tokens:
    """Keys of a few subjects, and queries that stay with one of them for ten tokens."""
    rng, length = np.random.default_rng(0), MAX_PROMPT + STEPS
    subjects = 3 * rng.normal(size=(8, HEAD_DIM))
    noise = Tokens.random(length=length)
    subject = np.repeat(rng.integers(8, size=(3, 1, length // 10 + 1)), 10, axis=2)[..., :length]
    k = subjects[rng.integers(8, size=noise.k.shape[:3])] + noise.k
    return Tokens((subjects[subject] + noise.q).astype(np.float32), k.astype(np.float32), noise.v)


# --- the same as without --------------------------------------------------------------------------

CASES = {
    "one step": {},
    "no step": {"recent": 0},
    "no step, query heads": {"recent": 0, "per_query_head": True},
    "two steps": {"recent": 2},
    "query heads": {"recent": 3, "per_query_head": True},
    "bfloat16": {"dtype": jnp.bfloat16, "recent": 2},
    "a list of one": {"budget": 1, "sinks": 0},
    "everything": {"budget": MAX_PROMPT + STEPS},
    "nothing goes to the host": {"interval": 96},
    "every step": {"interval": 1, "new_clusters": 1},
    "after SnapKV": {"before": (kvjax.SnapKV(60, window=4, kernel=3),)},
}


FORMS = {
    "8 bits": (kvjax.Quantize(8), {}),
    "float8": (kvjax.Quantize("float8"), {}),
    "4 bits": (kvjax.Quantize(4, group=4, key_axis="token"), {}),
    "keys of 8 bits, query heads": (
        kvjax.Quantize(4, group=4, key_bits=8, rotate="values"), {"per_query_head": True}
    ),
    "2 bits, nothing resident": (kvjax.Quantize(2, group=4, key_axis="token"), {"recent": 0}),
}  # fmt: skip


# Forms and cases whose parts are in others run before a release.
LONG = {"8 bits", "everything", "every step", "bfloat16"}


@pytest.mark.parametrize("name", some_slow(FORMS, "keys of 8 bits, query heads", exhaustive=LONG))
def test_encoded_rows_cross_and_are_those_without_offload(name):
    """Rows are stored the same bit for bit, also after a further turn."""
    form, case = FORMS[name]
    recent = case.get("recent", 1)
    tx = clusterkv(per_query_head=case.get("per_query_head", False))
    lengths, more, results = np.array(LENGTHS) + 24, np.array((9, 0, 4)), []
    turn = right(lengths, more, 9)
    for tail in ((), (Offload(recent_steps=recent),)):
        transform = chain(form, tx, *tail)
        sizes = {"max_prompt": MAX_PROMPT + 9, "max_new": STEPS}
        first = run(transform, tokens(), PROMPT, 24, **sizes)
        out, cache = prompt(transform, first.caches[-1], tokens(), turn)
        then, caches = decoded(transform, flush(cache, None), tokens(), lengths + more, 20)
        results.append(([*first.outs, np.asarray(out), *then], (first.caches[-1], caches[-1])))
    (plain, plain_caches), (offloaded, caches) = results
    for out, expected in zip(offloaded, plain, strict=True):
        close(out, expected)
    for mine, theirs in zip(caches, plain_caches, strict=True):
        same(mine, theirs)
    k, v = caches[-1].kv.k, caches[-1].kv.v
    assert k.store.dtype == v.store.dtype == jnp.uint8
    width = k.store.shape[3] + v.store.shape[3]
    assert found(caches[-1], Resident).row_bytes == width < 2 * HEAD_DIM * 4


def same(one, other) -> None:
    """Compares the clusters, and the keys and values of live slots."""
    mine, theirs = found(one, Clusters), found(other, Clusters)
    there = np.asarray(theirs.sizes) > 0
    for a, b in ((mine.sizes, theirs.sizes), (mine.starts, theirs.starts)):
        close(a, b, "exact")
    close(np.asarray(mine.centroids)[there], np.asarray(theirs.centroids)[there], "exact")
    live = np.asarray(other.kv.live)
    for a, b in ((one.kv.k, other.kv.k), (one.kv.v, other.kv.v)):
        close(np.asarray(read_all(a))[live], np.asarray(read_all(b))[live], "exact")


@pytest.mark.parametrize("name", some_slow(CASES, "nothing goes to the host", exhaustive=LONG))
def test_offloaded_equals_not_offloaded(name):
    case = dict(CASES[name])
    recent, dtype = case.pop("recent", 1), case.pop("dtype", jnp.float32)
    before, tx = case.pop("before", ()), clusterkv(**case)
    steps = 20 if name == "nothing goes to the host" else 48
    plain, offloaded = (
        run(chain(*before, tx, *tail), tokens(), PROMPT, steps, **SIZES, dtype=dtype)
        for tail in ((), (Offload(recent_steps=recent),))
    )
    for out, expected in zip(offloaded.outs, plain.outs, strict=True):
        close(out, expected, "exact")
    same(offloaded.caches[-1], plain.caches[-1])
    assert not offloaded.caches[-1].kv.dropped.any()


@pytest.mark.parametrize(("recent", "per_query_head"), [(0, False), (1, False), (3, True)])
@pytest.mark.slow
def test_hits_and_misses(recent, per_query_head):
    """Entries of the host, those that the last steps had, and those that crossed: sums per row."""
    watched = Watched(clusterkv(per_query_head=per_query_head))
    transform = chain(watched, Offload(recent_steps=recent))
    cache = new_cache(transform, **SIZES)
    _, cache = prompt(transform, cache, tokens(), PROMPT)
    counts, history, steps = np.zeros((3, 3), int), [], 64
    for step in range(steps):
        clustered = np.asarray(found(cache, Clusters).clustered)
        _, cache = decode(transform, cache, tokens(), np.array(LENGTHS) + step)
        index = np.asarray(found(cache, Seen).index)[..., :BUDGET]
        lists, listed = index.shape[1], {}
        for row, own in np.ndindex(3, lists):
            entries = index[row, own]
            stored = (entries >= 0) & (entries < clustered[row, own * KV_HEADS // lists])
            last = history[-recent:] if recent else []
            near = set().union(*(each[row, own] for each in last))
            hit = stored & np.isin(entries, list(near))
            crossed = (stored & ~hit).sum()
            counts[:, row] += [stored[SINKS:].sum(), hit[SINKS:].sum(), crossed]
            listed[row, own] = set(entries[stored].tolist())
        history.append(listed)
        cache = flushed(unseen(cache), step + 1)
        resident = found(cache, Resident)
        sums = [x.sum(1) for x in (resident.selected, resident.found, resident.fetched)]
        np.testing.assert_array_equal(sums, counts)
    selected, hits, fetched = counts
    if recent:
        assert 0.2 * selected[0] < hits[0] < 0.95 * selected[0]
        assert 0 < fetched[0] < 0.8 * selected[0]
    else:
        assert hits.sum() == 0 and (fetched > selected).all(), "sinks cross in every step"
    given = recall_statistics([cache, {"another layer": cache}])
    assert given.steps == steps
    assert given.hit_rate == pytest.approx(hits.sum() / selected.sum())
    assert given.fetched_bytes_per_step == 2 * fetched.sum() * 2 * HEAD_DIM * 4 / steps


def test_no_statistics_without_offloaded_steps():
    plain, offloaded = (new_cache(tx, 1, **SIZES) for tx in (clusterkv(), OFFLOADED))
    assert recall_statistics(plain) is None and recall_statistics((offloaded, None)) is None


@pytest.mark.slow
def test_a_further_turn_forgets_what_was_resident():
    """The slots of a list are others then: what is found by number would be another token."""
    outs, lengths = [], np.array(LENGTHS) + 24
    for transform in (clusterkv(), OFFLOADED):
        first = run(transform, tokens(), PROMPT, 24, max_prompt=MAX_PROMPT + 9, max_new=STEPS)
        turn = right(lengths, (9, 0, 4), 9)
        out, cache = prompt(transform, first.caches[-1], tokens(), turn)
        then, _ = decoded(
            transform, flush(cache, None), tokens(), lengths + np.array((9, 0, 4)), 32
        )
        outs.append([*first.outs, np.asarray(out), *then])
    for mine, expected in zip(*outs, strict=True):
        close(mine, expected, "exact")


# --- what moves, and what is held -----------------------------------------------------------------

ALLOWED = {"dynamic_slice", "dynamic_update_slice"}
CONTROL = {"while", "cond", "scan", "pjit", "jit", "closed_call", "core_call", "custom_vmap_call"}


def inner_jaxprs(equation):
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def uses_of_stores(jaxpr, size: int) -> list:
    """(primitive, shapes of what comes out) wherever a host array of `size` numbers goes in."""
    used = []
    for equation in jaxpr.eqns:
        avals = [x.aval for x in equation.invars if hasattr(x, "aval")]
        if any(
            getattr(a, "memory_space", None) == jax.memory.Space.Host and a.size >= size
            for a in avals
        ):
            used.append((equation.primitive.name, [x.aval.size for x in equation.outvars]))
        for inner in inner_jaxprs(equation):
            used += uses_of_stores(inner, size)
    return used


@pytest.mark.parametrize("changes", [{}, {"per_query_head": True, "budget": 7}])
def test_no_operation_of_a_step_moves_a_store(changes):
    transform = chain(clusterkv(**changes), Offload(recent_steps=2))
    cache = new_cache(transform, **SIZES)
    step = tokens().at(np.array(LENGTHS)[:, None])
    traced = jax.make_jaxpr(lambda c, *x: kvjax.attend(c, *x, phase="decode"))(cache, *step)
    size = cache.kv.k.store.size
    used = uses_of_stores(traced.jaxpr, size)
    names = {name for name, _ in used}
    assert names <= ALLOWED | CONTROL, names
    assert "dynamic_slice" in names, "the stores were not found"
    for name, out in used:
        if name == "dynamic_slice":
            assert max(out) <= 16 * HEAD_DIM, "a piece is at most 16 rows"
    assert not any(
        getattr(x.aval, "memory_space", None) == jax.memory.Space.Host
        for x in traced.jaxpr.outvars
        if x.aval.size >= size and x.aval.shape != cache.kv.k.store.shape
    )


@pytest.mark.slow
def test_a_flush_writes_a_block_per_row_and_head():
    cache = new_cache(OFFLOADED, **SIZES)
    _, cache = attend(cache, *tokens().at(PROMPT), phase="prompt")
    traced = jax.make_jaxpr(kvjax.flush)(cache)
    size = cache.kv.k.store.size
    used = [each for each in uses_of_stores(traced.jaxpr, size) if each[0] not in CONTROL]
    assert used.count(("dynamic_update_slice", [size])) == 2
    assert all(max(out) <= 16 * HEAD_DIM for name, out in used if name != "dynamic_update_slice")


@pytest.mark.slow
def test_an_empty_store_stays_where_it_is():
    """`generate` begins with empty caches; the caches that come out are the same."""
    cache, given = new_cache(OFFLOADED, **SIZES), tokens().at(PROMPT)

    def read(cache, *prompt):
        return kvjax.attend(begin(cache, empty=True), *prompt, phase="prompt")[1]

    traced = jax.make_jaxpr(read)(cache, *given)
    assert not uses_of_stores(traced.jaxpr, cache.kv.k.store.size)
    same_arrays(jax.jit(read)(cache, *given), attend(cache, *given, phase="prompt")[1])


@pytest.mark.slow
@pytest.mark.parametrize(("recent", "per_query_head"), [(0, False), (1, False), (2, True)])
def test_bytes_by_memory(recent, per_query_head):
    """Little of the keys and values is on the device: what a list has, and new tokens."""
    transform = chain(clusterkv(per_query_head=per_query_head), Offload(recent_steps=recent))
    cache = new_cache(transform, 2, max_prompt=1024, max_new=40)
    held = kvjax.evaluation.memory_bytes(cache)
    # And a place that no block belongs to.
    assert held[HOST_MEMORY] == 2 * (2 * KV_HEADS * (1064 + INTERVAL) * HEAD_DIM * 4)
    assert kvjax.nbytes(cache) == sum(held.values())
    near = kvjax.nbytes((found(cache, Resident), cache.kv.k.recent, cache.kv.v.recent))
    assert 0 < near < (0.03, 0.08, 0.3)[recent] * held[HOST_MEMORY]


# --- what is refused ------------------------------------------------------------------------------


class OtherForm(kvjax.kit.KVTransform):
    """Stores rows in a form of its own."""

    stage = kvjax.kit.Stage.REPRESENT


NEEDED = "behind a method that indexes all slots"
REFUSED = [
    (NEEDED, lambda: chain(kvjax.SnapKV(64), Offload())),
    (NEEDED, lambda: chain(Offload(), Offload())),
    *(
        (NEEDED, lambda tx=tx: new_cache(tx, 1))
        for tx in (Offload(), chain(kvjax.Full(), Offload()))
    ),
    ("stands once", lambda: chain(clusterkv(), Offload(), Offload())),
    ("evict or merge → represent → recall → place", lambda: chain(Offload(), clusterkv())),
    ("index would go stale", lambda: chain(kvjax.H2O(64), clusterkv(), Offload())),
    ("got Chain", lambda: kvjax.Every(chain(clusterkv(), Offload()), 4)),
    (
        "every 16 steps, got interval=8",
        lambda: new_cache(chain(clusterkv(), Offload(interval=8)), 1),
    ),
    ("or as Quantize encodes them", lambda: chain(OtherForm(), clusterkv(), Offload())),
    ("recent_steps must be at least 0, got -1", lambda: Offload(recent_steps=-1)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_platform_without_host_memory(monkeypatch):
    monkeypatch.setattr(
        sys.modules["kvjax.storage.offload.transform"], "memory_kinds", lambda: ("device",)
    )
    transform = chain(clusterkv(), Offload())
    with pytest.raises(ValueError, match=r"pinned_host memory, which the platform .* has device"):
        new_cache(transform, 1)


def test_one_token_a_step():
    given = tokens().at(np.array(LENGTHS)[:, None] + np.arange(2))
    with pytest.raises(ValueError, match="one token a step, got 2"):
        kvjax.attend(new_cache(OFFLOADED, **SIZES), *given, phase="decode")


@pytest.mark.parametrize("offload", [(), (kvjax.Offload(),)], ids=["alone", "offloaded"])
@pytest.mark.parametrize("interval", [4, 100])
@pytest.mark.slow
def test_what_comes_after_the_last_step(interval, offload):
    """A short prompt leaves slots free. What is clustered makes room; what is not is counted."""
    own = kvjax.ClusterKV(32, tokens_per_cluster=4, sinks=2, interval=interval, dense_layers=())
    row, beyond = Tokens.random(rows=1), MAX_NEW + 3
    steps, full = (
        run(tx, row, right([0], [5], 5), beyond) for tx in (chain(own, *offload), kvjax.Full())
    )
    seen = MAX_NEW + 3 * (interval == 4)
    for out, expected in zip(steps.outs[:seen], full.outs, strict=False):
        close(out, expected)
    dropped = [int(cache.kv.dropped.max()) for cache in steps.caches]
    assert dropped == [0] * MAX_NEW + ([0, 0, 0] if interval == 4 else [1, 2, 3])
