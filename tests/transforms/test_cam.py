"""CaM over every evicting method against its reference: outputs, kept positions and values."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import H2O, CaM, Every, PyramidInfer, PyramidKV, SnapKV, StreamingLLM, WhenFull, chain
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.decisions import Retain
from kvjax.protocol import Stage
from kvjax.registry import METHODS
from kvjax.transforms.cam import _sum_of_next
from kvjax.transforms.random import uniform
from tests.references import cam, h2o, pyramidinfer, pyramidkv, snapkv, streaming_llm
from tests.references.slots import Slots, Token
from tests.support.method_pair import LENGTHS, SIDES, Pair
from tests.support.tolerances import close
from tests.transforms import test_repeated_snapkv as repeated

SEED, LAYER, LAYERS = 5, 1, 3


class OneHead:
    """PyramidInfer's reference, whose heads decide together, with one KV head and its slots."""

    def __init__(self, *args, interval, **options):
        self.row = pyramidinfer.PyramidInfer(*args, kv_heads=1, interval=interval, **options)
        self.slots = Slots(**options)

    kept = property(lambda self: self.row.kept)

    def prompt(self, q, k, v, positions, last=True):
        self._give()
        out = self.row.prompt(q, k[None], v[None], positions, last=last)
        self._take()
        return out

    def decode(self, q, k, v, position):
        self._give()
        out = self.row.decode(q, k[None], v[None], position)
        self._take()
        return out

    def flush(self, room):
        self._give()
        self.row.flush(room)
        self._take()

    def _give(self):
        for token in self.slots.tokens:
            self.row.tokens[token.position] = token.key[None], token.value[None]

    def _take(self):
        self.slots.tokens = [
            Token(position, key[0], value[0], np.zeros(1))
            for position, (key, value) in sorted(self.row.tokens.items())
        ]


# The base, its reference, and its window of newest tokens.
BASES = {
    "streaming_llm": (
        StreamingLLM(12, sinks=3),
        functools.partial(streaming_llm.StreamingLLM, 12, sinks=3),
        lambda base: base.limit - 3,
    ),
    "h2o": (H2O(13), functools.partial(h2o.H2O, 13), lambda base: base.limit - base.limit // 2),
    "h2o, a share": (
        H2O(0.3),
        functools.partial(h2o.H2O, 0.3),
        lambda base: base.limit - base.limit // 2,
    ),
    "snapkv": (SnapKV(20, 8), functools.partial(snapkv.SnapKV, 20, 8), 8),
    "pyramidkv": (
        PyramidKV(20, 8),
        functools.partial(pyramidkv.PyramidKV, 20, LAYER, LAYERS, observation=8),
        8,
    ),
    "pyramidinfer": (
        PyramidInfer(20, interval=5),
        functools.partial(OneHead, 20, LAYER, LAYERS, interval=5),
        lambda base: base.row.window,
    ),
    "every": (
        Every(SnapKV(20, 8), steps=6),
        functools.partial(repeated.EverySnapKV, 20, 8, steps=6),
        8,
    ),
    "when_full": (
        WhenFull(SnapKV(20, 8), room=6),
        functools.partial(repeated.SnapKVWhenFull, 20, 8, room=6),
        8,
    ),
}
every_base = pytest.mark.parametrize("name", BASES)


def the_draw(head: int, position: int) -> float:
    """The rule of the docstring: a number per seed, layer, KV head and position."""
    key = jax.random.key(SEED)
    for part in (LAYER, head, position):
        key = jax.random.fold_in(key, part)
    return float(jax.random.uniform(key))


def pair(name, *, merge_tokens=None, expected=False, prompt=False, seed=0, **kwargs) -> Pair:
    base, base_reference, recent = BASES[name]
    transform = CaM(base, merge_tokens, expected=expected, prompt=prompt, seed=SEED)
    shape = (1, 4) if name == "pyramidinfer" else (2, 2)
    heads = itertools.cycle(range(shape[0]))  # a reference is made per row and head, heads fastest

    def reference(**options):
        draw = None if expected else functools.partial(the_draw, next(heads))
        return cam.CaM(base_reference(**options), merge_tokens or recent, draw, prompt)

    limits = {"max_prompt": repeated.MAX_PROMPT, "max_new": repeated.MAX_NEW}
    return Pair(
        kvjax.bind(transform, LAYERS)[LAYER],
        reference,
        heads=shape,
        seed=seed,
        layer=LAYER,
        **limits,
        **kwargs,
    )


def check_values(both: Pair) -> Pair:
    """The values that the library holds are the reference's."""
    for (row, head), reference in both.references.items():
        position, live = both.host.position[row, head], both.host.live[row, head]
        order = np.argsort(np.where(live, position, np.iinfo(np.int32).max))[: live.sum()]
        close(both.host.v.read()[row, head][order], reference.slots.values, "reference")
    return both


def merges(both: Pair) -> list[tuple[int, float]]:
    return [merge for reference in both.references.values() for merge in reference.merged]


def test_every_evicting_method_of_the_registry_is_here():
    evicting = {name for name, method in METHODS.items() if method.stage == Stage.EVICT}
    others = {"full", "kvmerger", "chelsea"}  # which evict nothing, or merge
    assert evicting - others - {"layer_budget"} <= set(BASES)


@every_base
@pytest.mark.parametrize(
    ("expected", "prompt"), [(False, True), (True, False)], ids=["random, prompt too", "expected"]
)
@pytest.mark.fast_cases("expected-pyramidkv")
def test_prompt_and_decode_steps(name, expected, prompt):
    both = check_values(pair(name, expected=expected, prompt=prompt).prompt(LENGTHS, "scattered"))
    assert bool(merges(both)) == prompt
    before = len(merges(both))
    check_values(both.decode(16))
    assert (len(merges(both)) > before) == frees_while_decoding(both.transform)


@pytest.mark.parametrize("merge_tokens", [1, 3, 200])
@pytest.mark.parametrize("name", ["streaming_llm", "h2o", "every"])
@pytest.mark.fast_cases("streaming_llm-1")
def test_merge_tokens(name, merge_tokens):
    """Fewer targets than m where m is larger than what is left; still divided by m."""
    both = pair(name, merge_tokens=merge_tokens, prompt=True, expected=True, seed=1)
    check_values(both.prompt(LENGTHS).decode(12))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.slow
def test_second_turn(side):
    """Slots stand in no order then; the last row gets no token of the second prompt."""
    both = pair("h2o", prompt=True, seed=2).prompt(LENGTHS, chunks=2).decode(12)
    check_values(both.prompt((8, 20, 0), side).decode(12))
    assert sum(0.05 < p < 0.95 for _, p in merges(both)) > 20


@pytest.mark.slow
def test_layer_budgets_add_up():
    """PyramidKV's layers hold different numbers of slots, and together what was asked for."""
    layers = kvjax.bind(CaM(PyramidKV(20, 8), prompt=True), LAYERS)
    held = [
        (np.asarray(cached(tx, prompt_length=64, steps=1).kv.live).sum(-1) - 1) for tx in layers
    ]
    assert (np.sum(held, axis=0) == LAYERS * 20).all()
    assert len({int(one[0, 0]) for one in held}) > 1


@pytest.mark.parametrize("count", [1, 2, 5, 7, 8, 100])
def test_sums_of_the_next_entries(count):
    """Exact whatever stood before: a difference of prefix sums would lose the small numbers."""
    x = np.float32([1e8, 1e-3, 2e-3, 0.0, 4e-3, 5e-3, 6e-3, 7e-3])
    sums = _sum_of_next(jnp.asarray(x)[None, None], jnp.full((1, 1, 1), count))
    expected = [x[n : n + count].astype(float).sum() for n in range(8)]
    np.testing.assert_allclose(np.asarray(sums)[0, 0], expected, rtol=1e-6)


@pytest.mark.slow
def test_attention_of_nothing():
    """0 / 0 is 0: nobody looks at the tokens after the first, except themselves at first."""
    both = pair("streaming_llm", expected=True, prompt=True, seed=4)
    both.q[:], both.k[:] = 0.0, 0.0
    both.q[..., 0], both.k[:, :, 0, 0] = 1000.0, 8**0.5
    check_values(both.prompt(LENGTHS).decode(12))
    assert {p for _, p in merges(both)} == {0.0}


@functools.partial(
    jax.jit,
    static_argnames=("transform", "prompt_length", "steps"),
)
def cached(transform, key=None, prompt_length=24, steps=8):
    """The cache after a prompt and some steps; `key` replaces that of the draws."""
    rng = np.random.default_rng(0)
    shape = (1, 2, prompt_length + steps, 4)
    *qkv, at = *rng.normal(size=(3, *shape)).astype(np.float32), jnp.arange(shape[2])[None]
    size = {"batch": 1, "kv_heads": 2, "head_dim": 4, "dtype": jnp.float32}
    cache = kvjax.init_cache(transform, max_prompt=prompt_length, max_new=steps, **size)
    if key is not None:
        cache = dataclasses.replace(cache, state=cache.state._replace(key=key))
    prompt = (x[:, :, :prompt_length] for x in qkv)
    _, cache = kvjax.attend(transform, cache, *prompt, at[:, :prompt_length], phase="prompt")

    def step(cache, x):
        return kvjax.attend(transform, cache, *x, phase="decode")[1], None

    new = [jnp.moveaxis(x[:, :, prompt_length:, None], 2, 0) for x in qkv]
    return jax.lax.scan(step, cache, (*new, jnp.asarray(at.T[prompt_length:, None])))[0]


@pytest.mark.parametrize("prompt", [False, True], ids=["decoding", "prompt too"])
@pytest.mark.slow
def test_the_mean_of_many_draws_is_the_expected_merge(prompt):
    """Attention, and with it p, does not depend on values."""
    transform = CaM(StreamingLLM(10), merge_tokens=4, prompt=prompt)
    keys = jax.random.split(jax.random.key(0), 1000)
    draw = jax.vmap(lambda key: cached.__wrapped__(transform, key, steps=4).kv.v.read())
    values = jax.jit(draw)(keys)
    expected = cached(dataclasses.replace(transform, expected=True), steps=4).kv.v.read()
    error = 5 * np.std(values, axis=0) / len(keys) ** 0.5  # five standard errors of the mean
    assert error.max() > 0, "something was drawn"
    assert (np.abs(np.mean(values, axis=0) - expected) <= error + 1e-5).all()


def test_draws_differ_by_seed_layer_and_head_and_not_by_row():
    def draws(seed, layer):
        tx = kvjax.bind(CaM(StreamingLLM(10), seed=seed), 2)[layer]
        size = {"batch": 1, "kv_heads": 1, "head_dim": 4, "max_prompt": 1, "max_new": 0}
        key, _ = kvjax.init_cache(tx, **size, layer=layer).state
        return np.asarray(uniform(key, jnp.broadcast_to(jnp.arange(40), (2, 3, 40))))

    drawn = [draws(0, 0), draws(0, 1), draws(1, 0)]
    for one in drawn:
        np.testing.assert_array_equal(one[0], one[1])
    assert len(np.unique(drawn)) == 3 * drawn[0][0].size


@pytest.mark.slow
def test_chain_of_evictors_and_parse():
    tx = kvjax.parse("cam(chain(snapkv(window=4), h2o), expected=True)", 12)
    assert tx == CaM(chain(SnapKV(12, window=4), H2O(12)), expected=True)
    assert kvjax.bind(tx, 2)[0] == tx
    assert (np.asarray(cached(tx).kv.live).sum(-1) == 12).all()


def recall_base():
    @dataclasses.dataclass(frozen=True)
    class Recall(kvjax.KVTransform):
        stage = kvjax.Stage.RECALL

    return Recall()


REFUSED = {
    "full": (lambda: CaM(kvjax.Full()), ValueError, "Full.*"),
    "recall": (lambda: CaM(recall_base()), ValueError, "evicts.*Recall"),
    "itself": (lambda: CaM(CaM(H2O(8))), ValueError, "evicts tokens.*CaM"),
    "groups": (lambda: CaM(kvjax.HeadGroups((((0,), H2O(8)),))), ValueError, "HeadGroups"),
    "class": (lambda: CaM(H2O), TypeError, "instance"),
    "no tokens": (lambda: CaM(H2O(8), merge_tokens=0), ValueError, "at least 1, got 0"),
    "float tokens": (lambda: CaM(H2O(8), merge_tokens=0.5), TypeError, "int, got 0.5"),
    "seed": (lambda: CaM(H2O(8), seed=-1), ValueError, "seed must be at least 0, got -1"),
    "large seed": (lambda: CaM(H2O(8), seed=2**32), ValueError, "below 2\\*\\*32"),
    "float seed": (lambda: CaM(H2O(8), seed=0.5), TypeError, "seed.*0.5"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, error, message = case
    with pytest.raises(error, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Newest(kvjax.KVTransform):
    """Evicts, and names no window."""

    def on_step(self, cache, state, step):
        return Retain(cache.position >= 4), state


def test_a_base_without_a_window_needs_merge_tokens():
    size = {"batch": 1, "kv_heads": 1, "head_dim": 4, "max_prompt": 8, "max_new": 1}
    with pytest.raises(ValueError, match=r"merge_tokens must be given.*Newest"):
        kvjax.init_cache(CaM(Newest()), **size)
    kvjax.init_cache(CaM(Newest(), merge_tokens=2), **size)
