"""`kvjax generate`: a prompt is continued, or the bundled model answers its question."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import kvjax
from kvjax.budgets.budgets import check_count
from kvjax.cli.inputs import model_folder, read_text
from kvjax.cli.terminal import Display, host_bytes, print_dropped, print_figures, seconds, share
from kvjax.evaluation import is_right
from kvjax.evaluation.grid import Candidate
from kvjax.generation.checks import check_prompts
from kvjax.generation.continuation import Continuation, decoder, new_text

if TYPE_CHECKING:
    from kvjax.models.demo import Document

_TEXT_TOKENS, _ANSWER_TOKENS = 128, 16  # most new tokens where none are given
_CALIBRATION_TOKENS = 1024  # of the prompt, for methods that are calibrated
_FIGURES = (  # of a generation, as `--json` prints them
    "ttft_s", "tpot_s", "compile_s", "cache_bytes", "full_cache_bytes", "memory_bytes", "dropped",
)  # fmt: skip


def generate(args: argparse.Namespace) -> None:
    """`kvjax generate`: continues a prompt; without model and prompt, answers a question."""
    # Imported here: kvjax does without kvjax.models, and help without what they import.
    from kvjax.models import demo, from_pretrained, load_tokenizer, read_config

    text = _prompt_text(args)
    asks = text is None
    candidates = {
        name: Candidate.of(name, args.budget)
        for name in dict.fromkeys(("full", args.method) if asks else (args.method,))
    }
    if args.max_new is None:
        args.max_new = _ANSWER_TOKENS if asks else _TEXT_TOKENS
    check_count("--max-new", args.max_new, 1)
    sampling = kvjax.Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    if asks and args.model is not None:
        raise ValueError("--model needs a --prompt or a --prompt-file")
    folder = model_folder(args.model)
    document = demo.document() if asks else None
    with Display(not args.json) as display:
        display.show(0, None, f"loading the {'bundled ' if args.model is None else ''}model")
        config = read_config(folder)  # before the tokenizer: it says what is not supported
        tokenizer = load_tokenizer(folder)
        prompt = tokenizer(document.text + document.question if asks else text).input_ids
        for one in candidates.values():
            layers = kvjax.bind(one.transform, config.num_layers)
            check_prompts(config, [prompt], layers, args.max_new)
        model = from_pretrained(folder)
        decode = decoder(tokenizer)
        continuation = Continuation(decode, prompt)

        def stream(rows: list[list[int]]) -> None:
            display.stop()
            print(continuation.add(rows[0]), end="", flush=True)

        records = {}
        for name, one in candidates.items():
            transform = kvjax.calibrated(one.transform, model, [prompt[:_CALIBRATION_TOKENS]])
            display.show(0, None, f"compiling for {name}")
            result = kvjax.generate(
                model, [prompt], transform=transform, max_new_tokens=args.max_new,
                sampling=sampling, seed=args.seed, end_tokens=config.eos_token_ids,
                on_tokens=None if asks or args.json else stream,
                on_layer=_on_layer(display, model.num_layers, len(prompt)),
            )  # fmt: skip
            records[name] = _record(one, result, new_text(decode, prompt, result.tokens[0]))
            if asks:
                records[name]["correct"] = is_right(records[name]["text"], document.answer)
    if args.json:
        about = {"model": "bundled" if args.model is None else args.model}
        if asks:
            about |= {"question": document.question.strip(), "expected": document.answer}
            about["full"] = records["full"]
        print(json.dumps({**about, **records[args.method]}))
        return
    if asks:
        _print_answers(document, args.max_new, records)
    else:
        print(continuation.finish(), flush=True)
        print_figures(records[args.method])
    for name, record in records.items():
        print_dropped(name, record["dropped"])


def _prompt_text(args: argparse.Namespace) -> str | None:
    """The prompt that was given, None if none was."""
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    if text is None:
        return None
    if not text.strip():
        raise ValueError("the prompt is empty")
    try:
        text.encode("utf-8")  # arguments may hold bytes that are no text
    except UnicodeEncodeError as error:
        raise ValueError("the prompt is not UTF-8 text") from error
    return text


def _on_layer(display: Display, layers: int, tokens: int) -> Callable[[int], None] | None:
    """An `on_layer` that displays progress; None where nothing is shown."""

    def show(layer: int) -> None:
        what = f"reading {tokens:,} tokens: layer {layer + 1}/{layers}"
        display.show(layer + 1, layers, what)

    return None if display.disable else show


def _record(candidate: Candidate, result: kvjax.Generation, text: str) -> dict[str, Any]:
    """The result as `--json` prints it."""
    return {
        "text": text,
        "method": candidate.method,
        "budget": candidate.budget,
        "prompt_tokens": result.prompt_tokens[0],
        "new_tokens": len(result.tokens[0]),
        **{name: getattr(result, name) for name in _FIGURES},
        "recall": None if result.recall is None else result.recall._asdict(),
    }


def _print_answers(document: Document, max_new: int, records: Mapping[str, dict]) -> None:
    """The question, the answer of each method, and what each one's cache costs."""
    answers = Table.grid(padding=(0, 3, 0, 0))
    answers.add_column(style="bold", overflow="fold")
    answers.add_column(no_wrap=True)
    answers.add_column(overflow="fold")
    answers.add_row("expected", "", document.answer, style="dim")
    costs = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    costs.add_column("method", style="bold", overflow="fold")
    for heading in ("budget", "cache", "of full", "first token", "per token"):
        costs.add_column(heading, justify="right", no_wrap=True)
    for name, record in records.items():
        verdict = Text("right", "green") if record["correct"] else Text("wrong", "red")
        answers.add_row(Text(name), verdict, Text(" ".join(record["text"].split())))
        budget = "-" if record["budget"] is None else str(record["budget"])
        times = seconds(record["ttft_s"]), seconds(record["tpot_s"])
        costs.add_row(Text(name), budget, decimal(record["cache_bytes"]), share(record), *times)
        if host_bytes(record):
            costs.caption = f"{decimal(host_bytes(record))} of {name} are in host memory."
    tokens = records["full"]["prompt_tokens"]
    console = Console(highlight=False)
    console.print(f"The bundled model read a document and a question, {tokens:,} tokens:\n")
    console.print(f"{document.question.strip()} ...\n", style="bold", markup=False)
    console.print(Padding(answers, (0, 0, 0, 1)))  # in line with the other table
    console.print(costs)
    console.print(
        f"Bytes are those of the whole cache, with room for {max_new:,} new tokens.\n"
        "Other methods: kvjax methods\n"
        "Many questions: kvjax compare\n"
        "Your own text: kvjax generate --model DIR_OR_ID --prompt TEXT",
        style="dim",
    )
