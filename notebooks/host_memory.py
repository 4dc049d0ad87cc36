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
# # Keys and values in host memory
#
# Methods that select look at a part of the cache in each step. `Offload` puts keys and values into
# host memory, and keeps on the device what the last steps selected. A step fetches only the tokens
# that the device does not hold yet. This notebook counts what is transferred.
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
import matplotlib.pyplot as plt
import numpy as np

from kvjax import plot
from kvjax.evaluation import Haystack
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())
haystack = Haystack(tokenizer, demo.held_out_text())
case = haystack.case("needle", length=1024, depth=0.4, seed=1)
prompt = case.prompt

# %% [markdown]
# ## Where the bytes are
#
# The tokens are the same with and without `Offload`: it changes where keys and values are, and not
# which ones a step looks at.

# %%
clusters = kvjax.ClusterKV(budget=0.1)
on_host = kvjax.chain(clusters, kvjax.Offload(recent_steps=1))
named = {"full": kvjax.Full(), "clusterkv": clusters, "clusterkv, offload": on_host}
PLACES = {"device": "on the device", "pinned_host": "on the host"}
results = {}
for name, transform in named.items():
    result = kvjax.generate(model, [prompt], transform=transform, max_new_tokens=32, end_tokens=())
    results[name] = result
    held = [f"{size / 1e6:.2f} MB {PLACES[kind]}" for kind, size in result.memory_bytes.items()]
    print(f"{name:20} {', '.join(held)}")
same = results["clusterkv"].tokens == results["clusterkv, offload"].tokens
print("the same tokens:", same, repr(tokenizer.decode(results["clusterkv"].tokens[0][:5])))

# %%
figure, axes = plt.subplots(figsize=(7.2, 1.8))
left = np.zeros(len(results))
for kind, colour, hatch in (("device", "#1f3b73", ""), ("pinned_host", "#E69F00", "///")):
    size = np.array([one.memory_bytes.get(kind, 0) / 1e6 for one in results.values()])
    axes.barh(list(results), size, left=left, color=colour, hatch=hatch, edgecolor="white",
              label=PLACES[kind])  # fmt: skip
    left += size
axes.invert_yaxis()
axes.set_xlabel("MB of the caches")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# The first two layers stay dense on the device, as in the paper: half of this model, and a
# sixteenth of one with 32 layers. In a model of that size the part on the device is small.
#
# ## What is transferred
#
# The step before has looked at most of the tokens that a step looks at. Below, each block is a KV
# head and each line a step. Dark tokens are on the device already, and orange ones must be fetched.
# New tokens are always on the device.

# %%
STEPS, LAYER = 16, 3
steps, _ = plot.watch(model, prompt, clusters, steps=STEPS)
tokens = len(prompt) + STEPS
seen = np.stack(
    [np.pad(own.marks[LAYER], ((0, 0), (0, tokens - own.marks[LAYER].shape[1]))) for own in steps],
    axis=1,
).astype(int)  # heads, steps, positions
before = np.concatenate([np.zeros_like(seen[:, :1]), seen[:, :-1]], axis=1)
crosses = (seen == 1) & (before == 0)
crosses[:, :, len(prompt) :] = False
figure, axes = plt.subplots(figsize=(7.2, 3.4))
plot.field(axes, np.where(crosses, 2, seen).reshape(-1, tokens), group=STEPS,
           label="head (a line per step)")  # fmt: skip
plot.legend(figure, kept="on the device", other="fetched", gone="not in this step")
plt.show()
print(
    f"fetched: {crosses[:, 1:].sum() / seen[:, 1:, : len(prompt)].sum():.0%} of what was looked at"
)

# %% [markdown]
# ## How much the device should hold
#
# `recent_steps` is how many steps' selections stay on the device. With more of them, fewer bytes
# are transferred, and the device holds more. `result.recall` has the transferred bytes and the
# share that was found on the device.

# %%
fetched, rates = [], []
RECENT = (1, 2, 4)
for recent in RECENT:
    transform = kvjax.chain(clusters, kvjax.Offload(recent_steps=recent))
    result = kvjax.generate(model, [prompt], transform=transform, max_new_tokens=32, end_tokens=())
    fetched.append(result.recall.fetched_bytes_per_step / 1e3)
    rates.append(result.recall.hit_rate)
    held = result.memory_bytes["device"] / 1e6
    print(f"{recent} step{'s' * (recent > 1)}: {rates[-1]:.0%} found on the device, "
          f"{fetched[-1]:.0f} kB per step cross, {held:.2f} MB held")  # fmt: skip
figure, axes = plt.subplots(figsize=(7.2, 2.4))
axes.plot(RECENT, fetched, "o-", color="#1f3b73")
axes.set_xticks(RECENT)
axes.set_ylim(0)
axes.set_xlabel("steps whose selections stay on the device")
axes.set_ylabel("kB per step that cross")
plt.show()

# %% [markdown]
# ## What this does not show
#
# On a CPU "host" and "device" are the same memory, so the bytes are right and times would say
# nothing. On a GPU keys and values cross the bus, and whether that pays depends on the bandwidth,
# on how long a step takes otherwise, and on how often its selection changes. A small model on short
# text changes it often.
