"""Bytes of documents that wait for questions, in memory and on disk, and what they consist of.

    python benchmarks/at_rest.py --model FOLDER --text book.txt --profile heads.safetensors \\
        --out benchmarks/results/at_rest_smollm2.json

The first tokens of the text are read as `kvjax read` does, with room for 256 tokens of questions
and 128 of answers, once for each method and length.

- `kept_slots`: slots of a row and head that hold a token, in the mean of all heads.
- `needed`: bytes of the keys and values of as many tokens in their form, scales included.
- `at_rest`, `awake`: bytes of the caches between calls, and of the copy that a question gets.
- `on_disk`: bytes of the files of `kvjax.save_context`, which compresses what it writes.
- `consists`: what the bytes at rest are for. `slots` are positions, masses and pins; `waiting` are
  rows that are not encoded yet; `free` are places that round the numbers of slots up.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import Rows, parser_of

import kvjax
from kvjax.attention.layer import LayerCache, layer_caches
from kvjax.models import from_pretrained, load_tokenizer

QUESTIONS, ANSWERS = 256, 128  # the defaults of `kvjax read`
TOKENS = (300, 1700, 7800)
METHODS = (
    "full", "quantize", "quantize(bits=4)", "by_head(kvzip(budget=0.1))",
    "by_head(chain(kvzip(budget=0.1), quantize(bits=4)))",
    "by_head(chain(own_queries(budget=0.1), quantize(bits=4)))",
)  # fmt: skip


def body(payload: Any) -> Any:
    """The arrays of a payload that have rows for all slots."""
    return getattr(payload, "encoded", payload)


def bytes_of_rows(part: LayerCache) -> int:
    """Bytes of the keys and values of all slots, in their form."""
    return kvjax.nbytes([body(payload) for payload in (part.kv.k, part.kv.v)])


def consists(part: LayerCache, awake: LayerCache) -> dict[str, float]:
    """Bytes of one rectangle of slots at rest, by what they are for."""
    kv = part.kv
    needed = float(awake.kv.live.mean()) * bytes_of_rows(awake)
    parts = {
        "needed": needed, "slots": kvjax.nbytes((kv.position, kv.log_mass, kv.pinned)),
        "columns": kvjax.nbytes(kv.columns),
        "waiting": kvjax.nbytes([getattr(payload, "recent", None) for payload in (kv.k, kv.v)]),
        "free": bytes_of_rows(part) - needed,
    }  # fmt: skip
    return {**parts, "state": kvjax.nbytes(part) - sum(parts.values())}


def measured(context: kvjax.Context, model: Any) -> dict[str, Any]:
    """The figures of one document."""
    parts = [
        consists(*pair)
        for pair in zip(layer_caches(context.held), layer_caches(context.caches), strict=True)
    ]
    total = {name: round(sum(part[name] for part in parts)) for name in parts[0]}
    needed = total.pop("needed")
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save_context(Path(folder) / "context", context, model=model)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        on_disk = sum(path.stat().st_size for path in files)
    return {
        "kept_slots": round(context.occupancy.kept_slots, 1), "needed": needed,
        "at_rest": context.nbytes, "awake": context.awake_nbytes, "on_disk": on_disk,
        "over_needed": round(context.nbytes / needed, 3), "consists": total,
    }  # fmt: skip


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--text", required=True, help="UTF-8 file")
    parser.add_argument("--profile", required=True, help="of kvjax profile, for by_head")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    args = parser.parse_args()
    model, tokenizer = from_pretrained(args.model), load_tokenizer(args.model)
    tokens = tokenizer(Path(args.text).read_text()).input_ids
    settings = {"model": Path(args.model).name, "questions": QUESTIONS, "answers": ANSWERS}
    rows = Rows(args.out, {"benchmark": "at_rest", "settings": settings})
    for length in args.tokens:
        for method in METHODS:
            if rows.has(tokens=length, method=method):
                continue
            text = method
            if method.startswith("by_head"):
                text = f"{method[:-1]}, profile={args.profile!r})"
            context = kvjax.read(
                model, [tokens[:length]], transform=text, max_prompt=length + QUESTIONS,
                max_new=ANSWERS, buckets=[length], document=tokenizer,
            )  # fmt: skip
            rows.add(tokens=length, method=method, **measured(context, model))


if __name__ == "__main__":
    main()
