"""Seconds and host memory that loading a sharded checkpoint takes, in a process of its own.

    python benchmarks/loading.py --out benchmarks/results/loading_cpu.json

A synthetic checkpoint of TinyLlama's shape (bfloat16, random numbers, several files) is written to
a temporary folder and loaded `--rounds` times, in a process each: as it is stored, in float32, and
divided among eight virtual devices. A tiny model is loaded first, so that what is imported and
compiled once is there before. Another process looks at the first one's anonymous memory (`RssAnon`,
Linux; mapped files are not counted) every millisecond. `beyond` is the highest that it saw, less
what was there before and less the bytes of the parameters; `over_largest` divides it by the largest
tensor in the dtype that is loaded. Rows have medians, `all_seconds` and `all_beyond` each process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_layers": 22,
    "query_heads": 32, "kv_heads": 4, "head_dim": 64, "max_positions": 2048,
}  # fmt: skip
SMALL = {**SHAPE, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1}
SHARD_BYTES = 500 * 10**6
CASES = {
    "bfloat16": ("bfloat16", 1),
    "float32": ("float32", 1),
    "bfloat16, 8 devices": ("bfloat16", 8),
    "float32, 8 devices": ("float32", 8),
}


def anonymous(process: int | str) -> int:
    """Bytes of resident memory of a process that no file stands behind."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1))


def write_checkpoint(folder: Path, shape: dict[str, int]) -> None:
    """A model of random numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **shape, num_hidden_layers=shape["num_layers"], num_attention_heads=shape["query_heads"],
        num_key_value_heads=shape["kv_heads"], max_position_embeddings=shape["max_positions"],
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)


def load(folder: str, small: str, dtype: str, devices: int) -> None:
    """Loads, with a line to the watching process before and JSON after."""
    import jax
    import numpy as np
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvjax.models import from_pretrained

    mesh = Mesh(np.array(jax.devices()), ("tensor",))

    def divided(name: str, shape: tuple[int, ...]) -> NamedSharding:
        spec = PartitionSpec(None, "tensor") if len(shape) == 2 else PartitionSpec()
        return NamedSharding(mesh, spec)

    sharding = divided if devices > 1 else None
    from_pretrained(small, dtype, sharding)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    model = from_pretrained(folder, dtype, sharding)
    seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(nnx.state(model))
    placed = [shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards]
    row = {
        "seconds": seconds,
        "parameters": sum(placed),
        "largest": max(leaf.nbytes for leaf in leaves),
        "devices": len(jax.devices()),
    }
    print(json.dumps(row), flush=True)


def watch(line: list[str], devices: int) -> dict[str, float]:
    """Runs a process that loads, and looks at its memory while it does."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(line)} did not load the small model")
        before = highest = anonymous(process.pid)
        os.set_blocking(process.stdout.fileno(), False)
        process.stdin.write("\n")
        process.stdin.flush()
        while not (text := process.stdout.readline()):
            highest = max(highest, anonymous(process.pid))
            time.sleep(0.001)
        process.stdin.close()
    row = json.loads(text)
    return row | {"beyond": highest - before - row["parameters"]}


def medians(folder: Path, small: Path, case: str, rounds: int) -> dict[str, object]:
    """The row of a case."""
    dtype, devices = CASES[case]
    line = [sys.executable, __file__, "--worker", str(folder), str(small), dtype, str(devices)]
    rows = [watch(line, devices) for _ in range(rounds)]
    beyond = statistics.median(row["beyond"] for row in rows)
    return {
        "case": case,
        "seconds": round(statistics.median(row["seconds"] for row in rows), 2),
        "beyond": beyond,
        "over_largest": round(beyond / rows[0]["largest"], 3),
        "parameters": rows[0]["parameters"],
        "largest": rows[0]["largest"],
        "devices": rows[0]["devices"],
        "all_seconds": [round(row["seconds"], 2) for row in rows],
        "all_beyond": [row["beyond"] for row in rows],
    }


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker is not None:
        folder, small, dtype, devices = args.worker
        load(folder, small, dtype, int(devices))
        return
    if args.write is not None:
        for folder, shape in zip(args.write, (SHAPE, SMALL), strict=True):
            write_checkpoint(Path(folder), shape)
        return
    from common import write

    with tempfile.TemporaryDirectory() as place:
        folder, small = Path(place) / "model", Path(place) / "small"
        line = [sys.executable, __file__, "--write", str(folder), str(small)]
        subprocess.run(line, check=True)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        rows = []
        for case in CASES:
            rows.append(medians(folder, small, case, args.rounds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shape = {**SHAPE, "files": len(sizes), "bytes": sum(sizes)}
    write(args.out, {"benchmark": "loading", "shape": shape, "rows": rows})


if __name__ == "__main__":
    main()
