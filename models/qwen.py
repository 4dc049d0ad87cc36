"""Qwen2, Qwen2.5 and Qwen3, dense, with their differences from Llama.

- `qwen2`: queries, keys and values have a bias, the output projection has none.
- `qwen3`: heads have 128 channels by default; queries and keys are normalised head by head.
- Both: a sliding window from layer `max_window_layers` on, where `use_sliding_window` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.messages import brief

from .config import DecoderConfig
from .hf_config import read_decoder, read_flag, read_window
from .tensor_names import QK_NORMS, TensorNames

QWEN3_NAMES = TensorNames(norms={**TensorNames().norms, **QK_NORMS})


def qwen2_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `Qwen2ForCausalLM` configuration from the content of its `config.json`."""
    return read_decoder(
        raw,
        max_positions=32768,
        kv_heads=32,
        attention_bias=True,
        output_bias=False,
        **_windows(raw),
    )


def qwen3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `Qwen3ForCausalLM` configuration from the content of its `config.json`."""
    return read_decoder(
        raw,
        max_positions=32768,
        kv_heads=32,
        head_dim=128,
        attention_bias=read_flag(raw, "attention_bias"),
        qk_norm="head",
        **_windows(raw),
    )


def _windows(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the window, if it is used, for layers from `max_window_layers` on."""
    window = read_window(raw, 4096) if read_flag(raw, "use_sliding_window") else None
    first = raw.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ValueError(f"max_window_layers must be an integer, got {brief(first)}")
    return {"window": window, "slides": lambda index: window is not None and index >= first}
