"""`kvjax compare` and `kvjax eval`: checks of the arguments, progress, and a table."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from rich.console import Console

from kvjax.cli import compilation_cache, options
from kvjax.cli.compare_table import print_report
from kvjax.cli.inputs import model_path, read_text
from kvjax.cli.opened import model_name
from kvjax.cli.terminal import Display
from kvjax.evaluation import Grid
from kvjax.evaluation.cells import grid
from kvjax.evaluation.cells.files import as_json
from kvjax.evaluation.comparison.compare import run as measure
from kvjax.evaluation.comparison.material import Material
from kvjax.files import check_folder
from kvjax.messages import extra_module

_GRID = (
    "methods", "budgets", "lengths", "questions", "depths", "tasks", "cases", "seed", "chat",
    "max_new",
)  # fmt: skip

DESCRIPTION = """\
Runs methods over budgets and prompt lengths: which questions about a long text
are still answered, the loss of held-out text, the error of attention, and bytes.
Prints a table and writes results.csv, pictures and report.html.
An interrupted run goes on when the same command is given again, and a command
with more methods, budgets, tasks, lengths or cases measures what is missing."""
EXAMPLES = """\
examples:
  kvjax compare
  kvjax compare --method snapkv,h2o --budget 0.1,0.2 --cases 100
  kvjax compare --model DIR --text book.txt --lengths 4096"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_grid_options(parser, "kvjax-compare", grid.LENGTHS)
    options.add_list(parser, "--tasks", value_type=options.name_list, default=grid.DEFAULT_TASKS,
        about="tasks of kvjax eval --help")  # fmt: skip


def add_grid_options(parser: argparse.ArgumentParser, out: str, lengths: tuple[int, ...]) -> None:
    """Adds the options of both commands."""
    options.add_model(parser)
    parser.add_argument("--text", metavar="FILE",
        help="UTF-8 text that the model does not know (default: a bundled one)")  # fmt: skip
    parser.add_argument(
        "--data", metavar="PATH", help="folder with the files of data sets, or the file of one"
    )
    options.add_methods(parser, grid.METHODS, full=True)
    options.add_budgets(parser, grid.BUDGETS)
    add = functools.partial(options.add_list, parser)
    add("--lengths", value_type=options.number_list, default=lengths, about="tokens of a prompt")
    add("--question", value_type=options.name_list, default=grid.QUESTIONS, dest="questions",
        about="inside: compressed with the text; after: asked once the text is "
        "compressed")  # fmt: skip
    add("--depths", value_type=options.depth_list, default=grid.DEPTHS,
        about="where in the text the answer is, 0 to 1, or how many such places")  # fmt: skip
    add("--cases", value_type=int, default=grid.CASES, metavar="N",
        about="cases per task, length and question")  # fmt: skip
    parser.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what each task says)")  # fmt: skip
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction,
        help="prompts of published tasks are messages of the model's chat template (default: as "
        "each benchmark has it; RULER and SQuAD have none)")  # fmt: skip
    add("--seed", value_type=options.seed, default=0, about="seed of the cases", metavar="N")
    add("--out", value_type=str, default=out, about="folder of the results", metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax compare` or `kvjax eval`; the exit code is 1 if a cell failed."""
    # Imported here: kvjax works without kvjax.models, and help is faster without its imports.
    from kvjax.models import demo, from_pretrained, load_tokenizer, read_config

    comparison = Grid.of(**{name: getattr(args, name) for name in _GRID})
    extra_module("matplotlib", "eval", "pictures of results")
    out = Path(args.out)
    check_folder(out)
    text = demo.held_out_text() if args.text is None else read_text(args.text)
    if not text.strip():
        raise ValueError(f"{args.text} is empty")
    path = model_path(args.model)
    config = read_config(path)
    comparison.check_model(config.num_layers)
    with Display(not args.json) as display:
        display.show(0, None, "reading the text")
        material = Material(comparison, load_tokenizer(path), text, args.data)
        material.check(config)
        display.show(0, None, "loading the model")
        compilation_cache.enable()
        model = from_pretrained(path, allow_nonfinite=args.allow_nonfinite)
        results = measure(
            material, model, end_tokens=config.eos_token_ids, name=model_name(args.model),
            out=out, on_progress=display.show, on_note=display.line,
        )  # fmt: skip
    if args.json:
        print(json.dumps({**as_json(results), "out": str(out)}))
    else:
        print_report(Console(highlight=False), results, out)
    return 1 if results.failures() else 0
