"""Layers that differ in their transforms alone share the program that reads a prompt."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.compiled_code import clear_compiled_functions
from kvjax.generation import observe, prompt_pass
from kvjax.generation.compiler import Compiler
from kvjax.models import random_decoder
from tests.generation.test_generate import CONFIG, RAGGED
from tests.generation.test_read_once import equal
from tests.support.marks import some_slow

LAYERS = 4
SIZES = {"max_prompt": 64, "max_new": 32}
SHARES = np.random.default_rng(5).dirichlet(np.full(8, 0.5)).reshape(LAYERS, 2, 1) * 4
PROFILE = kvjax.kit.HeadProfile(np.concatenate((np.minimum(SHARES, 1), np.ones_like(SHARES)), -1))
LAYERED = {
    "pyramidkv": kvjax.PyramidKV(24, window=4),
    "spindlekv": kvjax.SpindleKV(0.6, window=8, interval=4),
    "unfolded": kvjax.LayerBudgetEviction(0.6, window=8, unfold=True),
    "pyramidinfer": kvjax.PyramidInfer(budget=24),
    "full layers": kvjax.ClusterKV(24, tokens_per_cluster=8, sinks=4, dense_layers=(0, 2)),
    "8 bits": kvjax.chain(kvjax.PyramidKV(24, window=4), kvjax.Quantize(8)),
    "by head": kvjax.ByHead(kvjax.SnapKV(0.4, window=4), PROFILE),
    "by head in 8 bits": kvjax.ByHead(
        kvjax.chain(kvjax.SnapKV(0.5, window=4), kvjax.Quantize(8)), PROFILE
    ),
    "by head with a codebook": kvjax.ByHead(
        kvjax.chain(kvjax.SnapKV(0.5, window=4), kvjax.Codebook()), PROFILE
    ),
    "by head again": kvjax.ByHead(kvjax.Every(kvjax.SnapKV(0.4, window=4), steps=4), PROFILE),
    "recall by head": kvjax.chain(
        kvjax.ByHead(kvjax.SnapKV(0.6, window=4), PROFILE), kvjax.Quest(12, page=4)
    ),
    "head groups": kvjax.HeadGroups((((1,), kvjax.PyramidKV(24, 4)), ((0,), kvjax.H2O(20)))),
}


@functools.cache
def model():
    return random_decoder(dataclasses.replace(CONFIG, num_layers=LAYERS), seed=3)


def read(transform, prompts=RAGGED, **options):
    return kvjax.read(model(), prompts, transform=transform, **SIZES, **options)


def programs() -> tuple[int, int]:
    return prompt_pass._read_layer._cache_size(), observe.compress_layer._cache_size()


# Their parts are in other cases; they run before a release.
LONG = {
    "spindlekv", "pyramidkv", "8 bits", "by head with a codebook", "by head again", "head groups",
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(LAYERED, exhaustive=LONG))
def test_a_shared_reading_gives_the_caches_that_each_layer_reads_alone(name, monkeypatch):
    monkeypatch.setattr(observe, "FEWEST", 2)
    clear_compiled_functions()  # other tests may have read the same prompt
    transform = LAYERED[name]
    shared = read(transform)
    assert programs()[1] > 0
    monkeypatch.setattr(prompt_pass, "observers_of", lambda *args: [None] * LAYERS)
    after = programs()
    equal(shared, read(transform))
    assert programs()[1] == after[1]


@pytest.mark.slow
def test_one_program_reads_and_one_for_each_capacity_compresses():
    clear_compiled_functions()  # other tests may have read the same prompt
    transform, compiled = kvjax.PyramidKV(20, window=3), []
    first = read(transform, on_compile=compiled.append)
    assert len({cache.kv.slots for cache in first.caches}) > 1
    assert programs() == (1, LAYERS)
    assert [name for name in compiled if "layer" in name] == [
        "the prompt pass of layer 1 of 4",
        *(f"the compression of layer {number} of 4" for number in range(1, 5)),
    ]
    other = [row[::-1] for row in RAGGED]
    read(transform, other)
    assert programs() == (1, LAYERS)
    alike = read(kvjax.SnapKV(20))  # one transform: one program
    assert len({cache.kv.slots for cache in alike.caches}) == 1
    assert programs() == (2, LAYERS)


@pytest.mark.parametrize(
    "transform", [kvjax.PyramidInfer(ratio=0.3, context=6), LAYERED["full layers"]], ids=repr
)
def test_what_drops_hidden_states_and_two_transforms_read_alone(transform):
    clear_compiled_functions()
    read(transform)
    assert programs()[1] == 0


def test_no_layer_holds_what_it_has_read(monkeypatch):
    """When a layer is through, its whole prompt's keys and values are gone."""
    shape = (len(RAGGED), CONFIG.kv_heads, SIZES["max_prompt"], CONFIG.head_dim)
    before_compressing, after_layers = [], []

    def count(counts: list[int]) -> None:
        counts.append(sum(x.shape == shape for x in jax.live_arrays()))

    decide_layer = prompt_pass.decide_layer

    def counted(*args):
        if isinstance(args[-1], Compiler):  # and not a `Tracer`
            count(before_compressing)
        return decide_layer(*args)

    monkeypatch.setattr(prompt_pass, "decide_layer", counted)
    start = sum(x.shape == shape for x in jax.live_arrays())
    read(LAYERED["pyramidkv"], on_layer=lambda layer: count(after_layers))
    assert before_compressing == [start + 2] * LAYERS  # keys and values of the layer at work
    assert after_layers == [start] * LAYERS


@pytest.mark.parametrize("long_prompt, calls", [(40, LAYERS), (10_000, 0)])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU has memory of its own")
def test_freed_memory_is_given_back_after_each_layer_of_a_long_prompt(
    long_prompt, calls, monkeypatch
):
    given_back = []
    monkeypatch.setattr(prompt_pass, "LONG_PROMPT", long_prompt)
    monkeypatch.setattr(prompt_pass, "give_back_freed", lambda: given_back.append(1))
    read(kvjax.Full())
    assert len(given_back) == calls
