"""What the commands of the command line do, once their arguments are read."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import kvjax
from kvjax import demo
from kvjax.budgets import check_count
from kvjax.generate import Generation, check_prompts
from kvjax.registry import METHODS, WRAPPERS
from kvjax.terminal import Display, comparison, listing, print_figures, summary
from kvjax.text import Continuation

DEFAULT_BUDGET = 0.2


@dataclasses.dataclass(frozen=True)
class Job:
    """What one generation is to do, checked as far as that can be done without a model."""

    method: str
    transform: kvjax.KVTransform
    budget: int | float | None  # None where the method takes none or names its own
    options: dict[str, Any]

    @classmethod
    def from_args(cls, args: argparse.Namespace, method: str) -> Job:
        """The job that these arguments describe, with this method."""
        budget = DEFAULT_BUDGET if args.budget is None else args.budget
        transform = kvjax.parse(method, budget)
        with contextlib.suppress(ValueError):
            if kvjax.parse(method) == transform:
                budget = None
        temperature = args.temperature
        if temperature is None:  # greedy, a random model would mostly repeat itself
            temperature = 1.0 if args.model is None else 0.0
        check_count("--max-new", args.max_new, 1)
        sampling = kvjax.Sampling(temperature, args.top_k, args.top_p, args.min_p)
        options = {"max_new_tokens": args.max_new, "sampling": sampling, "seed": args.seed}
        return cls(method, transform, budget, options)

    def run(
        self,
        model,
        prompt: list[int],
        display: Display,
        on_tokens: Callable[[list[list[int]]], None] | None = None,
        end_tokens: Sequence[int] = (),
    ) -> Generation:
        """Generates, with the display up to the first token."""
        display.stage(f"compiling for {self.method}")
        return kvjax.generate(
            model, [prompt], transform=self.transform, **self.options, end_tokens=end_tokens,
            on_tokens=on_tokens,
            on_layer=display.layers(model.num_layers, f"reading {len(prompt):,} tokens"),
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
        }


def generate(args: argparse.Namespace) -> None:
    """`kvjax generate`: text from a model, or the full cache and a method on a random one."""
    job, prompt = Job.from_args(args, args.method), _prompt(args)
    if args.model is None:
        _demonstrate(args, job, demo.bundled_prompt() if prompt is None else prompt)
    elif prompt is None:
        raise ValueError("--model needs a --prompt or a --prompt-file")
    else:
        _continue(args, job, prompt)


def _prompt(args: argparse.Namespace) -> str | None:
    """The prompt that was given, None if none was."""
    text = args.prompt
    if args.prompt_file is not None:
        try:
            text = Path(args.prompt_file).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {error.start} is {error.object[error.start]:#04x}"
            raise ValueError(f"{args.prompt_file} is not UTF-8 text: {where}") from error
        except OSError as error:
            raise ValueError(f"cannot read {args.prompt_file}: {error.strerror}") from error
    if text is None:
        return None
    if not text.strip():
        raise ValueError("the prompt is empty")
    try:
        text.encode("utf-8")  # an argument's bytes come as they are
    except UnicodeEncodeError as error:
        raise ValueError("the prompt is not UTF-8 text") from error
    return text


def _continue(args: argparse.Namespace, job: Job, text: str) -> None:
    """Continues a text with a model from a folder or the hub."""
    # Imported here: kvjax does without kvjax.models, and help without what they import.
    from kvjax.models import from_pretrained, load_tokenizer, read_config
    from kvjax.models.loading import local_directory

    folder = local_directory(args.model)
    config = read_config(folder)  # a model that is not supported shows before anything is loaded
    with Display(not args.json) as display:
        display.stage("loading the model")
        tokenizer = load_tokenizer(folder)
        prompt = tokenizer(text).input_ids
        decode = functools.partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        continuation = Continuation(decode, prompt)
        layers = kvjax.bind(job.transform, config.num_layers)
        check_prompts(config, [prompt], layers, args.max_new)

        def on_tokens(rows: list[list[int]]) -> None:
            display.stop()
            _write(continuation.add(rows[0]))

        model = from_pretrained(folder)
        streamed = None if args.json else on_tokens
        result = job.run(model, prompt, display, streamed, config.eos_token_ids)
    if args.json:
        continuation.add(result.tokens[0])
        _write(json.dumps({"model": args.model, **job.record(result, continuation.text)}) + "\n")
    else:
        _write(continuation.finish() + "\n")
        print_figures(result)


def _write(text: str) -> None:
    """Text as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _demonstrate(args: argparse.Namespace, job: Job, text: str) -> None:
    """Full cache against a method on a random model."""
    jobs = {name: Job.from_args(args, name) for name in dict.fromkeys(("full", args.method))}
    prompt = demo.encode(text)
    with Display(not args.json) as display:
        display.stage("making a random model")
        model = demo.random_model()
        results = {name: own.run(model, prompt, display) for name, own in jobs.items()}
    texts = {name: demo.decode(result.tokens[0]) for name, result in results.items()}
    if args.json:
        records = {name: own.record(results[name], texts[name]) for name, own in jobs.items()}
        record = {"model": "random", **records[job.method], "full": records["full"]}
        _write(json.dumps(record) + "\n")
        return
    console = Console(highlight=False)
    console.print(
        f"No model was given, so a small one with random weights read {len(prompt):,} characters. "
        "Its text is therefore noise; bytes and times are real.\n"
    )
    for name, own in texts.items():
        console.print(name, style="bold", markup=False)
        console.print(own, markup=False, soft_wrap=True)
    console.print(comparison(results, {name: own.budget for name, own in jobs.items()}))
    console.print(
        "Other methods: kvjax methods\nReal text: kvjax generate --model DIR_OR_ID --prompt TEXT",
        style="dim",
    )


def methods(args: argparse.Namespace) -> None:
    """`kvjax methods`: a table, or one JSON object."""
    if args.json:
        kinds = {"methods": METHODS, "wrappers": WRAPPERS}
        _write(json.dumps({part: _describe(names) for part, names in kinds.items()}) + "\n")
        return
    console = Console(highlight=False)
    width = console.width, max(map(len, METHODS | WRAPPERS))
    console.print(listing(METHODS, "method", *width))
    console.print(listing(WRAPPERS, "wrapper", *width))
    console.print(
        "budget: slots per KV head (256), or a share of the prompt (0.2).\n"
        "Compositions: chain(snapkv(window=16), h2o(budget=64)), every(snapkv, steps=64).",
        markup=False,
    )


def _describe(kinds: dict[str, type[kvjax.KVTransform]]) -> dict[str, Any]:
    """Methods as JSON: a parameter without `default` is required."""

    def parameter(field: dataclasses.Field) -> dict[str, Any]:
        required = field.default is dataclasses.MISSING
        return {"name": field.name} | ({} if required else {"default": field.default})

    return {
        name: {
            "parameters": [parameter(field) for field in dataclasses.fields(kind)],
            "summary": summary(kind),
            "paper": kind.paper,
        }
        for name, kind in kinds.items()
    }
