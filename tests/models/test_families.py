"""Every family against `transformers`, in float32: the same weights, the same logits."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.models import abstract_decoder, from_pretrained, read_config
from tests.models.family_cases import LLAMAS, NAMED
from tests.support.cases import OF_A_TEXT
from tests.support.decoders import assert_equal
from tests.support.hf_models import LENGTHS, SIZES, both_logits, reference_logits
from tests.support.hf_models import save_reference as save
from tests.support.marks import some_slow
from tests.support.tensor_changes import put, remove
from tests.support.tolerances import close

# Random models of transformers are computed with its own eager attention: the others leave out the
# soft cap.
save_reference = functools.partial(save, attention="eager")

CASES = {
    f"{family}-{name}": (family, changes)
    for family, cases in {**LLAMAS, **NAMED}.items()
    for name, changes in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_logits_of_named_models(tmp_path, name):
    """Prompts and decode steps of four rows, padded in all ways, that differ in length."""
    family, changes = CASES[name]
    reference = save_reference(tmp_path, family, **changes)
    ours, theirs = both_logits(from_pretrained(tmp_path), reference)
    assert theirs[0][0].std() > 0.3, "all logits are nearly alike"
    for row, length in enumerate(LENGTHS):
        for part, what in enumerate(("prompt", "decoding")):
            what = f"{what} of row {row} of {length} tokens"
            close(ours[row][part], theirs[row][part], "accumulated", what)


def transformers_config(family, changes):
    return transformers.AutoConfig.for_model(family, **{**SIZES, **changes})


def test_layers_that_are_alike_are_equal_as_graphs(tmp_path):
    """They share compiled code: a model has as many kinds of layers as of settings."""
    changes = {"num_hidden_layers": 12, "sliding_window": 7, "head_dim": 8}
    transformers_config("gemma3_text", changes).save_pretrained(tmp_path)
    model = abstract_decoder(read_config(tmp_path))
    graphs = [nnx.split(layer)[0] for layer in model.layers]
    assert len(set(graphs)) == 2
    assert graphs[0] == graphs[6] and graphs[5] == graphs[11] and graphs[4] != graphs[5]


# ChatGLM's format

CHATGLM = {
    "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False, "ffn_hidden_size": 48, "hidden_size": 32,
    "kv_channels": 16, "layernorm_epsilon": 1.5625e-07, "multi_query_attention": True,
    "multi_query_group_num": 2, "num_attention_heads": 4, "num_layers": 2, "original_rope": True,
    "padded_vocab_size": 97, "post_layer_norm": True, "rmsnorm": True, "rope_ratio": 50,
    "seq_length": 64, "eos_token_id": [3, 4], "tie_word_embeddings": False,
}  # fmt: skip


def as_chatglm(tensors: dict) -> dict:
    """The tensors of a GLM checkpoint by ChatGLM's names, fused as there."""
    named = {
        "transformer.embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": tensors["model.norm.weight"],
        "transformer.output_layer.weight": tensors["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32),
    }
    for layer in range(sum("input_layernorm" in name for name in tensors)):
        new, old = f"transformer.encoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            qkv = [tensors.get(f"{old}.self_attn.{x}_proj.{kind}") for x in "qkv"]
            if qkv[0] is None:
                continue
            named[f"{new}.self_attention.query_key_value.{kind}"] = np.concatenate(qkv)
        for ours, theirs in (
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            named[f"{new}.{ours}.weight"] = tensors[f"{old}.{theirs}.weight"]
    return named


HALF_ROTATED = {"rope_type": "default", "partial_rotary_factor": 0.5}
GLM = {
    "head_dim": 16, "rms_norm_eps": 1.5625e-7, "eos_token_id": [3, 4],
    "rope_parameters": {**HALF_ROTATED, "rope_theta": 500_000.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def glm_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    save_reference(folder, "glm", **GLM)
    return folder


@pytest.fixture
def chatglm_folder(tmp_path, glm_folder):
    """`chatglm_folder(change, **options)`: the same model in ChatGLM's format."""

    def make(change=None, **options):
        tensors = as_chatglm(load_file(glm_folder / "model.safetensors"))
        if change is not None:
            change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**CHATGLM, **options}))
        return tmp_path

    return make


def test_chatglm_is_glm_by_other_names(glm_folder, chatglm_folder):
    model, same = from_pretrained(chatglm_folder()), from_pretrained(glm_folder)
    assert model.config == same.config
    assert_equal(model, same)


@pytest.mark.parametrize(("edit", "same"), [
    # Of ChatGLM's file, and of GLM's.
    ({"num_layers": 3}, {"num_hidden_layers": 3}),
    ({"padded_vocab_size": 99}, {"vocab_size": 99}),
    ({"hidden_size": 64}, {"hidden_size": 64}),
    ({"ffn_hidden_size": 40}, {"intermediate_size": 40}),
    ({"num_attention_heads": 8}, {"num_attention_heads": 8}),
    ({"multi_query_group_num": 1}, {"num_key_value_heads": 1}),
    ({"kv_channels": 8}, {"head_dim": 8}),
    ({"layernorm_epsilon": 0.1}, {"rms_norm_eps": 0.1}),
    ({"add_qkv_bias": False}, {"attention_bias": False}),
    ({"rope_ratio": 0.1}, {"rope_parameters": {**HALF_ROTATED, "rope_theta": 1000.0}}),
    ({"rope_ratio": 1}, {"rope_parameters": {**HALF_ROTATED, "rope_theta": 10_000.0}}),
    ({"seq_length": 4096, "hidden_dropout": 0.5, "apply_query_key_layer_scaling": True},
     {"max_position_embeddings": 4096}),
])  # fmt: skip
def test_an_edited_chatglm_is_an_edited_glm(tmp_path, edit, same):
    (tmp_path / "config.json").write_text(json.dumps({**CHATGLM, **edit}))
    chatglm = read_config(tmp_path)
    transformers_config("glm", {**GLM, **same}).save_pretrained(tmp_path)
    assert read_config(tmp_path) == chatglm


def test_chatglm_without_its_head(glm_folder, chatglm_folder):
    """Saved from the base model, whose names have no `transformer.` before them."""

    def base(tensors):
        head = tensors["transformer.output_layer.weight"]
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["output_layer.weight"] = head

    assert_equal(from_pretrained(chatglm_folder(base)), from_pretrained(glm_folder))


QKV = "transformer.encoder.layers.1.self_attention.query_key_value.weight"


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(QKV), "1 tensors are missing: " + QKV),
        (put("model.layers.0.self_attn.q_proj.weight", ones(64, 32)), "q_proj.weight .*unknown"),
        (put(QKV, ones(96, 32)), QKV + r" .*has shape \[96, 32\], expected \[128, 32\]"),
        (lambda tensors: tensors[QKV].fill(np.nan), f"{QKV} of .* has NaN or infinite"),
    ],
)
def test_every_fused_tensor_is_accounted_for(chatglm_folder, change, message):
    with pytest.raises(ValueError, match=message):
        from_pretrained(chatglm_folder(change))


def test_a_sharding_rule_is_asked_for_each_parameter(chatglm_folder):
    asked = []

    def rule(name, shape):
        asked.append((name, shape))

    from_pretrained(chatglm_folder(), sharding=rule)
    path = "layers.0.attention.qkv_proj.kernel"
    assert [shape for name, shape in asked if name == path] == [(2, 64, 32)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rmsnorm": False}, "rmsnorm must be true, got False"),
        ({"quantization_bit": 4}, "quantization_bit must be 0, got 4"),
        ({"kv_channels": None}, "kv_channels is missing"),
        ({"rope_ratio": "x"}, "rope_ratio must be a finite number above 0, got 'x'"),
        ({"multi_query_group_num": 3}, "must be a multiple of multi_query_group_num, got 4"),
        ({"kv_channels": 6}, "of kv_channels = 6 channels must be an even number, got 3"),
        ({"add_qkv_bias": "yes"}, "add_qkv_bias must be true or false, got 'yes'"),
        ({"num_layers": 5}, "num_layers is 5, but the checkpoint has tensors of 2 layers"),
    ],
)
def test_other_chatglm_models_are_refused(chatglm_folder, options, message):
    with pytest.raises(ValueError, match=message):
        read_config(chatglm_folder(**options))


# Generation


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    made = {}

    def model(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            changes = {"max_position_embeddings": 256, **next(iter(NAMED[family].values()))}
            reference = save_reference(folder, family, **changes)
            made[family] = from_pretrained(folder), reference
        return made[family]

    return model


RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(SIZES["vocab_size"], size=size).tolist() for size in (53, 9)]


@pytest.mark.parametrize("family", NAMED)
def test_greedy_text_is_that_of_transformers(model_of, family):
    model, reference = model_of(family)
    result = kvjax.generate(model, PROMPTS, max_new_tokens=8, end_tokens=())
    for prompt, written in zip(PROMPTS, result.tokens, strict=True):
        logits = reference_logits(reference, np.array(prompt + written), len(prompt))
        assert written == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def method(name: str, model) -> kvjax.KVTransform:
    """A method as the command line makes it, with a budget that compresses the longer row."""
    texts = {
        **OF_A_TEXT, "reposition": "streaming_llm(reposition=True)",
        "quantize": "chain(h2o, quantize)",
    }  # fmt: skip
    return kvjax.calibrated(kvjax.parse(texts.get(name, name), 36), model, [PROMPTS[0]])


ALIKE, FEW = ("qwen2", "qwen3", "glm4", "olmo2", "olmo3", "ministral"), ("snapkv", "infinigen")
"""Families whose caches hold what those of another family do: so that few methods run on them."""
QUICK = {
    ("smollm3", "reposition"), ("gemma3_text", "snapkv"), ("phi3", "h2o"), ("olmo3", "infinigen"),
}  # fmt: skip


METHODS = (*kvjax.registry.METHODS, "reposition", "quantize")
WRITES = [(family, name) for family in NAMED for name in (FEW if family in ALIKE else METHODS)]
# Every method on a family with windows, and one on some others; the rest runs before a release.
SOME = {pair for pair in WRITES if pair[0] == "gemma3_text"}
SOME |= {(family, "snapkv") for family in ("llama", "qwen2", "olmo2")}


@pytest.mark.parametrize(("family", "name"), some_slow(WRITES, *QUICK, exhaustive={*WRITES} - SOME))
def test_every_method_writes_text(model_of, family, name):
    """The batch gives what its rows give alone, and a budget for everything changes nothing."""
    model, _ = model_of(family)
    transform = method(name, model)
    context = kvjax.read(model, PROMPTS, transform=transform, max_new=8, buckets=[64])
    together = kvjax.generate(model, None, context=context, max_new_tokens=6, end_tokens=())
    assert [len(row) for row in together.tokens] == [6, 6]
    assert np.isfinite(np.asarray(together.context.logits)).all()
    if name in ("full", "snapkv", "h2o", "streaming_llm"):  # the short row is within the budget
        full = kvjax.generate(model, PROMPTS[1:], max_new_tokens=6, end_tokens=(), buckets=[64])
        assert together.tokens[1] == full.tokens[0]
