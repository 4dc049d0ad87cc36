"""Checkpoints: every layout that is read, and every damage that is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
import weakref

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
from tests.support.hf_models import Stepper, reference_logits, save_reference
from tests.support.tolerances import close

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


def leaves(model):
    return {
        ".".join(map(str, path)): np.asarray(leaf.get_value(), np.float32)
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def assert_same_weights(model, other):
    ours, theirs = leaves(model), leaves(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_one_file_and_shards_hold_the_same_model(tmp_path, saved):
    folder, reference = saved[False]
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = from_pretrained(tmp_path)
    assert_same_weights(model, from_pretrained(str(folder)))
    tokens = np.arange(9)
    logits = Stepper(model, 1, 9, 1)(tokens[None], tokens[None], "prompt")[0]
    close(logits, reference_logits(reference, tokens, 9))


def test_a_tied_table_may_have_either_name_or_both(checkpoint, saved):
    expected = from_pretrained(saved[True][0])
    assert "lm_head.kernel" not in leaves(expected)

    def only_head(tensors):
        tensors[HEAD] = tensors.pop(TABLE)

    def both(tensors):
        tensors[HEAD] = tensors[TABLE].copy()

    def different(tensors):
        tensors[HEAD] = tensors[TABLE] + 1

    assert_same_weights(from_pretrained(checkpoint(only_head, tied=True)), expected)
    assert_same_weights(from_pretrained(checkpoint(both, tied=True)), expected)
    with pytest.raises(ValueError, match=f"{HEAD} and {TABLE} differ"):
        from_pretrained(checkpoint(different, tied=True))


def test_buffers_of_old_checkpoints_are_ignored(checkpoint, saved):
    def old(tensors):
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
            tensors[name] = np.ones(4, np.float32)

    assert_same_weights(from_pretrained(checkpoint(old)), from_pretrained(saved[False][0]))


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "tied", "message"),
    [
        (remove(UP), False, "1 tensors are missing: " + UP),
        (remove(HEAD), False, "1 tensors are missing: " + HEAD),
        (remove(TABLE), True, f"1 tensors are missing: {TABLE} or {HEAD}"),
        (put("model.extra.weight", np.ones(3, np.float32)), False, "model.extra.weight .*unknown"),
        (
            put("model.layers.0.mlp.up_proj.bias", np.ones(48, np.float32)),
            False,
            "model.layers.0.mlp.up_proj.bias .*unknown",
        ),
        (
            put("model.layers.2.mlp.up_proj.weight", np.ones((48, 32), np.float32)),
            False,
            "num_hidden_layers is 2, but .* 3 layers: model.layers.2.mlp.up_proj.weight .*unknown",
        ),
        (
            put(UP, np.ones((32, 48), np.float32)),
            False,
            UP + r" .*has shape \[32, 48\], expected \[48, 32\]",
        ),
        (put(UP, np.ones((48, 32), np.int8)), False, UP + " .*has type I8, expected one of F64"),
    ],
)
def test_every_tensor_is_accounted_for(checkpoint, change, tied, message):
    with pytest.raises(ValueError, match=message):
        from_pretrained(checkpoint(change, tied=tied))


# Names with another beginning


def renamed(before, head=None):
    """Names of the base model's tensors begin with `before`, and the head may have another."""

    def change(tensors):
        for name in list(tensors):
            base = name.startswith("model.")
            new = before + name.removeprefix("model.") if base else head or name
            tensors[new] = tensors.pop(name)

    return change


BEGINNINGS = [
    ("", None),  # a decoder that was saved without its head
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", None),
    ("_orig_mod.model.", "_orig_mod.lm_head.weight"),
    ("module._orig_mod.model.", "module._orig_mod.lm_head.weight"),
    ("module.model.", "module.lm_head.weight"),
    ("base_model.model.model.", "base_model.model.lm_head.weight"),
    ("text_model.", None),
]


@pytest.mark.parametrize(("before", "head"), BEGINNINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_names_may_begin_with_other_words(checkpoint, saved, before, head, tied):
    folder, asked = checkpoint(renamed(before, head), tied=tied), set()
    model = from_pretrained(folder, sharding=lambda name, shape: asked.add(name))
    assert_same_weights(model, from_pretrained(saved[tied][0]))
    assert read_config(folder) == read_config(saved[tied][0])
    assert {UP, TABLE} < asked, "a sharding rule is asked with the usual names"


def test_names_of_shards_may_begin_with_other_words(checkpoint, saved):
    folder = checkpoint(renamed("", None))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = dict.fromkeys(load_file(folder / "model-1.safetensors"), "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert_same_weights(from_pretrained(folder), from_pretrained(saved[False][0]))
    assert read_config(folder) == read_config(saved[False][0])


def one_more(name):
    def change(tensors):
        renamed("language_model.model.")(tensors)
        tensors[name] = np.ones((97, 32), np.float32)

    return change


def unlike(tensors):
    for name in list(tensors):
        tensors[f"h.{name.replace('.', '_')}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_more("vision_tower.weight"), r"tensor vision_tower\.weight of .* is unknown"),
        (one_more("model.norm.weight"), r"tensor model\.norm\.weight of .* is unknown"),
        # Two tables: which one is meant is not known.
        (
            one_more("encoder.embed_tokens.weight"),
            r"named model\.layers\.0\..*, but .* has encoder",
        ),
        (
            unlike,
            r"config\.json: layers of this model type have tensors named model\.layers\.0\.\.\.",
        ),
        (lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers" in n], "but the check"),
    ],
)
def test_other_names_are_refused_in_words_that_say_it(checkpoint, change, message):
    folder = checkpoint(change)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize(("given", "layers"), [(1, 2), (3, 2)])
def test_as_many_layers_as_the_file_says(checkpoint, given, layers):
    folder = checkpoint()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": given}))
    for read in (read_config, from_pretrained):
        with pytest.raises(ValueError, match=f"is {given}, but .* of {layers} layers") as caught:
            read(folder)
        assert str(caught.value).startswith(f"{path}: num_hidden_layers is")


# What is no plain model


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised with GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with AWQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with FP8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised with bitsandbytes"),
        ({"quantization_config": {"_load_in_4bit": True}}, "quantised with bitsandbytes"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "with compressed-tens"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised with MXFP4"),
        ({"quantization_config": {"bits": 4}}, "with a method that is not named"),
        ({"quantization_config": True}, "with a method that is not named"),
        ({"compression_config": {"format": "int-quantized"}}, "with compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"quantization \(MLX\) .* with MLX"),
        (
            {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}},
            "quantised with MLX",
        ),
    ],
)
def test_a_configuration_of_quantised_weights(checkpoint, more, message):
    folder = checkpoint()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    for read in (read_config, from_pretrained):
        with pytest.raises(ValueError, match=message) as caught:
            read(folder)
        assert str(caught.value).startswith(f"{path}: {next(iter(more))} (")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quantize_config.json", "quantised with GPTQ"),
        ("quant_config.json", "quantised with AWQ"),
        ("hf_quant_config.json", "quantised with NVIDIA ModelOpt"),
    ],
)
def test_a_file_beside_quantised_weights(checkpoint, name, message):
    folder = checkpoint()
    (folder / name).write_text('{"bits": 4, "group_size": 128}')
    with pytest.raises(ValueError, match=rf"{name}: the weights are {message}"):
        read_config(folder)


@pytest.mark.parametrize(
    ("endings", "method"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ or AWQ"),
        (("qweight", "qzeros", "scales"), "GPTQ or AWQ"),
        (("weight", "scales", "biases"), "MLX"),
        (("weight", "weight_scale_inv"), "FP8"),
        (("weight", "weight_scale"), "compressed-tensors"),
        (("weight_packed", "weight_scale", "weight_shape"), "compressed-tensors"),
        (("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"), "bitsandbytes"),
        (("weight", "SCB"), "bitsandbytes"),
    ],
)
def test_tensors_of_quantised_weights(checkpoint, endings, method):
    def change(tensors):
        for name in [name for name in tensors if "proj" in name]:
            del tensors[name]
            for ending in endings:
                tensors[f"{name.removesuffix('weight')}{ending}"] = np.ones((4, 4), np.uint8)

    folder = checkpoint(change)
    for read in (read_config, from_pretrained):
        with pytest.raises(ValueError, match=rf"are quantised with {method} \(tensor model\.l"):
            read(folder)


def adapter(folder, base="meta-llama/Llama-3.2-1B"):
    folder.mkdir(exist_ok=True)
    content = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({lora: np.ones((8, 32), np.float32)}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_alone(tmp_path):
    for read in (read_config, from_pretrained):
        with pytest.raises(
            ValueError, match=r"this is an adapter of meta-llama/Llama-3\.2-1B, and"
        ):
            read(adapter(tmp_path / "lora"))
    with pytest.raises(ValueError, match=r"an adapter of a model that it does not name.*merge it"):
        read_config(adapter(tmp_path / "lora", None))


def test_an_adapter_beside_its_model(checkpoint):
    folder = adapter(checkpoint())
    for read in (read_config, from_pretrained):
        with pytest.raises(
            ValueError, match=r"beside the model there is an adapter of meta.*remove"
        ):
            read(folder)


def test_only_safetensors_are_read(checkpoint):
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors or model\.safetensors\.index"):
        from_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(
        ValueError, match=r"holds pytorch_model\.bin, but only safetensors are read"
    ):
        from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 5, 300, -4])
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
        ({"weight_map": {UP: "pytorch_model.bin"}}, "must hold a weight_map"),
        ({"weight_map": {}}, "must hold a weight_map"),
        ({}, "must hold a weight_map"),
    ],
)
def test_damaged_indices_are_named(checkpoint, index, message):
    folder = checkpoint()
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_a_tensor_in_two_shards_is_refused(checkpoint):
    folder = checkpoint()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({UP: tensors[UP]}, folder / "model-2.safetensors")
    files = {**dict.fromkeys(tensors, "model-1.safetensors"), UP: "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=f"tensor {UP} is stored twice"):
        from_pretrained(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.float32])
@pytest.mark.fast_cases("float32")
def test_dtypes(saved, dtype):
    model = from_pretrained(saved[False][0], dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    tokens = np.arange(9)
    logits = Stepper(model, 1, 9, 1)(tokens[None], tokens[None], "prompt")[0]
    expected = reference_logits(saved[False][1], tokens, 9)
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_bfloat16_checkpoints(checkpoint, saved):
    """Stored in 16 bits, computed in float32 on a CPU unless asked otherwise."""

    def narrow(tensors):
        for name, value in tensors.items():
            tensors[name] = value.astype(ml_dtypes.bfloat16)

    folder = checkpoint(narrow)
    model = from_pretrained(folder, dtype="float32")
    for name, value in leaves(from_pretrained(saved[False][0])).items():
        rounded = value.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(leaves(model)[name], rounded)
    assert_same_weights(from_pretrained(folder, dtype="bfloat16"), model)


@pytest.mark.parametrize("stated", ["dtype", "torch_dtype", None])
def test_default_dtype(checkpoint, monkeypatch, stated):
    folder = checkpoint()
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("dtype", None)
    if stated:
        raw[stated] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert from_pretrained(folder).embed.embedding.get_value().dtype == jnp.float32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    expected = jnp.bfloat16 if stated else jnp.float32
    assert from_pretrained(folder).embed.embedding.get_value().dtype == expected
    on_cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    model = from_pretrained(folder, sharding=on_cpu)
    assert model.embed.embedding.get_value().dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["int8", "float64", "nonsense"])
def test_other_dtypes_are_refused(saved, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got"):
        from_pretrained(saved[False][0], dtype=dtype)


def test_sharding(saved):
    mesh = Mesh(np.array(jax.devices()), ("model",))
    replicated = NamedSharding(mesh, PartitionSpec())
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    asked = {}

    def rule(name, shape):
        asked[name] = shape
        fits = len(shape) == 2 and shape[1] % len(jax.devices()) == 0
        return columns if fits else None

    expected = from_pretrained(saved[False][0])
    model = from_pretrained(saved[False][0], sharding=replicated)
    assert_same_weights(model, expected)
    assert {leaf.sharding for leaf in jax.tree.leaves(nnx.state(model))} == {replicated}
    model = from_pretrained(saved[False][0], sharding=rule)
    assert_same_weights(model, expected)
    assert model.layers[1].mlp.up_proj.kernel.get_value().sharding == columns
    assert asked[UP] == (32, 48)
    assert asked[TABLE] == (97, 32)
    assert len(asked) == len(leaves(model))


def test_wrong_shardings_are_refused(saved):
    with pytest.raises(TypeError, match="sharding must be a Sharding, a function or None"):
        from_pretrained(saved[False][0], sharding="model")
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    deep = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    with pytest.raises(ValueError, match=r"tensor \S+ of shape \[.*\] cannot be placed as Named"):
        from_pretrained(saved[False][0], sharding=deep)
    with pytest.raises(TypeError, match="sharding must return a Sharding or None, got 'model' for"):
        from_pretrained(saved[False][0], sharding=lambda name, shape: "model")


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


def test_the_host_holds_one_tensor_and_the_device_nothing_but_weights(saved, watched):
    model = from_pretrained(saved[False][0])
    assert len(leaves(model)) == len(watched.names)
    assert watched.device == list(range(len(watched.names)))
    assert_same_weights(model, from_pretrained(saved[False][0]))
    for shape, read in watched.reads:
        assert len(read) == len(shape) and np.prod(read) <= max(64, shape[-1])


@pytest.mark.parametrize("given", ["./nowhere", "/nowhere/at/all", "a/b/c", "", ".."])
def test_neither_a_folder_nor_an_id(given, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        from_pretrained(given)


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the client: `hub.answer` is the folder to return or the error to raise."""
    client = types.SimpleNamespace(answer=None, asked=None)

    def snapshot_download(name, **options):
        client.asked = name, options
        if isinstance(client.answer, Exception):
            raise client.answer
        return str(client.answer)

    module = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return client


def test_hub_ids_are_downloaded(hub, saved):
    hub.answer = saved[False][0]
    assert_same_weights(from_pretrained("somebody/model-1.0"), from_pretrained(saved[False][0]))
    name, options = hub.asked
    assert name == "somebody/model-1.0"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern or "py" in pattern for pattern in options["allow_patterns"])


@pytest.mark.parametrize(
    "error", [OSError("401 Client Error.\n\nRepository not found"), RuntimeError("no\nnetwork")]
)
def test_failed_downloads_are_one_line(hub, error):
    hub.answer = error
    with pytest.raises(ValueError, match="somebody/model is not a directory, and cannot be") as e:
        from_pretrained("somebody/model")
    assert "\n" not in str(e.value)
    assert " ".join(str(error).split()) in str(e.value)


# Files and values that somebody made to do harm


def raw_config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("layers", [3, 9_999, 10**9, 10**18, 10**400])
def test_more_layers_than_the_checkpoint_has(checkpoint, layers):
    folder = checkpoint()
    (folder / "config.json").write_text(
        json.dumps({**raw_config(folder), "num_hidden_layers": layers})
    )
    for read in (read_config, from_pretrained):
        with pytest.raises(ValueError, match=r"config\.json: num_hidden_layers .*(2 layers|10000)"):
            read(folder)


def test_layers_are_counted_in_an_index_too(checkpoint):
    folder = checkpoint()
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_config(folder).num_layers == 2
    raw = {**raw_config(folder), "num_hidden_layers": 5_000}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"num_hidden_layers is 5000, but .* of 2 layers"):
        read_config(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_not_finite(checkpoint, value, dtype):
    def damage(tensors):
        tensors[UP][-1, -1] = value

    folder = checkpoint(damage)
    with pytest.raises(ValueError, match=rf"{UP} of .*model\.safetensors has NaN or inf.*{dtype}"):
        from_pretrained(folder, dtype)
    model = from_pretrained(folder, dtype, allow_nonfinite=True)
    last = np.asarray(model.layers[0].mlp.up_proj.kernel.get_value(), np.float32)[-1, -1]
    np.testing.assert_array_equal(last, value)


def test_weights_that_a_cast_makes_infinite(checkpoint):
    def enlarge(tensors):
        tensors[UP][0, 0] = 1e6

    folder = checkpoint(enlarge)
    from_pretrained(folder)
    with pytest.raises(ValueError, match=f"{UP} of .* in float16: allow_nonfinite=True"):
        from_pretrained(folder, "float16")


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_only_regular_files_are_read(checkpoint, name, what):
    folder = checkpoint()
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    put_in_place(folder / name, what)
    with pytest.raises(ValueError, match=rf"{name}: it must be a regular file"):
        from_pretrained(folder)


def put_in_place(path, what):
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.fixture
def tokenizer_folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo.directory() / name, tmp_path / name)
    return tmp_path


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("what", ["pipe", "device"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model"])
def test_only_regular_files_of_tokenizers_are_read(tokenizer_folder, name, what):
    put_in_place(tokenizer_folder / name, what)
    with pytest.raises(ValueError, match=rf"{name}: it must be a regular file"):
        load_tokenizer(tokenizer_folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_max_length": "x"}', "config.json: model_max_length must be a number, got 'x'"),
        ('{"a":' * 100_000, r"tokenizer_config\.json is nested too deeply"),
        ("{", r"tokenizer_config\.json is not JSON"),
    ],
)
def test_wrong_settings_of_a_tokenizer(tokenizer_folder, content, message):
    (tokenizer_folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tokenizer_folder)


def test_no_word_on_spaces_that_are_not_cleaned_up(tokenizer_folder):
    path = tokenizer_folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "clean_up_tokenization_spaces": True})
    )
    tokenizer = load_tokenizer(tokenizer_folder)
    assert not tokenizer.clean_up_tokenization_spaces, "what transformers warns of"
    ids = tokenizer("It rains , he said .").input_ids
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["It rains , he said ."]


@pytest.mark.slow
def test_tokenizers_are_loaded_quietly():
    code = (
        "import sys; sys.modules['torch'] = None; "
        "from kvjax.models import demo, load_tokenizer; "
        "load_tokenizer(demo.directory()).batch_decode([[5, 6]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
