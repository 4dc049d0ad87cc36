"""The examples run, on one device and divided among four; steps agree with longer prompts."""

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

from tests.support.marks import some_slow

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
            sys.modules[name] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
            made[name] = module, module.main()
        return made[name]

    return load


WEIGHTS = {
    "nnx_decoder": lambda module: module.Decoder(nnx.Rngs(0)),
    "linen_decoder": lambda module: module.random_parameters(),
    "foreign_attention": lambda module: module.random_weights(),
}


@pytest.mark.parametrize("name", some_slow(NAMES, "nnx_decoder"))
def test_steps_write_what_a_longer_prompt_is_followed_by(example, monkeypatch, name):
    """The prompt and all but the last token, read at once, give the last token."""
    module, texts = example(name)
    text = np.array(texts["full"])
    lengths = getattr(module, "LENGTHS", [module.PROMPT] * len(text))
    shape = len(text), module.PROMPT
    prompts = np.asarray(jax.random.randint(jax.random.key(1), shape, 0, module.VOCABULARY))
    longer = np.pad(prompts, ((0, 0), (0, module.NEW - 1)))
    for row, length in enumerate(lengths):
        longer[row, length : length + module.NEW - 1] = text[row, :-1]
    monkeypatch.setattr(module, "PROMPT", longer.shape[1])
    lengths = [length + module.NEW - 1 for length in lengths]
    monkeypatch.setattr(module, "LENGTHS", lengths, raising=False)
    again = module.generate(WEIGHTS[name](module), jnp.asarray(longer), module.METHODS["full"])
    np.testing.assert_array_equal(again[:, 0], text[:, -1])


@pytest.mark.parametrize("name", NAMES)
def test_methods_write_texts_of_their_own(example, name):
    module, texts = example(name)
    assert len(texts) == 3 and len({str(text) for text in texts.values()}) == 3
    for text in texts.values():
        assert all(len(row) == module.NEW for row in text)


ACROSS = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
import importlib

mesh = jax.make_mesh((2, 2), ("data", "tensor"))
assert len(jax.devices()) == 4
for name in sys.argv[2:]:
    example = importlib.import_module(name)
    expected = example.main()
    assert example.main(mesh) == expected, example.__name__
    with jax.set_mesh(mesh):
        assert example.main(mesh) == expected, example.__name__
import linen_decoder
kernel = linen_decoder.random_parameters(mesh)["params"]["attention_0"]["q"]["kernel"]
assert kernel.addressable_shards[0].data.shape == (64, 32), kernel.sharding
"""


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(("linen_decoder",), id="linen", marks=pytest.mark.exhaustive),
        pytest.param(
            ("nnx_decoder", "foreign_attention"), id="others", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_texts_are_equal_on_four_devices(examples):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", ACROSS, str(FOLDER), *examples],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
