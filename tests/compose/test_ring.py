"""Rings: exact attention within a window, from the window's slots alone; which layers have one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    H2O,
    Chelsea,
    Codebook,
    Everywhere,
    Full,
    HeadGroups,
    InfiniGen,
    PerLayer,
    PyramidKV,
    Quantize,
    Quest,
    Ring,
    SnapKV,
    SpindleKV,
    StreamingLLM,
    chain,
)
from tests.references.attention import softmax_attention
from tests.references.ring import Ring as Reference
from tests.support.attending import Tokens, decode, new_cache, prompt, slots_of, the_rope
from tests.support.method_pair import LENGTHS, Pair
from tests.support.tolerances import close

ROPE = kvjax.Rope(np.float32([1.0, 0.25, 0.01, 0.5]))


def pair(window: int = 8, seed: int = 0, **options) -> Pair:
    return Pair(Ring(window), Reference, seed=seed, window=window, **options)


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (1, {}),
        (8, {"rope": ROPE}),
        pytest.param(40, {}, marks=pytest.mark.slow),
        pytest.param(16, {"heads": (2, 4), "scale": 0.5, "soft_cap": 2.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_prompt_and_64_steps(window, options):
    """Shorter than every prompt, between them, and longer than any text."""
    both = pair(window, **options).prompt(LENGTHS).decode(64)
    assert both.cache.kv.slots == min(window, 128 + 64)


def test_positions_decide_and_not_their_number():
    """Hidden states that were pruned below leave gaps: a window holds fewer tokens then."""
    tokens, window = Tokens.random(rows=1), 8
    positions = np.array([[0, 3, 4, 9, 11, 12, 20]])
    _, cache = prompt(Ring(window), new_cache(Ring(window), 1), tokens, positions, window=window)
    assert slots_of(cache, 0, 0)["position"].tolist() == [20]
    out, cache = decode(Ring(window), cache, tokens, [21], window=window)
    q, k, v, _ = (np.asarray(x) for x in tokens.at(np.array([[20, 21]])))
    turned = [np.asarray(the_rope().rotate(x, jnp.array([[20, 21]]))) for x in (q, k)]
    for head in range(2):
        expected, _ = softmax_attention(
            turned[0][0, 2 * head : 2 * head + 2, 1:], turned[1][0, head], v[0, head],
            np.array([21]), np.array([20, 21]),
        )  # fmt: skip
        close(out[0, 2 * head : 2 * head + 2], expected, "reference")


# --- what it holds --------------------------------------------------------------------------------

SIZE = {"batch": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.mark.parametrize(
    ("window", "max_prompt", "max_new", "slots"),
    [(8, 64, 16, 8), (8, 64, 0, 7), (8, 5, 100, 8), (8, 3, 2, 5), (1, 4, 0, 1)],
)
def test_slots_are_those_of_the_window(window, max_prompt, max_new, slots):
    shapes = jax.eval_shape(
        lambda: kvjax.init_cache(Ring(window), max_prompt=max_prompt, max_new=max_new, **SIZE)
    )
    assert shapes.kv.slots == shapes.kv.capacity == slots
    keys_values, scalars = 2 * 16 * 4, 4 + 4 + 1
    assert kvjax.nbytes(shapes) == 2 * 2 * (slots * (keys_values + scalars) + 8) + 2 * 4


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (2.5, TypeError)])
def test_bad_windows(window, error):
    with pytest.raises(error, match="window must be"):
        Ring(window)


# --- which layers have one ------------------------------------------------------------------------

WINDOWS = (8, None, 8)


def bound(transform, windows=WINDOWS, max_tokens=1024):
    return kvjax.bind(transform, len(windows), windows, max_tokens)


OUTLIERS = kvjax.kit.OutlierHeads(((0, 1), (1, 0)), num_layers=3, kv_heads=2)
REPLACED = {
    "budgets by layer": PyramidKV(64),
    "dense layers": Quest(48),
    "brings its own storage": SpindleKV(0.5),
    "wrapper in a wrapper": kvjax.Every(kvjax.KVCrush(SnapKV(64)), steps=8),
    "outlier heads": Chelsea(256, outlier_heads=OUTLIERS),
    "head groups": HeadGroups((((0,), Full()), ((1,), H2O(64)))),
}


@pytest.mark.parametrize("transform", REPLACED.values(), ids=REPLACED)
def test_a_window_is_a_ring_whatever_the_method(transform):
    """Other layers are as they would be without windows; layers are counted as before."""
    first, other, last = bound(transform)
    assert first == last == Ring(8)
    assert other == kvjax.bind(transform, 3)[1]


OWN_STORAGE = HeadGroups((((0,), chain(SnapKV(64), Quantize())), ((1,), Everywhere(H2O(64)))))
FIRST = {
    "storage": (chain(SnapKV(64), Quantize()), chain(Ring(8), Quantize())),
    "a codebook": (chain(H2O(64), Codebook(capacity=64)), chain(Ring(8), Codebook(capacity=64))),
    "storage before recall": (
        chain(Quantize(), Quest(48, dense_layers=())), chain(Ring(8), Quantize())
    ),
    "storage and everywhere per head": (
        OWN_STORAGE, HeadGroups((((0,), chain(Ring(8), Quantize())), ((1,), H2O(64))))
    ),
    "groups of slots become groups of channels": (  # a ring frees slots one by one
        chain(SnapKV(64), Quantize(4, group=16, residual=32)),
        chain(Ring(8), Quantize(4, group=16, key_axis="token")),
    ),
    "everywhere": (Everywhere(chain(SnapKV(64), Quantize())), chain(SnapKV(64), Quantize())),
    "everywhere in a chain": (
        chain(Everywhere(SnapKV(64)), Quantize()), chain(SnapKV(64), Quantize())
    ),
    "everywhere in a wrapper": (
        kvjax.Every(Everywhere(SnapKV(64)), 8), kvjax.Every(SnapKV(64), 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("transform", "first"), FIRST.values(), ids=FIRST)
def test_storage_and_everywhere_hold_in_layers_with_a_window(transform, first):
    assert bound(transform)[0] == first
    assert bound(PerLayer(lambda layer, count: transform))[0] == first


def test_everywhere():
    transform = Everywhere(PyramidKV(64))
    assert bound(transform) == kvjax.bind(PyramidKV(64), 3)
    assert kvjax.parse(kvjax.unparse(transform)) == transform
    with pytest.raises(TypeError, match="Everywhere takes transforms"):
        Everywhere(8)
    with pytest.raises(ValueError, match="decides per layer"):
        kvjax.init_cache(transform, max_prompt=8, max_new=8, **SIZE)


def test_a_window_that_no_text_leaves_is_no_ring():
    assert bound(H2O(64), max_tokens=8) == (H2O(64),) * 3
    assert bound(H2O(64), max_tokens=9)[0] == Ring(8)
    assert kvjax.bind(H2O(64), 3) == kvjax.bind(H2O(64), 3, ()) == (H2O(64),) * 3
    assert bound(StreamingLLM(64), (4, 16, None), 10)[:2] == (Ring(4), StreamingLLM(64))


@pytest.mark.parametrize(
    ("windows", "max_tokens", "error", "message"),
    [
        (8, 64, TypeError, "windows must be a tuple with an int or None for each layer, got 8"),
        ((8, 0, 8), 64, ValueError, "the window of layer 1 must be at least 1, got 0"),
    ],
)
def test_bad_windows_of_layers(windows, max_tokens, error, message):
    with pytest.raises(error, match=message):
        kvjax.bind(H2O(64), 3, windows, max_tokens)


def test_a_wrong_calibration_is_seen_in_models_of_rings_alone():
    found = kvjax.kit.InfiniGenCalibration(np.ones((5, 2, 8, 3)))
    with pytest.raises(ValueError, match="is of another model: it has 5 layers"):
        bound(InfiniGen(calibration=found), (8, 8, 8))


def test_the_last_token_once_more_sees_its_whole_window():
    """What loops of others feed behind a prompt, and queries of a layer that shares the keys."""
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 8, "max_prompt": 32, "max_new": 8}
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 2, 21, 8)), jnp.float32) for _ in range(3))
    last = [x[:, :, 20:] for x in (q, k, v)]
    (plain,), (cache,) = (
        kvjax.init_caches("full", num_layers=1, windows=(6,), repeats=repeats, **sizes)
        for repeats in (False, True)
    )
    assert (plain.kv.slots, cache.kv.slots) == (6, 7)
    prompt_of = functools.partial(kvjax.attend, phase="prompt")
    step_of = functools.partial(kvjax.attend, positions=jnp.array([[20]]), phase="decode")
    expected, cache = prompt_of(cache, q, k, v, jnp.arange(21)[None])
    again, after = step_of(cache, *last, repeats=True)
    np.testing.assert_allclose(again, expected[:, :, 20:], rtol=1e-5, atol=1e-6)
    alone, _ = step_of(after, last[0], None, None)
    np.testing.assert_allclose(alone, again, rtol=1e-5, atol=1e-6)
    _, plain = prompt_of(plain, q, k, v, jnp.arange(21)[None])
    for given in ({"k": last[1], "v": last[2], "repeats": True}, {"k": None, "v": None}):
        with pytest.raises(ValueError, match=r"init_caches\(\.\.\., repeats=True\)"):
            step_of(plain, last[0], **given)
