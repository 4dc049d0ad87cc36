"""Offloaded equals not offloaded, and no step moves a store."""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import ClusterKV, Offload, chain
from kvjax.attention.layer import about_to_read
from kvjax.cache.payload import Dense, Seen, Slots
from kvjax.generation import reading, writing
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from kvjax.storage.offload import HOST_MEMORY, Offloaded, memory_kinds, recall_statistics
from tests.support import attending
from tests.support.attending import attend, new_cache, right, structure
from tests.support.decode_loops import Watched, decode_loop, read_prompt
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


OFFLOADED = chain(clusterkv(), Offload(recent_steps=2))  # one method, so that it is compiled once


# --- the same as without --------------------------------------------------------------------------

# Whole intervals: a loop of another length would be compiled too.
CASES = {
    "one step": {},
    "two steps": {"recent": 2},
    "query heads": {"recent": 3, "per_query_head": True, "steps": 64},
    "bfloat16": {"dtype": "bfloat16", "recent": 2, "steps": 64},
    "a share": {"budget": 0.25, "steps": 64},
    "a row that ends": {"stops": ((0, 21), (2, 40))},
    "a list of few": {"budget": 7, "per_query_head": True, "steps": 64},
    "a list of one": {"budget": 1, "sinks": 0, "steps": 48},
    "everything": {"budget": MAX_PROMPT + STEPS, "steps": 64},
    "nothing goes to the host": {"interval": 64, "steps": 60},
    "every step": {"interval": 1, "new_clusters": 1, "steps": 40},
    "after SnapKV": {"before": (kvjax.SnapKV(60, window=4, kernel=3),), "steps": 64},
    "after KVMerger": {"before": (kvjax.KVMerger(60),), "steps": 64},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast_cases("nothing goes to the host")
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


@pytest.mark.parametrize("name", ["one step", "two steps", "query heads", "bfloat16"])
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


def test_more_recent_steps_find_more():
    one, two = (both_ways(**CASES[name])[1][1].resident for name in ("one step", "two steps"))
    np.testing.assert_array_equal(one[0], two[0])
    assert (two[1][-1] >= one[1][-1]).all() and two[1][-1, 0] > one[1][-1, 0]
    assert (two[2][-1] <= one[2][-1]).all()


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


@pytest.mark.slow
def test_chunks_and_structure():
    transform = OFFLOADED
    first, then = tokens(steps=60)
    start = new_cache(transform, 3, **sizes(60))
    _, whole = attend(transform, start, *first, phase="prompt")
    chunked = start
    for at in range(0, 160, 40):
        chunk = [x[:, :, at : at + 40] for x in first[:3]] + [first[3][:, at : at + 40]]
        before = structure(chunked)
        _, chunked = attend(transform, chunked, *chunk, phase="prompt", last=at == 120)
        assert at in (0, 120) or structure(chunked) == before
    start = dataclasses.replace(start, logits=whole.logits)  # a prompt says how logits are made
    assert structure(start) == structure(whole) == structure(chunked)
    close(whole.kv.k.store, chunked.kv.k.store, "exact")
    outs = []
    for cache in (whole, chunked):
        for step in range(INTERVAL + 2):
            out, cache = attend(transform, cache, *(x[step] for x in then), phase="decode")
            if step == INTERVAL - 1:
                cache = flush(cache)
        assert structure(cache) == structure(start)
        outs.append(out)
    close(*outs, "exact")


@pytest.mark.slow
def test_eager_equals_jit():
    transform = chain(clusterkv(), Offload())
    first, then = tokens(steps=60)
    cache = new_cache(transform, 3, **sizes(60))
    _, cache = attend(transform, cache, *first, phase="prompt")
    other = cache
    for step in range(2):
        given = [x[step] for x in then]
        out, cache = kvjax.attend(transform, cache, *given, phase="decode")
        expected, other = attend(transform, other, *given, phase="decode")
        close(out, expected)
    assert cache.kv.k.store.sharding.memory_kind == HOST_MEMORY


# --- in generate ----------------------------------------------------------------------------------

CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512,
)  # fmt: skip


@functools.cache
def model():
    decoder = random_decoder(CONFIG, seed=3)
    graph, state = nnx.split(decoder)
    return nnx.merge(graph, jax.tree.map(lambda x: x * 2.0 if x.ndim > 1 else x, state))


@pytest.mark.parametrize("recent", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)])
def test_generate_token_for_token(recent):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(64, size=size).tolist() for size in (120, 3, 77)]
    tx = clusterkv(24, interval=8)
    plain, offloaded, full = (
        kvjax.generate(model(), prompts, transform=each, max_new_tokens=48, end_tokens=(7,))
        for each in (tx, chain(tx, Offload(recent_steps=recent)), None)
    )
    assert offloaded.tokens == plain.tokens and offloaded.ended == plain.ended
    assert len(set(plain.tokens[0])) > 3
    assert full.tokens != plain.tokens, "a budget that changes nothing shows nothing"
    loop = writing._decode
    compiled = reading._read_layer._cache_size(), loop._cache_size()
    again = kvjax.generate(
        model(), prompts, transform=chain(tx, Offload(recent_steps=recent)), max_new_tokens=48,
        end_tokens=(7,),
    )  # fmt: skip
    assert again.tokens == plain.tokens
    assert compiled == (reading._read_layer._cache_size(), loop._cache_size())


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
    transform = OFFLOADED
    cache, prompt = new_cache(transform, 3, **sizes(60)), tokens(steps=60)[0]

    def read(cache, *prompt):
        return kvjax.attend(transform, about_to_read(cache), *prompt, phase="prompt")[1]

    traced = jax.make_jaxpr(read)(cache, *prompt)
    assert not uses_of_stores(traced.jaxpr, cache.kv.k.store.size)
    _, expected = attend(transform, cache, *prompt, phase="prompt")
    found = jax.jit(read)(cache, *prompt)
    assert structure(found) == structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.sharding.memory_kind == theirs.sharding.memory_kind
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_a_copied_store_would_be_seen():
    cache = new_cache(chain(clusterkv(), Offload()), 3, **sizes())

    def copied(cache, again):
        return jax.lax.cond(again, lambda: cache.kv.k.read(), lambda: jnp.zeros(cache.kv.k.shape))

    traced = jax.make_jaxpr(copied)(cache, jnp.array(True))
    assert "device_put" in {name for name, _ in uses_of_stores(traced.jaxpr, cache.kv.k.store.size)}


@pytest.mark.parametrize(
    "case", [{}, {"recent": 2, "per_query_head": True}, {"dtype": "bfloat16"}], ids=str
)
@pytest.mark.slow
def test_bytes_by_memory(case):
    case = dict(case)
    recent, dtype = case.pop("recent", 1), jnp.dtype(case.pop("dtype", "float32"))
    batch, max_prompt, max_new = 2, 1024, 40
    transform = chain(clusterkv(**case), Offload(recent_steps=recent))
    cache = new_cache(transform, batch, **sizes(max_new, max_prompt=max_prompt), dtype=dtype)
    rng = np.random.default_rng(0)

    def some(heads, width):
        return rng.normal(size=(batch, heads, width, DIM)).astype(dtype)

    shapes = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    positions = np.tile(np.arange(64, dtype=np.int32), (batch, 1))
    priced = kvjax.memory_bytes(cache)
    _, cache = attend(transform, cache, *(some(h, 64) for h in shapes), positions, phase="prompt")
    for step in range(2):
        now = np.full((batch, 1), 64 + step, np.int32)
        _, cache = attend(transform, cache, *(some(h, 1) for h in shapes), now, phase="decode")
    slots, lists = max_prompt + max_new, KV_HEADS * (GROUP if case.get("per_query_head") else 1)
    store = batch * KV_HEADS * slots * DIM * dtype.itemsize
    store += batch * KV_HEADS * INTERVAL * DIM * dtype.itemsize  # where no block belongs
    chunks = round(1024 / 12) + round((slots - 1024) / 12)
    clusters = chunks + 2 * (max_new // INTERVAL)
    rows = batch * lists * recent * BUDGET
    expected = {
        "resident": rows * (2 * DIM * dtype.itemsize + 4) + 3 * 4 * batch * lists + 4,
        "recent": 2 * batch * KV_HEADS * (INTERVAL * (DIM * dtype.itemsize + 4) + 4),
        # Of each row its length and its budget, and for all of them the key of the draws.
        "clusters": batch * KV_HEADS * (clusters * (4 * DIM + 8) + 8) + 8 * batch + 8,
        "slots": batch * KV_HEADS * (slots * (4 + 4 + 1) + 8) + 4 * batch,
        "sinks": 4 * KV_HEADS * GROUP,
    }
    held = kvjax.memory_bytes(cache)
    assert held == priced
    assert held == {HOST_MEMORY: 2 * store, "device": sum(expected.values())}
    assert kvjax.nbytes(cache) == sum(held.values())
    both = expected["resident"] + expected["recent"]
    assert both < (0.3 if recent > 1 else 0.08) * 2 * store, "keys and values on the device"


def test_everything_but_the_stores_is_on_the_device():
    _, (cache, _) = both_ways()
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        kind = leaf.sharding.memory_kind
        assert (kind == HOST_MEMORY) == (".store" in jax.tree_util.keystr(path)), path


@pytest.mark.parametrize("offload", [False, True], ids=["alone", "offloaded"])
@pytest.mark.parametrize("changes", [{}, {"per_query_head": True}], ids=["kv heads", "query heads"])
@pytest.mark.fast_cases("kv heads-alone")
def test_the_loop_holds_no_copy_of_a_store(offload, changes):
    dim, heads, slots = 64, 2, 4096
    tx = clusterkv(128, tokens_per_cluster=80, **changes)
    transform = chain(tx, Offload()) if offload else tx
    cache = new_cache(transform, 1, **sizes(64, max_prompt=slots - 64, head_dim=dim))
    step = [
        jax.ShapeDtypeStruct((1, h, 1, dim), jnp.float32) for h in (heads * GROUP, heads, heads)
    ]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, q, k, v):
        def step(i, carry):
            cache, out = carry
            positions = jnp.full((1, 1), 4000, jnp.int32) + i
            new, cache = kvjax.attend(transform, cache, q + out, k, v, positions, phase="decode")
            return cache, out + new

        return jax.lax.fori_loop(0, 40, step, (cache, jnp.zeros_like(q)))

    memory = loop.lower(cache, *step).compile().memory_analysis()
    store = heads * slots * dim * 4
    assert memory.temp_size_in_bytes < 0.25 * store, memory.temp_size_in_bytes / store
    assert memory.alias_size_in_bytes >= 2 * store, "the stores are changed in place"


def test_stores_are_donated():
    transform = OFFLOADED
    first, then = tokens(steps=60)
    _, cache = attend(transform, new_cache(transform, 3, **sizes(60)), *first, phase="prompt")
    step = jax.jit(
        lambda cache, *x: kvjax.attend(transform, cache, *x, phase="decode"),
        donate_argnums=0,
    )  # fmt: skip
    old = cache.kv.k.store, cache.kv.v.store
    _, cache = step(cache, *(x[0] for x in then))
    assert all(x.is_deleted() for x in old)
    assert cache.kv.k.store.sharding.memory_kind == HOST_MEMORY


def test_nothing_is_compiled_twice():
    first, then = tokens(steps=60)

    def turn(transform, rolled):
        cache = new_cache(transform, 3, **sizes(60))
        _, cache = attend(transform, cache, *(np.roll(x, rolled, 0) for x in first), phase="prompt")
        lengths = np.roll(np.array(LENGTHS, np.int32), rolled)[:, None]
        for step in range(INTERVAL + 2):
            given = [x[step] for x in then[:3]]
            _, cache = attend(transform, cache, *given, lengths + step, phase="decode")
            if step == INTERVAL - 1:
                cache = flush(cache)
        return cache

    turn(chain(clusterkv(), Offload(recent_steps=2)), 0)
    before = attend._cache_size(), flush._cache_size()
    turn(chain(clusterkv(), Offload(recent_steps=2)), 1)
    assert (attend._cache_size(), flush._cache_size()) == before


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recent_steps": 0}, ValueError, "recent_steps must be at least 1, got 0"),
        ({"recent_steps": 1.0}, TypeError, "got 1.0"),
        ({"recent_steps": True}, TypeError, "got True"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"interval": "16"}, TypeError, "got '16'"),
    ],
)
def test_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        Offload(**changes)


@pytest.mark.parametrize(
    "before", [(), (kvjax.SnapKV(64),), (kvjax.H2O(64),), (Offload(),)], ids=str
)
def test_it_needs_a_method_that_indexes(before):
    if before:
        with pytest.raises(ValueError, match="behind a method that indexes all slots"):
            chain(*before, Offload())
        return
    for alone in (Offload(), chain(Offload()), chain(kvjax.Full(), Offload())):
        with pytest.raises(ValueError, match="behind a method that indexes all slots"):
            new_cache(alone, 1)
    with pytest.raises(ValueError, match="behind a method that indexes all slots"):
        kvjax.generate(model(), [[1, 2]], transform=Offload(), max_new_tokens=2)


def test_refused_chains():
    with pytest.raises(ValueError, match="stands once"):
        chain(clusterkv(), Offload(), Offload())
    with pytest.raises(ValueError, match="evict or merge → represent → recall → place"):
        chain(Offload(), clusterkv())
    with pytest.raises(ValueError, match="index would go stale"):
        chain(kvjax.H2O(64), clusterkv(), Offload())
    for wrap in (lambda x: kvjax.Every(x, 4), lambda x: kvjax.WhenFull(x, 4), kvjax.KVCrush):
        with pytest.raises(ValueError, match="got Chain"):
            wrap(chain(clusterkv(), Offload()))


def test_the_interval_is_the_methods():
    with pytest.raises(ValueError, match="every 16 steps, got interval=8"):
        new_cache(chain(clusterkv(), Offload(interval=8)), 1)
    cache = new_cache(chain(clusterkv(), Offload(interval=INTERVAL)), 1, max_new=64)
    assert cache.kv.interval == cache.kv.k.recent.size == INTERVAL


def test_a_platform_without_host_memory(monkeypatch):
    monkeypatch.setattr(sys.modules["kvjax.storage.offload"], "memory_kinds", lambda: ("device",))
    transform = chain(clusterkv(), Offload())
    with pytest.raises(ValueError, match=r"pinned_host memory, which the platform .* has device"):
        new_cache(transform, 1)
    with pytest.raises(ValueError, match="pinned_host"):
        kvjax.generate(model(), [[1, 2]], transform=transform, max_new_tokens=2)


def test_one_token_a_step():
    transform = chain(clusterkv(), Offload())
    _, then = tokens(steps=60)
    cache = new_cache(transform, 3, **sizes(60))
    two = [np.concatenate((x[0], x[1]), axis=2) for x in then[:3]]
    positions = np.concatenate((then[3][0], then[3][1]), axis=1)
    with pytest.raises(ValueError, match="one token a step, got 2"):
        kvjax.attend(transform, cache, *two, positions, phase="decode")


def test_a_dense_layer_stays_on_the_device():
    transform = chain(kvjax.ClusterKV(64), Offload())
    layers = kvjax.bind(transform, 3)
    assert layers[:2] == (kvjax.Full(), kvjax.Full()) and layers[2].parts[1] == Offload()
    with pytest.raises(ValueError, match="bind"):
        new_cache(transform, 1)


# --- the payload by itself ------------------------------------------------------------------------


read = jax.jit(lambda payload, *index: payload.read(*index))
write = jax.jit(lambda payload, slots, rows: payload.write(slots, rows))


def random_rows(rng, count: int) -> np.ndarray:
    return rng.normal(size=(2, 2, count, 4)).astype(np.float32)


def test_payload():
    """What is read is what was written, wherever it lies; a flush moves whole rows of the batch."""
    rng = np.random.default_rng(0)
    data = random_rows(rng, 24)
    empty = Offloaded.zeros(data.shape, 5, jnp.float32)
    positions = np.broadcast_to(np.where(np.arange(24) < 9, np.arange(24), -1), (2, 2, 24))
    slots = Slots(positions, positions >= 0, np.array([True, True]))
    payload, values = jax.jit(lambda p, *x: p.encode(p, *x))(empty, data, -data, slots)
    assert payload.shape == data.shape and payload.dtype == jnp.float32
    assert payload.room.tolist() == [5, 5]
    close(read(payload), data, "exact")
    close(read(values), -data, "exact")
    index = rng.integers(24, size=(2, 4, 30))
    expected = np.stack([[data[b, k // 2][index[b, k]] for k in range(4)] for b in range(2)])
    close(read(payload, index), expected, "exact")
    for slot in range(9, 13):  # the second row gets every other one
        new, at = random_rows(rng, 1), np.array([slot, 9 + slot // 2 - 4 if slot % 2 else 24])
        data[0, :, slot] = new[0, :, 0]
        if slot % 2:
            data[1, :, at[1]] = new[1, :, 0]
        at = np.broadcast_to(at[:, None, None], (2, 2, 1))
        payload = write(payload, at, new)
    assert payload.room.tolist() == [1, 3]
    close(read(payload), data, "exact")
    source = np.broadcast_to([[[11, 9, 12, 10]], [[9, 10, 24, 24]]], (2, 2, 4))
    target = np.broadcast_to([[[9, 10, 11, 12]], [[9, 10, 24, 24]]], (2, 2, 4))
    moved = jax.jit(lambda p, *moves: p.flush(0, moves))(payload, source, target)
    data[0, :, 9:13] = data[0][:, [11, 9, 12, 10]]
    close(read(moved), data, "exact")
    flushed = jax.jit(lambda p: p.flush(3))(moved)  # for which the second row has room
    assert flushed.room.tolist() == [5, 3]
    close(np.asarray(read(flushed))[:, :, :13], data[:, :, :13], "exact")
    np.testing.assert_array_equal(np.asarray(flushed.store)[0, :, :13], data[0, :, :13])
    assert flushed.store.sharding.memory_kind == HOST_MEMORY
    everything = random_rows(rng, 24)
    close(read(write(flushed, None, everything)), everything, "exact")


def test_attention_to_all_rows_is_that_of_dense_ones():
    rng = np.random.default_rng(1)
    k, v = random_rows(rng, 24), random_rows(rng, 24)
    q = rng.normal(size=(2, 2, 1, 1, 4)).astype(np.float32)
    empty = Offloaded.zeros(k.shape, 5, jnp.float32)
    position = np.broadcast_to(np.arange(24, dtype=np.int32), (2, 2, 24))
    mass, used = np.zeros(position.shape, np.float32), np.full((2, 2), 24, np.int32)

    @jax.jit
    def attention(keys, values):
        return keys.attention(
            values, q, Seen(mass, position, used, None), np.full((2, 1), 24, np.int32),
            probabilities=True, implementation="xla", scale=0.5,
        )  # fmt: skip

    found = attention(*(write(empty, None, x) for x in (k, v)))
    expected = attention(Dense(jnp.asarray(k)), Dense(jnp.asarray(v)))
    for own, other in zip(found, expected, strict=True):
        close(own, other, "exact")


@functools.cache
def more_than_there_is_room_for(transform) -> attending.Run:
    """Three steps beyond `max_new`."""
    row = attending.Tokens.random(rows=1)
    return attending.run(transform, row, right([0], [5], 5), attending.MAX_NEW + 3)


@pytest.mark.parametrize("offload", [(), (kvjax.Offload(),)], ids=["alone", "offloaded"])
@pytest.mark.parametrize("interval", [4, 100])
@pytest.mark.slow
def test_what_comes_after_the_last_step(interval, offload):
    """A short prompt leaves slots free. What is clustered makes room; what is not is counted."""
    own = kvjax.ClusterKV(32, tokens_per_cluster=4, sinks=2, interval=interval, dense_layers=())
    steps, full = (more_than_there_is_room_for(tx) for tx in (chain(own, *offload), kvjax.Full()))
    seen = attending.MAX_NEW + 3 * (interval == 4)
    for out, expected in zip(steps.outs[:seen], full.outs, strict=False):
        close(out, expected)
    dropped = [int(cache.kv.dropped.max()) for cache in steps.caches]
    assert dropped == [0] * attending.MAX_NEW + ([0, 0, 0] if interval == 4 else [1, 2, 3])
