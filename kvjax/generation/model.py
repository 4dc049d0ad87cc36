"""What `generate` needs to know of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import Cache
from kvjax.protocol import KVTransform, Phase

_COUNTS = ("num_layers", "query_heads", "kv_heads", "head_dim", "vocab_size")


class LanguageModel(Protocol):
    """The signature of a model: an NNX module, or any callable with these attributes.

    A callable that is no NNX module must be hashable and must not change: its arrays become
    constants of the compiled code. `FunctionalModel` passes them as arguments.

    Each attention layer i calls `kvjax.attend(layers[i], caches[i], ...)` with `phase` and `last`
    as given, and the model returns the new caches. A model may also give it `predicted_query`.

    Attributes:
      num_layers, query_heads, kv_heads, head_dim, vocab_size: sizes.
      max_positions: longest sequence that it can read; optional.
    """

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        caches: tuple[Cache, ...],
        *,
        layers: tuple[KVTransform, ...],
        phase: Phase,
        last: bool = True,
        logits_at: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N V"], tuple[Cache, ...]]:
        """Logits of every token (N = T), or of those at `logits_at`, and the new caches.

        `positions = -1` marks padding. A model should select the tokens of `logits_at` before it
        projects to the vocabulary: all logits of a long prompt are `T × V` numbers, and `generate`
        needs those of one token.
        """


class _CallSignature:
    """What `inspect.signature` and `help` show of `LanguageModel` itself: how a model is called.

    A protocol has no constructor of its own to show. Classes that inherit from it have one.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if owner is not LanguageModel:
            raise AttributeError("__signature__")
        own = inspect.signature(LanguageModel.__call__)
        return own.replace(parameters=list(own.parameters.values())[1:])  # without self


LanguageModel.__signature__ = _CallSignature()


@dataclass(frozen=True)
class FunctionalModel:
    """A model as a function of its parameters, for Linen and for plain JAX.

    Args:
      apply: `apply(params, tokens, positions, caches, layers=, phase=, last=, logits_at=)`, as
        `LanguageModel.__call__`. Hashable: compiled code is kept per `apply`.
      params: any pytree of arrays.
      num_layers, query_heads, kv_heads, head_dim, vocab_size, max_positions: as `LanguageModel`.

    It is a pytree itself, of the arrays of `params`; all else is static.
    """

    apply: Callable[..., tuple[Array, tuple[Cache, ...]]]
    params: Any
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None = None


jax.tree_util.register_dataclass(
    FunctionalModel, data_fields=["params"], meta_fields=["apply", *_COUNTS, "max_positions"]
)


@dataclass(frozen=True)
class _Apply:
    """A model's call as a function of its arrays; equal for NNX modules of equal structure."""

    model: nnx.GraphDef | Callable

    def __call__(self, params, *args, **kwargs):
        is_graph = isinstance(self.model, nnx.GraphDef)
        model = nnx.merge(self.model, params) if is_graph else self.model
        return model(*args, **kwargs)


def as_functional(model: LanguageModel | FunctionalModel) -> FunctionalModel:
    """Any supported model as a `FunctionalModel`. An NNX module is split into graph and arrays.

    Raises:
      TypeError: not callable, or without one of the documented attributes.
    """
    if isinstance(model, FunctionalModel):
        return model
    if not callable(model):
        raise TypeError(f"model must be callable (see kvjax.LanguageModel), got {model!r:.80}")
    missing = [name for name in _COUNTS if not isinstance(getattr(model, name, None), int)]
    if missing:
        raise TypeError(
            f"model needs int attributes {', '.join(_COUNTS)}; {type(model).__name__} lacks "
            f"{', '.join(missing)}"
        )
    called, params = nnx.split(model) if isinstance(model, nnx.Module) else (model, ())
    if called.__hash__ is None:
        raise TypeError(
            f"a callable model must be hashable, {type(model).__name__} is not: "
            "give a kvjax.FunctionalModel"
        )
    sizes = {name: getattr(model, name) for name in _COUNTS}
    max_positions = getattr(model, "max_positions", None)
    return FunctionalModel(_Apply(called), params, max_positions=max_positions, **sizes)
