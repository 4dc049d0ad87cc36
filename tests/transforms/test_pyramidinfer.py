"""PyramidInfer against its reference, in every layer: kept and passed tokens, outputs, budgets."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CaM, Every, KVCrush, PyramidInfer, SnapKV, bind, chain
from kvjax.kit import Extent
from kvjax.transforms.pyramidinfer.schedule import CosineBudget, TokensEntering
from tests.references import pyramidinfer as reference
from tests.references.budgets import rows_budget
from tests.support.attending import Tokens, one_layer, right, run
from tests.support.marks import some_slow
from tests.support.method_pair import LENGTHS, Pair

LAYERS = 4
kept_tokens = jax.jit(kvjax.kept_tokens)
PAPER = {"context": 6, "interval": 6}
SHARE = {"budget": 0.5, "interval": 6}


class PyramidPair(Pair):
    """A reference per row, whose heads decide together; what goes on is compared too."""

    def expected_kept(self, row):
        return [self.of_rows[row].kept] * self.kv_heads

    def _prompt_chunk(self, positions, last):
        super()._prompt_chunk(positions, last)
        if last:
            passed = [[p for p in row if p >= 0] for row in kept_tokens(self.cache).tolist()]
            for row, own in enumerate(self.of_rows):
                if (positions[row] >= 0).any():
                    assert passed[row] == own.passed


def pair(layer=3, num_layers=LAYERS, *, attention=None, heads=(2, 2), seed=0, **method):
    """`attention` has its options: its sinks are not PyramidInfer's."""
    chosen = {"budget": None, **method}

    def row(sinks=None, **options):
        return reference.PyramidInfer(
            layer=layer, num_layers=num_layers, kv_heads=heads[0], learned_sinks=sinks,
            **chosen, **options,
        )  # fmt: skip

    return PyramidPair(
        bind(PyramidInfer(**method), num_layers)[layer], row, whole_rows=True, heads=heads,
        seed=seed, layer=layer, **(attention or {}),
    )  # fmt: skip


CASES = {
    **{f"paper, layer {layer}": {"layer": layer, **PAPER} for layer in range(LAYERS)},
    "share, layer 0": {"layer": 0, **SHARE},
    # The second of three layers with the same room.
    "one of a kind": {"layer": 1, "num_layers": 9, **PAPER},
    "one of a kind, share": {"layer": 1, "num_layers": 9, **SHARE},
    "one head": {"layer": 1, "heads": (1, 4), **PAPER},
    "smallest": {"budget": 10, "interval": 4},
    "generated tokens wait until it is full": {"budget": 40, "interval": 16},
    "no sinks": {"budget": 12, "sinks": 0, "newest": 0.5, "emphasis": 3.0, "interval": None},
    "few": {"context": 4, "ratio": 0.3, "newest": 0.1, "interval": 3},
    "soft cap": {"attention": {"scale": 0.9, "window": 20, "soft_cap": 2.5}, **SHARE},
    "sinks": {"attention": {"sinks": np.array([0.5, 6.0, -2.0, 3.0])}, **SHARE},
}


@pytest.mark.parametrize("name", some_slow(CASES, "paper, layer 3"))
def test_prompt_and_64_decode_steps(name):
    pair(**CASES[name]).prompt(LENGTHS, "scattered").decode(64)


# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 2, 32])
@pytest.mark.parametrize("context", [64, 0, 7])
def test_tokens_that_enter_each_layer(num_layers, context):
    lengths = np.arange(1, 400)
    expected = np.array([reference.entering(n, num_layers, context=context) for n in lengths])
    got = TokensEntering(0.2, 0.9, context, num_layers)(lengths)
    np.testing.assert_array_equal(got, expected.T)


@pytest.mark.parametrize("num_layers", [1, 3, 32])
@pytest.mark.parametrize("budget", [10, 37, 0.1, 0.9, 1.0])
def test_layer_budgets_add_up(budget, num_layers):
    lengths = np.arange(1, 200)
    mean = [rows_budget(budget, int(n), 10) for n in lengths]
    got = CosineBudget(budget, 10, num_layers)(lengths).T
    expected = [
        reference.layer_shares(b, int(n), num_layers) for b, n in zip(mean, lengths, strict=True)
    ]
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got.sum(1), num_layers * np.array(mean))
    assert (got[lengths >= 10].min() >= 5).all()  # half of the smallest average


def test_generated_tokens_that_stay():
    layers = bind(PyramidInfer(), 32)
    kept = [layer.kept[number % 8] for number, layer in enumerate(layers)]
    assert kept == [reference.kept_of_a_block(layer, 32) for layer in range(32)]
    assert kept[0] == 14 and kept[-1] == 1


# --- composition ----------------------------------------------------------------------------------


def caches_of(tx, layer=1, steps=12):
    """After a prompt of 32 tokens, and after each of some steps."""
    positions = right([0], [32], 32)
    return run(one_layer(tx, layer), Tokens.random(rows=1), positions, steps).all_caches


def live(cache):
    return np.asarray(cache.kv.live).sum(-1).tolist()


@pytest.mark.slow
def test_after_an_evictor_whose_heads_differ():
    caches = caches_of(chain(SnapKV(24, window=4), PyramidInfer(budget=12, interval=4)))
    assert live(caches[0]) == [[12, 12]]
    assert all((np.asarray(c.kv.dropped) == 0).all() for c in caches)
    first, second = (set(row.tolist()) - {-1} for row in np.asarray(caches[0].kv.position[0]))
    assert first != second
    kept = {int(p) for p in kept_tokens(caches[0])[0] if p >= 0}
    assert kept == first & second and 31 in kept


@pytest.mark.slow
def test_under_wrappers():
    plain = PyramidInfer(budget=12, interval=None)
    assert live(caches_of(Every(plain, steps=4))[-1]) == [[12, 12]]
    with pytest.raises(ValueError, match="does nothing while decoding"):
        bind(Every(PyramidInfer(budget=12), steps=4), 2)
    tx = PyramidInfer(budget=12, interval=4)
    alone, merged = (caches_of(tx)[-1] for tx in (tx, CaM(tx, prompt=True)))
    assert live(merged) == live(alone)


def test_what_goes_on_to_the_next_layer():
    """A wrapper or a later part that decides for its own cache keeps no token from others."""
    layer, extent = bind(PyramidInfer(), 4)[2], Extent(4096, 10)
    passed = reference.entering(4096, 4)[3]
    assert layer.extent(extent).passed == passed
    assert bind(PyramidInfer(budget=64), 4)[2].extent(extent).passed is None
    assert CaM(layer).extent(extent).passed == passed
    assert chain(layer, SnapKV(20, window=4)).extent(extent).passed is None
    assert KVCrush(layer, 8).extent(extent).passed is None
    prompt_alone = bind(PyramidInfer(interval=None), 4)[2]
    assert prompt_alone.extent(extent).passed == passed
    assert Every(prompt_alone, 8).extent(extent).passed is None


def test_kept_tokens_of_head_groups():
    tx = kvjax.HeadGroups((((1,), kvjax.StreamingLLM(8)), ((0,), kvjax.StreamingLLM(6))))
    cache = run(tx, Tokens.random(rows=2), right([0, 0], [12, 3], 12), 0).prompt_cache
    kept = [[p for p in row if p >= 0] for row in kept_tokens(cache).tolist()]
    assert kept == [[0, 1, 2, 3, 10, 11], [0, 1, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 9}, "at least 10 .*got 9"),
        ({"ratio": 1.1}, "ratio must lie in .*got 1.1"),
        ({"context": -1}, "context must be at least 4, got -1"),
    ],
    ids=str,
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PyramidInfer(**changes)
