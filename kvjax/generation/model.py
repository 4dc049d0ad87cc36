"""Defines what `generate` needs to know of a language model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import Cache
from kvjax.protocol import AttentionOptions, KVTransform, Phase

_PARTS = ("layers", "embed_tokens", "head")  # attributes of a model that shows its parts
_COUNTS = ("num_layers", "query_heads", "kv_heads", "head_dim", "vocab_size")  # required ints

OfLayers = float | tuple[float | None, ...] | None
"""A number for all layers, or a tuple with one for each; None: the default."""


class LanguageModel(Protocol):
    """The signature of a model: an NNX module, or any callable with these attributes.

    A callable that is not an NNX module must be hashable and must not change: its arrays become
    constants of the compiled code. `FunctionalModel` passes them as arguments.

    Each attention layer i calls `kvjax.attend(caches[i], ...)` and passes on the `phase`
    and `last` that the model was called with. The model returns the new caches. It may also pass
    `predicted_query` to `attend`, and it passes any learned `sinks`, in prompts and in steps.

    Attributes:
      num_layers, query_heads, kv_heads, head_dim, vocab_size: sizes.
      max_positions: longest sequence that the model can read; optional.
      windows: tuple with the sliding window of each layer's attention, None where a layer has none;
        optional. A layer with a window gets a `kvjax.Ring` (see `kvjax.bind`).
      attention_scale, attention_soft_cap: `scale` and `soft_cap` of `init_cache`, one number for
        all layers or a tuple with one for each; optional, None: the default.
      length_class: optional, for a model that computes differently on long texts (LongRoPE): a
        hashable function of a number of tokens. It returns the same number for all lengths that
        the model treats alike. Caches get that number as their `max_length`, by which the model
        decides, and caches with equal numbers share compiled code. Without it, `max_length` is
        `max_prompt + max_new`, padded.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> from flax import nnx
      >>> class OneLayer(nnx.Module):
      ...     num_layers, query_heads, kv_heads, head_dim, vocab_size = 1, 2, 2, 4, 32
      ...     def __init__(self, rngs):
      ...         self.embed = nnx.Embed(32, 8, rngs=rngs)
      ...     def __call__(self, tokens, positions, caches, *, layers, phase, last=True,
      ...                  logits_at=None):
      ...         x = self.embed(tokens)
      ...         heads = x.reshape(*x.shape[:2], 2, 4)
      ...         out, cache = kvjax.attend(caches[0], heads, heads, heads, positions, phase=phase,
      ...                                   last=last, layout="BTHD")
      ...         x = x + out.reshape(x.shape)
      ...         if logits_at is not None:
      ...             x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
      ...         return self.embed.attend(x), (cache,)
      >>> kvjax.read(OneLayer(nnx.Rngs(0)), [[3, 1, 4]]).logits.shape
      (1, 32)
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
        """Returns the logits of every token (N = T) or of the `logits_at` ones, and new caches.

        `positions = -1` marks padding. A model should select the tokens of `logits_at` before it
        projects to the vocabulary: all logits of a long prompt are `T × V` numbers, and `generate`
        needs the logits of one token, which it takes as float32.
        """
        ...


def logits_of_one(
    logits: Float[Array, "B N V"], vocab_size: int, tokens: int, at: Int[Array, "B 1"] | None = None
) -> Float[Array, "B V"]:
    """Returns the logits of one token of each row, of those that a model has returned, in float32.

    Contexts hold them, and files of contexts, whatever the dtype of a model is.

    Args:
      tokens: how many tokens of a row the model was given.
      at: which of them the logits are wanted of, and have been asked for by `logits_at`; None: the
        last one.

    Raises:
      ValueError: the logits are of another vocabulary, or of neither all tokens nor one.
    """
    if logits.ndim != 3 or logits.shape[1] not in (1, tokens) or logits.shape[2] != vocab_size:
        raise ValueError(
            f"a model returns the logits of all its {tokens} tokens, or of the one that logits_at "
            f"names, for a vocabulary of {vocab_size}: [B, N, V], got shape {logits.shape}"
        )
    if at is not None and logits.shape[1] > 1:
        logits = jnp.take_along_axis(logits, at[:, :, None], axis=1)
    return logits[:, -1].astype(jnp.float32)


class LayeredModel(LanguageModel, Protocol):
    """An NNX module that shows its parts, so that `generate` reads a prompt layer by layer.

    One compiled function serves all layers that are alike. The memory that a layer needs for a long
    prompt is freed before the next layer begins. Calling the model must compute the same as calling
    its parts one after the other.

    Attributes:
      layers: the blocks in order, NNX modules that share no variables:
        `block(x, positions, cache, *, layer, phase, last) -> (x, cache)`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> from flax import nnx
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(  # one that shows its parts
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> def logits(model, tokens, positions, caches):  # of a prompt's last token
      ...     x = model.embed_tokens(tokens, positions)
      ...     for block, cache in zip(model.layers, caches):
      ...         tx = cache.transform
      ...         x, _ = block(x, positions, cache, layer=tx, phase="prompt", last=True)
      ...     return model.head(x[:, -1:])
      >>> caches = kvjax.init_caches("h2o(budget=2)", num_layers=2, batch=1, kv_heads=2,
      ...                            query_heads=4, head_dim=8, max_prompt=3, max_new=0)
      >>> nnx.eval_shape(
      ...     logits, model, jnp.array([[5, 6, 7]]), jnp.array([[0, 1, 2]]), caches).shape
      (1, 1, 64)
    """

    layers: Sequence[nnx.Module]

    def embed_tokens(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Returns the states that enter the first block."""
        ...

    def head(self, x: Float[Array, "B N C"]) -> Float[Array, "B N V"]:
        """Returns the logits of the states that leave the last block."""
        ...


class _CallSignature:
    """Makes `inspect.signature` and `help` show how a `LanguageModel` is called.

    A protocol has no constructor to show. Classes that inherit from it have one.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if owner is not LanguageModel:
            raise AttributeError("__signature__")
        signature = inspect.signature(LanguageModel.__call__)
        without_self = list(signature.parameters.values())[1:]
        return signature.replace(parameters=without_self)


LanguageModel.__signature__ = _CallSignature()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class ModelParts:
    """A model's call in parts, as functions of its parameters.

    It is for functional models what `LayeredModel` is for NNX modules. All parts are hashable.

    Args:
      embed: `embed(params, tokens, positions) -> x`, `[B, T, C]`.
      split: `split(params)`, which returns the parameters of each block.
      blocks: one function per layer, `block(layer_params, x, positions, cache, layer=, phase=,
        last=)`, which returns x and the cache. Layers share compiled code if their functions are
        equal and their parameters have the same structure.
      head: `head(params, x) -> logits`, for states `[B, N, C]`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> from kvjax.models import FunctionalModel, ModelParts
      >>> def block(projection, x, positions, cache, *, layer, phase, last):
      ...     heads = (x @ projection)[:, None]  # one head
      ...     out, cache = kvjax.attend(
      ...         cache, heads, heads, heads, positions, phase=phase, last=last)
      ...     return x + out[:, 0], cache
      >>> parts = ModelParts(
      ...     embed=lambda params, tokens, positions: params["embed"][tokens],
      ...     split=lambda params: params["layers"], blocks=(block, block),
      ...     head=lambda params, x: x @ params["embed"].T)
      >>> params = {"embed": jnp.eye(8), "layers": [jnp.eye(8), 2 * jnp.eye(8)]}
      >>> apply = print  # which decode steps would call
      >>> model = FunctionalModel(apply, params, num_layers=2, query_heads=1, kv_heads=1,
      ...                         head_dim=8, vocab_size=8, parts=parts)
      >>> kvjax.read(model, [[3, 1, 4]]).logits.shape
      (1, 8)
    """

    embed: Callable[..., Array]
    split: Callable[[Any], Sequence[Any]]
    blocks: tuple[Callable[..., tuple[Array, Cache]], ...]
    head: Callable[..., Array]


@dataclass(frozen=True)
class FunctionalModel:
    """A model as a function of its parameters, for Linen and for plain JAX.

    It is a pytree whose arrays are those of `params`; everything else is static.

    Args:
      apply: `apply(params, tokens, positions, caches, layers=, phase=, last=, logits_at=)`, as
        `LanguageModel.__call__`. Hashable: compiled code is kept per `apply`.
      params: any pytree of arrays.
      num_layers, query_heads, kv_heads, head_dim, vocab_size, max_positions: as in `LanguageModel`.
      parts: the same model in parts, with which prompts are read layer by layer; optional.
      windows: as in `LanguageModel`; empty: no layer has a window.
      attention_scale, attention_soft_cap: as in `LanguageModel`.
      length_class: as in `LanguageModel`; None: nothing depends on a text's length.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> from kvjax.models import FunctionalModel
      >>> def apply(params, tokens, positions, caches, *, layers, phase, last=True, logits_at=None):
      ...     x = params[tokens]
      ...     heads = x[:, None]  # one head, and no projections
      ...     out, cache = kvjax.attend(
      ...         caches[0], heads, heads, heads, positions, phase=phase, last=last)
      ...     x = x + out[:, 0]
      ...     if logits_at is not None:
      ...         x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
      ...     return x @ params.T, (cache,)
      >>> model = FunctionalModel(
      ...     apply, jnp.eye(8), num_layers=1, query_heads=1, kv_heads=1, head_dim=8, vocab_size=8)
      >>> kvjax.read(model, [[3, 1, 4]]).logits.argmax(-1).tolist()
      [4]
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
    attention_scale: OfLayers = None
    attention_soft_cap: OfLayers = None

    def attention(self, layer: int) -> AttentionOptions:
        """Returns the options of a layer's attention: scale, window and soft cap."""
        return AttentionOptions(
            scale=of_layer(self.attention_scale, layer),
            window=self.windows[layer] if self.windows else None,
            soft_cap=of_layer(self.attention_soft_cap, layer),
        )


def of_layer(option: OfLayers, layer: int) -> float | None:
    """Returns the number for a layer: its entry of a tuple, or the one number of all layers."""
    return option[layer] if isinstance(option, tuple) else option


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
    """A model's call, or one of its methods, as a function of its arrays.

    Two are equal if their NNX modules have equal structure, so that these share compiled code.
    """

    model: nnx.GraphDef | Callable
    method: str = "__call__"

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.model, self.method))

    def __hash__(self) -> int:
        return self._hash  # that of a model's structure takes milliseconds, and is asked for often

    def __call__(self, params, *args, **kwargs):
        model = self.model
        if isinstance(model, nnx.GraphDef):
            model = nnx.merge(model, params)
        return getattr(model, self.method)(*args, **kwargs)


def _split_layers(params: nnx.State) -> list[nnx.State]:
    """Returns the parameters of each block of a `LayeredModel`."""
    return [params["layers"][i] for i in range(len(params["layers"]))]


def _parts_of(model: Any, called: Any, params: Any) -> ModelParts | None:
    """Returns the parts of an NNX module that shows them, None for other models."""
    if not isinstance(model, nnx.Module) or not all(hasattr(model, name) for name in _PARTS):
        return None
    split = [nnx.split(block) for block in model.layers]  # pyright: ignore[reportAttributeAccessIssue]
    # The parameters of a model hold a shared variable once, so that one of the layers that share it
    # has fewer parameters there than alone.
    alone = [jax.tree.structure(layer_params) for _, layer_params in split]
    if alone != [jax.tree.structure(layer_params) for layer_params in _split_layers(params)]:
        raise TypeError(
            f"the layers of {type(model).__name__} share variables: give a "
            "kvjax.models.FunctionalModel"
        )
    return ModelParts(
        _Apply(called, "embed_tokens"), _split_layers,
        tuple(_Apply(graph) for graph, _ in split), _Apply(called, "head"),
    )  # fmt: skip


def _option(model: Any, name: str) -> float | tuple[float | None, ...] | None:
    """Returns an optional attribute of a model: one value for all layers, or one for each."""
    value = getattr(model, name, None)
    return tuple(value) if isinstance(value, list) else value


def as_functional(model: LanguageModel | FunctionalModel) -> FunctionalModel:
    """Makes a `FunctionalModel` of any supported model; splits NNX modules into graph and arrays.

    Raises:
      TypeError: the model is not callable, or lacks one of the documented attributes.
    """
    if isinstance(model, FunctionalModel):
        return model
    if not callable(model):
        raise TypeError(
            f"model must be callable (see kvjax.models.LanguageModel), got {model!r:.80}"
        )
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
            "give a kvjax.models.FunctionalModel"
        )
    windows = getattr(model, "windows", None) or ()
    return FunctionalModel(
        apply=_Apply(called),
        params=params,
        num_layers=model.num_layers,
        query_heads=model.query_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        max_positions=getattr(model, "max_positions", None),
        parts=_parts_of(model, called, params),
        windows=tuple(windows) if isinstance(windows, list) else windows,
        length_class=getattr(model, "length_class", None),
        attention_scale=_option(model, "attention_scale"),
        attention_soft_cap=_option(model, "attention_soft_cap"),
    )
