"""How fast a model reads and writes through compressed caches, beside what the machine allows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from kvjax.attention.init_cache import default_dtype
from kvjax.checks import check_count
from kvjax.compose.bind import bind
from kvjax.devices import mesh_of
from kvjax.evaluation.memory import with_peak
from kvjax.generation.calibration import CALIBRATION_TOKENS, calibrated
from kvjax.generation.decode_loop import Generation
from kvjax.generation.generate import generate
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.planning import Plan, plan
from kvjax.generation.prompt_checks import check_prompts
from kvjax.protocol import Full, KVTransform

from .floors import cache_room, prompt_flops
from .machine import Machine, measure_machine

_Run = tuple[Generation, int | None]  # what was written, and by how much the process grew

FULL = "full"
PROMPT_TOKENS, NEW_TOKENS, BATCHES, ROUNDS = 2048, 64, (1,), 3


@dataclass(frozen=True)
class Speed:
    """What a method costs with so many rows; times are those of the fastest round.

    Args:
      method: its name among those that were given.
      batch: rows.
      ttft_s: seconds up to the first token of all rows.
      tpot_s: seconds per further token, which is a step for all rows.
      tokens_per_s: new tokens per second after the first, of all rows.
      compile_s: seconds of tracing and compiling in the call before the first round.
      ttft_over_full, tpot_over_full: times divided by those of the full cache.
      step_bytes: what a step reads at least, as `kvjax.generation.planning` counts it: weights, and
        the arrays of the caches with their free slots, of a cache from which slots are selected as
        many as that.
      step_floor_s: seconds that this takes at the machine's bandwidth.
      ttft_floor_s: seconds that the products of a prompt pass with the full cache take at the
        machine's rate; None for a model that does not show its parts (`kvjax.LayeredModel`).
      cache_bytes: of all cache arrays, index structures and host memory included.
      full_cache_bytes: of the full cache.
      resident_bytes: weights and caches in the device's memory, which stay from step to step.
      host_bytes: of the caches in host memory.
      peak_bytes: weights and what the process needed beside them at most while it read and wrote,
        in the round that needed least; None unless the device is a CPU and the system is Linux.
      dropped: as in `kvjax.Generation`.
      ttft_rounds_s, tpot_rounds_s: times of every round.
    """

    method: str
    batch: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    compile_s: float
    ttft_over_full: float
    tpot_over_full: float
    step_bytes: int
    step_floor_s: float
    ttft_floor_s: float | None
    cache_bytes: int
    full_cache_bytes: int
    resident_bytes: int
    host_bytes: int
    peak_bytes: int | None
    dropped: int
    ttft_rounds_s: tuple[float, ...]
    tpot_rounds_s: tuple[float, ...]


class SpeedReport(NamedTuple):
    """What `measure_speed` returns.

    Args:
      machine: what the machine does at best, measured in every round.
      weight_bytes: of the model.
      rows: of each batch in turn all methods, the full cache first.
    """

    machine: Machine
    weight_bytes: int
    rows: tuple[Speed, ...]


def measure_speed(
    model: LanguageModel | FunctionalModel,
    methods: Mapping[str, KVTransform],
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    batches: Sequence[int] = BATCHES,
    rounds: int = ROUNDS,
    text: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    looked_up: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> SpeedReport:
    """Measures methods of compression against the full cache, and both against the machine.

    Every method reads the same prompts and writes as many tokens, end tokens or not. In each round
    all methods run once, one after the other, so that a slow moment of the machine hits all of them
    alike; times are those of the fastest round. What a method does every few hundred tokens counts
    if so many are written.

    Seconds of compilation are those of a first call for each method and batch. The full cache comes
    first, and so compiles what all methods share too: the embedding, the logits, and the choice of
    a token. Compiled code is dropped (`jax.clear_caches`) before each batch. Where JAX is given a
    folder for compiled code, they are those of a process that may find it there.

    The floor of a step is what it must read, at the machine's bandwidth, and that of the first
    token the products that it takes, at the machine's rate (`prompt_flops`); the machine is
    measured in every round too. A model that the processor's own caches hold can be faster than the
    first, and a method that passes fewer tokens on to later layers (PyramidInfer) than the second.

    Args:
      model: as for `kvjax.generate`, on one device.
      methods: by any names; the full cache is measured as `"full"`, given or not.
      prompt_tokens, new_tokens: of each row; at least two new ones.
      batches: numbers of rows, each of which is measured once.
      rounds: how often everything is measured.
      text: token ids that prompts are cut from, one behind the other, and from the beginning again
        where it ends; None: ids drawn from the vocabulary.
      dtype: of keys and values; see `init_cache`.
      looked_up: as in `kvjax.generation.planning.plan`.
      on_progress: called before each run and at the end with the number of runs that are done, of
        all runs, and a name for the next.

    Raises:
      TypeError, ValueError: before anything is computed: a count below its least, an empty text, a
        method named `"full"` that is not, a model on a mesh, what `kvjax.generate` raises for these
        prompts.

    Example:
      >>> import kvjax
      >>> from kvjax.evaluation import measure_speed
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> report = measure_speed(
      ...     model, {"snapkv": kvjax.SnapKV(64)}, prompt_tokens=128, new_tokens=8, rounds=1)
      >>> [(row.method, row.batch, row.tpot_s > 0) for row in report.rows]
      [('full', 1, True), ('snapkv', 1, True)]
    """
    check_count("prompt_tokens", prompt_tokens, 1)
    check_count("new_tokens", new_tokens, 2)
    check_count("rounds", rounds, 1)
    if not len(batches):
        raise ValueError("batches must have at least one number of rows, got none")
    for batch in batches:
        check_count("batch", batch, 1)
    if methods.get(FULL, Full()) != Full():
        raise ValueError(f"the method named {FULL!r} must be kvjax.Full(), got {methods[FULL]}")
    functional, dtype = as_functional(model), default_dtype() if dtype is None else dtype
    if mesh_of(functional.params) is not None:
        raise ValueError("measure_speed measures one device, got a model on a mesh")
    methods, batches = {FULL: Full(), **methods}, tuple(dict.fromkeys(batches))
    prompts = _prompts(functional, prompt_tokens, max(batches), text)
    of_model = functional.num_layers, functional.windows
    for transform in methods.values():
        check_prompts(functional, prompts, bind(transform, *of_model), new_tokens)
    sample = [prompts[0][:CALIBRATION_TOKENS]]
    methods = {name: calibrated(tx, functional, sample) for name, tx in methods.items()}
    room = cache_room(functional, prompt_tokens, new_tokens)
    plans = {
        name: plan(functional, tx, dtype=dtype, looked_up=looked_up, **room)
        for name, tx in methods.items()
    }
    report = on_progress or (lambda done, total, what: None)
    done, total = 0, len(methods) * len(batches) * (1 + rounds)
    machines: list[Machine] = []
    runs: dict[tuple[int, str], list[_Run]] = {}
    for batch in batches:
        jax.clear_caches()
        for _ in range(1 + rounds):
            report(done, total, "the machine")
            machines.append(measure_machine(dtype))
            for name, tx in methods.items():
                report(done, total, f"{name} · {batch} row{'s' * (batch > 1)}")
                run = functools.partial(
                    generate, functional, prompts[:batch], transform=tx,
                    max_new_tokens=new_tokens, end_tokens=(), dtype=dtype,
                )  # fmt: skip
                runs.setdefault((batch, name), []).append(with_peak(run))
                done += 1
    report(total, total, "done")
    machine = Machine(*map(max, zip(*machines, strict=True)))
    flops = prompt_flops(functional, prompt_tokens)
    rows = tuple(
        _speed(name, batch, of_method, runs[batch, FULL], plans[name], machine, flops)
        for (batch, name), of_method in runs.items()
    )
    return SpeedReport(machine, plans[FULL].weights, rows)


def _prompts(
    model: FunctionalModel, tokens: int, rows: int, text: Sequence[int] | None
) -> list[list[int]]:
    """As many rows of so many tokens."""
    if text is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, model.vocab_size, (rows, tokens)).tolist()
    if not len(text):
        raise ValueError("text must have at least one token, got none")
    places = np.arange(rows * tokens) % len(text)
    return np.asarray(text)[places].reshape(rows, tokens).tolist()


def _speed(
    name: str,
    batch: int,
    runs: Sequence[_Run],
    full_runs: Sequence[_Run],
    planned: Plan,
    machine: Machine,
    flops: int | None,
) -> Speed:
    """A method's figures from its runs, those of the full cache, and what bounds them."""
    (result, _), *rounds = runs
    ttfts, tpots = _seconds(rounds)
    ttft, tpot = min(ttfts), min(tpots)
    full_ttft, full_tpot = map(min, _seconds(full_runs[1:]))
    grown = [grown for _, grown in rounds if grown is not None]
    step_bytes = planned.step_bytes(batch)
    return Speed(
        method=name,
        batch=batch,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=batch / tpot,
        compile_s=result.compile_s,
        ttft_over_full=ttft / full_ttft,
        tpot_over_full=tpot / full_tpot,
        step_bytes=step_bytes,
        step_floor_s=step_bytes / machine.bandwidth,
        ttft_floor_s=None if flops is None else batch * flops / machine.products,
        cache_bytes=result.cache_bytes,
        full_cache_bytes=result.full_cache_bytes,
        resident_bytes=planned.held(batch),
        host_bytes=round(planned.caches(batch).host),
        peak_bytes=planned.weights + min(grown) if grown else None,
        dropped=result.dropped,
        ttft_rounds_s=ttfts,
        tpot_rounds_s=tpots,
    )


def _seconds(rounds: Sequence[_Run]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of every round: up to the first token, and per further one."""
    return tuple(run.ttft_s for run, _ in rounds), tuple(run.tpot_s for run, _ in rounds)
