"""`on_layer`: every layer once and in order, to the call that listens, without changing tokens."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.generation import reading
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
PYRAMIDINFER = kvjax.PyramidInfer(ratio=0.3, context=6, interval=4)
OFFLOADED = [
    kvjax.parse("chain(clusterkv(tokens_per_cluster=8, sinks=4, interval=5), offload)", 36)
]
if HOST_MEMORY not in memory_kinds():
    OFFLOADED.clear()


@pytest.fixture(scope="module")
def model():
    return random_decoder(MODEL, seed=3)


def generate(model, transform=None, **options):
    return kvjax.generate(model, RAGGED, transform=transform, max_new_tokens=6, **options)


@pytest.mark.parametrize(
    "transform",
    [
        None,
        *(
            pytest.param(transform, marks=pytest.mark.slow)
            for transform in (GROUPS, PYRAMIDINFER, *OFFLOADED)
        ),
    ],
)
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
