"""`kvjax chat`: a conversation whose history is one compressed context."""

from __future__ import annotations

import argparse

from rich.filesize import decimal

import kvjax
from kvjax.cli import options
from kvjax.cli.answers import Row, is_cut, write
from kvjax.cli.inputs import check_text, standard_input
from kvjax.cli.lines import interrupt_noticed, lines
from kvjax.cli.opened import OpenedModel, check_counts, check_sampling
from kvjax.cli.terminal import Display, print_line

HELP = "/bytes says what the cache holds, /reset begins anew, /quit ends."
_MOST_PROMPT = 4096  # maximum tokens of the default of --max-prompt

DESCRIPTION = f"""\
A conversation whose whole history is one compressed cache. A line is a turn, and
so are lines that are pasted together; {HELP}
Ctrl-C ends an answer that is being written, and clears a line that has been begun.
If the first turn is a long text, by_head(kvzip) keeps the part of it that later
turns may ask for."""
EXAMPLES = """\
examples:
  kvjax chat --model DIR
  kvjax chat --model smollm2
  kvjax chat --model DIR --method 'by_head(kvzip)' --budget 0.1
  kvjax chat --model DIR --method h2o --budget 512 --system 'Be brief.'"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    options.add_model(parser)
    options.add_template(parser, "what is said")
    options.add_method(parser, default="quantize", whole="what --max-prompt has room for")
    parser.add_argument("--max-prompt", metavar="TOKENS", type=int,
        help="room for all that is said to the model, and as much again for all that it answers "
        "(default: 4096, or half of the model's positions)")  # fmt: skip
    parser.add_argument("--max-new", metavar="N", type=int, default=512,
        help="most tokens of an answer (default: 512)")  # fmt: skip
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax chat`: reads lines and answers them, until /quit or the end of input."""
    check_counts(args, "max_prompt", "max_new")
    standard_input()  # a closed standard input is reported before a model is loaded
    conversation = Conversation(args)
    if standard_input().isatty():
        print_line(HELP, "dim")
    for line in lines():
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip() == "/bytes":
            print(conversation.bytes(), flush=True)
        elif line.startswith("/") and "\n" not in line:
            print_line(HELP, "dim")
        elif line.strip():
            try:
                conversation.say(check_text(line, "the line"))
            except ValueError as error:
                print_line(f"{error}; /reset begins a new conversation", "red")


class Conversation:
    """A conversation as one context. The constructor checks the options and loads the model.

    Args:
      args: options of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, transform = args, options.candidate(args).transform
        check_sampling(args)
        with Display() as display:
            self._opened = opened = OpenedModel(args.model, display)
            self._dialogue = opened.dialogue(args)
            # Maximum number of tokens that are read, and of tokens that are written.
            self._room = _room(args, opened.config.max_positions)
            self._transform = kvjax.in_slots(transform, self._room[0])
            opened.bind(self._transform)
            self._model = opened.load(args)
            self._transform = opened.with_profiles(self._transform, self._model)
        self._sampling = opened.sampling(args)
        self.reset()

    def reset(self) -> None:
        """Begins a new conversation."""
        self._context: kvjax.Context | None = None
        self._ended_by: tuple[int, ...] = ()

    def bytes(self) -> str:
        """Returns a line on the contents and bytes of the cache, and the room left."""
        context = self._context
        if context is None:
            return "the cache holds nothing yet"
        full = context.full_nbytes
        return (
            f"{int(context.length[0]):,} tokens; the cache takes {decimal(context.nbytes)}, "
            f"{context.nbytes / full:.1%} of a full one; {self._room_left()}"
        )

    def say(self, text: str) -> None:
        """Takes a turn of the user, and prints the answer as it is written.

        Raises:
          ValueError: the turn or the answer does not fit; the conversation is unchanged.
        """
        args, context = self._args, self._context
        begins = context is None
        prompt = (
            self._dialogue.prompt(text) if begins else self._dialogue.turn(text, self._ended_by)
        )
        readable, writable = self._remaining()
        if len(prompt) > readable or writable < 1:
            raise ValueError(f"the conversation is full: {len(prompt)} tokens, {self._room_left()}")
        with Display() as display, interrupt_noticed() as stopped:
            callbacks = {
                "on_compile": display.compiling,
                "on_layer": display.reading(self._model.num_layers, len(prompt)),
            }
            if begins:
                context = kvjax.read(
                    self._model, [prompt], max_prompt=self._room[0], max_new=self._room[1],
                    transform=self._opened.calibrated(self._transform, self._model, prompt),
                    repetition=self._opened.repetition, **callbacks,
                )  # fmt: skip
            row = Row(self._opened.decode, prompt, (), display.text)
            max_new = min(args.max_new, writable)
            result = write(
                self._model, None if begins else [prompt], [row], streaming=True, stopped=stopped,
                context=context, donate=True, max_new_tokens=max_new,
                end_tokens=self._opened.end_tokens(self._dialogue), sampling=self._sampling,
                seed=args.seed, **callbacks,
            )  # fmt: skip
        print(flush=True)
        self._context = result.context
        self._ended_by = tuple(end for end in result.ended_by if end is not None)
        if begins:
            self._opened.print_double_start(self._dialogue, [prompt])
        if is_cut(row, result, 0, max_new):
            reason = " by --max-new" if max_new == args.max_new else f": {self._room_left()}"
            print_line(f"the answer was cut{reason}", "dim")
        if result.dropped:
            print_line(f"{result.dropped:,} tokens found no free slot", "red")

    def _remaining(self) -> tuple[int, int]:
        """Returns how many more tokens can be read, and how many can be written."""
        context = self._context
        used = (0, 0) if context is None else (context.prompt_tokens[0], context.new_tokens[0])
        return self._room[0] - int(used[0]), self._room[1] - int(used[1])

    def _room_left(self) -> str:
        """Describes the room left, for people."""
        readable, writable = self._remaining()
        return f"room for {readable:,} more tokens and {writable:,} of answers"


def _room(args: argparse.Namespace, positions: int | None) -> tuple[int, int]:
    """Returns the maximum tokens of a conversation that are read, and that are written."""
    if args.max_prompt is None:
        most = _MOST_PROMPT if positions is None else min(_MOST_PROMPT, positions // 2)
    else:
        most = args.max_prompt
    if positions is None:
        return most, most
    if most >= positions:
        raise ValueError(
            f"--max-prompt must be below the model's {positions} positions, got {most}"
        )
    return most, min(most, positions - most)
