"""`kvjax show`: shows the results in a folder as a table, files, pictures and a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from kvjax.cli.compare_table import print_report
from kvjax.cli.terminal import Display
from kvjax.evaluation import read_results
from kvjax.evaluation.cells.files import as_json
from kvjax.files import check_folder
from kvjax.messages import extra_module

DESCRIPTION = """\
Prints the table of a comparison, finished or not, and writes results.csv,
pictures and report.html, a page that needs nothing else. Nothing is measured."""
EXAMPLES = """\
examples:
  kvjax show kvjax-compare
  kvjax show results --out page"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="folder of kvjax compare or kvjax eval")
    parser.add_argument("--out", metavar="DIR", help="where files are written (default: FOLDER)")


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax show`: prints the table, or JSON, and writes the files, pictures and page."""
    extra_module("matplotlib", "eval", "pictures of results")
    # Imported here: other commands and help do not need matplotlib, which imports slowly.
    from kvjax.evaluation.report.report import write_report

    folder = Path(args.folder)
    out = folder if args.out is None else Path(args.out)
    results = read_results(folder)
    check_folder(out)
    if not results.rows():
        raise ValueError(f"{folder} holds no finished cell yet")
    with Display(not args.json) as display:
        display.show(0, None, "drawing")
        write_report(results, out)
    if args.json:
        print(json.dumps(as_json(results)))
    else:
        print_report(Console(highlight=False), results, out)
