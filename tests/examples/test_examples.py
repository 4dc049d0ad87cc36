"""The examples run, on one device and divided among four, and write what a plain pass says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = ("nnx_decoder", "linen_decoder", "foreign_attention")
pytestmark = pytest.mark.lenient  # users have JAX's own promotion


@pytest.fixture(scope="module")
def example():
    """`example(name)`: an example as a module, and what its `main` gives."""
    made = {}

    def load(name: str):
        if name not in made:
            spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            made[name] = module, module.main()
        return made[name]

    return load


def normed(x, scale=1.0):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attended(q, k, v, cap=None):
    """Causal attention of one row, `[heads, tokens, channels]`, without a cache."""
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    logits = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def turned(x):
    """Rotary embedding of halves, `[heads, tokens, channels]`."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] / 1000.0 ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def turned_neighbours(x):
    """Rotary embedding of neighbouring channels."""
    order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
    return turned(x[..., order])[..., np.argsort(order)]


def split(x, heads: int):
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def gelu(x):
    return np.asarray(jax.nn.gelu(jnp.asarray(x, jnp.float32)), np.float64)


def block(x, weights, biases, scales):
    """A block of the two decoders."""
    y = normed(x, scales["attention"])
    q, k, v = (split(y @ weights[name], heads) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    out = attended(turned(q), turned(k), v).swapaxes(0, 1).reshape(len(x), -1)
    x = x + out @ weights["out"]
    y = normed(x, scales["mlp"])
    return x + gelu(y @ weights["up"] + biases["up"]) @ weights["down"] + biases["down"]


def nnx_logits(module, tokens):
    model = module.Decoder(nnx.Rngs(0))

    def array(variable):
        return np.asarray(variable.get_value(), np.float64)

    table = array(model.embed.embedding)
    x = table[tokens]
    for layer in model.blocks:
        own = {**vars(layer.attention), "up": layer.up, "down": layer.down}
        weights = {name: array(own[name].kernel) for name in ("q", "k", "v", "out", "up", "down")}
        biases = {name: array(own[name].bias) for name in ("up", "down")}
        norms = {"attention": array(layer.attention_norm.scale), "mlp": array(layer.mlp_norm.scale)}
        x = block(x, weights, biases, norms)
    return normed(x, array(model.norm.scale)) @ table.T


def linen_logits(module, tokens):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), module.random_parameters()["params"])
    table = params["embed"]["embedding"]
    x = table[tokens]
    for i in range(module.LAYERS):
        weights = {
            name: params[f"attention_{i}"][name]["kernel"] for name in ("q", "k", "v", "out")
        }
        mlp = {name: params[f"{name}_{i}"] for name in ("up", "down")}
        weights |= {name: mlp[name]["kernel"] for name in mlp}
        norms = {name: params[f"{name}_norm_{i}"]["scale"] for name in ("attention", "mlp")}
        x = block(x, weights, {name: mlp[name]["bias"] for name in mlp}, norms)
    return normed(x, params["norm"]["scale"]) @ table.T


def foreign_logits(module, tokens):
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), module.random_weights())
    x = weights["embed"][tokens]
    for layer in weights["layers"]:
        y = normed(x)
        q, k, v = (np.einsum("tc,chd->htd", y, layer[name]) for name in "qkv")
        out = attended(turned_neighbours(q), turned_neighbours(k), v, module.CAP)
        x = x + np.einsum("htd,hdc->tc", out, layer["out"])
    return x @ weights["embed"].T


LOGITS = {"nnx_decoder": nnx_logits, "linen_decoder": linen_logits,
          "foreign_attention": foreign_logits}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_with_everything_kept_the_text_is_that_of_a_pass_without_a_cache(example, name):
    module, texts = example(name)
    rows = len(texts["full"])
    prompts = jax.random.randint(jax.random.key(1), (rows, module.PROMPT), 0, module.VOCABULARY)
    lengths = getattr(module, "LENGTHS", [module.PROMPT] * rows)
    for row, length in enumerate(lengths):
        prompt = np.asarray(prompts)[row, :length]
        logits = LOGITS[name](module, np.concatenate([prompt, texts["full"][row]]))
        assert logits[length - 1 : -1].argmax(-1).tolist() == texts["full"][row]


@pytest.mark.parametrize("name", NAMES)
def test_methods_write_texts_of_their_own(example, name):
    module, texts = example(name)
    assert len(texts) == 3 and len({str(text) for text in texts.values()}) == 3
    for text in texts.values():
        assert all(len(row) == module.NEW for row in text)


@pytest.mark.parametrize("name", (*NAMES, "beam_search"))
def test_examples_are_short(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 160 and f"python examples/{name}.py" in text


ACROSS = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
import foreign_attention, linen_decoder, nnx_decoder

mesh = jax.make_mesh((2, 2), ("data", "tensor"))
assert len(jax.devices()) == 4
for example in (nnx_decoder, linen_decoder, foreign_attention):
    expected = example.main()
    assert example.main(mesh) == expected, example.__name__
    with jax.set_mesh(mesh):
        assert example.main(mesh) == expected, example.__name__
kernel = linen_decoder.random_parameters(mesh)["params"]["attention_0"]["q"]["kernel"]
assert kernel.addressable_shards[0].data.shape == (64, 32), kernel.sharding
"""


@pytest.mark.slow
def test_texts_are_equal_on_four_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", ACROSS, str(FOLDER)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
