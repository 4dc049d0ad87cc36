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
# # One document, a twentieth of the cache
#
# A document is read once, and its questions come later. Which tokens will they need? KVzip lets the
# model repeat the document, and keeps the tokens that the repetition looks up. Most heads look up
# next to nothing, so a profile of the model shares the budget among the heads.
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
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

# %% [markdown]
# ## A document and its questions
#
# The document is some pages of Python's documentation, with eight invented sentences in between.
# The bundled model was trained to find such sentences in a text of this kind.

# %%
CODES = {
    "amber falcon": "482130",
    "orange lobster": "719042",
    "silver anchor": "305618",
    "quiet harbour": "964271",
    "wooden compass": "158393",
    "frozen lantern": "840526",
    "velvet beetle": "237764",
    "copper violin": "691805",
}
held_out = demo.held_out_text()
paragraphs = held_out[20_000:26_000].split("\n\n")
every = len(paragraphs) // len(CODES)
for number, (name, code) in enumerate(CODES.items()):
    place = number * (every + 1) + every // 2
    paragraphs.insert(place, f"The code of the {name} is {code}.")
document = tokenizer("\n\n".join(paragraphs)).input_ids
questions = [
    tokenizer(f"\n\nQuestion: What is the code of the {name}?\nAnswer: The code of the {name} is",
              add_special_tokens=False).input_ids
    for name in CODES
]  # fmt: skip
print(f"{len(document):,} tokens, {len(questions)} questions")

# %% [markdown]
# ## What each head looks up
#
# `kvjax.calibrated` lets the model repeat a text, scores its tokens in all heads, and notes the
# share of its tokens that each head keeps at any budget. The picture shows the profiles of two
# texts together: pages of documentation, and docstrings. The shares depend on the model and hardly
# on the text, so the profile is made once, from any text.

# %%
texts = {
    "documentation": tokenizer(demo.document().text).input_ids[:1024],
    "docstrings": tokenizer(held_out).input_ids[-1024:],
}
by_head = kvjax.ByHead(kvjax.KVzip(0.05))
profiles = {
    name: kvjax.calibrated(by_head, model, [text], document=tokenizer).profile
    for name, text in texts.items()
}
figure, axes = plt.subplots(figsize=(7.2, 2.8), layout="constrained")
plot.head_shares(axes, profiles, budget=0.05)
plt.show()

# %% [markdown]
# In this model one layer of four looks things up. At a twentieth of all tokens, its four heads keep
# about a sixth of theirs, and the heads of the other layers next to nothing. With a twentieth in
# each head, this layer would lose more than two thirds of the tokens that it keeps here.
#
# ## Four caches, eight questions
#
# `kvjax.read` reads the document and its repetition, layer by layer; the tokenizer gives it words
# to ask for that ("Repeat the previous context exactly."). The questions come afterwards, all of
# them in one batch. `ByHead` stores the heads of a layer in rectangles of unequal length, so that
# bytes are really saved. `room` is the number of slots for a question and its answer.

# %%
kvzip = kvjax.KVzip(budget=0.05, room=64)
METHODS = {
    "full": kvjax.Full(),
    "snapkv": kvjax.SnapKV(budget=0.05),
    "kvzip": kvzip,
    "by_head(kvzip)": kvjax.ByHead(kvzip, profiles["docstrings"]),
}
answers, contexts = {}, {}
for name, transform in METHODS.items():
    contexts[name] = kvjax.read(
        model, [document], transform=transform, max_prompt=len(document) + 64, max_new=16,
        document=tokenizer,
    )  # fmt: skip
    result = kvjax.generate(model, questions, context=contexts[name], max_new_tokens=8)
    answers[name] = [answer.split("\n")[0] for answer in tokenizer.batch_decode(result.tokens)]

print(f"{'':16}" + "".join(f"{name:>16}" for name in METHODS))
for number, (asked, code) in enumerate(CODES.items()):
    said = [answers[name][number].strip()[:14] for name in METHODS]
    print(f"{asked:16}" + "".join(f"{answer:>16}" for answer in said) + f"    {code}")
right = {
    name: sum(
        answer.strip().startswith(code) for answer, code in zip(said, CODES.values(), strict=True)
    )
    for name, said in answers.items()
}
print(f"{'right':16}" + "".join(f"{right[name]:>11} of 8" for name in METHODS))
print(f"{'bytes':16}" + "".join(f"{x.nbytes / 1e6:>13.2f} MB" for x in contexts.values()))

# %% [markdown]
# The last column is the right answer. Each cache has room for a question and an answer. This room
# is as large in the small caches, and counts in their bytes.
#
# SnapKV keeps what the document's last lines look at. They do not ask for anything, and no answer
# is right. With what the repetition looks up, KVzip gives five of eight right answers, and the full
# cache seven. Sharing the budget by the profile gives more tokens to the layer that looks things
# up, but no more right answers: eight questions on a model of one million parameters tell KVzip
# from SnapKV, but not two ways of sharing a budget from each other. On SmolLM2 sharing makes the
# difference: see `docs/results/documents.md`.
#
# ## Where the tokens are
#
# The picture shows what each head holds, with KVzip alone and with the budget shared. Heads of the
# layer that looks things up hold the codes, at which the arrows point.

# %%
figure, panels = plt.subplots(2, 1, figsize=(7.2, 4.6), sharex=True, layout="constrained")
for axes, name in zip(panels, ("kvzip", "by_head(kvzip)"), strict=True):
    plot.held(axes, contexts[name].caches)
    axes.set_title(name, loc="left", pad=16)
    for arrow, code in enumerate(CODES.values(), 1):
        number = tokenizer(f" {code}", add_special_tokens=False).input_ids
        starts = range(len(document) - len(number))
        first = next(i for i in starts if document[i : i + len(number)] == number)
        plot.span(axes, first, first + len(number) - 1, f"{arrow}")
plot.legend(figure, kept="kept", gone="evicted")
plt.show()

# %% [markdown]
# This suits single facts such as needles; answers about prose need every token, which is the
# default of `kvjax read`. On the command line, the profile is made at the first use and kept for
# the next time:
#
# `kvjax read book.txt --out book --model DIR --method "by_head(kvzip)" --budget 0.05`, then
# `kvjax ask book "Who tells the story?"`.
