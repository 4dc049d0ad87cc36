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
# not fit here, and measures times on this machine beside what the machine can do at best.
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

from kvjax import plot
from kvjax.evaluation import measure_speed
from kvjax.models import demo, from_pretrained, load_tokenizer

plt.rcParams.update(plot.LOOK)
model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())

# %% [markdown]
# ## Bytes of a large model, without it
#
# A cache is arrays of known shapes, so `jax.eval_shape` prices it before it is made. Here are the
# caches of Llama-3.1-8B (32 layers of 8 KV heads with 128 channels, bfloat16) for one row and 512
# new tokens, by the length of the prompt. Bytes are those of all arrays, positions and indices
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
# A share of the prompt makes a line that is parallel to the full cache's, a number of slots a flat
# one. `kvjax plan` does this for a model's configuration and a mesh of devices, and says how many
# requests fit.
#
# ## Bytes by layer, measured
#
# The same for caches that exist: the bundled model after 2,048 tokens. `PyramidKV` and
# `SpindleKV`'s eviction give layers different budgets.

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
# ClusterKV lies above the full cache where it works: it keeps everything, and centroids.
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
    prompt_tokens=4096,
    new_tokens=32,
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
# The more of a step is the reading of the cache, the more a smaller cache saves: at four rows more
# than at one. What compression costs is in the time to the first token.
#
# These are times of this machine, now, and of a model that fits into a processor's cache. `kvjax
# bench --model DIR --method snapkv,clusterkv` measures your model, and nothing here says how a GPU
# would do.
