"""`kvjax compare` and `kvjax eval`: arguments checked, progress, and a table at the end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from kvjax.cli import compilation_cache
from kvjax.cli.compare_table import print_report
from kvjax.cli.inputs import model_path, read_text
from kvjax.cli.opened import model_name
from kvjax.cli.terminal import Display, print_dropped
from kvjax.evaluation import Grid
from kvjax.evaluation.cells.files import as_json, timings
from kvjax.evaluation.comparison.compare import run
from kvjax.evaluation.comparison.material import Material
from kvjax.written_files import check_folder

_GRID = (
    "methods", "budgets", "lengths", "questions", "depths", "tasks", "cases", "seed", "chat",
    "max_new",
)  # fmt: skip


def compare(args: argparse.Namespace) -> int:
    """`kvjax compare`, and `kvjax eval`; the exit code is 1 if a cell failed."""
    # Imported here: kvjax does without kvjax.models, and help without what they import.
    from kvjax.models import demo, from_pretrained, load_tokenizer, read_config

    grid = Grid.of(**{name: getattr(args, name) for name in _GRID})
    out = Path(args.out)
    check_folder(out)
    text = demo.held_out_text() if args.text is None else read_text(args.text)
    if not text.strip():
        raise ValueError(f"{args.text} is empty")
    path = model_path(args.model)
    config = read_config(path)
    grid.check_model(config.num_layers)
    with Display(not args.json) as display:
        display.show(0, None, "reading the text")
        material = Material(grid, load_tokenizer(path), text, args.data)
        material.check(config)
        display.show(0, None, "loading the model")
        compilation_cache.enable()
        model = from_pretrained(path, allow_nonfinite=args.allow_nonfinite)
        try:
            results = run(
                material, model, end_tokens=config.eos_token_ids, name=model_name(args.model),
                out=out, on_progress=display.show,
            )  # fmt: skip
        except KeyboardInterrupt:
            display.stop()
            print(f"interrupted; the same command goes on with what {out} holds", file=sys.stderr)
            raise
    if args.json:
        record = {**as_json(results), "timings": timings(results), "out": str(out)}
        print(json.dumps(record))
    else:
        print_report(Console(highlight=False), results, out)
    for method, dropped in results.dropped().items():
        print_dropped(method, dropped)
    return 1 if results.failures() else 0
