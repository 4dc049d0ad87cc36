"""Contexts in folders, with what `kvjax read` and `kvjax chat` save beside them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvjax
from kvjax.cli.templates import Dialogue
from kvjax.files import check_folder
from kvjax.generation.context_files import check_free, context_about, context_method, unlearned
from kvjax.generation.prompt_checks import repositions
from pallas_kernels.base.annotations import NoneElsewhere


@dataclass(frozen=True)
class Conversation:
    """A conversation's record besides its context, which a further turn needs.

    Args:
      system: the system message; None: there is none, or it was read with a document.
      ended_by: end tokens of the newest answer, which were read.
      max_new: most tokens of an answer.
      sampling: how tokens are chosen.
      seed: of the draws.
    """

    system: str | None
    ended_by: tuple[int, ...]
    max_new: int
    sampling: kvjax.Sampling
    seed: int

    def as_json(self) -> dict[str, Any]:
        """Returns the conversation as JSON holds it."""
        return {**dataclasses.asdict(self), "ended_by": list(self.ended_by)}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Conversation:
        """Makes the conversation of `as_json`."""
        ended_by, sampling = tuple(record["ended_by"]), kvjax.Sampling(**record["sampling"])
        return cls(**{**record, "ended_by": ended_by, "sampling": sampling})


class Reading(NamedTuple):
    """A reading of a document: what decides its context beside the method, and how far it came.

    Args:
      read: tokens that have been read.
      tokens: of the whole document.
      piece: tokens of a piece; None: all are read at once.
      max_questions, max_new: room for the tokens of questions and of answers.
      digest: SHA-256 of the whole document's token ids.
    """

    read: int
    tokens: int
    piece: int | None
    max_questions: int
    max_new: int
    digest: str

    @classmethod
    def of(
        cls, document: Sequence[int], piece: int | None, max_questions: int, max_new: int
    ) -> Reading:
        """Describes a document that has been read to its end."""
        digest = hashlib.sha256(np.asarray(document, "<i8").tobytes()).hexdigest()
        return cls(len(document), len(document), piece, max_questions, max_new, digest)

    def line(self, folder: object) -> str:
        """Returns the line that says how far the document has been read."""
        return (
            f"{folder} holds the first {self.read:,} of {self.tokens:,} tokens: its kvjax read, "
            "given again, goes on from there"
        )


@dataclass(frozen=True)
class Saved:
    """A description of a context that a command has saved.

    Args:
      model: absolute path or hub id of the model; None is the bundled model.
      document: the file of a document that was read first; None: there was none.
      method, budget: of the compression, as they were given.
      raw: whether texts are fed as they are, without the model's chat template.
      conversation: None: no question about the document has been answered yet.
      reading: how the document was read; None: the context is no longer the document's alone.
    """

    model: str | None
    document: str | None
    method: str
    budget: int | float | None
    raw: bool
    conversation: Conversation | None = None
    reading: Reading | NoneElsewhere = None

    @classmethod
    def of(cls, folder: str | Path) -> Saved:
        """Reads what was saved with the context of a folder, before any array is read.

        Raises:
          ValueError: the folder holds no context, or none of `kvjax read` and `kvjax chat`.
        """
        about = context_about(folder)
        names = [field.name for field in dataclasses.fields(cls)][:-2]
        if missing := set(names) - about.keys():
            raise ValueError(
                f"{folder} was not written by kvjax read or kvjax chat: it lacks "
                f"{', '.join(sorted(missing))}"
            )
        record = about.get("conversation")
        try:
            conversation = None if record is None else Conversation.of(record)
            read = about.get("reading")
            reading = None if read is None else Reading(**read)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the description in {folder} is damaged: {error}") from error
        so_named = {name: about[name] for name in names}
        return cls(**so_named, conversation=conversation, reading=reading)

    @classmethod
    def before(cls, folder: Path, wanted: Saved, transform: kvjax.KVTransform) -> Reading | None:
        """Returns how far an earlier command has come that makes the same of the same tokens.

        None: the folder holds nothing that such a command has read. The document's file may have
        had another name. The name of a method may have stood for another one, in a version with
        other defaults.

        Args:
          wanted: what the command will have saved.
          transform: its method.
        """
        try:
            saved, method = cls.of(folder), context_method(folder)
        except (ValueError, OSError):  # there is none
            return None
        if saved.reading is None or wanted.reading is None or method != unlearned(transform):
            return None
        reading = wanted.reading._replace(read=saved.reading.read)
        like = dataclasses.replace(wanted, document=saved.document, reading=reading)
        return reading if saved == like else None

    @property
    def unfinished(self) -> Reading | None:
        """How far the document has been read; None: to its end."""
        reading = self.reading
        return None if reading is None or reading.read == reading.tokens else reading

    def about(self) -> dict[str, Any]:
        """Returns what `save_context` takes as `about`."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        conversation, reading = record.pop("conversation"), record.pop("reading")
        if conversation is not None:
            record["conversation"] = conversation.as_json()
        if reading is not None:
            record["reading"] = reading._asdict()
        return record

    def model_name(self, given: str | None, folder: str | Path) -> str | None:
        """Returns the model of `--model`, or else the model of the context in this folder.

        Raises:
          ValueError: the context's model is no longer where it was.
        """
        if given is not None:
            return given
        path = Path(self.model or "")
        if path.is_absolute() and not path.exists():
            raise ValueError(f"the model of {folder} is no longer at {path}: --model says where")
        return self.model

    def dialogue(self, tokenizer: Any) -> Dialogue:
        """Makes the dialogue that turns texts into tokens as those before them."""
        # The system message of a document was read with it and need not be rendered again.
        system = None if self.conversation is None else self.conversation.system
        return Dialogue(tokenizer, system=system, raw=self.raw)

    def turn(self, dialogue: Dialogue, text: str) -> list[int]:
        """Returns the tokens of a question about the document, or of a conversation's next turn."""
        if self.conversation is None:
            return dialogue.question(text)
        return dialogue.turn(text, self.conversation.ended_by)


class Room(NamedTuple):
    """The room that a conversation has left.

    Args:
      prompt: tokens that can be read.
      new: tokens that can be written.
      positions: tokens of both kinds together, by the model's positions; None: no limit.
    """

    prompt: int
    new: int
    positions: int | None

    @classmethod
    def for_questions(cls, reading: Reading) -> Room:
        """Returns the room that was made for questions about a document, and for answers."""
        return cls(reading.max_questions, reading.max_new, None)

    @classmethod
    def of(cls, context: kvjax.Context, positions: int | None) -> Room:
        """Returns the room that a context of one row has; `positions` are the model's."""
        return cls(
            context.max_prompt - int(context.prompt_tokens[0]),
            context.max_new - int(context.new_tokens[0]),
            None
            if positions is None or repositions(context.layers)
            else positions - int(context.length[0]),
        )

    def after(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens can be written after a prompt; below 1, it does not fit."""
        if len(prompt) > self.prompt:
            return 0
        if self.positions is None:
            return self.new
        return min(self.new, self.positions - len(prompt))

    def __str__(self) -> str:
        text = f"room for {self.prompt:,} more tokens and {self.new:,} of answers"
        if self.positions is not None and self.positions < self.prompt + self.new:
            text += f", {self.positions:,} of both by the model's positions"
        return text


def check_out(out: Path) -> None:
    """Raises ValueError if a folder holds something that `save_context` has not written.

    Raises it for a folder that cannot be written, too, before a long text has been read.
    """
    try:
        check_free(out)
    except ValueError as error:
        raise ValueError(f"{out} is in the way, and stays as it is: {error}") from error
    check_folder(out)


def absolute_model(model: str | None) -> str | None:
    """Returns a model's absolute path, for processes in other folders; a hub id stays as it is."""
    if model is None:
        return None
    path = Path(model)
    return str(path.absolute()) if path.exists() else model
