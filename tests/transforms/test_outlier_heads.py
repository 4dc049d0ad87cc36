"""Heads that keep everything: what is stored, what is attended to, and how they are found."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.models
from kvjax.protocol import is_bound
from tests.references.chelsea import soft_matching, unmatched_share
from tests.support.attending import Tokens, parts, right, run

SMALL = {"chunk": 8, "sinks": 2, "recent": 6, "interval": 4}
OUTLIERS = kvjax.kit.OutlierHeads(((1, 0), (3, 3), (0, 2), (1, 2)), num_layers=4, kv_heads=4)


def kept_heads(layers) -> list[list[int]]:
    """The heads of each layer that keep everything."""
    kept = []
    for layer in layers:
        groups = layer.groups if isinstance(layer, kvjax.HeadGroups) else ((range(4), layer),)
        kept.append([h for heads, tx in groups if tx == kvjax.Full() for h in heads])
    return kept


def caches_of(layers, kv_heads, max_prompt=900, max_new=100):
    size = {"batch": 1, "kv_heads": kv_heads, "head_dim": 64, "dtype": jnp.float32}
    size |= {"max_prompt": max_prompt, "max_new": max_new}
    return [jax.eval_shape(lambda tx=layer: kvjax.init_cache(tx, **size)) for layer in layers]


def slots_and_room(layers, caches) -> tuple[int, int]:
    """Slots of one row over all heads and layers, and how many of them only decoding fills."""
    every = [p for tx, cache in zip(layers, caches, strict=True) for p in parts(tx, cache)]
    room = sum(
        len(part.heads) * part.transform.interval
        for part in every
        if part.transform != kvjax.Full()
    )
    return sum(part.cache.kv.position.size for part in every), room


# --- what is stored -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [200, 0.2])
def test_bytes_are_what_the_budget_says(budget):
    """4 % of 100 heads keep all of 1,000 tokens: 166 slots are left for each of the others."""
    outliers = kvjax.kit.OutlierHeads(((0, 0), (0, 7), (4, 9), (9, 1)), num_layers=10, kv_heads=10)
    layers = kvjax.bind(kvjax.Chelsea(budget, outlier_heads=outliers, interval=20), 10)
    caches = caches_of(layers, 10)
    slots, room = slots_and_room(layers, caches)
    assert room == 96 * 20
    assert slots - room == 4 * 1000 + 96 * 166  # all but 64 of the 100 · 200 that the budget allows
    one_slot = 2 * 64 * 4 + 4 + 4 + 1  # key and value, position, log-mass, pinned
    assert 0 <= kvjax.nbytes(caches) - slots * one_slot < 100 * (16 + 4)  # and a sink of each head


def test_what_is_of_a_larger_model_is_not_bound():
    assert not is_bound(kvjax.Chelsea(500, outlier_heads=OUTLIERS))


def test_kept_layers_count_among_the_outliers():
    transform = kvjax.Chelsea(500, outlier_heads=OUTLIERS, keep_layers=(2,))
    assert kept_heads(kvjax.bind(transform, 4)) == [[], [], [0, 1, 2, 3], []]
    six = kvjax.kit.OutlierHeads(((1, 0), (2, 1), (3, 3), (0, 2), (1, 2), (3, 0)), 4, 4)
    transform = kvjax.Chelsea(500, outlier_heads=six, keep_layers=(2,))
    assert kept_heads(kvjax.bind(transform, 4)) == [[], [0], [0, 1, 2, 3], [3]]
    layers = kvjax.bind(kvjax.Chelsea(500, keep_layers=(0, 3)), 5)
    assert kept_heads(layers) == [[0, 1, 2, 3], [], [], [0, 1, 2, 3], []]


@pytest.mark.slow
def test_a_share_beside_outliers_is_each_rows_own():
    """`(3 · 0.75 - 1) / 2` of each row's 12 new tokens and its prompt."""
    outliers = kvjax.kit.OutlierHeads(((0, 0),), num_layers=1, kv_heads=3)
    (layer,) = kvjax.bind(kvjax.Chelsea(0.75, **SMALL, outlier_heads=outliers), 1)
    (_, full), (_, rest) = layer.groups
    assert full == kvjax.Full() and is_bound(rest)
    cache = run(rest, Tokens.random(), right([0, 0, 0], (24, 17, 5), 24), 0).prompt_cache
    live = cache.kv.live.sum(-1)
    assert live.tolist() == [[22, 22], [17, 17], [5, 5]]  # 0.625 · 36, 0.625 · 29 = 18 > 17


# --- calibration ----------------------------------------------------------------------------------


def keyed(params, tokens, positions, caches, *, layers, phase, last, logits_at):
    """A model whose keys are `params[layer, token]`, read without any weights."""
    written = []
    for keys, cache in zip(params, caches, strict=True):
        keys = keys[tokens].transpose(0, 2, 1, 3)  # [B, H, T, D]
        _, cache = kvjax.attend(cache, keys, keys, keys, positions, phase=phase, last=last)
        written.append(cache)
    return jnp.zeros((len(tokens), 1, 64)), tuple(written)


def model_of(keys: np.ndarray) -> kvjax.models.FunctionalModel:
    """Of keys [layers, V, H, D]."""
    layers, vocab, heads, dim = keys.shape
    params = jnp.asarray(keys, jnp.float32)
    return kvjax.models.FunctionalModel(keyed, params, layers, heads, heads, dim, vocab)


KEYS, SAMPLE = np.ones((2, 64, 3, 4)), (tuple(range(60)), tuple(range(10, 50)))


def calibrate(threshold, share=0.04, *, keys=KEYS, sample=SAMPLE, **changes):
    options = {"chunk": 8, "sinks": 2, "recent": 4, **changes}
    tx = kvjax.Chelsea(0.5, outlier_threshold=threshold, outlier_share=share, **options)
    return kvjax.calibrated(tx, model_of(keys), sample).outlier_heads


def test_calibration_ranks_heads_as_the_reference_does():
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(3, 64, 2, 8)).astype(np.float32)
    sample, threshold = [rng.integers(0, 64, count).tolist() for count in (48, 33)], 0.6
    found = calibrate(threshold, 0.5, keys=keys, sample=sample)
    scores = np.zeros((3, 2))
    for row, (layer, head) in itertools.product(sample, np.ndindex(3, 2)):
        of_row = keys[layer, row, head].astype(np.float64)
        edges = soft_matching(of_row[2:-4], 8)
        assert min(abs(each - threshold) for each, _, _ in edges) > 1e-5, "change the seed"
        scores[layer, head] += unmatched_share(of_row, threshold, chunk=8, sinks=2, recent=4)
    ranked = np.argsort(-scores.ravel(), kind="stable")[:3]
    assert len(set(scores.ravel())) > 3
    assert found.heads == tuple((int(at) // 2, int(at) % 2) for at in ranked)
    assert (found.num_layers, found.kv_heads) == (3, 2)


# --- what is refused ------------------------------------------------------------------------------


def bind(budget=128, layers=4, heads=OUTLIERS, **changes):
    return kvjax.bind(kvjax.Chelsea(budget, outlier_heads=heads, **changes), layers)


BAD = {
    "head outside": (
        lambda: kvjax.kit.OutlierHeads(((4, 0),), 4, 4), ValueError, "(4, 0)", "4 layers",
    ),
    "no pair": (lambda: kvjax.kit.OutlierHeads(((0,),), 1, 2), TypeError, "(0,)", "pairs"),
    "a head twice": (
        lambda: kvjax.kit.OutlierHeads(((0, 1), (0, 1)), 2, 2), ValueError, "each head once",
    ),
    "all heads": (
        lambda: kvjax.kit.OutlierHeads(((0, 0), (0, 1)), 1, 2), ValueError, "leave some", "all 2",
    ),
    "a layer twice": (
        lambda: bind(keep_layers=(2, 2)), ValueError, "keep_layers", "each once", "(2, 2)",
    ),
    "no number": (lambda: OUTLIERS.remaining("half"), TypeError, "a number", "'half'"),
    "a share that is used up": (
        lambda: bind(0.25), ValueError, "4 of 16 heads keep everything", "more than 0.25",
    ),
    "another model": (lambda: bind(layers=5), ValueError, "4 layers", "5 layers"),
    "other heads": (
        lambda: caches_of(bind(0.9, 1, kvjax.kit.OutlierHeads(((0, 0),), 1, 2)), 4),
        ValueError, "2 KV heads", "4",
    ),
    "nothing left": (lambda: caches_of(bind(300), 4), ValueError, "300", "66", "at least 81"),
    "short sample": (lambda: calibrate(0.9, sinks=16, recent=64), ValueError, "82", "got 40"),
    "fraction": (lambda: calibrate(0.9, 0.0), ValueError, "outlier_share", "(0, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    build, error, *words = BAD[name]
    with pytest.raises(error) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)
