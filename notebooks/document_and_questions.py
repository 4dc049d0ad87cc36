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
# # A document and many questions
#
# A document is read once, its cache is compressed and saved, and questions come later, all of them
# in one batch. Other methods are good then than where the question is known beforehand: this
# notebook shows why.
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
import tempfile

import matplotlib.pyplot as plt

from kvjax import plot
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

# %% [markdown]
# ## A document
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
text = demo.held_out_text()[20_000:26_000]
paragraphs = text.split("\n\n")
every = len(paragraphs) // len(CODES)
for number, (name, code) in enumerate(CODES.items()):
    place = number * (every + 1) + every // 2
    paragraphs.insert(place, f"The code of the {name} is {code}.")
document = "\n\n".join(paragraphs)
tokens = tokenizer(document).input_ids
questions = [
    tokenizer(f"\n\nQuestion: What is the code of the {name}?\nAnswer: The code of the {name} is",
              add_special_tokens=False).input_ids
    for name in CODES
]  # fmt: skip
print(f"{len(tokens):,} tokens, {len(questions)} questions")

# %% [markdown]
# ## Read once, ask eight times
#
# `kvjax.read` gives a `Context`, which holds the compressed caches. A context of one row takes any
# number of questions, which do not see each other. `max_prompt` counts the tokens of the document
# and a question, `max_new` those of an answer.


# %%
def ask(transform):
    """The context of the document, and which questions are answered right."""
    context = kvjax.read(
        model, [tokens], transform=transform, max_prompt=len(tokens) + 64, max_new=16
    )
    result = kvjax.generate(model, questions, context=context, max_new_tokens=8)
    answers = [answer.strip() for answer in tokenizer.batch_decode(result.tokens)]
    right = [answer.startswith(code) for answer, code in zip(answers, CODES.values(), strict=True)]
    return context, answers, right


context, answers, right = ask(kvjax.ClusterKV(budget=0.1))
for name, answer, good in zip(CODES, answers, right, strict=True):
    print(f"{name:16} {'right' if good else 'wrong'}  {answer}")

# %% [markdown]
# ## Why not a method that evicts?
#
# SnapKV keeps the tokens that the end of the prompt attends to. When the document is compressed
# there is no question yet, and the document's last lines have no reason to attend to the codes. The
# picture shows what SnapKV keeps, with arrows at the eight codes:

# %%
evicted, _, right_snapkv = ask(kvjax.SnapKV(budget=0.1))
figure, axes = plt.subplots(figsize=(7.2, 2.6))
plot.held(axes, evicted.caches)
for arrow, code in enumerate(CODES.values(), 1):
    number = tokenizer(f" {code}", add_special_tokens=False).input_ids
    starts = range(len(tokens) - len(number))
    first = next(i for i in starts if tokens[i : i + len(number)] == number)
    plot.span(axes, first, first + len(number) - 1, f"{arrow}")
plot.legend(figure, kept="kept", gone="evicted")
plt.show()
print(f"{sum(right_snapkv)} of {len(right_snapkv)} right")

# %% [markdown]
# Now several methods answer the same questions. The percentage is the size of the document's cache.
# ClusterKV and Quest keep every token and an index: a step reads less, but no bytes are saved.

# %%
METHODS = ["full", "snapkv", "h2o", "clusterkv", "quest", "chain(quantize, clusterkv)"]
found = {}
for name in METHODS:
    kept, _, right = ask(kvjax.parse(name, budget=0.1))
    found[name] = sum(right)
    share = kept.nbytes / kept.full_nbytes
    print(f"{name:28} {sum(right)} of {len(right)} right, {share:6.1%} of the full cache's bytes")

# %%
figure, axes = plt.subplots(figsize=(7.2, 2.2))
bars = axes.barh(list(found), list(found.values()), color="#1f3b73")
axes.bar_label(bars, padding=3)
axes.invert_yaxis()
axes.set_xlim(0, len(CODES) + 0.5)
axes.set_xlabel(f"right answers of {len(CODES)}, asked after the document was compressed")
plt.show()

# %% [markdown]
# Eight questions on a model of one million parameters show the direction, and no more. Where the
# question can be put into the prompt, SnapKV does well: see the quickstart.
#
# ## Saving what was read
#
# The folder holds the caches, the method as an expression, and fingerprints of the model.
# `kvjax.load_context` first compares the checksums of all files, and runs no code from the folder.

# %%
with tempfile.TemporaryDirectory() as folder:
    kvjax.save_context(folder + "/document", context, model=model)
    again = kvjax.load_context(folder + "/document", model)
print(kvjax.unparse(again.transform), f"{again.nbytes / 1e6:.1f} MB")
same = kvjax.generate(model, questions, context=again, max_new_tokens=8)
repeated = [answer.strip() for answer in tokenizer.batch_decode(same.tokens)] == answers
print("the same answers:", repeated)

# %% [markdown]
# On the command line: `kvjax read book.txt --out book --model DIR --method clusterkv --budget 0.1`,
# then `kvjax ask book "Who tells the story?" "What is the ship's name?"`.
