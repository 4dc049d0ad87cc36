"""Configurations of families: real sizes, both formats of their options, and what is refused."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvjax.models import Decoder, DecoderConfig, LayerConfig, RopeConfig, read_config
from kvjax.models.families import FAMILIES
from kvjax.models.rope_scaling import make_rope
from tests.support.hf_models import pytorch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def read(tmp_path):
    """Reads a configuration given as a dictionary."""

    def read(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)

    return read


def parameters(config: DecoderConfig) -> int:
    """How many numbers a decoder has; nothing is allocated."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


# Of the files in the data folder, as their publishers count them.
PUBLISHED = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2-7B-Instruct": 7_615_616_512,
    "glm-4-9b-chat.chatglm": 9_399_951_360,
    "GlmForCausalLM.defaults": 9_399_951_360,
}
FAST = ("Phi-3-mini-4k-instruct", "Qwen2-7B-Instruct", "glm-4-9b-chat.chatglm")


def published(data_dir, name: str) -> dict:
    ending = "" if name.endswith(".defaults") else ".config"
    raw = json.loads((data_dir / "hf_configs" / f"{name}{ending}.json").read_text())
    raw.pop("quantization_config", None)
    return raw


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.fast_cases(*FAST)
def test_published_files_have_their_published_size(data_dir, read, name):
    assert parameters(read(published(data_dir, name))) == PUBLISHED[name]


def test_no_published_file_is_left_out(data_dir):
    names = {path.name for path in (data_dir / "hf_configs").glob("*.json")}
    known = {f"{name}{'' if name.endswith('.defaults') else '.config'}.json" for name in PUBLISHED}
    assert {name for name in names if "tensor_names" not in name} == known


# Sizes of further models as their cards and files give them: vocabulary, width, MLP, layers, query
# heads, KV heads.
OTHERS = {
    "qwen3 0.6B": ((151936, 1024, 3072, 28, 16, 8), {"tie_word_embeddings": True}, 596_049_920),
    "glm4 9B": ((151552, 4096, 13696, 40, 32, 2), {"head_dim": 128}, 9_400_279_040),
    "phi3 Phi-4-mini": (
        (200064, 3072, 8192, 32, 24, 8), {"tie_word_embeddings": True}, 3_836_021_760,
    ),
    "gemma2 2B": ((256000, 2304, 9216, 26, 8, 4), {}, 2_614_341_888),
    "gemma3_text 1B": ((262144, 1152, 6912, 26, 4, 1), {}, 999_885_952),
    "smollm3 3B": ((128256, 2048, 11008, 36, 16, 4), {}, 3_075_098_624),
    "olmo2 7B": ((100352, 4096, 11008, 32, 32, 32), {}, 7_298_617_344),
    "ministral 8B": ((131072, 4096, 12288, 36, 32, 8), {"head_dim": 128}, 8_019_808_256),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.fast_cases("gemma3_text 1B")
def test_published_sizes(read, name):
    sizes, more, expected = OTHERS[name]
    raw = {**dict(zip(list(SIZES)[:6], sizes, strict=True)), **more}
    assert parameters(read({"model_type": name.split()[0], **raw})) == expected


def test_published_glm_4(data_dir, read):
    config = read(published(data_dir, "glm-4-9b-chat.chatglm"))
    assert config.rope == RopeConfig(rotary_dim=64, theta=5e6, interleaved=True)
    assert (config.query_heads, config.kv_heads, config.head_dim) == (32, 2, 128)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert (config.max_positions, config.norm_eps) == (131072, 1.5625e-7)
    assert config.eos_token_ids == (151329, 151336, 151338)
    assert not config.tie_embeddings
    defaults = read(published(data_dir, "GlmForCausalLM.defaults"))
    assert defaults.rope == RopeConfig(rotary_dim=64, interleaved=True)


def test_published_qwen2_has_no_window(data_dir, read):
    config = read(published(data_dir, "Qwen2-7B"))
    assert config.sliding_window is None and not config.layers
    assert config.rope == RopeConfig(rotary_dim=128, theta=1e6)
    assert (config.attention_bias, config.output_bias) == (True, False)


def test_published_phi3_has_one_window(data_dir, read):
    config = read(published(data_dir, "Phi-3-mini-4k-instruct"))
    assert config.sliding_window == 2047 and not config.layers
    assert config.rope == RopeConfig(rotary_dim=96)


def windows(config: DecoderConfig) -> list[int | None]:
    return [config.layer(index).window for index in range(config.num_layers)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "qwen2"}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
         [None, None, None, 4096]),
        ({"model_type": "qwen2", "use_sliding_window": True}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None,
          "max_window_layers": 0}, [None] * 4),
        ({"model_type": "gemma2"}, [4096, None, 4096, None]),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 2},
         [9, None, 9, None]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 7}, [4096] * 5 + [None, 4096]),
        ({"model_type": "olmo3"}, [4096] * 3 + [None]),
        ({"model_type": "ministral"}, [4096] * 4),
        ({"model_type": "ministral", "sliding_window": None}, [None] * 4),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 5},
         [None] * 3 + [5]),
    ],
)  # fmt: skip
def test_windows_of_layers(read, raw, expected):
    assert windows(read({**SIZES, **raw})) == expected


def test_layers_without_positions(read):
    config = read({**SIZES, "model_type": "smollm3"})
    rope = RopeConfig(rotary_dim=8, theta=2e6)
    assert [config.layer(i).rope for i in range(4)] == [rope, rope, rope, None]
    assert config.tie_embeddings
    config = read({**SIZES, "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0, 1]})
    assert [config.layer(i).rope is None for i in range(4)] == [True, False, False, True]


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5000.0, "rope_local_base_freq": 500.0, "rope_scaling": LINEAR},
        {"rope_local_base_freq": 500.0, "rope_parameters": {**LINEAR, "rope_theta": 5000.0}},
        {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ],
)
def test_formats_of_ropes_by_layer_type(read, raw):
    config = read({**SIZES, "model_type": "gemma3_text", "head_dim": 8, **raw})
    assert config.rope == RopeConfig(rotary_dim=8, theta=5000.0, type="linear", factor=8.0)
    assert config.layer(0).rope == RopeConfig(rotary_dim=8, theta=500.0)


def test_olmo3_stretches_the_layers_without_a_window_alone(read):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    config = read({**SIZES, "model_type": "olmo3", "rope_theta": 1e5, "rope_scaling": yarn})
    plain = RopeConfig(rotary_dim=8, theta=1e5)
    assert [config.layer(i).rope for i in range(3)] == [plain] * 3
    assert config.layer(3).rope == config.rope
    assert (config.rope.type, config.rope.theta, config.max_positions) == ("yarn", 1e5, 128)


def test_names_of_longrope(read):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2, 3.0, 4.0, 5.0]}
    for kind in ("longrope", "su", "yarn"):
        raw = {**SIZES, "model_type": "phi3", "rope_scaling": {"type": kind, **factors}}
        rope = read({**raw, "original_max_position_embeddings": 16}).rope
        assert (rope.type, rope.factor, rope.original_max_positions) == ("longrope", 4.0, 16)
        assert rope.long_factors == (2, 3.0, 4.0, 5.0)


def test_a_part_of_the_channels_is_rotated(read):
    raw = {**SIZES, "model_type": "phi3", "hidden_size": 64, "partial_rotary_factor": 0.75}
    assert read(raw).rope.rotary_dim == 12
    inside = {**raw, "partial_rotary_factor": None, "rope_parameters": {"rope_theta": 9.0}}
    inside["rope_parameters"]["partial_rotary_factor"] = 0.5
    assert read(inside).rope == RopeConfig(rotary_dim=8, theta=9.0)


def test_positions_of_stretched_contexts(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read({**SIZES, "model_type": "qwen2", "rope_scaling": yarn}).max_positions == 256
    given = {**SIZES, "model_type": "qwen2", "max_position_embeddings": 512, "rope_scaling": yarn}
    assert read(given).max_positions == 512


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported: mixtures of experts are not"),
        ({"model_type": "qwen3_moe"}, "mixtures of experts are not supported; supported: llama"),
        ({"model_type": "new", "num_local_experts": 8}, "'new' .*: mixtures of experts are not"),
        ({"model_type": "qwen3_next"}, "linear attention and state spaces are not supported"),
        ({"model_type": "mamba2"}, "linear attention and state spaces are not supported"),
        ({"model_type": "gemma3", "text_config": {}}, "images and sound .*gemma3_text"),
        ({"model_type": "ministral3"}, "queries that grow with their position are not"),
        ({"model_type": "gemma4"}, "'gemma4' is not supported"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "must be false, got True"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "must be null, got 50.0"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "num_hidden_layers = 4 names"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3 + ["linear_attention"]},
         "layer_types: layer type 'linear_attention' is not supported; supported: full_att"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "there is no size"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers must be an integer"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0},
         "sliding_window must be an integer of at least 1, got 0"),
        ({"model_type": "qwen2", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"model_type": "glm", "partial_rotary_factor": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2, 0, 1]}, "a list of 0 and 1 for 4"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "a list of 0 and 1 for 4 layers"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}},
         "rope type 'longrope' needs short_factor, long_factor"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0],
                                                 "long_factor": [1.0]}},
         r"short_factor must be 4 finite numbers above 0 \(rotary_dim / 2\), got 1"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": 1,
                                                 "long_factor": [1.0]}},
         "short_factor must be a list of numbers, got 1"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": "x"}},
         "factor must be a finite number above 0, got 'x'"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0.5}},
         "beta_fast must be at least beta_slow"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": [1]}},
         "rope parameters must be"),
        ({"model_type": "gemma3_text", "rope_scaling": [1]}, r"must be objects.*rope_scaling"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must"),
    ],
)  # fmt: skip
def test_what_is_refused(read, raw, message):
    with pytest.raises(ValueError, match=message) as caught:
        read({**SIZES, **raw})
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": "around"}, "norms must be one of 'before', 'after', 'both', got 'around'"),
        ({"qk_norm": "all"}, "qk_norm must be one of None, 'head', 'width', got 'all'"),
        ({"logit_soft_cap": 0}, "logit_soft_cap must be a finite number above 0, got 0"),
        ({"attention_scale": -1.0}, "attention_scale must be a finite number above 0"),
        ({"embedding_scale": None}, "embedding_scale must be a finite number above 0"),
        ({"layers": (LayerConfig(None),)}, "layers must have num_layers = 2 entries, got 1"),
        ({"layers": (LayerConfig(None), LayerConfig(RopeConfig(rotary_dim=10)))}, "got 10 and 8"),
    ],
)
def test_values_are_checked_without_a_file_too(changes, message):
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2}
    sizes |= {"query_heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 8}
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**sizes, "rope": RopeConfig(rotary_dim=8), **changes})


def test_a_window_of_a_layer_is_checked():
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        LayerConfig(None, window=0)


def test_configurations_are_hashable(read):
    configs = {read({**SIZES, "model_type": kind}) for kind in FAMILIES if kind != "chatglm"}
    assert len(configs) >= 10


# Rotary embeddings of published sizes

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "parameters",
    [
        {**YARN, "rope_theta": 1e6},
        {**YARN, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},
        {**YARN, "rope_theta": 1e6, "attention_factor": 1.25, "truncate": False},
        {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
         "original_max_position_embeddings": 4096, "truncate": False},
    ],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_yarn_of_published_sizes(read, parameters, head_dim):
    """To the last bits: at position 100,000 a relative error of 1e-6 would be 0.1 radians."""
    raw = {
        "model_type": "qwen3", **SIZES, "head_dim": head_dim, "max_position_embeddings": 131072,
        "rope_parameters": {**parameters},
    }  # fmt: skip
    pytorch()
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**raw))
    rope = make_rope(read(raw).rope, 1)
    np.testing.assert_allclose(np.asarray(rope.inv_freq), expected.numpy(), rtol=5e-7, atol=0)
    assert rope.factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [1, 4096, 4097, 131072])
def test_longrope_follows_the_length(read, length):
    rng = np.random.default_rng(0)
    scaling = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": rng.uniform(1, 2, 48).tolist(),
        "long_factor": rng.uniform(1, 60, 48).tolist(),
    }  # fmt: skip
    raw = {
        "model_type": "phi3", **SIZES, "hidden_size": 512, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_parameters": scaling,
    }  # fmt: skip
    pytorch()
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](
        AutoConfig.for_model(**json.loads(json.dumps(raw))), seq_len=length
    )
    rope = make_rope(read(raw).rope, length)
    np.testing.assert_allclose(np.asarray(rope.inv_freq), expected.numpy(), rtol=2.5e-7)
    assert rope.factor == pytest.approx(factor, rel=1e-12)
