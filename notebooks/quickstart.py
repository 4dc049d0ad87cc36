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
# # Quickstart: a tenth of the cache, the same answer
#
# A language model keeps a key and a value of every token that it has read. This notebook makes that
# cache smaller while a model answers a question, and looks at what was kept.
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
from kvjax.evaluation import is_right
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

# %% [markdown]
# A small trained model comes with the package: one million parameters, four layers with four KV
# heads each. It can find what a long text says once, and copy it out. It is a measuring instrument,
# not a model to talk to.
#
# Its document hides one number, and ends with the question for it:

# %%
document = demo.document()
prompt = tokenizer(document.text + document.question).input_ids
print(f"{len(prompt):,} tokens, which end with: {document.question.strip()} ...")

# %% [markdown]
# ## With the full cache, and with a tenth of it
#
# `kvjax.generate` reads prompts and continues them. Without a `transform` it keeps everything.
# `SnapKV(budget=0.1)` keeps a tenth of the prompt in every head: the tokens that the end of the
# prompt, here the question, looks at.

# %%
full = kvjax.generate(model, [prompt], max_new_tokens=8)
small = kvjax.generate(model, [prompt], transform=kvjax.SnapKV(budget=0.1), max_new_tokens=8)

print(f"expected {document.answer}")
for name, result in {"full": full, "snapkv": small}.items():
    print(
        f"{name:8} {tokenizer.decode(result.tokens[0]):12} {result.cache_bytes / 1e6:5.1f} MB, "
        f"{1e3 * result.ttft_s:5.0f} ms to the first token, {1e3 * result.tpot_s:.1f} ms per token"
    )

# %% [markdown]
# Times exclude compilation, which `result.compile_s` has. A second call of the same kind compiles
# nothing. On a shared machine they vary from run to run.
#
# ## What was kept
#
# `kvjax.read` reads a prompt and gives the compressed caches, which `kvjax.plot` draws. Each line
# is one KV head of one layer, each column a position of the text. Dark positions are still in the
# cache. The arrow points at the number, and the right panel is what stands around it.

# %%
number = tokenizer(f" {document.answer}", add_special_tokens=False).input_ids
starts = range(len(prompt) - len(number))
first = next(i for i in starts if prompt[i : i + len(number)] == number)

context = kvjax.read(model, [prompt], transform=kvjax.SnapKV(budget=0.1), max_new=16)
last = first + len(number) - 1
figure, panels = plt.subplots(1, 2, figsize=(7.2, 2.8), width_ratios=(3, 1), sharey=True)
for axes in panels:
    image = plot.held(axes, context.caches)
    plot.span(axes, first, last, "answer")
panels[1].set_xlim(first - 30, last + 30)
panels[1].set_ylabel("")
plot.legend(figure, kept="kept", gone="evicted")
plt.show()
whole = image.get_array()[:, first : last + 1].all(1).reshape(model.num_layers, -1)
print("heads that keep the whole number, by layer:", whole.sum(1).tolist())

# %% [markdown]
# Heads keep different places, but all keep the end of the prompt. Those that keep the number can
# copy it into the answer.
#
# ## Other methods
#
# Every method has a name, and names combine as text. The argument `budget` goes to every method
# that has none of its own.

# %%
METHODS = [
    "full",
    "snapkv",
    "streaming_llm",
    "h2o",
    "chelsea",
    "clusterkv",
    "chain(snapkv, quantize(bits=8))",
]
for name in METHODS:
    transform = kvjax.parse(name, budget=0.1)
    result = kvjax.generate(model, [prompt], transform=transform, max_new_tokens=8)
    answer = tokenizer.decode(result.tokens[0]).strip()
    right = "right" if is_right(answer, document.answer) else "wrong"
    share = result.cache_bytes / result.full_cache_bytes
    print(f"{name:32} {right}  {answer[:12]:12} {share:6.1%} of the full cache")

# %% [markdown]
# This one question shows the following:
#
# - `snapkv` compresses the document with the question, and keeps what the question looks at.
# - `streaming_llm` keeps the first tokens and the newest ones. The number stands in between.
# - `h2o` keeps the newest tokens and those that received the most attention, added up over the
#   whole prompt, of which the question is a small part.
# - `chelsea` merges tokens with similar keys. The mean of several tokens no longer shows the
#   digits.
# - `clusterkv` keeps everything, and an index besides. A step reads less, but no bytes are saved.
#
# One question on one small model does not rank methods: `quality_against_budget.ipynb` asks more.
#
# ## With your checkpoint
#
# `from_pretrained` and `load_tokenizer` take a folder of a Hugging Face model, a hub id or a GGUF
# file. Everything else stays as it is above. `kvjax.stream` takes the arguments of `generate` and
# gives tokens as they come:

# %%
steps = kvjax.stream(model, [prompt], transform=kvjax.SnapKV(budget=0.1), max_new_tokens=8)
for new in steps:
    print(tokenizer.decode(new[0]), end="", flush=True)
print(f"\n{steps.result.cache_bytes / 1e6:.1f} MB")
