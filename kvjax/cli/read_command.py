"""`kvjax read`: reads documents once, and saves their compressed caches."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.filesize import decimal

import kvjax
from kvjax.attention.init_cache import default_dtype
from kvjax.cli import options
from kvjax.cli.inputs import check_text, read_text
from kvjax.cli.library import TOGETHER, batches, check_no_library, places
from kvjax.cli.opened import OpenedModel, check_counts
from kvjax.cli.saved import Reading, Saved, absolute_model, check_out
from kvjax.cli.sizes import Whole
from kvjax.cli.terminal import Display, no_entry, print_line, share
from kvjax.compose.walks import walk
from kvjax.generation.prompt_checks import check_prompts, longest_turn
from kvjax.messages import brief
from kvjax.protocol import Stage
from kvjax.transforms.document_budget import with_room_at_most

_METHOD = "quantize"
_MAX_QUESTIONS = 256  # tokens of a question, where the method has room for them

DESCRIPTION = """\
Reads a document into a compressed cache and saves the cache in a folder, for
kvjax ask and kvjax chat. A document that the folder holds is replaced.
--piece N reads and compresses N tokens at a time, and saves after each piece:
the same command, given again after Ctrl-C, goes on from there.
Several documents make a library: each is saved in FOLDER, in a folder with the name
of its file without the ending. Those of similar length are read together. Given
again, the command leaves documents that are there as they are, and reads the rest; so
it goes on after Ctrl-C, and adds new documents. kvjax ask asks all or one.
By default every token stays, in 8 bits. --bytes says how small the document has
to be: 0.06 keeps about a quarter of the tokens, those that the document itself
attends to, keys in 4 bits and values in 2. On two small models that answers questions
about prose nearly as well as the full cache, though the smaller one finds fewer
needles; with half of these bytes, both lose more. The folder holds the document
alone; questions and answers get room when they come. The command says how many bytes
the document takes without and with room, and names a stored form that keeps every
token if that takes no more bytes with room."""
EXAMPLES = """\
examples:
  kvjax read book.txt --out book --model DIR
  kvjax read book.txt --out book --model DIR --bytes 0.06
  kvjax read book.txt --out book --model DIR --piece 2048
  kvjax read book.txt --out book --model DIR
      --method 'by_head(chain(kvzip, quantize))' --budget 0.2
  kvjax ask book 'Who is Ishmael?' 'What is the name of the ship?'
  kvjax chat book
  kvjax read reports/*.txt --out library --model DIR
  kvjax ask library 'What was decided?'"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("documents", metavar="DOCUMENT", nargs="+",
        help="UTF-8 file; - is standard input")  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", required=True,
        help="where the document is saved; several documents get folders in it")  # fmt: skip
    options.add_model(parser)
    options.add_template(parser, "the document")
    # The default method keeps every token: questions are not known when the document is read.
    options.add_method(parser, default=_METHOD)
    parser.add_argument("--bytes", metavar="SHARE", type=float,
        help="take the composition of kvjax.smallest for this share of the bytes of the full cache "
        "in bfloat16, such as 0.1, in place of --method")  # fmt: skip
    parser.add_argument("--max-questions", metavar="TOKENS", type=int,
        help="room for the tokens of questions, and the most room that kvzip and own_queries get "
        "(default: 256, or fewer if the method has room for fewer)")  # fmt: skip
    parser.add_argument("--max-new", metavar="N", type=int, default=128,
        help="room for the tokens of an answer (default: 128)")  # fmt: skip
    parser.add_argument("--piece", metavar="TOKENS", type=int,
        help="read and compress this many tokens at a time, such as 2048, which bounds the "
        "memory (default: all at once)")  # fmt: skip


@dataclass(frozen=True)
class _Document:
    """A document that is to be read.

    Args:
      out: the folder of its context.
      tokens: its token ids.
      saved: what is saved with the context when all of it has been read.
      read: how many tokens an earlier command of this kind has read.
    """

    out: Path
    tokens: Sequence[int]
    saved: Saved
    read: int

    @property
    def rest(self) -> int:
        """Tokens that are still to be read."""
        return len(self.tokens) - self.read


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax read`: saves the compressed caches of documents in folders."""
    check_counts(args, "max_questions", "max_new", "piece")
    several, out = len(args.documents) > 1, Path(args.out)
    if not several:
        check_no_library(out, f"--out {out / 'NAME'} adds one")
    outs = places(args.documents, out) if several else [out]
    for place in outs:
        check_out(place)
    if args.bytes is not None and (args.method != _METHOD or args.budget is not None):
        raise ValueError("--bytes chooses the method and its budget: give one or the other")
    candidate = options.candidate(args)  # raises before the model is opened
    texts = [
        check_text(read_text(name), name if several else "the document") for name in args.documents
    ]
    with Display(not args.json) as display:
        opened = OpenedModel(args.model, display)
        if args.bytes is not None:
            args.method = kvjax.unparse(kvjax.smallest(args.bytes, head_dim=opened.config.head_dim))
            candidate = options.candidate(args)
        dialogue = opened.dialogue(args)
        tokens = [dialogue.document(text) for text in texts]
        longest = max(map(len, tokens))
        max_questions = _max_questions(args, opened.bind(candidate.transform), longest)
        transform = with_room_at_most(candidate.transform, max_questions)
        layers, room = opened.bind(transform), max_questions + args.max_new
        for ids, name in zip(tokens, args.documents, strict=True):
            with _naming(name if several else None):
                check_prompts(opened.config, [ids], layers, room, args.piece)
        documents = []
        for place, ids, name in zip(outs, tokens, args.documents, strict=True):
            saved = Saved(
                model=absolute_model(args.model), document=name, **candidate.named(),
                raw=not dialogue.templated,
                reading=Reading.of(ids, args.piece, max_questions, args.max_new),
            )  # fmt: skip
            earlier = Saved.before(place, saved, transform)
            done = 0 if earlier is None else earlier.read
            # One document is read again, as what is there already may be meant to be replaced. In
            # pieces it is not: the command may have been killed behind the last one.
            done = 0 if done == len(ids) and not several and not args.piece else done
            documents.append(_Document(place, ids, saved, done))
        left = [document for document in documents if document.rest or not several]
        records, whole = {}, None
        if left:
            records, whole = _read(left, tokens[0], transform, args, opened, display)
    about = {
        **dataclasses.replace(documents[0].saved, reading=None).about(),
        "model": opened.name, "out": args.out, "max_questions": max_questions,
        "max_new": args.max_new, "whole": None if whole is None else whole._asdict(),
    }  # fmt: skip
    del about["document"]
    opened.print_double_start(dialogue, tokens)
    rows = [
        {
            "document": document.saved.document, "prompt_tokens": len(document.tokens),
            **records.get(document.out, {}),
        }
        for document in documents
    ]  # fmt: skip
    if several:
        _print_library(documents, rows, about, args)
    elif args.json:
        print(json.dumps(about | rows[0]))
    else:
        _print_document(args.out, rows[0], args.method)
        print(
            f"{rows[0]['kept_slots']:,.0f} slots per head; {decimal(rows[0]['awake_bytes'])} while "
            "it answers, with room for questions and answers"
        )
        print(f"kvjax ask {args.out} QUESTION, or kvjax chat {args.out}, goes on from it")
    looks_at_the_end = any(
        x.stage == Stage.EVICT and x.needs.query_window for x in walk(candidate.transform)
    )
    if not args.json and left and looks_at_the_end:
        print_line(
            f"{args.method} keeps what the document's end looks at, and knows no question: "
            "--method quantize keeps every token", "dim"
        )  # fmt: skip


def _read(
    documents: Sequence[_Document],
    sample: Sequence[int],
    transform: kvjax.KVTransform,
    args: argparse.Namespace,
    opened: OpenedModel,
    display: Display,
) -> tuple[dict[Path, dict[str, Any]], Whole | None]:
    """Reads documents, and saves each one.

    Args:
      sample: the text that the method learns from, as far as it does.
      transform: the method with its budget, which has learned nothing yet.

    Returns:
      Figures of each document by its folder, and the stored form that keeps every token in no more
      bytes than the longest one takes.
    """
    model, layers = opened.load(args), opened.config.num_layers

    def load(document: _Document) -> kvjax.Context:
        return kvjax.load_context(document.out, model, tokenizer=opened.tokenizer)

    if all(document.read for document in documents):
        transform = load(documents[0]).transform
    else:
        transform = opened.calibrated(transform, model, sample)
    reading = documents[0].saved.reading
    max_questions, max_new = reading.max_questions, reading.max_new
    longest = max(len(document.tokens) for document in documents)
    # Before anything is read, which may take minutes.
    whole = Whole.instead_of_context(
        model, transform, max_prompt=longest + max_questions, max_new=max_new
    )
    if whole is not None and not args.json:
        display.line(whole.line(args.method))
    if len(args.documents) == 1:
        # A document is as long as it is: padding it would be room that nobody has asked for.
        groups = [(longest, [0])]
    else:
        positions, room = opened.config.max_positions, max_questions + max_new
        lengths = [len(document.tokens) for document in documents]
        most = None if positions is None else positions - room
        groups = batches(lengths, most, 0 if args.piece else TOGETHER)
    total, read = sum(document.rest for document in documents), 0
    records: dict[Path, dict[str, Any]] = {}

    def save(document: _Document, context: kvjax.Context) -> None:
        reading = document.saved.reading._replace(read=int(context.length[0]))
        about = dataclasses.replace(document.saved, reading=reading).about()
        kvjax.save_context(
            document.out, context, model=model, tokenizer=opened.tokenizer, about=about
        )

    for width, numbers in groups:
        group = [documents[number] for number in numbers]
        first, tokens = group[0], sum(len(document.tokens) for document in group)
        pieces: dict[str, Any] = {}
        if args.piece:
            pieces = {"piece": args.piece, "on_piece": functools.partial(save, first)}
        if first.read:  # in pieces, which are of one document
            display.line(f"{first.out}: goes on behind {first.read:,} tokens")
            pieces["context"] = load(first)
        else:
            pieces |= {
                "transform": transform, "max_prompt": width + max_questions, "max_new": max_new,
                "buckets": [width],
            }  # fmt: skip
        rest = sum(document.rest for document in group)
        names = f"{len(group)} documents" if len(group) > 1 else f"{len(first.tokens):,} tokens"
        context = kvjax.read(
            model, [document.tokens for document in group], **pieces, document=opened.tokenizer,
            on_compile=display.compiling,
            on_layer=display.reading(
                layers, tokens, args.piece, first.read, before=read, after=total - read - rest,
                what=names + f" ({first.out.name}, ...)" * (len(group) > 1),
            ),
        )  # fmt: skip
        read += rest
        for row, document in enumerate(group):
            display.show(layers * read, layers * total, f"writing {document.out}")
            one = context.take([row]) if len(group) > 1 else context
            save(document, one)
            records[document.out] = {
                "cache_bytes": one.nbytes, "awake_bytes": one.awake_nbytes,
                "full_cache_bytes": one.full_nbytes, "overflow": _overflow(one),
                **one.occupancy.record,
            }  # fmt: skip
    return records, whole


def _overflow(context: kvjax.Context) -> float:
    """Returns the share of vectors that found neither an entry nor room in a codebook."""
    parts = (part for layer in context.layers for part in walk(layer))
    if not any(isinstance(part, kvjax.Codebook) for part in parts):
        return 0.0  # caches would be made anew
    # Imported here: commands without a codebook start in less time.
    from kvjax.evaluation import overflow_share

    return overflow_share(context.caches)


def _print_document(out: object, row: dict[str, Any], method: str) -> None:
    """Prints a line on a document that has been read, whose cache has the default dtype."""
    print(
        f"{out}: {row['prompt_tokens']:,} tokens with {method} in {decimal(row['cache_bytes'])} at "
        f"rest, {share(row)} of the full cache in {jnp.dtype(default_dtype())}"
    )
    if row["overflow"]:
        print_line(no_entry(row["overflow"]), "dim")


def _print_library(
    documents: Sequence[_Document],
    rows: Sequence[dict[str, Any]],
    about: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Prints what a library holds of the documents that were given."""
    if args.json:
        places = [{"out": str(document.out), "read": bool(document.rest)} for document in documents]
        rows = [row | place for row, place in zip(rows, places, strict=True)]
        print(json.dumps({**about, "documents": rows}))
        return
    for document, row in zip(documents, rows, strict=True):
        if document.rest:
            _print_document(document.out, row, args.method)
    if there := sum(not document.rest for document in documents):
        print(f"{there} of {len(documents)} documents were there already, and stay as they are")
    print(
        f"kvjax ask {args.out} QUESTION asks all documents of it, kvjax ask {documents[0].out} one"
    )


@contextlib.contextmanager
def _naming(document: str | None) -> Iterator[None]:
    """Puts the name of a document before errors of the library about it; None: there is one."""
    try:
        yield
    except ValueError as error:
        if document is None:
            raise
        raise ValueError(f"{document}: {error}") from error


def _max_questions(
    args: argparse.Namespace, layers: Sequence[kvjax.KVTransform], document: int
) -> int:
    """Returns the most tokens of a question; a line on standard error says if they are few.

    Raises:
      ValueError: the method has less room than `--max-questions` asks for, or none at all.
    """
    wanted = args.max_questions or _MAX_QUESTIONS
    limited = longest_turn(layers, document + wanted, args.max_new)
    if limited is None or wanted <= limited[0]:
        return wanted
    most, method = limited
    if args.max_questions is not None or not most:
        raise ValueError(
            f"--max-questions must be at most {most}, which {brief(method)} has room for, got "
            f"{wanted}"
        )
    print_line(f"a question may have {most} tokens, which {brief(method)} has room for", "dim")
    return most
