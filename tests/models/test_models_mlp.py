"""The MLP reads a long prompt in pieces: the same numbers, a bounded temporary memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import DecoderConfig, RopeConfig
from kvjax.models.blocks import MLP, MLP_TOKENS
from tests.support.tolerances import close

HIDDEN, WIDE = 16, 512
"""Sizes of the residual stream and of the MLP."""


def mlp_of() -> MLP:
    config = DecoderConfig(
        vocab_size=8, hidden_size=HIDDEN, intermediate_size=WIDE, num_layers=1, query_heads=2,
        kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=64,
    )  # fmt: skip
    return MLP(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def reference(mlp: MLP, x: np.ndarray) -> np.ndarray:
    """`down(silu(gate(x)) * up(x))` in float64."""
    gate, up = np.asarray(mlp.gate_up_proj.kernel[...], np.float64).transpose(1, 2, 0)
    down = np.asarray(mlp.down_proj.kernel[...], np.float64).T
    x = x.astype(np.float64)
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


@pytest.mark.parametrize("tokens", [1, MLP_TOKENS, MLP_TOKENS + 1, 2 * MLP_TOKENS + 100])
@pytest.mark.parametrize("batch", [1, 2])
def test_pieces_of_a_prompt_give_what_the_whole_gives(tokens, batch):
    mlp = mlp_of()
    x = np.random.default_rng(0).normal(size=(batch, tokens, HIDDEN)).astype(np.float32)
    close(mlp(jnp.asarray(x)), reference(mlp, x))


def test_temporary_memory_does_not_grow_with_the_width_of_a_long_prompt():
    mlp, tokens = mlp_of(), 16 * MLP_TOKENS
    graph, weights = nnx.split(mlp)
    x = jax.ShapeDtypeStruct((1, tokens, HIDDEN), jnp.float32)
    compiled = jax.jit(lambda weights, x: nnx.merge(graph, weights)(x)).lower(weights, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * WIDE * 4 / 3
