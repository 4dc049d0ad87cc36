"""A model's prompt pass and decode loop, jitted as in `kvjax.generate`, with caches to look at.

The benchmarks that need the caches between decode steps, or the compiled functions themselves,
cannot use `kvjax.generate`. They build both functions here, from public names alone.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """What the decode loop carries.

    Args:
      caches: one per layer.
      position: of the newest token, which is not in the caches yet, per row.
      tokens: new tokens per row; from `step` on those that were given, or -1.
      logits: that each new token was chosen by.
      step: new tokens so far.
    """

    caches: tuple
    position: Int[Array, " B"]
    tokens: Int[Array, "B N"]
    logits: Float[Array, "B N V"]
    step: Int[Array, ""]

    def put(self, logits: Float[Array, "B V"]) -> Progress:
        """The next token of each row: the one that was given, or else the one of the best logit."""
        given = jax.lax.dynamic_index_in_dim(self.tokens, self.step, 1, keepdims=False)
        token = jnp.where(given >= 0, given, logits.argmax(-1).astype(jnp.int32))
        write = jax.lax.dynamic_update_slice_in_dim
        return dataclasses.replace(
            self,
            tokens=write(self.tokens, token[:, None], self.step, 1),
            logits=write(self.logits, logits[:, None], self.step, 1),
            step=self.step + 1,
        )


@dataclass(frozen=True)
class ModelLoop:
    """The functions of one model and one method. Equal values share compiled code.

    Args:
      graphdef: the model's, from `flax.nnx.split`.
      layers: one transform per layer, from `kvjax.bind`.
      max_prompt: padded tokens of a prompt.
      max_new: decode steps. They choose one token more, which no step reads.
    """

    graphdef: nnx.GraphDef
    layers: tuple[kvjax.KVTransform, ...]
    max_prompt: int
    max_new: int

    def apply(self, params, *args, **kwargs) -> tuple[Array, tuple]:
        """The model as a function of its parameters."""
        return nnx.merge(self.graphdef, params)(*args, layers=self.layers, **kwargs)

    @functools.partial(jax.jit, static_argnums=0)
    def read_prompt(
        self, params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], given: Array
    ) -> Progress:
        """Reads a padded prompt and chooses the first new token.

        Args:
          params: the model's.
          tokens, positions: of the prompt; positions are -1 at padding.
          given: `[B, max_new + 1]`: what the new tokens are to be, -1: the one of the best logit.
        """
        model = nnx.merge(self.graphdef, params)
        caches = tuple(
            kvjax.init_cache(
                layer, batch=len(tokens), kv_heads=model.kv_heads, query_heads=model.query_heads,
                head_dim=model.head_dim, max_prompt=self.max_prompt, max_new=self.max_new,
                layer=number,
            )
            for number, layer in enumerate(self.layers)
        )  # fmt: skip
        last = positions.max(-1)
        logits, caches = self.apply(
            params, tokens, positions, caches, phase="prompt", last=True, logits_at=last[:, None]
        )
        none = jnp.zeros((*given.shape, model.vocab_size), logits.dtype)
        start = Progress(caches, last + 1, given, none, jnp.zeros((), jnp.int32))
        return start.put(logits[:, -1])

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def decode(self, params, progress: Progress, until: Int[Array, ""]) -> Progress:
        """Makes decode steps until `until` new tokens have been put into the caches."""

        def step(at: Int[Array, ""], progress: Progress) -> Progress:
            token = jax.lax.dynamic_slice_in_dim(progress.tokens, at, 1, 1)
            logits, caches = self.apply(
                params, token, progress.position[:, None], progress.caches,
                phase="decode", last=True, logits_at=None,
            )  # fmt: skip
            moved = dataclasses.replace(progress, caches=caches, position=progress.position + 1)
            return moved.put(logits[:, -1])

        return jax.lax.fori_loop(progress.step - 1, until, step, progress)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def flush(self, caches: tuple) -> tuple:
        """What is done with new tokens every `flush_interval` steps."""
        return kvjax.flush(caches)


def flush_interval(caches: tuple) -> int | None:
    """Decode steps between two calls of `flush`; None: it is never called."""
    return kvjax.flush_interval(caches) if hasattr(kvjax, "flush") else None


def padded(prompts: list[list[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions `[B, size]`, padded on the right."""
    tokens = np.zeros((len(prompts), size), np.int32)
    positions = np.full_like(tokens, -1)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        positions[row, : len(prompt)] = np.arange(len(prompt))
    return tokens, positions
