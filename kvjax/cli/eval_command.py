"""`kvjax eval`: published tasks through the caches of methods and budgets."""

from __future__ import annotations

import argparse

from kvjax.cli.compare_command import add_grid_options, run
from kvjax.evaluation.cells import grid

__all__ = ["DESCRIPTION", "EXAMPLES", "add_options", "run"]

DESCRIPTION = """\
Runs tasks through the caches of methods and budgets, and through the full cache:
RULER (generated in a text), LongBench, ZeroSCROLLS, XSum, GSM8K and SQuAD (from
files in --data; for SQuAD, the loss of right answers is measured), the tasks of
kvjax compare, perplexity and attention. Published tasks need packages:
pip install 'kvjax[eval]'. Results are written, and runs go on, as with kvjax compare."""
EXAMPLES = """\
examples:
  kvjax eval niah_single_2 vt --model smollm2 --method snapkv --budget 0.2
  kvjax eval multi_news --model DIR --data longbench --lengths 4096
  kvjax eval squad --model DIR --data dev-v2.0.json --question after
  kvjax eval perplexity --model DIR --text book.txt --method h2o,quest --budget 0.1,0.2"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("tasks", metavar="TASK", nargs="+",
        help=f"one of {', '.join((*grid.ANSWERS, *grid.MEASURES))}")  # fmt: skip
    # Some published tasks do not fit into the shortest prompts of a comparison.
    add_grid_options(parser, "kvjax-eval", grid.LENGTHS[-1:])
