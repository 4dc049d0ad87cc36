"""Checks arguments before any computation; errors say what was given and what was expected."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.messages import brief, did_you_mean

MOST_COUNT = 2**31 - 1
"""The largest count that fits into the int32 of positions and slots."""

_MOST_NUMBER = float(np.finfo(np.float32).max)  # larger numbers are infinite on a device


def check_count(name: str, value: object, minimum: int, most: float = MOST_COUNT) -> None:
    """Raises unless `value` is an integer from `minimum` to `most`.

    Args:
      name: name of the argument, for the message.
      value: value that a user gave.
      minimum: smallest value that it may have.
      most: largest value that it may have, 2**31 - 1 by default.

    Raises:
      TypeError: it is not an integer.
      ValueError: it is outside these bounds.

    Example:
      >>> import kvjax
      >>> kvjax.kit.check_count("sinks", -1, 0)
      Traceback (most recent call last):
      ValueError: sinks must be at least 0, got -1
    """
    # For Python, True is the integer 1.
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {brief(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {brief(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {brief(value)}")


def check_number(name: str, value: float, above: float, most: float = math.inf) -> None:
    """Raises unless `value` is a number in (above, most] that is finite in float32.

    Args:
      name: name of the argument, for the message.
      value: value that a user gave.
      above: number that it must be greater than.
      most: largest value that it may have; by default the largest of float32.

    Raises:
      TypeError: it is not a number.
      ValueError: it is outside these bounds.

    Example:
      >>> import kvjax
      >>> kvjax.kit.check_number("share", 1.5, 0.0, 1.0)
      Traceback (most recent call last):
      ValueError: share must lie in (0, 1], got 1.5
    """
    _check_is_number(name, value)
    if not above < value <= min(most, _MOST_NUMBER):
        bounds = (
            f"lie in ({above:g}, {most:g}]" if most < math.inf else f"be finite and above {above:g}"
        )
        raise ValueError(f"{name} must {bounds}, got {brief(value)}")


def check_part(name: str, value: float) -> None:
    """Raises unless `value` is a number in [0, 1]."""
    _check_is_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {brief(value)}")


def _check_is_number(name: str, value: float) -> None:
    # For Python, True is the integer 1.
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {brief(value)}")


def check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    """Raises unless `value` is one of the known names or values.

    Args:
      name: name of the argument, for the message.
      value: value that a user gave.
      known: the values that it may have.

    Raises:
      ValueError: it is not one of them; the message lists them.

    Example:
      >>> import kvjax
      >>> kvjax.kit.check_choice("pick", "midle", ("middle", "random"))
      Traceback (most recent call last):
      ValueError: pick must be one of ('middle', 'random'), got 'midle'; did you mean middle?
    """
    if value not in known:
        raise ValueError(
            f"{name} must be one of {known}, got {brief(value)}{did_you_mean(value, known)}"
        )


def check_flag(name: str, value: bool) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {brief(value)}")


def check_callable(name: str, value: object) -> None:
    """Raises TypeError unless `value` can be called, or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {brief(value)}")


def check_layers(name: str, layers: tuple[int, ...]) -> None:
    """Raises unless `layers` is a tuple of layer numbers."""
    if not isinstance(layers, tuple):
        raise TypeError(f"{name} must be a tuple of layer numbers, got {brief(layers)}")
    for layer in layers:
        check_count(f"a layer of {name}", layer, 0)


def floating(dtype: DTypeLike) -> jnp.dtype:
    """Returns a dtype of keys and values; raises TypeError unless it is a floating dtype."""
    try:
        result = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be a floating dtype, got {dtype!r:.40}") from error
    if not jnp.issubdtype(result, jnp.floating):
        raise TypeError(f"dtype must be floating, got {result.name}")
    return result


def as_scale(scale: Any) -> float:
    """Returns a scale of logits as a Python number.

    The scale is static in a cache. A traced value must not get there, and arrays cannot be compared
    as static values are.

    Raises:
      TypeError: the scale is an array, or not a number.
      ValueError: the scale is not finite, or not above 0.

    Example:
      >>> from kvjax.checks import as_scale
      >>> as_scale(0.25)
      0.25
    """
    if isinstance(scale, jax.Array | np.ndarray):
        raise TypeError(
            f"scale must be a Python number, such as scale=16 ** -0.5 in place of "
            f"1 / jnp.sqrt(16), got an array ({type(scale).__name__})"
        )
    check_number("scale", scale, above=0)
    return float(scale)


def check_logits(window: object, soft_cap: Any) -> None:
    """Raises unless a window and a soft cap are numbers that `init_cache` takes, or None."""
    if window is not None:
        check_count("window", window, 1)
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, above=0)


def check_array(name: str, x: object) -> None:
    """Raises TypeError unless `x` is an array of JAX or NumPy."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array of JAX or NumPy, got {type(x).__name__}")
