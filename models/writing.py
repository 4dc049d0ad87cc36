"""Writing the values of a Hugging Face `config.json` that families have in common.

Families write what they can say and leave it at that: whether a file says all of a configuration is
found out by reading it (`kvjax.models.families.describe`).
"""

from __future__ import annotations

import math
from typing import Any

from .config import DecoderConfig, RopeConfig
from .reading import FULL, SLIDING


def decoder_options(config: DecoderConfig, activation: str = "hidden_act") -> dict[str, Any]:
    """What all families' configurations say in the same words, as transformers 5 writes it.

    Args:
      config: of a decoder.
      activation: the name of the option that names the MLP's activation.
    """
    ends = config.eos_token_ids
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": _stated_positions(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        activation: config.activation,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": rope_options(config.rope, config.head_dim),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": None,  # `transformers` would take the family's own, which may not exist
    }


def rope_options(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """A rotary embedding as `rope_parameters`."""
    own: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.rotary_dim != head_dim:
        own["partial_rotary_factor"] = rotated_share(rope.rotary_dim, head_dim)
    if rope.type != "default":
        own["factor"] = rope.factor
    if rope.type in ("llama3", "yarn", "longrope"):
        own["original_max_position_embeddings"] = rope.original_max_positions
    if rope.type == "llama3":
        own["low_freq_factor"] = rope.low_freq_factor
        own["high_freq_factor"] = rope.high_freq_factor
    if rope.type == "yarn":
        own |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        own["truncate"] = rope.truncate
    if rope.type == "longrope":
        own["short_factor"] = list(rope.short_factors)
        own["long_factor"] = list(rope.long_factors)
    if rope.attention_factor is not None:
        own["attention_factor"] = rope.attention_factor
    return own


def ropes_of_types(config: DecoderConfig) -> dict[str, Any]:
    """The rotary embeddings of layers without and with a window, for families that have two."""
    layers = [config.layer(index) for index in range(config.num_layers)]
    local = next((layer.rope for layer in layers if layer.window is not None), config.rope)
    ropes = {FULL: config.rope, SLIDING: local or config.rope}
    return {kind: rope_options(rope, config.head_dim) for kind, rope in ropes.items()}


def window_options(config: DecoderConfig) -> dict[str, Any]:
    """The sliding window and which layers have it."""
    windows = [config.layer(index).window for index in range(config.num_layers)]
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def divided_heads(config: DecoderConfig) -> None:
    """Raises unless the heads divide the residual stream, as `transformers` asks of some families.

    Raises:
      ValueError: they do not.
    """
    if config.hidden_size % config.query_heads:
        raise ValueError(
            "its hidden_size must be a multiple of num_attention_heads, got "
            f"{config.hidden_size} and {config.query_heads}"
        )


def _stated_positions(config: DecoderConfig) -> int:
    """`max_position_embeddings`: types whose files state the context before it was stretched."""
    rope = config.rope
    if rope.type == "dynamic":
        return rope.original_max_positions
    if rope.type == "linear":  # `usable_positions` cuts the product to a whole number
        return math.ceil(config.max_positions / rope.factor)
    return config.max_positions


def rotated_share(rotary_dim: int, head_dim: int) -> float:
    """The `partial_rotary_factor` that gives so many channels, cut to a whole number."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1.0)
