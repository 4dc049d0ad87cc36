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
# # Speed and memory
#
# What does a smaller cache save? This notebook counts the bytes of caches, also of models that do
# not fit here, and measures times on this machine beside the least that its bandwidth allows.
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
from kvjax.evaluation import measure_speed
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

# %% [markdown]
# ## Bytes of a large model, without it
#
# A cache is arrays of known shapes, so `jax.eval_shape` tells its size before it is made. Here are
# the caches of Llama-3.1-8B (32 layers of 8 KV heads with 128 channels, bfloat16) for one row and
# 512 new tokens, by the length of the prompt. Bytes are those of all arrays, positions and indices
# included.

# %%
LAYERS, SIZE = 32, {"batch": 1, "kv_heads": 8, "query_heads": 32, "head_dim": 128}
METHODS = {
    "full": kvjax.Full(),
    "quantize, 8 bits": kvjax.Quantize(8),
    "snapkv(0.2)": kvjax.SnapKV(budget=0.2),
    "snapkv(0.2), 4 bits": kvjax.chain(kvjax.SnapKV(budget=0.2), kvjax.Quantize(bits=4)),
    "snapkv(1024)": kvjax.SnapKV(budget=1024),
}
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


def gigabytes(transform, length):
    """Bytes of all layers, in units of 10⁹."""

    def caches():
        return [
            kvjax.init_cache(
                bound, layer=layer, max_prompt=length, max_new=512, dtype="bfloat16", **SIZE
            )
            for layer, bound in enumerate(kvjax.bind(transform, LAYERS))
        ]

    return kvjax.nbytes(jax.eval_shape(caches)) / 1e9


figure, axes = plt.subplots(figsize=(7.2, 3.2))
for (name, transform), marker in zip(METHODS.items(), "os^Dv"):
    sizes = [gigabytes(transform, length) for length in LENGTHS]
    axes.plot(LENGTHS, sizes, marker=marker, label=name)
    print(f"{name:20} {sizes[-1]:6.2f} GB at {LENGTHS[-1]:,} tokens")
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
axes.yaxis.set_major_formatter("{x:g}")
axes.set_xlabel("tokens of the prompt")
axes.set_ylabel("GB of one row's caches")
axes.legend()
plt.show()

# %% [markdown]
# A budget as a share of the prompt gives a line parallel to the full cache's, and a number of slots
# gives a flat one. `kvjax plan` does this for a model's configuration and a mesh of devices, and
# says how many requests fit.
#
# ## Bytes by layer, measured
#
# These are caches that exist: those of the bundled model after 2,048 tokens. `PyramidKV` gives
# layers different budgets.

# %%
prompt = tokenizer(demo.held_out_text()).input_ids[:2048]
methods = {
    "full": kvjax.Full(),
    "snapkv": kvjax.SnapKV(budget=0.2),
    "pyramidkv": kvjax.PyramidKV(budget=0.2),
    "clusterkv": kvjax.ClusterKV(budget=0.2),
}
contexts = {
    name: kvjax.read(model, [prompt], transform=transform, max_new=32)
    for name, transform in methods.items()
}
figure, axes = plt.subplots(figsize=(7.2, 2.6))
plot.layer_bytes(axes, {name: context.caches for name, context in contexts.items()})
plt.show()

# %% [markdown]
# In the layers where it selects, ClusterKV has more bytes than the full cache: it keeps everything,
# and centroids.
#
# ## Times
#
# `measure_speed` runs all methods in turn, in several rounds, and takes each one's fastest. `floor`
# is the time that the bytes of a step take at this machine's bandwidth, measured in the same run.
# The model is tiny, so its weights and small caches fit into the processor's own caches, and may be
# read faster than that.

# %%
report = measure_speed(
    model,
    {"snapkv": kvjax.SnapKV(budget=0.1), "clusterkv": kvjax.ClusterKV(budget=0.1)},
    prompt_tokens=(4096,),
    new_tokens=(32,),
    batches=(1, 4),
    rounds=2,
)
titles = ("method", "rows", "first token", "per token", "floor", "compiling")
print("{:10} {:>4} {:>12} {:>10} {:>9} {:>10}".format(*titles))
for row in report.rows:
    print(f"{row.method:10} {row.batch:4} {1e3 * row.ttft_s:9.0f} ms {1e3 * row.tpot_s:7.2f} ms "
          f"{1e3 * row.step_floor_s:6.2f} ms {row.compile_s:8.1f} s")  # fmt: skip

# %%
names = list(dict.fromkeys(row.method for row in report.rows))
figure, axes = plt.subplots(figsize=(7.2, 2.6))
for shift, (batch, colour, hatch) in enumerate(((1, "#1f3b73", ""), (4, "#E69F00", "///"))):
    own = [1e3 * row.tpot_s for row in report.rows if row.batch == batch]
    label = f"{batch} row{'s' * (batch > 1)}"
    axes.bar(np.arange(len(names)) + 0.4 * shift, own, 0.38, color=colour, hatch=hatch,
             edgecolor="white", label=label)  # fmt: skip
axes.set_xticks(np.arange(len(names)) + 0.2, names)
axes.set_ylabel("ms per step (all rows)")
axes.legend()
plt.show()

# %% [markdown]
# The larger the part of a step that reads the cache, the more a smaller cache saves: more with four
# rows than with one. The time to the first token includes the compression.
#
# These times are of this machine now, with a model that fits into a processor's cache. `kvjax bench
# --model DIR --method snapkv,clusterkv` measures your model; nothing here says how a GPU would do.
