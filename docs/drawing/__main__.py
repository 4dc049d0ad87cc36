"""Draws the pictures of the pages: what methods do to a cache of the bundled model.

    python -m docs.drawing [--only NAME ...] [--out docs/pictures]

The model reads 512 tokens that hide one number and end with the question for it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

import kvjax
from kvjax.plot import LOOK
from kvjax.registry import METHODS, parse

from .fields import clusters, fetched, kept, received, selected, windows
from .material import BUDGET, Material
from .numbers import books, errors, idea, masses, moved, shares_of_heads, spindle

PICTURES: dict[str, Callable[[Material], Figure]] = {
    **{  # of methods that have no other picture below
        name: functools.partial(kept, transform=parse(name, BUDGET)) for name in METHODS
    },
    "idea": idea,
    "full": received,
    "kvcrush": functools.partial(
        kept, transform=kvjax.KVCrush(kvjax.SnapKV(BUDGET)), other="representatives"
    ),
    "chelsea": functools.partial(masses, transform=kvjax.Chelsea(0.3)),
    "kvmerger": functools.partial(masses, transform=kvjax.KVMerger(0.5)),
    "cam": moved,
    "clusterkv": clusters,
    "quest": functools.partial(selected, transform=kvjax.Quest(BUDGET)),
    "infinigen": lambda material: selected(
        material, kvjax.calibrated(kvjax.InfiniGen(BUDGET), material.model, [material.prompt])
    ),
    "offload": fetched,
    "codebook": books,
    "spindlekv": spindle,
    "quantize": errors,
    "everywhere": windows,
    "by_head": shares_of_heads,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws some or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "pictures")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    material = Material.load()
    with matplotlib.rc_context(LOOK):
        for name in args.only:
            figure = PICTURES[name](material)
            figure.savefig(args.out / f"{name}.svg", metadata={"Date": None})
            print(name)


if __name__ == "__main__":
    main()
