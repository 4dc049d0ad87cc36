"""`kvjax ask`: questions about a document that `kvjax read` has read."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from kvjax.cli import options
from kvjax.cli.answers import Row, write
from kvjax.cli.generate_command import on_step, print_rows, results_of
from kvjax.cli.inputs import check_text
from kvjax.cli.library import documents
from kvjax.cli.opened import OpenedModel, check_counts, check_sampling
from kvjax.cli.saved import Room, Saved
from kvjax.cli.sizes import kept_and_room
from kvjax.cli.terminal import Display, figures, print_line
from kvjax.generation.model import as_functional
from kvjax.generation.prompt_checks import check_turn
from kvjax.messages import printable

DESCRIPTION = """\
Answers questions about a document that kvjax read has read, all of them in one
batch, which is padded to a power of two of rows, so that few sizes are compiled.
The folder stays as it is, and no question sees another. A conversation that
kvjax chat has saved can be asked, too: each question is its next turn. In a library,
which kvjax read makes of several documents, every document is asked, one after the
other; FOLDER/NAME is one of them."""
EXAMPLES = """\
examples:
  kvjax ask book 'Who is Ishmael?' 'What is the name of the ship?'
  kvjax ask library 'What was decided?'
  kvjax ask library/march 'What was decided?'"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("folder", metavar="FOLDER",
        help="folder of kvjax read, of one document or a library, or of /save in chat")  # fmt: skip
    parser.add_argument(
        "questions",
        metavar="QUESTION",
        nargs="+",
        help="a question about the document, or about each",
    )
    options.add_model(parser, "the one that read the document")
    parser.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what kvjax read made room for)")  # fmt: skip
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """`kvjax ask`: answers all questions in one batch; the folder stays as it is."""
    check_counts(args, "max_new")
    check_sampling(args)
    library = documents(args.folder)
    folders = library or [Path(args.folder)]
    each = [Saved.of(folder) for folder in folders]
    for folder, saved in zip(folders, each, strict=True):
        if saved.unfinished is not None:
            print_line(saved.unfinished.line(folder), "dim")
    texts = [check_text(text, f"question {n}") for n, text in enumerate(args.questions, 1)]
    with Display(not args.json) as display:
        opened = OpenedModel(_model_name(args, folders, each), display)
        asked = [
            _Asked(folder, saved, opened, texts)
            for folder, saved in zip(folders, each, strict=True)
        ]
        for document in asked if library else ():
            document.check_room(args.max_new)
        choice, model = opened.sampling(args), opened.load(args)
        records = [
            _answers(document, bool(library), choice, model, args, opened, display)
            for document in asked
        ]
    if args.json and library:
        about = {"model": opened.name, "folder": args.folder}
        print(json.dumps({**about, "documents": records}))
    elif args.json:
        print(json.dumps(records[0]))


class _Asked:
    """A document, or a conversation, that is asked all questions.

    Args:
      folder: of its context.
      saved: what was saved with that.
      opened: its model.
      texts: the questions.

    Attributes:
      dialogue: turns texts into tokens.
      questions: their tokens.
    """

    def __init__(
        self, folder: Path, saved: Saved, opened: OpenedModel, texts: Sequence[str]
    ) -> None:
        self.folder, self.saved, self.texts = folder, saved, texts
        self.dialogue = saved.dialogue(opened.tokenizer)
        self.questions = [saved.turn(self.dialogue, text) for text in texts]

    def check_room(self, max_new: int | None) -> None:
        """Raises ValueError where questions or answers exceed the room that was made for them.

        It looks at no array: in a library, all documents are checked before one answers.
        """
        if self.saved.reading is not None:
            room = Room.for_questions(self.saved.reading)
            try:
                _check_room(self.saved, room, self.questions, max_new or 1)
            except ValueError as error:
                raise ValueError(f"{self.folder}: {error}") from error


def _model_name(
    args: argparse.Namespace, folders: Sequence[Path], each: Sequence[Saved]
) -> str | None:
    """Returns the model that has read the documents, or that of `--model`."""
    if args.model is None and len({saved.model for saved in each}) > 1:
        other = next(n for n, saved in enumerate(each) if saved.model != each[0].model)
        raise ValueError(
            f"{folders[0]} and {folders[other]} are of different models: ask one document by its "
            "name"
        )
    return each[0].model_name(args.model, folders[0])


def _answers(
    asked: _Asked,
    of_library: bool,
    choice: kvjax.Sampling,
    model: Any,
    args: argparse.Namespace,
    opened: OpenedModel,
    display: Display,
) -> dict[str, Any]:
    """Lets a document answer, prints that for people, and returns what JSON has of it.

    Args:
      of_library: whether it is one of several documents, which are named.
    """
    saved, questions, texts = asked.saved, asked.questions, asked.texts
    several = len(texts) > 1
    if of_library and not args.json:
        display.text(f"=== {printable(asked.folder.name)}\n")
        display.start()
    display.show(0, None, f"loading {asked.folder}")
    context = kvjax.load_context(asked.folder, model, tokenizer=opened.tokenizer)
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
        max_new_tokens=max_new, end_tokens=opened.end_tokens(asked.dialogue), sampling=choice,
        seed=args.seed,
    )  # fmt: skip
    answered = slice(len(questions))
    result = dataclasses.replace(
        result, tokens=result.tokens[answered], ended=result.ended[answered],
        prompt_tokens=result.prompt_tokens[answered], ended_by=result.ended_by[answered],
    )  # fmt: skip
    named = {name: getattr(saved, name) for name in ("document", "method", "budget")}
    model_and_folder = {"model": opened.name, "folder": str(asked.folder)}
    record = {**model_and_folder, **named, **figures(result), **occupancy.record}
    if not args.json:
        print_rows(
            False, record, texts, rows, result, max_new, several=several, name="question"
        )  # fmt: skip
        copies = f"{len(rows) + len(spare)} copies of " * several + "the document"
        print_line(f"before the questions: {kept_and_room(occupancy, copies)}", "dim")
    return {**record, "results": results_of(texts, rows, result, max_new, "question")}


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
