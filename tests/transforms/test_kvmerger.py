"""KVMerger against its reference: merging sets, pivots, weights, and what attention then gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KVMerger
from kvjax.cache.rearrange import widen
from tests.references import kvmerger as reference
from tests.support.marks import slow, some_slow
from tests.support.method_pair import LENGTHS, Pair
from tests.support.tolerances import close

CASES = {
    "budget, multi-head": {"budget": 21, "heads": (4, 1)},
    "one slot": {"budget": 1},
    "half": {"budget": 0.5, "heads": (2, 4)},
    "epsilon": {"epsilon": 0.75},
    "epsilon beyond the budget": {"budget": 30, "epsilon": 0.5},
    "budget beyond epsilon": {"budget": 0.4, "epsilon": 0.97},
    "anchor and budget": {"epsilon": 0.9, "against": "anchor", "budget": 0.4},
    "counts": {"budget": 20, "recent": 5, "heavy": 4},
    "shares": {"budget": 0.6, "recent": 0.3, "heavy": 0.1},
    "nothing stays": {"budget": 12, "recent": 0, "heavy": 0},
    "more stays than fits": {"budget": 12, "recent": 0.3, "heavy": 0.3},
}
ROPE = kvjax.Rope(np.float32([1.0, 0.3, 0.02]), factor=1.1)
MODES = {
    "share": {"budget": 0.4},
    "epsilon": {"epsilon": 0.6},
    "mean": {"budget": 14, "weights": "mean"},
    "values not multiplied": {"budget": 14, "value_scale": "none", "sigma": 5.0},
    "paper": {"budget": 14, "sigma": "literal", "value_scale": "paper"},
    "rotated, in a window": {
        "budget": 16, "scale": 0.9, "window": 20, "soft_cap": 2.5, "rope": ROPE
    },
}  # fmt: skip
FIELDS = {
    "budget", "epsilon", "against", "recent", "heavy", "sigma", "weights", "value_scale", "pivot"
}  # fmt: skip


def pair(**options) -> Pair:
    """Keys that drift: neighbours are alike, as in the paper's Figure 2, and runs are long."""
    fields = {name: options.pop(name) for name in FIELDS & set(options)}
    transform = KVMerger(**fields, **({"seed": SEED} if "pivot" in fields else {}))
    in_reference = {name: x for name, x in fields.items() if name != "pivot"}
    reference_of = functools.partial(reference.KVMerger, **{"budget": None, **in_reference})
    both = Pair(transform, reference_of, contents=True, **options)
    steps, mixed = both.rng.normal(size=both.k.shape), np.zeros(both.k.shape)
    for p in range(both.k.shape[2]):
        before = mixed[:, :, p - 1] if p else 0.0
        mixed[:, :, p] = 0.8 * before + 0.6 * steps[:, :, p]
    both.k = mixed.astype(np.float32)
    return both


def largest_set(both: Pair) -> int:
    return max(len(own) for one in both.references.values() for own in one.sets)


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("name", some_slow(CASES, "more stays than fits"))
def test_prompt(name):
    assert largest_set(pair(**CASES[name]).prompt(LENGTHS)) > 1


@pytest.mark.parametrize("name", some_slow(MODES, "mean", "paper"))
def test_modes(name):
    """Over two turns: slots that have been merged before are merged on."""
    both = pair(**MODES[name], seed=1).prompt(LENGTHS)
    assert largest_set(both) > 3
    both.decode(4).prompt((9, 30, 0), "left").decode(60)


SEED = 7


def draws(seed: int, layer: int, head: int):
    """The draws of `pivot="random"`, one by one."""
    key = jax.random.fold_in(jax.random.key(seed), layer)
    key = jax.random.fold_in(key, head)
    return functools.cache(lambda p: float(jax.random.uniform(jax.random.fold_in(key, p))))


def test_random_pivots():
    """They depend on seed, layer, head and position alone."""
    both = pair(budget=14, pivot="random", seed=6, layer=3)
    for (_, head), own in both.references.items():
        own.priority = draws(SEED, 3, head)
    both.prompt(LENGTHS, "scattered")


# --- sets, pivots and weights, one by one ---------------------------------------------------------


MOST, DIM = 24, 6  # tokens and entries of a key; fewer are padded, so that all share a shape


def padded(x, *shape) -> np.ndarray:
    x = np.asarray(x, np.float32)
    return np.pad(x, [(0, n - own) for n, own in zip(shape, x.shape, strict=True)])


@jax.jit
def _filled(keys, attention, positions):
    cache = kvjax.init_cache(
        KVMerger(budget=1), batch=1, kv_heads=1, head_dim=DIM, max_prompt=MOST, max_new=MOST,
        dtype=jnp.float32,
    ).kv  # fmt: skip
    cache = widen(cache, MOST)
    rows = keys[None, None]
    cache, _ = kvjax.kit.append(cache, rows, rows[..., ::-1], positions[None])
    pad = (0, cache.slots - MOST)
    column = jnp.pad(attention, pad)[None, None, :, None]
    return cache.with_column("attention", column)


def filled(keys: np.ndarray, attention: np.ndarray):
    """A cache [1, 1, S] of tokens 0 .. N - 1 that have received `attention [N]`."""
    positions = np.where(np.arange(MOST) < len(keys), np.arange(MOST), -1).astype(np.int32)
    return _filled(padded(keys, MOST, DIM), padded(attention, MOST), positions)


@functools.partial(jax.jit, static_argnums=0)
def _plan(transform: KVMerger, cache):
    return transform.plan(cache, cache.k.read())


def plan(transform: KVMerger, cache) -> tuple[np.ndarray, np.ndarray]:
    """Target and weight of every slot of the one row and head."""
    into, weights = jax.device_get(_plan(transform, cache))
    return into[0, 0], weights[0, 0]


def test_the_numbers_of_one_set():
    """Three tokens by hand: distances 0, 1 and 3 from the pivot, so that √2 σ is 2."""
    keys = np.array([[4.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    transform = KVMerger(epsilon=0.75, recent=0, heavy=0)
    into, weights = plan(transform, filled(keys, np.array([1.0, 5.0, 2.0])))
    assert into[:3].tolist() == [1, 1, 1]
    close(weights[:3], np.exp([-9 / 4, 0, -1 / 4]))


@pytest.mark.parametrize(
    ("epsilon", "against"),
    [
        (0.8, "neighbour"),
        *slow(*((e, against) for e in (0.28, 5 / 13) for against in ("anchor", "neighbour"))),
    ],
)
def test_a_cosine_that_is_epsilon_is_not_above_it(epsilon, against):
    angle = np.arccos(epsilon) * np.arange(2)
    cache = filled(np.stack([np.cos(angle), np.sin(angle)], -1), np.arange(2.0))
    for less, expected in ((0.0, [0, 1]), (1e-5, [1, 1])):
        transform = KVMerger(epsilon=epsilon - less, recent=0, heavy=0, against=against)
        assert plan(transform, cache)[0][:2].tolist() == expected


def test_ties_go_to_the_lower_position():
    """Equal keys and equal attention: the first pairs are merged, into the first token."""
    cache = filled(np.ones((10, 3)), np.ones(10))
    into, weights = plan(KVMerger(budget=7, recent=0, heavy=0), cache)
    assert into[:10].tolist() == [0, 0, 0, 0, 4, 5, 6, 7, 8, 9]
    close(weights[:10], np.ones(10), "exact")  # σ = 0: uniform


def test_zero_keys_are_like_nothing():
    keys = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    into, weights = plan(KVMerger(epsilon=0.0, recent=0, heavy=0), filled(keys, np.arange(4.0)))
    assert into[:4].tolist() == [0, 1, 3, 3]
    assert np.isfinite(weights).all()


def test_pinned_slots_are_passed_over():
    """The worst case for a budget: every second slot is pinned, and it is met all the same."""
    cache = filled(np.ones((8, 3)), np.zeros(8))
    cache = cache.replace(pinned=(cache.position % 2 == 1) & cache.live)
    into = plan(KVMerger(budget=1), cache)[0]
    assert into[:8].tolist() == [0, 1, 0, 3, 0, 5, 0, 7]


@pytest.mark.parametrize(
    ("budget", "length", "recent", "heavy"),
    [
        # As in the paper at 50 % and 35 %, linear between, scaled with the budget outside.
        *((0.5, 1000, 170, 120), (0.35, 1000, 80, 20), (0.425, 1000, 125, 70)),
        *((500, 1000, 170, 120), (0.75, 1000, 255, 180)),
        # 64 of the newest where the paper's share is less, or seven eighths of a smaller budget.
        *((0.25, 1000, 64, 14), (0.1, 1000, 64, 5), (0.1, 512, 44, 2)),
        *((0.5, 60, 26, 1), (8, 500, 7, 0)),
    ],
)
def test_what_stays(budget, length, recent, heavy):
    counts = KVMerger(budget=budget).counts(np.array([length]))
    assert [int(x[0]) for x in counts] == [recent, heavy]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "budget=.*epsilon="),
        ({"budget": 12, "recent": 4, "heavy": 4}, "at least 13"),
        ({"budget": 0.2, "recent": 0.2}, "below"),
        ({"epsilon": 1.1}, "1.1"),
        ({"budget": 8, "against": "anchor"}, "epsilon"),
    ],
    ids=str,
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        KVMerger(**fields)
