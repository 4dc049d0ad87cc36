"""The workflow's commands and versions are those of the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
COMMANDS = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("command", sorted({run for run in COMMANDS if run.startswith("make")}))
def test_targets_exist(command):
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_extras_exist():
    extras = {
        name for run in COMMANDS for named in re.findall(r"\.\[([\w,]+)\]", run)
        for name in named.split(",")
    }  # fmt: skip
    assert extras and extras <= set(PROJECT["optional-dependencies"])


def test_every_python_and_the_oldest_jax_are_tested():
    pairs = JOBS["versions"]["strategy"]["matrix"]["include"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert {pair["python"] for pair in pairs} == set(named)
    (oldest,) = (re.search(r">=([\d.]+)", x)[1] for x in PROJECT["dependencies"] if x[:4] == "jax>")
    assert oldest in {pair["jax"] for pair in pairs}


def test_the_readme_has_its_first_command_and_the_test_commands():
    patterns = [re.search(r"'(.+)'", run)[1] for run in COMMANDS if "README" in run]
    assert len(patterns) == 2
    text = (ROOT / "README.md").read_text()
    assert all(re.search(pattern, text, re.M) for pattern in patterns)
    first_command = re.search(r"^```sh\n(.+)", text, re.M)[1]
    assert re.search(patterns[0], first_command)
