"""`kvjax generate`: a prompt is continued, or the bundled model answers its question."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from kvjax.cli.generation_request import GenerationRequest
from kvjax.cli.model_folder import model_folder
from kvjax.cli.terminal import Display, answers, comparison, print_dropped, print_figures
from kvjax.cli.text_file import read_text
from kvjax.cli.tokenized_prompt import TokenizedPrompt

_TEXT_TOKENS, _ANSWER_TOKENS = 128, 16  # most new tokens where none are given


def generate(args: argparse.Namespace) -> None:
    """`kvjax generate`: continues a prompt; without model and prompt, answers a question."""
    text = _prompt_text(args)
    if args.max_new is None:
        args.max_new = _ANSWER_TOKENS if args.model is None and text is None else _TEXT_TOKENS
    request = GenerationRequest.from_args(args, args.method)
    if args.model is not None and text is None:
        raise ValueError("--model needs a --prompt or a --prompt-file")
    folder = model_folder(args.model)
    if text is None:
        _answer(args, request, folder)
    else:
        _continue(args, request, folder, text)


def _prompt_text(args: argparse.Namespace) -> str | None:
    """The prompt that was given, None if none was."""
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    if text is None:
        return None
    if not text.strip():
        raise ValueError("the prompt is empty")
    try:
        text.encode("utf-8")  # arguments may hold bytes that are no text
    except UnicodeEncodeError as error:
        raise ValueError("the prompt is not UTF-8 text") from error
    return text


def _continue(
    args: argparse.Namespace, request: GenerationRequest, folder: Path, text: str
) -> None:
    """Continues a text: prints new text as it comes, or one JSON object."""
    from kvjax.models import from_pretrained

    with Display(not args.json) as display:
        display.stage("loading the model")
        prompt = TokenizedPrompt.of(text, folder)
        request.check(prompt)
        continuation = prompt.continuation()

        def on_tokens(rows: list[list[int]]) -> None:
            display.stop()
            _write(continuation.add(rows[0]))

        model = from_pretrained(folder)
        result = request.run(model, prompt, display, None if args.json else on_tokens)
    if args.json:
        model_name = "bundled" if args.model is None else args.model
        record = request.record(result, prompt.new_text(result))
        _write(json.dumps({"model": model_name, **record}) + "\n")
    else:
        _write(continuation.finish() + "\n")
        print_figures(result)
        print_dropped(result, request.method)


def _write(text: str) -> None:
    """Text as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _answer(args: argparse.Namespace, request: GenerationRequest, folder: Path) -> None:
    """Asks the question about the bundled document, with the full cache and with a method."""
    from kvjax.evaluation import is_right
    from kvjax.models import demo, from_pretrained

    names = dict.fromkeys(("full", request.method))
    requests = {name: GenerationRequest.from_args(args, name) for name in names}
    document = demo.document()
    with Display(not args.json) as display:
        display.stage("loading the bundled model")
        prompt = TokenizedPrompt.of(document.text + document.question, folder)
        for one in requests.values():
            one.check(prompt)
        model = from_pretrained(folder)
        results = {name: one.run(model, prompt, display) for name, one in requests.items()}
    texts = {name: prompt.new_text(result) for name, result in results.items()}
    right = {name: is_right(text, document.answer) for name, text in texts.items()}
    question = document.question.strip()
    if args.json:
        records = {
            name: {**one.record(results[name], texts[name]), "correct": right[name]}
            for name, one in requests.items()
        }
        asked = {"model": "bundled", "question": question, "expected": document.answer}
        _write(json.dumps({**asked, **records[request.method], "full": records["full"]}) + "\n")
        return
    console = Console(highlight=False)
    console.print(
        f"The bundled model read a document and a question, {len(prompt.tokens):,} tokens:\n"
    )
    console.print(f"{question} ...\n", style="bold", markup=False)
    console.print(answers(document.answer, texts, right))
    console.print(comparison(results, {name: one.budget for name, one in requests.items()}))
    console.print(
        f"Bytes are those of the whole cache, with room for {args.max_new:,} new tokens.\n"
        "Other methods: kvjax methods\n"
        "Many questions: kvjax compare\n"
        "Your own text: kvjax generate --model DIR_OR_ID --prompt TEXT",
        style="dim",
    )
    for name, result in results.items():
        print_dropped(result, name)
