"""Offloaded equals not offloaded, and no step moves a store."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import ClusterKV, Offload, chain
from kvjax.attention.prompt import begin
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from kvjax.storage.offload.transform import recall_statistics
from tests.support import attending
from tests.support.attending import attend, new_cache, right, structure
from tests.support.decode_loops import Watched, decode_loop, read_prompt
from tests.support.marks import some_slow
from tests.support.tolerances import close

pytestmark = pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")

KV_HEADS, GROUP, DIM = 2, 2, 8
SINKS, INTERVAL, BUDGET = 4, 16, 40
MAX_PROMPT, STEPS = 160, 400
LENGTHS = (160, 71, 3)


flush = jax.jit(kvjax.flush)


def clusterkv(budget=BUDGET, **changes) -> ClusterKV:
    options = {
        "tokens_per_cluster": 12, "sinks": SINKS, "interval": INTERVAL, "new_clusters": 2,
        "dense_layers": (),
    }  # fmt: skip
    return ClusterKV(budget, **{**options, **changes})


def sizes(steps=STEPS, **changes) -> dict:
    given = {
        "kv_heads": KV_HEADS, "query_heads": KV_HEADS * GROUP, "head_dim": DIM,
        "max_prompt": MAX_PROMPT, "max_new": steps,
    }  # fmt: skip
    return {**given, **changes}


@functools.cache
def tokens(lengths=LENGTHS, steps=STEPS, dtype="float32", seed=0, stops=()):
    """A prompt, and steps whose queries stay with a subject for a while; stops = (row, step)."""
    rng, rows = np.random.default_rng(seed), len(lengths)
    subjects = 3 * rng.normal(size=(8, DIM))

    def keys(*shape):
        return subjects[rng.integers(8, size=shape)] + rng.normal(size=(*shape, DIM))

    width, heads = max(lengths), KV_HEADS * GROUP
    first = (
        rng.normal(size=(rows, heads, width, DIM)),
        keys(rows, KV_HEADS, width),
        rng.normal(size=(rows, KV_HEADS, width, DIM)),
    )
    subject = np.repeat(rng.integers(8, size=(-(-steps // 10), rows)), 10, axis=0)[:steps]
    then = (
        subjects[subject][:, :, None, None] + rng.normal(size=(steps, rows, heads, 1, DIM)),
        keys(steps, rows, KV_HEADS, 1),
        rng.normal(size=(steps, rows, KV_HEADS, 1, DIM)),
    )
    first, then = ([x.astype(jnp.dtype(dtype)) for x in y] for y in (first, then))
    now = np.array(lengths)[None, :, None] + np.arange(steps)[:, None, None]
    for row, step in stops:
        now[step:, row] = -1
    positions = right([0] * rows, lengths, width)
    return (*first, positions.astype(np.int32)), (*then, now.astype(np.int32))


@functools.cache
def both_ways(recent=1, dtype="float32", steps=STEPS, stops=(), before=(), **changes):
    """Caches and steps without and with Offload."""
    first, then = tokens(steps=steps, dtype=dtype, stops=stops)
    out = []
    for tail in ((), (Offload(recent_steps=recent),)):
        transform = chain(*before, Watched(clusterkv(**changes)), *tail)
        cache = new_cache(transform, len(LENGTHS), **sizes(steps), dtype=jnp.dtype(dtype))
        _, cache = read_prompt(transform, cache, *first)
        out.append(decode_loop(transform, cache, then))
    return out


OFFLOADED = chain(clusterkv(), Offload(recent_steps=2))
# --- the same as without --------------------------------------------------------------------------

# Whole intervals: a loop of another length would be compiled too.
CASES = {
    "one step": {"steps": 96},
    "two steps": {"recent": 2, "steps": 96},
    "query heads": {"recent": 3, "per_query_head": True, "steps": 64},
    "bfloat16": {"dtype": "bfloat16", "recent": 2, "steps": 64},
    "a row that ends": {"stops": ((0, 21), (2, 40)), "steps": 96},
    "a list of one": {"budget": 1, "sinks": 0, "steps": 48},
    "everything": {"budget": MAX_PROMPT + STEPS, "steps": 64},
    "nothing goes to the host": {"interval": 64, "steps": 60},
    "every step": {"interval": 1, "new_clusters": 1, "steps": 40},
    "after SnapKV": {"before": (kvjax.SnapKV(60, window=4, kernel=3),), "steps": 64},
}


@pytest.mark.parametrize("name", some_slow(CASES, "nothing goes to the host"))
def test_offloaded_equals_not_offloaded(name):
    (plain, expected), (cache, done) = both_ways(**CASES[name])
    np.testing.assert_array_equal(done.index, expected.index)
    np.testing.assert_array_equal(done.seen, expected.seen)
    close(done.out, expected.out, "exact")
    for name in ("sizes", "starts"):
        close(getattr(done.clusters, name), getattr(expected.clusters, name), "exact")
    there = done.clusters.sizes > 0
    close(done.clusters.centroids[there], expected.clusters.centroids[there], "exact")
    assert (done.dropped == 0).all()
    for mine, theirs in ((cache.kv.k, plain.kv.k), (cache.kv.v, plain.kv.v)):
        live = np.asarray(plain.kv.live)
        close(np.asarray(mine.read())[live], np.asarray(theirs.read())[live], "exact")


def recount(done, recent: int, length: int, fixed: int):
    """Entries of the host, those that the last steps had, and those that crossed: sums per row."""
    steps, rows, lists, _ = done.index.shape
    counts = np.zeros((3, steps, rows), int)
    for row, own in np.ndindex(rows, lists):
        history: list[set[int]] = []
        for step in range(steps):
            entries = done.index[step, row, own, :length]
            stored = (entries >= 0) & (entries < done.clustered[step, row, own * KV_HEADS // lists])
            near = set().union(*history[-recent:])
            hit = stored & np.isin(entries, list(near))
            counts[0, step, row] += stored[fixed:].sum()
            counts[1, step, row] += hit[fixed:].sum()
            counts[2, step, row] += (stored & ~hit).sum()
            history.append(set(entries[stored].tolist()))
    return np.cumsum(counts, axis=1)


@pytest.mark.parametrize("name", ["one step", "query heads"])
@pytest.mark.slow
def test_hits_and_misses(name):
    case = CASES[name]
    _, (cache, done) = both_ways(**case)
    selected, hits, fetched = recount(done, case.get("recent", 1), BUDGET, SINKS)
    for mine, expected in zip(done.resident, (selected, hits, fetched), strict=True):
        np.testing.assert_array_equal(mine, expected)
    steps = len(hits)
    assert (0.2 * selected[-1, 0] < hits[-1, 0]) and (hits[-1, 0] < 0.95 * selected[-1, 0])
    assert 0 < fetched[-1, 0] < 0.8 * selected[-1, 0]
    given = recall_statistics([cache, {"another layer": cache}])
    assert given.steps == steps
    assert given.hit_rate == pytest.approx(hits[-1].sum() / selected[-1].sum())
    row_bytes = 2 * DIM * jnp.dtype(case.get("dtype", "float32")).itemsize
    assert given.fetched_bytes_per_step == 2 * fetched[-1].sum() * row_bytes / steps


def test_no_statistics_without_offloaded_steps():
    plain = new_cache(clusterkv(), 1, **sizes())
    offloaded = new_cache(chain(clusterkv(), Offload()), 1, **sizes())
    assert recall_statistics(plain) is None and recall_statistics((offloaded, None)) is None


@pytest.mark.slow
def test_a_further_turn_forgets_what_was_resident():
    """The slots of a list are others then: what is found by number would be another token."""
    first, then = tokens(steps=60)
    outs = []
    for tail in ((), (Offload(recent_steps=2),)):
        transform = chain(Watched(clusterkv()), *tail)
        cache = new_cache(transform, len(LENGTHS), **sizes(60, max_prompt=MAX_PROMPT + 9))
        _, cache = read_prompt(transform, cache, *first)
        cache, one = decode_loop(transform, cache, [x[:24] for x in then])
        counts, starts = (9, 0, 4), np.array(LENGTHS) + 24
        q, k, v = (x[:, :, :9] + 1 for x in first[:3])
        positions = right(starts, counts, 9).astype(np.int32)
        out, cache = read_prompt(transform, cache, q, k, v, positions)
        now = then[3][24:56] + np.array(counts, np.int32)[None, :, None]
        rest = *(x[24:56] for x in then[:3]), now
        cache, two = decode_loop(transform, cache, rest, since=24)
        outs.append([one.out, np.asarray(out), two.out, two.index])
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
    cache = new_cache(transform, 3, **sizes())
    step = [x[0] for x in tokens()[1]]
    traced = jax.make_jaxpr(lambda c, *x: kvjax.attend(transform, c, *x, phase="decode"))(
        cache, *step
    )
    size = cache.kv.k.store.size
    used = uses_of_stores(traced.jaxpr, size)
    names = {name for name, _ in used}
    assert names <= ALLOWED | CONTROL, names
    assert "dynamic_slice" in names, "the stores were not found"
    for name, out in used:
        if name == "dynamic_slice":
            assert max(out) <= 16 * DIM, "a piece is at most 16 rows"
    assert not any(
        getattr(x.aval, "memory_space", None) == jax.memory.Space.Host
        for x in traced.jaxpr.outvars
        if x.aval.size >= size and x.aval.shape != cache.kv.k.store.shape
    )


@pytest.mark.slow
def test_a_flush_writes_a_block_per_row_and_head():
    cache = new_cache(OFFLOADED, 3, **sizes(60))
    _, cache = attend(OFFLOADED, cache, *tokens(steps=60)[0], phase="prompt")
    traced = jax.make_jaxpr(kvjax.flush)(cache)
    size = cache.kv.k.store.size
    used = [each for each in uses_of_stores(traced.jaxpr, size) if each[0] not in CONTROL]
    assert used.count(("dynamic_update_slice", [size])) == 2
    assert all(max(out) <= 16 * DIM for name, out in used if name != "dynamic_update_slice")


@pytest.mark.slow
def test_an_empty_store_stays_where_it_is():
    """`generate` begins with empty caches; the caches that come out are the same."""
    cache, prompt = new_cache(OFFLOADED, 3, **sizes(60)), tokens(steps=60)[0]

    def read(cache, *prompt):
        return kvjax.attend(OFFLOADED, begin(cache, empty=True), *prompt, phase="prompt")[1]

    traced = jax.make_jaxpr(read)(cache, *prompt)
    assert not uses_of_stores(traced.jaxpr, cache.kv.k.store.size)
    _, expected = attend(OFFLOADED, cache, *prompt, phase="prompt")
    found = jax.jit(read)(cache, *prompt)
    assert structure(found) == structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.sharding.memory_kind == theirs.sharding.memory_kind
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("case", [{}, {"recent": 2, "per_query_head": True}], ids=str)
def test_bytes_by_memory(case):
    case = dict(case)
    recent, number = case.pop("recent", 1), 4
    batch, max_prompt, max_new = 2, 1024, 40
    transform = chain(clusterkv(**case), Offload(recent_steps=recent))
    cache = new_cache(transform, batch, **sizes(max_new, max_prompt=max_prompt))
    slots, lists = max_prompt + max_new, KV_HEADS * (GROUP if case.get("per_query_head") else 1)
    store = batch * KV_HEADS * slots * DIM * number
    store += batch * KV_HEADS * INTERVAL * DIM * number  # where no block belongs
    chunks = round(1024 / 12) + round((slots - 1024) / 12)
    clusters = chunks + 2 * (max_new // INTERVAL)
    rows = batch * lists * recent * BUDGET
    expected = {
        "resident": rows * (2 * DIM * number + 4) + 3 * 4 * batch * lists + 4,
        "recent": 2 * batch * KV_HEADS * (INTERVAL * (DIM * number + 4) + 4),
        # Of each row its length and its budget, and for all of them the key of the draws.
        "clusters": batch * KV_HEADS * (clusters * (4 * DIM + 8) + 8) + 8 * batch + 8,
        "slots": batch * KV_HEADS * (slots * (4 + 4 + 1) + 8) + 4 * batch,
        "sinks": 4 * KV_HEADS * GROUP,
    }
    held = kvjax.evaluation.memory_bytes(cache)
    assert held == {HOST_MEMORY: 2 * store, "device": sum(expected.values())}
    assert kvjax.nbytes(cache) == sum(held.values())
    both = expected["resident"] + expected["recent"]
    assert both < (0.3 if recent > 1 else 0.08) * 2 * store, "keys and values on the device"


# --- what is refused ------------------------------------------------------------------------------


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
    ("recent_steps must be at least 1, got 0", lambda: Offload(recent_steps=0)),
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
    transform = chain(clusterkv(), Offload())
    _, then = tokens(steps=60)
    cache = new_cache(transform, 3, **sizes(60))
    two = [np.concatenate((x[0], x[1]), axis=2) for x in then[:3]]
    positions = np.concatenate((then[3][0], then[3][1]), axis=1)
    with pytest.raises(ValueError, match="one token a step, got 2"):
        kvjax.attend(transform, cache, *two, positions, phase="decode")


@pytest.mark.parametrize("offload", [(), (kvjax.Offload(),)], ids=["alone", "offloaded"])
@pytest.mark.parametrize("interval", [4, 100])
@pytest.mark.slow
def test_what_comes_after_the_last_step(interval, offload):
    """A short prompt leaves slots free. What is clustered makes room; what is not is counted."""
    own = kvjax.ClusterKV(32, tokens_per_cluster=4, sinks=2, interval=interval, dense_layers=())
    row, beyond = attending.Tokens.random(rows=1), attending.MAX_NEW + 3
    steps, full = (
        attending.run(tx, row, right([0], [5], 5), beyond)
        for tx in (chain(own, *offload), kvjax.Full())
    )
    seen = attending.MAX_NEW + 3 * (interval == 4)
    for out, expected in zip(steps.outs[:seen], full.outs, strict=False):
        close(out, expected)
    dropped = [int(cache.kv.dropped.max()) for cache in steps.caches]
    assert dropped == [0] * attending.MAX_NEW + ([0, 0, 0] if interval == 4 else [1, 2, 3])
