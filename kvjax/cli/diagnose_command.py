"""`kvjax diagnose`: the effect of methods on the user's own text, and the smallest cache."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from kvjax.checks import check_number
from kvjax.cli import options
from kvjax.cli.inputs import check_text, read_text
from kvjax.cli.opened import OpenedModel, check_counts
from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.cli.templates import Dialogue
from kvjax.cli.terminal import Display, no_entry, print_line
from kvjax.evaluation.diagnosis.diagnosis import (
    BUDGETS,
    ERROR,
    NEW_TOKENS,
    Diagnosis,
    Finding,
    diagnose,
    grid_of,
)
from kvjax.files import check_folder, writing
from kvjax.generation.prompt_checks import check_prompts
from kvjax.messages import extra_module
from kvjax.protocol import Full

QUESTION_TOKENS = 32
"""Number of tokens at the end of the text that serve as the question if none is given."""


_ANY = "streaming_llm"  # takes all budgets: stands for the default methods before there is a model

DESCRIPTION = """\
Reads a text once, and says for each method and budget how far the outputs of
attention are from those of the full cache, by layer and head, and how many
bytes the cache takes. Recommends the smallest cache whose error is
within --error. The question is compressed with the text, or asked afterwards."""
EXAMPLES = """\
examples:
  kvjax diagnose --prompt-file book.txt --model DIR
  kvjax diagnose --prompt-file book.txt --ask 'Who is Ishmael?' --question after
  kvjax diagnose --prompt-file book.txt --method all --error 0.05 --out pictures"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    options.add_model(parser)
    parser.add_argument("--prompt-file", metavar="FILE", required=True,
        help="UTF-8 file with the text; - is standard input")  # fmt: skip
    parser.add_argument("--ask", metavar="TEXT",
        help="a question about the text (default: the last "
        f"{QUESTION_TOKENS} tokens of the text stand for one)")  # fmt: skip
    parser.add_argument("--question", choices=("inside", "after"), default="inside",
        help="whether the question is compressed with the text, or asked afterwards (default: "
        "inside)")  # fmt: skip
    options.add_template(parser, "the text")
    options.add_methods(parser, None, full=False)
    options.add_budgets(parser, BUDGETS)
    parser.add_argument("--error", metavar="E", type=float, default=ERROR,
        help="largest relative error of the recommended cache (default: "
        f"{ERROR})")  # fmt: skip
    parser.add_argument("--new", metavar="N", type=int, default=NEW_TOKENS,
        help="number of new tokens over which errors are averaged (default: "
        f"{NEW_TOKENS})")  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="folder for pictures")


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax diagnose`: prints a table and draws pictures, or prints one JSON object."""
    check_counts(args, "new")
    check_number("--error", args.error, 0.0)
    candidates = grid_of(args.methods or [_ANY], args.budgets).candidates
    out = None if args.out is None else Path(args.out)
    if out is not None:
        extra_module("matplotlib", "eval", "pictures")
        check_folder(out)
    text = check_text(read_text(args.prompt_file), "the prompt")
    with Display(not args.json) as display:
        opened = OpenedModel(args.model, display)
        dialogue = opened.dialogue(args)
        prompt, question = _turns(dialogue, args, text)
        for candidate in candidates:
            opened.bind(candidate.transform)
        check_prompts(opened.config, [[*prompt, *question]], (Full(),), args.new)
        model = opened.load(args)
        diagnosis = diagnose(
            model, [prompt], [question], where=args.question, methods=args.methods,
            budgets=args.budgets, new_tokens=args.new, document=opened.tokenizer,
            calibrate=lambda tx: opened.calibrated(tx, model, prompt), on_progress=display.show,
        )  # fmt: skip
        pictures = []
        if out is not None:
            # Imported here: commands start in less time without matplotlib.
            from kvjax.evaluation.diagnosis.plots import draw

            with writing(out):
                out.mkdir(parents=True, exist_ok=True)
            pictures = draw(diagnosis, out, args.error)
    opened.print_double_start(dialogue, [prompt])
    record = {"model": opened.name, **diagnosis.as_json(args.error), "pictures": pictures}
    if args.json:
        print(json.dumps(record))
        return
    _show(Console(highlight=False), diagnosis, args.error)
    if out is not None:
        print(f"Files: {out}/{', '.join(pictures)}")
    for method, reason in diagnosis.left_out.items():
        print_line(f"{method} was left out: {reason}", "dim")


def _turns(dialogue: Dialogue, args: argparse.Namespace, text: str) -> tuple[list[int], list[int]]:
    """Returns tokens of the text and of the question, which is `--ask` or the text's end."""
    if args.ask is not None:
        return dialogue.document(text), dialogue.question(check_text(args.ask, "the question"))
    tokens = dialogue.prompt(text)
    if len(tokens) <= QUESTION_TOKENS:
        raise ValueError(
            f"the prompt must have more than {QUESTION_TOKENS} tokens, whose last are taken for a "
            f"question, or --ask must give one, got {len(tokens)}"
        )
    return tokens[:-QUESTION_TOKENS], tokens[-QUESTION_TOKENS:]


def _show(console: Console, diagnosis: Diagnosis, error: float) -> None:
    """Prints the table and the recommendation."""
    best = diagnosis.smallest(error)
    headings = "budget", "error", "worst\nlayer", "recall", "cache", "of full"
    rows = [
        Row(_cells(x), "bold green" if x is best else "green" if x.error <= error else "")
        for x in diagnosis.findings
    ]
    columns = [name_column(), *map(number_column, headings)]
    print_table(console, columns, rows, names=2, pad_edge=False)
    asked = "compressed with them (inside)"
    if diagnosis.where == "after":
        asked = "asked when they are compressed (after)"
    console.print(
        f"Measured on {diagnosis.prompt_tokens:,} tokens; a question of "
        f"{diagnosis.question_tokens} tokens is {asked}. error: relative error of the attention "
        "outputs. recall: share of the most attended tokens that the method keeps or selects. Both "
        f"are means over layers, heads and {diagnosis.new_tokens} new tokens. worst layer: the "
        "largest error of a layer, and its number from 0 on. cache: bytes in the devices' memory. "
        f"Green: an error of no more than {error:g}.",
        style="dim",
    )
    for finding in diagnosis.findings:
        if finding.overflow:
            console.print(Text(f"{finding.name}: {no_entry(finding.overflow)}", style="dim"))
    console.print(Text(_recommendation(diagnosis, best, error), style="bold"))


def _cells(finding: Finding) -> list[str]:
    by_layer = finding.fidelity.error.mean(1)
    worst = int(by_layer.argmax())
    method, budget = finding.candidate.key
    worst_layer = "-" if method == "full" else f"{by_layer[worst]:.2f} ({worst})"
    return [
        method, "-" if budget is None else str(budget), f"{finding.error:.3f}", worst_layer,
        f"{finding.recall:.0%}", decimal(finding.cache_bytes), f"{finding.share:.1%}",
    ]  # fmt: skip


def _recommendation(diagnosis: Diagnosis, best: Finding | None, error: float) -> str:
    if best is not None:
        recommended = (
            f"The smallest cache with an error of no more than {error:g}: {best.name}, "
            f"{best.share:.1%} of the full cache with an error of {best.error:.3f}."
        )
        if best.error <= ERROR:
            return recommended
        return (
            f"{recommended} Attention outputs then differ by {best.error:.0%} of their length, and "
            f"answers may be lost: the default is {ERROR:g}."
        )
    smaller = (finding for finding in diagnosis.findings if finding.share < 1)
    least = min(smaller, key=lambda finding: finding.error, default=None)
    nearest = "" if least is None else f" The least error is {least.error:.3f}, of {least.name}."
    return f"No cache smaller than the full one has an error of no more than {error:g}.{nearest}"
