"""Shapes that are known by name: those of published configurations."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from kvjax.models import DecoderConfig, LayerConfig, abstract_decoder
from kvjax.models.shapes import SHAPES, shape_config
from tests.models.test_models_config import SIZES

PUBLISHED = {
    "llama-3.1-8b": "Llama-3.1-8B-Instruct",
    "mistral-7b-v0.2": "Mistral-7B-Instruct-v0.2",
    "qwen2-7b": "Qwen2-7B",
    "glm-4-9b-chat": "glm-4-9b-chat.chatglm",
}
# As the models' cards and papers say, embedding included, a tied one once. The others are those of
# published files, whose sizes are tested with them.
PARAMETERS = {
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}


def without_tokens(config: DecoderConfig) -> DecoderConfig:
    return dataclasses.replace(config, bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_that_of_the_published_configuration(name, data_dir):
    file = data_dir / "hf_configs" / f"{PUBLISHED[name]}.config.json"
    assert without_tokens(shape_config(name)) == without_tokens(shape_config(file))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("405b" in name))
        for name in SHAPES
        if name not in PUBLISHED
    ],
)
def test_a_shape_has_as_many_parameters_as_the_model(name):
    model = abstract_decoder(shape_config(name))
    assert sum(x.size for x in jax.tree.leaves(model)) == PARAMETERS[name]


def test_some_layers_of_a_shape():
    whole, two = shape_config("llama-3.1-8b"), shape_config("llama-3.1-8b", 2)
    assert two == dataclasses.replace(whole, num_layers=2)


def test_layers_that_differ_stay_what_they_are(tmp_path):
    raw = {"model_type": "gemma2", **SIZES, "head_dim": 8, "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole, three = shape_config(tmp_path), shape_config(tmp_path, 3)
    assert isinstance(whole.layers[0], LayerConfig) and three.layers == whole.layers[:3]
    assert three.windows == (16, None, 16)


def test_no_such_shape():
    with pytest.raises(ValueError, match=r"got 'lama-3.1-8b'; did you mean llama-3.1-8b\?"):
        shape_config("lama-3.1-8b")


@pytest.mark.parametrize("layers", [0, 33])
def test_layers_that_a_shape_does_not_have(layers):
    with pytest.raises(ValueError, match="layers must be at"):
        shape_config("llama-3.1-8b", layers)
