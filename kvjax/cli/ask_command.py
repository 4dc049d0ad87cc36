"""`kvjax ask`: questions about a document that `kvjax read` has read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import kvjax
from kvjax.cli import options
from kvjax.cli.answers import Row, write
from kvjax.cli.generate_command import on_step, print_rows
from kvjax.cli.inputs import check_text
from kvjax.cli.opened import OpenedModel, check_counts, check_sampling
from kvjax.cli.templates import Dialogue
from kvjax.cli.terminal import Display, figures, print_dropped
from kvjax.generation.context_files import context_about
from kvjax.generation.model import as_functional
from kvjax.generation.prompt_checks import check_turn

DESCRIPTION = """\
Answers questions about a document that kvjax read has read, all of them in one
batch. The folder stays as it is, and no question knows of another."""
EXAMPLES = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="of kvjax read")
    parser.add_argument("questions", metavar="QUESTION", nargs="+", help="about the document")
    options.add_model(parser, "the one that read the document")
    parser.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what kvjax read made room for)")  # fmt: skip
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """`kvjax ask`: answers all questions in one batch; the folder stays as it is."""
    check_counts(args, "max_new")
    check_sampling(args)
    about = _about(args.folder)
    texts = [check_text(text, f"question {n}") for n, text in enumerate(args.questions, 1)]
    several = len(texts) > 1
    with Display(not args.json) as display:
        opened = OpenedModel(_model(args, about), display)
        # The system message was read with the document and need not be rendered again.
        dialogue = Dialogue(opened.tokenizer, raw=about["raw"])
        questions = [dialogue.question(text) for text in texts]
        choice, model = opened.sampling(args), opened.load(args)
        display.show(0, None, f"loading {args.folder}")
        context = kvjax.load_context(args.folder, model, tokenizer=opened.tokenizer)
        max_new = args.max_new or context.max_new
        _check_room(context, questions, max_new)
        check_turn(as_functional(model), context, questions, max_new)
        rows = [Row(opened.decode, question) for question in questions]
        result = write(
            model, questions, rows, streaming=not args.json, context=context, donate=True,
            on_step=display.writing if args.json else on_step(display, rows, texts, several),
            on_compile=display.compiling,
            on_layer=display.reading(model.num_layers, sum(map(len, questions))),
            max_new_tokens=max_new, end_tokens=opened.end_tokens(dialogue), sampling=choice,
            seed=args.seed,
        )  # fmt: skip
    named = {name: about[name] for name in ("document", "method", "budget")}
    record = {"model": opened.name, "folder": args.folder, **named, **figures(result)}
    print_rows(
        args.json, record, texts, rows, result, max_new,
        several=several or args.json, name="question",
    )  # fmt: skip
    if not args.json:
        print_dropped(about["method"], result.dropped)


def _check_room(context: kvjax.Context, questions: Sequence[Sequence[int]], max_new: int) -> None:
    """Raises ValueError if a question or an answer exceeds the room that `kvjax read` made."""
    room = context.max_prompt - int(context.prompt_tokens[0])
    for number, question in enumerate(questions, 1):
        if len(question) > room:
            raise ValueError(
                f"question {number} has {len(question)} tokens, and there is room for {room}: "
                "give kvjax read a larger --max-questions"
            )
    if max_new > context.max_new:
        raise ValueError(
            f"--max-new must be at most {context.max_new}, got {max_new}: give kvjax read a larger "
            "--max-new"
        )


def _model(args: argparse.Namespace, about: dict) -> str | None:
    """Returns the model of `--model`, or else the model that read the document."""
    if args.model is not None:
        return args.model
    model = about["model"]
    if model is not None and Path(model).is_absolute() and not Path(model).exists():
        raise ValueError(
            f"the model that read {args.folder} is no longer at {model}: give its place by --model"
        )
    return model


def _about(folder: str) -> dict:
    """Reads the description that `kvjax read` has saved with the context."""
    about = context_about(folder)
    if missing := {"model", "document", "method", "budget", "raw"} - about.keys():
        raise ValueError(
            f"{folder} was not written by kvjax read: it does not say its "
            f"{', '.join(sorted(missing))}"
        )
    return about
