"""Configurations: published ones, both formats of rope parameters, and what is refused."""

from __future__ import annotations

import json

import pytest

from kvjax.models import DecoderConfig, RopeConfig, read_config
from kvjax.models.families import FAMILIES

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MISTRAL = {**LLAMA, "model_type": "mistral"}


@pytest.fixture
def read(tmp_path):
    """Reads a configuration given as dictionaries."""

    def read(raw, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(tmp_path)

    return read


PUBLISHED = {
    "Llama-2-7b-hf": {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "kv_heads": 32,
        "rope": RopeConfig(rotary_dim=128),
        "max_positions": 4096,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    },
    "Meta-Llama-3-8B-Instruct": {
        "vocab_size": 128256,
        "kv_heads": 8,
        "rope": RopeConfig(rotary_dim=128, theta=500000.0),
        "max_positions": 8192,
        "eos_token_ids": (128009,),
    },
    "Mistral-7B-Instruct-v0.1": {"sliding_window": 4096, "max_positions": 32768, "kv_heads": 8},
    "Mistral-7B-Instruct-v0.2": {
        "sliding_window": None,
        "rope": RopeConfig(rotary_dim=128, theta=1000000.0),
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(data_dir, read, name):
    config = read(json.loads((data_dir / "hf_configs" / f"{name}.config.json").read_text()))
    common = {"hidden_size": 4096, "num_layers": 32, "query_heads": 32, "head_dim": 128}
    for field, expected in {**common, **PUBLISHED[name]}.items():
        assert getattr(config, field) == expected, field
    assert not (config.tie_embeddings or config.attention_bias or config.mlp_bias)


def test_llama_31(data_dir, read):
    folder = data_dir / "hf_configs"
    raw = json.loads((folder / "Llama-3.1-8B-Instruct.config.json").read_text())
    with pytest.raises(ValueError, match=r"quantization_config \(bitsandbytes\) is not supported"):
        read(raw)
    del raw["quantization_config"]
    config = read(raw)
    assert config.rope == RopeConfig(
        rotary_dim=128,
        theta=500000.0,
        type="llama3",
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert config.max_positions == 131072
    assert config.eos_token_ids == (128001, 128008, 128009)
    names = json.loads((folder / "Llama-3.1-8B-Instruct.tensor_names.json").read_text())
    assert set(FAMILIES["llama"].weights(config)) == set(names)


def test_defaults_are_those_of_transformers(read):
    llama = read(LLAMA)
    assert (llama.kv_heads, llama.head_dim, llama.norm_eps) == (4, 8, 1e-6)
    assert (llama.rope, llama.sliding_window) == (RopeConfig(rotary_dim=8), None)
    assert (llama.eos_token_ids, llama.bos_token_id) == ((), None)
    mistral = read({**MISTRAL, "num_attention_heads": 8})
    assert (mistral.kv_heads, mistral.sliding_window) == (8, 4096)
    mistral = read({**MISTRAL, "num_key_value_heads": None, "sliding_window": None})
    assert (mistral.kv_heads, mistral.sliding_window) == (4, None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "other", "factor": 2, "rope_theta": 500}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_both_formats_of_rope_parameters(read, rope):
    config = read({**LLAMA, **rope})
    assert config.rope == RopeConfig(rotary_dim=8, theta=500.0, type="linear", factor=2.0)
    assert config.max_positions == 128


def test_a_theta_of_nothing_is_the_default(read):
    assert read({**LLAMA, "rope_theta": None}).rope == RopeConfig(rotary_dim=8)


def test_original_context_of_scaled_rope(read):
    scaled = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    dynamic = read({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (dynamic.rope.original_max_positions, dynamic.max_positions) == (64, 256)
    scaled["original_max_position_embeddings"] = 16
    llama3 = read({**LLAMA, "rope_scaling": {"rope_type": "llama3", **scaled}})
    assert (llama3.rope.original_max_positions, llama3.max_positions) == (16, 64)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (7,)), ({}, (7,)), ({"eos_token_id": 9}, (9,)), ({"eos_token_id": [9, 8]}, (9, 8))],
)
def test_end_tokens_of_generation_win(read, generation, expected):
    assert read({**LLAMA, "eos_token_id": 7}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not supported: LayerNorm .*; supported: llama, mistral",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "model_type .* is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be .* above 0, got -1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "needs low_freq_factor, high"),
        ({"rope_scaling": {"full": {"rope_type": "default"}}}, "one object for all layers"),
        ({"rope_scaling": "linear"}, "one object for all layers"),
        ({"rope_theta": "10000"}, "rope_theta must be a finite number above 0, got '10000'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be an integer of at least 1, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads must be a multiple of num_key_value_heads",
        ),
        ({"head_dim": 7}, "of head_dim = 7 channels must be an even number, got 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0, got 0"),
        ({"hidden_act": []}, r"config\.json: hidden_act must be text such as 'silu', got \[\]"),
        (
            {"vocab_size": 10**400},
            r"vocab_size must be an integer of at most 2147483647, got 10+\.",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer of at most 10000"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps must be a finite number above 0, got 10+\.\.\."),
        (
            {"rope_theta": 10**400},
            r"rope_theta must be .*, got 10+\.\.\. \(float32 ends at 3.4e\+38\)",
        ),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a finite number above 0, got 'x'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e308}}, "factor must be .*, got 1e.308"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e30}}, "rope factor .* got .* of 1e.30"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope type \['linear'\] is not supported"),
        ({"rope_parameters": [1]}, r"one object for all layers, got rope_parameters: \[1\]"),
        ({"model_type": "\x1b[2J"}, r"model_type '\\x1b\[2J' is not supported"),
        ({"eos_token_id": 10**400}, "eos_token_id must be an integer .* of 32 bits, got 10"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list of integers"),
    ],
)
def test_what_is_refused(read, raw, message):
    with pytest.raises(ValueError, match=message) as caught:
        read({**LLAMA, **raw})
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is nested too deeply"):
        read_config(tmp_path)
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**40)  # a file without blocks
    with pytest.raises(ValueError, match=r"config\.json: it has more than 67,108,864 bytes"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
        ({"head_dim": 4}, "rotary_dim must be at most head_dim, got 8 and 4"),
        ({"vocab_size": True}, "vocab_size must be an integer of at least 1, got True"),
    ],
)
def test_values_are_checked_without_a_file_too(changes, message):
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    sizes |= {"query_heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 8}
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**sizes, "rope": RopeConfig(rotary_dim=8), **changes})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "su"}, "rope type 'su' is not supported"),
        ({"type": "dynamic"}, "original_max_positions must be an integer of at least 1, got None"),
        ({"rotary_dim": 2, "type": "dynamic", "original_max_positions": 8}, "rotary_dim of 4"),
        (
            {"type": "llama3", "original_max_positions": 8, "high_freq_factor": 1.0},
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"theta": float("nan")}, "theta must be a finite number above 0, got nan"),
    ],
)
def test_rope_parameters_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**{"rotary_dim": 8, **given})
