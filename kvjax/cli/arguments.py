"""What the commands take: their options, and the types of these."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np

import kvjax
from kvjax.cli import (
    ask_command,
    bench_command,
    chat_command,
    compare_command,
    diagnose_command,
    generate_command,
    methods_command,
    options,
    plan_command,
    read_command,
    show_command,
)
from kvjax.evaluation.cells import grid
from kvjax.evaluation.diagnosis import diagnosis
from kvjax.evaluation.speed import speed
from kvjax.messages import brief, printable
from kvjax.registry import expression


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, like every other error of the user's."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise ValueError(f"{message} (see {self.prog} --help)")


class _Whole(Parser):
    """The parser of all commands, which knows what was perhaps meant."""

    commands: dict[str, Parser]

    def error(self, message: str) -> NoReturn:
        """Raises it; a command that is not known gets a hint."""
        wrong = re.search(r"argument COMMAND: invalid choice: '(.*?)'", message)
        if wrong is not None:
            given = printable(wrong[1], 200)
            message = f"there is no command '{given}'{_guess(given, self.commands)}"
        super().error(message)

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """The same as of any parser; an option that is not known gets a hint."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            own = self.commands.get(parsed.command, self)
            wrong = next((word for word in rest if word.startswith("-")), rest[0])
            known = [name for action in own._actions for name in action.option_strings]
            own.error(
                f"unrecognized arguments: {printable(' '.join(rest), 200)}"
                f"{_guess(wrong.partition('=')[0], known)}"
            )
        return parsed


def _guess(word: str, known: Iterable[str]) -> str:
    """A question about the word that was perhaps meant."""
    close = difflib.get_close_matches(word[:40], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def parser() -> Parser:
    """The parser of all commands; `run` is the command's function."""
    whole = _Whole(
        prog="kvjax", allow_abbrev=False, description="Language models with a compressed KV cache."
    )
    whole.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    whole.set_defaults(run=lambda args: whole.print_help())
    added = whole.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    whole.commands = added.choices

    def command(name: str, run: Callable, about: str, description: str, examples: str = ""):
        own = added.add_parser(
            name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
            help=about, description=description, epilog=examples,
        )  # fmt: skip
        own.set_defaults(run=run)
        return own

    _add_generate_options(command(
        "generate", generate_command.generate, "continue prompts through a compressed cache",
        "Continues prompts through a compressed cache. The text goes to standard output,\n"
        "figures to standard error. A model with a chat template takes each prompt as a\n"
        "user's message, unless --raw is given. Without --model, the bundled model\n"
        "continues the prompt. Without a prompt as well, it answers a question about a\n"
        "long document, with the method and with the full cache.",
        "examples:\n"
        "  kvjax generate\n"
        "  kvjax generate --model DIR --prompt 'Once upon a time' --budget 256\n"
        "  kvjax generate --model DIR --prompt-file book.txt --method streaming_llm\n"
        "  kvjax generate --model DIR --prompt Hello --method 'every(snapkv, steps=64)'\n"
        "  kvjax generate --model DIR --prompts questions.jsonl --stop 'Question:' --json\n"
        "  kvjax generate --import mine.py --method mine",
    ))  # fmt: skip
    _add_read_options(command(
        "read", read_command.read, "read a document once, for many questions",
        "Reads a document into a compressed cache and saves that in a folder, for\n"
        "kvjax ask. A folder of an earlier kvjax read is replaced.",
        "examples:\n"
        "  kvjax read book.txt --out book --model DIR --method quest --budget 0.2\n"
        "  kvjax ask book 'Who is Ishmael?' 'What is the name of the ship?'",
    ))  # fmt: skip
    _add_ask_options(command(
        "ask", ask_command.ask, "ask questions about a document that was read",
        "Answers questions about a document that kvjax read has read, all of them in one\n"
        "batch. The folder stays as it is, and no question knows of another.",
    ))  # fmt: skip
    _add_chat_options(command(
        "chat", chat_command.chat, "talk with a model whose history is compressed",
        "A conversation whose whole history is one compressed cache. A line is a turn;\n"
        f"{chat_command.HELP}\n"
        "Ctrl-C ends an answer that is being written.",
        "examples:\n"
        "  kvjax chat --model DIR\n"
        "  kvjax chat --model smollm2\n"
        "  kvjax chat --model DIR --method h2o --budget 512 --system 'Be brief.'",
    ))  # fmt: skip
    _add_compare_options(command(
        "compare", compare_command.compare,
        "measure what methods keep: answers, perplexity, attention, bytes",
        "Runs methods over budgets and prompt lengths: which questions about a long text\n"
        "are still answered, what held-out text costs, what attention loses, and bytes.\n"
        "Prints a table and writes results.json, results.csv, timings.json, pictures and\n"
        "report.html.\n"
        "An interrupted run goes on when the same command is given again, and a command\n"
        "with more methods, budgets, tasks, lengths or cases measures what is missing.",
        "examples:\n"
        "  kvjax compare\n"
        "  kvjax compare --methods snapkv,h2o --budgets 0.1,0.2 --cases 100\n"
        "  kvjax compare --model DIR --text book.txt --lengths 4096",
    ))  # fmt: skip
    _add_eval_options(command(
        "eval", compare_command.compare, "run published tasks through compressed caches",
        "Runs tasks through the caches of methods and budgets, beside the full cache:\n"
        "RULER (generated in a text), LongBench, ZeroSCROLLS, XSum and GSM8K (from files\n"
        "in --data), the tasks of kvjax compare, perplexity and attention. Published tasks\n"
        "need packages: pip install 'kvjax[eval]'. Results are those of kvjax compare, and\n"
        "go on as there.",
        "examples:\n"
        "  kvjax eval niah_single_2 vt --model smollm2 --method snapkv --budget 0.2\n"
        "  kvjax eval multi_news --model DIR --data longbench --lengths 4096\n"
        "  kvjax eval perplexity --model DIR --text book.txt --method h2o,quest --budget 0.1,0.2",
    ))  # fmt: skip
    _add_bench_options(command(
        "bench", bench_command.bench,
        "measure what methods cost: times and bytes, beside the machine's own",
        "Measures methods against the full cache: time to the first token and per further\n"
        "one, tokens per second, seconds of compilation, bytes of caches, resident bytes and\n"
        "their peak. Beside them stands the least that the machine needs, by its bandwidth\n"
        "and its rate of products, which are measured too. A model is given with its weights,\n"
        "or as a shape that gets random ones.",
        "examples:\n"
        "  kvjax bench\n"
        "  kvjax bench --model DIR --method snapkv h2o clusterkv --batch 1 4\n"
        "  kvjax bench --shape llama-3.1-8b --layers 2 --tokens 8192",
    ))  # fmt: skip
    _add_show_options(command(
        "show", show_command.show, "show what kvjax compare or kvjax eval found",
        "Prints the table of a comparison, finished or not, and writes results.json,\n"
        "results.csv, pictures and report.html, a page that needs nothing else. Nothing is\n"
        "measured.",
        "examples:\n"
        "  kvjax show kvjax-compare\n"
        "  kvjax show results --out page",
    ))  # fmt: skip
    _add_diagnose_options(command(
        "diagnose", diagnose_command.run,
        "find the smallest cache that holds for a text of yours",
        "Reads a text once, and says for each method and budget how far the outputs of\n"
        "attention are from those of the full cache, by layer and head, and how many\n"
        "bytes the cache takes. Recommends the smallest cache under an error, and draws\n"
        "what is alike in the text's cache. The question stands inside what is\n"
        "compressed, or comes after it.",
        "examples:\n"
        "  kvjax diagnose --prompt-file book.txt --model DIR\n"
        "  kvjax diagnose --prompt-file book.txt --ask 'Who is Ishmael?' --question after\n"
        "  kvjax diagnose --prompt-file book.txt --methods all --error 0.05 --out pictures",
    ))  # fmt: skip
    _add_plan_options(command(
        "plan", plan_command.run, "what devices will hold, and how many requests fit",
        "Places a model and its caches on devices that need not be there, and says what\n"
        "each holds: weights, caches by method, how many requests fit, and the least time\n"
        "of a decode step by the bytes that it moves. No weights are read.",
        "examples:\n"
        "  kvjax plan --model llama-3.1-8b\n"
        "  kvjax plan --model llama-3.1-70b --mesh tensor=8 --batch 1 8 32\n"
        "  kvjax plan --model DIR --mesh data=8,tensor=8 --tokens 32768\n"
        "      --method full snapkv 'chain(snapkv, quantize(bits=4))' --budget 0.2",
    ))  # fmt: skip
    command(
        "methods", methods_command.methods, "list the methods of compression",
        "Lists the methods of compression with their parameters and papers.",
    )  # fmt: skip
    for name, own in added.choices.items():
        own.add_argument("--import", metavar="MODULE", action="append", default=[], dest="imports",
            help="a module, or a .py file, that registers methods with kvjax.register; may be "
            "given several times")  # fmt: skip
        if name != "chat":
            own.add_argument("--json", action="store_true",
                help="print one JSON object, nothing else")  # fmt: skip
    return whole


def _add_generate_options(own: Parser) -> None:
    options.add_model(own)
    prompt = own.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", action="append",
        help="text to continue; may be given several times")  # fmt: skip
    prompt.add_argument("--prompt-file", metavar="FILE",
        help="UTF-8 file with it, read as it is; - is standard input")  # fmt: skip
    prompt.add_argument("--prompts", metavar="FILE",
        help="UTF-8 file with a prompt in each line, as text or as JSON: strings, or objects with "
        "a \"prompt\"; - is standard input")  # fmt: skip
    options.add_template(own, "the prompt")
    options.add_method(own)
    own.add_argument("--max-new", metavar="N", type=int,
        help="most new tokens (default: 128, for the bundled question 16)")  # fmt: skip
    own.add_argument("--stop", metavar="TEXT", type=options.stop_text, action="append", default=[],
        help="ends the text, and is no part of it; may be given several times")  # fmt: skip
    options.add_sampling(own)


def _add_read_options(own: Parser) -> None:
    own.add_argument("document", metavar="DOCUMENT", help="UTF-8 file; - is standard input")
    own.add_argument("--out", metavar="FOLDER", required=True, help="where it is saved")
    options.add_model(own)
    options.add_template(own, "the document")
    options.add_method(own)
    own.add_argument("--max-questions", metavar="TOKENS", type=int, default=256,
        help="room for the tokens of a question (default: 256)")  # fmt: skip
    own.add_argument("--max-new", metavar="N", type=int, default=128,
        help="room for the tokens of an answer (default: 128)")  # fmt: skip


def _add_ask_options(own: Parser) -> None:
    own.add_argument("folder", metavar="FOLDER", help="of kvjax read")
    own.add_argument("questions", metavar="QUESTION", nargs="+", help="about the document")
    options.add_model(own, "the one that read the document")
    own.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what kvjax read made room for)")  # fmt: skip
    options.add_sampling(own)


def _add_chat_options(own: Parser) -> None:
    options.add_model(own)
    options.add_template(own, "what is said")
    options.add_method(own)
    own.add_argument("--max-prompt", metavar="TOKENS", type=int,
        help="room for all that is said to the model, and as much again for all that it answers "
        "(default: 4096, or half of the model's positions)")  # fmt: skip
    own.add_argument("--max-new", metavar="N", type=int, default=512,
        help="most tokens of an answer (default: 512)")  # fmt: skip
    options.add_sampling(own)


def _add_compare_options(own: Parser) -> None:
    _add_grid_options(own, "s", "kvjax-compare", grid.LENGTHS)
    _add_list(own, "--tasks", name_list, grid.DEFAULT_TASKS, "see kvjax eval --help")


def _add_eval_options(own: Parser) -> None:
    own.add_argument("tasks", metavar="TASK", nargs="+",
        help=f"of {', '.join((*grid.ANSWERS, *grid.MEASURES))}")  # fmt: skip
    # Some published tasks need more than the shortest prompts of a comparison.
    _add_grid_options(own, "", "kvjax-eval", grid.LENGTHS[-1:])


def _add_grid_options(own: Parser, several: str, out: str, lengths: tuple[int, ...]) -> None:
    """What both commands take; `several` ends the names of --method and --budget."""
    options.add_model(own)
    own.add_argument("--text", metavar="FILE",
        help="UTF-8 text that the model does not know (default: a bundled one)")  # fmt: skip
    own.add_argument("--data", metavar="DIR", help="folder with the files of data sets")
    _add_list(own, f"--method{several}", method_list, grid.METHODS,
        "methods of `kvjax methods` and compositions, or all; full is always there",
        dest="methods")  # fmt: skip
    _add_list(own, f"--budget{several}", number_list, grid.BUDGETS,
        "shares of the prompt (0.1) or slots per head (64)", dest="budgets")  # fmt: skip
    _add_list(own, "--lengths", number_list, lengths, "tokens of a prompt")
    _add_list(own, "--question", name_list, grid.QUESTIONS,
        "asked inside of what is compressed, or after it", dest="questions")  # fmt: skip
    _add_list(own, "--depths", depth_list, grid.DEPTHS,
        "where in the text the answer is, 0 to 1, or how many such places")  # fmt: skip
    _add_list(own, "--cases", int, grid.CASES, "per task, length and question", metavar="N")
    own.add_argument("--max-new", metavar="N", type=int,
        help="most tokens of an answer (default: what each task says)")  # fmt: skip
    own.add_argument("--chat", action=argparse.BooleanOptionalAction,
        help="prompts of published tasks are messages of the model's chat template (default: as "
        "each benchmark has it; RULER has none)")  # fmt: skip
    _add_list(own, "--seed", options.seed, 0, "of the cases", metavar="N")
    _add_list(own, "--out", str, out, "folder of the results", metavar="DIR")


def _add_list(
    own: Parser, name: str, kind: Callable, default, about: str, metavar: str = "LIST", **rest
) -> None:
    """An option whose help ends with its default."""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    help_text = f"{about} (default: {shown})"
    own.add_argument(name, metavar=metavar, type=kind, default=default, help=help_text, **rest)


def _add_show_options(own: Parser) -> None:
    own.add_argument("folder", metavar="FOLDER", help="of kvjax compare or kvjax eval")
    own.add_argument("--out", metavar="DIR", help="where it is written (default: FOLDER)")


def _add_bench_options(own: Parser) -> None:
    add = own.add_argument
    options.add_model(own)
    add("--shape", metavar="DIR_OR_NAME",
        help="folder with config.json, such a file, or a name such as llama-3.1-8b, in place of "
        "--model: a model of these sizes with random weights reads random tokens")  # fmt: skip
    add("--layers", metavar="N", type=int,
        help="layers of the shape, from the first on (default: all)")  # fmt: skip
    add("--tokens", metavar="N", type=int, default=speed.PROMPT_TOKENS,
        help=f"of each prompt (default: {speed.PROMPT_TOKENS})")  # fmt: skip
    add("--new", metavar="N", type=int, default=speed.NEW_TOKENS,
        help=f"new tokens of each row, at least 2 (default: {speed.NEW_TOKENS})")  # fmt: skip
    add("--batch", metavar="N", type=int, nargs="+", default=list(speed.BATCHES),
        help="rows at a time (default: 1)")  # fmt: skip
    add("--method", metavar="NAME", nargs="+", default=bench_command.METHODS,
        help="methods of `kvjax methods` and compositions (default: "
        f"{' '.join(bench_command.METHODS)}); full is always there")  # fmt: skip
    add("--budget", metavar="N_OR_FRACTION", type=options.budget, default=0.1,
        help="as for kvjax generate (default: 0.1)")  # fmt: skip
    add("--rounds", metavar="N", type=int, default=speed.ROUNDS,
        help="in which every method runs once; the fastest counts (default: "
        f"{speed.ROUNDS})")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"),
        help="of weights, keys and values (default: float32 on a CPU, else bfloat16)")  # fmt: skip


def _add_diagnose_options(own: Parser) -> None:
    options.add_model(own)
    own.add_argument("--prompt-file", metavar="FILE", required=True,
        help="UTF-8 file with the text; - is standard input")  # fmt: skip
    own.add_argument("--ask", metavar="TEXT",
        help="a question about the text (default: the last "
        f"{diagnose_command.QUESTION_TOKENS} tokens of the text stand for one)")  # fmt: skip
    own.add_argument("--question", choices=("inside", "after"), default="inside",
        help="whether the question is compressed with the text, or asked afterwards (default: "
        "inside)")  # fmt: skip
    options.add_template(own, "the text")
    own.add_argument("--methods", metavar="LIST", type=method_list, default=grid.METHODS,
        help="methods of `kvjax methods` and compositions, or all (default: "
        f"{','.join(grid.METHODS)})")  # fmt: skip
    own.add_argument("--budgets", metavar="LIST", type=number_list, default=diagnosis.BUDGETS,
        help="shares of the prompt (0.1) or slots per head (64) (default: "
        f"{','.join(map(str, diagnosis.BUDGETS))})")  # fmt: skip
    own.add_argument("--error", metavar="E", type=float, default=diagnosis.ERROR,
        help="largest relative error of the recommended cache (default: "
        f"{diagnosis.ERROR})")  # fmt: skip
    own.add_argument("--new", metavar="N", type=int, default=diagnosis.NEW_TOKENS,
        help="new tokens that errors are means over (default: "
        f"{diagnosis.NEW_TOKENS})")  # fmt: skip
    own.add_argument("--out", metavar="FOLDER", help="where pictures are drawn")


def _add_plan_options(own: Parser) -> None:
    add = own.add_argument
    add("--model", metavar="DIR_OR_SHAPE", required=True,
        help="folder with config.json, such a file, or a name such as llama-3.1-8b")  # fmt: skip
    add("--mesh", metavar="SIZES", type=plan_command.mesh_sizes, default={"tensor": 1},
        help="devices that divide rows (data) and heads (tensor), as data=2,tensor=4 (default: "
        "one device)")  # fmt: skip
    add("--memory", metavar="GB", type=float, default=plan_command.MEMORY,
        help="of each device (default: 80)")  # fmt: skip
    add("--bandwidth", metavar="GB/S", type=float, default=plan_command.BANDWIDTH,
        help="of each device's memory (default: 3350, an NVIDIA H100 SXM's)")  # fmt: skip
    add("--tokens", metavar="N", type=int, default=131072,
        help="of a request's prompt (default: 131072)")  # fmt: skip
    add("--new", metavar="N", type=int, default=512, help="new tokens (default: 512)")
    add("--batch", metavar="N", type=int, nargs="+", default=[1, 8, 32],
        help="requests at a time (default: 1 8 32)")  # fmt: skip
    add("--method", metavar="NAME", nargs="+", default=plan_command.METHODS,
        help="methods of `kvjax methods` and compositions (default: full snapkv)")  # fmt: skip
    add("--budget", metavar="N_OR_FRACTION", type=options.budget, default=0.1,
        help="as for kvjax generate (default: 0.1)")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of weights, keys and values (default: bfloat16)")  # fmt: skip


def method_list(text: str) -> list[str]:
    """Methods separated by commas, which may contain commas themselves; `all` for every method.

    Example:
      >>> from kvjax.cli.arguments import method_list
      >>> method_list("h2o, every(snapkv, steps=64)")
      ['h2o', 'every(snapkv, steps=64)']
    """
    if text.strip() == "all":
        return list(grid.ALL_METHODS)
    source = f"[{text}]"
    try:
        node = expression(source)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(node, ast.List) or not node.elts:
        raise argparse.ArgumentTypeError(f"must be methods between commas, got {brief(text)}")
    methods = [ast.get_source_segment(source, part) or "" for part in node.elts]
    if "all" in methods:
        raise argparse.ArgumentTypeError(f"all must stand alone, got {brief(text)}")
    return methods


def number_list(text: str) -> list[int | float]:
    """Integers and decimals separated by commas."""
    return [options.number(part, "numbers between commas") for part in text.split(",")]


def depth_list(text: str) -> list[float]:
    """Depths separated by commas, or the number of depths to spread evenly from 0 to 1."""
    depths = number_list(text)
    if len(depths) > 1 or isinstance(depths[0], float):
        return depths
    if not 2 <= depths[0] <= grid.MOST_DEPTHS:
        raise argparse.ArgumentTypeError(
            f"must be a number of depths, at least 2 and at most {grid.MOST_DEPTHS}, or depths "
            f"such as 0,0.5,1, got {brief(text)}"
        )
    return np.linspace(0.0, 1.0, depths[0]).tolist()


def name_list(text: str) -> list[str]:
    """Names separated by commas."""
    return [part.strip() for part in text.split(",")]
