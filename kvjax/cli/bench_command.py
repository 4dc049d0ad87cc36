"""`kvjax bench`: times and bytes of methods against the full cache, and against the machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.filesize import decimal

import kvjax
from kvjax.attention.init_cache import default_dtype
from kvjax.checks import check_count
from kvjax.cli import options
from kvjax.cli.bench_table import print_report
from kvjax.cli.inputs import model_path
from kvjax.cli.opened import calibrated, check_counts, model_name
from kvjax.cli.plan_command import looked_up_bytes
from kvjax.cli.terminal import Display
from kvjax.evaluation.cells.grid import Candidate
from kvjax.evaluation.memory import free_memory
from kvjax.evaluation.speed import speed
from kvjax.evaluation.speed.floors import cache_room
from kvjax.evaluation.speed.machine import environment
from kvjax.evaluation.speed.speed import FULL, measure_speed
from kvjax.generation.planning import bytes_on_device, plan
from kvjax.generation.prompt_checks import check_prompts

# By default Quest leaves the first two layers uncompressed, and a shape may have no further ones.
METHODS = ("snapkv", "quest(dense_layers=())")

# Drawing random weights takes this many times the memory of the largest array, in addition to all
# weights (measured with JAX 0.10 on a CPU).
_DRAWING = 3


# The measured model: a configuration with the measured layers, the model's number of layers, and a
# function that loads the model and its tokenizer (None: prompts are random tokens).
_Subject = tuple[Any, int, Callable[[], tuple[Any, Any]]]

DESCRIPTION = """\
Measures methods against the full cache: time to the first token, per further token
and end to end, tokens per second, seconds of compilation, bytes of caches, resident
bytes and their peak, for every combination of --tokens, --new and --batch. Beside
them stands the least time that the machine needs, by its memory bandwidth and its
rate of multiplications, which are measured too. A model is given with its weights, or as a shape
that gets random ones."""
EXAMPLES = """\
examples:
  kvjax bench
  kvjax bench --model DIR --method snapkv,h2o,clusterkv --batch 1,4
  kvjax bench --model DIR --tokens 2048,4096 --new 64,256 --json
  kvjax bench --shape llama-3.1-8b --layers 2 --tokens 8192"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    options.add_model(parser)
    add("--shape", metavar="DIR_OR_NAME",
        help="folder with config.json, a config.json, a GGUF file, or a name such as llama-3.1-8b, "
        "in place of --model: a model of these sizes with random weights reads random "
        "tokens")  # fmt: skip
    add("--layers", metavar="N", type=int,
        help="layers of the shape, from the first on (default: all)")  # fmt: skip
    sizes: tuple[tuple[str, tuple[int, ...], str], ...] = (
        ("--tokens", speed.PROMPT_TOKENS, "tokens of each prompt"),
        ("--new", speed.NEW_TOKENS, "new tokens of each row, at least 2"),
        ("--batch", speed.BATCHES, "rows at a time"),
    )
    for name, default, about in sizes:
        options.add_list(parser, name, value_type=options.number_list, default=default, about=about)
    options.add_methods(parser, METHODS, full=True)
    options.add_budget(parser)
    add("--rounds", metavar="N", type=int, default=speed.ROUNDS,
        help="rounds; every method runs once in each, the fastest counts (default: "
        f"{speed.ROUNDS})")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"),
        help="dtype of weights, keys and values (default: float32 on a CPU, else "
        "bfloat16)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax bench`: prints tables, or one JSON object."""
    # Imported here: kvjax works without kvjax.models, and help is faster without its imports.
    from kvjax.models import demo

    check_counts(args, "rounds", "layers")
    for name, minimum in ("tokens", 1), ("new", 2), ("batch", 1):
        for count in getattr(args, name):
            check_count(f"--{name}", count, minimum)
    if args.model is not None and args.shape is not None:
        raise ValueError("give --model or --shape, not both")
    if args.layers is not None and args.shape is None:
        raise ValueError("--layers needs a --shape: the weights of a model are those of all layers")
    candidates = {text: Candidate.of(text, args.budget) for text in (FULL, *args.methods)}
    dtype = jnp.dtype(args.dtype or default_dtype()).name
    with Display(not args.json) as display:
        display.show(0, None, "loading the model")
        config, layers, load = (_model if args.shape is None else _shape)(args, dtype)
        _check(args, config, candidates)
        _check_memory(args, config, candidates, dtype)
        model, tokenizer = load()
        methods = {name: candidate.transform for name, candidate in candidates.items()}
        text = None
        if tokenizer is not None:
            text = tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids
            methods = {
                name: calibrated(tx, model, tokenizer, config.max_positions, display)
                for name, tx in methods.items()
            }
        report = measure_speed(
            model, methods, prompt_tokens=args.tokens, new_tokens=args.new, batches=args.batch,
            rounds=args.rounds, text=text, dtype=dtype, looked_up=looked_up_bytes(model),
            on_progress=display.show,
        )  # fmt: skip
    record = {
        "model": args.shape or model_name(args.model),
        "random_weights": args.shape is not None,
        "layers": config.num_layers,
        "model_layers": layers,
        "dtype": dtype,
        "rounds": args.rounds,
        "environment": environment(),
        "bandwidth_bytes_per_s": report.machine.bandwidth,
        "products_per_s": report.machine.products,
        "weight_bytes": report.weight_bytes,
        "results": [
            {**dataclasses.asdict(row), **candidates[row.method].named()} for row in report.rows
        ],
    }
    if args.json:
        print(json.dumps(record))
        return
    print_report(Console(highlight=False), record)


def _model(args: argparse.Namespace, dtype: str) -> _Subject:
    """Returns a model with its own weights, whose prompts are the bundled held-out text."""
    from kvjax.models import from_pretrained, load_tokenizer, read_config

    path = model_path(args.model)
    config = read_config(path)

    def load() -> tuple[Any, Any]:
        tokenizer = load_tokenizer(path)
        return from_pretrained(path, dtype=dtype, allow_nonfinite=args.allow_nonfinite), tokenizer

    return config, config.num_layers, load


def _shape(args: argparse.Namespace, dtype: str) -> _Subject:
    """Returns a model with random weights, whose prompts are random tokens."""
    from kvjax.models import random_decoder
    from kvjax.models.shapes import shape_config

    config = shape_config(args.shape, args.layers)
    layers = shape_config(args.shape).num_layers
    return config, layers, lambda: (random_decoder(config, dtype=dtype), None)


def _check(args: argparse.Namespace, config: Any, candidates: Mapping[str, Candidate]) -> None:
    """Raises ValueError if the prompts cannot be read or a method changes no layer."""
    tokens, new = max(args.tokens), max(args.new)
    check_count("--tokens", tokens, 1, most=config.max_positions)
    for candidate in candidates.values():
        layers = kvjax.bind(candidate.transform, config.num_layers, config.windows)
        check_prompts(config, [[0] * tokens], layers, new)
        if candidate.method != FULL and all(layer == kvjax.Full() for layer in layers):
            raise ValueError(
                f"{candidate.method} leaves all {config.num_layers} layers as they are, so "
                "that nothing would be compared: give it dense_layers=(), or more --layers"
            )


def _check_memory(
    args: argparse.Namespace, config: Any, candidates: Mapping[str, Candidate], dtype: str
) -> None:
    """Raises ValueError if weights and caches, or weights while they are drawn, exceed memory."""
    from kvjax.models import abstract_decoder

    model, free = abstract_decoder(config, dtype=dtype), free_memory()
    room, rows = cache_room(model, max(args.tokens), max(args.new)), max(args.batch)
    largest = max(bytes_on_device(x) for x in jax.tree.leaves(model))
    drawing = 0 if args.shape is None else _DRAWING * largest
    for candidate in candidates.values():
        planned = plan(model, candidate.transform, dtype=dtype, **room)
        caches = planned.caches(rows)
        needed = planned.weights + max(round(caches.device + caches.host), drawing)
        if free is not None and needed > free:
            raise ValueError(
                f"{args.shape or model_name(args.model)} with {config.num_layers} layers in "
                f"{dtype} and the caches of {candidate.method} need {decimal(needed)} of memory, "
                f"and {decimal(free)} are free: give fewer --layers of a --shape, --tokens or "
                "--batch"
            )
