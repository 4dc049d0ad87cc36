"""What `device.py` measures of whole models: decode steps and first tokens.

Weights of Llama's shape are random and made on the device. A prompt of 131,072 tokens takes such a
model half a minute to read, so steps are timed over caches that were filled without it: one row of
random tokens is read by a model of one layer, whose cache is repeated for all rows and layers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.attention.rows import copied
from kvjax.cli.opened import kept_sample
from kvjax.cli.plan_command import looked_up_bytes
from kvjax.evaluation.memory import free_memory
from kvjax.evaluation.speed.machine import measure_machine
from kvjax.generation.compiler import Compiler
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.model import FunctionalModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.planning import Plan, plan
from kvjax.generation.prompt_checks import bucket
from kvjax.generation.turns import Start, first_turn
from kvjax.models import (
    Decoder,
    DecoderConfig,
    RopeConfig,
    demo,
    from_pretrained,
    load_tokenizer,
    random_decoder,
)
from kvjax.models.shapes import shape_config

SHAPE = "llama-3.1-8b"
HOST_SHARE = 0.8  # of the host's memory, which caches there may take
NEW, STEPS, ROUNDS = 128, 32, 3  # room for new tokens, of which three rounds write 33 each
SECONDS = 15.0  # of runs that are timed, after which there is no further round
PROFILE_STEPS = 64
TINY = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, query_heads=4, kv_heads=2,
    head_dim=32, rope=RopeConfig(rotary_dim=32), max_positions=512,
)  # fmt: skip


class LeftOut(Exception):
    """An entry that cannot be measured here; the message says why."""


def shape(tiny: bool) -> DecoderConfig:
    """The configuration of Llama-3.1-8B, or of a tiny model."""
    return TINY if tiny else shape_config(SHAPE)


@functools.lru_cache(maxsize=1)
def random_model(tiny: bool) -> Decoder:
    """A model of that shape with random weights in bfloat16, kept for the next entry."""
    model = random_decoder(shape(tiny), dtype="bfloat16")
    jax.block_until_ready(as_functional(model).params)
    return model


def transform_of(text: str, config: DecoderConfig) -> kvjax.KVTransform:
    """The method of a text; `by_head` gets made-up shares.

    They are alike in all layers. Of each layer's heads, the first keeps the most: at a budget of
    0.05, eight heads keep 0.17 to 0.01.
    """
    transform = kvjax.parse(text)
    if not isinstance(transform, kvjax.ByHead):
        return transform
    steps = np.geomspace(1e-3, 1, PROFILE_STEPS)
    powers = np.linspace(0.5, 2, config.kv_heads)
    table = np.tile(steps ** powers[:, None], (config.num_layers, 1, 1))
    return dataclasses.replace(transform, profile=kvjax.kit.HeadProfile(table))


def check_memory(config: DecoderConfig, of_plan: Plan, rows: int, tokens: int) -> None:
    """Raises LeftOut where caches of `rows` rows do not fit beside the weights, which are there.

    Room for the activations of one layer that reads so many tokens is counted, too.
    """
    free, caches = free_memory(), of_plan.caches(rows)
    activations = 2 * tokens * (2 * config.intermediate_size + 6 * config.hidden_size)
    needed = round(caches.device) + activations
    if free is not None and needed > free:
        raise LeftOut(
            f"takes {needed / 1e9:.0f} GB beside the weights, and {free / 1e9:.0f} are free"
        )
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if caches.host > HOST_SHARE * host:
        raise LeftOut(f"takes {caches.host / 1e9:.0f} GB of the host's {host / 1e9:.0f}")


def filled(
    model: FunctionalModel, config: DecoderConfig, transform: kvjax.KVTransform, tokens: int,
    rows: int,
) -> kvjax.Context:  # fmt: skip
    """A context whose caches hold `tokens` random tokens of each row, alike in rows and layers."""
    layers = kvjax.bind(transform, config.num_layers)
    width = bucket(tokens, config.max_positions, None)
    size = CacheSize.of(model, 1, width, NEW, "bfloat16", tokens + NEW)
    small = dataclasses.replace(config, num_layers=1, vocab_size=64, layers=config.layers[:1])
    one_layer = as_functional(random_decoder(small, dtype="bfloat16"))
    prompt, of_method = random_prompts(small.vocab_size, tokens, 1), {}
    for layer in dict.fromkeys(layers):
        start = Start(transform, (layer,), size, [width])
        context = first_turn(one_layer, prompt, start, Compiler())
        of_method[layer] = (context if rows == 1 else context.repeat(rows)).caches[0]
    caches = tuple(jax.tree.map(copied, of_method[layer]) for layer in layers)
    length = np.full(rows, tokens, np.int32)
    return kvjax.Context(
        held=caches, logits=jnp.zeros((rows, config.vocab_size), jnp.float32),
        seen=jnp.zeros((rows, config.vocab_size), bool), length=jnp.asarray(length),
        prompt_tokens=jnp.array(length), new_tokens=jnp.zeros(rows, jnp.int32),
        waiting=jnp.zeros((), jnp.int32), transform=transform, layers=layers,
        size=size._replace(batch=rows), windows=model.windows, fingerprint=Fingerprint.of(model),
    )  # fmt: skip


def random_prompts(vocabulary: int, tokens: int, rows: int) -> list[list[int]]:
    """Random token ids."""
    return np.random.default_rng(0).integers(0, vocabulary, (rows, tokens)).tolist()


def planned(model: Decoder, transform: kvjax.KVTransform, tokens: int, new: int) -> Plan:
    """The bytes of a model and of its caches for a prompt of so many tokens."""
    width = bucket(tokens, model.config.max_positions, None)
    return plan(
        model, transform, max_prompt=width, max_new=new, dtype="bfloat16",
        looked_up=looked_up_bytes(model),
    )  # fmt: skip


def steps(method: str, tokens: int, rows: int, tiny: bool) -> dict[str, Any]:
    """Times decode steps of the shape's model over caches that `tokens` tokens fill."""
    config, model = shape(tiny), random_model(tiny)
    transform, prompt = transform_of(method, config), tokens - NEW
    of_plan = planned(model, transform, prompt, NEW)
    check_memory(config, of_plan, rows, prompt)
    start = time.perf_counter()
    context = filled(as_functional(model), config, transform, prompt, rows)
    jax.block_until_ready(context)
    seconds, runs = time.perf_counter() - start, []
    for _ in range(ROUNDS):
        run = kvjax.generate(
            model, None, context=context, donate=True, max_new_tokens=STEPS + 1, end_tokens=()
        )
        context = run.context
        runs.append(dataclasses.replace(run, context=None))
    return {
        "step_ms": 1e3 * min(run.tpot_s for run in runs),
        "steps_ms": [1e3 * run.tpot_s for run in runs],
        "tokens_per_s": rows / min(run.tpot_s for run in runs),
        "read_bytes": of_plan.step_bytes(rows),
        "filling_s": seconds,
        **bytes_of(runs[0], of_plan, rows),
    }


def bytes_of(run: kvjax.Generation, of_plan: Plan, rows: int) -> dict[str, Any]:
    """What the device and the host hold, and the seconds of compiling."""
    return {
        "cache_bytes": run.cache_bytes,
        "full_cache_bytes": run.full_cache_bytes,
        "host_bytes": round(of_plan.caches(rows).host),
        "held_bytes": of_plan.held(rows),
        "compile_s": run.compile_s,
    }


def timed(
    model: Any, prompts: Sequence[Sequence[int]], transform: kvjax.KVTransform, new: int,
    **options: Any,
) -> list[kvjax.Generation]:  # fmt: skip
    """Runs of `kvjax.generate`, of which none is begun that would end after `SECONDS`."""
    runs, start = [], time.perf_counter()
    while len(runs) < ROUNDS:
        run = kvjax.generate(
            model, prompts, transform=transform, max_new_tokens=new, end_tokens=(),
            dtype="bfloat16", **options,
        )  # fmt: skip
        runs.append(run)
        spent = time.perf_counter() - start - runs[0].compile_s
        if spent * (len(runs) + 1) / len(runs) > SECONDS:
            break
    return runs


def first_token(method: str, tokens: int, rows: int, tiny: bool) -> dict[str, Any]:
    """Times the first token of the shape's model after a prompt of random tokens."""
    config, model = shape(tiny), random_model(tiny)
    transform, prompt = transform_of(method, config), tokens - NEW
    of_plan = planned(model, transform, prompt, 64)
    check_memory(config, of_plan, rows, rows * prompt)
    runs = timed(model, random_prompts(config.vocab_size, prompt, rows), transform, 1)
    times = [run.ttft_s for run in runs]
    return {
        "first_s": min(times), "firsts_s": times, "tokens_per_s": rows * prompt / min(times),
        **bytes_of(runs[0], of_plan, rows),
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def named_model(variable: str, tiny: bool) -> tuple[Any, Any, list[int]]:
    """The model that an environment variable names, its tokenizer, and tokens of a text."""
    path = demo.directory() if tiny else os.environ.get(variable)
    if path is None or not os.path.exists(path):
        raise LeftOut(f"{variable} names no model: set it to its folder or GGUF file")
    model, tokenizer = from_pretrained(path, dtype="bfloat16"), load_tokenizer(path)
    text = tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids
    return model, tokenizer, text


def model_times(variable: str, method: str, tokens: int, tiny: bool) -> dict[str, Any]:
    """Times the first token and the steps of a model with its own weights."""
    model, tokenizer, text = named_model(variable, tiny)
    made = []
    transform = kvjax.calibrated(
        kvjax.parse(method), model, kept_sample(tokenizer, model.config.max_positions),
        document=tokenizer, on_made=lambda method, seconds: made.append(seconds),
    )  # fmt: skip
    prompt = np.resize(text, tokens).tolist()
    of_plan = planned(model, transform, tokens, 64)
    check_memory(model.config, of_plan, 1, tokens)
    runs = timed(model, [prompt], transform, STEPS + 1, document=tokenizer)
    firsts, each = [run.ttft_s for run in runs], [1e3 * run.tpot_s for run in runs]  # pyright: ignore[reportOperatorIssue]  # there are steps
    return {
        "first_s": min(firsts), "firsts_s": firsts, "step_ms": min(each), "steps_ms": each,
        "profile_s": made[0] if made else None, **bytes_of(runs[0], of_plan, 1),
    }  # fmt: skip


def rates() -> dict[str, Any]:
    """The best rates of the device: bytes per second, and operations of matrix products."""
    return measure_machine("bfloat16")._asdict()
