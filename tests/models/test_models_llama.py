"""Llama and Mistral against `transformers`, in float32."""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

import kvjax
from kvjax.models import DecoderConfig, RopeConfig, from_pretrained, random_decoder
from kvjax.models.rope_scaling import make_rope
from tests.support.hf_models import (
    LENGTHS,
    SIZES,
    Stepper,
    both_logits,
    pytorch,
    reference_logits,
    save_reference,
)
from tests.support.tolerances import close

THETA = {"rope_theta": 1000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
CASES = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "head_dim": {"head_dim": 16, "rms_norm_eps": 1e-3},
    "theta": {"rope_parameters": {"rope_type": "default", **THETA}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, **THETA}},
    # The context of 16 lies inside the longest prompt.
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA},
        "max_position_embeddings": 16,
    },
    # One wavelength is kept, one lies on the ramp, two are stretched.
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 100.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
}


@pytest.fixture(scope="module", params=CASES)
def runs(request, tmp_path_factory):
    """Ours, one padded batch, and the reference, each row alone: `[(prompt, new)]` per row."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_reference(folder, **CASES[request.param])
    return both_logits(from_pretrained(folder), reference)


@pytest.mark.parametrize("row", range(len(LENGTHS)), ids=("full", "right", "left", "middle"))
def test_prompt_matches_transformers(runs, row):
    ours, theirs = runs
    assert theirs[row][0].std() > 0.5
    close(ours[row][0], theirs[row][0])


@pytest.mark.parametrize("row", range(len(LENGTHS)), ids=("full", "right", "left", "middle"))
def test_decoding_matches_transformers(runs, row):
    ours, theirs = runs
    close(ours[row][1], theirs[row][1])


def test_every_token_through_the_cache(tmp_path):
    """From the second token on nothing but decode steps, against the whole prompt at once."""
    reference = save_reference(tmp_path)
    tokens = np.random.default_rng(2).integers(0, SIZES["vocab_size"], 12)
    step = Stepper(from_pretrained(tmp_path), 1, 1, 11)
    logits = [step([[tokens[0]]], [[0]], "prompt")]
    logits += [step([[tokens[t]]], [[t]], "decode") for t in range(1, 12)]
    expected = reference_logits(reference, tokens, 12)
    close(np.concatenate(logits, 1)[0], expected)


@pytest.mark.parametrize(
    ("theta", "parameters"),
    [
        (10000.0, {"rope_type": "default"}),
        (500000.0, {"rope_type": "default"}),
        (10000.0, {"rope_type": "linear", "factor": 4.0}),
        (500000.0, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}),
        (500000.0, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_inverse_frequencies_of_published_sizes(theta, parameters, head_dim):
    """To the last bits: at position 100,000 a relative error of 1e-6 would be 0.1 radians."""
    config = LlamaConfig(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    kind = parameters["rope_type"]
    pytorch()
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, _ = (default if kind == "default" else ROPE_INIT_FUNCTIONS[kind])(config)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    rope = RopeConfig(
        rotary_dim=head_dim,
        theta=theta,
        type=kind,
        original_max_positions=parameters.get("original_max_position_embeddings"),
        **{name: parameters[name] for name in names if name in parameters},
    )
    ours = np.asarray(make_rope(rope, 1).inv_freq)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("length", [1, 4096, 4097, 9000, 16384])
def test_dynamic_frequencies_follow_the_length(length):
    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    pytorch()
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    rope = RopeConfig(rotary_dim=128, type="dynamic", factor=4.0, original_max_positions=4096)
    frequencies = np.asarray(make_rope(rope, length).inv_freq)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
    plain = np.asarray(make_rope(RopeConfig(rotary_dim=128), length).inv_freq)
    assert (frequencies == plain).all() == (length <= 4096)


def small_config(**changes) -> DecoderConfig:
    given = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "rope": RopeConfig(rotary_dim=8),
        "max_positions": 64,
    }
    return DecoderConfig(**{**given, **changes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_logits_only_where_they_are_wanted(tied):
    model = random_decoder(small_config(tie_embeddings=tied))
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


def test_attributes_that_generation_reads():
    expected = {
        "num_layers": 1,
        "query_heads": 8,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "max_positions": 77,
    }
    model = random_decoder(small_config(max_positions=77, query_heads=8, num_layers=1))
    assert {name: getattr(model, name) for name in expected} == expected


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
    given = {
        "tokens": jnp.zeros((1, 3), jnp.int32),
        "positions": jnp.arange(3)[None],
        "caches": step.caches,
        "layers": step.layers,
        "logits_at": None,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        model(
            given["tokens"],
            given["positions"],
            given["caches"],
            layers=given["layers"],
            phase="prompt",
            logits_at=given["logits_at"],
        )


@pytest.mark.parametrize("phase", ["prompt", "decode"])
@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        (None, "NoneType"),
        ((), "a tuple of nothing"),
        (jnp.zeros(3), "ArrayImpl"),
        ((jnp.zeros(3), None), "a tuple of ArrayImpl, NoneType"),
        ({}, "dict"),
        ("nested", "a tuple of tuple"),
        ("list", "list"),
        ("slots", "KVCache"),
    ],
)
def test_what_is_no_cache_is_refused(wrong, given, phase):
    """Of any layer, before anything is computed."""
    step = small_step()
    model, (first, second) = nnx.merge(step.graphdef, step.state), step.caches
    if isinstance(wrong, str):
        wrong = {"nested": ((second,),), "list": [second], "slots": second.kv}[wrong]
    ids = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(TypeError, match=f"layer 1 takes a cache from init_cache, got {given}$"):
        model(ids, ids, (first, wrong), layers=step.layers, phase=phase)


@pytest.mark.parametrize("name", ["caches", "layers"])
def test_what_is_no_tuple_is_refused(name):
    """Such as the cache or the method of one layer."""
    step = small_step()
    model, ids = nnx.merge(step.graphdef, step.state), jnp.zeros((1, 1), jnp.int32)
    given = {"caches": step.caches, "layers": step.layers}
    for wrong in (given[name][0], None):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"{name} must be a tuple, .* got {kind}"):
            model(ids, ids, **{**given, name: wrong}, phase="prompt")


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
