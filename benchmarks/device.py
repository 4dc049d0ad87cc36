"""Measures what a GPU alone can tell, for as long as one is there: `make device`.

    python benchmarks/device.py [--minutes 15] [--only TEXT ...] [--list]

The entries of `device_entries.py` run one after the other, the most valuable first. Each has a
minute, compiling included, and its result is written before the next one begins: a line of
`records.jsonl`, and the page `README.md` beside it. So it can be ended at any time, by Ctrl-C or by
a kill, and the next run goes on: what is done on a device of this kind with this version of kvjax
is not run again; what was not tried comes first, then what failed or took too long, which finds on
disk what was compiled before. Failed tests stand in `failures.txt` with their whole output.

Entries run in a process that is ended where one of them takes too long, and replaced. Files of
tests run in processes of their own, several at a time.

`python benchmarks/results_page.py` then writes the tables of `docs/guides/gpu.md`. `--tiny` runs a
few entries of each kind with tiny sizes on any device, which measures nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from device_entries import HOME, LIMIT, Entry, entries
from device_page import write_page
from device_record import FOLDER, Record, Row

MINUTES = 15.0
START = 90.0  # seconds in which a process tells its device
WEIGHTS = 30.0  # further seconds of a process's first entry, which makes weights
LEAST = 5.0  # seconds without which nothing more is begun
PYTEST = "-q", "-n", "0", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "device_tests"
MOST_TESTS = 8  # files at a time
STEP = 0.2  # seconds between two looks at a process
LAST_LINES = 12

Serve = Callable[[Connection, str, bool], None]


def main(arguments: Sequence[str] | None = None, serve: Serve | None = None) -> int:
    """Runs it. `serve` is what a process does, `device_work.serve` by default."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=MINUTES, help=f"for all of it (default: {MINUTES:g})")
    add("--only", metavar="TEXT", nargs="+", help="entries with one of these in name or kind")
    add("--again", action="store_true", help="run what is done once more")
    add("--list", action="store_true", help="show the entries and their states, and run nothing")
    add("--tiny", action="store_true", help="a few entries with tiny sizes, on any device")
    add("--out", type=Path, help="folder of the record (default: benchmarks/results/device)")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {args.minutes:g}")
    if args.tiny and args.out is None:
        parser.error("--tiny needs an --out: its figures are none of a device")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, too
    # A process takes all memory that large caches need at once, instead of three quarters.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    end, folder = time.monotonic() + 60 * args.minutes, args.out or FOLDER
    every = entries(args.tiny)
    chosen = [
        entry for entry in every
        if args.only is None or any(text in f"{entry.kind} {entry.name}" for text in args.only)
    ]  # fmt: skip
    if not chosen:
        parser.error(f"no entry has {' or '.join(args.only or [])} in its name or kind")
    try:
        with Worker(serve or _serve, args.tiny) as worker:
            about = worker.about()
            record = Record(folder)
            tried = record.of(about["device"], about["kvjax"])
            if args.list:
                show(chosen, tried)
                return 0
            if about["platform"] != "gpu" and not args.tiny:
                parser.error(f"needs a GPU, or --tiny; got {about['device']}")
            todo = in_order(chosen, {} if args.again else tried)
            run_all(todo, worker, Run(record, about, every, tried, end, args.tiny))
    except KeyboardInterrupt:
        print("interrupted; what was measured is written", file=sys.stderr)
        return 130
    return 0


def in_order(chosen: Sequence[Entry], tried: dict[str, Row]) -> list[Entry]:
    """What is not done: entries that were never tried, then those that were."""
    left = [entry for entry in chosen if tried.get(entry.name, {}).get("state") != "done"]
    return sorted(left, key=lambda entry: entry.name in tried)  # a stable sort


def show(chosen: Sequence[Entry], tried: dict[str, Row]) -> None:
    """Prints each entry with its state."""
    for entry in chosen:
        row = tried.get(entry.name)
        state = "not tried" if row is None else row["state"]
        reason = "" if row is None or "reason" not in row else row["reason"].splitlines()[-1]
        print(f"{state:9}  {entry.kind:11}  {entry.name}{f'  ({reason})' if reason else ''}")
    counts = Counter(tried[x.name]["state"] if x.name in tried else "not tried" for x in chosen)
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    left = LIMIT * sum(count for state, count in counts.items() if state != "done")
    print(f"{said}; at most {left / 60:.0f} minutes, one after the other")


def limit_of(tiny: bool) -> float:
    """Seconds of an entry; tiny ones are run where many may compile at the same time."""
    return 5 * LIMIT if tiny else LIMIT


class Run:
    """One run: where it writes, and until when."""

    def __init__(
        self, record: Record, about: Row, every: Sequence[Entry], tried: dict[str, Row], end: float,
        tiny: bool,
    ) -> None:  # fmt: skip
        self.record, self.about, self.every, self.tried = record, about, every, tried
        self.end, self.tiny, self._lock = end, tiny, threading.Lock()
        self.folder = record.path.parent

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def note(self, entry: Entry, state: str, seconds: float, found: Row) -> None:
        """Writes what came of an entry, and the page."""
        if "reason" in found:
            found = {**found, "reason": without_paths(found["reason"])}
        self.record.add(
            entry=entry.name, kind=entry.kind, options=entry.options, state=state, **found,
            seconds=round(seconds, 1), device=self.about["device"], kvjax=self.about["kvjax"],
            tiny=self.tiny, environment=self.about["environment"],
            date=time.strftime("%Y-%m-%d", time.gmtime()),
        )  # fmt: skip
        with self._lock:
            try:
                write_page(self.folder, self.every)
            except Exception:  # the record is written, and a device's time is not for pages
                traceback.print_exc()
        reason = found.get("reason", "").strip().splitlines()[-1:]
        print(f"{state:8} {seconds:6.1f} s  {entry.name}", *reason, flush=True)

    def note_failures(self, entry: Entry, failures: Sequence[Row]) -> None:
        """Appends the whole output of tests that failed."""
        if not failures:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock, (self.folder / "failures.txt").open("a", encoding="utf-8") as file:
            for failure in failures:
                title = f"{failure['test']}, {self.about['device']}, kvjax {self.about['kvjax']}"
                text = without_paths(failure["text"])
                file.write(f"{title}\n{'=' * len(title)}\n{text}\n\n")


def without_paths(text: str) -> str:
    """The text without the folders of this machine that files of the record should not name."""
    for folder in (str(HOME), sys.prefix, str(Path.home())):
        text = text.replace(f"{folder}/", "")
    return text


def run_all(todo: Sequence[Entry], worker: Worker, run: Run) -> None:
    """Runs entries in their order, those that may run together at the same time."""
    for together, some in itertools.groupby(todo, lambda entry: entry.together):
        if together:
            worker.end()  # it has the device's memory
            run_tests(list(some), run)
            continue
        for entry in some:
            if run.left() < LEAST:
                break
            start = time.monotonic()
            state, found = worker.measure(entry, run.left())
            run.note(entry, state, time.monotonic() - start, found)
    if run.left() < LEAST:
        print("the time is over")


# --- a process that measures ----------------------------------------------------------------------


def _serve(pipe: Connection, errors: str, tiny: bool) -> None:
    # Imported here: the process that waits needs no JAX.
    from device_work import serve

    serve(pipe, errors, tiny)


class Worker:
    """A process that runs entries, ended where one takes too long, and started when needed."""

    def __init__(self, serve: Serve, tiny: bool) -> None:
        self._serve, self._tiny = serve, tiny
        self._process: Any = None
        self._pipe: Any = None
        self._about: Row = {}
        self._is_new = True
        self._folder = tempfile.TemporaryDirectory(prefix="kvjax-device-")
        self._errors = Path(self._folder.name, "errors")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    def about(self) -> Row:
        """The device, versions, and the platform."""
        self._start()
        return self._about

    def _start(self) -> None:
        if self._process is not None:
            return
        self._errors.write_text("")
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        arguments = other, str(self._errors), self._tiny
        self._process = spawn.Process(target=self._serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._is_new = True
        try:
            self._about = self._received(START)
        except (EOFError, TimeoutError) as error:
            raise SystemExit(f"no process can be started here: {self._last_lines()}") from error

    def _received(self, seconds: float) -> Any:
        """What the process sends; raises TimeoutError, or EOFError where it has ended."""
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

    def _last_lines(self) -> str:
        return "\n".join(self._errors.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def measure(self, entry: Entry, seconds: float) -> tuple[str, Row]:
        """The state of an entry, and its result or the reason why there is none."""
        self._start()
        limit = min(limit_of(self._tiny) + WEIGHTS * self._is_new, seconds)
        self._is_new = False
        try:
            self._pipe.send((entry.kind, entry.options))
            state, found = self._received(limit)
        except TimeoutError:
            state, found = "late", {"reason": f"did not finish in {limit:.0f} s"}
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            ended = f"the process ended with {code}\n{self._last_lines()}".strip()
            state, found = "failed", {"reason": ended}
        if state in ("late", "failed"):  # a new one has all of the memory
            self.end()
        return state, found

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


# --- files of tests -------------------------------------------------------------------------------


def run_tests(some: Sequence[Entry], run: Run) -> None:
    """Runs files of tests, several at a time."""
    number = max(1, min(MOST_TESTS, (os.cpu_count() or 2) // 2))
    stop = threading.Event()

    def one(entry: Entry) -> None:
        if stop.is_set() or run.left() < LEAST:
            return
        start = time.monotonic()
        state, found, failures = test_file(entry, run, stop)
        if state is not None:
            run.note_failures(entry, failures)
            run.note(entry, state, time.monotonic() - start, found)

    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        tasks = [pool.submit(one, entry) for entry in some]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            stop.set()
            raise


def test_file(entry: Entry, run: Run, stop: threading.Event) -> tuple[str | None, Row, list[Row]]:
    """The state of a file of tests, what is recorded of it, and its failures; None: stopped."""
    limit = min(limit_of(run.tiny), run.left())
    before = run.tried.get(entry.name, {}).get("passed_tests", [])
    with tempfile.TemporaryDirectory() as folder:
        outcomes, passed_before = Path(folder, "outcomes.jsonl"), Path(folder, "passed.json")
        passed_before.write_text(json.dumps(before))
        places = "--outcomes", str(outcomes), "--passed-before", str(passed_before)
        command = [sys.executable, "-m", "pytest", *PYTEST, *places, entry.options["path"]]
        paths = [str(HOME / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        with Path(folder, "output").open("w+", encoding="utf-8", errors="replace") as output:
            code = _ended(command, environment, output, limit, stop)
            output.seek(0)
            last = "\n".join(output.read().splitlines()[-LAST_LINES:])
        lines = list(_lines(outcomes))
    if code is None and stop.is_set():
        return None, {}, []
    ended = {line["test"]: line for line in lines if line["outcome"] != "begun"}
    counts = Counter(line["outcome"] for line in ended.values())
    failures = [line for line in ended.values() if line["outcome"] == "failed"]
    passed = [*before, *(x for x, line in ended.items() if line["outcome"] == "passed")]
    result = {
        "passed": len(passed), "skipped": counts["skipped"],
        "failed": [line["test"] for line in failures],
    }  # fmt: skip
    found: Row = {"result": result}
    if code is None:
        running = [line["test"] for line in lines[-1:] if line["outcome"] == "begun"]
        reason = f"did not finish in {limit:.0f} s"
        reason += f", in {running[0]}" if running else ""
        return "late", {**found, "reason": reason, "passed_tests": passed}, failures
    if failures:
        reason = f"{len(failures)} of {len(passed) + len(failures)} failed"
        return "failed", {**found, "reason": reason, "passed_tests": passed}, failures
    if code not in (0, 5):  # 5: nothing was left to run
        return "failed", {**found, "reason": f"pytest ended with {code}\n{last}"}, []
    return "done", found, []


def _ended(
    command: Sequence[str], environment: dict[str, str], output: Any, limit: float,
    stop: threading.Event,
) -> int | None:  # fmt: skip
    """The exit status of a command; None where it was ended, with all that it has started."""
    process = subprocess.Popen(
        command, cwd=HOME, env=environment, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end and not stop.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(STEP)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(path: Path) -> Iterator[Row]:
    """The whole lines of a file of outcomes."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1])


if __name__ == "__main__":
    sys.exit(main())
