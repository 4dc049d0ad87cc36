"""Measures where the time of a decode step goes, and that of compiling, method by method.

    python benchmarks/step_parts.py --model FOLDER --out benchmarks/results/step_parts_smollm2.json

`steps`: the decode loop of `kvjax.generate` is run under JAX's profiler, which times every kernel.
The compiled program says from which functions a kernel comes, and so to which part of a step it
belongs (`PARTS`): `microseconds` are those of one step, of all layers together. `elsewhere` is what
is in no kernel, the time between them above all. `step` is the time of a step without the profiler,
and `traced_step` with it.

`compiling`: processor seconds of tracing, lowering and compiling all programs of a first call, the
median of `--rounds` calls without anything compiled before, and how many kernels the programs have:
`prompt` are the layers that read and compress a prompt, `loop` is the decode loop, `other` the
rest. `programs` counts the programs. They are of the bundled model and of `--model`. `elapsed` is
the time that a user waits for all of them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import jax
from common import Rows, parser_of

import kvjax
from kvjax.generation import decode_loop
from kvjax.generation import generate as generating
from kvjax.generation.compiler import Compiler
from kvjax.models import demo, from_pretrained, load_tokenizer

STEPPED = ("full", "snapkv", "h2o", "clusterkv", "quest", "quantize")
COMPILED = (*STEPPED, "pyramidkv", "spindlekv")
BUDGET, STEPS, COMPILED_TOKENS = 0.2, 32, 512
# Part of a step → functions, the innermost of which decides about a kernel.
PARTS = {
    "products": ("Linear.__call__", "Decoder.logits"),
    "norms": ("RMSNorm.__call__",),
    "rotation": ("Rope.rotate", "Tokens.rotated", "make_rope"),
    "append": ("append", "KVCache.unfold"),
    "select": ("select",),
    "attention": ("_attention", "attention"),
    "decide": ("decide_parts", "add_attention", "on_step"),
    "sampling": ("_Choice.tokens", "_with_tokens"),
    "rest of the layers": ("_run_block",),
}
NO_KERNEL = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional",
    "call", "after-all", "copy-start", "copy-done", "opt-barrier", "partition-id",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
      name: what it computes.
      seconds: of the processor for tracing, lowering and compiling.
      text: its HLO after optimisation.
    """

    name: str
    seconds: tuple[float, ...]
    text: str

    @property
    def group(self) -> str:
        """Which programs it is counted with."""
        if self.name.startswith(("the prompt pass", "the compression")):
            return "prompt"
        return "loop" if self.name == "the decode loop" else "other"

    def kernels(self) -> dict[str, str]:
        """Name of every kernel → the part of a step that it belongs to."""
        stacks, roots, kernels = _stacks(self.text), {}, {}
        fused = set(re.findall(r"fusion\(.*calls=%([\w.-]+)", self.text))
        fused |= set(re.findall(r"to_apply=%([\w.-]+)", self.text)) - set(
            re.findall(r" call\(.*to_apply=%([\w.-]+)", self.text)
        )
        computation = ""
        for line in self.text.splitlines():
            if header := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
                computation = header[1]
            instruction = re.match(r"\s+(?:ROOT )?%([\w.-]+) = .*? ([a-z][\w-]*)\(", line)
            if instruction is None:
                continue
            frame = re.search(r"stack_frame_id=(\d+)", line)
            stack = stacks.get(int(frame[1]), ()) if frame else ()
            if computation in fused:
                # Later instructions replace earlier ones: the root is the last.
                roots[computation] = stack or roots.get(computation, ())
            elif instruction[2] not in NO_KERNEL:
                called = re.search(r"(?:calls|to_apply)=%([\w.-]+)", line)
                stack = stack or roots.get(called[1] if called else "", ())
                part = _part(stack)
                if not stack:  # of products, which XLA rewrites: those with weights stay dots
                    if instruction[2] == "dot":
                        part = "products"
                    elif instruction[1].startswith("ynn_fusion"):
                        part = "attention"
                kernels[instruction[1]] = part
        return kernels


def _stacks(text: str) -> dict[int, tuple[str, ...]]:
    """Number of a stack frame in HLO → the names of its functions, the innermost first."""
    names = dict(re.findall(r'^(\d+) "(.*)"$', text.partition("\nFunctionNames")[2], re.M))
    places = dict(re.findall(r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+)", text, re.M))
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", text, re.M)
    stacks: dict[int, tuple[str, ...]] = {0: ()}
    for number, place, parent in frames:  # a caller stands before what it calls
        # The file counts a frame's callers from 1, where 1 is none.
        stacks[int(number)] = (names[places[place]], *stacks[int(parent) - 1])
    return stacks


def _part(stack: tuple[str, ...]) -> str:
    for function in stack:
        for part, functions in PARTS.items():
            if function in functions or function.rpartition(".")[2] in functions:
                return part
    return "rest of the loop"


class Recorder(Compiler):
    """A `Compiler` that times each of its three steps, and keeps what it has compiled."""

    programs: ClassVar[list[Program]] = []

    def compile_new(self, program: str, function: Any, *args: Any) -> None:
        """Compiles as the library's does."""
        times = [time.process_time()]
        traced = function.trace(*args)
        times.append(time.process_time())
        lowered = traced.lower()
        times.append(time.process_time())
        compiled = lowered.compile()
        times.append(time.process_time())
        seconds = tuple(after - before for before, after in itertools.pairwise(times))
        self.programs.append(Program(program, seconds, compiled.as_text()))


def step_row(model: Any, prompt: list[int], method: str) -> dict[str, Any]:
    """Times the parts of a decode step after a prompt."""
    Recorder.programs.clear()
    jax.clear_caches()
    context = kvjax.read(model, [prompt], transform=kvjax.parse(method, BUDGET), max_new=8 * STEPS)

    def seconds() -> float:
        options = {"context": context, "max_new_tokens": STEPS + 1, "end_tokens": ()}
        return kvjax.generate(model, None, **options).tpot_s  # pyright: ignore[reportReturnType]  # there are steps

    seconds()
    loop = next(each for each in Recorder.programs if each.group == "loop")
    step = statistics.median(seconds() for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        profile = jax.profiler.ProfileOptions()
        profile.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=profile):
            traced = seconds()
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    kernels, spent = loop.kernels(), collections.Counter()
    made = STEPS + 1  # a call that keeps its context makes one more step
    for line in (line for plane in data.planes for line in plane.lines):
        for event in line.events:
            if dict(event.stats).get("hlo_module") == "jit__decode" and event.name in kernels:
                spent[kernels[event.name]] += event.duration_ns / 1e3 / made
    microseconds = {part: round(spent[part]) for part in (*PARTS, "rest of the loop")}
    microseconds["elsewhere"] = round(1e6 * traced - spent.total())
    counts = collections.Counter(kernels.values())
    return {
        "step": round(1e6 * step),
        "traced_step": round(1e6 * traced),
        "microseconds": microseconds,
        "kernels": {part: counts[part] for part in microseconds if counts[part]},
    }


def compile_row(model: Any, prompt: list[int], method: str, rounds: int) -> dict[str, Any]:
    """Times what a first call compiles."""
    found: dict[str, list] = collections.defaultdict(list)
    elapsed, totals = [], []
    for _ in range(rounds):
        Recorder.programs.clear()
        jax.clear_caches()
        options = {"transform": kvjax.parse(method, BUDGET), "end_tokens": ()}
        result = kvjax.generate(model, [prompt], max_new_tokens=STEPS, **options)
        elapsed.append(result.compile_s)
        totals.append(sum(sum(each.seconds) for each in Recorder.programs))
        for each in Recorder.programs:
            found[each.group].append(each)
    row: dict[str, Any] = {}
    for group, programs in found.items():
        count = len(programs) // rounds
        # Every round has the same programs in the same order.
        medians = [
            [statistics.median(x.seconds[part] for x in programs[at::count]) for part in range(3)]
            for at in range(count)
        ]
        seconds = (round(sum(column), 2) for column in zip(*medians, strict=True))
        row[group] = dict(zip(("trace", "lower", "compile"), seconds, strict=True))
        row[group] |= {"kernels": sum(len(x.kernels()) for x in programs[:count])}
        row[group] |= {"programs": count}
    medians = (round(statistics.median(x), 2) for x in (totals, elapsed))
    return {**dict(zip(("seconds", "elapsed"), medians, strict=True)), **row}


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 7900])
    parser.add_argument("--methods", nargs="+", choices=COMPILED, default=list(COMPILED))
    parser.add_argument("--models", nargs="*", default=["bundled", "given"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # All frames of a kernel's stack: the functions of `PARTS` may stand far out.
    jax.config.update("jax_traceback_in_locations_limit", 50)
    decode_loop.Compiler = generating.Compiler = Recorder
    about = {"benchmark": "step_parts", "budget": BUDGET, "compiled_tokens": COMPILED_TOKENS}
    rows = Rows(args.out, about)
    folders = {"given": args.model, "bundled": demo.directory()}
    for name in args.models:
        model, tokenizer = from_pretrained(folders[name]), load_tokenizer(folders[name])
        prompt = tokenizer(demo.document().text).input_ids[:COMPILED_TOKENS]
        for method in args.methods:
            if not rows.has(table="compiling", model=name, method=method):
                row = compile_row(model, prompt, method, args.rounds)
                rows.add(table="compiling", model=name, method=method, **row)
    model, tokenizer = from_pretrained(args.model), load_tokenizer(args.model)
    text = tokenizer(demo.document().text).input_ids
    for length in args.lengths:
        prompt = (text * (1 + length // len(text)))[:length]
        for method in (each for each in STEPPED if each in args.methods):
            if not rows.has(table="steps", tokens=length, method=method):
                rows.add(
                    table="steps", tokens=length, method=method, **step_row(model, prompt, method)
                )


if __name__ == "__main__":
    main()
