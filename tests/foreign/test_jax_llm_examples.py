"""The Llama 3 of jax-llm-examples, which is not a package: its own loop in kvjax's caches.

KVJAX_JAX_LLM_EXAMPLES names a folder that has the repository (github.com/jax-ml/jax-llm-examples).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import kvjax
from tests.foreign.port import prompts

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
NEW, WIDTH = 16, 32
METHODS = ("h2o(budget=12)", "quantize", "every(snapkv(budget=12,window=4),steps=4)",
           "clusterkv(budget=16,sinks=2,interval=4,tokens_per_cluster=4)")  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.lenient, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def llama():
    """Their module of the model."""
    folder = os.environ.get("KVJAX_JAX_LLM_EXAMPLES")
    if folder is None:
        pytest.skip("KVJAX_JAX_LLM_EXAMPLES names no folder that has jax-llm-examples")
    sys.path += [str(Path(folder) / "llama3"), str(ADAPTERS)]
    return importlib.import_module("llama3_jax.model")


def config(llama, axes: AxisType):
    """Makes a tiny model's sizes, on one device, whose axes are named only if they are explicit."""
    rules = llama.ShardingRules()
    if axes == AxisType.Auto:
        names = (field.name for field in dataclasses.fields(rules))
        rules = llama.ShardingRules(**dict.fromkeys(names))
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=(axes,) * 3)
    return llama.Config(
        embed=32, ffw_size=64, q_heads=4, kv_heads=2, num_layers=3, head_dim=8, vocab_size=64,
        max_seq_len=64, causal=True, use_prefill_attn_kernel=False, use_decode_attn_kernel=False,
        dtype=jnp.float32, mesh=mesh, rules=rules, quant_layer=False, quant_cache=False,
    )  # fmt: skip


def weights(llama, cfg):
    """Draws weights whose texts do not repeat a token."""
    drawn = llama.Weights.init(jax.random.key(0), cfg)
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, drawn)


def their_loop(llama, cfg, params, cache):
    """Reads the prompts, padded at the left, and writes, in a cache of theirs or of kvjax."""
    tokens = np.array([[0] * (30 - len(prompt)) + prompt for prompt in prompts()])
    following, _, cache = llama.prefill(tokens, params, cache, cfg)
    last, text = np.asarray(following)[:, int(cache.iter) - 1, None], []
    for _ in range(NEW):
        text.append(np.asarray(last))
        last, cache = llama.decode_step(last, params, cache, cfg)
    return np.concatenate(text, axis=1).tolist(), cache


@pytest.fixture(scope="module")
def sides(llama, request):
    """Sizes, weights, the text in their own cache, and the adapter, which changes their module."""
    cfg = config(llama, request.param)
    params = weights(llama, cfg)
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(cfg.mesh):
        text, _ = their_loop(llama, cfg, params, llama.KVCache.init(jax.random.key(0), cfg, 2))
        patch.setattr(llama, "attention_block", llama.attention_block)
        patch.setattr(llama.KVCache, "shardings", llama.KVCache.shardings)
        yield cfg, params, text, importlib.import_module("jax_llm_examples_llama")


@pytest.mark.parametrize("sides", [AxisType.Auto, AxisType.Explicit], indirect=True)
@pytest.mark.parametrize("method", ["full", *METHODS])
def test_their_loop_and_kvjax_generate(llama, sides, method):
    cfg, params, expected, adapter = sides
    cache = adapter.kvjax_cache(cfg, method, batch=2, max_prompt=WIDTH, max_new=NEW)
    text, cache = their_loop(llama, cfg, params, cache)
    kvjax.check_dropped(tuple(cache.k))
    assert (text == expected) == (method == "full") and len(set(text[0])) > 3
    if AxisType.Explicit in cfg.mesh.axis_types:
        return  # kvjax's calls are for axes that the compiler divides
    model = adapter.functional(cfg, params)
    ours = kvjax.generate(model, prompts(), transform=method, max_new_tokens=NEW, end_tokens=())
    assert ours.tokens == text


@pytest.mark.parametrize("sides", [AxisType.Auto], indirect=True)
def test_a_document_is_read_and_asked_about(llama, sides):
    """Everything kept gives the answer of the whole text; and a budget is kept to."""
    cfg, params, _, adapter = sides
    model, questions = adapter.functional(cfg, params), [[5, 6, 9], [7, 8]]
    whole = [prompt + question for prompt, question in zip(prompts(), questions, strict=True)]
    expected = kvjax.generate(model, whole, max_new_tokens=NEW, end_tokens=()).tokens
    for budget in (40, 12):
        document = kvjax.read(
            model, prompts(), transform=kvjax.KVzip(budget, room=24), max_prompt=64
        )
        answer = kvjax.generate(
            model, questions, context=document, max_new_tokens=NEW, end_tokens=()
        )
        assert (answer.tokens == expected) == (budget == 40)
