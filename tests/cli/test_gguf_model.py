"""Commands with a GGUF file: a small one, and SmolLM2-135M-Instruct with what is known of it."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import transformers
from flax import nnx

from kvjax.models import from_pretrained, read_config
from tests.cli.commands import error, output
from tests.support.gguf_models import add_tokenizer, write_model
from tests.support.hf_models import pytorch


@pytest.fixture(scope="module")
def story_file(tinystories, tmp_path_factory):
    """TinyStories-656K as a GGUF file."""
    pytorch()
    described = json.loads((tinystories / "tokenizer.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tinystories).float()

    def add(writer, config):
        add_tokenizer(writer, "llama", described, "default")
        writer.add_unk_token_id(0)

    path = tmp_path_factory.mktemp("story") / "model.gguf"
    return write_model(path, "llama", model, add)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_model_is_found_from_another_folder(
    capsys, monkeypatch, story_file, tinystories, tmp_path, kind
):
    """`kvjax read` is given a relative path, and `kvjax ask` runs elsewhere."""
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        shutil.copyfile(story_file, "model")
    else:
        shutil.copytree(tinystories, "model")
    (tmp_path / "document.txt").write_text("Once upon a time there was a girl named Lily. " * 4)
    output(capsys, "read", "document.txt", "--model", "model", "--out", "read", "--json")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    asked = ["ask", "../read", "Once upon", "--max-new", "2", "--json"]
    expected = json.loads(output(capsys, *asked))["results"]

    (tmp_path / "model").rename(tmp_path / "moved")
    said = error(capsys, *asked)
    assert said.endswith(f"is no longer at {tmp_path}/model: --model says where\n")
    assert json.loads(output(capsys, *asked, "--model", "../moved"))["results"] == expected


@pytest.mark.slow
def test_smollm2_equals_its_folder(smollm2, smollm2_gguf):
    """Every weight bit for bit in float32, and all of the configuration but the end tokens."""
    config = read_config(smollm2_gguf)
    assert config.eos_token_ids == (0, 2, 4), "<|endoftext|>, <|im_end|>, <reponame>"
    assert dataclasses.replace(config, eos_token_ids=(2,)) == read_config(smollm2)
    ours, theirs = (
        dict(nnx.to_flat_state(nnx.state(from_pretrained(path, "float32"))))
        for path in (smollm2_gguf, smollm2)
    )
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        pair = (np.asarray(x.get_value()).view(np.uint32) for x in (value, theirs[path]))
        np.testing.assert_array_equal(*pair, err_msg=str(path))
