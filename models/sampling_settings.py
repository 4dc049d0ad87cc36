"""Sampling settings that a model's publisher ships with the weights."""

from __future__ import annotations

import os
from typing import Any

import kvjax
from kvjax.files import read_json

from .finding import find_model, is_gguf
from .gguf_header import read_header

# Entries of a GGUF file → names of `generation_config.json`. Another entry `general.sampling.NAME`
# keeps NAME, and kvjax then reports that it does not support it.
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_GGUF_SAMPLING = "general.sampling."


def read_sampling_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the settings of a model's `generation_config.json` or a GGUF file's metadata.

    Args:
      path: a folder, a file or an id, as in `from_pretrained`.

    Returns:
      Names of `generation_config.json` and their values; empty if the model has no settings. A GGUF
      file with any setting gets `do_sample = True`, since llama.cpp draws by default.

    Raises:
      ValueError: the model or its file cannot be read.

    Example:
      >>> from kvjax.models import demo
      >>> from kvjax.models.sampling_settings import read_sampling_settings
      >>> "temperature" in read_sampling_settings(demo.directory())
      False
    """
    model = find_model(path)
    if is_gguf(model):
        entries = read_header(model).metadata
        settings = {
            name.removeprefix(_GGUF_SAMPLING): value
            for name, value in entries.items()
            if name.startswith(_GGUF_SAMPLING)
        }
        settings = {_GGUF_NAMES.get(name, name): value for name, value in settings.items()}
        return {"do_sample": True, "top_k": 0} | settings if settings else {}
    file = model / "generation_config.json"
    return read_json(file) if file.exists() else {}


def load_sampling(path: str | os.PathLike[str]) -> kvjax.Sampling:
    """Loads the sampling that a model asks for, for `kvjax.generate(sampling=)`.

    Args:
      path: a folder, a file or an id, as in `from_pretrained`.

    Returns:
      The result of `kvjax.Sampling.from_settings` for the model's settings; greedy without any.

    Raises:
      ValueError: a file cannot be read, or asks for something that kvjax does not support. The
        message names it.

    Example:
      >>> from kvjax.models import demo, load_sampling
      >>> load_sampling(demo.directory())
      Sampling(temperature=0.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0)
    """
    return kvjax.Sampling.from_settings(read_sampling_settings(path))
