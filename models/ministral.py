"""Ministral: Mistral whose layers have the sliding window or none (`layer_types`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .reading import layers_with_windows, read_decoder, read_window
from .tensor_names import TensorNames
from .writing import decoder_options, window_options

MINISTRAL_NAMES = TensorNames()


def ministral_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `MinistralForCausalLM` configuration, from the content of its `config.json`.

    Raises:
      ValueError: a value is missing, of the wrong type, or not supported; names it.
    """
    window = read_window(raw, 4096)
    layers = layers_with_windows(raw, window, lambda _: window is not None)
    return read_decoder(raw, max_positions=131072, kv_heads=8, layers=layers)


def ministral_options(config: DecoderConfig) -> dict[str, Any]:
    """The content of a `MinistralForCausalLM`'s `config.json`."""
    return {**decoder_options(config), **window_options(config)}
