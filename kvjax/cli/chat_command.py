"""`kvjax chat`: a conversation whose history is one compressed context."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.filesize import decimal

import kvjax
from kvjax.cli import options
from kvjax.cli.answers import Row, is_cut, write
from kvjax.cli.chat_input import Interrupts, interrupts_counted, lines
from kvjax.cli.inputs import check_text, standard_input
from kvjax.cli.library import check_no_library
from kvjax.cli.opened import OpenedModel, check_counts, check_sampling
from kvjax.cli.saved import Conversation, Room, Saved, absolute_model, check_out
from kvjax.cli.sizes import Whole, kept_and_room
from kvjax.cli.terminal import Display, print_line
from kvjax.compose.in_slots import in_slots
from kvjax.generation.context_files import holds_context
from kvjax.messages import did_you_mean, printable

COMMANDS = ("/bytes", "/save", "/reset", "/quit")
HELP = "/bytes says what is held, /save FOLDER keeps it, /reset begins anew, /quit ends."
_METHOD = "quantize"  # default of --method
_MOST_PROMPT = 4096  # maximum tokens of the default of --max-prompt
_MOST_NEW = 512  # default of --max-new

DESCRIPTION = """\
A conversation whose whole history is one compressed cache. It begins anew, or goes
on from a CONTEXT: a document of kvjax read, or a conversation that was saved.
A line is a turn, and so are several lines pasted at once. Lines that are not turns:
  /bytes        says what the cache holds and how much room is left
  /save FOLDER  saves the conversation; without FOLDER, where it was saved before
  /reset        begins anew, or goes back to what CONTEXT holds
  /quit         ends
Ctrl-C ends an answer that is being written, and clears a line that has been begun.
By default every token stays, in 8 bits. Of a long text in the first turn, --budget 0.19
--method 'by_head(chain(own_queries, quantize(bits=4)))' keeps a fifth."""
EXAMPLES = """\
examples:
  kvjax chat --model DIR
  kvjax chat --model smollm2
  kvjax chat --model DIR --method 'chain(quantize, clusterkv)' --budget 0.2
  kvjax chat --model DIR --method h2o --budget 512 --system 'Be brief.'
  kvjax read book.txt --out book --model DIR && kvjax chat book"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("context", metavar="CONTEXT", nargs="?",
        help="folder of kvjax read or of /save (default: a new conversation)")  # fmt: skip
    options.add_model(parser, "the one of CONTEXT, or the bundled model")
    options.add_template(parser, "what is said")
    options.add_method(parser, default=_METHOD, whole="what --max-prompt has room for")
    parser.add_argument("--max-prompt", metavar="TOKENS", type=int,
        help="room for all tokens that the model is told, and as much again for all its answers "
        "(default: 4096, or half of the model's positions)")  # fmt: skip
    parser.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: as before in CONTEXT, or 512)")  # fmt: skip
    options.add_sampling(parser)
    # None lets `_check_context` tell given options from defaults.
    parser.set_defaults(method=None, seed=None)


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax chat`: reads lines and answers them, until /quit or the end of input."""
    check_counts(args, "max_prompt", "max_new")
    standard_input()  # a closed standard input is reported before a model is loaded
    chat = Chat(args)
    if standard_input().isatty():
        print_line(HELP, "dim")
    with interrupts_counted() as interrupts:
        for line in lines(interrupts):
            command = _command(line)
            if command == "/quit":
                return
            try:
                if command is not None:
                    chat.obey(command, line.strip().removeprefix(command).strip())
                elif line.strip():
                    chat.say(check_text(line, "the line"), interrupts)
            except (ValueError, OSError) as error:
                print_line(f"{error}", "red")


def _command(line: str) -> str | None:
    """Returns the command that a line is, known or not; None if the line is a turn.

    A line with an unknown command is a turn if it has white space or a second slash, as sentences
    and paths have.

    Example:
      >>> from kvjax.cli.chat_command import _command
      >>> _command("/save book"), _command("/sav"), _command("/etc/hosts"), _command("/tmp is full")
      ('/save', '/sav', None, None)
    """
    words = line.split()
    if not words or "\n" in line:
        return None
    if words[0] == "/save" or (words[0] in COMMANDS and len(words) == 1):
        return words[0]
    return words[0] if line == words[0] and line.rfind("/") == 0 else None


class Chat:
    """A conversation as one context. The constructor checks the options and loads the model.

    Args:
      args: options of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, folder = args, args.context
        with Display() as display:
            if folder is None:
                args.method = args.method or _METHOD
                candidate = options.candidate(args)
                check_sampling(args)
                self._opened = opened = OpenedModel(args.model, display)
                self._dialogue = opened.dialogue(args)
                self._room = _room(args, opened.config.max_positions)
                transform = in_slots(candidate.transform, self._room.prompt)
                opened.bind(transform)
                self._model = opened.load(args)
                self._transform = opened.calibrated(transform, self._model)
                whole = Whole.instead_of_context(
                    self._model, self._transform, self._room.prompt, self._room.new
                )
                if whole is not None:
                    display.line(whole.line(args.method))
                self._state = Saved(
                    model=absolute_model(args.model), document=None, **candidate.named(),
                    raw=not self._dialogue.templated,
                )  # fmt: skip
            else:
                _check_no_more(args)
                check_no_library(
                    Path(folder),
                    f"kvjax chat {Path(folder) / 'NAME'} is about one, kvjax ask {folder} asks all",
                )
                self._state = Saved.of(folder)
                before = self._state.conversation
                check_sampling(args, None if before is None else before.sampling)
                name = self._state.model_name(args.model, folder)
                self._opened = opened = OpenedModel(name, display)
                self._dialogue = self._state.dialogue(opened.tokenizer)
                self._model = opened.load(args)
        before = self._state.conversation
        # These settings are those of every turn; a saved conversation goes on as it was.
        self._settings = Conversation(
            system=args.system if before is None else before.system,
            ended_by=(),
            max_new=args.max_new or (_MOST_NEW if before is None else before.max_new),
            sampling=opened.sampling(args, None if before is None else before.sampling),
            seed=_seed(args, before),
        )
        self._reset()
        if folder is not None:
            print_line(f"{folder}: {self._bytes()}", "dim")
            if self._state.unfinished is not None:
                print_line(self._state.unfinished.line(folder), "dim")

    def obey(self, command: str, argument: str) -> None:
        """Carries out a command; `argument` is the text after it.

        Raises:
          ValueError, OSError: the conversation cannot be saved, or CONTEXT cannot be read again.
        """
        if command == "/reset":
            self._reset()
        elif command == "/bytes":
            print(self._bytes(), flush=True)
        elif command == "/save":
            self._save(argument)
        else:
            name, hint = printable(command, 40), did_you_mean(command, COMMANDS)
            print_line(f"{name} is not a command, but with a space before it a turn{hint}", "dim")
            print_line(HELP, "dim")

    def say(self, text: str, interrupts: Interrupts) -> None:
        """Takes a turn of the user, and prints the answer as it is written.

        Raises:
          ValueError: the turn or the answer does not fit; the conversation is unchanged.
        """
        context, settings = self._context, self._settings
        begins = context is None
        prompt = self._dialogue.prompt(text) if begins else self._state.turn(self._dialogue, text)
        writable = self._room_left().after(prompt)
        if writable < 1:
            raise ValueError(
                f"the conversation is full: {len(prompt)} tokens, {self._room_left()}; "
                f"{self._way_out()}"
            )
        with Display() as display:
            callbacks = {
                "on_compile": display.compiling,
                "on_layer": display.reading(self._model.num_layers, len(prompt)),
            }
            if begins:
                context = kvjax.read(
                    self._model, [prompt], max_prompt=self._room.prompt, max_new=self._room.new,
                    transform=self._opened.calibrated(self._transform, self._model, prompt),
                    document=self._opened.tokenizer, **callbacks,
                )  # fmt: skip
            row = Row(self._opened.decode, prompt, (), display.text)
            max_new = min(settings.max_new, writable)
            result = write(
                self._model, None if begins else [prompt], [row], streaming=True,
                stopped=interrupts.came, context=context, donate=True, max_new_tokens=max_new,
                end_tokens=self._opened.end_tokens(self._dialogue), sampling=settings.sampling,
                seed=settings.seed, **callbacks,
            )  # fmt: skip
        interrupts.take()  # a press was meant for the answer
        print(flush=True)
        self._context = result.context
        ended_by = tuple(end for end in result.ended_by if end is not None)
        turns = dataclasses.replace(settings, ended_by=ended_by)
        self._state = dataclasses.replace(self._state, conversation=turns, reading=None)
        if begins:
            self._opened.print_double_start(self._dialogue, [prompt])
        if is_cut(row, result, 0, max_new):
            reason = " by --max-new" if max_new == settings.max_new else f": {self._room_left()}"
            print_line(f"the answer was cut{reason}", "dim")

    def _reset(self) -> None:
        """Begins a new conversation, or goes back to what CONTEXT holds."""
        folder = self._args.context
        if folder is None:
            self._state = dataclasses.replace(self._state, conversation=None)
            self._context: kvjax.Context | None = None
            self._folder: Path | None = None
            return
        state = Saved.of(folder)
        with Display() as display:
            display.show(0, None, f"loading {folder}")
            tokenizer = self._opened.tokenizer
            self._context = kvjax.load_context(folder, self._model, tokenizer=tokenizer)
        # A document stays as it was read: what is said about it is saved elsewhere.
        self._state, self._folder = state, Path(folder) if state.conversation else None

    def _save(self, name: str) -> None:
        """Saves the conversation in a folder; "" is the one where it was saved before."""
        if self._context is None:
            raise ValueError("there is nothing to save yet")
        folder = Path(name).expanduser() if name else self._folder
        if folder is None:
            raise ValueError("/save needs the name of a folder")
        check_out(folder)
        same = self._folder is not None and folder.resolve() == self._folder.resolve()
        if not same and holds_context(folder):
            raise ValueError(f"{folder} holds another context, and stays as it is")
        with Display() as display:
            display.show(0, None, f"writing {folder}")
            kvjax.save_context(
                folder, self._context, model=self._model, tokenizer=self._opened.tokenizer,
                about=self._state.about(),
            )  # fmt: skip
        self._folder = folder
        print_line(f"saved: kvjax chat {folder} goes on from here", "dim")

    def _bytes(self) -> str:
        """Returns a line on the contents and bytes of the cache, and the room left."""
        context = self._context
        if context is None:
            return "the cache holds nothing yet"
        rest = " at rest" if context.resting else ""  # its room is made for the first turn
        return (
            f"{int(context.length[0]):,} tokens; the cache takes {decimal(context.nbytes)}{rest}, "
            f"{context.nbytes / context.full_nbytes:.1%} of a full one; "
            f"{kept_and_room(context.occupancy, 'what was said')}; {self._room_left()}"
        )

    def _room_left(self) -> Room:
        """Returns how many more tokens can be read and written."""
        if self._context is None:
            return self._room
        return Room.of(self._context, self._opened.config.max_positions)

    def _way_out(self) -> str:
        """Says what to do when the conversation is full."""
        folder = self._args.context
        reset = (
            "begins a new conversation" if folder is None else f"goes back to what {folder} holds"
        )
        if self._state.document is None:
            larger = "kvjax chat makes more room by --max-prompt"
        else:
            larger = "kvjax read makes more room by --max-questions and --max-new"
        return f"/reset {reset}, and {larger}"


def _check_no_more(args: argparse.Namespace) -> None:
    """Raises ValueError if an option was given that the conversation's context has decided."""
    given = {
        "--method": args.method, "--budget": args.budget, "--max-prompt": args.max_prompt,
        "--system": args.system, "--raw": args.raw or None, "--chat": args.chat or None,
    }  # fmt: skip
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(
            f"a CONTEXT takes no {' and no '.join(names)}, since it goes on as it began: give "
            "that to kvjax read or to a new conversation"
        )


def _seed(args: argparse.Namespace, before: Conversation | None) -> int:
    """Returns the seed of `--seed`, or else the one before."""
    if args.seed is not None:
        return args.seed
    return 0 if before is None else before.seed


def _room(args: argparse.Namespace, positions: int) -> Room:
    """Returns the room of a new conversation; `positions` are the model's."""
    most = min(_MOST_PROMPT, positions // 2) if args.max_prompt is None else args.max_prompt
    if most >= positions:
        raise ValueError(
            f"--max-prompt must be below the model's {positions} positions, got {most}"
        )
    return Room(most, min(most, positions - most), positions)
