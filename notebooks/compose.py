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
# # Compose your own method
#
# Every method is a value: a frozen dataclass of its parameters. Values combine, and a combination
# is a method again. This notebook builds some, looks at their caches, and lets them answer a
# question.
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

from kvjax import plot
from kvjax.evaluation import Haystack
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

haystack = Haystack(tokenizer, demo.held_out_text())
case = haystack.case("needle", length=1024, depth=0.4, seed=1)
prompt = case.prompt
number = tokenizer(f" {case.answers[0]}", add_special_tokens=False).input_ids
starts = range(len(prompt) - len(number))
first = next(i for i in starts if prompt[i : i + len(number)] == number)
last = first + len(number) - 1
print(tokenizer.decode(case.question).strip(), case.answers[0])


def show(name, transform, **colours):
    """Draws the caches after the prompt by head and position, and prints their bytes."""
    context = kvjax.read(model, [prompt], transform=transform, max_new=16)
    figure, axes = plt.subplots(figsize=(7.2, 2.4))
    plot.held(axes, context.caches)
    plot.span(axes, first, last, "answer")
    axes.set_title(name, loc="left")
    plot.legend(figure, kept="kept", gone="evicted", **colours)
    plt.show()
    print(f"{name}: {context.nbytes / context.full_nbytes:.1%} of the full cache's bytes")
    return context


# %% [markdown]
# The bundled model has four layers of four KV heads, and reads 1,024 tokens that hide a number and
# ask for it.
#
# ## In a row
#
# `chain` applies methods one after the other: first one that evicts or merges, then the form in
# which slots are stored, then the selection of each step, then the memory that holds them.

# %%
evicted = show("snapkv", kvjax.SnapKV(budget=0.2))
quantised = show("snapkv in 8 bits", kvjax.chain(kvjax.SnapKV(budget=0.2), kvjax.Quantize(bits=8)))

# %% [markdown]
# Both keep the same tokens. The second holds them in 8 bits, and the full cache is float32. With
# `bits=4` the newest 128 tokens stay in full precision, so that it pays only in longer prompts than
# this one.
#
# ## Around a method
#
# `KVCrush` gives a quarter of its base's budget to tokens that stand for what the base evicts. They
# are pinned, and drawn in orange.

# %%
crushed = show("kvcrush(snapkv)", kvjax.KVCrush(kvjax.SnapKV(budget=0.2)), other="pinned")

# %% [markdown]
# `Every` lets a method for prompts compress again while the model writes; `WhenFull` does so when a
# row runs out of slots. Below, a head holds 48 tokens after a prompt of 60 tokens and again after
# every 16 that are written, so that it never needs more than 48 + 16 slots:

# %%
bounded = kvjax.Every(kvjax.SnapKV(budget=48), steps=16)
context = kvjax.read(model, [prompt[:60]], transform=bounded, max_new=65)
after = kvjax.generate(model, None, context=context, max_new_tokens=64, end_tokens=()).context
figure, axes = plt.subplots(figsize=(7.2, 2.2))
plot.held(axes, after.caches)
axes.set_title("every(snapkv), after 64 written tokens", loc="left")
plot.legend(figure, kept="kept", gone="evicted")
plt.show()
print(f"{int(after.length[0])} tokens, {after.caches[0].kv.slots} slots")

# %% [markdown]
# ## By layer and by head
#
# `PerLayer` takes a function of the layer's number and the number of layers. `HeadGroups` gives
# groups of heads different methods, each with storage of its own size.

# %%
by_layer = kvjax.PerLayer(lambda i, n: kvjax.Full() if i < 1 else kvjax.SnapKV(budget=0.1))
full_first = show("the first layer full", by_layer)

# %%
groups = kvjax.HeadGroups(
    (((0, 3), kvjax.SnapKV(budget=0.3)), ((1, 2), kvjax.StreamingLLM(budget=128)))
)
grouped = show("head groups", groups)

# %% [markdown]
# The lines of a layer are in the order of the groups: heads 0 and 3 first, then 1 and 2. Here are
# the bytes of each composition by layer:

# %%
full = kvjax.read(model, [prompt], max_new=16)
named = {
    "full": full, "snapkv": evicted, "snapkv in 8 bits": quantised,
    "the first layer full": full_first, "head groups": grouped,
}  # fmt: skip
figure, axes = plt.subplots(figsize=(7.2, 2.8))
plot.layer_bytes(axes, {name: context.caches for name, context in named.items()})
plt.show()

# %% [markdown]
# ## As text
#
# Methods, `chain` and wrappers are expressions too, for the command line and for files: `kvjax
# generate --method "..."`. The argument `budget` goes to every method that has none of its own.
# `PerLayer` and `HeadGroups` can be made only in Python.

# %%
transform = kvjax.parse("every(kvcrush(snapkv(window=32)), steps=32)", budget=0.2)
print(transform)
print(kvjax.unparse(transform))

# %% [markdown]
# ## Combinations that cannot work raise an error
#
# A method that selects slots cannot come after one that frees slots while decoding. The error comes
# when the combination is made, and not in the middle of a run.

# %%
try:
    kvjax.chain(kvjax.H2O(budget=512), kvjax.Quest(budget=256))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Do they still answer?
#
# The percentage is the share of the full cache's bytes. Methods that select keep everything; their
# budget is the share that a step looks at.

# %%
COMPOSITIONS = [
    "snapkv",
    "chain(snapkv, quantize)",
    "kvcrush(snapkv)",
    "chain(quantize, clusterkv)",
    "chain(snapkv(budget=0.5), quest(dense_layers=()))",
]
for text in COMPOSITIONS:
    result = kvjax.generate(
        model, [prompt], transform=kvjax.parse(text, budget=0.2), max_new_tokens=8
    )
    answer = tokenizer.decode(result.tokens[0]).strip()
    share = result.cache_bytes / result.full_cache_bytes
    print(f"{text:50} {answer:10} {share:6.1%}")
print(f"{'expected':50} {case.answers[0]}")

# %% [markdown]
# One question shows that a combination runs, and says little about how good it is:
# `quality_against_budget.ipynb` shows how to measure that.
