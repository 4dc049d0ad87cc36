"""Processor time that opening a model takes, the first time and again, against another checkout.

    python benchmarks/opening.py --other ../before --models FOLDER model.gguf --text essay.txt \\
        --out benchmarks/results/opening.json

Each figure is of a process of its own. `weights` and `tokenizer` are the calls of `from_pretrained`
and `load_tokenizer` alone, after the imports. `ask` is the whole command `kvjax ask` with one
question about the text, which `kvjax read` has read before, and `chat` that of `kvjax chat` without
a line to answer: from the start of Python to its end. Figures are seconds of user and system time,
of all threads; `details` has both. `first` begins with an empty `KVJAX_CACHE`, `again` is the
median of later processes with the same folder, and `other` is that median of the other checkout.

The system's part is mostly that of memory: a virtual machine whose memory its host gives as it is
used takes several seconds for gigabytes that it has not touched lately.

The other checkout needs a `.venv` of its own, with its own kvjax.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from common import Rows, parser_of

HERE = Path(__file__).resolve().parents[1]
CALL = """
import json, resource, sys
import jax, transformers, kvjax
from transformers import PreTrainedTokenizerFast
from kvjax.models import from_pretrained, load_tokenizer

jax.devices()
before = resource.getrusage(resource.RUSAGE_SELF)
(from_pretrained if sys.argv[1] == "weights" else load_tokenizer)(sys.argv[2])
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime]))
"""
WHAT = "weights", "tokenizer", "ask", "chat"
Times = tuple[float, float]  # seconds of user and of system time


class Side:
    """A checkout with a folder for what it keeps.

    Args:
      checkout: its folder.
      folder: where its commands keep what they keep, and contexts.
    """

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.programs, self.folder = checkout / ".venv" / "bin", folder
        self.environment = {**os.environ, "KVJAX_CACHE": str(folder / "cache")}

    def run(self, *line: object) -> tuple[str, Times]:
        """Runs a program; returns what it prints and what it took."""
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                [str(self.programs / str(line[0])), *map(str, line[1:])], stdin=subprocess.DEVNULL,
                stdout=out, env=self.environment, cwd=self.folder,
            )  # fmt: skip
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{line} failed")
            out.seek(0)
            return out.read(), (usage.ru_utime, usage.ru_stime)

    def read(self, model: Path, text: Path) -> None:
        """Reads the text, so that it can be asked about."""
        arguments = "--method", "snapkv", "--budget", 256, "--max-new", 16, "--model", model
        self.run("kvjax", "read", text, "--out", self.folder / "context", *arguments)

    def take(self, what: str, model: Path) -> Times:
        """Opens the model in a new process; returns what it took."""
        if what == "ask":
            return self.run("kvjax", "ask", self.folder / "context", "What is this about?")[1]
        if what == "chat":
            return self.run("kvjax", "chat", "--model", model)[1]
        user, system = json.loads(self.run("python", "-c", CALL, what, model)[0])
        return user, system

    def forget(self) -> None:
        """Empties the folder of what is kept."""
        for file in sorted((self.folder / "cache").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "out")
    parser.add_argument("--other", type=Path, required=True, help="another checkout")
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders, GGUF files")
    parser.add_argument("--text", type=Path, required=True, help="what is read and asked about")
    parser.add_argument("--characters", type=int, default=6000, help="of the text")
    parser.add_argument("--rounds", type=int, default=3, help="processes that medians are of")
    args = parser.parse_args()
    about = {"benchmark": "opening", "characters": args.characters, "rounds": args.rounds}
    rows = Rows(args.out, about)
    for model in (path.resolve() for path in args.models):
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "text.txt"
            text.write_text(args.text.read_text(encoding="utf-8")[: args.characters])
            sides = {name: Path(folder) / name for name in ("this", "other")}
            for place in sides.values():
                place.mkdir()
            this = Side(HERE, sides["this"])
            other = Side(args.other.resolve(), sides["other"])
            for side in (this, other):
                side.read(model, text)
            for what in WHAT:
                if rows.has(model=model.name, opened=what):
                    continue
                for side in (this, other):
                    side.forget()
                first = {name: side.take(what, model) for name, side in
                         (("this", this), ("other", other))}  # fmt: skip
                again: dict[str, list[Times]] = {"this": [], "other": []}
                for _ in range(args.rounds):
                    again["other"].append(other.take(what, model))
                    again["this"].append(this.take(what, model))
                median = {name: statistics.median(map(sum, x)) for name, x in again.items()}
                rows.add(
                    model=model.name, opened=what, other=round(median["other"], 2),
                    first=round(sum(first["this"]), 2), again=round(median["this"], 2),
                    details={"first": first, "again": again},
                )  # fmt: skip


if __name__ == "__main__":
    main()
