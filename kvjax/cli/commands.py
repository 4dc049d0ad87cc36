"""What the commands of the command line do, once their arguments are read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import kvjax
from kvjax.cli.job import Job, Reader, model_folder
from kvjax.cli.terminal import (
    Display,
    answers,
    comparison,
    listing,
    print_dropped,
    print_figures,
    summary,
)
from kvjax.generation.continuation import Continuation
from kvjax.registry import METHODS, STORAGE, WRAPPERS

_TEXT_TOKENS, _ANSWER_TOKENS = 128, 16


def generate(args: argparse.Namespace) -> None:
    """`kvjax generate`: a prompt continued; without model and prompt, a question answered."""
    text = _prompt(args)
    if args.max_new is None:
        args.max_new = _ANSWER_TOKENS if args.model is None and text is None else _TEXT_TOKENS
    job = Job.from_args(args, args.method)
    if args.model is not None and text is None:
        raise ValueError("--model needs a --prompt or a --prompt-file")
    folder = model_folder(args.model)
    if text is None:
        _answer(args, job, folder)
    else:
        _continue(args, job, folder, text)


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


def _continue(args: argparse.Namespace, job: Job, folder: Path, text: str) -> None:
    """Continues a text."""
    from kvjax.models import from_pretrained

    with Display(not args.json) as display:
        display.stage("loading the model")
        reader = Reader.open(folder, text)
        job.check(reader)
        continuation = Continuation(reader.decode, reader.prompt)

        def on_tokens(rows: list[list[int]]) -> None:
            display.stop()
            _write(continuation.add(rows[0]))

        model = from_pretrained(folder)
        result = job.run(model, reader, display, None if args.json else on_tokens)
    if args.json:
        model_name = "bundled" if args.model is None else args.model
        record = job.record(result, reader.text(result))
        _write(json.dumps({"model": model_name, **record}) + "\n")
    else:
        _write(continuation.finish() + "\n")
        print_figures(result)
        print_dropped(result, job.method)


def _write(text: str) -> None:
    """Text as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _answer(args: argparse.Namespace, job: Job, folder: Path) -> None:
    """The bundled document and its question, through the full cache and through a method."""
    from kvjax.evaluation import is_right
    from kvjax.models import demo, from_pretrained

    jobs = {name: Job.from_args(args, name) for name in dict.fromkeys(("full", job.method))}
    document = demo.document()
    with Display(not args.json) as display:
        display.stage("loading the bundled model")
        reader = Reader.open(folder, document.text + document.question)
        for own in jobs.values():
            own.check(reader)
        model = from_pretrained(folder)
        results = {name: own.run(model, reader, display) for name, own in jobs.items()}
    texts = {name: reader.text(result) for name, result in results.items()}
    right = {name: is_right(text, document.answer) for name, text in texts.items()}
    question = document.question.strip()
    if args.json:
        records = {
            name: {**own.record(results[name], texts[name]), "correct": right[name]}
            for name, own in jobs.items()
        }
        asked = {"model": "bundled", "question": question, "expected": document.answer}
        _write(json.dumps({**asked, **records[job.method], "full": records["full"]}) + "\n")
        return
    console = Console(highlight=False)
    console.print(
        f"The bundled model read a document and a question, {len(reader.prompt):,} tokens:\n"
    )
    console.print(f"{question} ...\n", style="bold", markup=False)
    console.print(answers(document.answer, texts, right))
    console.print(comparison(results, {name: own.budget for name, own in jobs.items()}))
    console.print(
        f"Bytes are those of the whole cache, with room for {args.max_new:,} new tokens.\n"
        "Other methods: kvjax methods\n"
        "Many questions: kvjax compare\n"
        "Your own text: kvjax generate --model DIR_OR_ID --prompt TEXT",
        style="dim",
    )
    for name, result in results.items():
        print_dropped(result, name)


def methods(args: argparse.Namespace) -> None:
    """`kvjax methods`: a table, or one JSON object."""
    if args.json:
        kinds = {"methods": METHODS, "wrappers": WRAPPERS, "storage": STORAGE}
        _write(json.dumps({part: _describe(names) for part, names in kinds.items()}) + "\n")
        return
    console = Console(highlight=False)
    width = console.width, max(map(len, METHODS | WRAPPERS | STORAGE))
    console.print(listing(METHODS, "method", *width))
    console.print(listing(WRAPPERS, "wrapper", *width))
    console.print(listing(STORAGE, "storage", *width))
    console.print(
        "budget: slots per KV head (256), or a share of the prompt (0.2).\n"
        "Compositions: chain(snapkv(window=16), h2o(budget=64)), every(snapkv, steps=64),\n"
        "chain(snapkv, quantize(bits=4)), chain(clusterkv, offload).",
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
