"""`kvjax plan`: bytes are those of the caches and weights that there will be."""

import dataclasses
import json
import os

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from transformers import LlamaConfig, LlamaForCausalLM

import kvjax
import kvjax.evaluation
from kvjax.cli.main import main
from kvjax.generation.model import as_functional
from kvjax.generation.planning import _with_stand_ins, plan
from kvjax.models import DecoderConfig, RopeConfig, abstract_decoder, random_decoder
from kvjax.models.shapes import shape_config
from kvjax.registry import METHODS
from tests.support.gguf_models import add_sizes, gguf_names
from tests.support.hf_models import pytorch
from tests.support.marks import slow, some_slow

LAYERS, HEADS = 3, 2
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=LAYERS, query_heads=4,
    kv_heads=HEADS, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512,
)  # fmt: skip
OTHERS = (
    "when_full(kvmerger, room=8)", "kvcrush(snapkv)", "chain(clusterkv, offload)",
    "quantize(bits=4, group=8, key_axis='channel')", "chain(snapkv, codebook)",
    "chelsea(budget=150, keep_layers=(0,))", "spindlekv(unfold=True)",
)  # fmt: skip
ROWS = [[1, 2, 3], [4, 5], [6]]


def transform(method: str) -> kvjax.KVTransform:
    share = method.startswith(("spindlekv", "layer_budget"))
    return kvjax.parse(method, 0.5 if share else 96)


@pytest.mark.parametrize(
    "method",
    some_slow(
        (*METHODS, *OTHERS), "pyramidinfer", "chain(clusterkv, offload)",
        exhaustive={*METHODS, "spindlekv(unfold=True)"} - {"h2o", "kvzip", "infinigen"},
    ),
)  # fmt: skip
def test_a_plan_counts_what_a_context_holds(method):
    size = {"max_prompt": 160, "max_new": 24}
    planned = plan(abstract_decoder(CONFIG), transform(method), dtype="float32", **size)
    model = random_decoder(CONFIG)
    tx = _with_stand_ins(planned.transform, as_functional(model))  # for a missing calibration
    context = kvjax.read(model, ROWS, transform=tx, dtype="float32", **size)
    held = kvjax.evaluation.memory_bytes(context.caches)
    caches = planned.caches(len(ROWS))
    assert caches.device == held["device"] and caches.host == held.get("pinned_host", 0)
    assert 0 < caches.read <= caches.device and 0 < caches.room < caches.device + caches.host


@pytest.mark.slow
def test_a_budget_by_head(tmp_path):
    """By the profile in a file, its bytes are a context's; without one, heads are equal."""
    model, size = random_decoder(CONFIG), {"max_prompt": 160, "max_new": 24}
    table = np.ones((LAYERS, HEADS, 2))
    table[..., 0] = np.linspace(0.1, 0.9, LAYERS * HEADS).reshape(LAYERS, HEADS)
    profile = kvjax.kit.HeadProfile(table)
    kvjax.save_calibration(tmp_path / "heads", kvjax.ByHead(kvjax.SnapKV(0.5), profile), model)
    snapkv = kvjax.SnapKV(0.5)

    def planned(tx):
        plans = plan(abstract_decoder(CONFIG), tx, dtype="float32", **size)
        return plans.caches(len(ROWS)).device

    tx = kvjax.ByHead(snapkv, profile)
    context = kvjax.read(model, ROWS, transform=tx, dtype="float32", **size)
    held = kvjax.evaluation.memory_bytes(context.caches)["device"]
    assert planned(kvjax.ByHead(snapkv, str(tmp_path / "heads"))) == planned(tx) == held
    assert planned(kvjax.ByHead(snapkv)) == planned(snapkv)
    with pytest.raises(ValueError, match=r"of by_head\(snapkv\), and by_head\(kvzip\) needs"):
        planned(kvjax.ByHead(kvjax.KVzip(0.5), str(tmp_path / "heads")))


@pytest.mark.parametrize("method", ["snapkv", *slow("full", "quantize(bits=4)")])
def test_llama_on_one_device(method, data_dir):
    """Llama-3.1-8B: the bytes of its weights, and of the caches that all its layers make."""
    config = shape_config(data_dir / "hf_configs" / "Llama-3.1-8B-Instruct.config.json")
    model, tx = abstract_decoder(config), kvjax.parse(method, 1024)
    planned = plan(model, tx, max_prompt=4096, max_new=512)
    functional, layers = as_functional(model), kvjax.bind(tx, config.num_layers)
    tokens = jax.ShapeDtypeStruct((3, 4096), jnp.int32)

    def whole_prompt(model, tokens):
        caches = tuple(
            kvjax.init_cache(
                layer, batch=3, kv_heads=model.kv_heads, query_heads=model.query_heads,
                head_dim=model.head_dim, max_prompt=4096, max_new=512, dtype=jnp.bfloat16,
                **model.attention(number).static,
            )
            for number, layer in enumerate(layers)
        )  # fmt: skip
        options = {"layers": layers, "phase": "prompt", "last": True, "logits_at": None}
        return model.apply(model.params, tokens, tokens, caches, **options)[1]

    made = jax.eval_shape(whole_prompt, functional, tokens)
    assert planned.weights == 8_030_261_248 * 2  # what its card says
    assert planned.caches(3).device == kvjax.nbytes(made)
    assert planned.held(3) == planned.weights + kvjax.nbytes(made)


def test_a_mesh_divides_heads_and_rows():
    config = dataclasses.replace(
        CONFIG, query_heads=16, kv_heads=8, hidden_size=128, max_positions=8192
    )
    plans = {}
    for name, sizes in (("one", (1, 1)), ("eight", (1, 8)), ("many", (8, 8)), ("16", (1, 16))):
        mesh = AbstractMesh(sizes, ("data", "tensor"))
        model = abstract_decoder(config, mesh=mesh)
        plans[name] = plan(model, kvjax.Full(), mesh=mesh, max_prompt=4096, max_new=512)
    one, eight, many, sixteen = (plans[name] for name in plans)
    norms = 2 * 128 * (2 * LAYERS + 1)
    assert eight.weights == (one.weights - norms) // 8 + norms == many.weights
    per_row = 4 * LAYERS  # the row's length, which no head divides
    assert eight.request.device == (one.request.device - per_row) / 8 + per_row
    assert many.request == eight.request
    assert sixteen.request == one.request, "8 KV heads are on all of 16 devices"
    memory = one.held(1) - 1
    assert one.fits(memory) == 0 and eight.fits(memory) > 0
    assert many.fits(memory) == 8 * eight.fits(memory)
    assert many.held(8) == eight.held(1) and many.held(1) == eight.held(1)
    most = eight.fits(memory)
    assert eight.held(most) <= memory < eight.held(most + 1)


def test_what_is_selected_is_read():
    model = abstract_decoder(CONFIG)
    size = {"max_prompt": 256, "max_new": 16}
    full, quest = (
        plan(model, tx, **size) for tx in (kvjax.Full(), kvjax.Quest(budget=48, dense_layers=()))
    )
    assert full.request.read == full.request.device
    assert quest.request.device > full.request.device > 2 * quest.request.read


def test_the_command(capsys):
    words = ["plan", "--model", "llama-3.1-8b", "--mesh", "data=8,tensor=8", "--batch", "1,64"]
    words += ["--method", "full,snapkv"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 64 and list(found["methods"]) == ["full", "snapkv"]
    full, snapkv = found["methods"].values()
    assert snapkv["requests_that_fit"] > 5 * full["requests_that_fit"] > 0
    batch = full["batches"][1]
    assert batch["step_s"] == pytest.approx(batch["step_bytes"] / 3350e9)
    assert batch["fits"] == (batch["bytes"] <= 80e9) and batch["requests"] == 64
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "64 x 80 GB (data 8, tensor 8)" in " ".join(shown.split()) and "snapkv" in shown


def test_the_table_has_host_memory_and_the_forms_that_keep_all(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 1024, "num_key_value_heads": 1024,
        "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    }))  # fmt: skip
    names = "kvzip", (offload := "chain(quest(dense_layers=()),offload)")
    words = ["plan", "--model", str(tmp_path), "--tokens", "300", "--new", "100", "--bytes", "0.5"]
    assert main([*words, "--method", ",".join(names)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("and in host" in line for line in lines)
    rows = [line.split() for line in lines]
    host = {name: float(next(row for row in rows if row[:1] == [name])[2]) for name in names}
    token = 1024 * 2 * 128 * 2 / 1e9  # heads, keys and values, channels, bytes
    assert host["kvzip"] == 0 and 300 * token <= host[offload] < 512 * token
    small = kvjax.unparse(kvjax.smallest(0.5, head_dim=128))
    assert any(line.strip().startswith(small) for line in lines)
    said = " ".join(" ".join(lines).split())
    assert "kvzip and its room take no fewer bytes than quantize, which keeps every token" in said


@pytest.mark.slow
def test_shares_of_bytes_become_compositions(capsys):
    """They take what they say, but for masses and pins, which what rests does not have."""
    words = ["plan", "--model", "smollm2-135m", "--tokens", "4000", "--method", "full", "--json"]
    assert main([*words, "--bytes", "0.6,0.1,0.03"]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    small = [kvjax.unparse(kvjax.smallest(share, head_dim=64)) for share in (0.6, 0.1, 0.03)]
    assert list(methods) == ["full", *small]
    at_rest = [x["request_bytes"] - x["request_room_bytes"] for x in methods.values()]
    assert at_rest[1] / at_rest[0] == pytest.approx(0.6, abs=0.1)
    assert at_rest[2] / at_rest[0] == pytest.approx(0.1, rel=0.1)
    assert at_rest[3] / at_rest[0] == pytest.approx(0.03, rel=0.15)


@pytest.mark.slow
def test_what_is_kept_and_what_is_room(capsys):
    """Room is a part of a request's bytes, and a form that keeps all and takes no more is named."""
    words = ["plan", "--model", "smollm2-135m", "--tokens", "1000", "--new", "100"]
    words += ["--method", "full,kvzip,h2o,chain(kvzip, quantize)"]
    assert main([*words, "--json"]) == 0
    full, kvzip, h2o, chain = json.loads(capsys.readouterr().out)["methods"].values()
    assert (full["kept_slots"], full["room_slots"]) == (1000, 100)
    assert (kvzip["kept_slots"], kvzip["room_slots"]) == (100, 256 + 100)
    assert (h2o["kept_slots"], h2o["room_slots"]) == (100, 1)
    assert 0.7 < kvzip["request_room_bytes"] / kvzip["request_bytes"] < 0.8
    assert full["whole"] is h2o["whole"] is chain["whole"] is None
    assert kvzip["whole"] is None
    words[4] = "300"
    assert main([*words, "--json"]) == 0
    full, kvzip, *_ = json.loads(capsys.readouterr().out)["methods"].values()
    assert kvzip["whole"]["method"] == "quantize"
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "30 + 356" in said and "kvzip and its room take no fewer bytes than quantize" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama-4"], "or one of llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, llama"),
        (["--model", "llama-3.1-8b", "--mesh", "heads=2"], "must be the sizes of data and tensor"),
        (["--model", "llama-3.1-8b", "--batch", "0"], "batch must be"),
        (["--model", "llama-3.1-8b", "--method", "nothing"], "unknown method 'nothing'"),
    ],
)
def test_errors(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_request_beyond_the_models_positions_is_refused(capsys):
    """As by `kvjax generate`; a method that moves keys to their rank has no limit."""
    words = ["plan", "--model", "smollm2-135m", "--batch", "1", "--new", "192", "--json"]
    assert main([*words, "--tokens", "8001"]) == 2
    said = capsys.readouterr().err
    assert "the model has 8192 positions, got a prompt of 8001 tokens and 192 new ones" in said
    assert main([*words, "--tokens", "8000"]) == 0 and main(words) == 0
    default, given = capsys.readouterr().out.splitlines()
    assert default == given
    moved = "streaming_llm(budget=64, reposition=True)"
    assert main([*words, "--tokens", "8001", "--method", moved]) == 0


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [("model.gguf", [], 2), ("blob", ["--dtype", "float32"], 4)],
    ids=["model.gguf", "blob"],
)
def test_a_gguf_file_is_planned_by_its_header(capsys, tmp_path, name, options, size):
    """The file has no weights: it is 13 GB of nothing on a disk that stores holes."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=12, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096,
    )  # fmt: skip
    with pytorch().device("meta"):
        weights = LlamaForCausalLM(config).state_dict()
    count, name_of = sum(x.numel() for x in weights.values()), gguf_names("llama", 12)
    writer = gguf.GGUFWriter(tmp_path / name, "llama")
    add_sizes(writer, config)
    for key, x in weights.items():
        writer.add_tensor_info(name_of(key), list(x.shape), np.dtype("float32"), 4 * x.numel())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = (tmp_path / name).stat().st_size
    os.truncate(tmp_path / name, -(-header // 32) * 32 + 4 * count)

    words = ["plan", "--model", str(tmp_path / name), "--method", "full", "--tokens", "3584"]
    assert main([*words, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weight_bytes"] == size * count
    assert found["positions"] == 4096
    assert found["methods"]["full"]["requests_that_fit"] > 0
