"""What enters a layer reaches the probes that ask for it, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation.compiler import Compiler
from kvjax.generation.model import as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.turns import Start, first_turn
from kvjax.kit import Inputs, Needs, Probe
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from tests.support.tolerances import close

PROMPTS = [[5, 9, 2, 7, 1, 30], [3, 8, 4]]


@dataclasses.dataclass(frozen=True)
class Noted(Probe):
    """Notes what enters a layer, in one chunk."""

    inputs: ClassVar[bool] = True

    def read(self, record, chunk):
        states, norm = chunk.inputs
        rows = {"states": states, "norm": norm, "position": chunk.positions}
        return dataclasses.replace(record, rows=rows)


@dataclasses.dataclass(frozen=True)
class Notes(kvjax.KVTransform):
    """Keeps everything, and asks for what enters its layers."""

    needs = property(lambda self: Needs(probe=Noted()))


@pytest.mark.parametrize("parts", [True, False])
def test_a_probe_notes_what_enters_each_layer(parts):
    """The first layer's states are normed embeddings, and the norm is that of the embeddings."""
    model = random_decoder(DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4,
        kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128,
    ))  # fmt: skip
    functional = as_functional(model)
    if not parts:
        functional = dataclasses.replace(functional, parts=None)
    layers = (Notes(),) * 2
    size = CacheSize.of(functional, 2, 8, 0, np.float32, 8)
    context = first_turn(
        functional, PROMPTS, Start(Notes(), layers, size, [8, 8]), Compiler(), last=False
    )
    first, second = (reading.record.rows for reading in context.caches)
    embeddings = np.asarray(model.embed(jnp.arange(64)), np.float64)
    for row, prompt in enumerate(PROMPTS):
        there = np.asarray(first["position"][row]) >= 0
        x = embeddings[prompt]
        close(first["norm"][row][there], np.linalg.norm(x, axis=-1))
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.norm_eps)
        weight = np.asarray(model.layers[0].attention_norm.scale[...], np.float64)
        close(first["states"][row][there], x / scale * weight)
        assert np.abs(np.asarray(second["states"][row] - first["states"][row])[there]).max() > 0.01


def call(transform, inputs, phase="prompt"):
    cache = kvjax.init_cache(transform, batch=1, kv_heads=2, head_dim=4, max_prompt=8, max_new=2)
    x = jnp.ones((1, 2, 3, 4))
    return kvjax.attend(cache, x, x, x, [[0, 1, 2]], phase=phase, inputs=inputs)


def test_inputs_are_ignored_where_nobody_asks():
    wrong = Inputs(jnp.ones((7, 7, 7)), jnp.ones(7))
    out, cache = call(kvjax.Full(), wrong)
    plain, same = call(kvjax.Full(), None)
    for x, y in zip(jax.tree.leaves((out, cache)), jax.tree.leaves((plain, same)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (None, TypeError, "give attend inputs=kvjax.kit.Inputs.*got NoneType"),
        (Inputs(jnp.ones((1, 3))), ValueError, "inputs must be .B, T, C. and .B, T."),
        (Inputs(jnp.ones((1, 2, 5))), ValueError, "for .1, 3. tokens"),
        (Inputs(jnp.ones((1, 3, 5)), jnp.ones((1, 4))), ValueError, "for .1, 3. tokens"),
    ],
)
def test_inputs_that_are_missing_or_do_not_fit(inputs, error, message):
    with pytest.raises(error, match=message):
        call(Notes(), inputs)
