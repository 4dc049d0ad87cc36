"""The decoder: which logits it computes, what it refuses, and a real model."""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

import kvjax
from kvjax.models import DecoderConfig, RopeConfig, from_pretrained, random_decoder
from tests.support.hf_models import Stepper
from tests.support.tolerances import close


def small_config(**changes) -> DecoderConfig:
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
        "query_heads": 4, "kv_heads": 2, "head_dim": 8, "rope": RopeConfig(rotary_dim=8),
        "max_positions": 64,
    }  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})


@pytest.mark.slow
def test_logits_only_where_they_are_wanted():
    model = random_decoder(small_config(tie_embeddings=True))
    tokens = np.random.default_rng(3).integers(0, 97, (2, 10))
    positions = np.stack([np.arange(10), np.r_[np.arange(7), -1, -1, -1]])
    everywhere = Stepper(model, 2, 10, 1)(tokens, positions, "prompt")
    step = Stepper(model, 2, 10, 1)
    at = [[9, 0], [6, 3]]
    wanted = step(tokens, positions, "prompt", logits_at=at)
    expected = np.take_along_axis(everywhere, np.array(at)[:, :, None], 1)
    close(wanted, expected)
    traced = jax.make_jaxpr(partial(step._run, phase="prompt"))(
        step.state, jnp.asarray(tokens), jnp.asarray(positions), step.caches, jnp.asarray(at)
    )
    assert "2,2,97" in str(traced)
    assert "2,10,97" not in str(traced)


def test_seeds_decide_random_weights():
    config = small_config()
    first, same, other = (random_decoder(config, seed) for seed in (0, 0, 1))
    leaves = [jax.tree.leaves(nnx.state(model)) for model in (first, same, other)]
    assert all((a == b).all() for a, b in zip(leaves[0], leaves[1], strict=True))
    assert any((a != b).any() for a, b in zip(leaves[0], leaves[2], strict=True))
    assert all(leaf.dtype == jnp.float32 for leaf in leaves[0])


@functools.cache
def small_step() -> Stepper:
    return Stepper(random_decoder(small_config()), 1, 3, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": jnp.zeros((1, 2), jnp.int32)}, r"tokens and positions .* \(1, 3\)"),
        ({"tokens": jnp.zeros((3,), jnp.int32)}, "tokens and positions must have one shape"),
        ({"caches": ()}, "caches must have 2 entries, got 0"),
        ({"layers": kvjax.bind(kvjax.Full(), 1)}, "layers must have 2 entries, got 1"),
        ({"logits_at": jnp.zeros((1,), jnp.int32)}, r"logits_at must have the shape \[1, N\]"),
        ({"logits_at": jnp.zeros((2, 1), jnp.int32)}, r"logits_at must have the shape \[1, N\]"),
    ],
)
def test_wrong_calls_are_refused(changes, message):
    step = small_step()
    model = nnx.merge(step.graphdef, step.state)
    call = {
        "tokens": jnp.zeros((1, 3), jnp.int32), "positions": jnp.arange(3)[None],
        "caches": step.caches, "layers": step.layers, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        model(**call, phase="prompt")


def test_what_is_no_cache_is_refused():
    """Of any layer, before anything is computed."""
    step = small_step()
    model, (first, second) = nnx.merge(step.graphdef, step.state), step.caches
    ids = jnp.zeros((1, 1), jnp.int32)
    for wrong, named in (
        (None, "NoneType"),
        ((), "a tuple of nothing"),
        (jnp.zeros(3), "ArrayImpl"),
        ((jnp.zeros(3), None), "a tuple of ArrayImpl, NoneType"),
        (((second,),), "a tuple of tuple"),
        ([second], "list"),
        (second.kv, "KVCache"),
    ):
        with pytest.raises(TypeError, match=f"layer 1 takes a cache from init_cache, got {named}$"):
            model(ids, ids, (first, wrong), layers=step.layers, phase="decode")
    # The cache or the method of one layer, in place of a tuple of all.
    for wrong in ({"caches": first}, {"layers": step.layers[0]}, {"layers": None}):
        [(name, value)] = wrong.items()
        with pytest.raises(
            TypeError, match=f"{name} must be a tuple, .* got {type(value).__name__}"
        ):
            model(
                ids, ids, **{"caches": step.caches, "layers": step.layers, **wrong}, phase="prompt"
            )


def test_real_checkpoint_has_the_known_likelihood(data_dir):
    """The figure of `transformers` and of an independent NumPy forward pass."""
    folder = data_dir / "tinystories-656k"
    # The file's own tokenizer: the class that `transformers` 5 rebuilds from it drops <unk>.
    text = (data_dir / "text" / "tinystories_sample.txt").read_text(encoding="utf-8")
    tokens = np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:512])
    step = Stepper(from_pretrained(folder), 1, 512, 1)
    logits = step(tokens[None], np.arange(512)[None], "prompt")[0]
    logits = logits.astype(np.float64)
    most = logits.max(-1, keepdims=True)
    logits = logits - most - np.log(np.exp(logits - most).sum(-1, keepdims=True))
    chosen = logits[np.arange(511), tokens[1:]]
    assert -float(chosen.mean()) == pytest.approx(4.1696, abs=1e-4)
