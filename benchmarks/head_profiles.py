"""How much the shares of heads depend on the text: correlations of profiles of a model.

    python benchmarks/head_profiles.py --model FOLDER --text wikitext2.valid.txt \\
        --other tinyshakespeare.txt --out benchmarks/results/head_profiles_smollm2.json

Each profile is made from one piece of a text by the scores of KVzip, and shares `--budget` among
all heads of the model without a safeguard. `correlation` is that of the shares of two profiles, and
`moved` the part of the budget that other heads get: half the sum of the differences of the shares.
The first piece of `--text` is compared with two more of its pieces, with one of `--other`, one of
the document that comes with kvjax, and one of `--longer` tokens. `most` and `median` are shares of
heads by the first piece.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Rows, parser_of

import kvjax
from kvjax.budgets.profile import shares
from kvjax.models import demo, from_pretrained, load_tokenizer

TOKENS = 1024  # of a piece


def main() -> None:
    """Measures the pairs that the file does not have yet."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--text", required=True, help="UTF-8 file")
    parser.add_argument("--other", required=True, help="UTF-8 file")
    parser.add_argument("--longer", type=int, nargs="+", default=[4096], help="tokens")
    parser.add_argument("--budget", type=float, default=0.05)
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model), load_tokenizer(args.model)

    def shares_of(text: str, start: int, tokens: int) -> np.ndarray:
        """Shares of all heads by a piece of a text."""
        # A token has far fewer than 16 characters on average, so that this part suffices.
        ids = tokenizer(text[: 16 * (start + tokens)]).input_ids[start : start + tokens]
        if len(ids) < tokens:
            raise ValueError(f"the text must have {start + tokens} tokens")
        by_head = kvjax.ByHead(kvjax.KVzip(0.5))
        calibrated: Any = kvjax.calibrated(by_head, model, [ids], document=tokenizer)
        return shares(calibrated.profile.table, args.budget, 0.0).ravel()

    text, other = (Path(path).read_text(encoding="utf-8") for path in (args.text, args.other))
    pairs = {
        "second piece": (text, 20_000, TOKENS),
        "third piece": (text, 40_000, TOKENS),
        "other text": (other, 0, TOKENS),
        "document of kvjax": (demo.document().text, 0, TOKENS),
        **{f"{tokens} tokens": (text, 0, tokens) for tokens in args.longer},
    }
    first = shares_of(text, 0, TOKENS)
    settings = {
        "model": Path(args.model).name, "text": Path(args.text).name,
        "other": Path(args.other).name, "budget": args.budget, "heads": first.size,
        "most": round(float(first.max()), 4), "median": round(float(np.median(first)), 5),
    }  # fmt: skip
    rows = Rows(args.out, {"benchmark": "head_profiles", "settings": settings})
    for name, piece in pairs.items():
        if not rows.has(beside=name):
            found = shares_of(*piece)
            correlation = round(float(np.corrcoef(first, found)[0, 1]), 4)
            moved = round(float(np.abs(first - found).sum() / (2 * first.sum())), 4)
            rows.add(beside=name, tokens=piece[2], correlation=correlation, moved=moved)


if __name__ == "__main__":
    main()
