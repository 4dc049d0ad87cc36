"""Keys of GGUF files that llama.cpp reads as optional: its defaults where they are missing.

The defaults are those of llama.cpp's `load_hparams` (src/llama-model.cpp), `load_arch_hparams`
(src/models/) and `llama_hparams` (src/llama-hparams.h), written down again. The models have a width
of 32, 4 heads, a context of 64 and 97 tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvjax.models.families import parse_config
from kvjax.models.gguf_architectures import ARCHITECTURES, config_of, family_of
from kvjax.models.gguf_header import read_header
from tests.support.gguf_models import write_model
from tests.support.hf_models import random_reference


class Optional(NamedTuple):
    """A key, llama.cpp's default, another value, and what a file must say for it to matter."""

    key: str
    default: Any
    other: Any
    beside: Mapping[str, Any] = {}


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
WINDOW = {"attention.sliding_window": 7}
ALL = [
    Optional("vocab_size", 97, 99),
    Optional("attention.head_count_kv", 4, 2),
    Optional("attention.key_length", 8, 16, {"attention.value_length": 16}),
    Optional("attention.key_length", 8, 16),
    Optional("attention.value_length", 8, 16),
    Optional("attention.key_length_swa", 8, 16),
    Optional("attention.value_length_swa", 8, 16),
    Optional("attention.causal", True, False),
    Optional("attention.clamp_kqv", 0.0, 8.0),
    Optional("attention.max_alibi_bias", 0.0, 8.0),
    Optional("attention.scale", 0.0, 0.25),
    Optional("logit_scale", 0.0, 0.25),
    Optional("embedding_scale", 0.0, 2.0),
    Optional("residual_scale", 0.0, 2.0),
    Optional("expert_count", 0, 8),
    Optional("expert_used_count", 0, 2),
    Optional("expert_group_count", 0, 2),
    Optional("expert_group_used_count", 0, 2),
    Optional("nextn_predict_layers", 0, 1),
    Optional("rope.dimension_count", 8, 4),
    Optional("rope.dimension_count_swa", 8, 4),
    Optional("rope.freq_base", 10_000.0, 500.0),
    Optional("rope.scaling.type", "linear", "none", {"rope.scaling.factor": 4.0}),
    Optional("rope.scaling.factor", 0.0, 4.0),
    Optional("rope.scale_linear", 0.0, 4.0),
    Optional("rope.scaling.attn_factor", 1.0, 2.0),
    Optional("rope.scaling.alpha", 0.0, 2.0),
    Optional("rope.scaling.yarn_ext_factor", -1.0, 0.5),
    Optional("rope.scaling.yarn_log_multiplier", 0.0, 0.1),
]
YARNS = [
    Optional("rope.scaling.factor", 0.0, 4.0, {"rope.scaling.type": "yarn"}),
    Optional("rope.scaling.original_context_length", 64, 16, YARN),
    Optional("rope.scaling.yarn_attn_factor", 0.1 * math.log(4) + 1, 2.0, YARN),
    Optional("rope.scaling.yarn_beta_fast", 32.0, 4.0, YARN),
    Optional("rope.scaling.yarn_beta_slow", 1.0, 0.5, YARN),
]
SAME_THETA = Optional("rope.freq_base_swa", 300.0, 500.0, {"rope.freq_base": 300.0})
FACTORS = {"rope_factors_long.weight": [4.0, 3, 2, 1], "rope_factors_short.weight": [1.0, 1, 1, 2]}

OWN: dict[str, list[Optional]] = {
    "llama": [*YARNS, SAME_THETA, Optional("attention.sliding_window", 0, 7)],
    "qwen2": [*YARNS, SAME_THETA],
    "qwen3": [*YARNS, SAME_THETA],
    "phi3": [SAME_THETA, Optional("attention.sliding_window", 0, 7)],
    "gemma2": [
        *YARNS,
        SAME_THETA,
        Optional("attention.sliding_window", 4096, 7),
        Optional("attention.sliding_window_pattern", 2, 3),
        Optional("attention.sliding_window_pattern", 2, 0),
        Optional("attn_logit_softcapping", 50.0, 20.0),
        Optional("final_logit_softcapping", 30.0, 20.0),
    ],
    "gemma3": [
        *YARNS,
        Optional("attention.sliding_window", 0, 7),
        Optional("attention.sliding_window_pattern", 6, 3, WINDOW),
        Optional("rope.freq_base_swa", 10_000.0, 500.0, {**WINDOW, "rope.freq_base": 300.0}),
        Optional("final_logit_softcapping", 0.0, 20.0),
    ],
    "chatglm": [*YARNS, SAME_THETA],
    "glm4": [*YARNS, SAME_THETA],
    "olmo2": [
        *YARNS,
        SAME_THETA,
        Optional("attention.sliding_window", 0, 7),
        Optional("attention.sliding_window_pattern", 4, 3, WINDOW),
    ],
    "smollm3": [*YARNS, SAME_THETA],
}
"""Architecture → keys that it has beyond `ALL`."""

MODEL_TYPES = {"chatglm": "glm", "gemma3": "gemma3_text"}  # where they are named otherwise
NEEDED = (
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    """`headers(arch)`: the header of a file that says nothing of what is optional."""
    made = {}

    def header(arch):
        if arch not in made:
            kind = MODEL_TYPES.get(arch, arch)
            own = {"head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
            model = random_reference(kind, attention="eager", **own)
            tensors = {name: np.float32(values) for name, values in FACTORS.items()}
            path = tmp_path_factory.mktemp(arch) / "model.gguf"
            write_model(path, arch, model, None, tensors if arch == "phi3" else None)
            whole = read_header(path)
            kept = {f"{arch}.{name}" for name in NEEDED}
            metadata = {
                key: value
                for key, value in whole.metadata.items()
                if key in kept or not key.startswith(f"{arch}.")
            }
            made[arch] = dataclasses.replace(whole, metadata=metadata)
        return made[arch]

    return header


def read(header, arch, values, tensors=True):
    """The configuration of a file that says this too, or the message that refuses it."""
    metadata = {**header.metadata, **{f"{arch}.{key}": value for key, value in values.items()}}
    found = (
        header.tensors
        if tensors
        else {k: x for k, x in header.tensors.items() if "_factors" not in k}
    )
    header = dataclasses.replace(header, metadata=metadata, tensors=found)
    try:
        raw = config_of(header)
        return parse_config(raw, family_of(header, raw), header.path)
    except ValueError as error:
        return str(error)


def test_every_architecture_is_here():
    assert set(OWN) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", OWN)
def test_what_a_file_leaves_out_is_llama_cpps_default(headers, arch):
    header = headers(arch)
    for key, default, other, beside in [*ALL, *OWN[arch]]:
        without = read(header, arch, beside, tensors=False)
        assert read(header, arch, {**beside, key: default}, tensors=False) == without, key
        changed = read(header, arch, {**beside, key: other}, tensors=False)
        assert changed != without, f"{key} = {other} is not looked at"
        if isinstance(changed, str):
            assert f"{arch}.{key.removesuffix('_swa')}" in changed, changed


@pytest.mark.parametrize("arch", OWN)
def test_a_file_that_says_what_is_needed_alone(headers, arch):
    config = read(headers(arch), arch, {}, tensors=False)
    assert (config.kv_heads, config.head_dim, config.vocab_size) == (4, 8, 97)
    assert (config.rope.type, config.rope.theta, config.rope.rotary_dim) == ("default", 1e4, 8)
    caps = {"gemma2": (50.0, 30.0)}.get(arch, (None, None))
    assert (config.attention_soft_cap, config.logit_soft_cap) == caps
    assert config.windows == ((4096, None) * 3 if arch == "gemma2" else ())


@pytest.mark.parametrize("name", NEEDED)
def test_what_llama_cpp_needs_too(headers, name):
    header = headers("llama")
    metadata = {key: value for key, value in header.metadata.items() if key != f"llama.{name}"}
    message = read(dataclasses.replace(header, metadata=metadata), "llama", {})
    assert f"llama.{name} must be" in message and "it is missing" in message


def test_longrope_of_phi_3_with_tensors_alone(headers):
    """Its context was not stretched, and rotated channels are multiplied by 1."""
    header = headers("phi3")
    config = read(header, "phi3", {})
    assert (config.rope.type, config.rope.attention_factor) == ("longrope", 1.0)
    assert config.rope.original_max_positions == config.max_positions == 64
    for key, default, other in [
        ("rope.scaling.original_context_length", 64, 16),
        ("rope.scaling.attn_factor", 1.0, 1.5),
    ]:
        assert read(header, "phi3", {key: default}) == config
        assert read(header, "phi3", {key: other}) != config


@pytest.mark.parametrize(
    ("arch", "values", "message"),
    [
        ("gemma2", {"attention.sliding_window": 0}, "gemma2.attention.sliding_window must be"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "gemma2.attn_logit_softcapping must be"),
        ("gemma3", {**WINDOW, "attention.sliding_window_pattern": [True]}, "for each of gemma3.bl"),
        ("gemma3", {**WINDOW, "rope.freq_base_swa": 0.0}, "gemma3.rope.freq_base_swa must be"),
        ("smollm3", WINDOW, "smollm3.attention.sliding_window is not supported"),
        ("llama", {"rope.freq_base": 0.0}, "llama.rope.freq_base must be"),
        ("llama", {"attention.head_count_kv": 3}, "llama.attention.head_count must be a multiple"),
        ("llama", {"attention.head_count_kv": 3}, "of llama.attention.head_count_kv"),
        ("llama", {"attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon must be"),
        ("llama", {"context_length": 0}, "llama.context_length must be"),
        ("llama", {"rope.scaling.factor": -1.0}, "llama.rope.scaling.factor must be"),
        ("llama", {**YARN, "rope.scaling.yarn_beta_fast": 0.0}, "yarn_beta_fast must be"),
        ("llama", {**YARN, "rope.scaling.yarn_attn_factor": 0.0}, "yarn_attn_factor must be"),
        ("phi3", {"rope.dimension_count": 16}, "phi3.rope.dimension_count must be the 8 channels"),
        ("phi3", {"rope.dimension_count": 0}, "phi3.rope.dimension_count must be the 8 channels"),
    ],
)
def test_keys_are_named_as_they_stand_in_the_file(headers, arch, values, message):
    refused = read(headers(arch), arch, values, tensors=False)
    assert isinstance(refused, str) and message in refused
    assert refused.startswith(f"{headers(arch).path}: ")
