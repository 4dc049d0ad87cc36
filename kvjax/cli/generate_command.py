"""`kvjax generate`: continues prompts, or lets the bundled model answer its question."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

import kvjax
from kvjax.cli import bundled_question, options
from kvjax.cli.answers import InOrder, Row, is_cut, write
from kvjax.cli.inputs import check_text, read_prompts, read_text
from kvjax.cli.opened import OpenedModel, check_counts, check_sampling
from kvjax.cli.terminal import Display, figures, print_figures
from kvjax.generation.prompt_checks import check_prompts

_NEW_TOKENS = 128  # default of --max-new


DESCRIPTION = """\
Continues prompts through a compressed cache. The text goes to standard output,
figures to standard error. A model with a chat template takes each prompt as a
user's message, unless --raw is given. Without --model, the bundled model
continues the prompt. Without a prompt either, it answers a question about a
long document, with the method and with the full cache."""
EXAMPLES = """\
examples:
  kvjax generate
  kvjax generate --model DIR --prompt 'Once upon a time' --budget 256
  kvjax generate --model DIR --prompt-file book.txt --method streaming_llm
  kvjax generate --model DIR --prompt Hello --method 'every(snapkv, steps=64)'
  kvjax generate --model DIR --prompts questions.jsonl --stop 'Question:' --json
  kvjax generate --import mine.py --method mine"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", action="append",
        help="text to continue; may be given several times")  # fmt: skip
    prompt.add_argument("--prompt-file", metavar="FILE",
        help="UTF-8 file with the text to continue; - is standard input")  # fmt: skip
    prompt.add_argument("--prompts", metavar="FILE",
        help="UTF-8 file with a prompt in each line, as text or as JSON: strings, or objects with "
        "a \"prompt\"; - is standard input")  # fmt: skip
    options.add_template(parser, "the prompt")
    options.add_method(parser)
    parser.add_argument("--max-new", metavar="N", type=int,
        help="most new tokens (default: 128, or 16 for the bundled question)")  # fmt: skip
    parser.add_argument("--stop", metavar="TEXT", type=options.stop_text, action="append",
        default=[], help="ends the output, and is not part of it; names of special tokens in it "
        "stand for the tokens; may be given several times")  # fmt: skip
    options.add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax generate`: continues prompts, or answers a question if there is no prompt."""
    texts = _prompts(args)
    check_counts(args, "max_new")
    check_sampling(args)
    candidate = options.candidate(args)
    if texts is None:
        for option, value in (("--model", args.model), ("--stop", args.stop)):
            if value:
                raise ValueError(f"{option} needs a --prompt, a --prompt-file or --prompts")
        bundled_question.answer(args, candidate)
        return
    max_new, several = args.max_new or _NEW_TOKENS, len(texts) > 1 or args.prompts is not None
    with Display(not args.json) as display:
        opened = OpenedModel(args.model, display)
        dialogue = opened.dialogue(args)
        prompts = [dialogue.prompt(text) for text in texts]
        layers = opened.bind(candidate.transform)
        check_prompts(opened.config, prompts, layers, max_new)
        choice, model = opened.sampling(args), opened.load(args)
        rows = [Row(opened.decode, prompt, args.stop) for prompt in prompts]
        result = write(
            model, prompts, rows, streaming=not args.json or bool(args.stop),
            on_step=display.writing if args.json else on_step(display, rows, texts, several),
            on_compile=display.compiling,
            on_layer=display.reading(model.num_layers, sum(map(len, prompts))),
            transform=opened.calibrated(candidate.transform, model, prompts[0]),
            max_new_tokens=max_new, end_tokens=opened.end_tokens(dialogue), sampling=choice,
            seed=args.seed, document=opened.tokenizer,
        )  # fmt: skip
    record = {"model": opened.name, **candidate.named(), **figures(result)}
    print_rows(args.json, record, texts, rows, result, max_new, several=several)
    opened.print_double_start(dialogue, prompts)


def print_rows(
    as_json: bool,
    record: dict[str, Any],
    texts: Sequence[str],
    rows: Sequence[Row],
    result: kvjax.Generation,
    most: int,
    *,
    several: bool,
    name: str = "prompt",
) -> None:
    """Prints texts and figures as one JSON object, or a line of figures for people.

    Args:
      as_json: whether to print JSON. People have seen the texts while they were written.
      record: figures and settings of all rows.
      texts: input of each row.
      rows: the rows with their texts.
      result: generation of all rows.
      most: maximum new tokens of a row.
      several: whether JSON has a list of rows, each with its input.
      name: name of the inputs in JSON.
    """
    results = results_of(texts, rows, result, most, name)
    if as_json:
        if not several:
            results[0].pop(name)
        print(json.dumps({**record, **({"results": results} if several else results[0])}))
        return
    cut = [row["finish_reason"] == "length" for row in results]
    tokens = {name: sum(row[name] for row in results) for name in ("prompt_tokens", "new_tokens")}
    share = f"{sum(cut)} of {len(cut)} " if len(cut) > 1 else ""
    print_figures({**record, **tokens}, f"{share}cut by --max-new" if any(cut) else "")


def results_of(
    texts: Sequence[str], rows: Sequence[Row], result: kvjax.Generation, most: int, name: str
) -> list[dict[str, Any]]:
    """Returns what JSON has of each row; arguments as for `print_rows`."""
    return [
        {
            name: text, "text": row.text, "prompt_tokens": tokens, "new_tokens": row.new_tokens,
            "finish_reason": "length" if is_cut(row, result, number, most) else "stop",
        }
        for number, (text, row, tokens) in enumerate(
            zip(texts, rows, result.prompt_tokens, strict=True)
        )
    ]  # fmt: skip


def on_step(
    display: Display, rows: Sequence[Row], texts: Sequence[str], several: bool
) -> Callable[[int], None]:
    """Returns an `on_step` for `write` that shows the texts of rows as they are written.

    Args:
      display: shows the number of tokens until there is text.
      rows: the rows, which take the tokens.
      texts: input of each row.
      several: whether each text has a header with its row's input.
    """
    headers = [_header(f"--- {n}/{len(texts)}: ", text) for n, text in enumerate(texts, 1)]
    shown = InOrder(rows, headers if several else [""], display.text)

    def step(tokens: int) -> None:
        display.writing(tokens)
        shown.update()

    return step


def _header(number: str, text: str) -> str:
    """Returns a line with a number and as much of a text as the terminal is wide."""
    line = Text(number + " ".join(text.split()))
    line.truncate(shutil.get_terminal_size().columns, overflow="ellipsis")
    return f"{line.plain}\n"


def _prompts(args: argparse.Namespace) -> list[str] | None:
    """Returns the prompts of the options; None if there are none."""
    if args.prompts is not None:
        texts = read_prompts(args.prompts)
    elif args.prompt_file is not None:
        texts = [read_text(args.prompt_file)]
    elif args.prompt is not None:
        texts = args.prompt
    else:
        return None
    if len(texts) == 1:
        return [check_text(texts[0], "the prompt")]
    return [check_text(text, f"prompt {number}") for number, text in enumerate(texts, 1)]
