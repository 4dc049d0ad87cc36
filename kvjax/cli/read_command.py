"""`kvjax read`: reads a document once, and saves its compressed cache."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

import kvjax
from kvjax.cli import options
from kvjax.cli.inputs import check_text, read_text
from kvjax.cli.opened import OpenedModel, check_counts
from kvjax.cli.saved import Saved, Unfinished, absolute_model, check_out
from kvjax.cli.sizes import Whole
from kvjax.cli.terminal import Display, print_line, share
from kvjax.compose.walks import walk
from kvjax.generation.prompt_checks import check_prompts, longest_turn
from kvjax.messages import brief
from kvjax.protocol import Stage
from kvjax.transforms.document_budget import with_room_at_most

_METHOD = "quantize"
_MAX_QUESTIONS = 256  # tokens of a question, where the method has room for them

DESCRIPTION = """\
Reads a document into a compressed cache and saves that in a folder, for
kvjax ask and kvjax chat. What an earlier kvjax read wrote there is replaced.
--piece reads and compresses so many tokens at a time, and saves what has been
read: the same command, given again after Ctrl-C, goes on from there.
By default every token stays, in 8 bits. --bytes says how small the document has
to be: 0.06 keeps about a quarter of the tokens, keys in 4 bits and values in 2, by
what the document itself looks at, which on two small models answers questions about
prose nearly as everything does, though the smaller one finds fewer needles; with half
of that both lose more. The folder
holds what the document takes; questions and answers get room when they come. The
bytes of both are said, and so is a stored form that keeps every token where it
takes no more bytes with room."""
EXAMPLES = """\
examples:
  kvjax read book.txt --out book --model DIR
  kvjax read book.txt --out book --model DIR --bytes 0.06
  kvjax read book.txt --out book --model DIR --piece 2048
  kvjax read book.txt --out book --model DIR
      --method 'by_head(chain(kvzip, quantize))' --budget 0.2
  kvjax ask book 'Who is Ishmael?' 'What is the name of the ship?'
  kvjax chat book"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("document", metavar="DOCUMENT", help="UTF-8 file; - is standard input")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where it is saved")
    options.add_model(parser)
    options.add_template(parser, "the document")
    # The default method keeps every token: questions are not known when the document is read.
    options.add_method(parser, default=_METHOD)
    parser.add_argument("--bytes", metavar="SHARE", type=float,
        help="take the composition of kvjax.smallest for this share of the bytes of the full cache "
        "in bfloat16, such as 0.1, in place of --method")  # fmt: skip
    parser.add_argument("--max-questions", metavar="TOKENS", type=int,
        help="room for the tokens of questions, also that of kvzip (default: 256, or fewer if the "
        "method has room for fewer)")  # fmt: skip
    parser.add_argument("--max-new", metavar="N", type=int, default=128,
        help="room for the tokens of an answer (default: 128)")  # fmt: skip
    parser.add_argument("--piece", metavar="TOKENS", type=int,
        help="read and compress so many tokens at a time, such as 2048, which bounds the memory "
        "(default: all at once)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax read`: saves a document's compressed cache in a folder."""
    check_counts(args, "max_questions", "max_new", "piece")
    out = Path(args.out)
    check_out(out)
    if args.bytes is not None and (args.method != _METHOD or args.budget is not None):
        raise ValueError("--bytes chooses the method and its budget: give one or the other")
    candidate = options.candidate(args)  # raises before the model is opened
    text = check_text(read_text(args.document), "the document")
    with Display(not args.json) as display:
        opened = OpenedModel(args.model, display)
        if args.bytes is not None:
            args.method = kvjax.unparse(kvjax.smallest(args.bytes, head_dim=opened.config.head_dim))
            candidate = options.candidate(args)
        dialogue = opened.dialogue(args)
        document = dialogue.document(text)
        max_questions = _max_questions(args, opened.bind(candidate.transform), len(document))
        room = max_questions + args.max_new
        transform = with_room_at_most(candidate.transform, max_questions)
        check_prompts(opened.config, [document], opened.bind(transform), room)
        model = opened.load(args)
        sizes = {"max_prompt": len(document) + max_questions, "max_new": args.max_new}
        about = Saved(
            model=absolute_model(args.model), document=args.document, **candidate.named(),
            raw=not dialogue.templated,
        )  # fmt: skip
        so_far = _so_far(about, args, document, sizes, model, opened)
        if so_far is None:
            transform = opened.calibrated(transform, model, document)
        else:
            transform = so_far.transform
            display.line(f"{out}: goes on behind {int(so_far.length[0]):,} tokens")
        # Before the document is read, which may take minutes.
        whole = Whole.instead_of_context(model, transform, **sizes)
        if whole is not None and not args.json:
            display.line(whole.line(args.method))

        def save(context: kvjax.Context) -> None:
            read = int(context.length[0])
            unfinished = Unfinished.of(document, args.piece, read) if read < len(document) else None
            about_it = dataclasses.replace(about, unfinished=unfinished).about()
            kvjax.save_context(
                out, context, model=model, tokenizer=opened.tokenizer, about=about_it
            )

        # A document is as long as it is: padding it would be room that nobody has asked for.
        new = {"transform": transform, **sizes, "buckets": [len(document)]}
        pieces = {"piece": args.piece, "on_piece": save, "context": so_far}
        context = kvjax.read(
            model, [document], **(new if so_far is None else {}), **(pieces if args.piece else {}),
            document=opened.tokenizer, on_compile=display.compiling,
            on_layer=display.reading(
                model.num_layers, len(document), args.piece,
                0 if so_far is None else int(so_far.length[0]),
            ),
        )  # fmt: skip
        display.show(0, None, f"writing {out}")
        save(context)
    record = {
        **about.about(), "model": opened.name, "out": args.out, "prompt_tokens": len(document),
        "max_questions": max_questions, "max_new": args.max_new,
        "cache_bytes": context.nbytes, "awake_bytes": context.awake_nbytes,
        "full_cache_bytes": context.full_nbytes,
        **context.occupancy.record, "whole": None if whole is None else whole._asdict(),
    }  # fmt: skip
    opened.print_double_start(dialogue, [document])
    if args.json:
        print(json.dumps(record))
        return
    print(
        f"{args.out}: {len(document):,} tokens with {args.method} in "
        f"{decimal(context.nbytes)} at rest, {share(record)} of the full cache"
    )
    print(
        f"{record['kept_slots']:,.0f} slots per head; {decimal(record['awake_bytes'])} while it "
        "answers, with room for questions and answers"
    )
    print(f"kvjax ask {args.out} QUESTION, or kvjax chat {args.out}, goes on from it")
    if _looks_at_the_end(candidate.transform):
        print_line(
            f"{args.method} keeps what the document's end looks at, and knows no question: "
            "--method quantize keeps every token", "dim"
        )  # fmt: skip


def _so_far(
    about: Saved,
    args: argparse.Namespace,
    document: Sequence[int],
    sizes: dict[str, int],
    model: Any,
    opened: OpenedModel,
) -> kvjax.Context | None:
    """Returns what an earlier command of this kind has read of the document; None: nothing."""
    if args.piece is None:
        return None
    try:
        saved = Saved.of(args.out)
    except (ValueError, OSError):  # there is none
        return None
    if saved.unfinished is None:
        return None
    whole = Unfinished.of(document, args.piece, saved.unfinished.read)
    if saved != dataclasses.replace(about, unfinished=whole):
        return None
    context = kvjax.load_context(args.out, model, tokenizer=opened.tokenizer)
    made_for = {"max_prompt": context.max_prompt, "max_new": context.max_new}
    return context if made_for == sizes else None


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


def _looks_at_the_end(transform: kvjax.KVTransform) -> bool:
    """Tells whether the last tokens of a prompt decide what is kept of it."""
    return any(x.stage == Stage.EVICT and x.needs.query_window for x in walk(transform))
