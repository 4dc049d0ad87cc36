"""Speed of a model with compressed caches, compared with the bounds of the machine."""

from __future__ import annotations

import functools
import itertools
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
from kvjax.messages import brief
from kvjax.protocol import Full, KVTransform

from .floors import cache_room, prompt_flops
from .machine import Machine, measure_machine

_Run = tuple[Generation, int | None]  # the generation, and the bytes by which the process grew

FULL = "full"
PROMPT_TOKENS, NEW_TOKENS, BATCHES, ROUNDS = (2048,), (64,), (1,), 3


class _Setting(NamedTuple):
    """The sizes of a generation: its rows, and the tokens of each."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    room = property(lambda self: self[1:])

    def __str__(self) -> str:
        rows = f"{self.batch} row{'s' * (self.batch > 1)}"
        return f"{rows}, {self.prompt_tokens:,} + {self.new_tokens:,} tokens"

    def padded(self, model: FunctionalModel) -> _Setting:
        """Returns the sizes to which `generate` pads; settings that agree in them share code."""
        room = cache_room(model, self.prompt_tokens, self.new_tokens)
        return _Setting(self.batch, room["max_prompt"], room["max_new"])


@dataclass(frozen=True)
class Speed:
    """Costs of a method at a setting of rows and tokens; times are those of the fastest round.

    Args:
      method: name of the method in the argument `methods`.
      batch: number of rows.
      prompt_tokens, new_tokens: tokens of each row.
      ttft_s: seconds up to the first token of all rows.
      tpot_s: seconds per further token, which is a step for all rows.
      tokens_per_s: new tokens per second after the first, of all rows.
      end_to_end_s: seconds for the prompts and all new tokens, without compilation: in each round,
        `ttft_s + (new_tokens - 1) * tpot_s`.
      end_to_end_tokens_per_s: new tokens per second of `end_to_end_s`, of all rows.
      compile_s: seconds of tracing and compiling in the call before the first round. Settings whose
        sizes are padded to the same shapes share what is compiled, and these seconds.
      ttft_over_full, tpot_over_full, end_to_end_over_full: times divided by those of the full
        cache.
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

    Example:
      >>> from kvjax.evaluation import Speed
      >>> row = Speed(
      ...     method="snapkv", batch=4, prompt_tokens=2048, new_tokens=65, ttft_s=2.0,
      ...     tpot_s=0.03125, tokens_per_s=128.0, end_to_end_s=4.0, end_to_end_tokens_per_s=65.0,
      ...     compile_s=9.0, ttft_over_full=1.0, tpot_over_full=0.5, end_to_end_over_full=0.75,
      ...     step_bytes=10**8, step_floor_s=0.015625, ttft_floor_s=1.0, cache_bytes=10**7,
      ...     full_cache_bytes=10**8, resident_bytes=10**8, host_bytes=0, peak_bytes=None,
      ...     ttft_rounds_s=(2.0, 2.5), tpot_rounds_s=(0.03125, 0.0625))
      >>> row.step_floor_s / row.tpot_s  # share of the machine's bandwidth that steps reach
      0.5
    """

    method: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    end_to_end_s: float
    end_to_end_tokens_per_s: float
    compile_s: float
    ttft_over_full: float
    tpot_over_full: float
    end_to_end_over_full: float
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
      rows: all methods at the first setting, the full cache first, then those at the next. The
        settings are the products of batches, prompt tokens and new tokens, in the order given.

    Example:
      >>> from kvjax.evaluation import SpeedReport
      >>> from kvjax.evaluation.speed.machine import Machine
      >>> report = SpeedReport(Machine(bandwidth=2e10, products=1e12), weight_bytes=10**9, rows=())
      >>> report.weight_bytes / report.machine.bandwidth  # seconds in which weights are read
      0.05
    """

    machine: Machine
    weight_bytes: int
    rows: tuple[Speed, ...]


def measure_speed(
    model: LanguageModel | FunctionalModel,
    methods: Mapping[str, KVTransform],
    *,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    new_tokens: Sequence[int] = NEW_TOKENS,
    batches: Sequence[int] = BATCHES,
    rounds: int = ROUNDS,
    text: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    looked_up: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> SpeedReport:
    """Measures methods of compression against the full cache, and all of them against the machine.

    At each setting, every method reads the same prompts and writes the same number of tokens; end
    tokens do not stop it. In each round all methods run once, one after the other, so that a slow
    moment of the machine affects all of them. Times are those of the fastest round. Work that a
    method does every few hundred tokens counts only if as many are written.

    Seconds of compilation are those of the first call for each method and shape: a number of rows,
    and the prompt and new tokens as `kvjax.generate` pads them. The full cache comes first, and so
    compiles the code that all methods share too: the embedding, the logits, and the choice of a
    token. Compiled code is dropped (`jax.clear_caches`) before each shape. If JAX has a folder for
    compiled code, a call may find its code there and take less time.

    The floor of a step is the time to read its bytes at the machine's bandwidth. The floor of the
    first token is the time of its matrix products at the machine's rate (`prompt_flops`). The
    machine is measured in every round too. A model that fits into the processor's own caches can be
    faster than the first floor. A method that passes fewer tokens on to later layers (PyramidInfer)
    can be faster than the second.

    Args:
      model: as for `kvjax.generate`, on one device.
      methods: methods by any names; the full cache is always measured, as `"full"`.
      prompt_tokens, new_tokens: tokens of each row; at least two new ones.
      batches: numbers of rows. Every combination of these three lists is measured, duplicates once.
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
      ...     model, {"snapkv": kvjax.SnapKV(64)}, prompt_tokens=[128], new_tokens=[4, 8], rounds=1)
      >>> [(row.method, row.new_tokens, row.tpot_s > 0) for row in report.rows]
      [('full', 4, True), ('snapkv', 4, True), ('full', 8, True), ('snapkv', 8, True)]
    """
    prompt_tokens = _counts("prompt_tokens", prompt_tokens, 1)
    new_tokens = _counts("new_tokens", new_tokens, 2)
    batches = _counts("batches", batches, 1)
    check_count("rounds", rounds, 1)
    if methods.get(FULL, Full()) != Full():
        raise ValueError(f"the method named {FULL!r} must be kvjax.Full(), got {methods[FULL]}")
    functional, dtype = as_functional(model), default_dtype() if dtype is None else dtype
    if mesh_of(functional.params) is not None:
        raise ValueError("measure_speed measures one device, got a model on a mesh")
    methods = {FULL: Full(), **methods}
    prompts = {tokens: _prompts(functional, tokens, max(batches), text) for tokens in prompt_tokens}
    for transform in methods.values():
        layers = bind(transform, functional.num_layers, functional.windows)
        for rows in prompts.values():
            check_prompts(functional, rows, layers, max(new_tokens))
    sample = [prompts[max(prompt_tokens)][0][:CALIBRATION_TOKENS]]
    methods = {name: calibrated(tx, functional, sample) for name, tx in methods.items()}
    settings = [_Setting(*sizes) for sizes in itertools.product(batches, prompt_tokens, new_tokens)]
    of_shape: dict[_Setting, list[_Setting]] = {}
    for setting in settings:
        of_shape.setdefault(setting.padded(functional), []).append(setting)
    plans = {
        (room, name): plan(
            functional, tx, max_prompt=room[0], max_new=room[1], dtype=dtype, looked_up=looked_up
        )
        for room in dict.fromkeys(shape.room for shape in of_shape)
        for name, tx in methods.items()
    }
    report = on_progress or (lambda done, total, what: None)
    done, total = 0, len(methods) * len(settings) * (1 + rounds)
    machines: list[Machine] = []
    runs: dict[tuple[_Setting, str], list[_Run]] = {}
    for alike in of_shape.values():
        jax.clear_caches()
        # One more round comes first, in which everything is compiled.
        for _ in range(1 + rounds):
            report(done, total, "the machine")
            machines.append(measure_machine(dtype))
            for setting, (name, tx) in itertools.product(alike, methods.items()):
                report(done, total, f"{name} · {setting}")
                run = functools.partial(
                    generate, functional, prompts[setting.prompt_tokens][: setting.batch],
                    transform=tx, max_new_tokens=setting.new_tokens, end_tokens=(), dtype=dtype,
                )  # fmt: skip
                runs.setdefault((setting, name), []).append(with_peak(run))
                done += 1
    report(total, total, "done")
    # The best rates of all rounds, as methods have the times of their best rounds.
    machine = Machine(*map(max, zip(*machines, strict=True)))
    flops = {tokens: prompt_flops(functional, tokens) for tokens in prompt_tokens}

    def row(setting: _Setting, name: str) -> Speed:
        shape = setting.padded(functional)
        compiling, _ = runs[of_shape[shape][0], name][0]
        return _speed(
            name, setting, [runs[setting, method][1:] for method in (name, FULL)],
            compiling.compile_s, plans[shape.room, name], machine, flops[setting.prompt_tokens],
        )  # fmt: skip

    rows = tuple(itertools.starmap(row, itertools.product(settings, methods)))
    return SpeedReport(machine, next(iter(plans.values())).weights, rows)


def _counts(name: str, counts: Sequence[int], minimum: int) -> tuple[int, ...]:
    """Returns the counts without duplicates; raises unless each is at least `minimum`."""
    if not isinstance(counts, Sequence) or isinstance(counts, str):
        raise TypeError(f"{name} must be a list of numbers, got {brief(counts)}")
    if not counts:
        raise ValueError(f"{name} must have at least one number, got none")
    for count in counts:
        check_count(f"a number of {name}", count, minimum)
    return tuple(dict.fromkeys(counts))


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
    setting: _Setting,
    rounds_of_both: Sequence[Sequence[_Run]],
    compile_s: float,
    planned: Plan,
    machine: Machine,
    flops: int | None,
) -> Speed:
    """Computes a method's figures from its rounds, those of the full cache, and the machine."""
    rounds, full_rounds = rounds_of_both
    batch, prompt_tokens, new_tokens = setting
    times = _seconds(rounds, new_tokens)
    ttft, tpot, end_to_end = map(min, times)
    full_ttft, full_tpot, full_end_to_end = map(min, _seconds(full_rounds, new_tokens))
    growths = [growth for _, growth in rounds if growth is not None]
    step_bytes, result = planned.step_bytes(batch), rounds[0][0]
    return Speed(
        method=name,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=batch / tpot,
        end_to_end_s=end_to_end,
        end_to_end_tokens_per_s=batch * new_tokens / end_to_end,
        compile_s=compile_s,
        ttft_over_full=ttft / full_ttft,
        tpot_over_full=tpot / full_tpot,
        end_to_end_over_full=end_to_end / full_end_to_end,
        step_bytes=step_bytes,
        step_floor_s=step_bytes / machine.bandwidth,
        ttft_floor_s=None if flops is None else batch * flops / machine.products,
        cache_bytes=result.cache_bytes,
        full_cache_bytes=result.full_cache_bytes,
        resident_bytes=planned.held(batch),
        host_bytes=round(planned.caches(batch).host),
        peak_bytes=planned.weights + min(growths) if growths else None,
        ttft_rounds_s=times[0],
        tpot_rounds_s=times[1],
    )


def _seconds(rounds: Sequence[_Run], new_tokens: int) -> tuple[tuple[float, ...], ...]:
    """Returns the seconds of every round: to the first token, per further token, and in all."""
    first = tuple(run.ttft_s for run, _ in rounds)
    further: tuple[float, ...] = tuple(run.tpot_s for run, _ in rounds)  # pyright: ignore[reportAssignmentType]  # a run writes two tokens or more
    steps = new_tokens - 1
    whole = tuple(a + steps * b for a, b in zip(first, further, strict=True))
    return first, further, whole
