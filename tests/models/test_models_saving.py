"""Folders that `save_pretrained` writes: `transformers` and `from_pretrained` load them."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file

from kvjax.models import (
    DecoderConfig,
    LayerConfig,
    RopeConfig,
    demo,
    from_pretrained,
    load_tokenizer,
    random_decoder,
    save_pretrained,
    saving,
)
from kvjax.models.checkpoints import read_config
from kvjax.models.families import FAMILIES, describe
from tests.models.family_cases import NAMED, SEEDS, drawn
from tests.models.test_families import CASES, as_chatglm, chatglm_config
from tests.support.decoders import assert_equal
from tests.support.hf_models import SIZES, pytorch, reference_logits, save_reference
from tests.support.tolerances import close

TINY = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128,
)  # fmt: skip
LINEAR = RopeConfig(rotary_dim=8, type="linear", factor=3.0)


def transformers_model(folder):
    """What `transformers` loads, which must have used every tensor."""
    pytorch()
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_equal_modules(model, other) -> None:
    """Weights and buffers (frequencies of the rotary embedding) of `transformers`, bit for bit."""
    ours, theirs = (dict([*one.named_parameters(), *one.named_buffers()]) for one in (model, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert pytorch().equal(value, theirs[name]), name


def check_round_trip(tmp_path, family: str, changes: dict) -> None:
    reference = save_reference(tmp_path / "first", family, attention="eager", **changes)
    model = from_pretrained(tmp_path / "first")
    save_pretrained(model, tmp_path / "second", max_shard_bytes=20_000)
    again = from_pretrained(tmp_path / "second")
    assert again.config == model.config
    assert again.config.model_type == family
    assert_equal(again, model)
    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 30)
    saved = transformers_model(tmp_path / "second")
    assert type(saved) is type(reference)
    assert_equal_modules(saved, reference)
    # Not bit for bit: products depend on where weights begin in memory.
    close(reference_logits(saved, tokens, 20), reference_logits(reference, tokens, 20))


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_every_family_with_equal_logits(tmp_path, name):
    check_round_trip(tmp_path, *CASES[name])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_transformers_loads_the_first_families_too(tmp_path, family):
    changes = {"sliding_window": 7} if family == "mistral" else {"attention_bias": True}
    check_round_trip(tmp_path, family, changes)


def test_every_family_is_saved_in_a_test_of_this_file():
    assert {"llama", "mistral", "chatglm", *NAMED} == set(FAMILIES)


@pytest.mark.parametrize("family", NAMED)
def test_configurations_that_are_drawn_come_back(tmp_path, family):
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        config = transformers.AutoConfig.for_model(family, **{**SIZES, **drawn(family, seed)})
        config.save_pretrained(folder)
        read = read_config(folder)
        raw = describe(read)
        assert raw["model_type"] == family
        (folder / "config.json").write_text(json.dumps(raw))
        assert read_config(folder) == read


def test_chatglm_is_saved_as_glm(tmp_path):
    reference = save_reference(
        tmp_path / "glm", "glm", head_dim=16, rms_norm_eps=1.5625e-7, eos_token_id=[3, 4],
        attention="eager", rope_parameters={
            "rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5,
        },
    )  # fmt: skip
    from safetensors.numpy import save_file

    (tmp_path / "chatglm").mkdir()
    tensors = as_chatglm(load_file(tmp_path / "glm" / "model.safetensors"))
    save_file(tensors, tmp_path / "chatglm" / "model.safetensors")
    (tmp_path / "chatglm" / "config.json").write_text(json.dumps(chatglm_config()))
    model = from_pretrained(tmp_path / "chatglm")
    save_pretrained(model, tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved"), model)
    tokens = np.arange(12)
    saved = transformers_model(tmp_path / "saved")
    assert saved.config.model_type == "glm" and saved.generation_config.eos_token_id == [3, 4]
    assert_equal_modules(saved, reference)
    close(reference_logits(saved, tokens, 12), reference_logits(reference, tokens, 12))


# Decoders of one's own


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "llama"),
        ({"sliding_window": 9}, "mistral"),
        ({"layers": (LayerConfig(TINY.rope), LayerConfig(TINY.rope, 9))}, "ministral"),
        ({"attention_bias": True, "output_bias": False}, "qwen2"),
        ({"qk_norm": "head"}, "qwen3"),
        ({"rope": RopeConfig(rotary_dim=4)}, "phi3"),
        ({"layers": (LayerConfig(None), LayerConfig(TINY.rope))}, "smollm3"),
        ({"norms": "after", "qk_norm": "width", "norm_in_float32": True}, "olmo2"),
        ({"rope": LINEAR, "max_positions": 129}, "llama"),
        ({"model_type": "qwen2"}, "llama"),
        ({"model_type": "mistral"}, "mistral"),
    ],
)  # fmt: skip
def test_the_first_type_that_has_such_decoders_is_written(tmp_path, changes, kind):
    config = dataclasses.replace(TINY, **changes)
    model = random_decoder(config, seed=1)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert (again.config, again.config.model_type) == (config, kind)
    assert_equal(again, model)
    transformers_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope": LINEAR},
            "for llama, max_positions would be 129, not 128",
        ),
        ({"embedding_scale": 3.0}, "for llama, embedding_scale would be 1.0, not 3.0"),
        (
            {"layers": (LayerConfig(TINY.rope, 9), LayerConfig(TINY.rope, 8))},
            "for llama, layers would be",
        ),
    ],
)
def test_decoders_that_no_type_has_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match="no model type of Hugging Face .*" + message) as caught:
        save_pretrained(random_decoder(dataclasses.replace(TINY, **changes)), tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_model_types_make_no_difference_to_equality():
    assert dataclasses.replace(TINY, model_type="llama") == TINY
    assert hash(dataclasses.replace(TINY, model_type="llama")) == hash(TINY)


def test_end_tokens_are_those_of_generation(tmp_path):
    config = dataclasses.replace(TINY, bos_token_id=1, eos_token_ids=(5, 6))
    save_pretrained(random_decoder(config), tmp_path / "ends")
    assert from_pretrained(tmp_path / "ends").config.eos_token_ids == (5, 6)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "ends")
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [5, 6])
    save_pretrained(random_decoder(TINY), tmp_path / "none")
    assert not (tmp_path / "none" / "generation_config.json").exists()


# Files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_are_kept(tmp_path, dtype):
    save_pretrained(random_decoder(TINY), tmp_path / "first")
    model = from_pretrained(tmp_path / "first", dtype=dtype)
    save_pretrained(model, tmp_path / "second")
    assert json.loads((tmp_path / "second" / "config.json").read_text())["dtype"] == dtype
    assert_equal(from_pretrained(tmp_path / "second", dtype=dtype), model)
    torch = pytorch()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert loaded.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("most", [1, 6144, 20_000, 50_000, 10**9])
def test_shards(tmp_path, monkeypatch, most):
    """Files of at most so many bytes, unless one tensor is larger; small blocks change nothing."""
    monkeypatch.setattr(saving, "_WRITTEN_AT_ONCE", 100)
    model = random_decoder(TINY)
    save_pretrained(model, tmp_path, max_shard_bytes=most)
    files = sorted(tmp_path.glob("*.safetensors"))
    held = [load_file(file) for file in files]
    for tensors in held:
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= most
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == sum(x.nbytes for y in held for x in y.values())
        assert {tuple(sorted(content["weight_map"].values()))} and len(files) == int(
            files[0].name[-17:-12]
        )
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    assert_equal(from_pretrained(tmp_path), model)


def test_nothing_of_a_folder_remains_where_writing_fails(tmp_path, monkeypatch):
    def fail(path, tensors):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(saving, "write_tensors", fail)
    with pytest.raises(OSError, match="No space"):
        save_pretrained(random_decoder(TINY), tmp_path / "a" / "new")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_folders_that_are_in_use_are_refused(tmp_path):
    model = random_decoder(TINY)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="must be new or empty, but there is something in it"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="file is not a folder"):
        save_pretrained(model, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    save_pretrained(model, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert_equal(from_pretrained(tmp_path / "empty"), model)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_is_as_readable_as_any(tmp_path):
    (tmp_path / "other").mkdir()
    save_pretrained(random_decoder(TINY), tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_tokenizer_is_copied(tmp_path):
    save_pretrained(random_decoder(TINY), tmp_path / "new", tokenizer_from=demo.directory())
    copied, own = load_tokenizer(tmp_path / "new"), load_tokenizer(demo.directory())
    assert copied.get_vocab() == own.get_vocab()
    with pytest.raises(ValueError, match="there are no files of a tokenizer in"):
        save_pretrained(random_decoder(TINY), tmp_path / "other", tokenizer_from=tmp_path)


def test_the_bundled_model_comes_back(tmp_path):
    model = from_pretrained(demo.directory(), dtype="bfloat16")
    save_pretrained(model, tmp_path, tokenizer_from=demo.directory())
    assert_equal(from_pretrained(tmp_path, dtype="bfloat16"), model)
    theirs, ours = (
        load_file(folder / "model.safetensors") for folder in (demo.directory(), tmp_path)
    )
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(value.view(np.uint16), ours[name].view(np.uint16))


def test_models_that_are_not_their_configuration_are_refused(tmp_path):
    model = random_decoder(TINY)
    with pytest.raises(TypeError, match="model must be a Decoder, got Linear"):
        save_pretrained(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        save_pretrained(model, tmp_path, max_shard_bytes=0)
    kernel = model.layers[0].mlp.up_proj.kernel
    before = kernel.get_value()
    kernel.set_value(before.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"must have one dtype of .*, got bfloat16, float32"):
        save_pretrained(model, tmp_path)
    kernel.set_value(before[:, :-1])
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.kernel has shape \[32, 47\], expected"):
        save_pretrained(model, tmp_path)
    kernel.set_value(before)
    del model.layers[0].mlp.up_proj
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.kernel is missing for"):
        save_pretrained(model, tmp_path)
    shapes = nnx.eval_shape(lambda: random_decoder(TINY))
    with pytest.raises(TypeError, match="must be an array, got ShapeDtypeStruct"):
        save_pretrained(shapes, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_model_keeps_no_copy_on_the_host():
    value = jax.device_put(jnp.arange(6.0).reshape(2, 3), jax.devices()[0])
    np.testing.assert_array_equal(saving.on_host(value), np.arange(6.0).reshape(2, 3))
    assert value._npy_value is None
