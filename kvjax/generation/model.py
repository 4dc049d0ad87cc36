"""What `generate` needs to know of a language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import Cache
from kvjax.protocol import AttentionOptions, KVTransform, Phase

_PARTS = ("layers", "embed_tokens", "head")
_COUNTS = ("num_layers", "query_heads", "kv_heads", "head_dim", "vocab_size")


class LanguageModel(Protocol):
    """The signature of a model: an NNX module, or any callable with these attributes.

    A callable that is no NNX module must be hashable and must not change: its arrays become
    constants of the compiled code. `FunctionalModel` passes them as arguments.

    Each attention layer i calls `kvjax.attend(layers[i], caches[i], ...)` with `phase` and `last`
    as given, and the model returns the new caches. A model may also give it `predicted_query`, and
    gives it the `sinks` that it has learned, in prompts and steps.

    Attributes:
      num_layers, query_heads, kv_heads, head_dim, vocab_size: sizes.
      max_positions: longest sequence that it can read; optional.
      windows: of each layer, the sliding window of its attention, None where it has none;
        optional, a tuple. A layer with a window gets a `kvjax.Ring` (see `kvjax.bind`).
      attention_scale, attention_soft_cap: `scale` and `soft_cap` of `init_cache`, one number for
        all layers or a tuple with one for each; optional, None: the default.
      length_class: of a model that computes otherwise for long texts (LongRoPE), a hashable
        function of a number of tokens; optional. It gives one number for all those that the model
        treats alike. Caches get it as their `max_length`, by which the model decides, and share
        compiled code. Without it, `max_length` is `max_prompt + max_new`, padded.
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


class LayeredModel(LanguageModel, Protocol):
    """An NNX module that shows its parts, so that `generate` reads a prompt layer by layer.

    One compiled function serves all layers that are alike, and what a layer needs of a long prompt
    is freed before the next one begins. The model's own call must do the same as its parts.

    Attributes:
      layers: its blocks in order, NNX modules that share no variables:
        `block(x, positions, cache, *, layer, phase, last) -> (x, cache)`.
    """

    layers: Sequence[nnx.Module]

    def embed_tokens(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """What enters the first block."""

    def head(self, x: Float[Array, "B N C"]) -> Float[Array, "B N V"]:
        """Logits of what leaves the last block."""


class _CallSignature:
    """What `inspect.signature` and `help` show of `LanguageModel` itself: how a model is called.

    A protocol has no constructor of its own to show. Classes that inherit from it have one.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if owner is not LanguageModel:
            raise AttributeError("__signature__")
        own = inspect.signature(LanguageModel.__call__)
        return own.replace(parameters=list(own.parameters.values())[1:])  # without self


LanguageModel.__signature__ = _CallSignature()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class ModelParts:
    """A model's call in parts, functions of its parameters: what `LayeredModel` is for NNX modules.

    Args:
      embed: `embed(params, tokens, positions) -> x`, `[B, T, C]`.
      split: `split(params)`: the parameters of each block.
      blocks: of each layer, `block(own, x, positions, cache, layer=, phase=, last=)`, which returns
        x and the cache. Layers with equal functions and parameters of one structure share
        compiled code.
      head: `head(params, x) -> logits`, of states `[B, N, C]`.

    All of them are hashable.
    """

    embed: Callable[..., Array]
    split: Callable[[Any], Sequence[Any]]
    blocks: tuple[Callable[..., tuple[Array, Cache]], ...]
    head: Callable[..., Array]


@dataclass(frozen=True)
class FunctionalModel:
    """A model as a function of its parameters, for Linen and for plain JAX.

    Args:
      apply: `apply(params, tokens, positions, caches, layers=, phase=, last=, logits_at=)`, as
        `LanguageModel.__call__`. Hashable: compiled code is kept per `apply`.
      params: any pytree of arrays.
      num_layers, query_heads, kv_heads, head_dim, vocab_size, max_positions: as `LanguageModel`.
      parts: the same model in parts, with which prompts are read layer by layer; optional.
      windows: as `LanguageModel`; empty: no layer has one.
      attention_scale, attention_soft_cap: as `LanguageModel`.
      length_class: as `LanguageModel`; None: nothing depends on a text's length.

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
    parts: ModelParts | None = None
    windows: tuple[int | None, ...] = ()
    length_class: Callable[[int], int] | None = None
    attention_scale: float | tuple[float | None, ...] | None = None
    attention_soft_cap: float | tuple[float | None, ...] | None = None

    def attention(self, layer: int) -> AttentionOptions:
        """How the attention of a layer makes its logits."""

        def of_layer(given: Any) -> Any:
            return given[layer] if isinstance(given, tuple) else given

        window = self.windows[layer] if self.windows else None
        return AttentionOptions(
            of_layer(self.attention_scale), window, of_layer(self.attention_soft_cap)
        )


jax.tree_util.register_dataclass(
    FunctionalModel,
    data_fields=["params"],
    meta_fields=[
        "apply",
        *_COUNTS,
        "max_positions",
        "parts",
        "windows",
        "length_class",
        "attention_scale",
        "attention_soft_cap",
    ],
)


@dataclass(frozen=True)
class _Apply:
    """A model's call, or a method of it, as a function of its arrays.

    Equal for NNX modules of equal structure.
    """

    model: nnx.GraphDef | Callable
    method: str = "__call__"

    def __call__(self, params, *args, **kwargs):
        model = self.model
        if isinstance(model, nnx.GraphDef):
            model = nnx.merge(model, params)
        return getattr(model, self.method)(*args, **kwargs)


def _split_layers(params: nnx.State) -> list[nnx.State]:
    """The parameters of each block of a `LayeredModel`."""
    return [params["layers"][i] for i in range(len(params["layers"]))]


def _parts_of(model: Any, called: Any, params: Any) -> ModelParts | None:
    """The parts of an NNX module that shows them, None of other models."""
    if not isinstance(model, nnx.Module) or not all(hasattr(model, name) for name in _PARTS):
        return None
    split = [nnx.split(block) for block in model.layers]  # pyright: ignore[reportAttributeAccessIssue]
    alone = [jax.tree.structure(own) for _, own in split]
    if alone != [jax.tree.structure(own) for own in _split_layers(params)]:
        raise TypeError(
            f"the layers of {type(model).__name__} share variables: give a kvjax.FunctionalModel"
        )
    return ModelParts(
        _Apply(called, "embed_tokens"), _split_layers,
        tuple(_Apply(graph) for graph, _ in split), _Apply(called, "head"),
    )  # fmt: skip


def _option(model: Any, name: str) -> float | tuple[float | None, ...] | None:
    """An optional attribute of a model, for all layers or for each."""
    value = getattr(model, name, None)
    return tuple(value) if isinstance(value, list) else value


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
    parts, windows = _parts_of(model, called, params), getattr(model, "windows", None) or ()
    return FunctionalModel(
        _Apply(called), params, max_positions=max_positions, parts=parts,
        windows=tuple(windows) if isinstance(windows, list) else windows,
        length_class=getattr(model, "length_class", None),
        **{name: _option(model, name) for name in ("attention_scale", "attention_soft_cap")},
        **sizes,
    )  # fmt: skip
