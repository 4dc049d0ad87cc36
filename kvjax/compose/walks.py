"""Walks over compositions: all their parts, the choice of a layer, and methods replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvjax.calibration import Learner
from kvjax.compose.chain import Chain, chain, joined_parts
from kvjax.compose.wrappers import (
    Everywhere,
    HeadGroups,
    LayerChoice,
    PerLayer,
    by_head_groups,
    map_head_groups,
)
from kvjax.protocol import Full, KVTransform, MethodHeads


def walk(transform: KVTransform) -> Iterator[KVTransform]:
    """Walks over a composition and everything that it is made of.

    The choices of `PerLayer` are not walked over, since they depend on the layer.

    Example:
      >>> import kvjax
      >>> from kvjax.compose.walks import walk
      >>> tx = kvjax.Everywhere(kvjax.chain(kvjax.SnapKV(64), kvjax.Quantize()))
      >>> [type(part).__name__ for part in walk(tx)]
      ['Everywhere', 'Chain', 'SnapKV', 'Quantize']
    """
    yield transform
    for part in inner_transforms(transform):
        yield from walk(part)


def inner_transforms(transform: KVTransform) -> tuple[KVTransform, ...]:
    """Returns the transforms that a composition is made of; none for a method."""
    if isinstance(transform, Chain):
        return transform.parts
    if isinstance(transform, HeadGroups):
        return by_head_groups(transform)
    base = getattr(transform, "base", None)
    return (base,) if isinstance(base, KVTransform) else ()


def chosen(transform: KVTransform, layer: int, num_layers: int) -> KVTransform:
    """Returns a composition for a layer, not yet bound to it.

    `PerLayer` has chosen, and head groups stand outside.

    Example:
      >>> import kvjax
      >>> from kvjax.compose.walks import chosen
      >>> first = kvjax.PerLayer(lambda i, n: kvjax.Full() if i < 1 else kvjax.SnapKV(64))
      >>> type(chosen(kvjax.chain(first, kvjax.Quest(64)), 2, 4)).__name__
      'Chain'
    """
    if isinstance(transform, LayerChoice):
        choice = transform.chosen(layer, num_layers)
        return choice if choice is transform else chosen(choice, layer, num_layers)
    if isinstance(transform, HeadGroups):
        return transform.map(lambda part, _: chosen(part, layer, num_layers))
    inner = [chosen(part, layer, num_layers) for part in inner_transforms(transform)]
    if isinstance(transform, Chain):
        return joined_parts(inner)
    if not inner:
        return transform
    (base,) = inner
    if isinstance(transform, Everywhere):
        if isinstance(base, HeadGroups):
            return map_head_groups(Everywhere, base)
        return Everywhere(base)
    return base if isinstance(base, Full) else dataclasses.replace(transform, base=base)


def learners(transform: KVTransform, num_layers: Callable[[], int]) -> list[Learner]:
    """Returns the different parts of a composition that learn from the model, outer ones first.

    Those that `PerLayer` chooses are among them.

    Args:
      num_layers: returns the number of the model's layers; is called only if a `PerLayer` asks.
    """
    layers = [transform]
    if any(isinstance(part, PerLayer) for part in walk(transform)):
        number = num_layers()
        layers = [chosen(transform, layer, number) for layer in range(number)]
    parts = (part for layer in layers for part in walk(layer))
    return list(dict.fromkeys(part for part in parts if isinstance(part, Learner)))


def map_methods(
    function: Callable[[KVTransform, MethodHeads], KVTransform], transform: KVTransform
) -> KVTransform:
    """Replaces each method in a composition by `function(method, heads)`.

    Methods are what contains no other transform, and what learns from the model, such as `ByHead`.
    What `PerLayer` chooses is replaced when it chooses, so that `function` must be hashable and
    pure, as `choose` is.

    Args:
      function: is given a method, and the KV heads that `HeadGroups` gives it: the same in all
        layers, or those of each layer if it has an order; None: all. A method of all heads beside
        the groups (`HeadGroups.whole`) is replaced as those of the groups are.
      transform: any.

    Example:
      >>> import kvjax
      >>> from kvjax.compose.walks import map_methods
      >>> tx = kvjax.Everywhere(kvjax.SnapKV(64))
      >>> map_methods(lambda method, heads: kvjax.H2O(8), tx)
      Everywhere(base=H2O(budget=8, group_reduce='mean'))
    """
    choices = [part for part in walk(transform) if isinstance(part, LayerChoice)]
    if any(isinstance(part, PerLayer) for part in choices):
        return PerLayer(_Mapped(transform, function))
    return _mapped(function, transform if choices else chosen(transform, 0, 1), None)


@dataclass(frozen=True)
class _Mapped:
    """Function of a `PerLayer` whose choices have every method replaced."""

    transform: KVTransform
    function: Callable[[KVTransform, MethodHeads], KVTransform]

    def __call__(self, layer: int, num_layers: int) -> KVTransform:
        return _mapped(self.function, chosen(self.transform, layer, num_layers), None)


def _mapped(
    function: Callable[[KVTransform, MethodHeads], KVTransform],
    transform: KVTransform,
    heads: MethodHeads,
) -> KVTransform:
    """Does `map_methods` for a composition without `PerLayer`, whose head groups are outside."""
    if isinstance(transform, HeadGroups):
        return transform.map(lambda part, of_part: _mapped(function, part, of_part))
    inner = [_mapped(function, part, heads) for part in inner_transforms(transform)]
    if isinstance(transform, Chain):
        return chain(*inner)
    if inner:
        transform = dataclasses.replace(transform, base=inner[0])
    is_method = not inner or isinstance(transform, Learner)
    return function(transform, heads) if is_method else transform
