"""A model as a command uses it: opened first, so that errors come before its weights are read."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvjax
from kvjax.checks import check_count
from kvjax.cli import compilation_cache
from kvjax.cli.inputs import model_path
from kvjax.cli.templates import Dialogue
from kvjax.cli.terminal import Display, print_line
from kvjax.generation.calibration import CALIBRATION_TOKENS
from kvjax.generation.chat import begins_twice
from kvjax.generation.continuation import decoder
from kvjax.generation.sampling import unsupported_settings
from kvjax.messages import brief, printable

BUNDLED = "bundled"
"""What results call the bundled model."""


class OpenedModel:
    """The configuration and the tokenizer of a model; `load` reads its weights.

    Args:
      name: a folder, a GGUF file or a hub id; None for the bundled model.
      display: says what is done.
    """

    def __init__(self, name: str | None, display: Display) -> None:
        # Imported here: kvjax does without kvjax.models, and help without what they import.
        from kvjax.models import load_tokenizer, read_config

        self.name = model_name(name)
        self.path: Path = model_path(name)
        display.show(0, None, f"loading the {'bundled ' if name is None else ''}model")
        self.config = read_config(self.path)  # first: it says what is not supported
        self.tokenizer = load_tokenizer(self.path)
        self.decode = decoder(self.tokenizer)

    def dialogue(self, args: argparse.Namespace) -> Dialogue:
        """How texts become tokens, with the options of `add_template`."""
        return Dialogue(self.tokenizer, system=args.system, raw=args.raw, chat=args.chat)

    def end_tokens(self, dialogue: Dialogue) -> tuple[int, ...]:
        """What ends an answer: the configuration's tokens, and in a chat the template's."""
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *dialogue.end_tokens)))

    def print_double_start(self, dialogue: Dialogue, prompts: Sequence[Sequence[int]]) -> None:
        """One line on standard error where raw texts begin as the tokenizer makes them begin."""
        if dialogue.templated or not any(begins_twice(self.tokenizer, x) for x in prompts):
            return
        name = printable(self.tokenizer.bos_token)
        print_line(
            f"the text begins with {name}, and the tokenizer puts another one before it", "dim"
        )

    def bind(self, transform: kvjax.KVTransform) -> tuple[kvjax.KVTransform, ...]:
        """A transform for each layer, for checks: every window is a ring."""
        return kvjax.bind(transform, self.config.num_layers, self.config.windows)

    def sampling(self, args: argparse.Namespace) -> kvjax.Sampling:
        """How tokens are chosen, by the options of `add_sampling`.

        A line on standard error says which settings of the model are not followed.
        """
        from kvjax.models.sampling_settings import read_sampling_settings

        settings, options = read_sampling_settings(self.path), _sampling_options(args)
        lacking = unsupported_settings(settings)
        supported = {name: x for name, x in settings.items() if name not in lacking}
        asked, greedy = kvjax.Sampling.from_settings(supported), kvjax.Sampling()
        if args.model_sampling:
            if lacking:
                print_line(
                    f"kvjax does not have {_listed(lacking)}, which the model asks for", "dim"
                )
            return dataclasses.replace(asked, **options)
        wanted = {
            name: value
            for name, value in dataclasses.asdict(asked).items()
            if value != getattr(greedy, name)
        }
        if (wanted or lacking) and not options:
            also = f"; kvjax does not have {_listed(lacking)}" if lacking else ""
            takes = f"the model asks for {_listed(wanted)}: --model-sampling takes it"
            print_line(f"{takes}{also}" if wanted else f"the model asks for {_listed(lacking)}, "
                       "which kvjax does not have", "dim")  # fmt: skip
        return kvjax.Sampling(**options)

    def load(self, args: argparse.Namespace) -> Any:
        """The model with its weights. What it compiles is kept for the next process."""
        from kvjax.models import from_pretrained

        compilation_cache.enable()
        return from_pretrained(self.path, allow_nonfinite=args.allow_nonfinite)


def model_name(name: str | None) -> str:
    """What results say of a model: an id as it is, of a folder or a file the last part alone."""
    if name is None:
        return BUNDLED
    path = Path(name).absolute()
    return path.name if path.exists() else name


def calibrated(transform: kvjax.KVTransform, model: Any, prompt: Sequence[int]) -> Any:
    """A transform with what it needs to know of the model, found on the prompt's first tokens."""
    return kvjax.calibrated(transform, model, [prompt[:CALIBRATION_TOKENS]])


def check_sampling(args: argparse.Namespace) -> None:
    """Raises ValueError where the options of `add_sampling` are wrong, before a model is loaded."""
    if not args.model_sampling:  # the model may give them the temperature that they need
        kvjax.Sampling(**_sampling_options(args))


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_sampling` that were given."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError where an option is given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None:
            check_count(f"--{name.replace('_', '-')}", value, 1)


def _listed(settings: Mapping[str, Any]) -> str:
    """Settings and their values, in one line."""
    return ", ".join(f"{printable(name)} {brief(value)}" for name, value in settings.items())
