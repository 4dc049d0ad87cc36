"""Orbax checkpoints of converted parameters: read onto other devices, and damage that is named."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.models import (
    DecoderConfig,
    LayerConfig,
    RopeConfig,
    load_checkpoint,
    random_decoder,
    save_checkpoint,
    save_pretrained,
)
from tests.support.decoders import assert_equal

ROPE = RopeConfig(rotary_dim=8)
TINY = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4, kv_heads=2,
    head_dim=8, rope=ROPE, max_positions=128, eos_token_ids=(3, 4), model_type="qwen3",
    qk_norm="head",
)  # fmt: skip
LONG = RopeConfig(
    rotary_dim=4, type="longrope", original_max_positions=16, factor=4.0,
    short_factors=(1.0, 1.5), long_factors=(2.0, 3.0),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope": LONG, "model_type": None, "eos_token_ids": (), "tie_embeddings": True},
        {"layers": (LayerConfig(None, 9), LayerConfig(LONG)), "embedding_scale": 3.0},
    ],
)
def test_every_configuration_comes_back(tmp_path, changes):
    model = random_decoder(dataclasses.replace(TINY, **changes), seed=3)
    save_checkpoint(model, tmp_path / "saved")
    again = load_checkpoint(tmp_path / "saved")
    assert again.config == model.config and again.config.model_type == model.config.model_type
    assert nnx.split(again)[0] == nnx.split(model)[0], "they do not share compiled code"
    assert_equal(again, model)


def test_dtypes_are_kept(tmp_path):
    model = random_decoder(TINY)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model))
    nnx.update(model, narrow)
    save_checkpoint(model, tmp_path / "saved")
    assert_equal(load_checkpoint(tmp_path / "saved"), model)


def test_a_rule_sees_the_names_of_a_hugging_face_folder(tmp_path):
    asked = {}
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))

    def rule(name, shape):
        asked.setdefault(name, []).append(shape)
        return NamedSharding(mesh, PartitionSpec()) if "mlp" in name else None

    save_checkpoint(random_decoder(TINY), tmp_path / "saved")
    model = load_checkpoint(tmp_path / "saved", rule)
    assert asked["model.layers.1.mlp.up_proj.weight"] == [(32, 48)]
    assert asked["model.embed_tokens.weight"] == [(64, 32)]
    kernel = model.layers[0].mlp.up_proj.kernel.get_value()
    assert kernel.sharding == NamedSharding(mesh, PartitionSpec())
    asked.clear()
    no_type = random_decoder(dataclasses.replace(TINY, embedding_scale=3.0))
    save_checkpoint(no_type, tmp_path / "other")
    load_checkpoint(tmp_path / "other", rule)
    assert asked["layers.1.mlp.up_proj.kernel"] == [(32, 48)]


def test_wrong_shardings_are_refused(tmp_path):
    save_checkpoint(random_decoder(TINY), tmp_path / "saved")
    with pytest.raises(TypeError, match="sharding must be a Sharding, a function or None"):
        load_checkpoint(tmp_path / "saved", "tensor")
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    deep = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    with pytest.raises(ValueError, match=r"tensor \S+ of shape \[.*\] cannot be placed as Named"):
        load_checkpoint(tmp_path / "saved", deep)


# Folders that are something else


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    save_checkpoint(random_decoder(TINY), folder)
    return folder


@pytest.fixture
def saved(tmp_path, original):
    import shutil

    return shutil.copytree(original, tmp_path / "saved")


def refused(folder, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(folder)
    assert len(str(caught.value)) < 600


def test_folders_that_are_no_checkpoints(tmp_path):
    refused(tmp_path / "nowhere", r"nowhere is no checkpoint of a decoder: it has no decoder\.json")
    save_pretrained(random_decoder(TINY), tmp_path / "hugging_face")
    refused(tmp_path / "hugging_face", r"is no checkpoint of a decoder: it has no decoder\.json")


@pytest.mark.parametrize("change", ["truncated", "missing", "unknown", "empty"])
def test_files_that_are_not_as_they_were(saved, change):
    files = [path for path in (saved / "parameters").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    if change == "truncated":
        largest.write_bytes(largest.read_bytes()[:-1])
    elif change == "missing":
        largest.unlink()
    elif change == "unknown":
        (saved / "parameters" / "more").write_bytes(b"x")
    else:
        for path in files:
            path.unlink()
    refused(saved, "is damaged: files are missing, unknown or not of the size that they had")


def test_numbers_that_are_not_as_they_were(saved):
    """A file of the right size that Orbax cannot read."""
    for path in (saved / "parameters").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff" * path.stat().st_size)
    refused(saved, "is damaged: ")


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("name", ["decoder.json", "parameters/pipe"])
def test_only_regular_files_are_read(saved, name):
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)
    refused(saved, "it must be a regular file")


def without(name):
    return lambda about: about.pop(name)


def put(name, value):
    return lambda about: about.update({name: value})


def configured(**changes):
    return lambda about: about["config"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("config"), r"decoder\.json lacks config"),
        (put("files", 3), r"decoder\.json lacks files"),
        (put("format", 2), "has format 2, written by kvjax .* reads format 1"),
        (configured(num_layers=10**9), "is damaged: it has .* parameters, and 1000000000 layers"),
        (configured(num_layers=3), "is damaged: its parameters are not those of its configura"),
        (configured(hidden_size=16), "is damaged: its parameters are not those of its configura"),
        (configured(activation="x\x1b"), "is damaged: activation 'x.*' is not supported"),
        (configured(rope=3), "is damaged: "),
        (configured(more=3), "is damaged: .*more"),
        (configured(layers=[{}]), "is damaged: "),
    ],
)
def test_descriptions_that_are_not_of_the_parameters(saved, change, message):
    about = json.loads((saved / "decoder.json").read_text())
    change(about)
    (saved / "decoder.json").write_text(json.dumps(about))
    refused(saved, message)


def test_parameters_of_another_dtype(saved):
    about = json.loads((saved / "decoder.json").read_text())
    about["parameters"]["norm.scale"][0] = "bfloat16"
    (saved / "decoder.json").write_text(json.dumps(about))
    refused(saved, r"is damaged: norm\.scale is float32, and was bfloat16")


def test_folders_that_are_in_use_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="must be new or empty, but there is something in it"):
        save_checkpoint(random_decoder(TINY), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Several devices

ACROSS = """
import jax, numpy as np, sys
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kvjax.models import (
    from_pretrained, load_checkpoint, save_checkpoint, save_pretrained, loading)

folder = sys.argv[1]
devices = np.array(jax.devices())
assert devices.size == 8
first = Mesh(devices.reshape(2, 4), ("data", "tensor"))
second = Mesh(devices[:6].reshape(3, 2), ("data", "tensor"))

def on(mesh, axis):
    def rule(name, shape):
        if len(shape) == 1 or shape[1] % mesh.shape[axis]:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(None, axis))
    return rule

def leaves(model):
    return {p: x.get_value() for p, x in nnx.to_flat_state(nnx.state(model))}

def same(model, other):
    for (path, a), b in zip(leaves(model).items(), leaves(other).values(), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b)), path

parts = []
aligned = loading._aligned
def watched(shape, dtype):
    parts.append(tuple(shape))
    return aligned(shape, dtype)
loading._aligned = watched

plain = from_pretrained(folder + "/model")
parts.clear()
model = from_pretrained(folder + "/model", sharding=on(first, "tensor"))
same(model, plain)
kernel = model.layers[0].mlp.up_proj.kernel.get_value()
assert kernel.sharding == NamedSharding(first, P(None, "tensor")), kernel.sharding
assert kernel.addressable_shards[0].data.shape == (32, 12)
# Four parts of a quarter each, not one for each device, and never the whole.
# The file has [out, in]: each device's part was read alone.
assert parts.count((12, 32)) == 4 * 2 * 2 and (48, 32) not in parts, parts

save_checkpoint(model, folder + "/checkpoint")
for mesh, axis in ((second, "tensor"), (first, "data"), (second, "data")):
    again = load_checkpoint(folder + "/checkpoint", on(mesh, axis))
    same(again, plain)
    assert leaves(again)[("layers", 1, "attention", "q_proj", "kernel")].sharding == (
        on(mesh, axis)("", (32, 32)))
whole = load_checkpoint(folder + "/checkpoint", NamedSharding(second, P()))
same(whole, plain)
assert {len(x.sharding.device_set) for x in leaves(whole).values()} == {6}
alone = load_checkpoint(folder + "/checkpoint")
same(alone, plain)
assert {x.sharding.device_set == {jax.devices()[0]} for x in leaves(alone).values()} == {True}
save_pretrained(model, folder + "/again", max_shard_bytes=10_000)
same(from_pretrained(folder + "/again"), plain)
print("done")
"""


def test_parameters_move_between_meshes(tmp_path):
    """Loaded, saved and restored on eight devices, divided in several ways."""
    save_pretrained(random_decoder(TINY), tmp_path / "model")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(ACROSS), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
