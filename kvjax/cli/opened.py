"""A model that a command opens first, so that errors come before its weights are read."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvjax
from kvjax.calibration import Learner
from kvjax.checks import check_count
from kvjax.cli import compilation_cache
from kvjax.cli.inputs import model_path
from kvjax.cli.templates import Dialogue
from kvjax.cli.terminal import Display, print_line
from kvjax.files import user_cache
from kvjax.generation.calibration import (
    CALIBRATION_TOKENS,
    KEPT,
    SAMPLE_TEXTS,
    completed,
    sample_of,
    with_named,
)
from kvjax.generation.chat import begins_twice
from kvjax.generation.continuation import TextDecoder
from kvjax.generation.model import as_functional
from kvjax.generation.sampling import unsupported_settings
from kvjax.messages import brief, printable

BUNDLED = "bundled"
"""Name of the bundled model in results."""


class OpenedModel:
    """Configuration and tokenizer of a model; `load` reads its weights.

    Args:
      name: a folder, a GGUF file or a hub id; None for the bundled model.
      display: shows progress.
    """

    def __init__(self, name: str | None, display: Display) -> None:
        # Imported here: kvjax works without kvjax.models, and help is faster without its imports.
        from kvjax.models import load_tokenizer, read_config

        self.name, self._display = model_name(name), display
        self.path: Path = model_path(name)
        display.show(0, None, f"loading the {'bundled ' if name is None else ''}model")
        # The configuration comes first: it tells whether the model is supported.
        self.config = read_config(self.path)
        self.tokenizer = load_tokenizer(self.path)
        self.decode = TextDecoder(self.tokenizer)

    def dialogue(self, args: argparse.Namespace) -> Dialogue:
        """Makes the dialogue that turns texts into tokens, by the options of `add_template`."""
        return Dialogue(self.tokenizer, system=args.system, raw=args.raw, chat=args.chat)

    def end_tokens(self, dialogue: Dialogue) -> tuple[int, ...]:
        """Returns the end tokens of an answer: the configuration's, and a chat template's."""
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *dialogue.end_tokens)))

    def print_double_start(self, dialogue: Dialogue, prompts: Sequence[Sequence[int]]) -> None:
        """Prints a line on standard error if a raw text already begins with the start token."""
        if dialogue.templated or not any(begins_twice(self.tokenizer, x) for x in prompts):
            return
        name = printable(self.tokenizer.bos_token)
        print_line(
            f"the text begins with {name}, and the tokenizer puts another one before it", "dim"
        )

    def bind(self, transform: kvjax.KVTransform) -> tuple[kvjax.KVTransform, ...]:
        """Returns a transform for each layer, for checks; layers with a window have rings.

        Raises:
          ValueError: the file of a calibration holds none that fits the model and the method.
        """
        config = self.config
        transform = with_named(transform, config, weights=False)
        return kvjax.bind(transform, config.num_layers, config.windows)

    def sampling(
        self, args: argparse.Namespace, before: kvjax.Sampling | None = None
    ) -> kvjax.Sampling:
        """Returns how tokens are chosen, by the options of `add_sampling`.

        A line on standard error names settings of the model that are not followed.

        Args:
          args: the options.
          before: how tokens were chosen so far, in a conversation that goes on; options that are
            given come in the place of its settings.
        """
        from kvjax.models.sampling_settings import read_sampling_settings

        settings, options = read_sampling_settings(self.path), _sampling_options(args)
        unsupported = unsupported_settings(settings)
        supported = {name: x for name, x in settings.items() if name not in unsupported}
        recommended, greedy = kvjax.Sampling.from_settings(supported), kvjax.Sampling()
        if args.model_sampling:
            if unsupported:
                print_line(
                    f"kvjax does not have {_listed(unsupported)}, which the model asks for", "dim"
                )
            return dataclasses.replace(recommended, **options)
        if before is not None:
            return dataclasses.replace(before, **options)
        ignored = {
            name: value
            for name, value in dataclasses.asdict(recommended).items()
            if value != getattr(greedy, name)
        }
        # A user who gives an option has chosen, and needs no hint.
        if (ignored or unsupported) and not options:
            addition = f"; kvjax does not have {_listed(unsupported)}" if unsupported else ""
            hint = f"the model asks for {_listed(ignored)}: --model-sampling takes it"
            print_line(
                f"{hint}{addition}" if ignored else
                f"the model asks for {_listed(unsupported)}, which kvjax does not have", "dim",
            )  # fmt: skip
        return kvjax.Sampling(**options)

    def calibrated(
        self, transform: kvjax.KVTransform, model: Any, prompt: Sequence[int] | None = None
    ) -> kvjax.KVTransform:
        """Returns a transform that has learned from the model, as far as it can: see `calibrated`.

        Args:
          prompt: its first tokens are the sample of what is not kept in the user's cache; None:
            that stays missing.
        """
        return calibrated(
            transform, model, self.tokenizer, self.config.max_positions, self._display, prompt
        )

    def load(self, args: argparse.Namespace) -> Any:
        """Loads the model with its weights; compiled code is kept for the next process."""
        from kvjax.models import from_pretrained

        compilation_cache.enable()
        return from_pretrained(self.path, allow_nonfinite=args.allow_nonfinite)


def calibrated(
    transform: kvjax.KVTransform,
    model: Any,
    tokenizer: Any,
    max_positions: int | None,
    display: Display,
    prompt: Sequence[int] | None = None,
) -> kvjax.KVTransform:
    """Returns a transform that has learned from the model.

    A calibration that depends on the model and hardly on a text, such as a profile of heads, is
    found in the user's cache, or made from the bundled model's text, and a line on standard error
    says so. The rest is made from the first tokens of the prompt; without one, it stays missing.
    """
    layers, measuring = as_functional(model).num_layers, display.measuring(1, 1)

    def sample(method: Learner) -> Sequence[Sequence[int]] | None:
        nonlocal measuring
        if method.kept:
            texts = kept_sample(tokenizer, max_positions)
        elif prompt is not None:
            texts = [prompt[:CALIBRATION_TOKENS]]
        else:
            return None
        measuring = display.measuring(layers, len(texts))
        return texts

    def print_made(method: Learner, seconds: float) -> None:
        if not method.kept:
            return
        place, name = user_cache(), kvjax.unparse(method.source(), budget=False)
        kept = "" if place is None else f"; kept for the next time in {place / KEPT}"
        display.line(
            f"calibrated {name} from {SAMPLE_TEXTS} pieces of the bundled model's text in "
            f"{seconds:.0f} s{kept}"
        )

    return completed(
        transform, model, sample, tokenizer, print_made, lambda layer: measuring(layer)
    )


def kept_sample(tokenizer: Any, max_positions: int | None) -> list[list[int]]:
    """Returns the texts from which what is kept is made, in the tokens of a model."""
    from kvjax.models import demo

    text = tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids
    return sample_of(text, max_positions)


def model_name(name: str | None) -> str:
    """Returns the name of a model in results: a hub id, or the name of a folder or file."""
    if name is None:
        return BUNDLED
    path = Path(name).absolute()
    return path.name if path.exists() else name


def check_sampling(args: argparse.Namespace, before: kvjax.Sampling | None = None) -> None:
    """Raises ValueError if options of `add_sampling` are wrong, before a model is loaded.

    `before` is that of `OpenedModel.sampling`.
    """
    # With --model-sampling, the model may set the temperature that the other options need.
    if not args.model_sampling:
        dataclasses.replace(before or kvjax.Sampling(), **_sampling_options(args))


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `add_sampling` that were given."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError if an option is given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None:
            check_count(f"--{name.replace('_', '-')}", value, 1)


def _listed(settings: Mapping[str, Any]) -> str:
    """Formats settings and their values in one line."""
    return ", ".join(f"{printable(name)} {brief(value)}" for name, value in settings.items())
