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
# # Quality against budget
#
# How small may a cache be? This notebook asks a model many questions with several methods and
# budgets, with the question inside what is compressed and after it, and draws the shares of right
# answers with their intervals.
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
from kvjax.evaluation import compare
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

# %% [markdown]
# ## Where the question stands
#
# `compare` hides a number in a text, at several depths, asks for it and counts right answers. A
# prompt is read once for all methods. The question is either the end of the prompt that is
# compressed, or it comes after the text has been compressed. The methods rank differently in the
# two cases.
#
# Ten questions per point take a minute or two. More of them make the intervals narrower: `kvjax
# compare --cases 200` can run overnight.

# %%
METHODS, BUDGETS, CASES = ["snapkv", "h2o", "quest"], [0.1, 0.2, 0.4], 10
results = compare(
    model,
    tokenizer,
    demo.held_out_text(),
    methods=METHODS,
    budgets=BUDGETS,
    lengths=[512],
    tasks=["needle"],
    cases=CASES,
)
for row in results.rows():
    name = row.method if row.budget is None else f"{row.method}({row.budget:g})"
    score = row.score
    print(f"question {row.question:6} {name:12} {score.mean:4.0%} right "
          f"({score.low:.0%} to {score.high:.0%}), {row.share:4.0%} of the bytes")  # fmt: skip

# %% [markdown]
# Dots are shares of right answers, and bars their 95 % intervals. These are wide: 10 right answers
# of 10 still mean anything from 72 % up.

# %%
LOOKS = {"snapkv": ("o", "#0072B2"), "h2o": ("s", "#D55E00"), "quest": ("^", "#009E73")}
figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.0), sharey=True)
for axes, question in zip(panels, ("inside", "after")):
    for shift, (method, (marker, colour)) in enumerate(LOOKS.items()):
        rows = [one for one in results.rows() if (one.method, one.question) == (method, question)]
        scores = [one.score for one in rows]
        reach = [[s.mean - s.low for s in scores], [s.high - s.mean for s in scores]]
        at = [one.budget * 1.03 ** (shift - 1) for one in rows]
        axes.errorbar(at, [s.mean for s in scores], reach, marker=marker, color=colour,
                      capsize=2, linewidth=1, label=method)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(BUDGETS, [f"{budget:.0%}" for budget in BUDGETS])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("budget, share of the prompt")
    axes.set_title(f"question {question} what is compressed")
panels[0].set_ylabel("right answers")
panels[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# - With the question inside, SnapKV keeps the tokens that the question attends to.
# - With the question after, SnapKV has mostly evicted the answer before it is asked for. Quest
#   keeps everything and chooses anew in every step, so it does not matter when the question comes.
#   For Quest the budget is what a step looks at, and its bytes are slightly more than the full
#   cache's.
# - H2O keeps what has received much attention so far, which says little about what will be asked
#   for.
#
# ## Two other measures
#
# `perplexity` is the loss of a text that goes through the compressed cache. `attention` is how far
# attention outputs are from the full cache's, layer by layer, while an answer is given. They do not
# ask for one number, and may rank methods differently.

# %%
measures = compare(
    model,
    tokenizer,
    demo.held_out_text(),
    methods=METHODS,
    budgets=[0.2],
    lengths=[512],
    tasks=["perplexity", "attention"],
    cases=5,
)
print(f"{'':8} {'more nats per token':>20} {'error of attention':>20}")
for method in METHODS:
    rows = {one.task: one for one in measures.rows() if one.method == method}
    more, error = rows["perplexity"].difference.mean, rows["attention"].score.mean
    print(f"{method:8} {more:>+20.3f} {error:>20.2f}")

# %% [markdown]
# ## What this says, and what not
#
# This model has one million parameters and was made to retrieve. It shows how well a method keeps
# what a retrieving head needs. For your model and your text, `kvjax compare --model DIR --text
# book.txt` does the same, and `kvjax diagnose --model DIR --prompt-file book.txt --error 0.1` finds
# the smallest cache under an error.
