"""Reading the values of a Hugging Face `config.json` that families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.messages import brief

from .config import MOST_SIZE, ROPE_TYPES, RopeConfig, is_finite, not_finite


class Weight(NamedTuple):
    """Where a checkpoint's tensor belongs.

    Attributes:
      path: the parameter in the decoder's NNX state, as `("layers", 0, "mlp", "up_proj", "bias")`.
      transpose: the checkpoint holds `[out, in]`, the decoder `[in, out]`.
    """

    path: tuple[str | int, ...]
    transpose: bool = False


def read_size(
    raw: Mapping[str, Any], name: str, default: int | None = None, most: int = MOST_SIZE
) -> int:
    """The integer `raw[name]`, `default` where it is missing or null.

    Raises:
      ValueError: it is missing without a default, or not an integer from 1 to `most`.
    """
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {brief(value)}")
    if value > most:
        raise ValueError(f"{name} must be an integer of at most {most}, got {brief(value)}")
    return value


def read_number(raw: Mapping[str, Any], name: str, default: float) -> float:
    """The number `raw[name]`, `default` where it is missing.

    Raises:
      ValueError: it is not a number above 0 that is finite in float32.
    """
    value = raw.get(name, default)
    if not is_finite(value) or value <= 0:
        raise not_finite(name, value)
    return value


def read_choice(raw: Mapping[str, Any], name: str, default: str) -> str:
    """The text `raw[name]`, `default` where it is missing.

    Raises:
      ValueError: it is not text.
    """
    value = raw.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text such as {default!r}, got {brief(value)}")
    return value


def read_token_ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The token ids `raw[name]`: an integer, a list of integers, or nothing.

    Raises:
      ValueError: it is something else.
    """
    value = raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MOST_SIZE for i in ids):
        raise ValueError(
            f"{name} must be an integer or a list of integers of 32 bits, got {brief(value)}"
        )
    return tuple(ids)


_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_rope(
    raw: Mapping[str, Any],
    *,
    rotary_dim: int,
    max_positions: int,
    default_theta: float = 10000.0,
    interleaved: bool = False,
) -> RopeConfig:
    """The rotary embedding, from `rope_theta` and `rope_scaling` or from `rope_parameters`.

    Args:
      raw: the content of `config.json`, in the old format (`rope_theta` beside a `rope_scaling`
        with `type` or `rope_type`) or in that of transformers 5 (`rope_parameters`).
      rotary_dim: how many channels of a head are rotated.
      max_positions: `max_position_embeddings`, the original context where none is given.
      default_theta: the family's theta where the file gives none.
      interleaved: the family rotates neighbouring channels.

    Raises:
      ValueError: the type is unknown, or a parameter of it is missing or out of its range.
    """
    for name in ("rope_parameters", "rope_scaling"):
        scaling = raw.get(name) or {}
        if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
            raise ValueError(
                f"rope parameters must be one object for all layers, got {name}: {brief(scaling)}"
            )
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise ValueError(
            f"rope type {brief(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    missing = [name for name in _NEEDED[kind] if scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}, got {brief(scaling)}")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or default_theta
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=read_number({"rope_theta": theta}, "rope_theta", default_theta),
        type=kind,
        original_max_positions=_original_positions(raw, scaling, kind, max_positions),
        interleaved=interleaved,
        **{name: scaling[name] for name in _NEEDED[kind]},
    )


def _original_positions(
    raw: Mapping[str, Any], scaling: Mapping[str, Any], kind: str, max_positions: int
) -> int | None:
    name = "original_max_position_embeddings"
    if kind == "dynamic":
        return max_positions
    if kind == "llama3":
        return raw.get(name) or scaling.get(name) or max_positions
    return None


def usable_positions(rope: RopeConfig, max_positions: int) -> int:
    """How many tokens a model is made for, from its `max_position_embeddings`.

    `"linear"` and `"dynamic"` configurations usually give the context before it was stretched:
    theirs is multiplied by the factor. (The result is too high for a `"linear"` configuration that
    gives the stretched context already. That does no harm: the number only serves to refuse prompts
    that are too long.)

    Raises:
      ValueError: they are more than an int32 can count.
    """
    if rope.type not in ("linear", "dynamic"):
        return max_positions
    if max_positions * rope.factor > MOST_SIZE:
        raise ValueError(
            f"the rope factor times max_position_embeddings ({max_positions}) must be at most "
            f"{MOST_SIZE}, got a factor of {brief(rope.factor)}"
        )
    return int(max_positions * rope.factor)
