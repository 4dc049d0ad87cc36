"""A plugin of pytest for `device.py`: outcomes are written at once, what passed stays out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the files that it writes and reads."""
    parser.addoption("--outcomes", help="a file for a line of JSON at each test's begin and end")
    parser.addoption("--passed-before", help="a JSON file of names of tests that need not run")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to write, where there is a file for it."""
    if outcomes := config.getoption("outcomes"):
        config.pluginmanager.register(Outcomes(Path(outcomes)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what passed before."""
    if names := config.getoption("passed_before"):
        passed = set(json.loads(Path(names).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


class Outcomes:
    """Writes what becomes of tests."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _write(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes that a test begins."""
        self._write(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes how a test ended: its call, or what failed or was skipped around it."""
        if report.when == "call" or not report.passed:
            text = report.longreprtext if report.failed else ""
            self._write(test=report.nodeid, outcome=report.outcome, text=text)
