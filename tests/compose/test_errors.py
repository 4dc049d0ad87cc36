"""Bad input raises ValueError or TypeError before anything is computed, and says what was wrong.

Every message must contain what was given and what was expected.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    H2O,
    Every,
    Full,
    HeadGroups,
    PerLayer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    bind,
    chain,
    parse,
)
from kvjax.protocol import Stage
from tests.support.attending import KV_HEADS, QUERY_HEADS, Tokens, new_cache, the_rope


@dataclasses.dataclass(frozen=True)
class Recall(kvjax.KVTransform):
    """A selection of nothing in particular, where a recall method stands in a chain."""

    pages: int = 2
    stage = Stage.RECALL


@dataclasses.dataclass(frozen=True)
class Merges(kvjax.KVTransform):
    """Merges slots at every moment; nothing says so but what it returns."""

    def on_prompt(self, cache, state, step):
        return kvjax.kit.Merge(jnp.zeros(cache.shape, jnp.int32)), state

    on_flush = on_step = on_prompt


@dataclasses.dataclass(frozen=True)
class LearnsNothing(kvjax.kit.Learner):
    """Says neither what it observes nor what it learns."""

    heads: kvjax.kit.OutlierHeads | str | None = None
    learns = ("heads", kvjax.kit.OutlierHeads)


SNAP = SnapKV(budget=16, window=4)
EVERY = Every(SNAP, steps=4)

# What is built, the exception, and what the message must contain: given and expected.
CONSTRUCTION = {
    "streaming budget": (lambda: StreamingLLM(budget=4), ValueError, "4", "at least 5", "sinks"),
    "even kernel": (lambda: SnapKV(budget=64, kernel=4), ValueError, "4", "odd"),
    "pyramid beta nan": (lambda: PyramidKV(64, beta=float("nan")), ValueError, "nan", "beta"),
    "share above one": (lambda: SnapKV(budget=1.5), ValueError, "1.5", "(0, 1]"),
    "share that is nan": (lambda: StreamingLLM(float("nan")), ValueError, "nan", "(0, 1]"),
    "replace re-checks": (
        lambda: dataclasses.replace(SNAP, budget=4), ValueError, "4", "at least 5",
    ),
    "every of a decoder": (lambda: Every(H2O(budget=8), steps=4), ValueError, "H2O", "prompt"),
    "every of a chain with recall": (
        lambda: Every(chain(SNAP, Recall()), steps=4), ValueError, "Recall",
    ),
    "every of head groups": (
        lambda: Every(HeadGroups((((0,), SNAP),)), steps=4), ValueError, "HeadGroups",
    ),
    "groups, missing head": (
        lambda: HeadGroups((((0, 2), Full()),)), ValueError, "(0, 2)", "exactly once",
    ),
    "groups, empty group": (
        lambda: HeadGroups((((0, 1), Full()), ((), SNAP))), ValueError, "()", "not empty",
    ),
    "groups without tuples of heads": (
        lambda: HeadGroups(((0, Full()),)), TypeError, "(KV head, ...), transform", "(0, Full())",
    ),
    "kvcrush, a share in words": (
        lambda: kvjax.KVCrush(SNAP, share="half"), TypeError, "share must be a number", "'half'",
    ),
    "kvcrush, a whole share": (
        lambda: kvjax.KVCrush(SNAP, share=1.0), ValueError, "share", "(0, 1)", "1.0",
    ),
    "kvcrush, clusters of pages": (
        lambda: kvjax.KVCrush(SNAP, representatives=64, kmeans=True, granularity="page"),
        ValueError, "clusters tokens", "'page'",
    ),
    "groups in groups": (
        lambda: HeadGroups((((0,), HeadGroups((((0,), Full()),))),)), ValueError, "nested",
    ),
    "groups that cannot be hashed": (
        lambda: HeadGroups([((0,), Full())]), TypeError, "tuple",
    ),
    "chain, class": (lambda: chain(SNAP, H2O), TypeError, "H2O", "instance"),
    "chain order": (
        lambda: chain(Recall(), SNAP), ValueError, "SnapKV", "evict", "Recall", "recall",
    ),
    "chain order, nested": (
        lambda: chain(chain(SNAP, Recall()), SNAP), ValueError, "SnapKV", "cannot follow",
    ),
    "stale index": (
        lambda: chain(H2O(budget=8), Recall()), ValueError, "Recall", "H2O", "decoding",
    ),
    "stale index, nothing annotated": (
        lambda: chain(Merges(), Recall()), ValueError, "Recall", "Merges", "decoding",
    ),
    "cam, nothing annotated": (lambda: kvjax.CaM(Merges()), ValueError, "Merges", "evicts tokens"),
    "codebook, nothing annotated": (
        lambda: chain(Merges(), kvjax.Codebook()), ValueError, "Merges", "merges slots",
    ),
    "bind, layers": (lambda: bind(SNAP, 0), ValueError, "0", "at least 1"),
    "per layer, not a transform": (
        lambda: bind(PerLayer(lambda i, n: None), 2), TypeError, "None", "PerLayer",
    ),
    "a list per layer": (
        lambda: PerLayer([SNAP, Full()]), TypeError, "[SnapKV(", "function of (layer, num_layers)",
    ),
    "two splits of heads": (
        lambda: bind(chain(*[HeadGroups((((0,), SNAP),))] * 2), 2), ValueError, "split heads once",
    ),
    "parse, unknown": (lambda: parse("h20", 64), ValueError, "'h20'", "h2o", "snapkv", "chain"),
    "parse, syntax": (lambda: parse("chain(h2o", 64), ValueError, "chain(h2o", "name"),
    "parse, attribute": (lambda: parse("os.system('ls')", 64), ValueError, "os.system", "name"),
    "parse, call as value": (
        lambda: parse("h2o(budget=open('x'))"), ValueError, "budget", "literal",
    ),
    "parse, method in method": (
        lambda: parse("h2o(snapkv)", 64), ValueError, "h2o", "1", "keywords",
    ),
    "parse, unknown parameter": (
        lambda: parse("snapkv(heads=4)", 64), ValueError, "'heads'", "window", "kernel",
    ),
    "parse, missing budget": (lambda: parse("h2o"), ValueError, "h2o", "budget"),
    "parse, base by name": (
        lambda: parse("every(snapkv, base=h2o, steps=4)", 64),
        ValueError, "base", "every(snapkv, base=h2o, steps=4)",
    ),
    "parse, two bases": (
        lambda: parse("every(snapkv, h2o, steps=4)", 64), ValueError, "2", "one method",
    ),
    "parse, unhashable value": (
        lambda: parse("h2o(budget={[]: 1})"), ValueError, "budget", "literal",
    ),
    "parse, chain keyword": (
        lambda: parse("chain(h2o, budget=4)", 64), ValueError, "budget", "methods only",
    ),
    "parse, unpacking": (lambda: parse("h2o(**{'budget': 4})"), ValueError, "h2o"),
    "parse, null": (lambda: parse("h2o\0", 4), ValueError, "name"),
    "parse, a value without a name": (
        lambda: parse("snapkv(64)"), ValueError, "snapkv(64)", "write budget=64",
    ),
    "parse, a comma": (
        lambda: parse("snapkv,h2o", 64), ValueError, "snapkv,h2o", "write chain(snapkv, h2o)",
    ),
    "parse, nearly a parameter": (
        lambda: parse("snapkv(windw=4)", 64), ValueError, "'windw'", "did you mean window?",
    ),
    "parse, nested": (
        lambda: parse("cam(" * 150 + "h2o" + ")" * 150, 64), ValueError, "more than 16 deep",
    ),
    "budget beyond int32": (lambda: H2O(budget=2**31), ValueError, "budget", "2147483647"),
    "budget too long to print": (lambda: SnapKV(10**5000), ValueError, "budget", "too long"),
    "chelsea passes": (lambda: kvjax.Chelsea(128, steps=10**9), ValueError, "steps", "1000"),
    "a number beyond float32": (
        lambda: kvjax.InfiniGen(64, alpha=1e39), ValueError, "alpha", "finite", "1e+39",
    ),
    "a window of everything": (lambda: SnapKV(0.5, window=10**6), ValueError, "window", "65536"),
    "a learner without a plan": (
        lambda: LearnsNothing().planned(None), NotImplementedError, "LearnsNothing", "will have",
    ),
    "a learner that observes nothing": (
        lambda: LearnsNothing().observe(*[None] * 4), NotImplementedError, "LearnsNothing",
        "what it observes",
    ),
    "a learner that learns nothing": (
        lambda: LearnsNothing().learn(None, []), NotImplementedError, "LearnsNothing",
        "what it learns",
    ),
    "a number of NumPy": (
        lambda: StreamingLLM(8, reposition=np.int64(3)), TypeError, "reposition", "got 3",
    ),
    "nested too deeply": (
        lambda: StreamingLLM(8, reposition=functools.reduce(lambda x, _: [x], range(10**5), [])),
        TypeError, "reposition", "a list nested too deeply to print",
    ),
    "a flag": (lambda: StreamingLLM(8, reposition=[]), TypeError, "reposition", "[]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_bad_numbers_and_compositions(name):
    build, error, *said = CONSTRUCTION[name]
    check(build, error, *said)


def check(call, error, *said):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    for words in said:
        assert words in str(caught.value), f"{words!r} is not in: {caught.value}"


# --- init_cache -----------------------------------------------------------------------------------


def shapes_of_init(transform=SNAP, **changes):
    """Whether `init_cache` is refused is known before any array exists."""
    size = {"batch": 1, "kv_heads": 2, "head_dim": 8, "max_prompt": 16, "max_new": 4} | changes
    return jax.eval_shape(lambda: kvjax.init_cache(transform, **size))


INIT = {
    "float rows": ({"batch": 1.0}, TypeError, "batch", "1.0", "int"),
    "heads that don't divide": ({"query_heads": 3}, ValueError, "3", "2", "multiple"),
    "integer dtype": ({"dtype": jnp.int32}, TypeError, "int32", "floating"),
    "class": ({"transform": H2O}, TypeError, "H2O", "instance"),
    "sums of values in float16": (
        {"transform": kvjax.KVMerger(8, value_scale="paper"), "dtype": jnp.float16},
        ValueError, "float16", "65,504", "value_scale='log_mass'",
    ),
    "unbound pyramid": ({"transform": PyramidKV(64)}, ValueError, "PyramidKV", "bind"),
    "unsplit groups in a chain": (
        {"transform": chain(HeadGroups((((0, 1), SNAP),)), H2O(8))},
        ValueError, "HeadGroups", "bind",
    ),
    "groups of other heads": (
        {"transform": HeadGroups((((0, 1, 2), SNAP),))}, ValueError, "3", "2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INIT)
def test_init_cache(name):
    changes, error, *said = INIT[name]
    check(lambda: shapes_of_init(**changes), error, *said)


# --- attend ---------------------------------------------------------------------------------------


@functools.cache
def arguments(tokens: int = 3):
    positions = np.tile(np.arange(tokens, dtype=np.int32), (2, 1))
    return Tokens.random(rows=2, length=8).at(positions)


def shapes_of_attend(transform=SNAP, cache=None, phase="prompt", tokens=3, **changes):
    """Traces a call that is right but for `changes`. Nothing can be computed while tracing."""
    named = dict(zip(("q", "k", "v", "positions"), arguments(tokens), strict=True))
    options = {"rope": the_rope()}
    for name, change in changes.items():
        into = named if name in named else options
        into[name] = change(named[name]) if callable(change) and name in named else change
    cache = cache() if cache else new_cache(transform, 2)
    return jax.eval_shape(
        lambda cache, arrays: kvjax.attend(cache, **arrays, phase=phase, **options),
        cache, named,
    )  # fmt: skip


def late():
    return StreamingLLM(budget=8, reposition=True)


GROUPS = HeadGroups((((0,), SNAP), ((1,), Full())))
ATTEND = {
    "a bare cache": ({"cache": lambda: new_cache(SNAP, 2).kv}, TypeError, "KVCache", "init_cache"),
    "one of two groups": (
        {"cache": lambda: new_cache(GROUPS, 2)[:1]}, ValueError, "one for each group", "[0]", "2",
    ),
    "two layers": (
        {"cache": lambda: (new_cache(SNAP, 2),) * 2}, ValueError, "the cache of one layer", "[]",
    ),
    "phase": ({"phase": "prefill"}, ValueError, "'prefill'", "'prompt'", "'decode'"),
    "three axes": ({"q": lambda q: q[0]}, ValueError, "q", "[B, heads, T, D]", "(4, 3, 8)"),
    "heads that don't divide": (
        {"q": lambda q: q[:, :3]}, ValueError, "3", "2", "multiple",
    ),
    "other query heads than the cache": (
        {"q": lambda q: q[:, :2]}, ValueError, "4 query heads", "(2, 2, 3, 8)",
    ),
    "whole numbers": (
        {"q": lambda q: q.astype(jnp.int32)}, TypeError, "q must be floating, got int32",
    ),
    "values of other tokens": (
        {"v": lambda v: v[:, :, :2]}, ValueError, "B, T and D of q", "v (2, 2, 2, 8)",
    ),
    "a predicted query of KV heads": (
        {"predicted_query": np.zeros((2, 2, 3, 8), np.float32)}, ValueError,
        "the shape of q, (2, 4, 3, 8)", "got (2, 2, 3, 8)",
    ),
    "positions between tokens": (
        {"positions": lambda p: p.astype(jnp.float32)}, TypeError, "integers, got float32",
    ),
    "no tokens": (
        {name: lambda x: x[:, :, :0] for name in "qkv"} | {"positions": lambda p: p[:, :0]},
        ValueError, "T = 0", "at least one",
    ),
    "positions of other tokens": (
        {"positions": lambda p: p[:, :2]}, ValueError, "(2, 3)", "(2, 2)",
    ),
    "several tokens under a decoder": (
        {"transform": H2O(budget=8), "phase": "decode"}, ValueError, "H2O", "one token", "3",
    ),
    "unrotated keys without rope": (
        {"transform": late(), "rope": None}, ValueError, "reposition=True", "rope",
    ),
    "window of nothing": ({"window": 0}, ValueError, "window", "0", "at least 1"),
    "soft cap of nothing": ({"soft_cap": 0.0}, ValueError, "soft_cap", "0.0"),
    "a frequency alone": ({"rope": kvjax.Rope(1.0)}, TypeError, "inv_freq", "array", "float"),
    "sinks of KV heads": (
        {"sinks": np.zeros(2, np.float32)}, ValueError, "sinks must be [Q] = (4,)", "got (2,)",
    ),
    "sinks in whole numbers": (
        {"sinks": np.zeros(4, np.int32)}, TypeError, "sinks must be floating, got int32",
    ),
    "rope by row and head": (
        {"rope": kvjax.Rope(np.ones((2, 2, 4), np.float32))}, ValueError, "[B, R]", "(2, 2, 4)",
    ),
    "a probe of ranks": (
        {"transform": late(), "phase": "probe"}, ValueError, "by rank", "no tokens can look",
    ),
    "rope of more channels": (
        {"rope": kvjax.Rope(np.ones(5, np.float32))}, ValueError, "10", "8",
    ),
    "implementation": ({"implementation": "cuda"}, ValueError, "'cuda'", "'xla'"),
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "-" * 100_000 + "1", "-" * 9_000 + "1", "1" + "+1" * 100_000, "1" + "+1" * 4_000,
        "h2o" + "()" * 100_000, "h2o" + "()" * 4_000, "h2o" + ".a" * 100_000, "h2o" + ".a" * 4_000,
        "h2o(" + ",".join(f"a{i}=1" for i in range(100_000)) + ")", "h2o(budget=1if 1else 2)",
        "h2o(budget='\\d')", "h2o(budget=" + "9" * 5_000 + ")", "(" * 5_000, "1()", "()()",
        "h2o(budget=" + "-" * 9_000 + "1)", "h2o(budget=" + "[" * 150 + "]" * 150 + ")",
    ],
    ids=lambda text: text[:12] + str(len(text)),
)  # fmt: skip
def test_a_monstrous_composition_is_refused_at_once(text):
    """Warnings are errors in tests, so that none is shown either."""
    start = time.perf_counter()
    with pytest.raises((ValueError, TypeError)) as caught:
        parse(text, 64)
    assert time.perf_counter() - start < 1
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


KNOWN = kvjax.registry.METHODS | kvjax.registry.WRAPPERS | kvjax.registry.STORAGE
WRONG = (
    "()", "[]", "{1}", "{'a': 1}", "None", "'x'", "b'x'", "...", "1j", "1e400", "9" * 30, "-1",
)  # fmt: skip
OF_TYPE = {  # what a type allows
    "None": "None", "tuple": "()", "float": "9" * 30, "| str": "'x'",
}  # fmt: skip
# Values of what has no default.
REQUIRED = {"budget": 128, "steps": 4, "room": 4, "window": 32, "representatives": 4}


@pytest.mark.parametrize("name", KNOWN)
def test_every_option_refuses_wrong_literals_in_one_line(name):
    kind = KNOWN[name]
    base = "snapkv, " if issubclass(kind, kvjax.protocol.Wrapper) else ""
    fields = [field for field in dataclasses.fields(kind) if field.name != "base"]
    for field in fields:
        others = [f"{x.name}={REQUIRED[x.name]}, " for x in fields if x.name in REQUIRED]
        others = "".join(x for x in others if not x.startswith(f"{field.name}="))
        right = {OF_TYPE[kind] for kind in OF_TYPE if kind in field.type}
        for value in set(WRONG) - right:
            with pytest.raises((ValueError, TypeError)) as caught:
                hash(parse(f"{name}({base}{others}{field.name}={value})"))
            assert "\n" not in str(caught.value) and "unhashable" not in str(caught.value)


@pytest.mark.parametrize("name", ATTEND)
def test_attend(name):
    changes, error, *said = ATTEND[name]
    check(lambda: shapes_of_attend(**changes), error, *said)


def test_a_prompt_does_not_go_on_behind_what_looks_at_it():
    def calls(q, k, v, positions):
        cache = new_cache(kvjax.KVzip(0.5), 2)
        for at, phase in enumerate(("prompt", "probe", "prompt")):
            options = {"phase": phase, "last": False}
            _, cache = kvjax.attend(cache, q, k, v, positions + 3 * at, **options)

    check(lambda: jax.eval_shape(calls, *arguments()), ValueError, "go on after phase='probe'")


def test_the_right_call_passes():
    """The calls above differ from a right one by what they change."""
    out, _ = shapes_of_attend()
    assert out.shape == (2, QUERY_HEADS, 3, 8)
    shapes_of_attend(transform=GROUPS)
    shapes_of_attend(phase="decode")  # several new tokens are fine where nothing is evicted
    assert shapes_of_init().kv.shape == (1, KV_HEADS, 20)


def test_a_refused_call_leaves_the_cache_alone():
    """Even with a donated cache: nothing is compiled, nothing is donated."""
    cache, (q, k, v, positions) = new_cache(SNAP, 2), arguments()
    call = jax.jit(
        lambda cache, *x: kvjax.attend(cache, *x, phase="decode", window=-1), donate_argnums=0
    )
    with pytest.raises(ValueError, match=re.escape("window must be at least 1, got -1")):
        call(cache, q, k, v, positions)
    assert not cache.kv.k.data.is_deleted()


@pytest.mark.parametrize("call", [kvjax.flush, kvjax.flush_interval])
def test_what_is_no_cache(call):
    with pytest.raises(TypeError, match="those of init_cache, in tuples, got int"):
        call((3,))


def test_caches_that_are_stacked_by_layer():
    """What is static is known of them; functions of one layer say how to get one."""
    one, (q, k, v, positions) = new_cache(EVERY, 2), arguments()
    stacked = jax.eval_shape(lambda *x: jax.tree.map(lambda *y: jnp.stack(y), *x), one, one)
    assert kvjax.flush_interval(stacked) == kvjax.flush_interval(one) == 4
    kv, slots = stacked.kv, jnp.ones(one.kv.shape, bool)
    for name, call in {
        "attend": lambda: kvjax.attend(stacked, q, k, v, positions, phase="prompt"),
        "flush": lambda: kvjax.flush(stacked),
        "kept_tokens": lambda: kvjax.kept_tokens(stacked),
        "append": lambda: kvjax.kit.append(kv, k, v, positions),
        "evict": lambda: kvjax.kit.evict(kv, slots),
        "merge": lambda: kvjax.kit.merge(kv, slots.astype(jnp.int32)),
        "compact": lambda: kvjax.kit.compact(kv, 8),
    }.items():
        with pytest.raises(ValueError, match=rf"{name} takes the cache of one layer.*\(2, 2, "):
            call()


def test_a_layers_cache_in_place_of_its_slots():
    cache, (_, k, v, positions) = new_cache(SNAP, 2), arguments()
    for call in (
        lambda: kvjax.kit.append(cache, k, v, positions), lambda: kvjax.kit.evict(cache, True),
        lambda: kvjax.kit.merge(cache, positions), lambda: kvjax.kit.compact(cache, 8),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"takes a kvjax\.kit\.KVCache, got LayerCache: give"):
            call()


def test_positions_and_frequencies_may_be_lists():
    """Of NumPy or of Python, with the numbers of arrays."""
    cache, (q, k, v, positions) = new_cache(SNAP, 2), arguments()
    frequencies = [1.0, 0.5, 0.25, 0.125]

    def attended(positions, frequencies):
        rope = kvjax.Rope(frequencies)
        return kvjax.attend(cache, q, k, v, positions, phase="prompt", rope=rope)[0]

    at = np.asarray(positions)
    given = (
        (positions, jnp.array(frequencies)),
        (at.tolist(), frequencies),
        (at, np.array(frequencies)),
    )
    expected, *others = jax.jit(lambda: [attended(*x) for x in given])()
    for other in others:
        np.testing.assert_array_equal(other, expected)
    rotated = kvjax.Rope(tuple(frequencies)).rotate(q, at.tolist())
    np.testing.assert_array_equal(rotated, kvjax.Rope(jnp.array(frequencies)).rotate(q, positions))
    kv, _ = kvjax.kit.append(cache.kv, k, v, at.tolist())
    np.testing.assert_array_equal(kv.length, at.max(1) + 1)
