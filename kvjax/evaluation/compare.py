"""Runs a comparison: every cell of a grid, each kept as soon as it is finished."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.generation.calibration import calibrated
from kvjax.generation.continuation import decoder, new_text
from kvjax.generation.generate import generate
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.protocol import KVTransform

from . import files
from .fidelity import measure_fidelity
from .grid import Cell, Grid
from .material import WINDOWS, Material
from .perplexity import continuation_nll
from .results import Results
from .retrieval import is_right

OnProgress = Callable[[int, int, str], None]

_COMPILING = 30_000  # cost of compiling a cell's code, as tokens read in that time, roughly
_CLEAR_AFTER = 16  # groups whose compiled code is kept at a time


def compare(
    model: LanguageModel | FunctionalModel,
    tokenizer: Any,
    text: str,
    *,
    end_tokens: Sequence[int] | None = None,
    name: str = "",
    out: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **grid: Any,
) -> Results:
    """Compares methods of compression by what a model still answers.

    Per task, method, budget, length and depth: in how many cases the first number of the greedy
    continuation is the answer. The question stands at the end of the prompt and is compressed with
    it. Per method, budget and length: nats per token of held-out text (8 windows of `length`
    tokens, of which the last 128, or a quarter, go through the compressed cache), bytes, times, and
    recall and attention error while the answer is given (`measure_fidelity`). Cases run one at a
    time, so times are those of one row. Every method sees the same cases and windows.

    A method that needs a calibration (InfiniGen) gets it from the first tokens of the text.

    A cell that raises is recorded as failed and the others go on. Compiled code is dropped
    (`jax.clear_caches`) now and then, so that large grids do not run out of memory maps.

    Args:
      model: as for `kvjax.generate`.
      tokenizer: of the model, from `transformers`.
      text: filler of the retrieval tasks and text of the perplexity; the model should not know it.
      end_tokens: a continuation ends at one of them; the tokenizer's by default.
      name: of the model, for the files.
      out: folder for `results.json`, `results.csv`, `timings.json` and pictures. Finished cells are
        kept in it: after an interruption the same call goes on where it stopped. None writes
        nothing.
      on_progress: called before every cell and at the end with the work done, the whole work (both
        in tokens to read, roughly), and a name for what is measured next.
      grid: methods, budgets, lengths, depths, tasks, cases, seed; see `Grid.of`.

    Raises:
      TypeError, ValueError: before anything is computed or written: what `Grid.of` and
        `kvjax.generate` raise, a text too short, a folder that cannot be written to or that holds
        a comparison with other settings.

    Example:
      >>> from kvjax.evaluation import compare
      >>> from kvjax.models import demo, from_pretrained, load_tokenizer
      >>> folder = demo.directory()
      >>> results = compare(
      ...     from_pretrained(folder), load_tokenizer(folder), demo.held_out_text(),
      ...     methods=["snapkv"], budgets=[0.2], lengths=[256], depths=[0.5], tasks=["needle"],
      ...     cases=1)
      >>> [(row.method, row.budget) for row in results.averages()]
      [('full', None), ('snapkv', 0.2)]
    """
    return run(
        Material(Grid.of(**grid), tokenizer, text), model, end_tokens=end_tokens, name=name,
        out=out, on_progress=on_progress,
    )  # fmt: skip


def run(
    material: Material,
    model: LanguageModel | FunctionalModel,
    *,
    end_tokens: Sequence[int] | None = None,
    name: str = "",
    out: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Results:
    """`compare` for a grid whose prompts have been made; arguments as there."""
    grid, functional = material.grid, as_functional(model)
    grid.check_model(functional.num_layers)
    material.check(functional)
    if end_tokens is None:
        end = material.tokenizer.eos_token_id
        end_tokens = () if end is None else (end,)
    measure = _Measure(material, functional, tuple(end_tokens))
    settings = {
        "model": name,
        "weights": _fingerprint(functional.params),
        "text": material.fingerprint(),
        "end_tokens": [int(token) for token in end_tokens],
        "new_tokens": material.new_tokens,
        **grid.settings(),
    }
    journal = None if out is None else files.Journal(Path(out), settings)
    results = Results(settings, _records(measure, journal, on_progress))
    if out is not None:
        # Imported here: `kvjax.evaluation` takes less time to import without matplotlib.
        from . import plots

        files.write(results, Path(out))
        plots.draw(results, Path(out))
    return results


def _records(
    measure: _Measure, journal: files.Journal | None, on_progress: OnProgress | None
) -> dict[Cell, dict[str, Any]]:
    """All cells of the grid in order: those that are finished, and those that are measured now."""
    grid, costs = measure.material.grid, _costs(measure.material.grid)
    finished = {} if journal is None else journal.finished
    report = on_progress or (lambda done, total, what: None)
    done, total = sum(costs.get(cell, 0) for cell in finished), sum(costs.values())
    records = {}
    for number, (candidate, cells) in enumerate(grid.groups(), 1):
        for cell in cells:
            if cell in finished:
                records[cell] = finished[cell]
                continue
            report(done, total, str(cell))
            records[cell] = _try(measure, candidate.transform, cell)
            if journal is not None:
                journal.add(cell, records[cell])
            done += costs[cell]
        if number % _CLEAR_AFTER == 0:
            jax.clear_caches()
    report(total, total, "done")
    return records


def _costs(grid: Grid) -> dict[Cell, int]:
    """Every cell of the grid in order, and what it costs in tokens read."""
    costs = {}
    for _, cells in grid.groups():
        for number, cell in enumerate(cells):
            rows = {
                "retrieval": grid.cases, "perplexity": WINDOWS, "fidelity": 2 * len(grid.depths)
            }[cell.measure]  # fmt: skip
            compiles = number == 0 or cell.measure != "retrieval"
            costs[cell] = rows * cell.length + (_COMPILING if compiles else 0)
    return costs


def _try(measure: _Measure, transform: KVTransform, cell: Cell) -> dict[str, Any]:
    """What was measured, or the reason why nothing was, and the seconds that it took."""
    start = time.perf_counter()
    try:
        found = getattr(measure, cell.measure)(measure.calibrated(transform), cell)
    except Exception as error:  # a method may fail in any way, and the other cells go on
        reason = " ".join(str(error).split())
        found = {"failed": f"{type(error).__name__}: {reason}"[:300]}
    return {**found, "seconds": time.perf_counter() - start}


class _Measure:
    """The three measurements, by the name that a cell gives them."""

    def __init__(
        self, material: Material, model: FunctionalModel, end_tokens: tuple[int, ...]
    ) -> None:
        self.material, self.model, self.end_tokens = material, model, end_tokens
        self._decode = decoder(material.tokenizer)
        # On the first tokens of the text, and once per transform.
        self.calibrated = functools.cache(lambda tx: calibrated(tx, model, [material.sample()]))

    def retrieval(self, transform: KVTransform, cell: Cell) -> dict[str, Any]:
        """Right answers, bytes and times."""
        cases = self.material.cases(cell.task, cell.length, cell.depth)
        results = [
            generate(
                self.model, [case.prompt], transform=transform,
                max_new_tokens=self.material.new_tokens, end_tokens=self.end_tokens,
            )
            for case in cases
        ]  # fmt: skip
        return {
            "right": sum(
                is_right(new_text(self._decode, case.prompt, result.tokens[0]), case.answer)
                for case, result in zip(cases, results, strict=True)
            ),
            "cases": len(cases),
            "cache_bytes": results[-1].cache_bytes,
            "full_cache_bytes": results[-1].full_cache_bytes,
            "ttft_s": [one.ttft_s for one in results],
            "tpot_s": [one.tpot_s for one in results if one.tpot_s is not None],
            "dropped": sum(one.dropped for one in results),
        }

    def perplexity(self, transform: KVTransform, cell: Cell) -> dict[str, Any]:
        """Nats per token."""
        nll = continuation_nll(self.model, transform, *self.material.windows(cell.length))
        mean = float(nll.astype(np.float64).mean())
        if not np.isfinite(mean):
            raise ValueError(f"the model's mean loss is {mean}")
        return {"nll": mean}

    def fidelity(self, transform: KVTransform, cell: Cell) -> dict[str, Any]:
        """Recall and attention error per layer, while the answer is given."""
        prompts = self.material.fidelity_prompts(cell.length)
        found = measure_fidelity(
            self.model, transform, prompts, new_tokens=self.material.new_tokens
        )
        recall = found.recall.astype(np.float64).mean((1, 2))
        error = found.error.astype(np.float64).mean(1)
        if not (np.isfinite(recall).all() and np.isfinite(error).all()):
            raise ValueError(f"recall per layer is {recall}, attention error {error}")
        return {"recall": recall.tolist(), "error": error.tolist()}


def _fingerprint(params: Mapping[str, Any]) -> str:
    """A hash of weights: of their names, shapes and a sample of their values."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        sample = np.asarray(leaf).ravel()[:: max(1, leaf.size // 1024)]
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]
