"""Question of the bundled document, which a method and the full cache answer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import kvjax
from kvjax.cli.opened import BUNDLED, OpenedModel
from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.cli.terminal import Display, figures, host_bytes, seconds, share
from kvjax.evaluation import is_right
from kvjax.evaluation.cells.grid import Candidate
from kvjax.generation.continuation import new_text
from kvjax.generation.prompt_checks import check_prompts

if TYPE_CHECKING:
    from kvjax.models.demo import Document

_NEW_TOKENS = 16  # default of --max-new


def answer(args: argparse.Namespace, candidate: Candidate) -> None:
    """Runs `kvjax generate` without a prompt, with a method and with the full cache."""
    from kvjax.models import demo

    candidates = {"full": Candidate("full", None, kvjax.Full()), args.method: candidate}
    max_new = args.max_new or _NEW_TOKENS
    with Display(not args.json) as display:
        opened = OpenedModel(None, display)
        document = demo.document()
        prompt = opened.dialogue(args).prompt(document.text + document.question)
        for candidate in candidates.values():
            check_prompts(opened.config, [prompt], opened.bind(candidate.transform), max_new)
        choice, model, records = opened.sampling(args), opened.load(args), {}
        for name, candidate in candidates.items():
            transform = opened.calibrated(candidate.transform, model, prompt)
            result = kvjax.generate(
                model, [prompt], transform=transform, max_new_tokens=max_new, sampling=choice,
                seed=args.seed, document=opened.tokenizer,
                on_compile=lambda code, name=name: display.compiling(code, name),
                on_layer=display.reading(model.num_layers, len(prompt)),
            )  # fmt: skip
            text = new_text(opened.decode, prompt, result.tokens[0])
            tokens = {"prompt_tokens": len(prompt), "new_tokens": len(result.tokens[0])}
            records[name] = {"text": text, **candidate.named(), **tokens, **figures(result)}
            records[name]["finish_reason"] = "stop" if result.ended[0] else "length"
            records[name]["correct"] = is_right(text, document.answer)
    if args.json:
        about = {"question": document.question.strip(), "expected": document.answer}
        record = {"model": BUNDLED, **about, "full": records["full"], **records[args.method]}
        print(json.dumps(record))
        return
    _print_answers(document, max_new, records)


def _print_answers(document: Document, max_new: int, records: Mapping[str, dict]) -> None:
    """Prints the question, the answer of each method, and bytes and times of its cache."""
    answers = Table.grid(padding=(0, 3, 0, 0))
    answers.add_column(style="bold", overflow="fold")
    answers.add_column(no_wrap=True)
    answers.add_column(overflow="fold")
    answers.add_row("expected", "", document.answer, style="dim")
    headings = "budget", "cache", "of full", "first token", "per token"
    costs, notes = [], []
    for name, record in records.items():
        verdict = Text("right", "green") if record["correct"] else Text("wrong", "red")
        answers.add_row(Text(name), verdict, Text(" ".join(record["text"].split())))
        budget = "-" if record["budget"] is None else str(record["budget"])
        times = seconds(record["ttft_s"]), seconds(record["tpot_s"])
        costs.append(Row([name, budget, decimal(record["cache_bytes"]), share(record), *times]))
        if host_bytes(record):
            notes.append(f"{decimal(host_bytes(record))} of {name} are in host memory.")
    tokens = records["full"]["prompt_tokens"]
    console = Console(highlight=False)
    console.print(f"The bundled model read a document and a question, {tokens:,} tokens:\n")
    console.print(f"{document.question.strip()} ...\n", style="bold", markup=False)
    console.print(Padding(answers, (0, 0, 0, 1)))  # in line with the other table
    columns = [name_column(style="bold"), *map(number_column, headings)]
    print_table(console, columns, costs, pad_edge=False)
    for note in notes:
        console.print(note, style="dim", markup=False)
    console.print(
        f"Bytes are those of the whole cache, with room for {max_new:,} new tokens.\n"
        "Other methods: kvjax methods\n"
        "Many questions: kvjax compare\n"
        "Your own text: kvjax generate --model MODEL --prompt TEXT",
        style="dim",
    )
