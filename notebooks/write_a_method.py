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
# # Write a method
#
# A method decides what to keep; kvjax does the rest: it stores and moves slots, and attends to
# them. This notebook writes one in twenty lines, lets the library check it, looks at what it keeps,
# and compares it with SnapKV.
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
from kvjax.evaluation import Haystack, is_right
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

haystack = Haystack(tokenizer, demo.held_out_text())
case = haystack.case("needle", length=512, depth=0.4, seed=1)
prompt = case.prompt

# %% [markdown]
# ## The idea
#
# Devoto et al. (arXiv 2406.11430) found that keys with a small norm tend to receive much attention.
# Is that so here? Each dot is a token of a layer's first head: the norm of its key, and the
# attention that it has received from all tokens of the prompt, which H2O sums in a column of its
# cache. Above a panel is the correlation of the norm with the logarithm of that sum.

# %%
context = kvjax.read(model, [prompt], transform=kvjax.H2O(budget=1.0), max_new=16)
figure, panels = plt.subplots(1, 4, figsize=(7.2, 2.2), sharey=True)
for layer, axes in enumerate(panels):
    kv = context.caches[layer].kv
    live = np.asarray(kv.live[0, 0])
    norm = np.linalg.norm(np.asarray(kv.k.read()[0, 0])[live], axis=-1)
    received = np.asarray(kv.column("attention")[0, 0]).mean(-1)[live]
    axes.scatter(norm, received, s=3, color="#1f3b73")
    axes.set_yscale("log")
    correlation = np.corrcoef(norm, np.log(received + 1e-6))[0, 1]
    axes.set_title(f"layer {layer}: r = {correlation:+.2f}")
    axes.set_xlabel("norm of the key")
panels[0].set_ylabel("attention received, summed")
plt.show()

# %% [markdown]
# The idea asks for a clearly negative correlation, and these heads of a model with one million
# parameters show none: the paper looked at large models. We write the method all the same, and the
# end of this notebook measures it.
#
# ## The method
#
# The method is a frozen dataclass whose fields are its parameters. `PromptBudget` promises how many
# slots remain of a prompt, so that arrays can be made before anything runs. `on_prompt` looks at
# the keys when a prompt is complete, and returns a decision: `Keep` so many, the best by a score.

# %%
from dataclasses import dataclass

import jax.numpy as jnp

from kvjax.kit import Budget, Keep, PromptBudget, check_budget, check_count


@dataclass(frozen=True)
class SmallKeys(PromptBudget):
    """Keeps the tokens of a prompt whose keys have the smallest norm, and the newest ones."""

    budget: Budget
    window: int = 8

    minimum = property(lambda self: self.window + 1)

    def __post_init__(self):
        check_count("window", self.window, 1)
        check_budget(self.budget, self.minimum, "window + 1")

    def on_prompt(self, cache, state, step):
        budget = self.rows_budget(cache, state)
        norm = jnp.linalg.norm(step.keys.astype(jnp.float32), axis=-1)
        return Keep(budget, -norm, newest=self.window), state


# %% [markdown]
# A budget may be a number of slots or a share of each row's prompt: `self.rows_budget` gives every
# row its own.
#
# ## The check
#
# `kvjax.testing.check` runs small prompts and decode steps through a method, with rows of different
# lengths, in chunks, inside `jit`, and says in one line what is broken. Combinations are methods
# too. Both of these pass, so nothing is printed.

# %%
kvjax.testing.check(SmallKeys(budget=12))
kvjax.testing.check(kvjax.chain(SmallKeys(budget=12), kvjax.Quantize(8)))

# %% [markdown]
# The next method breaks its promise:


# %%
@dataclass(frozen=True)
class Greedy(SmallKeys):
    """Promises half of what it keeps."""

    def extent(self, extent):
        return extent.keep(self.budget // 2)


try:
    kvjax.testing.check(Greedy(budget=12))
except kvjax.testing.ConformanceError as error:
    print(error)

# %% [markdown]
# ## What it keeps

# %%
number = tokenizer(f" {case.answers[0]}", add_special_tokens=False).input_ids
starts = range(len(prompt) - len(number))
first = next(i for i in starts if prompt[i : i + len(number)] == number)
methods = {"small keys": SmallKeys(budget=0.2), "snapkv": kvjax.SnapKV(budget=0.2)}
figure, panels = plt.subplots(2, figsize=(7.2, 4.4), sharex=True)
for axes, (name, transform) in zip(panels, methods.items()):
    context = kvjax.read(model, [prompt], transform=transform, max_new=16)
    plot.held(axes, context.caches)
    plot.span(axes, first, first + len(number) - 1, "answer")
    axes.set_title(name, loc="left")
    axes.label_outer()
plot.legend(figure, kept="kept", gone="evicted")
plt.show()

# %% [markdown]
# SnapKV keeps what the end of the prompt, here the question, looks at, and many of its heads keep
# the answer. The norm of a key does not depend on the question.

# %% [markdown]
# ## A name, and a comparison
#
# A registered name works in `kvjax.parse`, in compositions and on the command line (`kvjax compare
# --import my_methods.py --method small_keys,snapkv`).

# %%
kvjax.register("small_keys", SmallKeys)
depths = (0, 0.25, 0.5, 0.75, 1)
cases = [haystack.case("needle", length=512, depth=depth, seed=0) for depth in depths]
prompts = [case.prompt for case in cases]
for name in ("full", "small_keys", "snapkv", "every(small_keys, steps=16)"):
    transform = kvjax.parse(name, budget=0.2)
    result = kvjax.generate(model, prompts, transform=transform, max_new_tokens=8)
    answers = tokenizer.batch_decode(result.tokens)
    right = sum(is_right(text, case.answers[0]) for text, case in zip(answers, cases))
    print(f"{name:28} {right} of {len(cases)} right")

# %% [markdown]
# Five questions tell a method that works from one that loses what is asked for, but not two good
# methods from each other. `Every` compresses again while the model writes; it cannot bring back
# what is gone. The page *Writing a method* (`docs/writing-a-method.md`) builds methods that evict
# while decoding and that merge, and names every member of the protocol.
