"""Runs a comparison: each prompt is read once for all methods, and finished cells are kept."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.calibration import Learner
from kvjax.compose.bind import bind
from kvjax.compose.origins import origin
from kvjax.devices import automatic
from kvjax.evaluation.cells import files
from kvjax.evaluation.cells.grid import (
    Candidate,
    CandidateKey,
    Cell,
    Grid,
    Unit,
    candidate_name,
)
from kvjax.evaluation.cells.results import Results
from kvjax.evaluation.fidelity.fidelity import Fidelity, measure_fidelities
from kvjax.evaluation.fidelity.perplexity import answer_nll, context_nll
from kvjax.evaluation.memory import drop_compiled_code
from kvjax.evaluation.tasks import Case
from kvjax.generation.calibration import completed, sample_of, with_named
from kvjax.generation.chat import chat_end_tokens
from kvjax.generation.context import Context
from kvjax.generation.continuation import TextDecoder, new_text
from kvjax.generation.fingerprints import Fingerprint, checksum
from kvjax.generation.generate import generate, read
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.prompt_checks import bucket
from kvjax.generation.read_once import ReadOnce
from kvjax.messages import extra_module
from kvjax.protocol import KVTransform

from .material import Material

OnProgress = Callable[[int, int, str], None]
Measured = dict[str, Any]  # the measurements of a cell, or the reason why it failed

_ROWS_BYTES = 2**31  # rough limit on the full cache of all prompts that are read together
# Ten divides the usual numbers of cases, so that most units have the same shape to compile.
_MOST_ROWS = 10
_NOTHING = 4  # tokens that stay of a document where nothing is kept: attention needs its sinks
_COMPRESSING = 0.1  # rough cost of a method on a prompt, as a share of reading the prompt


def _warn(note: str) -> None:
    """Gives a note as a warning to those who call `compare`."""
    warnings.warn(note, UserWarning, stacklevel=5)


def compare(
    model: LanguageModel | FunctionalModel,
    tokenizer: Any,
    text: str,
    *,
    data: str | os.PathLike[str] | None = None,
    end_tokens: Sequence[int] | None = None,
    name: str = "",
    out: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **grid: Any,
) -> Results:
    """Compares methods of compression by the quality of a model's answers.

    For each task, method, budget and length it measures the mean score of greedy answers. The
    question is compressed with the text (`"inside"`), or it is asked after the text before it was
    read and compressed (`"after"`). In `squad`, the score is the loss of the right answer, and
    `Row.recovery` is what a method keeps of the document's worth:
    `(nothing - method) / (nothing - full)`. The loss `nothing` is that after the first 4 tokens of
    the prompt, the attention sinks, and the question. Two tasks ask no questions:

    - `perplexity` is the loss, in nats, of held-out tokens that go through the compressed cache one
      by one. They are the last 128 of a window of `length` tokens, or its last quarter if that is
      less.
    - `attention` is recall and attention error while an answer is given (`measure_fidelities`).

    Every method sees the same cases and windows.

    A prompt is read once for all methods that read it alike (`kvjax.evaluation.ReadOnce`), several
    rows at a time. The number of rows follows from the model's sizes.

    A method that needs a calibration (InfiniGen) gets it from the first 2,048 tokens of the text,
    or from as many as the model has positions. A profile of heads (`by_head`) that is not named is
    found in the user's cache, or made from three pieces of the text (`kvjax.calibrated`).

    A cell that raises is recorded as failed, and the comparison continues. kvjax's compiled code is
    dropped when the process has half of the machine's memory, or half of the memory maps that Linux
    gives a process; with a compilation cache, it is then read again.

    Args:
      model: as for `kvjax.generate`.
      tokenizer: tokenizer of the model, from `transformers`.
      text: filler of the tasks that hide something, and text for the perplexity; the model should
        not know it.
      data: folder with the files of data sets, for tasks that need it.
      end_tokens: tokens that end a continuation; the tokenizer's end token by default. The end
        tokens of its chat template (`kvjax.models.chat_end_tokens`) are added, unless `chat` is
        False.
      name: name of the model, for the files.
      out: folder for the files of `write_report`; None writes nothing. Finished cells are kept in
        it, with their answers and seconds. So the same call continues an interrupted one, and a
        call with more methods, budgets, tasks, lengths or cases measures only the missing cells.
        Cells of a method that has changed since are measured again, and a warning says so: another
        version of kvjax measured them, its parameters are others, or the content of a file that it
        names, or the source of a method of one's own (`kvjax.compose.origins`). So are cells that
        earlier versions kept without all of that.
      on_progress: called before every unit and at the end with the work done, the total work (both
        in tokens to read, roughly), and a name for the next unit.
      grid: methods, budgets, tasks, lengths, questions, depths, cases, seed, chat, max_new; see
        `Grid.of`.

    Raises:
      TypeError, ValueError: raised before anything is computed or written, if `Grid.of` or
        `kvjax.generate` raises, if the text is too short, if a method names a profile of heads that
        is not there or not the model's, or if the folder cannot be written to or holds a comparison
        of something else or of other prompts.

    Example:
      >>> from kvjax.evaluation import compare
      >>> from kvjax.models import demo, from_pretrained, load_tokenizer
      >>> folder = demo.directory()
      >>> results = compare(
      ...     from_pretrained(folder), load_tokenizer(folder), demo.held_out_text(),
      ...     methods=["snapkv"], budgets=[0.2], lengths=[256], tasks=["needle"],
      ...     questions=["inside"], cases=1)
      >>> [(row.method, row.budget) for row in results.rows()]
      [('full', None), ('snapkv', 0.2)]
    """
    return run(
        Material(Grid.of(**grid), tokenizer, text, data), model, end_tokens=end_tokens, name=name,
        out=out, on_progress=on_progress,
    )  # fmt: skip


@automatic()
def run(
    material: Material,
    model: LanguageModel | FunctionalModel,
    *,
    end_tokens: Sequence[int] | None = None,
    name: str = "",
    out: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] = _warn,
) -> Results:
    """Runs `compare` for a grid whose prompts were made before; the arguments are the same.

    Args:
      on_note: is called with a line about the cells that are measured again, if there are any.
    """
    grid, functional = material.grid, as_functional(model)
    grid.check_model(functional.num_layers)
    material.check(functional)
    if out is not None:
        extra_module("matplotlib", "eval", "pictures of results")
    if end_tokens is None:
        end = material.tokenizer.eos_token_id
        end_tokens = () if end is None else (end,)
    chat_ends = () if grid.chat is False else chat_end_tokens(material.tokenizer)
    end_tokens = tuple(dict.fromkeys((*map(int, end_tokens), *chat_ends)))
    fingerprint = dict(Fingerprint.of(functional).content)
    # These settings identify the comparison: a folder with other ones is refused.
    settings = {
        "model": name,
        "weights": checksum(fingerprint.pop("weights")),
        "computation": checksum(fingerprint),
        "text": material.fingerprint(),
        "end_tokens": list(end_tokens),
        **grid.settings(),
    }
    measure = _Measure(material, functional, end_tokens)
    prompts = {unit: material.digest(unit) for unit in measure.units()}
    transforms = {candidate.key: repr(candidate.transform) for candidate in grid.candidates}
    origins = {candidate.key: origin(candidate.transform) for candidate in grid.candidates}
    journal = files.Journal(
        None if out is None else Path(out), settings, material.asked(), prompts, transforms,
        origins,
    )  # fmt: skip
    if journal.changed:
        on_note(_measured_again(journal.changed))
    _measure_all(measure, journal, on_progress or (lambda done, total, what: None))
    results = journal.results()
    if out is not None:
        # Imported here so that `kvjax.evaluation` does without matplotlib, which imports slowly.
        from kvjax.evaluation.report.report import write_report

        write_report(results, Path(out))
    return results


def _measured_again(changed: Mapping[CandidateKey, str]) -> str:
    """Returns a line about methods and budgets whose cells are measured again, by reason."""
    names: dict[str, list[str]] = {}
    for key, reason in changed.items():
        names.setdefault(reason, []).append(candidate_name(*key))
    groups = (f"{', '.join(of_reason)} ({reason})" for reason, of_reason in names.items())
    return f"measured again: {'; '.join(groups)}"


def _measure_all(measure: _Measure, journal: files.Journal, report: OnProgress) -> None:
    """Measures every cell that the journal does not have, unit by unit."""
    unfinished = {}
    for unit in measure.units():
        missing = [c for c in measure.candidates if Cell(*unit, *c.key) not in journal.finished]
        if missing:
            unfinished[unit] = missing
    costs = {  # in tokens read
        unit: round((unit.stop - unit.first) * unit.length * (1 + _COMPRESSING * len(missing)))
        for unit, missing in unfinished.items()
    }
    done, total = 0, sum(costs.values())
    for unit, missing in unfinished.items():
        report(done, total, str(unit))
        for candidate, record in measure.unit(unit, missing):
            # Cells are kept one by one, so that an interruption loses one at most.
            journal.add(Cell(*unit, *candidate.key), record)  # pyright: ignore[reportCallIssue]
            drop_compiled_code()
        done += costs[unit]
    report(total, total, "done")


class _Measure:
    """Measures the cells of a unit, candidate by candidate.

    Attributes:
      candidates: those of the material's grid, with the calibrations that they name.
    """

    def __init__(
        self, material: Material, model: FunctionalModel, end_tokens: tuple[int, ...]
    ) -> None:
        self.material, self.model, self.end_tokens = material, model, end_tokens
        # Files are read now: a comparison takes hours, in which they may change.
        self.candidates = [
            dataclasses.replace(x, transform=with_named(x.transform, model))
            for x in material.grid.candidates
        ]
        self._decode = TextDecoder(material.tokenizer)
        # Candidates of several units share a transform, which is calibrated once.
        self.calibrated = functools.cache(self._calibrated)

    def _calibrated(self, transform: KVTransform) -> KVTransform:
        material, most = self.material, self.model.max_positions

        def sample(method: Learner) -> Sequence[Sequence[int]]:
            return sample_of(material.tokens, most) if method.kept else [material.sample(most)]

        return completed(transform, self.model, sample, material.tokenizer)

    def units(self) -> Iterator[Unit]:
        """Yields all units of the grid in order."""
        grid = self.material.grid
        for length in grid.lengths:
            for task in grid.tasks:
                cases = self.material.count(task, length)
                yield from grid.units(task, length, cases, self._rows(length))

    def _rows(self, length: int) -> int:
        """Returns how many prompts of a length are read together."""
        model = self.model
        # A token's key and value in float32.
        token_bytes = 8 * model.num_layers * model.kv_heads * model.head_dim
        return max(1, min(_MOST_ROWS, _ROWS_BYTES // (token_bytes * length)))

    def unit(
        self, unit: Unit, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Yields each candidate with its measurements, or with the reason why it failed."""
        measures = {"perplexity": self.perplexity, "attention": self.attention}
        yield from measures.get(unit.task, self.answers)(unit, candidates)

    def answers(
        self, unit: Unit, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Measures scores of the answers, bytes of the caches, and what else belongs to them."""
        task = self.material.task(unit.task, unit.length)
        cases = task.cases[unit.first : unit.stop]
        inside = unit.question == "inside"
        prompts = [case.prompt if inside else case.context for case in cases]
        questions = None if inside else [case.question for case in cases]
        most_new = self.material.most_new(unit.task, unit.length, unit.first, unit.stop)
        question_length = 0 if questions is None else max(map(len, questions))
        measure = (
            self._given_answers(cases, questions)
            if task.score is None
            else self._written_answers(cases, questions, most_new, task.score)
        )
        # Cases may ask about one document, which is read once.
        documents = list(dict.fromkeys(map(tuple, prompts)))
        rows = [documents.index(tuple(prompt)) for prompt in prompts]

        def answer(context: Context) -> Measured:
            if len(documents) < len(rows):
                context = context.take(rows)
            # Counted first: `generate` takes the context over, and gives it room.
            counted = {"live_slots": context.occupancy.kept_slots, **_sizes(context)}
            prompt_tokens = [len(case.prompt) for case in cases]
            return {"prompt_tokens": prompt_tokens, **counted, **measure(context)}

        yield from self._each(
            list(map(list, documents)), candidates, answer, question_length, most_new
        )

    def _written_answers(
        self,
        cases: Sequence[Case],
        questions: list[list[int]] | None,
        most_new: int,
        score: Callable[[str, Case], float],
    ) -> Callable[[Context], Measured]:
        """Returns what measures scores of the answers that a model writes, and their texts."""

        def measure(context: Context) -> Measured:
            result = generate(
                self.model, questions, context=context, donate=True, max_new_tokens=most_new,
                end_tokens=self.end_tokens,
            )  # fmt: skip
            pairs = list(zip(cases, result.tokens, strict=True))
            texts = [new_text(self._decode, case.prompt, tokens) for case, tokens in pairs]
            scores = [score(text, case) for text, case in zip(texts, cases, strict=True)]
            return {
                "scores": scores, "depths": [case.depth for case in cases], "texts": texts,
                "new_tokens": [len(tokens) for tokens in result.tokens],
            }  # fmt: skip

        return measure

    def _given_answers(
        self, cases: Sequence[Case], questions: list[list[int]] | None
    ) -> Callable[[Context], Measured]:
        """Returns what measures losses of right answers, with the document and without it."""
        answers = [case.details["answer_tokens"] for case in cases]

        @functools.cache  # it is the same for all methods
        def nothing() -> list[float]:
            sinks = [case.context[:_NOTHING] for case in cases]
            asked = [case.question for case in cases]
            most, new = bucket(_NOTHING + max(map(len, asked)), None, None), max(map(len, answers))
            context = read(self.model, sinks, max_prompt=most, max_new=bucket(new, None, None))
            return _finite(answer_nll(self.model, context, answers, asked)).tolist()

        def measure(context: Context) -> Measured:
            losses = _finite(answer_nll(self.model, context, answers, questions))
            return {
                "scores": losses.tolist(), "nothing": nothing(),
                "passages": [case.details["passage"] for case in cases],
            }  # fmt: skip

        return measure

    def perplexity(
        self, unit: Unit, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Measures nats per token of each window, and of each quarter of its continuation."""
        rows, prompt = self.material.windows(unit.length)
        rows = rows[unit.first : unit.stop]

        def loss(context: Context) -> Measured:
            sizes = _sizes(context)
            nll = _finite(context_nll(self.model, context, rows[:, prompt:]))
            quarters = [part.mean() for part in np.array_split(nll, 4, axis=1)]
            return {"scores": nll.mean(1).tolist(), "quarters": quarters, **sizes}

        most_new = rows.shape[1] - prompt
        yield from self._each(rows[:, :prompt].tolist(), candidates, loss, 0, most_new)

    def attention(
        self, unit: Unit, candidates: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Measures recall and attention error per layer while the answer is given."""
        prompts, most_new = self.material.attention_prompts(unit.length)
        prompts = prompts[unit.first : unit.stop]
        ready = yield from self._ready(candidates)
        start = time.perf_counter()
        fidelities = measure_fidelities(
            self.model, list(ready.values()), prompts, new_tokens=most_new,
            document=self.material.tokenizer,
        )  # fmt: skip
        # All methods are measured in one call, whose seconds count for the first of them.
        for candidate, fidelity in zip(ready, fidelities, strict=True):
            yield candidate, _try(functools.partial(_per_layer, fidelity), start)
            start = time.perf_counter()

    def _ready(
        self, candidates: Sequence[Candidate]
    ) -> Generator[tuple[Candidate, Measured], None, dict[Candidate, KVTransform]]:
        """Returns the candidates' calibrated transforms; yields the candidates that failed."""
        ready = {}
        for candidate in candidates:
            try:
                ready[candidate] = self.calibrated(candidate.transform)
                bind(ready[candidate], self.model.num_layers, self.model.windows)
            except Exception as error:  # a method may fail in any way
                yield candidate, _failed(error)
        return ready

    def _each(
        self,
        prompts: list[list[int]],
        candidates: Sequence[Candidate],
        measure: Callable[[Context], Measured],
        question_length: int,
        most_new: int,
    ) -> Iterator[tuple[Candidate, Measured]]:
        """Reads the prompts once, and yields `measure` of each candidate's context.

        Args:
          prompts: token ids of each row.
          candidates: methods with budgets.
          measure: returns the measurements of a compressed context.
          question_length: maximum tokens of a question that follows.
          most_new: maximum tokens of the answer.
        """
        # Sizes are rounded up to buckets, so that units of similar sizes share compiled code.
        longest = max(map(len, prompts))
        padded = bucket(longest, self.model.max_positions, None)
        room = bucket(question_length, None, None) if question_length else 0
        ready = yield from self._ready(candidates)
        try:
            once = ReadOnce(
                self.model, prompts, list(ready.values()), max_prompt=padded + room,
                max_new=bucket(most_new, None, None),
                max_length=longest + question_length + most_new, document=self.material.tokenizer,
            )  # fmt: skip
        except Exception as error:
            yield from ((candidate, _failed(error)) for candidate in ready)
            return
        for candidate, transform in ready.items():
            start = time.perf_counter()
            # The default argument binds this transform, as a closure would follow the loop.
            yield candidate, _try(lambda tx=transform: measure(once.context(tx)), start)


def _finite(losses: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Returns losses in float64; raises ValueError if one is NaN or infinite."""
    if not np.isfinite(losses).all():
        raise ValueError(f"the model's mean loss is {losses.mean()}")
    return losses.astype(np.float64)


def _per_layer(fidelity: Fidelity) -> Measured:
    recall = fidelity.recall.astype(np.float64).mean((1, 2))
    error = fidelity.error.astype(np.float64).mean(1)
    if not (np.isfinite(recall).all() and np.isfinite(error).all()):
        raise ValueError(f"recall per layer is {recall}, attention error {error}")
    return {"recall": recall.tolist(), "error": error.tolist(), "cases": fidelity.error.shape[1]}


def _try(measure: Callable[[], Measured], start: float) -> Measured:
    """Returns the measurements, or the reason of a failure, with the seconds since `start`."""
    try:
        record = measure()
    except Exception as error:
        record = _failed(error)
    return {**record, "seconds": time.perf_counter() - start}


def _failed(error: Exception) -> Measured:
    """Returns the record of a method that raised any error; the comparison continues."""
    reason = " ".join(str(error).split())
    return {"failed": f"{type(error).__name__}: {reason}"[:300], "seconds": 0.0}


def _sizes(context: Context) -> Measured:
    """Returns the bytes of a row at rest, and those of the full cache."""
    return {
        "cache_bytes": context.nbytes // context.rows,
        "full_cache_bytes": context.full_nbytes // context.rows,
    }
