"""`kvjax show`: the results in a folder, as a table, files, pictures and a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from kvjax.cli.compare_table import print_report
from kvjax.cli.terminal import Display, print_dropped
from kvjax.evaluation import read_results
from kvjax.evaluation.cells.files import as_json
from kvjax.written_files import check_folder


def show(args: argparse.Namespace) -> None:
    """`kvjax show`: prints the table, or JSON, and writes everything that results are shown in."""
    # Imported here: other commands and help do without matplotlib, which takes a while.
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
    for method, dropped in results.dropped().items():
        print_dropped(method, dropped)
