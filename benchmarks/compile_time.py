"""Seconds of tracing, lowering and compiling what `kvjax.generate` compiles for each method.

    python benchmarks/compile_time.py --layers 4 30 --out benchmarks/results/compile_time_cpu.json

A model of the bundled model's shape, with as many layers as are asked for and random weights, reads
256 padded tokens and makes 64 new ones, without a cache on disk. Intervals are 32 steps, so that
whatever a method does every few steps has its place in what is compiled. `prompt` is everything up
to the first token: a prompt is read by one function per kind of layer. `loop` is the decode loop,
`flush` what handles new tokens every few steps, once per kind of layer.

Wall-clock seconds depend on what else the machine does; `cpu_seconds`, of all threads of this
process, depend on it much less. `over_full` divides a method's CPU seconds by those of the full
cache at the same depth, `over_least` those of the prompt by those at the smallest depth.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from common import save, write

import kvjax
from kvjax.generation import reading, writing
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


class Timed(reading.Compiler):
    """Adds up CPU seconds by what is compiled."""

    found: dict[str, dict[str, float]]  # of the model that is measured

    def compile(self, what: str, *args: object) -> None:
        """As `Compiler.compile`, in a row of the table."""
        names = {"the decode loop": "loop", "the flush": "flush"}
        row = self.found.setdefault(names.get(what, "prompt"), {"seconds": 0, "cpu_seconds": 0})
        start, cpu = time.perf_counter(), time.process_time()
        super().compile(what, *args)
        row["seconds"] += time.perf_counter() - start
        row["cpu_seconds"] += time.process_time() - cpu


def measure(transform: kvjax.KVTransform, model: DecoderConfig) -> dict[str, dict[str, float]]:
    """What is compiled for a prompt and new tokens, by function: `"prompt"`, `"loop"`, `"flush"`.

    Args:
      transform: the method, not bound to layers yet.
      model: configuration of the decoder.
    """
    Timed.found = {}
    decoder = random_decoder(model)
    kvjax.generate(
        decoder, [[1] * PROMPT_TOKENS], transform=transform, max_new_tokens=NEW_TOKENS,
        end_tokens=(),
    )  # fmt: skip
    return {
        name: {kind: round(value, 3) for kind, value in row.items()}
        for name, row in Timed.found.items()
    }


def cpu_seconds(functions: dict[str, dict[str, float]], *names: str) -> float:
    """CPU seconds of the named functions, as far as the method has them."""
    return sum(functions[name]["cpu_seconds"] for name in names if name in functions)


def over_full(row: dict[str, object], full: dict[str, object]) -> dict[str, float]:
    """How many times the CPU seconds of the full cache a method takes."""
    own, other = row["functions"], full["functions"]
    return {
        part: round(cpu_seconds(own, part) / cpu_seconds(other, part), 2)
        for part in ("prompt", "loop")
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
            least = next(x for x in rows if x["method"] == name)
            prompts = [cpu_seconds(x["functions"], "prompt") for x in (rows[-1], least)]
            rows[-1]["over_least"] = round(prompts[0] / prompts[1], 2)
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
    writing.Compiler = Timed
    write(args.out, run(args.methods, args.layers, args.out))


if __name__ == "__main__":
    main()
