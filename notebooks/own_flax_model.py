# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own Flax model
#
# Your attention layer calls `kvjax.attend` in place of its own attention. This notebook writes a
# small decoder in Flax NNX around that call, with a loop of its own, and looks at its caches.
# Weights are random: the notebook shows how the parts fit together, and the model writes no text.
#
# *It runs from top to bottom on a CPU in under three minutes, and shows the outputs of such a run.
# In Colab, **File → Upload notebook** takes this file, and **File → Open notebook → GitHub** the
# address of its repository. `%pip` installs what is missing: add the extra `cuda12` or `cuda13` for
# a GPU, `tpu` for a TPU.*

# %% tags=["skip-execution"]
# %pip install -q --find-links . "kvjax[eval,gguf]"

# %%
import jax

import kvjax

print(f"kvjax {kvjax.__version__}, jax {jax.__version__}: {jax.devices()}")

# %%
import functools

import jax.numpy as jnp
import matplotlib.pyplot as plt
from flax import nnx

from kvjax import plot

plt.rcParams.update(plot.LOOK)
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 8, 4, 16, 64, 128
ROWS, PROMPT, NEW = 2, 96, 48

# %% [markdown]
# ## The layer
#
# `attend` adds the new tokens to the cache, attends, and lets the method compress. The cache goes
# in and comes out; it is a pytree whose shapes never change while decoding. With `rope`, `attend`
# rotates queries and keys; without it, pass rotated ones.

# %%
rope = kvjax.Rope(inv_freq=1.0 / 10_000.0 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))


class Attention(nnx.Module):
    """Attention through a cache from kvjax."""

    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q = linear(WIDTH, QUERY_HEADS * HEAD_DIM)
        self.k = linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.v = linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.out = linear(QUERY_HEADS * HEAD_DIM, WIDTH)

    def __call__(self, x, positions, cache, transform, phase):
        heads = (y.reshape(*y.shape[:2], -1, HEAD_DIM) for y in (self.q(x), self.k(x), self.v(x)))
        q, k, v = (y.swapaxes(1, 2) for y in heads)  # [rows, heads, tokens, channels]
        out, cache = kvjax.attend(cache, q, k, v, positions, phase=phase, rope=rope)
        return self.out(out.swapaxes(1, 2).reshape(*x.shape[:2], -1)), cache


class Model(nnx.Module):
    """A decoder of such layers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Attention(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens, positions, caches, transforms, phase):
        x, written = self.embed(tokens), []
        for layer, cache, transform in zip(self.layers, caches, transforms, strict=True):
            added, cache = layer(x, positions, cache, transform, phase)
            x = x + added
            written.append(cache)
        return x @ self.embed.embedding[...].T, tuple(written)


# %% [markdown]
# ## Caches
#
# `bind` gives each layer its transform, since methods may differ by layer. `init_cache` makes
# caches for `max_prompt` and `max_new` tokens of a row over all turns. The method here keeps the
# tokens that the newest queries look at, and chooses again every 16 steps.

# %%
transforms = kvjax.bind(kvjax.Every(kvjax.SnapKV(budget=40, window=8), steps=16), LAYERS)
caches = tuple(
    kvjax.init_cache(
        transform,
        layer=i,
        batch=ROWS,
        kv_heads=KV_HEADS,
        query_heads=QUERY_HEADS,
        head_dim=HEAD_DIM,
        max_prompt=PROMPT,
        max_new=NEW,
        dtype=jnp.float32,
    )
    for i, transform in enumerate(transforms)
)
print("slots of a head:", caches[0].kv.slots, "for", PROMPT + NEW, "tokens")

# %% [markdown]
# ## Reading prompts of different lengths
#
# A position of -1 is padding: it is not stored. `phase` is static, and the caches are donated, so
# that a step writes in place.

# %%
graph, weights = nnx.split(Model(nnx.Rngs(0)))


@functools.partial(jax.jit, static_argnames="phase", donate_argnames="caches")
def call(weights, tokens, positions, caches, phase):
    """The model on some tokens."""
    return nnx.merge(graph, weights)(tokens, positions, caches, transforms, phase)


lengths = jnp.array([96, 61])
place = jnp.arange(PROMPT)[None]
positions = jnp.where(place < lengths[:, None], place, -1)
tokens = jax.random.randint(jax.random.key(0), (ROWS, PROMPT), 0, VOCABULARY)
logits, caches = call(weights, tokens, positions, caches, phase="prompt")
print("live slots by row and head:\n", caches[0].kv.live.sum(-1))

# %% [markdown]
# The picture shows what the first row holds, and what the second, shorter row holds:

# %%
figure, panels = plt.subplots(2, figsize=(7.2, 3.6), sharex=True)
for row, axes in enumerate(panels):
    plot.held(axes, caches, row=row)
    axes.set_title(f"row {row}: {int(lengths[row])} tokens", loc="left")
    axes.label_outer()
axes.set_xlim(-0.5, PROMPT - 0.5)
plot.legend(figure, kept="live", gone="evicted")
plt.show()

# %% [markdown]
# With random weights nothing in the text is special, so the tokens that stay before the newest ones
# are scattered.
#
# ## Decoding, and `flush`
#
# Some methods process new tokens only every M steps: the loop calls `kvjax.flush` after each M
# steps. `flush_interval` gives M, which is known before anything is traced.

# %%
interval = kvjax.flush_interval(caches)
print("flush after every", interval, "steps")


@functools.partial(jax.jit, donate_argnames="caches")
def period(weights, token, position, caches):
    """M steps, and then what is done every M steps."""

    def step(carry, _):
        token, position, caches = carry
        logits, caches = nnx.merge(graph, weights)(token, position, caches, transforms, "decode")
        return (logits.argmax(-1), position + 1, caches), token[:, 0]

    carry, written = jax.lax.scan(step, (token, position, caches), length=interval)
    token, position, caches = carry
    return written.T, token, position, kvjax.flush(caches)


last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)
token, position, live = last.argmax(-1), lengths[:, None], []
for _ in range(NEW // interval):
    written, token, position, caches = period(weights, token, position, caches)
    live.append(int(caches[0].kv.live[0].sum()) // KV_HEADS)
print("live slots of a head after each period:", live)
kvjax.check_dropped(caches)  # raises if a token found no slot

# %%
figure, axes = plt.subplots(figsize=(7.2, 2.4))
plot.held(axes, caches, row=0)
axes.set_title(f"row 0 after {NEW} steps", loc="left")
plot.legend(figure, kept="live", gone="evicted")
plt.show()

# %% [markdown]
# The budget covers the whole text, written tokens included: after every flush 40 slots of a head
# are live.
#
# ## `kvjax.generate` with your model
#
# `generate`, contexts and `kvjax.evaluation` take every model with the signature of
# `kvjax.models.LanguageModel`: attributes for its sizes, and a call with tokens, positions, caches,
# transforms and phase. `examples/` has whole decoders in NNX and Linen, and an attention that keeps
# its own code and uses a cache from kvjax.
