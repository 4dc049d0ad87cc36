"""kvjax in models that other people wrote: an attention in their terms, and their model whole.

A layer of others has no argument for what `kvjax.attend` wants to know of a call: whether it is a
prompt or a step, where padding is, whether the prompt is complete. A `GuestCache` brings that along
in the place of the layer's cache. The adapter of a model is then an attention of a few lines,
`cache.attend(q, k, v)`, and one call of `functional_model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.attention.attend import Layout, attend
from kvjax.attention.flush import self_flushing
from kvjax.attention.layer import Cache, for_keeping
from kvjax.cache.rope import Rope
from kvjax.generation.model import FunctionalModel, OfLayers
from kvjax.generation.new_caches import init_caches
from kvjax.protocol import KVTransform, Phase
from kvjax.serialization import pytree_node

_NOT_DESCRIBED = {"computes": False}  # in the fingerprint of a model


@pytree_node
@dataclass(frozen=True)
class GuestCache:
    """The cache of one layer of somebody else's model, and what its attention is not told.

    It is a pytree, which their loop may carry and donate. `guest_caches` makes those of all layers.

    Args:
      cache: of the layer, from `kvjax.init_cache`.
      positions: of the call's tokens, -1 for padding; None: the attention gives them.
      phase, last: as in `kvjax.attend` (static). By default, one token is a step, more are a
        prompt, and every prompt is complete.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.guests.GuestCache(kvjax.init_cache(
      ...     kvjax.StreamingLLM(budget=8), batch=1, kv_heads=2, head_dim=4, max_prompt=16,
      ...     max_new=4))
      >>> @jax.jit
      ... def attention(x, positions, cache):  # of a model of others, without projections
      ...     heads = x.reshape(*x.shape[:2], 2, 4)
      ...     out, cache = cache.attend(heads, heads, heads, positions)
      ...     return out.reshape(x.shape), cache
      >>> out, cache = attention(jnp.ones((1, 12, 8)), jnp.arange(12)[None], cache)
      >>> out.shape, int(cache.cache.kv.live[0, 0].sum())
      ((1, 12, 8), 8)
    """

    cache: Cache
    positions: Int[Array, "B T"] | None = None
    phase: Phase | Literal["by_length"] = field(default="by_length", metadata={"static": True})
    last: bool = field(default=True, metadata={"static": True})

    def attend(
        self,
        q: Float[Array, "B T Q D"],
        k: Float[Array, "B T H D"] | None,
        v: Float[Array, "B T H D"] | None,
        positions: Int[Array, "B T"] | None = None,
        *,
        layout: Layout = "BTHD",
        rope: Rope | None = None,
        sinks: Float[Array, " Q"] | None = None,
    ) -> tuple[Array, GuestCache]:
        """Attends as `kvjax.attend`, in a call that this cache knows more of.

        In a loop that does not say the phase, a token that the cache holds already, which is fed
        once more behind a prompt, is not added again (`repeats`).

        Args:
          q, k, v, layout, rope, sinks: as in `kvjax.attend`, with tokens before heads by default.
          positions: of the tokens; those of the cache go first.

        Raises:
          ValueError: neither the call nor the cache has positions; what `kvjax.attend` raises.

        Returns:
          The output in the same layout, and the cache for the next call.
        """
        positions = positions if self.positions is None else self.positions
        if positions is None:
            raise ValueError(
                "attend needs the positions of the tokens: give them, or make the caches with "
                "kvjax.guests.guest_caches(caches, positions)"
            )
        out, cache = attend(
            self.cache, q, k, v, positions, phase=self.phase, last=self.last,
            repeats=self.phase == "by_length", layout=layout, rope=rope, sinks=sinks,
        )  # fmt: skip
        return out, dataclasses.replace(self, cache=cache)


def guest_caches(
    caches: Sequence[Cache],
    positions: Int[Array, "B T"] | None = None,
    phase: Phase | Literal["by_length"] = "by_length",
    last: bool = True,
) -> tuple[GuestCache, ...]:
    """Caches of all layers for one call of somebody else's model, or for a loop of theirs.

    Args:
      caches: of each layer. For a loop that has no place for `kvjax.flush`, those of
        `kvjax.self_flushing`; for one that feeds a token twice, of `init_caches(repeats=True)`.
      positions: of the call's tokens, -1 for padding (`kvjax.positions_of`). None, as in a loop
        that carries the caches: the attention gives them.
      phase, last: as in `kvjax.attend`. By default one token is a step, and more are a prompt.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> caches = kvjax.init_caches("h2o(budget=8)", num_layers=2, batch=1, kv_heads=2,
      ...                            head_dim=4, max_prompt=16, max_new=4)
      >>> cache, _ = kvjax.guests.guest_caches(kvjax.self_flushing(caches))
      >>> attend = jax.jit(lambda cache, x, positions: cache.attend(x, x, x, positions))
      >>> x = jnp.ones((1, 12, 2, 4))
      >>> out, cache = attend(cache, x, jnp.arange(12)[None])
      >>> again, cache = attend(cache, x[:, -1:], jnp.array([[11]]))  # once more, and not added
      >>> out.shape, again.shape, cache.cache.kv.length.tolist()
      ((1, 12, 2, 4), (1, 1, 2, 4), [12])
    """
    # Each has positions of its own, since a loop donates the caches of all layers.
    return tuple(GuestCache(cache, for_keeping(positions), phase, last) for cache in caches)


def loop_caches(
    model: FunctionalModel,
    transform: KVTransform | str,
    *,
    batch: int,
    max_prompt: int,
    max_new: int,
    positions: Int[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[GuestCache, ...]:
    """Empty caches for a loop of others, of all layers, which flush themselves.

    Args:
      model: made by `functional_model`, which says the sizes and the options of each layer.
      transform, batch, max_prompt, max_new, dtype: as in `kvjax.init_caches`.
      positions: of the tokens of the first call, as in `guest_caches`.

    Example:
      >>> import kvjax
      >>> model = kvjax.guests.functional_model(
      ...     print, {}, num_layers=2, query_heads=4, kv_heads=2, head_dim=8, vocab_size=32)
      >>> caches = kvjax.guests.loop_caches(
      ...     model, "h2o(budget=8)", batch=1, max_prompt=16, max_new=4)
      >>> [guest.cache.kv.shape for guest in caches]
      [(1, 2, 9), (1, 2, 9)]
    """
    caches = init_caches(
        transform, batch=batch, max_prompt=max_prompt, max_new=max_new, dtype=dtype,
        num_layers=model.num_layers, query_heads=model.query_heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, windows=model.windows, scale=model.attention_scale,
        soft_cap=model.attention_soft_cap, repeats=True,
    )  # fmt: skip
    return guest_caches(self_flushing(caches), positions)


def functional_model(
    forward: Callable[..., tuple[Array, Sequence[GuestCache]]],
    params: Any,
    *,
    head: Callable[[Any, Array], Array] | None = None,
    num_layers: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_positions: int | None = None,
    windows: tuple[int | None, ...] = (),
    attention_scale: OfLayers = None,
    attention_soft_cap: OfLayers = None,
) -> FunctionalModel:
    """Makes a model of others one for `kvjax.generate`, `read`, contexts and evaluation.

    Args:
      forward: `forward(params, tokens, positions, caches) -> (x, caches)` calls their model. It
        gets a `GuestCache` for each layer, and positions that are 0 for padding, since models look
        them up; the caches have -1 there. x are logits `[B, T, V]`, or with `head` the states
        before. Hashable: compiled code is kept per function. Contexts know a model again by its
        weights and sizes, not by this function.
      params: any pytree of arrays.
      head: `head(params, x) -> logits` of the states `[B, N, C]`. With it the logits of tokens that
        nobody asked for are not computed.
      num_layers, query_heads, kv_heads, head_dim, vocab_size, max_positions, windows,
        attention_scale, attention_soft_cap: as in `kvjax.models.LanguageModel`.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> def forward(params, tokens, positions, caches):
      ...     x = params[tokens]  # an embedding and one attention without projections
      ...     heads = x.reshape(*x.shape[:2], 2, 4)
      ...     out, cache = caches[0].attend(heads, heads, heads)
      ...     return (x + out.reshape(x.shape)) @ params.T, (cache,)
      >>> model = kvjax.guests.functional_model(
      ...     forward, jax.random.normal(jax.random.key(0), (32, 8)), num_layers=1, query_heads=2,
      ...     kv_heads=2, head_dim=4, vocab_size=32)
      >>> read = kvjax.read(model, [[3, 1, 4, 1, 5]], transform="h2o(budget=4)", max_prompt=8)
      >>> answer = kvjax.generate(model, [[2, 7]], context=read, max_new_tokens=3, end_tokens=())
      >>> len(answer.tokens[0])
      3
    """
    return FunctionalModel(
        apply=_Guest(forward, head), params=params, num_layers=num_layers, query_heads=query_heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab_size=vocab_size, max_positions=max_positions,
        windows=windows, attention_scale=attention_scale, attention_soft_cap=attention_soft_cap,
    )  # fmt: skip


@dataclass(frozen=True)
class _Guest:
    """A model's call as `kvjax.models.LanguageModel` has it, by what an adapter gives."""

    # Functions of adapters hold their framework's modules, whose notes change from call to call:
    # contexts know the model again by its weights and sizes.
    forward: Callable[..., tuple[Array, Sequence[GuestCache]]] = field(metadata=_NOT_DESCRIBED)
    head: Callable[[Any, Array], Array] | None = field(metadata=_NOT_DESCRIBED)

    def __call__(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        caches: tuple[Cache, ...],
        *,
        layers: tuple[KVTransform, ...],
        phase: Phase,
        last: bool = True,
        logits_at: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N V"], tuple[Cache, ...]]:
        guests = guest_caches(caches, positions, phase, last)
        x, written = self.forward(params, tokens, jnp.maximum(positions, 0), guests)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
        logits = x if self.head is None else self.head(params, x)
        return logits, tuple(guest.cache for guest in written)
