"""Times of fetching a decode step's selected rows from host memory, by what stays on the device.

    python benchmarks/host_transfers.py --out benchmarks/results/host_transfers_DEVICE.json

A layer's cache is in host memory behind ClusterKV, as it is and in 8 and 4 bits. Steps select runs
of slots as clusters are: 56 % of a step's runs are those of the step before and 68 % those of one
of the two before, as on the bundled model (`recall_rate.json`). Each step runs `Offload.select`
alone: it finds what the device holds, fetches the rest, and decodes it.

- `step_ms`: of one step, the fastest of the rounds; `gather`: the same lists out of the device's
  memory, without anything to find or keep.
- `fetched_bytes`: that cross in a step; `hit_rate`: as in `kvjax.evaluation`.
- `copy_bytes_per_s`: of a store as a whole, from host memory to the device.
- `one_memory`: host memory and the device's are the same, as on a CPU: then nothing crosses, and
  the times are those of the gather.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import parser_of, write

import kvjax
from kvjax.attention.init_cache import default_dtype
from kvjax.attention.layer import layer_caches
from kvjax.cache.payload import take_slots
from kvjax.protocol import View
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from kvjax.storage.offload.transform import recall_statistics

SHARES = (0.56, 0.68)  # of a step's runs that the last step, and the last two steps, had
RECENT = (0, 1, 2)
FORMS = {
    "as it is": None,
    "8 bits": kvjax.Quantize(8),
    "4 bits": kvjax.Quantize(4, key_axis="token"),
}


def selections(lists: int, slots: int, budget: int, run: int, steps: int) -> np.ndarray:
    """Slots that each step selects, `[steps, lists, budget]`: runs of `run` slots."""
    rng = np.random.default_rng(0)
    runs, number = budget // run, slots // run
    chosen = np.empty((steps, lists, runs), np.int32)
    for entry in range(lists):
        last, before = (set(rng.choice(number, runs, replace=False)) for _ in range(2))
        for step in range(steps):
            stay = set(rng.permutation(sorted(last))[: round(SHARES[0] * runs)])
            again = rng.permutation(sorted(before - last))
            now = stay | set(again[: round((SHARES[1] - SHARES[0]) * runs)])
            others = rng.permutation(sorted(set(range(number)) - last - before - now))
            now |= set(others[: runs - len(now)])
            chosen[step, entry] = sorted(now)
            last, before = now, last
    return (chosen[..., None] * run + np.arange(run)).reshape(steps, lists, -1).astype(np.int32)


def fastest(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest round; one more comes first, which compiles."""
    times = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(args: argparse.Namespace, form: Any, recent: int, lists: np.ndarray) -> dict[str, Any]:
    """Figures of a stored form with the rows of so many steps on the device."""
    clusters = kvjax.ClusterKV(args.budget, dense_layers=())
    offload = kvjax.Offload(recent_steps=recent)
    before = () if form is None else (form,)
    (cache,) = layer_caches(kvjax.init_cache(
        kvjax.chain(*before, clusters, offload), batch=1, kv_heads=args.kv_heads,
        head_dim=args.head_dim, max_prompt=args.tokens, max_new=1, dtype=args.dtype,
    ))  # fmt: skip
    kv, token = cache.kv, jnp.zeros((1, args.kv_heads, 1), jnp.int32)

    @jax.jit
    def select(kv, state, index):
        view, state = offload.select(View(kv, token, index), state, None)  # pyright: ignore[reportArgumentType]  # no query is looked at
        return view.rows, state

    index = [jnp.asarray(each)[None] for each in lists]
    done: list[Any] = []

    def run() -> Any:
        state, rows = cache.state[-1], None
        for each in index:
            rows, state = select(kv, state, each)
        done.append(state)
        return rows, state

    seconds = fastest(run, args.rounds) / len(index)
    statistics = recall_statistics(done[-1])
    assert statistics is not None
    return {
        "row_bytes": done[-1].row_bytes, "step_ms": 1e3 * seconds,
        "fetched_bytes": statistics.fetched_bytes_per_step, "hit_rate": statistics.hit_rate,
        "fetched_bytes_per_s": statistics.fetched_bytes_per_step / seconds,
    }  # fmt: skip


def gather_ms(args: argparse.Namespace, lists: np.ndarray) -> float:
    """Milliseconds of a step that takes the same rows out of the device's memory."""
    shape = 1, args.kv_heads, args.tokens, args.head_dim
    rows = [jnp.zeros(shape, args.dtype) for _ in range(2)]
    take = jax.jit(lambda rows, index: [take_slots(x, index) for x in rows])
    index = [jnp.asarray(each)[None] for each in lists]
    return 1e3 * fastest(lambda: [take(rows, each) for each in index], args.rounds) / len(index)


def copy_rate(args: argparse.Namespace) -> float:
    """Bytes per second of a store that is copied to the device as a whole."""
    shape = 1, args.kv_heads, args.tokens, args.head_dim
    store = jax.device_put(jnp.ones(shape, args.dtype), jax.memory.Space.Host)
    copy = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1)
    return store.nbytes / fastest(lambda: copy(store), args.rounds)


def main() -> None:
    """Measures every form with 0, 1 and 2 recent steps."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="in the cache")
    parser.add_argument("--budget", type=int, default=1024, help="slots of a list")
    parser.add_argument("--run", type=int, default=64, help="slots of a run")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default=jnp.dtype(default_dtype()).name)
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    if HOST_MEMORY not in memory_kinds():
        parser.error(f"this platform has no {HOST_MEMORY} memory, but {', '.join(memory_kinds())}")
    lists = selections(args.kv_heads, args.tokens, args.budget, args.run, args.steps)
    rows = [
        {"form": name, "recent_steps": recent, **measure(args, form, recent, lists)}
        for name, form in FORMS.items()
        for recent in RECENT
    ]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {
        **settings, "memory_kinds": memory_kinds(), "one_memory": jax.default_backend() == "cpu",
        "copy_bytes_per_s": copy_rate(args), "gather": {"step_ms": gather_ms(args, lists)},
        "rows": rows,
    })  # fmt: skip


if __name__ == "__main__":
    main()
