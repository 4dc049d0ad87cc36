"""One generation of the command line: the model's folder, the prompt, the method."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import kvjax
from kvjax.budgets.budgets import check_count
from kvjax.cli.terminal import Display
from kvjax.generation.continuation import Continuation
from kvjax.generation.generate import Generation, check_prompts

# Imported where it is needed: kvjax does without kvjax.models, and help without what they import.
if TYPE_CHECKING:
    from kvjax.models import DecoderConfig

DEFAULT_BUDGET = 0.1
SAMPLE_TOKENS = 1024  # of the prompt, for a method that is calibrated
_BUNDLED = (
    "config.json", "model.safetensors", "tokenizer.json", "document.txt", "document.json",
    "held_out.txt",
)  # fmt: skip


def model_folder(given: str | None) -> Path:
    """The folder of the model with this path or hub id, of the bundled model for None.

    Raises:
      ValueError: it cannot be had, or files of the bundled model are missing.
    """
    if given is not None:
        from kvjax.models.loading import local_directory

        return local_directory(given)
    from kvjax.models import demo

    folder = demo.directory()
    missing = [name for name in _BUNDLED if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"the bundled model in {folder} is incomplete: no {', '.join(missing)}")
    return folder


@dataclasses.dataclass(frozen=True)
class Reader:
    """A prompt in the tokens of the model that is to read it; without the weights yet."""

    config: DecoderConfig
    prompt: list[int]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def open(cls, folder: Path, text: str) -> Self:
        """Reads the configuration and the tokenizer of a model's folder."""
        from kvjax.models import load_tokenizer, read_config

        config = read_config(folder)  # what is not supported shows before anything is loaded
        tokenizer = load_tokenizer(folder)
        decode = functools.partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cls(config, tokenizer(text).input_ids, decode)

    def text(self, result: Generation) -> str:
        """What the new tokens add to the prompt."""
        continuation = Continuation(self.decode, self.prompt)
        continuation.add(result.tokens[0])
        return continuation.text


@dataclasses.dataclass(frozen=True)
class Job:
    """What one generation is to do, checked as far as that can be done without a model."""

    method: str
    transform: kvjax.KVTransform
    budget: int | float | None  # None where the method takes none or names its own
    options: dict[str, Any]

    @classmethod
    def from_args(cls, args: argparse.Namespace, method: str) -> Self:
        """The job that these arguments describe, with this method."""
        budget = DEFAULT_BUDGET if args.budget is None else args.budget
        transform = kvjax.parse(method, budget)
        with contextlib.suppress(ValueError):
            if kvjax.parse(method) == transform:
                budget = None
        check_count("--max-new", args.max_new, 1)
        sampling = kvjax.Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
        options = {"max_new_tokens": args.max_new, "sampling": sampling, "seed": args.seed}
        return cls(method, transform, budget, options)

    def check(self, reader: Reader) -> None:
        """Raises what `run` would raise for this prompt, before the weights are loaded."""
        layers = kvjax.bind(self.transform, reader.config.num_layers)
        check_prompts(reader.config, [reader.prompt], layers, self.options["max_new_tokens"])

    def run(
        self,
        model,
        reader: Reader,
        display: Display,
        on_tokens: Callable[[list[list[int]]], None] | None = None,
    ) -> Generation:
        """Generates, with the display up to the first token."""
        transform = kvjax.calibrated(self.transform, model, [reader.prompt[:SAMPLE_TOKENS]])
        display.stage(f"compiling for {self.method}")
        return kvjax.generate(
            model, [reader.prompt], transform=transform, **self.options,
            end_tokens=reader.config.eos_token_ids, on_tokens=on_tokens,
            on_layer=display.layers(model.num_layers, f"reading {len(reader.prompt):,} tokens"),
        )  # fmt: skip

    def record(self, result: Generation, text: str) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "text": text,
            "method": self.method,
            "budget": self.budget,
            "prompt_tokens": result.prompt_tokens[0],
            "new_tokens": len(result.tokens[0]),
            "ttft_s": result.ttft_s,
            "tpot_s": result.tpot_s,
            "compile_s": result.compile_s,
            "cache_bytes": result.cache_bytes,
            "full_cache_bytes": result.full_cache_bytes,
            "memory_bytes": result.memory_bytes,
            "recall": None if result.recall is None else result.recall._asdict(),
            "dropped": result.dropped,
        }
