"""Documents that are read in pieces: peak memory, seconds, and needles, beside one reading.

    python benchmarks/long_documents.py memory --model FILE --text essays.txt \\
        --out benchmarks/results/long_documents_memory_qwen.json
    python benchmarks/long_documents.py needles --model FILE --text essays.txt \\
        --sample wikitext2.valid.txt --out benchmarks/results/long_documents_needles_qwen.json

`memory`: a process of its own reads a document by each method, as a whole and in pieces of 2,048
tokens. `grown` is by how much its greatest resident memory (Linux) is above what it was before, and
`processor_seconds` are those that all cores have spent since; in pieces both are noted behind each
piece, when all has been compiled. A whole prompt is read once, and its figures have compiling in
them. `layer` is the most temporary memory and output that XLA says of a compiled function of a
layer.

`needles`: essays with four needles each, at depths that are spread evenly, all asked for in one
batch when the document has been read and compressed; `found` is the share that greedy decoding
writes, with Wilson's interval. Every method keeps 1,024 slots in the mean of all heads, of the same
documents and with the same room, read as a whole and in pieces; `full` keeps everything. Methods
that read the whole document share one reading (`kept_documents.py`), and each reads pieces of its
own. `bytes` are those at rest, in float32.

Rows go into `--cells`, a document and a method at a time, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Rows, parser_of, save, watch_layers

PIECE, SLOTS = 2048, 1024
MEMORY = (4_000, None), (16_000, None), (32_000, PIECE)  # tokens of a document, and of a piece
METHODS = f"snapkv(budget={SLOTS})", f"own_queries(budget={SLOTS})"
NEEDLES = 4
FULL = "full"
ASKED = {  # by what they are called, since a share depends on the length
    "own_queries": "own_queries(budget={slots})",
    "by_head(own_queries)": "by_head(own_queries(budget={share}))",
}
ROOM, NEW = 96, 24


def worker(args: argparse.Namespace, text: str, tokens: int, piece: int | None) -> None:
    """Reads a document of so many tokens by one method, and prints JSON."""
    import jax

    import kvjax
    from kvjax.compiled_code import give_back_freed
    from kvjax.evaluation.memory import forget_peak, resident
    from kvjax.models import from_pretrained, load_tokenizer

    model, tokenizer = from_pretrained(args.model, dtype="float32"), load_tokenizer(args.model)
    document = tokenizer(Path(args.text).read_text()).input_ids[:tokens]
    layers = watch_layers()

    def read(document: list[int], on_piece: Any = None) -> kvjax.Context:
        in_pieces = {} if piece is None else {"piece": piece, "on_piece": on_piece}
        return kvjax.read(
            model, [document], transform=text, max_prompt=tokens + ROOM, max_new=NEW,
            document=tokenizer, **in_pieces,
        )  # fmt: skip

    if piece is not None:
        read(document[: 2 * piece])  # the programs of the first piece, and of all further ones
    give_back_freed()
    forget_peak()
    before, start, behind = resident("VmRSS"), time.process_time(), []

    def note(context: kvjax.Context) -> None:
        spent, grown = time.process_time() - start, resident("VmHWM") - before
        behind.append([int(context.length[0]), grown, round(spent, 1)])

    context = jax.block_until_ready(read(document, note))
    note(context)
    temporary, outputs = max(layers)
    row = {
        "behind": behind, "cache_bytes": context.nbytes,
        "layer": {"temporary": temporary, "outputs": outputs},
    }  # fmt: skip
    print(json.dumps(row))


def memory(args: argparse.Namespace) -> None:
    """Measures memory and seconds."""
    rows = Rows.of(args, {"benchmark": "long_documents_memory", "piece": PIECE, **about(args)})
    for text, (tokens, piece) in itertools.product(METHODS, MEMORY):
        key = {"method": text, "tokens": tokens, "piece": piece}
        if rows.has(**key):
            continue
        line = [sys.executable, __file__, "memory", "--model", args.model, "--text", args.text]
        line += ["--worker", json.dumps([text, tokens, piece])]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
        rows.add(**key, **json.loads(done.stdout))
    save(args.out, {**rows.about, "rows": rows.rows})


def needles(args: argparse.Namespace) -> None:
    """Measures the needles that are found."""
    from kept_answers import haystacks
    from kept_documents import Compositions

    import kvjax
    from kvjax.evaluation import is_right

    named = {"benchmark": "long_documents_needles", "piece": args.piece, "slots": args.slots}
    rows, text = Rows.of(args, {**named, **about(args)}), Path(args.text).read_text()
    for length in args.lengths:
        sizes = {"slots": args.slots, "share": round(args.slots / (length - ROOM), 4)}
        texts = {FULL: FULL} | {name: text.format(**sizes) for name, text in ASKED.items()}
        kept = Compositions(args.model, args.sample, texts.values(), length, ROOM, NEW)
        model, tokenizer = kept.model, kept.tokenizer
        for document in haystacks(tokenizer, text, length, args.documents, NEEDLES):
            once = None
            for piece, name in itertools.product((None, args.piece), texts):
                key = {
                    "method": name, "tokens": length, "piece": piece, "number": document.number,
                }  # fmt: skip
                if rows.has(**key) or (name == FULL and piece is not None):
                    continue
                transform = kept.transforms[texts[name]]
                if piece is None:
                    once = once or kept.read(document.tokens)
                    context = once.context(transform)
                else:
                    once = None  # gives its memory back
                    context = kvjax.read(
                        model, [document.tokens], transform=transform, max_prompt=length + ROOM,
                        max_new=NEW, buckets=[length], document=tokenizer, piece=piece,
                    )  # fmt: skip
                written = kvjax.generate(
                    model, document.questions, context=context, max_new_tokens=NEW, end_tokens=(),
                    buckets=[ROOM],
                ).tokens  # fmt: skip
                answers = zip(tokenizer.batch_decode(written), document.answers, strict=True)
                right = [float(is_right(answer, value)) for answer, (_, value) in answers]
                rows.add(**key, scores=right, depths=document.depths, bytes=context.nbytes)
    save(args.out, {**rows.about, "rows": rows.rows, "found": found(rows.rows)})


def found(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the share of needles that each method finds in documents of each length."""
    from kvjax.evaluation import Estimate

    by_cell: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((row["tokens"], row["method"], row["piece"]), []).append(row)
    result = []
    for (tokens, method, piece), of_cell in by_cell.items():
        scores = [score for row in of_cell for score in row["scores"]]
        estimate = Estimate.of(scores)._asdict()
        result.append({"tokens": tokens, "method": method, "piece": piece, **estimate})
    return result


def about(args: argparse.Namespace) -> dict[str, str]:
    """Returns what the rows of a file have in common."""
    return {"model": Path(args.model).name}


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "cells")
    parser.add_argument("what", choices=("memory", "needles"))
    parser.add_argument("--text", required=True, help="documents, and what needles are hidden in")
    parser.add_argument("--sample", help="text from which profiles are made")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_000, 16_000, 32_000])
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--piece", type=int, default=PIECE, help="tokens of a piece, for needles")
    parser.add_argument("--slots", type=int, default=SLOTS, help="that needles' methods keep")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.worker is not None:
        worker(args, *json.loads(args.worker))
        return
    {"memory": memory, "needles": needles}[args.what](args)


if __name__ == "__main__":
    main()
