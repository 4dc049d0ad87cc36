"""Seconds of tracing, lowering and compiling each method's functions, for a model of some layers.

    python benchmarks/compile_time.py --layers 4 30 --out benchmarks/results/compile_time_cpu.json

A model of the bundled model's shape, with as many layers as are asked for, reads 256 padded tokens
and makes 64 new ones: the prompt pass, the decode loop, and where the library has one the function
that handles new tokens every few steps (`flush`) are traced, lowered and compiled one after the
other, without a cache on disk, and nothing is run. Intervals are 32 steps, so that whatever a
method does every few steps has its place in what is compiled.

Wall-clock seconds depend on what else the machine does; `cpu_seconds`, of all threads of this
process, depend on it much less. `operations` counts those of the lowered program. `over_full`
divides a method's CPU seconds of all three stages by those of the full cache, and takes the loop
and `flush` together.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from common import save, write
from flax import nnx
from model_loop import ModelLoop, flush_interval

import kvjax
from kvjax.models import DecoderConfig, demo, random_decoder, read_config

PROMPT_TOKENS, NEW_TOKENS = 256, 64
BUDGET = 0.5
INFINIGEN_CHANNELS = 12  # of 32: at most 0.2 of them for queries and as many for keys
METHODS = {
    **{name: name for name in kvjax.METHODS},
    "chelsea": "chelsea(interval=32)",
    "clusterkv": "clusterkv(interval=32)",
    "every_snapkv": "every(snapkv, steps=32)",
    "quantize_8": "quantize(bits=8)",
    "quantize_4": "quantize(bits=4, residual=32)",
}
OPERATION = re.compile(r"^\s+(?:%[^=]+= )?\"?(?:stablehlo|chlo|func|mhlo)\.", re.MULTILINE)


def config(layers: int) -> DecoderConfig:
    """The bundled model's configuration with another number of layers."""
    return dataclasses.replace(read_config(demo.directory()), num_layers=layers)


def method(name: str, model: DecoderConfig) -> kvjax.KVTransform:
    """A method of the table; InfiniGen gets projections to random channels."""
    transform = kvjax.parse(METHODS[name], BUDGET)
    if not isinstance(transform, kvjax.InfiniGen):
        return transform
    shape = (model.num_layers, model.kv_heads, model.head_dim, INFINIGEN_CHANNELS)
    projections = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return dataclasses.replace(transform, calibration=kvjax.InfiniGenCalibration(projections))


def shapes(tree: object) -> object:
    """The shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def measure(transform: kvjax.KVTransform, model: DecoderConfig) -> dict[str, dict[str, object]]:
    """Compiles the prompt pass, the decode loop and, where it is called, `flush`.

    Args:
      transform: the method, not bound to layers yet.
      model: configuration of the decoder.

    Returns:
      Measurements by function: `"prompt"`, `"loop"` and `"flush"`.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: random_decoder(model)))
    layers = kvjax.bind(transform, model.num_layers)
    loop = ModelLoop(graphdef, layers, PROMPT_TOKENS, NEW_TOKENS)
    tokens = jax.ShapeDtypeStruct((1, PROMPT_TOKENS), jnp.int32)
    given = jax.ShapeDtypeStruct((1, NEW_TOKENS + 1), jnp.int32)
    prompt, traced = _compile(ModelLoop.read_prompt, loop, params, tokens, tokens, given)
    progress, until = shapes(traced.out_info), jax.ShapeDtypeStruct((), jnp.int32)
    found = {"prompt": prompt, "loop": _compile(ModelLoop.decode, loop, params, progress, until)[0]}
    if flush_interval(progress.caches) is not None:
        found["flush"] = _compile(ModelLoop.flush, loop, progress.caches)[0]
    return found


def _compile(function: Callable, *args: object) -> tuple[dict[str, object], jax.stages.Traced]:
    """Times the three stages of a jitted function."""
    seconds, cpu_seconds = {}, {}

    def timed(stage: str, work: Callable[[], object]) -> object:
        start, cpu = time.perf_counter(), time.process_time()
        result = work()
        seconds[stage] = round(time.perf_counter() - start, 3)
        cpu_seconds[stage] = round(time.process_time() - cpu, 3)
        return result

    traced = timed("trace", lambda: function.trace(*args))
    lowered = timed("lower", traced.lower)
    timed("compile", lowered.compile)
    operations = len(OPERATION.findall(lowered.as_text()))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "operations": operations}, traced


def cpu_seconds(functions: dict[str, dict[str, object]], *names: str) -> float:
    """CPU seconds of all stages of the named functions, as far as the method has them."""
    found = [functions[name]["cpu_seconds"] for name in names if name in functions]
    return sum(sum(stages.values()) for stages in found)


def over_full(row: dict[str, object], full: dict[str, object]) -> dict[str, float]:
    """How many times the CPU seconds of the full cache a method takes."""
    parts = {"prompt": ("prompt",), "loop": ("loop", "flush")}
    own, other = row["functions"], full["functions"]
    return {
        part: round(cpu_seconds(own, *names) / cpu_seconds(other, *names), 2)
        for part, names in parts.items()
    }


def run(names: Sequence[str], depths: Sequence[int], out: str | None) -> dict[str, object]:
    """Measures all methods and depths, and saves what there is after each.

    Args:
      names: of `METHODS`.
      depths: numbers of layers.
      out: file to write to, if any.
    """
    rows: list[dict[str, object]] = []
    result = {
        "benchmark": "compile_time",
        "shape": {
            "model": "bundled", "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
            "batch": 1, "budget": BUDGET,
        },
        "rows": rows,
    }  # fmt: skip
    # What is set up at the first use of a compiler is no method's.
    measure(kvjax.Full(), config(1))
    for depth in depths:
        for name in names:
            jax.clear_caches()
            model = config(depth)
            row = {"method": name, "text": METHODS[name], "layers": depth}
            rows.append({**row, "functions": measure(method(name, model), model)})
            full = next((x for x in rows if (x["method"], x["layers"]) == ("full", depth)), None)
            if full is not None:
                rows[-1]["over_full"] = over_full(rows[-1], full)
            save(out, result)
            print(name, depth, rows[-1]["functions"], flush=True)
    return result


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 30])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out")
    args = parser.parse_args()
    if min(args.layers) < 1:
        parser.error("--layers must be at least 1")
    jax.config.update("jax_enable_compilation_cache", False)
    write(args.out, run(args.methods, args.layers, args.out))


if __name__ == "__main__":
    main()
