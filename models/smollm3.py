"""SmolLM3: Llama with tied embeddings whose every fourth layer has no rotary embedding.

`no_rope_layers` has a 1 for each layer with a rotary embedding, and a 0 for each without.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvjax.messages import brief

from .config import MOST_LAYERS, DecoderConfig
from .hf_config import read_decoder, read_flag, read_rope, read_size, read_window


def smollm3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `SmolLM3ForCausalLM` configuration from the content of its `config.json`."""
    window = read_window(raw, None) if read_flag(raw, "use_sliding_window") else None

    rotated = _rotated(raw, read_size(raw, "num_hidden_layers", most=MOST_LAYERS))
    return read_decoder(
        raw,
        max_positions=32768,
        kv_heads=4,
        tied=True,
        attention_bias=read_flag(raw, "attention_bias"),
        mlp_bias=read_flag(raw, "mlp_bias"),
        rope=partial(read_rope, raw, theta=2_000_000.0),
        window=window,
        slides=lambda index: window is not None and not rotated[index],
        rotated=rotated,
    )


def _rotated(raw: Mapping[str, Any], count: int) -> list[bool]:
    """Returns whether each layer has a rotary embedding."""
    flags = raw.get("no_rope_layers")
    if flags is None:
        period = read_size(raw, "no_rope_layer_interval", 4)
        return [(index + 1) % period != 0 for index in range(count)]
    if not isinstance(flags, list) or len(flags) < count or any(x not in (0, 1) for x in flags):
        raise ValueError(
            f"no_rope_layers must be a list of 0 and 1 for {count} layers, got {brief(flags)}"
        )
    return [x == 1 for x in flags[:count]]
