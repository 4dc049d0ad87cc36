"""Configurations: published ones, both formats of their options, and what is refused."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
import transformers
from flax import nnx
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvjax.models import Decoder, DecoderConfig, LayerConfig, RopeConfig, read_config
from kvjax.models.families import FAMILIES
from kvjax.models.rope_scaling import make_rope
from tests.models.family_cases import FULL, SLIDING
from tests.support.hf_models import pytorch

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama"}


@pytest.fixture
def read(tmp_path):
    """Reads a configuration given as dictionaries."""

    def read(raw, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path)

    return read


def parameters(config: DecoderConfig) -> int:
    """How many numbers a decoder has; nothing is allocated."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


# Of the files in the data folder, as their publishers count them, and what else is known of them.
PUBLISHED = {
    "Llama-2-7b-hf": (6_738_415_616, {
        "kv_heads": 32, "rope": RopeConfig(rotary_dim=128), "max_positions": 4096,
        "bos_token_id": 1, "eos_token_ids": (2,), "tie_embeddings": False,
    }),
    "Llama-3.1-8B-Instruct": (8_030_261_248, {
        "rope": RopeConfig(
            rotary_dim=128, theta=500000.0, type="llama3", factor=8.0, original_max_positions=8192,
        ),
        "max_positions": 131072, "eos_token_ids": (128001, 128008, 128009),
    }),
    "Meta-Llama-3-8B-Instruct": (8_030_261_248, {
        "rope": RopeConfig(rotary_dim=128, theta=500000.0), "eos_token_ids": (128009,),
    }),
    "Mistral-7B-Instruct-v0.1": (7_241_732_096, {
        "sliding_window": 4096, "max_positions": 32768, "kv_heads": 8,
    }),
    "Mistral-7B-Instruct-v0.2": (7_241_732_096, {
        "sliding_window": None, "rope": RopeConfig(rotary_dim=128, theta=1000000.0),
    }),
    "Phi-3-mini-4k-instruct": (3_821_079_552, {
        "sliding_window": 2047, "layers": (), "rope": RopeConfig(rotary_dim=96),
    }),
    "Qwen2-7B": (7_615_616_512, {
        "sliding_window": None, "layers": (), "rope": RopeConfig(rotary_dim=128, theta=1e6),
        "attention_bias": True, "output_bias": False,
    }),
    "Qwen2-7B-Instruct": (7_615_616_512, {}),
    "glm-4-9b-chat.chatglm": (9_399_951_360, {
        "rope": RopeConfig(rotary_dim=64, theta=5e6, interleaved=True), "kv_heads": 2,
        "attention_bias": True, "output_bias": False, "max_positions": 131072,
        "norm_eps": 1.5625e-7, "eos_token_ids": (151329, 151336, 151338),
    }),
    "GlmForCausalLM.defaults": (9_399_951_360, {
        "rope": RopeConfig(rotary_dim=64, interleaved=True),
    }),
}  # fmt: skip


def published(data_dir, name: str) -> dict:
    ending = "" if name.endswith(".defaults") else ".config"
    return json.loads((data_dir / "hf_configs" / f"{name}{ending}.json").read_text())


@pytest.fixture
def read_published(data_dir, read):
    def read_named(name):
        raw = published(data_dir, name)
        raw.pop("quantization_config", None)
        return read(raw)

    return read_named


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(read_published, name):
    config, (_, fields) = read_published(name), PUBLISHED[name]
    assert {field: getattr(config, field) for field in fields} == fields


FAST = ("Phi-3-mini-4k-instruct", "glm-4-9b-chat.chatglm", "gemma3_text 1B")


def fast_ones(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in names]


@pytest.mark.parametrize("name", fast_ones(PUBLISHED))
def test_published_files_have_their_published_size(read_published, name):
    assert parameters(read_published(name)) == PUBLISHED[name][0]


def test_no_published_file_is_left_out(data_dir):
    names = {path.name for path in (data_dir / "hf_configs").glob("*.json")}
    known = {f"{name}{'' if name.endswith('.defaults') else '.config'}.json" for name in PUBLISHED}
    assert {name for name in names if "tensor_names" not in name} == known


def test_names_of_llama_31(data_dir, read):
    raw = published(data_dir, "Llama-3.1-8B-Instruct")
    with pytest.raises(ValueError, match=r"quantization_config \(bitsandbytes\) is not supported"):
        read(raw)
    del raw["quantization_config"]
    path = data_dir / "hf_configs" / "Llama-3.1-8B-Instruct.tensor_names.json"
    assert set(FAMILIES["llama"].names.weights(read(raw))) == set(json.loads(path.read_text()))


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


@pytest.mark.parametrize("name", fast_ones(OTHERS))
def test_published_sizes(read, name):
    sizes, more, expected = OTHERS[name]
    raw = {**dict(zip(list(SIZES)[:6], sizes, strict=True)), **more}
    assert parameters(read({"model_type": name.split()[0], **raw})) == expected


def test_defaults_are_those_of_transformers(read):
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    llama = read(without)
    assert (llama.kv_heads, llama.head_dim, llama.norm_eps) == (4, 8, 1e-6)
    assert (llama.rope, llama.sliding_window) == (RopeConfig(rotary_dim=8), None)
    assert (llama.eos_token_ids, llama.bos_token_id) == ((), None)
    mistral = read({**without, "model_type": "mistral", "num_attention_heads": 8})
    assert (mistral.kv_heads, mistral.sliding_window) == (8, 4096)
    none = {"num_key_value_heads": None, "sliding_window": None}
    mistral = read({**without, "model_type": "mistral", **none})
    assert (mistral.kv_heads, mistral.sliding_window) == (4, None)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (7,)), ({}, (7,)), ({"eos_token_id": 9}, (9,)), ({"eos_token_id": [9, 8]}, (9, 8))],
)
def test_end_tokens_of_generation_win(read, generation, expected):
    assert read({**LLAMA, "eos_token_id": 7}, generation).eos_token_ids == expected


# Layers and rotary embeddings


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "qwen2"}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
         [None, None, None, 4096]),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None,
          "max_window_layers": 0}, [None] * 4),
        ({"model_type": "gemma2"}, [4096, None, 4096, None]),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 2},
         [9, None, 9, None]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 7}, [4096] * 5 + [None, 4096]),
        ({"model_type": "olmo3"}, [4096] * 3 + [None]),
        ({"model_type": "ministral", "sliding_window": None}, [None] * 4),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 5},
         [None] * 3 + [5]),
    ],
)  # fmt: skip
def test_windows_of_layers(read, raw, expected):
    config = read({**SIZES, **raw})
    assert [config.layer(index).window for index in range(config.num_layers)] == expected


def test_layers_without_positions(read):
    config = read({**SIZES, "model_type": "smollm3"})
    rope = RopeConfig(rotary_dim=8, theta=2e6)
    assert [config.layer(i).rope for i in range(4)] == [rope, rope, rope, None]
    assert config.tie_embeddings
    config = read({**SIZES, "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0, 1]})
    assert [config.layer(i).rope is None for i in range(4)] == [True, False, False, True]


LINEAR = {"rope_type": "linear", "factor": 8.0}
LINEAR_ROPE = RopeConfig(rotary_dim=8, theta=500.0, type="linear", factor=8.0)
FOUR = {"short_factor": [1.0] * 4, "long_factor": [2, 3.0, 4.0, 5.0]}
LONGROPE = RopeConfig(
    rotary_dim=8, type="longrope", factor=4.0, original_max_positions=16,
    short_factors=(1.0,) * 4, long_factors=(2, 3.0, 4.0, 5.0),
)  # fmt: skip
DYNAMIC = {"type": "dynamic", "factor": 4.0}
WIDE = {"model_type": "phi3", "hidden_size": 64, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize(
    ("raw", "rope", "positions"),
    [
        ({"rope_theta": None}, RopeConfig(rotary_dim=8), 64),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
         LINEAR_ROPE, 512),
        ({"rope_scaling": {**LINEAR, "type": "other", "rope_theta": 500}}, LINEAR_ROPE, 512),
        ({"rope_parameters": {**LINEAR, "rope_theta": 500.0}}, LINEAR_ROPE, 512),
        ({"rope_theta": 500.0, "rope_parameters": LINEAR}, LINEAR_ROPE, 512),
        ({"rope_scaling": DYNAMIC},
         RopeConfig(rotary_dim=8, **DYNAMIC, original_max_positions=64), 256),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
         RopeConfig(rotary_dim=8, type="llama3", factor=4.0, original_max_positions=16), 64),
        *(({"model_type": "phi3", "rope_scaling": {"type": kind, **FOUR},
            "original_max_position_embeddings": 16}, LONGROPE, 64)
          for kind in ("longrope", "su", "yarn")),
        (WIDE, RopeConfig(rotary_dim=12), 64),
        ({**WIDE, "partial_rotary_factor": None,
          "rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}},
         RopeConfig(rotary_dim=8, theta=9.0), 64),
    ],
)  # fmt: skip
def test_formats_of_rope_parameters(read, raw, rope, positions):
    config = read({**LLAMA, **raw})
    assert (config.rope, config.max_positions) == (rope, positions)


@pytest.mark.parametrize("given", [64, 512])
def test_positions_of_stretched_contexts(read, given):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    raw = {**SIZES, "model_type": "qwen2", "max_position_embeddings": given, "rope_scaling": yarn}
    assert read(raw).max_positions == max(given, 256)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5000.0, "rope_local_base_freq": 500.0, "rope_scaling": LINEAR},
        {"rope_local_base_freq": 500.0, "rope_parameters": {**LINEAR, "rope_theta": 5000.0}},
        {"rope_parameters": {FULL: {**LINEAR, "rope_theta": 5000.0},
                             SLIDING: {"rope_type": "default", "rope_theta": 500.0}}},
    ],
)  # fmt: skip
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


def test_olmo3_reads_truncate_from_the_object_of_a_layer_type(read):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    for truncate in (True, False):
        of_types = {FULL: {**yarn, "truncate": truncate}, SLIDING: {"rope_type": "default"}}
        config = read({**SIZES, "model_type": "olmo3", "rope_parameters": of_types})
        assert config.rope.truncate is truncate and config.layer(0).rope.type == "default"


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 32768}  # fmt: skip
MANY = {"rope_type": "longrope", "short_factor": np.linspace(1, 2, 48).tolist(),
        "long_factor": np.linspace(1, 60, 48).tolist()}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "scaling", "lengths"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 10000.0}, [1]),
        ("llama", {"rope_type": "linear", "factor": 4.0}, [1]),
        ("llama", {**LLAMA3, "factor": 8.0, "rope_theta": 500000.0}, [1]),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, [1, 4096, 4097, 9000, 16384]),
        ("llama", YARN, [1]),
        ("llama", {**YARN, "attention_factor": 1.25, "truncate": False}, [1]),
        ("llama", {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5}, [1]),
        ("llama", {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0,
                   "factor": 32.0, "truncate": False}, [1]),
        ("llama", {**YARN, "factor": 1.0, "beta_fast": 1.0, "truncate": False}, [1]),
        ("phi3", MANY, [1, 4096, 4097, 131072]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_frequencies_of_published_sizes(read, kind, scaling, lengths, head_dim):
    """To the last bits: at position 100,000 a relative error of 1e-6 would be 0.1 radians."""
    positions = 4096 if scaling["rope_type"] == "dynamic" else 131072
    own = {"hidden_size": 4 * head_dim, "max_position_embeddings": positions}
    if kind == "phi3":  # 96 rotated channels
        own |= {"hidden_size": 4 * 128, "original_max_position_embeddings": 4096}
        scaling = {**scaling, "partial_rotary_factor": 0.75}
    scaling = {"rope_theta": 1e4, **scaling}
    raw = {**SIZES, **own, "model_type": kind, "rope_parameters": scaling}
    torch = pytorch()
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    for length in lengths:
        if scaling["rope_type"] == "default":
            powers = torch.arange(0, head_dim, 2).float() / head_dim
            expected, factor = 1.0 / scaling["rope_theta"] ** powers, 1.0
        else:
            make = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
            expected, factor = make(config, seq_len=length)
        rope = make_rope(read(raw).rope, length)
        most = {"dynamic": 2e-6, "yarn": 5e-7}.get(scaling["rope_type"], 2.5e-7)
        np.testing.assert_allclose(np.asarray(rope.inv_freq), expected.numpy(), rtol=most, atol=0)
        assert rope.factor == pytest.approx(factor, rel=1e-12)


# What is refused


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported: LayerNorm .*; supported: llama, mistr"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "model_type .* is not supported"),
        ({"model_type": "\x1b[2J"}, r"model_type '\\x1b\[2J' is not supported"),
        ({"model_type": "mixtral"}, "'mixtral' is not supported: mixtures of experts are not"),
        ({"model_type": "new", "num_local_experts": 8}, "'new' .*: mixtures of experts are not"),
        ({"model_type": "gemma3", "text_config": {}}, "images and sound .*gemma3_text"),
        ({"hidden_act": []}, r"hidden_act must be one of 'silu', .*, got \[\]"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope type must be .*, got 'axial'"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope type must be .*, got \['linear'\]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "needs low_freq_factor, high"),
        ({"rope_scaling": {"full": {"rope_type": "default"}}}, "one object for all layers"),
        ({"rope_parameters": [1]}, r"one object for all layers, got rope_parameters: \[1\]"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e308}}, "factor must be .*, got 1e.308"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e30}}, "rope factor .* got .* of 1e.30"),
        ({"rope_theta": "10000"}, "rope_theta must be a finite number above 0, got '10000'"),
        ({"rope_theta": 10**400},
         r"rope_theta must be .*, got 10+\.\.\. \(float32 ends at 3.4e\+38\)"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor must be 1"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be an integer of at least 1, got '32'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer of at most 10000"),
        ({"vocab_size": 10**400}, r"vocab_size must be an integer of at most 2147483647, got 10+"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps must be a finite number above 0, got 10+\.\.\."),
        ({"eos_token_id": 10**400}, "eos_token_id must be an integer .* of 32 bits, got 10"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list of integers"),
        ({"model_type": "gemma3_text", "rope_parameters": {FULL: [1]}}, "rope parameters must be"),
        ({"model_type": "gemma3_text", "rope_scaling": [1]}, r"must be objects.*rope_scaling"),
        ({"model_type": "qwen2", "layer_types": [FULL]}, "num_hidden_layers = 4 names"),
        ({"model_type": "qwen2", "layer_types": [FULL] * 3 + ["linear_attention"]},
         "layer_types: layer type 'linear_attention' is not supported; supported: full_att"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers must be an integer"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0.5}},
         "beta_fast must be at least beta_slow"),
        ({"model_type": "chatglm"}, "multi_query_attention is missing"),
        ({"num_attention_heads": 3}, "hidden_size must be a multiple of num_attention_heads, got"),
        ({"model_type": "glm", "partial_rotary_factor": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2, 0, 1]}, "a list of 0 and 1 for 4"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}},
         "rope type 'longrope' needs short_factor, long_factor"),
        ({"model_type": "phi3", "rope_scaling": {**FOUR, "type": "su", "short_factor": [1.0]}},
         r"short_factor must be 4 finite numbers above 0 \(rotary_dim / 2\), got 1"),
        ({"model_type": "phi3", "rope_scaling": {**FOUR, "type": "su", "short_factor": 1}},
         "short_factor must be a list of numbers, got 1"),
    ],
)  # fmt: skip
def test_what_is_refused(read, raw, message):
    with pytest.raises(ValueError, match=message) as caught:
        read({**LLAMA, **raw})
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"config\.json is not JSON"),
        (b"\xff\xfe{}", r"config\.json is not JSON"),
        (b'{"a":' * 100_000, r"config\.json is nested too deeply"),
        (b"[]", "must hold a JSON object, got list"),
    ],
)
def test_unreadable_files(tmp_path, content, message):
    with pytest.raises(ValueError, match=r"cannot read .*config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


SOUND = {
    DecoderConfig: {
        "vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2,
        "query_heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 8,
        "rope": RopeConfig(rotary_dim=8),
    },
    RopeConfig: {"rotary_dim": 8},
    LayerConfig: {"rope": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (DecoderConfig, {"sliding_window": 0}, "sliding_window must be an integer .* 1, got 0"),
        (DecoderConfig, {"head_dim": 4}, "rotary_dim must be at most head_dim, got 8 and 4"),
        (DecoderConfig, {"vocab_size": True}, "vocab_size must be an integer .* 1, got True"),
        (DecoderConfig, {"norms": "around"}, "'before', 'after', 'both', got 'around'"),
        (DecoderConfig, {"qk_norm": "all"}, "one of None, 'head', 'width', got 'all'"),
        (DecoderConfig, {"logit_soft_cap": 0}, "logit_soft_cap must be a finite .* 0, got 0"),
        (DecoderConfig, {"embedding_scale": None}, "embedding_scale must be a finite number above"),
        (DecoderConfig, {"layers": (LayerConfig(None),)}, "num_layers = 2 entries, got 1"),
        (DecoderConfig, {"layers": (LayerConfig(None), LayerConfig(RopeConfig(rotary_dim=10)))},
         "got 10 and 8"),
        (RopeConfig, {"type": "su"}, "rope type must be one of 'default', .* got 'su'"),
        (RopeConfig, {"type": "dynamic"}, "original_max_positions must be .* 1, got None"),
        (RopeConfig, {"rotary_dim": 2, "type": "dynamic", "original_max_positions": 8},
         "rotary_dim of 4"),
        (RopeConfig, {"rotary_dim": 7}, "rotary_dim must be even, got 7"),
        (RopeConfig, {"type": "yarn", "theta": 1.0, "original_max_positions": 8},
         "yarn rope needs a theta above 1, got 1.0"),
        (RopeConfig, {"type": "longrope", "original_max_positions": 1, "short_factors": (1.0,) * 4,
                      "long_factors": (1.0,) * 4}, "original_max_positions of 2 or more, got 1"),
        (RopeConfig, {"type": "llama3", "original_max_positions": 8, "high_freq_factor": 1.0},
         "high_freq_factor must be above low_freq_factor"),
        (RopeConfig, {"theta": float("nan")}, "theta must be a finite number above 0, got nan"),
        (LayerConfig, {"window": 0}, "window must be an integer of at least 1, got 0"),
    ],
)  # fmt: skip
def test_values_are_checked_without_a_file_too(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**{**SOUND[kind], **changes})
