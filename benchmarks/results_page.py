"""Writes measured figures into the pages, from the files in benchmarks/results.

    python benchmarks/results_page.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between is replaced. It is
made from the folder NAME of `kvjax eval`, from the rows of `NAME.json`, or from the records of
`device.py`; `NAME where REGEX` has those of its lines in which the expression is found. Figures of
methods on SmolLM2 at 2,048 tokens stand between `<!-- PANEL: METHOD BUDGET; ... -->` and `<!-- /
-->`, where PANEL is `inside` or `after` (needles found, by where the question is) or `nats` (lost
per token). `<!-- paired: METHOD BUDGET - METHOD BUDGET; ... -->` has differences of losses of the
same texts. ` of NAME` behind these words names another folder, and `Qwen` is Qwen's needles. Any
other figure stands between `<!-- figure: NAME TEXT -->` and `<!-- / -->`. TEXT has
expressions of Python in braces, with a format behind a colon, over what `NAME.json` has by name.
`row(method="h2o")` is the one row of its lists with these values; of a folder of `kvjax eval`, it
is a method on one task. The table of methods, the papers of CITATION.cff and the methods in
`kvjax/__init__.pyi` are made from the classes in `kvjax/registry.py`. `--check` changes nothing and
fails where a page is not what the files say.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import method_lists
from common import parser_of
from device_page import device_tables
from tables import markdown

import kvjax
from kvjax.cli.situations import SITUATIONS, examples_for
from kvjax.evaluation import Estimate, Results, Row, read_results
from kvjax.evaluation.tasks.squad import SQUAD

HOME = Path(__file__).resolve().parents[1]
FOLDER = HOME / "benchmarks" / "results"
METHODS = HOME / "docs" / "methods"
RESULTS = HOME / "docs" / "results"
PAGES = (
    *(HOME / name for name in ("README.md", "RESULTS.md", "models/demo/README.md")),
    *(HOME / "docs").rglob("*.md"),
)
LISTS = (HOME / "CITATION.cff", HOME / "kvjax" / "__init__.pyi")
CHOSEN = (
    "full", "streaming_llm", "h2o", "snapkv", "chelsea", "kvmerger", "kvcrush(snapkv)", "spindlekv",
    "spindlekv(capacity=0.5)", "clusterkv", "quest", "quest(spread=None)", "infinigen", "quantize",
    "chain(quantize, clusterkv)",
)  # fmt: skip
"""The methods of the table in RESULTS.md; docs/results has all of them."""

FIRST = {
    "full": ("full", None),
    **{name: (name, 0.2) for name in ("snapkv", "clusterkv", "quest(spread=None)")},
    "quantize": ("quantize", None),
    "chain(quantize, clusterkv)": ("chain(quantize, clusterkv)", 0.2),
    "by_head(kvzip(room=64))": (
        "by_head(kvzip(budget=0.2, room=64), profile='heads.safetensors')", None,
    ),
}  # fmt: skip
"""The methods of the first table of times in RESULTS.md, and their rows of the results."""

PAGE_RECALL = "page_recall_smollm2", "page_recall_qwen"
LONG_DOCUMENTS = (
    "long_documents_needles_qwen", "long_documents_needles_qwen_16k",
    "long_documents_needles_qwen_32k",
)  # fmt: skip
RECALL_ANSWERS = (
    "recall_answers_smollm2", "recall_answers_qwen", "recall_answers_qwen_4k",
    "recall_answers_qwen_8k", "recall_answers_smollm2_8k",
)  # fmt: skip
KEPT_ANSWERS = (
    "kept_answers_smollm2", "kept_answers_qwen", "kept_parts_smollm2", "kept_parts_qwen",
    "kept_needles_qwen", "kept_bits_smollm2", "kept_bits_qwen",
)  # fmt: skip

TABLE = re.compile(r"(?s)(<!-- table: (\w+)(?: where ([^\n]+))? -->)\n.*?<!-- end -->")
FIGURES = re.compile(r"<!-- (inside|after|nats|paired)(?: of (\w+))?: (.*?) -->.*?<!-- / -->")
FIGURE = re.compile(r"<!-- figure: (\w+) (.*?) -->(.*?)<!-- / -->")
LIST = re.compile(r"(?s)^(.*)(# the (imports|papers) of methods, by [^\n]*)\n.*$")
EXPRESSION = re.compile(r"\{(.*?)(?::([^{}:]*))?\}")
NEEDLE, LOSS, ATTENTION = "niah_single_2", "perplexity", "attention"


def percent(row: Row) -> str:
    """A score of answers in per cent, with its interval."""
    return in_percent(*row.score[:3])


def in_percent(mean: float, low: float, high: float) -> str:
    """A share in per cent, with its interval rounded outwards as in reports."""
    return f"{100 * mean:.0f} ({math.floor(100 * low)} to {math.ceil(100 * high)})"


def prose_recovered(prose: dict[str, float]) -> str:
    """Recovered prose in per cent, with its interval."""
    return f"{prose['mean']:.0f} ({prose['low']:.0f} to {prose['high']:.0f})"


def nats(row: Row) -> str:
    """A loss: of the full cache as it is, of others as the difference."""
    if row.method == "full":
        return f"{row.score.mean:.3f}"
    mean, low, high = row.difference[:3]
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def error(row: Row) -> str:
    """Relative error of attention outputs, and the recall of the most attended tokens."""
    return f"{row.score.mean:.3f} / {100 * row.recall:.0f} %"


def recovered(row: Row) -> str:
    """A loss of right answers, and the part of it in per cent that the method keeps."""
    if row.recovery is None or row.method == "full":
        return f"{row.score.mean:.2f}"
    mean, low, high = row.recovery[:3]
    return f"{row.score.mean:.2f}, {100 * mean:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


SHOWN: dict[str, Callable[[Row], str]] = {LOSS: nats, ATTENTION: error, SQUAD: recovered}


def name(method: str, budget: float | None) -> str:
    """Method and budget."""
    return f"`{method}`" if budget is None else f"`{method}` {budget:g}"


def share(rows: Iterable[Row | None]) -> str:
    """Bytes of the cache, in per cent of the full cache's."""
    known = [row.share for row in rows if row is not None and row.share is not None]
    return f"{100 * known[0]:.0f}" if known else ""


def scores(results: Sequence[Results], named: str = "") -> str:
    """Methods × budgets as rows, panels as columns, and the bytes of the cache.

    Of all methods, or of those whose expressions have the name `named`, and the full cache.
    """
    has_name = re.compile(rf"\b{named}\b").search
    found = {
        (row.panel, row.candidate): row
        for result in results
        for row in result.rows()
        if row.method == "full" or has_name(row.method)
    }
    panels = list(dict.fromkeys(panel for panel, _ in found))
    lengths = len({length for _, length, _ in panels}) > 1
    lines = []
    for method, budget in dict.fromkeys(candidate for _, candidate in found):
        rows = [found.get((panel, (method, budget))) for panel in panels]
        cells = ["" if row is None else SHOWN.get(row.task, percent)(row) for row in rows]
        shown = "" if budget is None else f"{budget:g}"
        lines.append([f"`{method}`", shown, share(rows), *cells])
    parts = [
        (f"`{task}`", f"{length:,}" if lengths else "", place) for task, length, place in panels
    ]
    headings = [", ".join(filter(None, panel)) for panel in parts]
    return markdown(["method", "budget", "bytes, %", *headings], lines)


def choosing(results: Sequence[Results]) -> str:
    """The methods of `CHOSEN` as rows, panels as columns, the budgets beside each other."""
    found: dict[str, dict[tuple, list[Row]]] = {}
    for row in (row for result in results for row in result.rows()):
        if row.task != ATTENTION and row.method in CHOSEN:
            found.setdefault(row.method, {}).setdefault(row.panel, []).append(row)
    panels = list(dict.fromkeys(panel for own in found.values() for panel in own))

    def figure(row: Row) -> str:
        if row.task != LOSS:
            return f"{100 * row.score.mean:.0f}"
        full = row.method == "full"
        return f"{row.score.mean:.2f}" if full else f"{row.difference.mean:+.2f}"

    lines = [
        [f"`{method}`", " / ".join(share([row]) for row in next(iter(by_panel.values()))),
         *(" / ".join(map(figure, by_panel.get(panel, []))) for panel in panels)]
        for method, by_panel in found.items()
    ]  # fmt: skip
    headings = [", ".join(filter(None, (f"`{task}`", place))) for task, _, place in panels]
    return markdown(["method", "bytes, %", *headings], lines)


def figures(measured: str, methods: str, results: Sequence[Results]) -> str:
    """The figures of some methods, each with its interval."""
    task, question = (LOSS, None) if measured == "nats" else (NEEDLE, measured)
    found = {
        name(*row.candidate): SHOWN.get(task, percent)(row)
        for result in results
        for row in result.rows()
        if (row.task, row.question) == (task, question)
    }
    wanted = (text.rpartition(" ") for text in methods.split("; "))
    names = [f"`{method}` {last}" if method else f"`{last}`" for method, _, last in wanted]
    return "; ".join(f"{each}: {found[each]}" for each in names)


def paired(methods: str, results: Sequence[Results]) -> str:
    """Returns the difference of two methods' losses of the last folder's texts, with intervals."""
    losses: dict[str, dict[int, float]] = {}
    cases: set[int] = set()
    for result in results:
        cells = {cell: record for cell, record in result.records.items() if cell.task == LOSS}
        for cell, record in cells.items():
            scores = enumerate(record["scores"], cell.first)
            losses.setdefault(name(cell.method, cell.budget), {}).update(scores)
        cases = {case for cell in cells for case in range(cell.first, cell.stop)}
    shown = []
    for pair in methods.split("; "):
        wanted = (text.rpartition(" ") for text in pair.split(" - "))
        first, second = (f"`{method}` {budget}" for method, _, budget in wanted)
        differences = [losses[first][case] - losses[second][case] for case in sorted(cases)]
        mean, low, high, _ = Estimate.resampled(differences)
        shown.append(f"{first} - {second}: {mean:+.3f} ({low:+.3f} to {high:+.3f})")
    return "; ".join(shown)


class Fields(dict):
    """A JSON object whose members are attributes too."""

    __getattr__ = dict.__getitem__


def fields(row: Row) -> Fields:
    """What a figure may say of a method on one task."""
    full, cases = row.method == "full", row.score.cases
    if row.task == LOSS:
        measured = {"nats": row.score.mean, "lost": 0.0 if full else row.difference.mean}
    elif row.task == ATTENTION:
        measured = {"error": row.score.mean, "recall": row.recall}
    else:
        measured = {"right": round(row.score.mean * cases), "percent": 100 * row.score.mean}
    about = {
        name: getattr(row, name) for name in ("task", "length", "question", "method", "budget")
    }
    return Fields(**about, cases=cases, share=row.share, **measured)


def values(name: str, folders: dict[str, Results]) -> dict[str, Any]:
    """The names of a file or folder of results, for the expressions of a figure."""
    if name in folders:
        content, rows = {}, [fields(row) for row in folders[name].rows() if row.score is not None]
    else:
        text = (FOLDER / f"{name}.json").read_text()
        content = json.loads(text, object_hook=Fields)
        lists = (value for value in content.values() if isinstance(value, list))
        rows = [row for value in lists for row in value if isinstance(row, Fields)]

    def row(**wanted: object) -> Fields:
        found = [each for each in rows if wanted.items() <= _plain(each).items()]
        if len(found) != 1:
            raise ValueError(f"{name} has {len(found)} rows with {wanted}")
        return found[0]

    return {**content, "row": row}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, list | dict)}


def figure(name: str, text: str, folders: dict[str, Results]) -> str:
    """The text of a figure, with what its expressions are."""
    names = values(name, folders)
    return EXPRESSION.sub(lambda match: format(eval(match[1], names), match[2] or ""), text)


def first(results: Sequence[Results]) -> str:
    """Bytes, milliseconds and answers of the methods in `FIRST`."""
    times, longer = (
        {row["method"]: row for row in read(name)["results"] if row["batch"] == 1}
        for name in ("bench_smollm2", "bench_smollm2_long")
    )
    rows = (row for each in results for row in each.rows() if row.task == NEEDLE)
    found = {(row.candidate, row.question): row for row in rows}

    def answered(candidate: tuple[str, float | None], place: str) -> str:
        row = found.get((candidate, place))
        return percent(row) if row else ""

    lines = []
    for method, candidate in FIRST.items():
        time = times[method]
        lines.append([
            f"`{method}`", f"{time['cache_bytes'] / 1e6:.1f} MB", f"{1e3 * time['tpot_s']:.0f} ms",
            f"{1e3 * longer[method]['tpot_s']:.0f} ms",
            *(answered(candidate, place) for place in ("inside", "after")),
        ])  # fmt: skip
    headings = [
        "", "cache", "a step", "a step after 7,900 tokens", "needles, %, question inside",
        "after",
    ]  # fmt: skip
    return markdown(headings, lines)


def situations(results: Sequence[Results]) -> str:
    """Options of `kvjax generate` by situation, from the methods' cards, with what they find."""
    rows_found = (row for each in results for row in each.rows() if row.task == NEEDLE)
    found = {(row.candidate, row.question): row for row in rows_found}
    # The budget of such a row is in its method, and its room that of the questions asked.
    answers = (row for row in read("kept_answers_qwen")["rows"] if "bytes" in row)
    kept = {
        kvjax.unparse(kvjax.parse(row["method"].replace(", room=96", ""))): row for row in answers
    }
    lines = []
    for situation, heading in SITUATIONS.items():
        for example in examples_for(situation):
            _, method, *budget = shlex.split(example)
            budget = json.loads(budget[1]) if budget else None
            offloaded = re.sub(r"chain\((\w+), offload\)", r"\1", method)  # changes no answer
            rows = (found.get(((offloaded, budget), place)) for place in ("inside", "after"))
            inside, after = (percent(row) if row else "" for row in rows)
            prose = size = ""
            if row := kept.get(kvjax.unparse(kvjax.parse(method, budget))):
                single, recovery = row["single"], row["recovery"]
                after = after or in_percent(single["mean"], single["low"], single["high"])
                prose = prose_recovered(recovery)
                size = f"{100 * row['bytes']:.0f}"
            lines.append([heading, f"`{example}`", inside, after, prose, size])
            heading = ""
    headings = [
        "situation", "`kvjax generate` with", "needles, %, question inside", "asked after",
        "prose, %, asked after", "bytes, %",
    ]  # fmt: skip
    return markdown(headings, lines)


def kvpress(rows: Sequence[dict[str, Any]]) -> str:
    """Of `vs_kvpress.py methods`."""

    def line(row: dict[str, Any]) -> list[str]:
        kept, first, token = (row.get(key, {}) for key in ("positions", "first_s", "per_token_s"))
        peak, right = row["peak_bytes"], row.get("answers", {}).get("right")
        return [
            f"`{row['method']}`", f"{row['tokens']:,}",
            f"{kept['equal']} of {kept['lists']}" if kept else "",
            f"{100 * kept['common']:.2f} %" if kept else "",
            *(
                f"{1e3 * times['kvpress']:,.0f} / {1e3 * times['kvjax']:,.0f} ms, "
                f"**{times['times_as_fast']:.2f}**"
                for times in (first, token)
            ),
            f"{peak['kvpress'] / 1e6:,.0f} / {peak['kvjax'] / 1e6:,.0f} MB",
            f"{right['kvpress']} / {right['kvjax']} of {row['answers']['cases']}" if right else "",
        ]  # fmt: skip

    headings = [
        "method", "tokens", "sets of positions that are equal", "positions in both",
        "first token", "per token", "peak memory", "needles",
    ]  # fmt: skip
    return markdown(headings, map(line, rows))


def kvzip_answers(rows: Sequence[dict[str, Any]]) -> str:
    """Right answers and bytes of `vs_kvpress.py kvzip`, shares beside each other."""
    by_method: dict[tuple[str, str], dict[float | None, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["part"] == "answers":
            for side in ("kvpress", "kvjax"):
                for each in row[side]:
                    of_method = by_method.setdefault((side, each["method"]), {})
                    of_method.setdefault(each["share"], []).append(each)
    shares = list(dict.fromkeys(x for each in by_method.values() for x in each if x is not None))

    def shown(answers: list[dict[str, Any]]) -> str:
        size = sum(each["cache_bytes"] for each in answers) / len(answers)
        right = sum(each["right"] for each in answers)
        return f"{right} of {len(answers)}, {size / 1e6:.1f} MB"

    lines = [
        [side, f"`{method}`", *(shown(each.get(share, each.get(None, []))) for share in shares)]
        for (side, method), each in by_method.items()
    ]
    return markdown(["", "method", *(f"{share:g} kept" for share in shares)], lines)


def kvzip_positions(rows: Sequence[dict[str, Any]]) -> str:
    """Sets of positions of `vs_kvpress.py kvzip`, shares beside each other."""
    found = [row for row in rows if row["part"] == "positions"]
    shares = list(dict.fromkeys(row["share"] for row in found))
    pairs = {
        "of_head": "the best of each head by kvpress's scores, and `kvzip(values=False, kernel=1)`",
        "of_layer": "`KVzipPress, layerwise`, and the best of each layer by kvjax's scores",
        "of_model": "`KVzipPress`, and the best of all heads by kvjax's scores",
    }
    figures = {(row["sets"], row["share"]): f"{row['equal']} of {row['lists']}" for row in found}
    lines = [[told, *(figures[pair, share] for share in shares)] for pair, told in pairs.items()]
    return markdown(["compared", *(f"{share:g} kept" for share in shares)], lines)


def kvzip_times(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds and bytes of `vs_kvpress.py kvzip`."""

    def pair(row: dict[str, Any], key: str, scale: float, unit: str) -> str:
        both = " / ".join(f"{scale * row[side][key]:,.0f}" for side in ("kvpress", "kvjax"))
        return f"{both} {unit}"

    columns = {
        "document": ("read_s", 1e3, "ms"), "question": ("question_s", 1e3, "ms"),
        "per token": ("per_token_s", 1e3, "ms"), "cache": ("cache_bytes", 1e-6, "MB"),
        "peak memory": ("peak_bytes", 1e-6, "MB"),
    }  # fmt: skip
    lines = [
        [
            " / ".join(f"`{row[side]['text']}`" for side in ("kvpress", "kvjax")),
            *(pair(row, *each) for each in columns.values()),
        ]
        for row in rows if row["part"] == "times"
    ]  # fmt: skip
    return markdown(["methods", *columns], lines)


def newcomer(rows: Sequence[dict[str, Any]]) -> str:
    """Bytes, right answers and processor seconds of `newcomer.py`."""
    lines = []
    for row in rows:
        read = row["read"]
        budget = "" if read["budget"] is None else f" {read['budget']:g}"
        lines.append([
            f"`{row['method']}`{budget}",
            *(f"{read[name] / 1e6:.1f} MB" for name in ("cache_bytes", "kept_bytes", "room_bytes")),
            f"{100 * read['cache_bytes'] / read['full_cache_bytes']:.0f}",
            f"{read['kept_slots']:,.0f} + {read['room_slots']:,.0f}",
            f"{row['right']} of {len(row['answers'])}",
            *(f"{row[name]:.0f} s" for name in ("read_processor_s", "ask_processor_s")),
        ])  # fmt: skip
    headings = [
        "`kvjax read` with", "cache", "document", "room", "bytes, %", "slots per head", "right",
        "reading", "asking",
    ]  # fmt: skip
    return markdown(headings, lines)


def at_rest(rows: Sequence[dict[str, Any]]) -> str:
    """Bytes of documents that wait for questions, by `at_rest.py`."""
    sizes = {
        "at rest": "at_rest", "keys and values": "needed", "while it answers": "awake",
        "on disk": "on_disk",
    }  # fmt: skip
    headings = ["method", "tokens", "slots per head", *sizes, "at rest over keys and values"]
    return markdown(headings, [
        [
            f"`{row['method']}`", f"{row['tokens']:,}", f"{row['kept_slots']:,.0f}",
            *(f"{row[name] / 1e6:.1f} MB" for name in sizes.values()), f"{row['over_needed']:.2f}",
        ]
        for row in rows
    ])  # fmt: skip


def kept_answers(rows: Sequence[dict[str, Any]]) -> str:
    """Recovered prose and needles of `kept_answers.py`, the most bytes first."""

    def needles(row: dict[str, Any], kind: str) -> str:
        found = row.get(kind)
        return in_percent(found["mean"], found["low"], found["high"]) if found else ""

    def line(row: dict[str, Any]) -> list[str]:
        prose = row.get("recovery")
        return [
            f"`{row['method']}`", f"{100 * row['bytes']:.1f}" if "bytes" in row else "",
            prose_recovered(prose) if prose else "",
            needles(row, "single"), needles(row, "several"),
        ]  # fmt: skip

    by_bytes = sorted(rows, key=lambda row: -row.get("bytes", row["method"] == "full"))
    headings = ["composition", "bytes, %", "prose recovered, %", "single needle", "of several"]
    return markdown(headings, map(line, by_bytes))


def recall_answers(rows: Sequence[dict[str, Any]]) -> str:
    """Recovered prose and needles of selections by what a step reads, by `kept_answers.py`."""
    budget = re.compile(r"budget=([\d.]+)(?:, )?")
    by_method: dict[str, dict[str, str]] = {}
    for row in rows:
        share = budget.search(row["method"])
        prose, found = row["recovery"], row["several"]
        needles = in_percent(found["mean"], found["low"], found["high"])
        cell = f"{prose_recovered(prose)} / {needles}"
        name = budget.sub("", row["method"]).replace("()", "")
        by_method.setdefault(name, {})[share[1] if share else "1.0"] = cell
    shares = sorted({share for cells in by_method.values() for share in cells}, key=float)
    lines = [
        [f"`{name}`", *(cells.get(share, "") for share in shares)]
        for name, cells in by_method.items()
    ]
    return markdown(["method", *(f"{100 * float(share):g} % read" for share in shares)], lines)


def beside_hf(result: dict[str, Any]) -> str:
    """Methods beside the own model of lm-evaluation-harness, by `lm_eval_beside_hf.py`."""
    kinds = "loglikelihood", "loglikelihood_rolling", "generate_until"
    headings = [
        "", "nats of a continuation", "needles", "from float64", "of a piece",
        "continuations", "pieces", "needles written", "peak memory",
    ]  # fmt: skip
    return markdown(headings, [
        [
            f"`{row['side']}`" + ("" if row["budget"] is None else f" {row['budget']:g}"),
            f"{row['nats']:.1f}", f"{row['found']} of {result['requests']['generate_until']}",
            *(f"{x:.1f}" if x > 1 else f"{x:.1g}" for x in map(row["off"].get, kinds[:2])),
            *(f"{row['again_processor'][kind]:.0f} s" for kind in kinds),
            f"{row['peak_gb']:.1f} GB",
        ]
        for row in result["rows"] if row["dtype"] == "float32"
    ])  # fmt: skip


def foreign_models(rows: Sequence[dict[str, Any]]) -> str:
    """Which texts are equal in models of other packages, by `foreign_models.py`."""
    by_package: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["package"] == "kvjax":
            continue
        of_package = by_package.setdefault(f"{row['package']} {row['version']}", {})
        of_package["lines of the adapter"] = str(row["lines"])
        equal = (f"`{name}`" for name in ("loop", "generate") if row[name])
        of_package[f"`{row['method']}`"] = " and ".join(equal) or "none"
    lines = [[name, *(cells[name] for cells in by_package.values())]
             for name in next(iter(by_package.values()))]  # fmt: skip
    return markdown(["", *by_package], lines)


def page_recall(result: dict[str, Any]) -> str:
    """Attention that chosen pages receive, by `page_recall.py`."""
    shares = [f"{100 * share:g} %" for share in result["shares"]]
    headings = ["score", *shares, *(f"looking up, {share}" for share in shares)]
    return markdown(headings, [
        [row["score"], *(f"{x:.1f}" for x in (*row["all"], *row["looking_up"]))]
        for row in result["rows"]
    ])  # fmt: skip


def selected_recall(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table of the most attended tokens that a step reads, by `selected_recall.py`."""
    budgets = sorted({row["budget"] for row in rows})
    cells: dict[tuple[int, str], dict[int, str]] = {}
    for row in rows:
        shown = f"{100 * row['recall']:.0f} % / {row['error']:.2f}"
        cells.setdefault((row["tokens"], row["method"]), {})[row["budget"]] = shown
    lines = [
        [f"{tokens:,}", f"`{method}`", *(by_budget.get(budget, "") for budget in budgets)]
        for (tokens, method), by_budget in cells.items()
    ]
    return markdown(["tokens", "method", *(f"{budget:,}" for budget in budgets)], lines)


def page_errors(result: dict[str, Any]) -> str:
    """Errors of attention's output with and without estimates, by `page_recall.py`."""
    shares = [f"{100 * share:g} %" for share in result["shares"]]
    headings = ["score", "estimated", *shares, *(f"looking up, {share}" for share in shares)]
    return markdown(headings, [
        [row["score"], row["estimated"], *(f"{x:.1f}" for x in (*row["all"], *row["looking_up"]))]
        for row in result["errors"]
    ])  # fmt: skip


def gpu_loops(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    """What loops of attention's kernels do, by `compiled_loops.py`, and what they did before."""
    fields = "instructions_per_slot", "conversions_per_slot", "registers", "spilled_bytes"
    # A kernel that had one loop for all tiles is compared with each that it has now.
    old = {(row["device"], row["kernel"]): row for row in before}
    loops = Counter((row["device"], row["kernel"]) for row in now)
    lines = []
    for row in now:
        at = row["device"], row["kernel"]
        which = ("", "") if loops[at] == 1 else (", without a mask", ", masked")
        cells = (f"{old[at][x]:g} → {row[x]:g}" for x in fields)
        lines.append([f"{row['kernel']}{which[row['loop']]}", row["device"].upper(), *cells])
    headings = ["kernel", "GPU", "instructions", "conversions", "registers", "bytes spilled"]
    return markdown(headings, lines)


def step_times(rows: Sequence[dict[str, Any]]) -> str:
    """Times of a step by `step_times.py`, a row for each method."""
    lengths = sorted({row["tokens"] for row in rows})
    by_method: dict[str, dict[int, tuple[str, str]]] = {}
    for row in rows:
        median, low, high = row["of_full"]
        cells = f"{row['milliseconds']:.1f}", f"{median:.2f} ({low:.2f} to {high:.2f})"
        by_method.setdefault(row["method"], {})[row["tokens"]] = cells
    headings = [
        heading for length in lengths
        for heading in (f"ms after {length:,} tokens", f"of full, {length:,}")
    ]  # fmt: skip
    lines = [
        [f"`{method}`", *(cell for length in lengths for cell in by_length.get(length, ("", "")))]
        for method, by_length in by_method.items()
    ]
    return markdown(["method", *headings], lines)


def speed(rows: Sequence[dict[str, Any]]) -> str:
    """Times of `kvjax bench`, with columns for numbers of tokens where there are several."""
    varied = [
        (name, heading)
        for name, heading in (("prompt_tokens", "tokens"), ("new_tokens", "new"))
        if len({row[name] for row in rows}) > 1
    ]
    headings = [
        "method", "batch", *(heading for _, heading in varied), "first token", "per token",
        "of full", "floor by bytes", "end to end", "of full", "tokens/s", "cache", "compiling",
    ]  # fmt: skip
    return markdown(headings, [
        [
            f"`{row['method']}`", str(row["batch"]), *(f"{row[name]:,}" for name, _ in varied),
            f"{row['ttft_s']:.2f} s", f"{1e3 * row['tpot_s']:.1f} ms",
            f"{row['tpot_over_full']:.2f}", f"{1e3 * row['step_floor_s']:.1f} ms",
            f"{row['end_to_end_s']:.2f} s",
            f"{row['end_to_end_over_full']:.2f}", f"{row['end_to_end_tokens_per_s']:.1f}",
            f"{row['cache_bytes'] / 1e6:.0f} MB", f"{row['compile_s']:.1f} s",
        ]
        for row in rows
    ])  # fmt: skip


def retrieval(answers: Sequence[dict[str, Any]]) -> str:
    """Right answers of the bundled model by kind of question, with intervals, by length."""
    known = answers[0]["question"]
    kinds = {
        ("needle", True): "one needle",
        ("multi_needle", True): "eight needles, one is asked for",
        ("key_value", True): "a list of 32 keys and values",
        ("chain", True): "a chain of two",
        ("multi_needle", False): "eight needles in a wording that it never saw",
    }
    figures: dict[str, dict[int, str]] = {}
    for row in answers:
        mean, low, high = (100 * value for value in (row["right"], *row["interval"]))
        kind = kinds[row["task"], row["question"] == known]
        shown = f"{mean:.1f} % ({low:.1f} to {high:.1f})"
        figures.setdefault(kind, {})[row["length"]] = shown
    lengths = list(dict.fromkeys(row["length"] for row in answers))
    lines = [[kind, *(of_kind[length] for length in lengths)] for kind, of_kind in figures.items()]
    return markdown(["", *(f"{length:,} tokens" for length in lengths)], lines)


def kept_ruler(rows: Sequence[dict[str, Any]]) -> str:
    """Means over RULER's tasks by `kept_ruler.py`, a row for each method."""
    most = max(len(row["mean"]) for row in rows)
    lines = [
        [
            f"`{row['method']}`",
            *(f"{mean:.0f}" for mean in row["mean"]),
            *[""] * (most - len(row["mean"])),
        ]
        for row in rows
    ]
    shares = read("kept_ruler_qwen")["shares"]
    return markdown(["method", *(f"{100 * share:g} % kept" for share in shares)], lines)


def ruler_tasks(rows: Sequence[dict[str, Any]]) -> str:
    """Each of RULER's tasks by `kept_ruler.py`, all shares of a method in a cell."""
    lines = [
        [task, *(" / ".join(f"{score:.0f}" for score in row["tasks"][task]) for row in rows)]
        for task in rows[0]["tasks"]
    ]
    return markdown(["task", *(f"`{row['method']}`" for row in rows)], lines)


def long_documents_memory(rows: Sequence[dict[str, Any]]) -> str:
    """Memory and time of documents in pieces and as a whole, by `long_documents.py`."""
    lines = []
    for row in rows:
        piece, behind = row["piece"], row["behind"]
        shown = behind if piece is None else [behind[1], behind[7], behind[-1]]
        for tokens, grown, seconds in shown:
            lines.append([
                f"`{row['method']}`", "whole" if piece is None else f"pieces of {piece:,}",
                f"{tokens:,}", f"{grown / 1e6:.0f} MB", f"{row['layer']['temporary'] / 1e6:.0f} MB",
                f"{1000 * seconds / tokens:.1f}",
            ])  # fmt: skip
    headings = ["method", "read", "tokens so far", "process has grown by", "a layer, by XLA"]
    return markdown([*headings, "processor seconds for 1,000 tokens"], lines)


def long_documents_needles(found: Iterable[dict[str, Any]]) -> str:
    """Needles in documents that are read in pieces and as a whole, by `long_documents.py`."""
    lines = [
        [
            f"`{row['method']}`", f"{row['tokens']:,}",
            "whole" if row["piece"] is None else f"pieces of {row['piece']:,}",
            in_percent(row["mean"], row["low"], row["high"]),
        ]
        for row in found
    ]  # fmt: skip
    return markdown(["method", "tokens", "read", "needles, %"], lines)


def kvpress_losses(rows: Sequence[dict[str, Any]]) -> str:
    """Tabulates what is recovered of the losses of right answers, by `vs_kvpress.py kvzip`."""
    by_method: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        if row["part"] == "recovery" and row["share"] is not None:
            mean, low, high = (100 * row[name] for name in ("mean", "low", "high"))
            of_method = by_method.setdefault((row["side"], row["method"]), {})
            of_method[row["share"]] = f"{mean:.0f} ({low:.0f} to {high:.0f})"
    shares = next(iter(by_method.values()))
    lines = [[side, f"`{method}`", *each.values()] for (side, method), each in by_method.items()]
    return markdown(["", "method", *(f"{share:g} kept" for share in shares)], lines)


KVZIP = kvzip_answers, kvzip_positions, kvzip_times
"""The tables of `vs_kvpress.py kvzip`."""


def read(name: str) -> dict[str, Any]:
    """A JSON file of results."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def table(file: str) -> str:
    """The rows of a JSON file."""
    content = read(file)
    if file.startswith("vs_kvpress"):
        return kvpress(content["rows"])
    if file.startswith("demo_model"):
        return retrieval(content["answers"])
    if file.startswith("bench"):
        return speed(content["results"])
    rows = list(flat(content.get("rank_correlation", content.get("rows"))))
    headings = dict.fromkeys(key for row in rows for key in row)

    def shown(heading: str, value: object) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        return "" if value is None else f"`{value}`" if heading == "method" else str(value)

    lines = [[shown(heading, row.get(heading)) for heading in headings] for row in rows]
    return markdown([heading.replace("_", " ") for heading in headings], lines)


def flat(rows: Any) -> Iterator[dict[str, Any]]:
    """Rows without their lists; rank correlations as a row for each pair and its prompts."""
    if isinstance(rows, dict):
        rows = [{"prompts": prompts, **pairs} for prompts, pairs in rows.items()]
    for row in rows:
        alone = {key: x for key, x in row.items() if not isinstance(x, dict | list)}
        budgets = {key: x for key, x in row.items() if " and " in key}
        yield from ({**alone, "ranked": pair, **found} for pair, found in budgets.items())
        if not budgets:
            yield alone


def tables(folders: dict[str, Results]) -> tuple[list[Results], dict[str, str]]:
    """What was measured on SmolLM2 at 2,048 tokens, and every table of methods by its name."""
    measured = [folders["needles"], folders["perplexity"]]
    return measured, {
        **{folder: scores([results]) for folder, results in folders.items()},
        **{f"method_{path.stem}": scores(measured, path.stem) for path in METHODS.glob("*.md")},
        "choose": choosing(measured),
        "situations": situations([folders["short_needles_qwen"]]),
        "newcomer_qwen": newcomer(read("newcomer_qwen")["rows"]),
        **{name: beside_hf(read(name)) for name in ("lm_eval_smollm2", "lm_eval_qwen")},
        "foreign_models": foreign_models(read("foreign_models")["rows"]),
        "at_rest_smollm2": at_rest(read("at_rest_smollm2")["rows"]),
        **{name: kept_answers(read(name)["rows"]) for name in KEPT_ANSWERS},
        **{name: recall_answers(read(name)["rows"]) for name in RECALL_ANSWERS},
        **{name: page_recall(read(name)) for name in PAGE_RECALL},
        **{f"errors_{name}": page_errors(read(name)) for name in PAGE_RECALL},
        "selected_recall": selected_recall(read("selected_recall_qwen")["rows"]),
        "gpu_loops": gpu_loops(read("gpu_loops_before")["rows"], read("gpu_loops")["rows"]),
        "long_documents_memory": long_documents_memory(read("long_documents_memory_qwen")["rows"]),
        "long_documents_needles": long_documents_needles(
            row for name in LONG_DOCUMENTS for row in read(name)["found"]
        ),
        "step_times": step_times(read("step_times_smollm2")["rows"]),
        "first": first([folders["needles_small_smollm2"], folders["needles"]]),
        **{made.__name__: made(read("vs_kvpress_kvzip_smollm2")["rows"]) for made in KVZIP},
        "kvpress_losses": kvpress_losses(read("vs_kvpress_losses_smollm2")["rows"]),
        **{
            made.__name__: made(read("kept_ruler_qwen")["rows"])
            for made in (kept_ruler, ruler_tasks)
        },
        **device_tables(),
        "methods": method_lists.methods("docs/methods/"),
        "methods_index": method_lists.methods(""),
    }


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    folders = {path.parent.name: read_results(path.parent) for path in FOLDER.rglob("cells.jsonl")}
    measured, made = tables(folders)

    def replaced(match: re.Match[str]) -> str:
        marker, name, where = match.groups(default="")
        lines = (made[name] if name in made else table(name)).splitlines()
        chosen = [line for line in lines[2:] if re.search(where, line)]
        return "\n".join([marker, *lines[:2], *chosen, "<!-- end -->"])

    def figured(match: re.Match[str]) -> str:
        kind, name, methods = match.groups(default="")
        named = [folders[{"Qwen": "short_needles_qwen"}.get(name, name)]] if name else []
        if kind == "paired":
            text = paired(methods, [folders[LOSS], *named])
        else:
            text = figures(kind, methods, named or measured)
        mark = f"{kind} of {name}" if name else kind
        return f"<!-- {mark}: {methods} -->{text}<!-- / -->"

    def computed(match: re.Match[str]) -> str:
        text = figure(match[1], match[2], folders)
        return f"<!-- figure: {match[1]} {match[2]} -->{text}<!-- / -->"

    def listed(match: re.Match[str]) -> str:
        lines = method_lists.imports() if match[3] == "imports" else method_lists.papers(match[1])
        return f"{match[1]}{match[2]}\n{lines}\n"

    for path in (*PAGES, *LISTS):
        before = path.read_text(encoding="utf-8")
        if path in LISTS:
            after = LIST.sub(listed, before)
        else:
            after = FIGURE.sub(computed, FIGURES.sub(figured, TABLE.sub(replaced, before)))
        if args.check and before != after:
            sys.exit(f"{path.relative_to(HOME)} is not what the results say: run this script")
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
