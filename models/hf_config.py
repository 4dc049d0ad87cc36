"""Reads the values of a Hugging Face `config.json` that model families have in common.

`raw` is the content of the file. A value that is missing, of the wrong type or out of range raises
a ValueError that names the option.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvjax.messages import brief

from .config import (
    ACTIVATIONS,
    MOST_LAYERS,
    MOST_SIZE,
    ROPE_TYPES,
    DecoderConfig,
    LayerConfig,
    RopeConfig,
    check_choice,
    check_positive,
    check_size,
    is_finite,
)
from .rope_scaling import yarn_magnitude

FULL, SLIDING = "full_attention", "sliding_attention"
"""Supported layer types, by their Hugging Face names."""

_FULL_BEFORE = "attention"  # name of full attention in files that are older than these two names


def read_size(
    raw: Mapping[str, Any], name: str, default: int | None = None, most: int = MOST_SIZE
) -> int:
    """Reads the integer `raw[name]` from 1 to `most`; `default` if it is missing or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing")
    return check_size(name, value, most)


def read_number(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Reads the number `raw[name]` above 0, finite in float32; `default` if it is missing."""
    return check_positive(name, raw.get(name, default))


def read_optional_number(
    raw: Mapping[str, Any], name: str, default: float | None = None
) -> float | None:
    """Reads a number as `read_number` does; null gives None."""
    value = raw.get(name, default)
    return None if value is None else check_positive(name, value)


def read_flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Reads the truth value `raw[name]`; `default` if it is missing or null."""
    value = raw.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{name} must be true or false, got {brief(value)}")
    return default if value is None else value


def read_token_ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Reads the token ids `raw[name]`: an integer, a list of integers, or nothing."""
    value = raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i <= MOST_SIZE for i in ids):
        raise ValueError(
            f"{name} must be an integer or a list of integers, at least 0 and of 32 bits, "
            f"got {brief(value)}"
        )
    return tuple(ids)


def refuse(raw: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ValueError if an option has a value that the decoder does not support.

    Args:
      raw: the content of `config.json`.
      values: option → the only supported value. A missing option and null are also supported.
    """
    for name, supported in values.items():
        if raw.get(name) is not None and raw[name] != supported:
            raise ValueError(f"{name} must be {json.dumps(supported)}, got {brief(raw[name])}")


def read_decoder(
    raw: Mapping[str, Any],
    *,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    rope: Callable[[int, int], RopeConfig | tuple[RopeConfig, RopeConfig]] | None = None,
    window: int | None = None,
    slides: Callable[[int], bool] | None = None,
    rotated: Sequence[bool] | None = None,
    **family: Any,
) -> DecoderConfig:
    """Reads the options that all families share; a family's own module adds the rest.

    Sizes have no default unless the family has one.

    Args:
      raw: the content of `config.json`.
      max_positions: the family's default of `max_position_embeddings`.
      kv_heads: its default of `num_key_value_heads`; None, and a null in the file: the number of
        query heads.
      head_dim: its default; None, and a null in the file: `hidden_size / num_attention_heads`.
      norm_eps: its default of `rms_norm_eps`.
      tied: its default of `tie_word_embeddings`.
      activation: name and default of the option that names the MLP's activation.
      rope: `rope(head_dim, max_positions)` returns the rotary embedding, or two: for layers without
        and with a window. Default: the file's, of all channels.
      window: size of the sliding window, in layers that have one.
      slides: returns whether the layer of this number has the window, for files without
        `layer_types`; None: the family has no windows.
      rotated: whether each layer has a rotary embedding; None: all have.
      family: further fields of `DecoderConfig`.
    """
    hidden, heads = read_size(raw, "hidden_size"), read_size(raw, "num_attention_heads")
    channels = raw.get("head_dim", head_dim)
    if channels is None and hidden % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, got {hidden} and {heads}"
        )
    # Checked like an option, since the value may come from the file.
    channels = read_size({"head_dim": channels}, "head_dim", max(hidden // heads, 1))
    # A null in the file means as many as query heads; the family's default is for a missing option.
    kv_default = heads if "num_key_value_heads" in raw else kv_heads or heads
    positions = read_size(raw, "max_position_embeddings", max_positions)
    count = read_size(raw, "num_hidden_layers", most=MOST_LAYERS)
    ropes = read_rope(raw, channels, positions) if rope is None else rope(channels, positions)
    ropes = ropes if isinstance(ropes, tuple) else (ropes,)
    name, usual = activation
    layers = _read_layers(raw, count, ropes, window, slides)
    if rotated is not None:
        layers = tuple(
            layer if has_rope else replace(layer, rope=None)
            for layer, has_rope in zip(layers, rotated, strict=True)
        )
    # Equal layers need no list: `rope` and `sliding_window` describe all of them.
    alike = all(layer == LayerConfig(ropes[0], layers[0].window) for layer in layers)
    return DecoderConfig(
        vocab_size=read_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_size(raw, "intermediate_size"),
        num_layers=count,
        query_heads=heads,
        kv_heads=read_size(raw, "num_key_value_heads", kv_default),
        head_dim=channels,
        rope=ropes[0],
        max_positions=usable_positions(ropes[0], positions),
        norm_eps=read_number(raw, "rms_norm_eps", norm_eps),
        tie_embeddings=read_flag(raw, "tie_word_embeddings", tied),
        activation=check_choice(name, raw.get(name, usual), ACTIVATIONS),
        sliding_window=layers[0].window if alike else None,
        layers=() if alike else layers,
        bos_token_id=next(iter(read_token_ids(raw, "bos_token_id")), None),
        eos_token_ids=read_token_ids(raw, "eos_token_id"),
        **family,
    )


def read_window(raw: Mapping[str, Any], default: int | None) -> int | None:
    """Reads the size of the sliding window, `default` if it is missing; null: no window."""
    window = raw.get("sliding_window", default)
    return None if window is None else read_size({"sliding_window": window}, "sliding_window")


def _read_layers(
    raw: Mapping[str, Any],
    count: int,
    ropes: Sequence[RopeConfig],
    window: int | None,
    slides: Callable[[int], bool] | None,
) -> tuple[LayerConfig, ...]:
    """Returns rope and window of each layer; `read_decoder` documents the arguments."""
    if slides is None:
        refuse(raw, {"sliding_window": None})
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if slides and slides(index) else FULL for index in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ValueError(
            f"layer_types must be a list of num_hidden_layers = {count} names, got {brief(types)}"
        )
    unknown = [name for name in types if name not in (FULL, SLIDING, _FULL_BEFORE)]
    if unknown:
        raise ValueError(
            f"layer_types: layer type {brief(unknown[0])} is not supported; supported: "
            f"{FULL}, {SLIDING}"
        )
    if SLIDING in types and window is None:
        raise ValueError(
            f"layers have {SLIDING} (by layer_types, or the model type's own order), but there is "
            "no size: sliding_window is null, or the model type has none, or use_sliding_window is "
            "not true"
        )
    full, sliding = LayerConfig(ropes[0]), LayerConfig(ropes[-1], window)
    return tuple(sliding if name == SLIDING else full for name in types)


_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def read_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    share: float | None = None,
    interleaved: bool = False,
    names: Mapping[str, str] | None = None,
) -> RopeConfig:
    """Reads the rotary embedding, from `rope_theta` and `rope_scaling` or `rope_parameters`.

    Args:
      raw: the content of `config.json`, in the old format (`rope_theta` beside a `rope_scaling`
        with `type` or `rope_type`) or in that of transformers 5 (`rope_parameters`).
      head_dim: channels per head.
      max_positions: `max_position_embeddings`, the original context if the file gives none.
      theta: the family's default of theta.
      share: the family's default of `partial_rotary_factor`; None: the family rotates all channels.
      interleaved: whether the family rotates neighbouring channels.
      names: other names of rope types in the family's files.
    """
    for name in ("rope_parameters", "rope_scaling"):
        scaling = raw.get(name) or {}
        if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
            raise ValueError(
                f"rope parameters must be one object for all layers, got {name}: {brief(scaling)}"
            )
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if isinstance(rope_type, str):
        rope_type = (names or {}).get(rope_type, rope_type)
    check_choice("rope type", rope_type, ROPE_TYPES)
    missing = [name for name in _NEEDED[rope_type] if scaling.get(name) is None]
    if missing:
        raise ValueError(
            f"rope type {rope_type!r} needs {', '.join(missing)}, got {brief(scaling)}"
        )
    # In the format of transformers 5, theta is among the rope parameters.
    thetas = [read_optional_number(place, "rope_theta") for place in (scaling, raw)]
    original = _original_positions((raw, scaling), rope_type, max_positions)
    return RopeConfig(
        rotary_dim=_rotary_dim((scaling, raw), head_dim, share),
        theta=next((number for number in thetas if number is not None), theta),
        type=rope_type,
        original_max_positions=original,
        interleaved=interleaved,
        **_parameters(scaling, rope_type, max_positions, original),
    )


def _parameters(
    scaling: Mapping[str, Any], rope_type: str, max_positions: int, original: int | None
) -> dict[str, Any]:
    """Returns the parameters of a rope type, by their names in `RopeConfig`."""
    if rope_type not in ("yarn", "longrope"):
        return {name: scaling[name] for name in _NEEDED[rope_type]}
    factor = read_optional_number(scaling, "factor")
    if factor is None:
        # A file may state the contexts before and after instead of the factor, which is their
        # quotient.
        name = "original_max_position_embeddings"
        factor = max_positions / read_size({name: original}, name)
    larger = read_optional_number(scaling, "attention_factor")
    if rope_type == "yarn":
        return {
            "factor": factor,
            "beta_fast": scaling.get("beta_fast") or 32.0,
            "beta_slow": scaling.get("beta_slow") or 1.0,
            "truncate": read_flag(scaling, "truncate", "truncate" not in scaling),
            "attention_factor": _weighted_yarn(scaling, factor) if larger is None else larger,
        }
    for name in _NEEDED[rope_type]:
        if not isinstance(scaling[name], list):
            raise ValueError(f"{name} must be a list of numbers, got {brief(scaling[name])}")
    factors = {f"{name}s": tuple(scaling[name]) for name in _NEEDED[rope_type]}
    return {"factor": factor, "attention_factor": larger, **factors}


def _weighted_yarn(scaling: Mapping[str, Any], factor: float) -> float | None:
    """Returns YaRN's attention factor if the file weights it (`mscale`, `mscale_all_dim`)."""
    names = ("mscale", "mscale_all_dim")
    if not all(scaling.get(name) for name in names):
        return None
    above, below = (yarn_magnitude(factor, read_number(scaling, name, 1.0)) for name in names)
    return above / below


def _rotary_dim(places: Sequence[Mapping[str, Any]], head_dim: int, share: float | None) -> int:
    """Returns the number of rotated channels per head, by the first `partial_rotary_factor`."""
    name = "partial_rotary_factor"
    stated = next((place[name] for place in places if place.get(name) is not None), None)
    if share is None and stated not in (None, 1):
        raise ValueError(f"{name} must be 1 for this model type, got {brief(stated)}")
    if stated is not None and (not is_finite(stated) or not 0 < stated <= 1):
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {brief(stated)}")
    channels = int(head_dim * (share or 1 if stated is None else stated))
    if channels < 2 or channels % 2:
        raise ValueError(
            f"{name} of head_dim = {head_dim} channels must be an even number, got {channels}"
        )
    return channels


def read_rope_of_types(
    raw: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    theta: float,
    local_theta: tuple[str, float],
) -> tuple[RopeConfig, RopeConfig]:
    """Reads the rotary embeddings of layers without and with a sliding window.

    Args:
      raw: the content of `config.json`. `rope_parameters` has an object for each layer type. In the
        older format, `rope_scaling` (or a `rope_parameters` without layer types) applies only to
        layers without a window.
      head_dim: channels per head.
      max_positions: as in `read_rope`.
      theta: default of `rope_theta`.
      local_theta: name and default of theta for layers with a window.
    """
    stated = raw.get("rope_parameters") or {}
    by_type = isinstance(stated, dict) and any(name in stated for name in (FULL, SLIDING))
    objects = {name: stated.get(name) or {} if by_type else {} for name in (FULL, SLIDING)}
    for name, common in (
        ("rope_parameters", {} if by_type else stated),
        ("rope_scaling", raw.get("rope_scaling") or {}),
    ):
        if not isinstance(common, dict) or not isinstance(objects[FULL], dict):
            raise ValueError(f"rope parameters must be objects, got {name}: {brief(raw[name])}")
        objects[FULL] = {**objects[FULL], **common}
    # Each call of `read_rope` below gets the parameters of its layer type only.
    base = {k: v for k, v in raw.items() if k not in _OF_ALL_LAYERS}
    name, default = local_theta
    local = {**base, "rope_parameters": objects[SLIDING]}
    local["rope_theta"] = read_optional_number(raw, name)
    return (
        read_rope({**base, "rope_parameters": objects[FULL]}, head_dim, max_positions, theta=theta),
        read_rope(local, head_dim, max_positions, theta=default),
    )


_OF_ALL_LAYERS = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")


def _original_positions(
    places: Sequence[Mapping[str, Any]], rope_type: str, max_positions: int
) -> int | None:
    if rope_type == "dynamic":
        return max_positions
    if rope_type not in ("llama3", "yarn", "longrope"):
        return None
    stated = [place.get("original_max_position_embeddings") for place in places]
    return next((positions for positions in stated if positions is not None), max_positions)


def usable_positions(rope: RopeConfig, max_positions: int) -> int:
    """Returns how many tokens a model is made for, from its `max_position_embeddings`.

    `"linear"` and `"dynamic"` configurations usually state the context before it was stretched, so
    it is multiplied by the factor. (The result is too high for a `"linear"` configuration that
    states the stretched context. That does no harm: the number is only used to refuse prompts that
    are too long.) `"yarn"` configurations state either context, and also the original one: the
    larger of stretched and stated context is taken.
    """
    if rope.type not in ("linear", "dynamic", "yarn"):
        return max_positions
    before = rope.original_max_positions if rope.type == "yarn" else max_positions
    if before * rope.factor > MOST_SIZE:
        raise ValueError(
            f"the rope factor times max_position_embeddings ({before}) must be at most "
            f"{MOST_SIZE}, got a factor of {brief(rope.factor)}"
        )
    stretched = int(before * rope.factor)
    return max(stretched, max_positions) if rope.type == "yarn" else stretched
