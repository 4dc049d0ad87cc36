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
from kvjax import H2O, CaM, Every, PyramidKV, SnapKV, StreamingLLM, WhenFull, chain
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.decisions import Retain
from kvjax.protocol import Stage
from kvjax.registry import METHODS
from kvjax.transforms.cam import _sum_of_next
from tests.references import cam, h2o, pyramidkv, snapkv, streaming_llm
from tests.support.method_pair import LENGTHS, Pair
from tests.transforms import test_repeated_snapkv as repeated

SEED, LAYER, LAYERS = 5, 1, 3


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
slow = pytest.mark.slow


def the_draw(head: int, position: int) -> float:
    """The rule of the docstring: a number per seed, layer, KV head and position."""
    key = jax.random.key(SEED)
    for part in (LAYER, head, position):
        key = jax.random.fold_in(key, part)
    return float(jax.random.uniform(key))


def pair(name="h2o", *, merge_tokens=None, expected=False, prompt=False, **options) -> Pair:
    base, base_reference, recent = BASES[name]
    transform = CaM(base, merge_tokens, expected=expected, prompt=prompt, seed=SEED)
    heads = itertools.cycle(range(2))  # a reference is made per row and head, heads fastest

    def reference(**attention):
        draw = None if expected else functools.partial(the_draw, next(heads))
        return cam.CaM(base_reference(**attention), merge_tokens or recent, draw, prompt)

    return Pair(
        kvjax.bind(transform, LAYERS)[LAYER], reference, layer=LAYER, contents=True,
        max_prompt=repeated.MAX_PROMPT, max_new=repeated.MAX_NEW, **options,
    )  # fmt: skip


def merges(both: Pair) -> list[tuple[int, float]]:
    return [merge for reference in both.references.values() for merge in reference.merged]


def test_every_evicting_method_of_the_registry_is_here():
    evicting = {name for name, method in METHODS.items() if method.stage == Stage.EVICT}
    others = {"full", "kvmerger", "chelsea"}  # which evict nothing, or merge
    alike = {"layer_budget", "pyramidinfer"}  # which evict at prompts and flushes, as others do
    assert evicting - others - alike <= set(BASES)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        pytest.param(name, prompt, marks=[slow] * ((name, prompt) != ("pyramidkv", True)))
        for name in BASES
        for prompt in (True, False)
    ],
)
def test_prompt_and_decode_steps(name, prompt):
    """With draws in the prompt too, and with the expected merges while decoding alone."""
    both = pair(name, expected=not prompt, prompt=prompt).prompt(LENGTHS, "scattered")
    assert bool(merges(both)) == prompt
    before = len(merges(both))
    both.decode(16)
    assert (len(merges(both)) > before) == frees_while_decoding(both.transform)


@pytest.mark.parametrize(
    ("name", "merge_tokens"),
    [("streaming_llm", 1), *(pytest.param(x, 200, marks=slow) for x in ("h2o", "every"))],
)
def test_merge_tokens(name, merge_tokens):
    """Fewer targets than m where m is larger than what is left; still divided by m."""
    both = pair(name, merge_tokens=merge_tokens, prompt=True, expected=True, seed=1)
    both.prompt(LENGTHS).decode(12)


@slow
def test_second_turn():
    """Slots stand in no order then; the last row gets no token of the second prompt."""
    both = pair(prompt=True, seed=2).prompt(LENGTHS, chunks=2).decode(12)
    both.prompt((8, 20, 0), "scattered").decode(12)
    assert sum(0.05 < p < 0.95 for _, p in merges(both)) > 20


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
    both.prompt(LENGTHS).decode(12)
    assert {p for _, p in merges(both)} == {0.0}


@functools.partial(jax.jit, static_argnums=0)
def cached(transform, key=None):
    """The cache after a prompt and some steps; `key` replaces that of the draws."""
    rng, prompt_length, steps = np.random.default_rng(0), 24, 4
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
    draw = jax.vmap(lambda key: cached.__wrapped__(transform, key).kv.v.read())
    values = jax.jit(draw)(keys)
    expected = cached(dataclasses.replace(transform, expected=True)).kv.v.read()
    error = 5 * np.std(values, axis=0) / len(keys) ** 0.5  # five standard errors of the mean
    assert error.max() > 0, "something was drawn"
    assert (np.abs(np.mean(values, axis=0) - expected) <= error + 1e-5).all()


def test_parse():
    tx = kvjax.parse("cam(chain(snapkv(window=4), h2o), expected=True)", 12)
    assert tx == CaM(chain(SnapKV(12, window=4), H2O(12)), expected=True)
    assert kvjax.bind(tx, 2)[0] == tx


REFUSED = {
    "full": (lambda: CaM(kvjax.Full()), ValueError, "Full.*"),
    "recall": (lambda: CaM(kvjax.Quest(48)), ValueError, "evicts.*Quest"),
    "itself": (lambda: CaM(CaM(H2O(8))), ValueError, "evicts tokens.*CaM"),
    "groups": (lambda: CaM(kvjax.HeadGroups((((0,), H2O(8)),))), ValueError, "HeadGroups"),
    "class": (lambda: CaM(H2O), TypeError, "instance"),
    "no tokens": (lambda: CaM(H2O(8), merge_tokens=0), ValueError, "at least 1, got 0"),
    "seed": (lambda: CaM(H2O(8), seed=2**32), ValueError, "below 2\\*\\*32"),
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
