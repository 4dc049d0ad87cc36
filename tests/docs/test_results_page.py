"""Every table of measurements in the pages is what the folders of results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tables_are_those_of_the_results():
    command = [sys.executable, ROOT / "benchmarks" / "results_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
