"""`kvjax ask`: questions about a document that `kvjax read` has read."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import kvjax
from kvjax.cli import options
from kvjax.cli.answers import Row, write
from kvjax.cli.generate_command import on_step, print_rows
from kvjax.cli.inputs import check_text
from kvjax.cli.opened import OpenedModel, check_counts, check_sampling
from kvjax.cli.saved import Room, Saved
from kvjax.cli.sizes import kept_and_room
from kvjax.cli.terminal import Display, figures, print_line
from kvjax.generation.model import as_functional
from kvjax.generation.prompt_checks import check_turn

DESCRIPTION = """\
Answers questions about a document that kvjax read has read, all of them in one
batch, whose rows are a power of two, so that few of its sizes are compiled for.
The folder stays as it is, and no question knows of another. A conversation that
kvjax chat has saved can be asked, too: each question is its next turn."""
EXAMPLES = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="of kvjax read, or of /save in kvjax chat")
    parser.add_argument("questions", metavar="QUESTION", nargs="+", help="about the document")
    options.add_model(parser, "the one that read the document")
    parser.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what kvjax read made room for)")  # fmt: skip
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """`kvjax ask`: answers all questions in one batch; the folder stays as it is."""
    check_counts(args, "max_new")
    check_sampling(args)
    saved = Saved.of(args.folder)
    if saved.unfinished is not None:
        print_line(saved.unfinished.line(args.folder), "dim")
    texts = [check_text(text, f"question {n}") for n, text in enumerate(args.questions, 1)]
    several = len(texts) > 1
    with Display(not args.json) as display:
        opened = OpenedModel(saved.model_name(args.model, args.folder), display)
        dialogue = saved.dialogue(opened.tokenizer)
        questions = [saved.turn(dialogue, text) for text in texts]
        choice, model = opened.sampling(args), opened.load(args)
        display.show(0, None, f"loading {args.folder}")
        context = kvjax.load_context(args.folder, model, tokenizer=opened.tokenizer)
        room = Room.of(context, opened.config.max_positions)
        max_new = args.max_new or _most(saved, room)
        _check_room(saved, room, questions, max_new)
        check_turn(as_functional(model), context, questions, max_new)
        # Every question has a copy, in which the document stays as it is until its turn. Further
        # copies take no part: with them, few numbers of rows are compiled for.
        context = context.awake().repeat(_rows(len(questions)))
        occupancy = context.occupancy
        rows = [Row(opened.decode, question) for question in questions]
        spare = [Row(opened.decode, ()) for _ in range(context.rows - len(questions))]
        result = write(
            model, [*questions, *[None] * len(spare)], [*rows, *spare],
            streaming=not args.json, context=context, donate=True,
            on_step=display.writing if args.json else on_step(display, rows, texts, several),
            on_compile=display.compiling,
            on_layer=display.reading(model.num_layers, sum(map(len, questions))),
            max_new_tokens=max_new, end_tokens=opened.end_tokens(dialogue), sampling=choice,
            seed=args.seed,
        )  # fmt: skip
    answered = slice(len(questions))
    result = dataclasses.replace(
        result, tokens=result.tokens[answered], ended=result.ended[answered],
        prompt_tokens=result.prompt_tokens[answered], ended_by=result.ended_by[answered],
    )  # fmt: skip
    named = {name: getattr(saved, name) for name in ("document", "method", "budget")}
    record = {"model": opened.name, "folder": args.folder, **named, **figures(result)}
    record |= occupancy.record
    print_rows(
        args.json, record, texts, rows, result, max_new,
        several=several or args.json, name="question",
    )  # fmt: skip
    if not args.json:
        copies = f"{len(rows) + len(spare)} copies of " * several + "the document"
        print_line(f"before the questions: {kept_and_room(occupancy, copies)}", "dim")


def _rows(questions: int) -> int:
    """Returns how many rows a batch of questions takes: the next power of two."""
    return 1 << (questions - 1).bit_length()


def _most(saved: Saved, room: Room) -> int:
    """Returns the default of `--max-new`: all the room for answers, or as in the conversation."""
    most = max(room.new, 1)
    return most if saved.conversation is None else min(most, saved.conversation.max_new)


def _check_room(saved: Saved, room: Room, questions: Sequence[Sequence[int]], max_new: int) -> None:
    """Raises ValueError if a question or an answer exceeds the room that is left."""
    larger = "give {} a larger {}".format
    command, option = ("read", "--max-questions") if saved.document else ("chat", "--max-prompt")
    for number, question in enumerate(questions, 1):
        if len(question) > room.prompt:
            raise ValueError(
                f"question {number} has {len(question)} tokens, and there is room for "
                f"{room.prompt}: {larger(f'kvjax {command}', option)}"
            )
    if max_new > room.new:
        option = "--max-new" if saved.document else "--max-prompt"
        raise ValueError(
            f"--max-new must be at most {room.new}, got {max_new}: "
            f"{larger(f'kvjax {command}', option)}"
        )
