"""GGUF files: the same decoder as from the safetensors of the same model, bit for bit."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import weakref

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from kvjax.models import checkpoints, from_pretrained, read_config
from kvjax.models.gguf_architectures import ARCHITECTURES
from kvjax.models.gguf_header import read_header
from kvjax.models.gguf_tensors import read_gguf_tensors
from kvjax.models.rope_scaling import attention_factor
from tests.models.family_cases import LONG, NAMED, SHORT, SLIDING, THETA, YARN
from tests.models.test_models_loading import placed_before
from tests.support.decoders import assert_equal, parameters
from tests.support.gguf_models import (
    WITH_ONE,
    add_rope,
    add_sizes,
    permuted,
    replace,
    tensors_of,
    write,
    write_model,
)
from tests.support.hf_models import pytorch, random_reference
from tests.support.tensor_changes import put, remove

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip


def window(writer, config):
    writer.add_sliding_window(config.sliding_window or 0)


def phi3(writer, config):
    window(writer, config)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if config.rope_parameters["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        stretch = config.max_position_embeddings / original
        factor = math.sqrt(1 + math.log(stretch) / math.log(original))
        writer.add_rope_scaling_attn_factors(factor)


def gemma2(writer, config):
    window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def gemma3(writer, config):
    window(writer, config)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    local = config.rope_parameters[SLIDING]["rope_theta"]
    if local != 10_000.0:
        writer.add_rope_freq_base_swa(local)


def olmo3(writer, config):
    window(writer, config)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])


def float32(values):
    return np.asarray(values, np.float32)


FACTORS = {"rope_factors_long.weight": float32(LONG), "rope_factors_short.weight": float32(SHORT)}
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}
TWO_ROPES = {**NAMED["gemma3_text"]["ropes"], "query_pre_attn_scalar": 16}


def capped_gemma3(writer, config):
    gemma3(writer, config)
    writer.add_final_logit_softcapping(3.0)


GEMMA = {"sliding_window": 7, "head_dim": 8, "query_pre_attn_scalar": 8}
CASES = {
    # name: (architecture, model type, settings, metadata of its own, tensors of its own)
    "llama": ("llama", "llama", {}),
    "llama-tied": ("llama", "llama", {**TIED, "head_dim": 16}),
    "llama-biases": ("llama", "llama", {**BIASED, "mlp_bias": True}),
    "llama-linear": ("llama", "llama", LINEAR),
    "mistral": ("llama", "mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral-window": ("llama", "mistral", {"sliding_window": 7}, window),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2-yarn": ("qwen2", "qwen2", {**TIED, "rope_parameters": YARN}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
    "qwen3-bias": ("qwen3", "qwen3", {"head_dim": 8, **BIASED}),
    "phi3": ("phi3", "phi3", {"sliding_window": 7}, phi3),
    "phi3-longrope": ("phi3", "phi3", NAMED["phi3"]["partial-tied"], phi3, FACTORS),
    "gemma2": ("gemma2", "gemma2", {**GEMMA, "num_hidden_layers": 3}, gemma2),
    "gemma3": ("gemma3", "gemma3_text", {**GEMMA, "num_hidden_layers": 6}, gemma3),
    "gemma3-ropes": ("gemma3", "gemma3_text", TWO_ROPES, capped_gemma3),
    "glm": ("chatglm", "glm", {"head_dim": 8, "num_key_value_heads": 1}),
    "glm4": ("glm4", "glm4", {"head_dim": 16}),
    "glm4-no-bias": ("glm4", "glm4", {"head_dim": 8, "attention_bias": False}),
    "olmo2": ("olmo2", "olmo2", {}),
    "olmo3": ("olmo2", "olmo3", {"sliding_window": 7, "num_hidden_layers": 4}, olmo3),
    "olmo3-yarn": ("olmo2", "olmo3", NAMED["olmo3"]["yarn"], olmo3),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5}),
}


def reference(arch, kind, changes):
    """A random model whose norms are the same after 1 has been added and taken away."""
    model = random_reference(kind, attention="eager", **changes)
    if arch in WITH_ONE:
        with pytorch().no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_((parameter * 256).round() / 256 + 0.0)  # no -0.0
    return model


@pytest.fixture
def pair(tmp_path):
    """`pair(arch, kind, changes, add, more)`: a folder and a GGUF file of one model."""

    def make(arch="llama", kind="llama", changes=None, add=None, more=None):
        model = reference(arch, kind, changes or {})
        model.save_pretrained(tmp_path / "folder")
        path = write_model(tmp_path / "model.gguf", arch, model, add, more)
        return tmp_path / "folder", path

    return make


def sizes_of(config, more=None):
    """What the metadata of all architectures say, and what `more` adds."""

    def add(writer):
        add_sizes(writer, config)
        add_rope(writer, config)
        if more is not None:
            more(writer)

    return add


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Llama and its GGUF file, which tests copy."""
    model = random_reference()
    path = write_model(tmp_path_factory.mktemp("plain") / "model.gguf", "llama", model)
    return path, model


@pytest.fixture
def changed(plain, tmp_path):
    """`changed(tensors=..., add=...)`: the file, with changed tensors and further metadata."""

    def make(tensors=None, add=None, types=None, arch="llama"):
        given = tensors_of("llama", plain[1])
        if tensors is not None:
            tensors(given)

        metadata = sizes_of(plain[1].config, add)
        return write(tmp_path / "changed.gguf", arch, given, metadata, types)

    return make


def as_stored(value):
    """A configuration with its numbers in float32, as GGUF has them, and factors worked out."""
    if dataclasses.is_dataclass(value):
        compared = [f.name for f in dataclasses.fields(value) if f.compare]
        fields = {name: as_stored(getattr(value, name)) for name in compared}
        if "attention_factor" in fields:
            fields["attention_factor"] = float(np.float32(attention_factor(value)))
        return fields
    if isinstance(value, tuple):
        return tuple(map(as_stored, value))
    return float(np.float32(value)) if isinstance(value, float) else value


# The same model


def check_same(folder, path):
    assert as_stored(read_config(path)) == as_stored(read_config(folder))
    assert_equal(from_pretrained(path), from_pretrained(folder))


@pytest.mark.parametrize("name", CASES)
def test_the_same_decoder_as_from_safetensors(pair, name):
    check_same(*pair(*CASES[name]))


def test_fused_queries_of_chatglm(tmp_path):
    changes = {"head_dim": 8, "num_key_value_heads": 1}
    model = random_reference("glm", **changes)
    model.save_pretrained(tmp_path / "folder")
    tensors = tensors_of("chatglm", model)
    for layer in range(2):
        for end in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{x}.{end}") for x in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{end}"] = np.concatenate(parts)
    path = write(tmp_path / "fused.gguf", "chatglm", tensors, sizes_of(model.config))
    check_same(tmp_path / "folder", path)


def rope_freqs(rotated, factor):
    """The factors of Llama 3.1, pair by pair, from its equations."""
    frequencies = 500_000.0 ** -(np.arange(0, rotated, 2) / rotated)
    turns = 8192 * frequencies / (2 * np.pi)
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    return float32(1 / ((1 - kept) / factor + kept))


def test_factors_of_llama3_become_its_rope_again(pair):
    changes = {"rope_parameters": LLAMA3, "head_dim": 64}
    freqs = rope_freqs(64, 32.0)
    assert len(set(freqs)) > 3, "kept, stretched, and some between"
    folder, path = pair("llama", "llama", changes, None, {"rope_freqs.weight": freqs})
    check_same(folder, path)
    assert read_config(path).rope.type == "llama3"


def test_other_factors_are_kept_as_they_are(changed):
    freqs = float32([1.0, 2.0, 1.5, 7.0])
    rope = read_config(changed(lambda tensors: tensors.update({"rope_freqs.weight": freqs}))).rope
    assert (rope.type, rope.short_factors, rope.long_factors) == ("longrope", *2 * (tuple(freqs),))
    assert attention_factor(rope) == 1.0


def test_factors_that_are_none(changed):
    freqs = float32([-1.0, -2.0, -1.5, -7.0])
    path = changed(lambda tensors: tensors.update({"rope_freqs.weight": freqs}))
    with pytest.raises(ValueError, match=r"changed\.gguf.* 4 finite numbers above 0"):
        read_config(path)


def test_gemma_of_27_billion_has_another_scale(tmp_path):
    """Known by its layers; files leave `query_pre_attn_scalar` out."""
    for arch, layers in (("gemma2", 46), ("gemma3", 62)):
        kind = "gemma2" if arch == "gemma2" else "gemma3_text"
        for count, expected in ((layers, 32 / 4), (3, 16)):
            own = {"num_hidden_layers": count, "head_dim": 16, "sliding_window": 7}
            model = random_reference(kind, attention="eager", **own)
            add = gemma2 if arch == "gemma2" else gemma3
            path = write_model(tmp_path / f"{arch}-{count}.gguf", arch, model, add)
            assert read_config(path).attention_scale == expected**-0.5


@pytest.mark.parametrize("given", [3, [True, True, False, True]])
def test_which_layers_of_gemma_have_the_window(pair, given):
    changes = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7}

    def add(writer, config):
        window(writer, config)
        writer.add_sliding_window_pattern(given)

    _, path = pair("gemma3", "gemma3_text", changes, add)
    windows = [layer.window for layer in read_config(path).layers]
    assert windows == [7, 7, None, 7]


def test_a_pattern_of_windows_that_is_none(pair):
    def add(writer, config):
        window(writer, config)
        writer.add_string("gemma3.attention.sliding_window_pattern", "x")

    _, path = pair("gemma3", "gemma3_text", {"head_dim": 8, "sliding_window": 7}, add)
    with pytest.raises(ValueError, match="integer from 0 or a list of truth values, got 'x'"):
        read_config(path)


def test_equal_numbers_for_all_layers_are_one(changed):
    """Some files have a list where most have a number."""

    def lists(writer):
        replace(writer, "llama.attention.head_count_kv", "add_array", [2, 2])

    assert read_config(changed(add=lists)).kv_heads == 2


ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
FIM_ENDS = (
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip


def ends_of(changed, texts, *, types=None, **ids):
    """The end tokens of a file with such tokens behind four words, and these ids."""
    tokens = ["a", "b", "c", "d", *texts]

    def add(writer):
        writer.add_token_list(tokens)
        if types is not None:
            writer.add_token_types(types)
        for name, token in {"eos": 0, **ids}.items():
            replace(writer, f"tokenizer.ggml.{name}_token_id", "add_uint32", token)

    ends = read_config(changed(add=add)).eos_token_ids
    return [tokens[token] for token in ends]


def test_end_tokens_are_those_of_llama_cpp(changed):
    """Names that `llama-vocab.cpp` ends at, those of fill-in-the-middle among them."""
    for text in (*ENDS, *FIM_ENDS):
        assert ends_of(changed, [text]) == ["a", text]
    others = ["<|im_start|>", "<s>", "<PRE>", "<|fim_prefix|>", "<|filename|>", "<pad>", "</S>"]
    assert ends_of(changed, others) == ["a"]


@pytest.mark.parametrize(
    ("texts", "file", "ended"),
    [
        *((["<|im_end|>", "<fim_pad>"], {"types": [1] * 4 + [kind] * 2},
           ["a", "<|im_end|>", "<fim_pad>"]) for kind in (1, 2, 3, 4, 5)),
        # Those that the file names, in place of others or beside them.
        (["x", "<|end|>"], {"eos": 3, "eot": 4, "eom": 0}, ["a", "d", "x", "<|end|>"]),
        (["<|fim_pad|>", "[PAD]", "<|file_sep|>"], {},
         ["a", "<|fim_pad|>", "[PAD]", "<|file_sep|>"]),
        (["<|fim_pad|>", "[PAD]", "<|file_sep|>"], {"fim_pad": 1, "fim_rep": 2},
         ["a", "b", "c", "<|file_sep|>"]),
        # Those that end nothing beside others, be they named.
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["a", "<|return|>", "<|call|>"]),
        (["<|end|>", "<|calls|>", "<|flush|>"], {}, ["a", "<|calls|>", "<|flush|>"]),
        (["<|end|>", "<|return|>"], {}, ["a", "<|end|>", "<|return|>"]),
        (["<|end|>", "<|call|>"], {}, ["a", "<|end|>", "<|call|>"]),
        (["</s>", "<|tool_response>"], {}, ["a", "<|tool_response>"]),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 4}, ["<|return|>", "<|call|>"]),
    ],
)  # fmt: skip
def test_end_tokens_of_a_file(changed, texts, file, ended):
    assert ends_of(changed, texts, **file) == ended


# Element types


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0])
def test_quantised_weights(tmp_path, kind):
    model = random_reference(intermediate_size=64)
    tensors = tensors_of("llama", model)
    types = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    path = write(tmp_path / "model.gguf", "llama", tensors, sizes_of(model.config), types)
    state = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if name in types else tensor
        for name, tensor in tensors.items()
    }
    ours = parameters(from_pretrained(path))
    config = model.config
    gate_up = "layers", 1, "mlp", "gate_up_proj", "kernel"
    rows = config.num_attention_heads // config.num_key_value_heads * config.head_dim
    keys = ours["layers", 1, "attention", "qkv_proj", "kernel"][:, rows : rows + config.head_dim]
    np.testing.assert_array_equal(ours["embed", "embedding"], state["token_embd.weight"])
    np.testing.assert_array_equal(ours["lm_head", "kernel"], state["output.weight"])
    np.testing.assert_array_equal(ours[gate_up][:, 1], state["blk.1.ffn_up.weight"])
    np.testing.assert_array_equal(
        permuted(keys.reshape(-1, keys.shape[-1]), 2), state["blk.1.attn_k.weight"]
    )
    rounded = parameters(from_pretrained(path, "bfloat16"))[gate_up]
    np.testing.assert_array_equal(rounded, ours[gate_up].astype(rounded.dtype))


def test_what_was_decoded_is_kept(tmp_path, monkeypatch):
    """Numbers that are not finite are allowed to a call, and not to the next one."""
    model = random_reference(intermediate_size=64)
    tensors = tensors_of("llama", model)
    types = {name: Type.Q8_0 for name, tensor in tensors.items() if tensor.ndim == 2}
    path = write(tmp_path / "model.gguf", "llama", tensors, sizes_of(model.config), types)
    expected = from_pretrained(path)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    from_pretrained(path, allow_nonfinite=True)
    assert not (tmp_path / "cache").exists()
    assert_equal(from_pretrained(path), expected)
    monkeypatch.setattr(checkpoints, "read_gguf_tensors", lambda *_: pytest.fail("decoded again"))
    assert_equal(from_pretrained(path), expected)


@pytest.mark.parametrize(
    ("types", "expected"),
    [({}, "float32"), ({2: Type.F16}, "float16"), ({2: Type.BF16}, "bfloat16")],
)
def test_dtype_of_a_device_that_is_no_cpu(changed, plain, monkeypatch, types, expected):
    chosen = {
        name: types[tensor.ndim]
        for name, tensor in tensors_of("llama", plain[1]).items()
        if tensor.ndim in types
    }
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert from_pretrained(changed(types=chosen)).embed.embedding.get_value().dtype == expected


# One tensor at a time


def test_the_host_holds_one_tensor_and_the_device_nothing_but_weights(plain, monkeypatch):
    before = jax.live_arrays()
    read, names_read, host, device = [], [], [], []

    def watched(header, names):
        for name, tensor in read_gguf_tensors(header, names):
            host.append(sum(earlier() is not None for earlier in read))
            device.append(len(jax.live_arrays()) - len(before))
            read.append(weakref.ref(tensor))
            names_read.append(name)
            yield name, tensor
            del tensor

    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda tensor, where=None: put(np.array(tensor), where))
    monkeypatch.setattr(checkpoints, "read_gguf_tensors", watched)
    model = from_pretrained(plain[0])
    assert host == [0] * len(read)
    weights = ARCHITECTURES["llama"].names.weights(model.config)
    assert device == placed_before(weights, names_read)


def test_large_tensors_are_dequantised_in_parts(tmp_path):
    """A tensor of several parts, the last of them shorter."""
    rows = np.random.default_rng(0).standard_normal((3, 10_000, 64)).astype(np.float32)
    quantised = {"table": Type.Q8_0}
    path = write(tmp_path / "one.gguf", "llama", {"table": rows}, lambda writer: None, quantised)
    [(name, read)] = read_gguf_tensors(read_header(path), ["table"])
    expected = gguf.dequantize(gguf.quantize(rows, Type.Q8_0), Type.Q8_0)
    assert (name, read.dtype) == ("table", np.float32)
    np.testing.assert_array_equal(read, expected)


# What is refused

UP = "blk.0.ffn_up.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(UP), f"1 tensors are missing: {UP}"),
        (remove("token_embd.weight"), r"changed\.gguf: tensor token_embd\.weight is missing"),
        (put("extra.weight", float32([1, 2])), r"tensor extra\.weight of .*\.gguf is unknown"),
        (put("blk.0.ffn_up.bias", float32([1] * 48)), r"5 tensors are missing: blk\.0\.ffn_gat"),
        (put("blk.2.ffn_up.weight", float32(np.ones((48, 32)))), "blk.2.ffn_up.weight .*unknown"),
        (put("rope_freqs.weight", float32([1, 2, 3])), r"rope_freqs\.weight must have .*\[4\]"),
        (put("rope_factors_long.weight", float32([1] * 4)), "tensors of rope factors must be"),
        (put(UP, float32(np.ones((32, 48)))), rf"{UP} of .* shape \[32, 48\], expected \[48"),
        (put(UP, np.ones((48, 32), np.int8)), f"{UP} of .* has type I8, expected one of F32, F16"),
        (put(UP, float32(np.full((48, 32), np.nan))), f"{UP} of .*gguf has NaN or infinite"),
    ],
)
def test_every_tensor_is_used_once(changed, change, message):
    with pytest.raises(ValueError, match=message):
        from_pretrained(changed(change))


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("llama.block_count", "uint32", 3, "llama.block_count is 3, but .* 2 layers"),
        ("llama.block_count", "uint32", 2**32 - 1, "block_count must be from 1 to 100"),
        ("llama.block_count", "float32", 2.0, "block_count must be an integer, got 2.0"),
        ("llama.block_count", "array", [1, 2], r"must be an integer, got \[1, 2\]"),
        ("llama.embedding_length", "uint32", 33, "multiple of .*head_count, got 33 and"),
        ("llama.attention.head_count", "uint32", 0, "multiple of .*, got 32 and 0"),
        ("tokenizer.ggml.eos_token_id", "string", "x", "eos_token_id must be an integ"),
        ("general.type", "string", "adapter", "general.type must be 'model', got 'ada"),
        ("split.count", "uint16", 3, "one of 3 parts of a model, which are not"),
        ("llama.rope.scaling.type", "string", "longrope", "without the tensors rope_f"),
    ],
)
def test_wrong_metadata(changed, key, kind, value, message):
    def add(writer):
        for derived in ("key_length", "value_length"):  # from those that are replaced
            replace(writer, f"llama.attention.{derived}")
        replace(writer, key, f"add_{kind}", value)

    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(changed(add=add))
    assert "changed.gguf" in str(caught.value)


def test_what_changes_nothing_may_be_said(changed):
    def add(writer):
        writer.add_bool("llama.rope.scaling.finetuned", False)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_string("llama.rope.scaling.type", "none")
        writer.add_uint32("llama.pooling_type", 3)  # how a text becomes one vector

    from_pretrained(changed(add=add))


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("qwen2moe", "'qwen2moe' is not supported: mixtures of experts are not supported; supp"),
        ("t5", "general.architecture 't5' is not supported; supported: llama, qwen2, qwen3, phi3"),
    ],
)
def test_other_architectures_are_refused_by_name(changed, arch, message):
    with pytest.raises(ValueError, match=message):
        from_pretrained(changed(arch=arch))


def test_the_package_is_asked_for(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'kvjax\[gguf\]'") as caught:
        from_pretrained(plain[0])
    assert "\n" not in str(caught.value)


def test_files_by_their_names(tmp_path, plain):
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.gguf: No such file"):
        from_pretrained(tmp_path / "nowhere.gguf")
    shutil.copyfile(plain[0], tmp_path / "blob")
    from_pretrained(tmp_path / "blob")


def test_a_file_that_becomes_shorter(plain, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copyfile(plain[0], path)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[: header.offsets[UP] + 8])
    with pytest.raises(ValueError, match=rf"tensor {UP} of .*model\.gguf ends before its 6,144"):
        list(read_gguf_tensors(header, [UP]))
    path.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*model\.gguf: No such file or directory"):
        list(read_gguf_tensors(header, [UP]))
