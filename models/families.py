"""The registry of model families, by the `model_type` of a Hugging Face `config.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.messages import brief, printable
from kvjax.regular_files import read_json

from .config import DecoderConfig
from .llama import LAYER, llama_config, llama_weights, mistral_config
from .reading import Weight
from .safetensors_files import tensor_names


class Family(NamedTuple):
    """How the checkpoints of one `model_type` are read.

    Attributes:
      config: content of `config.json` → `DecoderConfig`.
      weights: `DecoderConfig` → every tensor name that a checkpoint may have, and its place.
      layer: matches the beginning of the names of a layer's tensors; its group is the number.
    """

    config: Callable[[Mapping[str, Any]], DecoderConfig]
    weights: Callable[[DecoderConfig], dict[str, Weight]]
    layer: re.Pattern[str]


FAMILIES: dict[str, Family] = {
    "llama": Family(llama_config, llama_weights, LAYER),
    "mistral": Family(mistral_config, llama_weights, LAYER),
}
"""Supported model types."""


def read_raw_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of `config.json`, with the token ids of `generation_config.json` where it exists.

    Generation's end tokens win: chat models end at more tokens than their `config.json` says.

    Raises:
      ValueError: a file is unreadable, the model type is unknown, or the weights are quantised.
    """
    folder = Path(directory)
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{printable(folder / 'config.json')}: model_type {brief(kind)} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"{printable(folder / 'config.json')}: quantization_config "
            f"({printable(method or 'unnamed')}) is not supported; "
            "supported are plain float32, float16 and bfloat16 weights"
        )
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")
        for name in ("bos_token_id", "eos_token_id"):
            if generation.get(name) is not None:
                raw[name] = generation[name]
    return raw


def read_config(directory: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of the Hugging Face model in `directory`.

    Args:
      directory: a folder with `config.json`, and `generation_config.json` where it has one (its
        end tokens are then used).

    Returns:
      The `DecoderConfig`.

    Raises:
      ValueError: the file is missing or unreadable; its model type, rope type, activation or
        quantisation is not supported (the message says what is); a value is missing or wrong; a
        checkpoint in the folder is unreadable, or has fewer layers than the configuration says.

    Example:
      >>> from kvjax.models import read_config
      >>> read_config("llama-3.2-1b").num_layers  # doctest: +SKIP
      16
    """
    folder, raw = Path(directory), read_raw_config(directory)
    config = parse_config(raw, folder / "config.json")
    names = tensor_names(folder)
    if names is not None:
        check_layers(raw, config, names, folder / "config.json")
    return config


def parse_config(raw: Mapping[str, Any], source: Path) -> DecoderConfig:
    """The configuration in `raw`, as `read_raw_config` gives it; errors name the file `source`."""
    try:
        return FAMILIES[raw["model_type"]].config(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{printable(source)}: {error}") from error


def check_layers(
    raw: Mapping[str, Any], config: DecoderConfig, names: Iterable[str], source: Path
) -> None:
    """Raises ValueError where a configuration has more layers than there are tensors of.

    Every layer costs memory before the first weight is read.
    """
    matches = map(FAMILIES[raw["model_type"]].layer.match, names)
    layers = len({match[1] for match in matches if match})
    if config.num_layers > layers:
        raise ValueError(
            f"{printable(source)}: num_hidden_layers is {config.num_layers}, but the checkpoint "
            f"has tensors of {layers} layers"
        )
