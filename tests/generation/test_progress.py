"""`on_layer`: every layer once and in order, to the call that listens, without changing tokens."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvjax
from kvjax.generation import reading
from kvjax.generation.model import as_functional
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from kvjax.storage.offload import HOST_MEMORY, memory_kinds

LAYERS = 4
MODEL = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=LAYERS, query_heads=4,
    kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=256,
)  # fmt: skip
RNG = np.random.default_rng(5)
RAGGED = [RNG.integers(64, size=size).tolist() for size in (53, 9, 41)]
GROUPS = kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), kvjax.StreamingLLM(16))))
OFFLOADED = kvjax.parse("chain(clusterkv(tokens_per_cluster=8, sinks=4, interval=5), offload)", 36)


@pytest.fixture(scope="module")
def model():
    return random_decoder(MODEL, seed=3)


def generate(model, transform=None, **options):
    return kvjax.generate(model, RAGGED, transform=transform, max_new_tokens=6, **options)


@pytest.mark.parametrize(
    "transform",
    [
        None,
        kvjax.SnapKV(36),
        GROUPS,
        kvjax.PyramidInfer(ratio=0.3, context=6, interval=4),
        kvjax.Quantize(),
        pytest.param(
            OFFLOADED,
            marks=pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no such memory"),
        ),
    ],
    ids=["full", "snapkv", "groups", "pyramidinfer", "quantize", "offload"],
)
@pytest.mark.fast_cases("full")
def test_layers_report_once_in_order_and_change_nothing(model, transform):
    for _ in range(2):  # the listener is not compiled in
        layers = []
        watched = generate(model, transform, on_layer=layers.append)
        assert layers == list(range(LAYERS))
        assert all(type(layer) is int for layer in layers)
    plain = generate(model, transform)
    assert watched.tokens == plain.tokens
    assert watched.cache_bytes == plain.cache_bytes


def test_layers_that_are_alike_share_one_program(model):
    before = reading._read_layer._cache_size()
    generate(model, kvjax.H2O(30), on_layer=print)
    assert reading._read_layer._cache_size() == before + 1
    compiled = []
    generate(model, kvjax.H2O(30), on_layer=[].append, on_compile=compiled.append)
    assert reading._read_layer._cache_size() == before + 1
    assert compiled == [
        "the caches", "the embedding", "the prompt pass of layer 1 of 4", "the logits",
        "the choice of a token", "the decode loop",
    ]  # fmt: skip


def test_a_model_without_parts_reports_at_the_end(model):
    functional = dataclasses.replace(as_functional(model), parts=None)
    layers = []
    opaque = generate(functional, kvjax.SnapKV(36), on_layer=layers.append)
    assert layers == list(range(LAYERS))
    assert opaque.tokens == generate(model, kvjax.SnapKV(36)).tokens


class Refused(Exception):
    pass


def test_a_listener_belongs_to_its_call(model):
    """Calls of two threads at a time, of which every other one's listener raises."""
    generate(model, on_layer=[].append)  # compiled
    both = threading.Barrier(2, timeout=60)

    def call(number: int):
        seen = []

        def on_layer(layer: int) -> None:
            seen.append((layer, number))
            if number % 2 and layer == 1:
                raise Refused(number)

        both.wait()
        try:
            return seen, generate(model, on_layer=on_layer).tokens
        except Refused as error:
            return seen, error.args

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(call, range(12)))
    expected = generate(model).tokens
    for number, (seen, result) in enumerate(found):
        if number % 2:
            assert seen == [(0, number), (1, number)] and result == (number,)
        else:
            assert seen == [(layer, number) for layer in range(LAYERS)] and result == expected


def test_a_listener_may_interrupt(model):
    """As Ctrl-C does, wherever Python happens to be."""

    def on_layer(layer: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, on_layer=on_layer)
