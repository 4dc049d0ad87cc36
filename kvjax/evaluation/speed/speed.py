"""Speed of a model with compressed caches, compared with the bounds of the machine."""

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

_Run = tuple[Generation, int | None]  # the generation, and the bytes by which the process grew

FULL = "full"
PROMPT_TOKENS, NEW_TOKENS, BATCHES, ROUNDS = 2048, 64, (1,), 3


@dataclass(frozen=True)
class Speed:
    """Costs of a method with a number of rows; times are those of the fastest round.

    Args:
      method: name of the method in the argument `methods`.
      batch: number of rows.
      ttft_s: seconds up to the first token of all rows.
      tpot_s: seconds per further token, which is a step for all rows.
      tokens_per_s: new tokens per second after the first, of all rows.
      compile_s: seconds of tracing and compiling in the call before the first round.
      ttft_over_full, tpot_over_full: times divided by those of the full cache.
      step_bytes: minimum bytes that a step reads, as `kvjax.generation.planning` counts them: the
        weights, and the arrays of the caches, free slots included. A cache from which slots are
        selected counts with the selected slots.
      step_floor_s: seconds that reading `step_bytes` takes at the machine's bandwidth.
      ttft_floor_s: seconds that the matrix products of a prompt pass with the full cache take at
        the machine's rate; None for a model that does not show its parts
        (`kvjax.models.LayeredModel`).
      cache_bytes: bytes of all cache arrays, index structures and host memory included.
      full_cache_bytes: bytes of the full cache.
      resident_bytes: weights and caches in the device's memory, which stay from step to step.
      host_bytes: bytes of the caches in host memory.
      peak_bytes: the weights, and the most further memory that the process needed while it read and
        wrote, in the round that needed least; None unless the device is a CPU and the system is
        Linux.
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
    ttft_rounds_s: tuple[float, ...]
    tpot_rounds_s: tuple[float, ...]


class SpeedReport(NamedTuple):
    """Result of `measure_speed`.

    Args:
      machine: best rates of the machine, measured in every round.
      weight_bytes: bytes of the model's weights.
      rows: all methods of the first batch, the full cache first, then those of the next batch.
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
    """Measures methods of compression against the full cache, and all of them against the machine.

    Every method reads the same prompts and writes the same number of tokens; end tokens do not stop
    it. In each round all methods run once, one after the other, so that a slow moment of the
    machine affects all of them. Times are those of the fastest round. Work that a method does every
    few hundred tokens counts only if as many are written.

    Seconds of compilation are those of the first call for each method and batch. The full cache
    comes first, and so compiles the code that all methods share too: the embedding, the logits, and
    the choice of a token. Compiled code is dropped (`jax.clear_caches`) before each batch. If JAX
    has a folder for compiled code, a call may find its code there and take less time.

    The floor of a step is the time to read its bytes at the machine's bandwidth. The floor of the
    first token is the time of its matrix products at the machine's rate (`prompt_flops`). The
    machine is measured in every round too. A model that fits into the processor's own caches can be
    faster than the first floor. A method that passes fewer tokens on to later layers (PyramidInfer)
    can be faster than the second.

    Args:
      model: as for `kvjax.generate`, on one device.
      methods: methods by any names; the full cache is always measured, as `"full"`.
      prompt_tokens, new_tokens: tokens of each row; at least two new ones.
      batches: numbers of rows; duplicates are measured once.
      rounds: how often everything is measured.
      text: token ids that prompts are cut from, one after the other. After its end, cutting starts
        again from the beginning. None: random ids of the vocabulary.
      dtype: dtype of keys and values; see `init_cache`.
      looked_up: as in `kvjax.generation.planning.plan`.
      on_progress: called before each run and at the end with the number of finished runs, the
        number of all runs, and a name for the next run.

    Raises:
      TypeError, ValueError: raised before anything is computed, if a count is below its minimum,
        the text is empty, a method named `"full"` is another one, the model is on a mesh, or
        `kvjax.generate` raises for these prompts.

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
    layers = functional.num_layers, functional.windows
    for transform in methods.values():
        check_prompts(functional, prompts, bind(transform, *layers), new_tokens)
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
        # One more round comes first, in which everything is compiled.
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
    # The best rates of all rounds, as methods have the times of their best rounds.
    machine = Machine(*map(max, zip(*machines, strict=True)))
    flops = prompt_flops(functional, prompt_tokens)
    rows = tuple(
        _speed(name, batch, method_runs, runs[batch, FULL], plans[name], machine, flops)
        for (batch, name), method_runs in runs.items()
    )
    return SpeedReport(machine, plans[FULL].weights, rows)


def _prompts(
    model: FunctionalModel, tokens: int, rows: int, text: Sequence[int] | None
) -> list[list[int]]:
    """Cuts `rows` prompts of `tokens` tokens from the text, or draws them."""
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
    """Computes a method's figures from its runs, those of the full cache, and the machine."""
    (result, _), *rounds = runs  # the first run compiles, and its times do not count
    ttfts, tpots = _seconds(rounds)
    ttft, tpot = min(ttfts), min(tpots)
    full_ttft, full_tpot = map(min, _seconds(full_runs[1:]))
    growths = [growth for _, growth in rounds if growth is not None]
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
        peak_bytes=planned.weights + min(growths) if growths else None,
        ttft_rounds_s=ttfts,
        tpot_rounds_s=tpots,
    )


def _seconds(rounds: Sequence[_Run]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the seconds of every round up to the first token, and per further token."""
    return tuple(run.ttft_s for run, _ in rounds), tuple(run.tpot_s for run, _ in rounds)
