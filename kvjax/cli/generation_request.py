"""One generation as the arguments of `kvjax generate` describe it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import kvjax
from kvjax.budgets.budgets import check_count
from kvjax.cli.terminal import Display
from kvjax.cli.tokenized_prompt import TokenizedPrompt
from kvjax.generation.generate import Generation, check_prompts

DEFAULT_BUDGET = 0.1
CALIBRATION_TOKENS = 1024  # of the prompt, for methods that are calibrated


@dataclass(frozen=True)
class GenerationRequest:
    """A method and how to generate with it, checked as far as that needs no model.

    Args:
      method: the method's name or composition, as it was given.
      transform: what it stands for.
      budget: None where the method takes no budget or has its own.
      options: keyword arguments of `kvjax.generate`.
    """

    method: str
    transform: kvjax.KVTransform
    budget: int | float | None
    options: dict[str, Any]

    @classmethod
    def from_args(cls, args: argparse.Namespace, method: str) -> Self:
        """The request of these arguments, with this method."""
        budget = DEFAULT_BUDGET if args.budget is None else args.budget
        transform = kvjax.parse(method, budget)
        with contextlib.suppress(ValueError):
            if kvjax.parse(method) == transform:
                budget = None
        check_count("--max-new", args.max_new, 1)
        sampling = kvjax.Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
        options = {"max_new_tokens": args.max_new, "sampling": sampling, "seed": args.seed}
        return cls(method, transform, budget, options)

    def check(self, prompt: TokenizedPrompt) -> None:
        """Raises what `run` would raise for this prompt, before the weights are loaded."""
        layers = kvjax.bind(self.transform, prompt.config.num_layers)
        check_prompts(prompt.config, [prompt.tokens], layers, self.options["max_new_tokens"])

    def run(
        self,
        model: kvjax.LanguageModel,
        prompt: TokenizedPrompt,
        display: Display,
        on_tokens: Callable[[list[list[int]]], None] | None = None,
    ) -> Generation:
        """Generates, and displays progress until the first token."""
        sample = [prompt.tokens[:CALIBRATION_TOKENS]]
        transform = kvjax.calibrated(self.transform, model, sample)
        display.stage(f"compiling for {self.method}")
        return kvjax.generate(
            model, [prompt.tokens], transform=transform, **self.options,
            end_tokens=prompt.config.eos_token_ids, on_tokens=on_tokens,
            on_layer=display.layers(model.num_layers, f"reading {len(prompt.tokens):,} tokens"),
        )  # fmt: skip

    def record(self, result: Generation, text: str) -> dict[str, Any]:
        """The result as `--json` prints it."""
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
