"""One transform per layer of a model, and rings for layers with sliding windows."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.calibration import Learner
from kvjax.checks import check_count
from kvjax.compose.chain import Chain, chain
from kvjax.compose.ring import Ring
from kvjax.compose.walks import chosen, inner_transforms, map_methods, walk
from kvjax.compose.wrappers import Everywhere, HeadGroups, by_head_groups
from kvjax.messages import brief
from kvjax.protocol import KVTransform, MethodHeads, Stage, check_transform


def bind(
    transform: KVTransform,
    num_layers: int,
    windows: Sequence[int | None] = (),
    max_tokens: int | None = None,
) -> tuple[KVTransform, ...]:
    """Returns one transform per layer, and rings for layers with sliding windows.

    Layer i has `transform.for_layer(i, num_layers)`. In head groups, a method has the part of its
    calibration that is for its heads.

    A layer with a sliding window that is shorter than a text may become is a `Ring`, whatever the
    method does in other layers: it holds the tokens of its window, exactly, and no others. How the
    transform stores keys and values (`Quantize`, `Codebook`) holds in rings too, but for keys of 4
    bits in groups of slots, which are encoded token by token there. Where a window is not shorter
    than a text may become, no token ever leaves it, and the layer is like any other. `Everywhere`
    lets a method work in all layers.

    Args:
      transform: the method.
      num_layers: of the model.
      windows: of each layer, None where it has none, as the layer gives it to `attend`; empty: no
        layer has one.
      max_tokens: the most tokens of a row, `max_prompt + max_new`; None: more than any window.

    Raises:
      TypeError: not a transform, a number that is not an int, windows that are not a tuple.
      ValueError: fewer than one layer, windows of another number of layers or below 1.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.H2O(budget=64), num_layers=2)
      (H2O(budget=64, group_reduce='mean'), H2O(budget=64, group_reduce='mean'))
      >>> kvjax.bind(kvjax.H2O(budget=64), 2, windows=(1024, None), max_tokens=8192)
      (Ring(window=1024), H2O(budget=64, group_reduce='mean'))
    """
    check_transform(transform, "bind")
    check_count("num_layers", num_layers, 1)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, 1)
    if not isinstance(windows, tuple | list):
        raise TypeError(
            f"windows must be a tuple with an int or None for each layer, got {brief(windows)}"
        )
    windows = tuple(windows) or (None,) * num_layers
    if len(windows) != num_layers:
        raise ValueError(f"windows must have one entry per layer, {num_layers}, got {len(windows)}")
    layers = []
    for layer, window in enumerate(windows):
        bound = transform.for_layer(layer, num_layers)
        if window is not None:
            check_count(f"the window of layer {layer}", window, 1)
            if max_tokens is None or window < max_tokens:
                bound = _ring(window, transform, layer, num_layers)
        if isinstance(bound, HeadGroups):
            bound = map_methods(_of_heads, bound)
        layers.append(bound)
    return tuple(layers)


def _of_heads(method: KVTransform, heads: MethodHeads) -> KVTransform:
    """Cuts what a method has learned to its heads; a function for `map_methods`."""
    if not isinstance(method, Learner) or method.lacks_calibration or method.learned is None:
        return method
    return method.with_learned(method.learned.of_heads(heads))


def _ring(window: int, transform: KVTransform, layer: int, num_layers: int) -> KVTransform:
    """Returns a layer's ring in the stored form of the transform; under `Everywhere` the method."""
    transform = chosen(transform, layer, num_layers)
    groups = by_head_groups(transform)
    if all(any(isinstance(part, Everywhere) for part in walk(tx)) for tx in groups):
        return transform.for_layer(layer, num_layers)
    if isinstance(transform, HeadGroups):
        rings = [_ring(window, tx, layer, num_layers) for tx in groups]
        # No method for all heads does what rings do in some of them.
        return rings[0] if len(set(rings)) == 1 else transform.with_transforms(rings, None)
    methods = (
        part
        for part in walk(transform)
        if part.stage == Stage.REPRESENT and not inner_transforms(part)
    )
    # A method that brings a form of storage of its own (SpindleKV) becomes a chain: it is replaced.
    stored = (part.for_layer(layer, num_layers) for part in methods)
    return chain(Ring(window), *(part for part in stored if not isinstance(part, Chain)))
