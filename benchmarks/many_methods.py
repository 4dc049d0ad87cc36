"""Memory maps and memory of one process that generates with every method at many lengths.

    python benchmarks/many_methods.py --out benchmarks/results/many_methods.json

This is what a notebook does that sweeps methods. The bundled model reads prompts of `--lengths`
tokens, a program each, and kvjax drops its compiled code where half of `--most-maps` is reached.
`maps` are those of the process after each length, `megabytes` its memory after each method.
"""

from __future__ import annotations

from pathlib import Path

from common import Rows, parser_of

import kvjax
from kvjax import compiled_code
from kvjax.evaluation.memory import resident
from kvjax.models import demo, from_pretrained, load_tokenizer
from kvjax.registry import METHODS


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "out")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--most-maps", type=int, help="by default what Linux gives a process")
    args = parser.parse_args()
    if args.most_maps is not None:
        limit = Path(args.out).with_suffix(".limit")
        limit.write_text(f"{args.most_maps}\n")
        compiled_code._MOST_MAPS = limit
    shape = {name: vars(args)[name] for name in ("lengths", "new", "budget", "most_maps")}
    rows = Rows(args.out, {"benchmark": "many_methods", "shape": shape})
    model = from_pretrained(demo.directory())
    tokenizer = load_tokenizer(demo.directory())
    text = tokenizer("The keeper of the lighthouse counted the ships. " * 300).input_ids
    for method in METHODS:
        transform = kvjax.parse(method, args.budget)
        if method == "infinigen":
            transform = kvjax.calibrated(transform, model, [text[:256]])
        maps = []
        for length in args.lengths:
            kvjax.generate(model, [text[:length]], transform=transform, max_new_tokens=args.new)
            maps.append(compiled_code.memory_maps())
        megabytes = round(resident("VmRSS") / 1e6)
        rows.add(method=method, maps=maps, megabytes=megabytes)


if __name__ == "__main__":
    main()
