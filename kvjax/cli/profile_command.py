"""`kvjax profile`: measures which share of a cache each head of a model needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
from rich.filesize import decimal

import kvjax
from kvjax.budgets.profile import shares
from kvjax.checks import check_count
from kvjax.cli import options
from kvjax.cli.inputs import check_text, read_text
from kvjax.cli.opened import OpenedModel, kept_sample
from kvjax.cli.terminal import Display
from kvjax.files import check_folder, writing
from kvjax.generation.calibration import measured, sample_of

DESCRIPTION = """\
Reads pieces of a text, scores their tokens by a method, and writes to a file which
share of the tokens each head of the model needs at any budget. by_head(METHOD) in the
other commands makes such a profile itself and keeps it in the user's cache;
by_head(METHOD, profile='FILE') takes the one that is written here."""
EXAMPLES = """\
examples:
  kvjax profile --model DIR --method kvzip --out heads.safetensors
  kvjax read book.txt --out book --model DIR
      --method "by_head(kvzip, profile='heads.safetensors')" --budget 0.05"""
_BUDGETS = (0.05, 0.1, 0.2)  # of which the shares are printed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    options.add_model(parser)
    parser.add_argument("--method", metavar="NAME", default="kvzip",
        help="a method that by_head takes, such as kvzip or snapkv (default: kvzip)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", required=True, help="safetensors file to write")
    parser.add_argument("--text", metavar="FILE",
        help="UTF-8 file to take the pieces from; - is standard input (default: the text that "
        "comes with the bundled model)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax profile`: writes the profile of a model's heads to a file."""
    out = Path(args.out)
    check_folder(out.parent)
    if out.is_dir():
        raise ValueError(f"--out must be a file, got the folder {out}")
    by_head = kvjax.ByHead(kvjax.parse(args.method, options.BUDGET))
    method = kvjax.unparse(by_head.method, budget=False)
    text = None if args.text is None else check_text(read_text(args.text), "--text")
    with Display(not args.json) as display:
        opened = OpenedModel(args.model, display)
        max_positions = opened.config.max_positions
        sample = kept_sample(opened.tokenizer, max_positions) if text is None else sample_of(
            opened.tokenizer(text, add_special_tokens=False).input_ids, max_positions
        )  # fmt: skip
        check_count("tokens of each piece of --text", len(sample[0]), 8)
        model = opened.load(args)
        display.show(0, None, f"reading {len(sample)} pieces of {len(sample[0]):,} tokens")
        start = time.monotonic()
        profile = measured(
            by_head, model, sample, opened.tokenizer,
            display.measuring(model.num_layers, len(sample)),
        )  # fmt: skip
        seconds = time.monotonic() - start
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        by_head = dataclasses.replace(by_head, profile=profile)
        kvjax.save_calibration(out, by_head, model)
    layers, heads, _ = profile.table.shape
    each = {budget: np.sort(shares(profile.table, budget), None) for budget in _BUDGETS}
    record = {
        "model": opened.name, "method": method, "out": args.out,
        "pieces": len(sample), "tokens": len(sample[0]), "layers": layers, "kv_heads": heads,
        "seconds": seconds, "bytes": out.stat().st_size,
        "largest_share": {str(budget): float(x[-1]) for budget, x in each.items()},
        "median_share": {str(budget): float(np.median(x)) for budget, x in each.items()},
    }  # fmt: skip
    if args.json:
        print(json.dumps(record))
        return
    print(
        f"{args.out}: {layers} layers of {heads} KV heads by the scores of {method}, made "
        f"from {len(sample)} pieces of {len(sample[0]):,} tokens in {seconds:.0f} s, "
        f"{decimal(record['bytes'])}"
    )
    for budget, x in each.items():
        print(
            f"at {budget}: the head that needs most keeps {x[-1]:.1%} of its tokens, the median "
            f"head {np.median(x):.1%}"
        )
