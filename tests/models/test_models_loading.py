"""Checkpoints: every layout that is read, and every damage that is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
import weakref
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from kvjax.models import checkpoints, demo, from_pretrained, load_tokenizer, loading, read_config
from kvjax.models.safetensors_files import open_tensors
from kvjax.models.tensor_names import TensorNames, Weight
from tests.support.decoders import assert_equal, parameters
from tests.support.hf_models import Stepper, reference_logits, save_reference
from tests.support.tensor_changes import put, remove

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of an untied and of a tied model, and their references."""
    folders = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        folders[tied] = folder, save_reference(folder, tie_word_embeddings=tied)
    return folders


@pytest.fixture
def checkpoint(tmp_path, saved):
    """`checkpoint(change, tied=False)`: a copy whose dictionary of tensors `change` may edit."""

    def copy(change=None, tied=False):
        source = saved[tied][0]
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        if change is not None:
            change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return copy


def test_one_file_and_shards_hold_the_same_model(tmp_path, saved):
    folder, reference = saved[False]
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_equal(from_pretrained(tmp_path), from_pretrained(str(folder)))


def test_a_tied_table_may_have_either_name_or_both(checkpoint, saved):
    expected = from_pretrained(saved[True][0])
    assert ("lm_head", "kernel") not in parameters(expected)

    def only_head(tensors):
        tensors[HEAD] = tensors.pop(TABLE)

    def both(tensors):
        tensors[HEAD] = tensors[TABLE].copy()

    def different(tensors):
        tensors[HEAD] = tensors[TABLE] + 1

    assert_equal(from_pretrained(checkpoint(only_head, tied=True)), expected)
    assert_equal(from_pretrained(checkpoint(both, tied=True)), expected)
    with pytest.raises(ValueError, match=f"1 tensors are missing: {TABLE} or {HEAD}"):
        from_pretrained(checkpoint(remove(TABLE), tied=True))
    with pytest.raises(ValueError, match=f"{HEAD} and {TABLE} differ"):
        from_pretrained(checkpoint(different, tied=True))


def test_buffers_of_old_checkpoints_are_ignored(checkpoint, saved):
    def old(tensors):
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
            tensors[name] = np.ones(4, np.float32)

    assert_equal(from_pretrained(checkpoint(old)), from_pretrained(saved[False][0]))


def renamed(before, head=None):
    """Names of the base model's tensors begin with `before`, and the head may have another."""

    def change(tensors):
        for name in list(tensors):
            base = name.startswith("model.")
            new = before + name.removeprefix("model.") if base else head or name
            tensors[new] = tensors.pop(name)

    return change


def one_more(name):
    def change(tensors):
        renamed("language_model.model.")(tensors)
        tensors[name] = np.ones((97, 32), np.float32)

    return change


def unlike(tensors):
    for name in list(tensors):
        tensors[f"h.{name.replace('.', '_')}"] = tensors.pop(name)


BIAS, BEYOND = "model.layers.0.mlp.up_proj.bias", "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(UP), "1 tensors are missing: " + UP),
        (put("model.extra.weight", np.ones(3, np.float32)), "model.extra.weight .*unknown"),
        (put(BIAS, np.ones(48, np.float32)), f"{BIAS} .*unknown"),
        (
            put(BEYOND, np.ones((48, 32), np.float32)),
            f"num_hidden_layers is 2, but .* 3 layers: {BEYOND} .*unknown",
        ),
        (put(UP, np.ones((32, 48), np.float32)), rf"{UP} .*shape \[32, 48\], expected \[48, 32\]"),
        (put(UP, np.ones((48, 32), np.int8)), UP + " .*has type I8, expected one of F64"),
        (one_more("vision_tower.weight"), r"tensor vision_tower\.weight of .* is unknown"),
        (one_more("model.norm.weight"), r"tensor model\.norm\.weight of .* is unknown"),
        # Two tables: which one is meant is not known.
        (one_more("encoder.embed_tokens.weight"), r"named model\.layers\.0\..*but .* has encoder"),
        (unlike, r"config\.json: layers of this model type have tensors named model\.layers\.0\."),
        (lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers" in n], "but the check"),
    ],
)
def test_every_tensor_is_accounted_for(checkpoint, change, message):
    with pytest.raises(ValueError, match=message):
        from_pretrained(checkpoint(change))


@pytest.mark.parametrize(
    ("before", "head", "tied"),
    [
        ("", None, False),  # a decoder that was saved without its head
        ("", None, True),
        ("language_model.model.", "language_model.lm_head.weight", False),
        ("model.language_model.", None, True),
        ("_orig_mod.model.", "_orig_mod.lm_head.weight", True),
        ("module._orig_mod.model.", "module._orig_mod.lm_head.weight", False),
    ],
)
def test_names_may_begin_with_other_words(checkpoint, saved, before, head, tied):
    folder = checkpoint(renamed(before, head), tied=tied)
    assert_equal(from_pretrained(folder), from_pretrained(saved[tied][0]))
    assert read_config(folder) == read_config(saved[tied][0])


def edit(path, **more):
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def indexed(folder, **more):
    """Names the one file in an index, which says where each tensor is."""
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-1.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**names, **more}}))
    return index


def test_names_and_layers_of_shards(checkpoint, saved):
    folder = checkpoint(renamed("", None))
    indexed(folder)
    assert_equal(from_pretrained(folder), from_pretrained(saved[False][0]))
    assert read_config(folder) == read_config(saved[False][0])
    edit(folder / "config.json", num_hidden_layers=5_000)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 5000, but .* of 2 layers"):
        read_config(folder)


@pytest.mark.parametrize("layers", [1, 3, 10**9, 10**400])
def test_as_many_layers_as_the_file_says(checkpoint, layers):
    path = checkpoint() / "config.json"
    edit(path, num_hidden_layers=layers)
    for read in (read_config, from_pretrained):
        with pytest.raises(ValueError, match=r"num_hidden_layers .*(of 2 layers|10000)") as caught:
            read(path.parent)
        assert str(caught.value).startswith(f"{path}: num_hidden_layers")


# What is not a plain model


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised with GPTQ"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "quantised with FP8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "with compressed-tens"),
        ({"quantization_config": {"_load_in_4bit": True}}, "quantised with bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "with a method that is not named"),
        ({"quantization_config": {}}, "with a method that is not named"),
        ({"quantization_config": True}, "with a method that is not named"),
        ({"compression_config": {"format": "int-quantized"}}, "with compressed-tensors"),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, "quantised with MLX"),
    ],
)
def test_a_configuration_of_quantised_weights(checkpoint, more, message):
    path = checkpoint() / "config.json"
    edit(path, **more)
    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(path.parent)
    assert str(caught.value).startswith(f"{path}: {next(iter(more))} (")


def test_a_file_beside_quantised_weights(checkpoint):
    folder = checkpoint()
    (folder / "quant_config.json").write_text('{"bits": 4, "group_size": 128}')
    with pytest.raises(ValueError, match=r"quant_config\.json: the weights are quantised with AWQ"):
        read_config(folder)


@pytest.mark.parametrize(
    ("endings", "method"),
    [
        (("qweight", "qzeros", "scales"), "GPTQ or AWQ"),
        (("weight", "scales", "biases"), "MLX"),
        (("weight", "weight_scale_inv"), "FP8"),
        (("weight_packed", "weight_scale", "weight_shape"), "compressed-tensors"),
        (("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"), "bitsandbytes"),
    ],
)
def test_tensors_of_quantised_weights(checkpoint, endings, method):
    def change(tensors):
        for name in [name for name in tensors if "proj" in name]:
            del tensors[name]
            for ending in endings:
                tensors[f"{name.removesuffix('weight')}{ending}"] = np.ones((4, 4), np.uint8)

    with pytest.raises(ValueError, match=rf"are quantised with {method} \(tensor model\.l"):
        from_pretrained(checkpoint(change))


@pytest.mark.parametrize(
    ("base", "beside", "message"),
    [
        ("some/base", False, "this is an adapter of some/base, and"),
        (None, False, "an adapter of a model that it does not name.*merge it"),
        ("some/base", True, "beside the model there is an adapter of some.*remove"),
    ],
)
def test_adapters(tmp_path, checkpoint, base, beside, message):
    folder = checkpoint() if beside else tmp_path
    content = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    for read in (read_config, from_pretrained):
        with pytest.raises(ValueError, match=message):
            read(folder)


def test_only_safetensors_are_read(checkpoint):
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors or model\.safetensors\.index"):
        from_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match=r"holds pytorch_model\.bin, but only safetensors are re"):
        from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 300, -4])
def test_damaged_files_are_named(checkpoint, kept):
    path = checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors: ") as caught:
        from_pretrained(path.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {UP: "model-9.safetensors"}}, r"cannot read .*model-9\.safetensors"),
        ({"weight_map": {"other": "model-1.safetensors"}}, "tensor other is missing: .*model-1"),
        ({"weight_map": {UP: "../model-1.safetensors"}}, "must hold a weight_map"),
        ({}, "must hold a weight_map"),
    ],
)
def test_damaged_indices_are_named(checkpoint, index, message):
    folder = checkpoint()
    indexed(folder).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_a_tensor_in_two_shards_is_refused(checkpoint):
    folder = checkpoint()
    save_file({UP: np.ones((48, 32), np.float32)}, folder / "model-2.safetensors")
    indexed(folder, **{UP: "model-2.safetensors"})
    with pytest.raises(ValueError, match=f"tensor {UP} is stored twice"):
        from_pretrained(folder)


# Element types and values


def test_logits_of_narrow_weights(saved):
    model = from_pretrained(saved[False][0], dtype=jnp.float16)
    tokens = np.arange(9)
    logits = Stepper(model, 1, 9, 1)(tokens[None], tokens[None], "prompt")[0]
    expected = reference_logits(saved[False][1], tokens, 9)
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_bfloat16_checkpoints(checkpoint, saved):
    """Stored in 16 bits, computed in float32 on a CPU unless asked otherwise."""

    def rounded_off(tensors):
        for name, value in tensors.items():
            tensors[name] = value.astype(ml_dtypes.bfloat16)

    folder = checkpoint(rounded_off)
    exact = parameters(from_pretrained(saved[False][0]))
    for dtype in ("float32", "bfloat16"):
        for name, value in parameters(from_pretrained(folder, dtype=dtype)).items():
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, exact[name].astype(jnp.bfloat16).astype(dtype))


@pytest.mark.parametrize("stated", ["dtype", "torch_dtype", None])
def test_default_dtype(checkpoint, monkeypatch, stated):
    folder = checkpoint()
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("dtype", None)
    stated = {stated: "bfloat16"} if stated else {}
    (folder / "config.json").write_text(json.dumps({**raw, **stated}))
    on_cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    for platform, sharding, expected in (
        ("cpu", None, jnp.float32),
        ("gpu", None, jnp.bfloat16 if stated else jnp.float32),
        ("gpu", on_cpu, jnp.float32),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        model = from_pretrained(folder, sharding=sharding)
        assert model.embed.embedding.get_value().dtype == expected


@pytest.mark.parametrize("dtype", ["float64", "nonsense"])
def test_other_dtypes_are_refused(saved, dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of 'float32', .*, got"):
        from_pretrained(saved[False][0], dtype=dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "read"),
    [
        (np.nan, "float32", np.nan),
        (-np.inf, "bfloat16", -np.inf),
        (1e6, "float16", np.inf),  # more than it knows
    ],
)
def test_weights_that_are_not_finite(checkpoint, value, dtype, read):
    def damage(tensors):
        tensors[UP][-1, -1] = value

    folder = checkpoint(damage)
    with pytest.raises(ValueError, match=rf"{UP} of .*model\.safetensors has NaN or inf.*{dtype}"):
        from_pretrained(folder, dtype)
    model = from_pretrained(folder, dtype, allow_nonfinite=True)
    last = np.asarray(model.layers[0].mlp.gate_up_proj.kernel.get_value(), np.float32)[-1, 1, -1]
    np.testing.assert_array_equal(last, read)


# Devices


def test_sharding(saved):
    mesh = Mesh(np.array(jax.devices()), ("model",))
    replicated = NamedSharding(mesh, PartitionSpec())
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    asked = {}

    def rule(name, shape):
        asked[name] = shape
        fits = len(shape) > 1 and shape[1] % len(jax.devices()) == 0
        return columns if fits else None

    expected = from_pretrained(saved[False][0])
    model = from_pretrained(saved[False][0], sharding=replicated)
    assert_equal(model, expected)
    assert {leaf.sharding for leaf in jax.tree.leaves(nnx.state(model))} == {replicated}
    model = from_pretrained(saved[False][0], sharding=rule)
    assert_equal(model, expected)
    assert model.layers[1].mlp.gate_up_proj.kernel.get_value().sharding == columns
    assert asked["layers.0.mlp.gate_up_proj.kernel"] == (48, 2, 32)
    assert asked["embed.embedding"] == (97, 32) and len(asked) == len(parameters(model))


def test_wrong_shardings_are_refused(saved):
    load = partial(from_pretrained, saved[False][0])
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    deep = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    with pytest.raises(ValueError, match="give sharding or mesh, not both"):
        load(sharding=deep, mesh=mesh)
    for sharding, error, message in (
        ("model", TypeError, "sharding must be a Sharding, a function or None"),
        (deep, ValueError, r"parameter \S+ of shape \[.*\] cannot be placed as Named"),
        (
            lambda *_: "model",
            TypeError,
            "must return a Sharding or None, got 'model' for parameter",
        ),
    ):
        with pytest.raises(error, match=message):
            load(sharding=sharding)


ACROSS = """
import jax, numpy as np, sys
import orbax.checkpoint as ocp
from pathlib import Path
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kvjax.models import abstract_decoder, from_pretrained, loading, on_mesh

folder, devices = Path(sys.argv[1]), np.array(jax.devices())
first = Mesh(devices.reshape(2, 4), ("data", "tensor"))
second = Mesh(devices[:6].reshape(3, 2), ("data", "tensor"))

def same(model, other):
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other))):
        assert np.array_equal(np.asarray(a), np.asarray(b))

def rule(name, shape):
    divided = len(shape) > 1 and shape[0] % 4 == 0
    return NamedSharding(first, P("tensor") if divided else P())

parts, aligned = [], loading._aligned
def watched(shape, dtype):
    parts.append(tuple(shape))
    return aligned(shape, dtype)
loading._aligned = watched

plain = from_pretrained(folder / "model")
parts.clear()
model = from_pretrained(folder / "model", sharding=rule)
same(model, plain)
kernel = model.layers[0].mlp.gate_up_proj.kernel.get_value()
assert kernel.sharding == NamedSharding(first, P("tensor")), kernel.sharding
assert kernel.addressable_shards[0].data.shape == (12, 2, 32)
# Four parts of a quarter each, not one for each device, and never the whole.
assert parts.count((12, 2, 32)) == 4 * 2 and (48, 2, 32) not in parts, parts

with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "checkpoint", nnx.state(model))
for mesh in (second, first):
    shapes = abstract_decoder(model.config, dtype="float32", mesh=mesh)
    graph, state = nnx.split(shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        again = nnx.merge(graph, checkpointer.restore(folder / "checkpoint", state))
    same(again, plain)
    expected = on_mesh(plain, mesh)
    same(again, expected)
    for a, b in zip(jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(expected))):
        assert a.sharding == b.sharding
print("done")
"""


@pytest.mark.slow
def test_parameters_move_between_meshes(tmp_path, saved):
    """Loaded on eight devices in parts, saved with Orbax, and restored on other meshes."""
    shutil.copytree(saved[False][0], tmp_path / "model")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-P", "-c", ACROSS, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Watched:
    """A tensor of a file that notes what is read of it."""

    def __init__(self, tensor, shape, reads):
        self.tensor, self.shape, self.reads = tensor, shape, reads

    def __getitem__(self, index):
        found = self.tensor[index]
        self.reads.append((self.shape, found.shape))
        return found


@pytest.fixture
def watched(monkeypatch):
    """Loading with blocks of 64 elements: `reads` has shapes of tensors and of what was read."""
    seen = types.SimpleNamespace(reads=[], names=[], placed=[], device=[])
    before = len(jax.live_arrays())

    def opened(stored, names):
        for name, tensor in open_tensors(stored, names):
            # What the loader still holds of the earlier ones, while the next one is there.
            assert not any(earlier() is not None for earlier in seen.placed)
            seen.device.append(len(jax.live_arrays()) - before)
            seen.names.append(name)
            yield name, Watched(tensor, stored[name].shape, seen.reads)

    put = jax.device_put

    def copied(tensor, where=None):
        seen.placed.append(weakref.ref(tensor))
        # A copy, because on a CPU the placed array may be the tensor itself.
        return put(np.array(tensor), where)

    monkeypatch.setattr(jax, "device_put", copied)
    monkeypatch.setattr(checkpoints, "open_tensors", opened)
    monkeypatch.setattr(loading, "_READ_AT_ONCE", 64)
    return seen


def placed_before(weights: dict[str, Weight], names: list[str]) -> list[int]:
    """How many parameters are complete before each of these tensors is read."""
    left = Counter(place.path for name in names for place in weights[name].parts)
    complete, before = 0, []
    for name in names:
        before.append(complete)
        for place in weights[name].parts:
            left[place.path] -= 1
            complete += not left[place.path]
    return before


def test_the_host_holds_one_tensor_and_the_device_nothing_but_weights(saved, watched):
    model = from_pretrained(saved[False][0])
    weights = TensorNames().weights(model.config)
    assert watched.device == placed_before(weights, watched.names)
    assert_equal(model, from_pretrained(saved[False][0]))
    for shape, read in watched.reads:
        assert len(read) == len(shape) and np.prod(read) <= max(64, shape[-1])


# What else may be given


@pytest.mark.parametrize("given", ["./nowhere", "a/b/c", ""])
def test_neither_a_folder_nor_an_id(given, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        from_pretrained(given)


def test_what_is_no_name_of_a_model():
    with pytest.raises(TypeError, match="a folder, a file or an id, got 3"):
        from_pretrained(3)


def test_hub_ids_are_downloaded(monkeypatch, saved):
    answers = iter([saved[False][0], OSError("401 Client Error.\n\nRepository not found")])

    def snapshot_download(name, allow_patterns, ignore_patterns):
        assert name == "somebody/model-1.0" and "*.safetensors" in allow_patterns
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    client = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    model = from_pretrained("somebody/model-1.0")
    assert_equal(model, from_pretrained(saved[False][0]))
    with pytest.raises(ValueError, match=r"is not a directory, and cannot be .*Error\. Repos"):
        from_pretrained("somebody/model-1.0")


@pytest.fixture
def tokenizer_folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo.directory() / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("content", ['{"a":' * 100_000, "{"])
def test_wrong_settings_of_a_tokenizer(tokenizer_folder, content):
    (tokenizer_folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match="cannot load the tokenizer of"):
        load_tokenizer(tokenizer_folder)


def test_no_word_on_spaces_that_are_not_cleaned_up(tokenizer_folder):
    edit(tokenizer_folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(tokenizer_folder)
    assert not tokenizer.clean_up_tokenization_spaces, "what transformers warns of"
    ids = tokenizer("It rains , he said .").input_ids
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["It rains , he said ."]
