"""Every option of a `config.json` that `transformers` reads: computed as there, or refused.

A file with one edited option is given to `transformers` and to kvjax: logits agree, or the option
is refused by its name. Options that compute nothing are listed with the reason, and change nothing
in either.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re

import numpy as np
import pytest
import transformers
from transformers import modeling_rope_utils

from kvjax.models import from_pretrained, read_config
from kvjax.models.families import FAMILIES
from tests.models.family_cases import FULL, SLIDING
from tests.support.hf_models import SIZES, Stepper, pytorch, random_model, reference_logits
from tests.support.marks import some_slow
from tests.support.tolerances import close

LAYERS, PATTERNS = 6, {"gemma2", "gemma3_text", "smollm3", "olmo3"}  # layers of two kinds
TOKENS = np.random.default_rng(1).integers(0, SIZES["vocab_size"], 30)
WINDOW = {"sliding_window": 7}
BASES: dict[str, dict] = {
    "llama": {},
    "mistral": {**WINDOW, "head_dim": 8},
    "ministral": {**WINDOW, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "phi3": WINDOW,
    "gemma2": {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8},
    "smollm3": {},
    "olmo2": {},
    "olmo3": WINDOW,
}
"""Family → what its file says beside sizes; values that are left out are those of the class."""

THETA = {"rope_theta": 300.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 3.0, 2.0, 1.5]}
LONGROPE = {"rope_type": "longrope", **LONGROPE_FACTORS}
HALF = {"partial_rotary_factor": 0.5}
MIXED = {"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]}

ALL = {
    "num_hidden_layers": {"num_hidden_layers": 3},
    "hidden_size": {"hidden_size": 64},
    "intermediate_size": {"intermediate_size": 40},
    "num_attention_heads": {"num_attention_heads": 8},
    "num_key_value_heads": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 16},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "vocab_size": {"vocab_size": 99},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "another theta of all": {"rope_parameters": {"rope_type": "default", **THETA}},
    "linear": {"rope_parameters": {**LINEAR, **THETA}},
    "rope_scaling": {"rope_scaling": LINEAR},
    "yarn": {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5}},
    "mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "attention_factor": {"rope_scaling": {**YARN, "attention_factor": 1.5, "truncate": False}},
    "original_max_position_embeddings": {
        "rope_scaling": YARN, "original_max_position_embeddings": 8,
    },
    "llama3": {"rope_scaling": LLAMA3},
    "dynamic": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16,
    },
    "longrope": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 16}},
}  # fmt: skip
"""Edits of every family's file."""

NESTED = {
    "rope_parameters": {
        "rope_parameters": {FULL: {**LINEAR, **THETA}, SLIDING: {**YARN, "rope_theta": 50.0}}
    },
    "rope_parameters of one type": {"rope_parameters": {FULL: {**LINEAR, **THETA}}},
}
THETAS = {"rope_theta": THETA, "rope_theta and type": {**THETA, "rope_scaling": {
    "type": "linear", "factor": 4.0}}}  # fmt: skip
BIAS = {"attention_bias": {"attention_bias": True}}
SILU = {"hidden_act": {"hidden_act": "gelu"}, "hidden_act relu": {"hidden_act": "relu"}}
GELU = {"hidden_activation": {"hidden_activation": "gelu"}}
ONE_WINDOW = {
    "sliding_window": {"sliding_window": 5},
    "no sliding_window": {"sliding_window": None},
}
QWEN_WINDOWS = {
    "use_sliding_window": {"use_sliding_window": True, "sliding_window": 5},
    "max_window_layers": {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
    },
    "layer_types": {"use_sliding_window": True, "sliding_window": 5, **MIXED},
    "a window that is not used": {"sliding_window": 5, "max_window_layers": 2},
}  # fmt: skip
PARTLY = {
    "partial_rotary_factor": {"partial_rotary_factor": 0.25},
    "partial_rotary_factor of all": {"partial_rotary_factor": 1.0},
    "partial_rotary_factor inside": {
        "rope_parameters": {"rope_type": "default", **THETA, **HALF}, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
OWN: dict[str, dict[str, dict]] = {
    "llama": {**THETAS, **BIAS, **SILU, "mlp_bias": {"mlp_bias": True}},
    "mistral": {**THETAS, **SILU, **ONE_WINDOW, "layer_types": MIXED},
    "ministral": {**THETAS, **SILU, "sliding_window": {"sliding_window": 5}, "layer_types": MIXED},
    "qwen2": {**THETAS, **SILU, **QWEN_WINDOWS},
    "qwen3": {**THETAS, **BIAS, **SILU, **QWEN_WINDOWS},
    "glm": {**THETAS, **SILU, **PARTLY, "attention_bias": {"attention_bias": False}},
    "glm4": {**THETAS, **SILU, **PARTLY, "attention_bias": {"attention_bias": False}},
    "phi3": {
        **SILU, **PARTLY, **ONE_WINDOW,
        "rope_theta": THETA,
        "su": {
            "rope_scaling": {
                **LONGROPE_FACTORS, "type": "su", "original_max_position_embeddings": 16,
            },
            "original_max_position_embeddings": 16,
        },
        "factor": {"rope_scaling": {**LONGROPE, "factor": 2.0}},
    },
    "gemma2": {
        **THETAS, **BIAS, **GELU,
        "sliding_window": {"sliding_window": 5},
        "layer_types": MIXED,
        "attn_logit_softcapping": {"attn_logit_softcapping": 2.0},
        "no attn_logit_softcapping": {"attn_logit_softcapping": None},
        "final_logit_softcapping": {"final_logit_softcapping": 2.0},
        "no final_logit_softcapping": {"final_logit_softcapping": None},
        "query_pre_attn_scalar": {"query_pre_attn_scalar": 30},
    },
    "gemma3_text": {
        **BIAS, **GELU, **NESTED,
        "rope_theta": THETA,
        "rope_local_base_freq": {"rope_local_base_freq": 50.0},
        "sliding_window": {"sliding_window": 5},
        "sliding_window_pattern": {"sliding_window_pattern": 2},
        "layer_types": MIXED,
        "final_logit_softcapping": {"final_logit_softcapping": 2.0},
        "query_pre_attn_scalar": {"query_pre_attn_scalar": 30},
    },
    "smollm3": {
        **THETAS, **BIAS, **SILU,
        "mlp_bias": {"mlp_bias": True},
        "no_rope_layers": {"no_rope_layers": [0, 1, 1, 0, 1, 0]},
        "no_rope_layer_interval": {"no_rope_layer_interval": 2},
        "use_sliding_window": {"use_sliding_window": True, "sliding_window": 5},
        "layer_types": {"use_sliding_window": True, "sliding_window": 5, **MIXED},
    },
    "olmo2": {**THETAS, **BIAS, **SILU},
    "olmo3": {
        **BIAS, **SILU, **NESTED,
        "sliding_window": {"sliding_window": 5},
        "layer_types": MIXED,
    },
}  # fmt: skip
"""Family → edits of options that not all have."""

LOST = ("another theta of all", "linear")
SCALED = ("linear", "rope_scaling", "dynamic", "llama3", "yarn", "mscale", "attention_factor")
NOT_OF = {
    # Their `rope_parameters` have an object for each type of layers. transformers 5.24 loses one
    # for all layers, the older `type`, and `olmo3`'s `rope_theta` for layers with a window.
    "gemma3_text": LOST,
    "olmo3": LOST,
    "phi3": (*SCALED, "original_max_position_embeddings"),  # transformers refuses these
    "glm": ("longrope",),  # of 4 rotated channels it has no 4 factors
    "glm4": ("longrope",),
}
"""Family → names of edits that are not for it."""


def edits(family: str) -> dict[str, dict]:
    both = {**ALL, **OWN[family]}
    return {name: edit for name, edit in both.items() if name not in NOT_OF.get(family, ())}


def compared(family: str, number: int) -> list[str]:
    """Edits of all families, so many for each family in turn, and its own ones."""
    place_of_family, count = list(BASES).index(family), len(ALL)
    turn = {
        name
        for place, name in enumerate(ALL)
        if (place + number * place_of_family) % count < number
    }
    return [name for name in edits(family) if name in OWN[family] or name in turn]


# Every edit of all families is compared for one or two families, and for more before a release.
COMPARED = {(family, name) for family in BASES for name in compared(family, 2)}
MORE = {(family, name) for family in BASES for name in compared(family, 6)} - COMPARED


REFUSED = {
    "is_causal": {"is_causal": False},
    "use_bidirectional_attention": {"use_bidirectional_attention": True},
    "is_encoder_decoder": {"is_encoder_decoder": True},
    "attention_chunk_size": {"attention_chunk_size": 4},
    "kv_sharing_modes": {"kv_sharing_modes": ["store", "reuse"] * 3},
    "per_layer_config": {"per_layer_config": {"1": {"intermediate_size": 40}}},
    "layer_types": {"layer_types": ["chunked_attention"] * LAYERS},
    "eos_token_id": {"eos_token_id": -1},
    "bos_token_id": {"bos_token_id": -1},
    "rope_theta": {"rope_theta": 0},
    "rope_theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "factor": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "original_max_position_embeddings": {
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 0},
        "original_max_position_embeddings": 0,
    },
    "tie_word_embeddings": {"tie_word_embeddings": "false"},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "rms_norm_eps": {"rms_norm_eps": 0},
    "head_dim": {"head_dim": 7},
    "partial_rotary_factor": {"partial_rotary_factor": 0.4},
}
"""Key that the message names → an edit of every family's file."""

NO_WINDOW = ("llama", "glm", "glm4", "olmo2")
ALSO_REFUSED = [
    *((family, "sliding_window", WINDOW) for family in NO_WINDOW),
    *((family, "layer_types", MIXED) for family in (*NO_WINDOW, "qwen2", "qwen3", "smollm3")),
    ("phi3", "layer_types", MIXED),
    ("mistral", "sliding_window", {**MIXED, "sliding_window": None}),
    ("smollm3", "use_sliding_window", {**MIXED, **WINDOW}),
    ("qwen2", "use_sliding_window", {"use_sliding_window": "yes"}),
    ("gemma2", "hidden_activation", {"hidden_activation": "mish"}),
    ("llama", "hidden_act", {"hidden_act": "mish"}),
    ("llama", "attention_bias", {"attention_bias": "false"}),
    ("gemma3_text", "attn_logit_softcapping", {"attn_logit_softcapping": 2.0}),
    ("gemma3_text", "rope_local_base_freq", {"rope_local_base_freq": 0}),
]

COMPUTE_NOTHING = {
    # the random weights before training, and training
    "initializer_range": 0.5, "attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5,
    "pad_token_id": 5,  # a token that is not seen
    # which results are returned, and in how many pieces they are computed
    "output_hidden_states": True, "use_cache": False, "chunk_size_feed_forward": 4,
    "pretraining_tp": 2,
    # classifiers
    "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "problem_type": "regression",
    "transformers_version": "4.40.0", "architectures": ["Other"],  # who wrote it
}  # fmt: skip
"""Options that neither computes anything of."""

READ_ELSEWHERE = {
    "dtype": "the dtype of the weights, where none is asked for",
    "return_dict": "False breaks the models of transformers",
    "max_position_embeddings": "the edit 'dynamic' has it",
    "output_attentions": "which results are returned",
    "name_or_path": "where it came from",
}


@pytest.fixture
def written(tmp_path):
    """`written(family, edit)`: a folder with the file alone."""

    def write(family, edit=None):
        edit = edit or {}
        alike = family not in PATTERNS and not {"layer_types", "max_window_layers"} & {*edit}
        layers = 2 if alike else LAYERS  # what is compiled grows with them
        sizes = {**SIZES, "num_hidden_layers": layers, "pad_token_id": 0}
        raw = {"model_type": family, **sizes, **BASES[family], **edit}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return write


def reference(folder):
    """The model of `transformers` for the file; its weights are written beside it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = random_model(config, attention="eager")
    model.save_pretrained(folder / "saved")
    (folder / "saved" / "model.safetensors").rename(folder / "model.safetensors")
    return model


def test_all_families_are_here():
    assert set(BASES) == set(FAMILIES) - {"chatglm"}  # whose format transformers does not have


PROMPTS = [(family, name, 0) for family, name in sorted(COMPARED | MORE)]
WITH_A_STEP = [(family, name, 1) for family, name, _ in PROMPTS]
RARE = {*WITH_A_STEP, *((family, name, 0) for family, name in MORE)}  # before a release


@pytest.mark.parametrize(
    ("family", "name", "steps"), some_slow(PROMPTS + WITH_A_STEP, exhaustive=RARE)
)
def test_logits_of_an_edited_file(written, family, name, steps):
    folder, count = written(family, edits(family)[name]), len(TOKENS)
    theirs = reference_logits(reference(folder), TOKENS, count)
    assert theirs.std() > 0.3, "all logits are nearly alike"
    # RoPE of some types depends on how many tokens the cache is made for: on all of them.
    end, at = count - steps, np.arange(count)[None]
    step = Stepper(from_pretrained(folder), 1, end, steps)
    calls = [(slice(0, end), "prompt"), (slice(end, count), "decode")][: 1 + steps]
    ours = [step(TOKENS[None, part], at[:, part], phase)[0] for part, phase in calls]
    close(np.concatenate(ours), theirs, "accumulated")


def check_refusal(folder, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b") as caught:
        read_config(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: ")


@pytest.mark.parametrize("family", BASES)
def test_what_is_not_computed_is_refused_by_its_name(written, family):
    for name, edit in REFUSED.items():
        check_refusal(written(family, edit), name.split()[0])


@pytest.mark.parametrize(("family", "key", "edit"), ALSO_REFUSED)
def test_what_a_family_does_not_compute_is_refused(written, family, key, edit):
    check_refusal(written(family, edit), key)


@pytest.mark.parametrize("family", BASES)
def test_what_computes_nothing_changes_nothing(written, family):
    pytorch()
    configs, logits = [], []
    for edit in ({}, COMPUTE_NOTHING):
        folder = written(family, edit)
        configs.append(read_config(folder))
        model = random_model(transformers.AutoConfig.from_pretrained(folder), attention="eager")
        logits.append(reference_logits(model, TOKENS, len(TOKENS)))
    assert configs[0] == configs[1]
    np.testing.assert_array_equal(*logits)


def read_by(module) -> set[str]:
    """Names of options that a module of `transformers` reads of a configuration."""
    source = inspect.getsource(module)
    named = re.findall(r"(?<!sub_)config\.([a-z]\w*)(?![\w(])", source)
    return {*named, *re.findall(r'getattr\((?:\w+\.)?\w*config, "(\w+)"', source)}


NO_OPTIONS = {
    # Of configurations as objects, not of their files.
    "get_text_config", "model_type", "standardize_rope_params", "default_theta", "is_heterogeneous",
    "validate_rope", "base_model_tp_plan", "json", "dtype",
    # Of models with images or convolutions, which no family here has.
    "image_token_id", "vision_config", "text_config", "mm_tokens_per_image",
    "number_of_conv_states",
}  # fmt: skip


@pytest.mark.parametrize("family", BASES)
def test_every_option_that_transformers_reads_is_in_this_file(family):
    pytorch()  # which the modules import
    from transformers import cache_utils, masking_utils

    config_class = type(transformers.AutoConfig.for_model(family))
    name = config_class.__module__.split(".")[-2]
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    asked = {field.name for field in dataclasses.fields(config_class)}
    for module in (modeling, cache_utils, masking_utils, modeling_rope_utils):
        asked |= read_by(module)
    known = {*COMPUTE_NOTHING, *READ_ELSEWHERE}
    known |= {key for edit in edits(family).values() for key in edit}
    known |= {key for edit in REFUSED.values() for key in edit}
    known |= {key for kind, _, edit in ALSO_REFUSED if kind == family for key in edit}
    assert asked - known - NO_OPTIONS == set()


def test_every_rope_parameter_that_transformers_reads_is_in_this_file():
    source = inspect.getsource(modeling_rope_utils)
    asked = set(re.findall(r'rope_parameters(?:_dict)?(?:\.get\(|\[)"(\w+)"', source))
    assert len(asked) > 10
    objects = [
        edit[name]
        for family in BASES
        for edit in edits(family).values()
        for name in ("rope_parameters", "rope_scaling")
        if name in edit
    ]
    assert asked - {FULL, SLIDING} <= {key for parameters in objects for key in parameters}


@pytest.mark.parametrize("source", ["config.json", "generation_config.json"])
def test_the_file_of_a_wrong_token_is_named(written, source):
    folder = written("llama")
    raw = json.loads((folder / "config.json").read_text()) if source == "config.json" else {}
    (folder / source).write_text(json.dumps({**raw, "eos_token_id": [3, -1]}))
    with pytest.raises(ValueError, match=r"eos_token_id .* at least 0 .*got \[3, -1\]") as caught:
        read_config(folder)
    assert str(caught.value).startswith(f"{folder / source}: ")
