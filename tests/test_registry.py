"""Names for one's own methods: in texts, in lists and on the command line."""

from __future__ import annotations

import dataclasses
import json
import sys
from unittest import mock

import jax
import jax.export
import pytest

import kvjax
from kvjax import registry
from kvjax.cli.main import main
from tests.support.attending import SIZE
from tests.support.cases import CASES
from tests.support.defaults import change_default


@pytest.fixture(autouse=True)
def forget_names():
    with (
        mock.patch.dict(registry.METHODS),
        mock.patch.dict(registry.WRAPPERS),
        mock.patch.dict(registry.STORAGE),
    ):
        yield
    sys.modules.pop("kvjax_test_of_mine", None)


@dataclasses.dataclass(frozen=True)
class Window(kvjax.StreamingLLM):
    """Keeps the newest tokens alone."""

    sinks: int = 0


@dataclasses.dataclass(frozen=True)
class Sometimes(kvjax.Every):
    """Another wrapper."""


@dataclasses.dataclass(frozen=True)
class Smaller(kvjax.Quantize):
    """Another form of storage."""


def test_a_registered_name_is_read():
    kvjax.register("window", Window)
    kvjax.register("sometimes", Sometimes)
    kvjax.register("smaller", Smaller)
    assert kvjax.parse("window", budget=9) == Window(9)
    assert kvjax.parse("window(budget=7, sinks=2)") == Window(7, sinks=2)
    assert kvjax.parse("sometimes(snapkv, steps=64)", 40) == Sometimes(kvjax.SnapKV(40), 64)
    assert kvjax.parse("chain(window, smaller)", 9) == kvjax.chain(Window(9), Smaller())
    with pytest.raises(ValueError, match=r"unknown method 'windows'; there are .*window"):
        kvjax.parse("windows")


@pytest.mark.parametrize(
    ("name", "method", "error", "message"),
    [
        (3, Window, TypeError, "name must be text such as 'my_method', got 3"),
        ("window", Window(9), TypeError, r"got Window\(.*give the class, not an instance"),
        ("window", dict, TypeError, "a subclass of kvjax.KVTransform, got <class 'dict'>"),
        ("fenêtre", Window, ValueError, "a word of .*, got 'fenêtre'"),
        ("lambda", Window, ValueError, "a word of .*, got 'lambda'"),
        ("cam", Window, ValueError, "must be new, 'cam' already means CaM"),
        ("chain", Window, ValueError, "must be new, 'chain' already means something else"),
    ],
)
def test_bad_names_and_methods(name, method, error, message):
    before = dict(registry.METHODS)
    with pytest.raises(error, match=message):
        kvjax.register(name, method)
    assert before == registry.METHODS


def has_text(transform: kvjax.KVTransform) -> bool:
    try:
        return bool(kvjax.unparse(transform))
    except ValueError:  # functions, calibrations and head groups have none
        return False


WITH_TEXT = [name for name, transform in CASES.items() if has_text(transform)]


@pytest.mark.parametrize("name", WITH_TEXT)
def test_a_text_of_all_parameters_is_read_as_it_was_written(name, monkeypatch):
    """Whatever the defaults are when it is read."""
    transform, text = CASES[name], kvjax.unparse(CASES[name], defaults=True)
    assert kvjax.parse(text, defaults=False) == transform and len(WITH_TEXT) > 30
    assert kvjax.unparse(kvjax.parse(text)) == kvjax.unparse(transform)
    for method in (registry.METHODS | registry.WRAPPERS | registry.STORAGE).values():
        others = {  # none of them is what a method takes
            x.name: object()
            for x in dataclasses.fields(method)
            if x.default is not dataclasses.MISSING
        }
        if others:
            change_default(monkeypatch, method, **others)
    assert kvjax.unparse(kvjax.parse(text, defaults=False), defaults=True) == text


def test_a_text_that_leaves_parameters_to_their_defaults_can_be_refused():
    for text, said in (
        ("h2o", "h2o needs budget="),
        ("h2o(budget=8)", "h2o needs group_reduce="),
        ("chain(h2o(budget=8, group_reduce='mean'), quantize)", "quantize needs bits="),
    ):
        with pytest.raises(ValueError, match=said):
            kvjax.parse(text, defaults=False)
    assert kvjax.parse("h2o(group_reduce='mean')", 8, defaults=False) == kvjax.H2O(8)


# The command line

MINE = '''
from dataclasses import dataclass
import kvjax

@dataclass(frozen=True)
class Mine(kvjax.StreamingLLM):
    """Keeps what is mine."""
    sinks: int = 1

kvjax.register("mine", Mine)
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "json.py"  # as a module of Python's is called
    path.write_text(MINE)
    return str(path)


def test_methods_lists_an_imported_one(capsys, mine):
    assert main(["methods", "--import", mine]) == 0
    assert any(line.split()[:1] == ["mine"] for line in capsys.readouterr().out.splitlines())
    assert main(["methods", "--import", mine, "--json"]) == 0, "it is run once"
    listed = json.loads(capsys.readouterr().out)["methods"]["mine"]
    assert listed["summary"] == "Keeps what is mine."
    assert {"name": "sinks", "about": "", "default": 1} in listed["parameters"]
    assert sys.modules["json"] is json


COUNTS = '''
from dataclasses import dataclass
import jax, jax.numpy as jnp, kvjax
from kvjax.kit import Budget, Card, Keep, PromptBudget, check_budget, pytree_node

@pytree_node
@dataclass(frozen=True)
class Prompts:
    """How many prompts each row has had, and the budgets."""
    count: jax.Array
    table: tuple

@dataclass(frozen=True)
class Counts(PromptBudget):
    """Keeps the newest tokens, and counts prompts."""
    budget: Budget
    minimum = 1
    card = Card(acts="prompt", when="sentences", paper="Counts, arXiv 0000.00000")

    def __post_init__(self):
        check_budget(self.budget, self.minimum, "one token")

    def init(self, cache, layer):
        cache, table = super().init(cache, layer)
        return cache, Prompts(jnp.zeros_like(cache.length), table)

    def on_prompt(self, cache, state, step):
        count = step.of_rows(state.count + 1, state.count)
        decision = Keep(self.rows_budget(cache, state.table), None, newest_first=True)
        return decision, Prompts(count, state.table)

kvjax.register("counts", Counts)
'''


def test_a_method_in_one_file_is_listed_and_exported(capsys, tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    assert main(["methods", "counts", "--import", str(tmp_path / "counts.py"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["when"].startswith("Sentences") and listed["page"] is None
    assert listed["paper"] == "Counts, arXiv 0000.00000"
    transform = kvjax.parse("chain(counts, quantize)", budget=12)
    kvjax.testing.check(transform)
    cache = jax.eval_shape(lambda: kvjax.init_cache(transform, **SIZE))
    exported = jax.export.export(jax.jit(lambda cache: cache))(cache)
    read = jax.export.deserialize(exported.serialize())
    assert read.in_tree == jax.tree.structure(((cache,), {}))


def test_a_module_is_imported_by_its_name(capsys, mine, monkeypatch, tmp_path):
    (tmp_path / "kvjax_test_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["methods", "--import", "kvjax_test_of_mine", "--json"]) == 0
    assert "mine" in json.loads(capsys.readouterr().out)["methods"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        ("import kvjax\nkvjax.register('h2o', kvjax.H2O)\n", "ValueError: name must be new"),
        ("x =\n", "SyntaxError: invalid syntax"),
        ("\n\n1 / 0\n", "ZeroDivisionError: division by zero (%s, line 3)"),
    ],
)
def test_modules_that_cannot_be_imported(capsys, tmp_path, content, said):
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    assert main(["methods", "--import", str(path)]) == 2
    assert f"cannot import {path}: " in (err := capsys.readouterr().err)
    assert said.replace("%s", str(path)) in err


def test_an_unknown_module(capsys, monkeypatch, tmp_path):
    """A file of that name in the working directory is one by its path alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module_here.py").write_text("")
    assert main(["methods", "--import", "my_module_here"]) == 2
    assert "; for the file that is here, --import my_module_here.py\n" in capsys.readouterr().err
    assert main(["methods", "--import", "no_such_module_of_mine"]) == 2
    err = capsys.readouterr().err
    assert "cannot import no_such_module_of_mine: ModuleNotFoundError: No module named" in err


def test_a_parenthesis_that_is_missing_is_told():
    with pytest.raises(ValueError, match=r"got 'chain\(snapkv': 1 \) missing"):
        kvjax.parse("chain(snapkv")
    with pytest.raises(ValueError, match=r"1 \( missing"):
        kvjax.parse("snapkv)")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (kvjax.Full(), TypeError, r"parse takes the text of a method, got Full\("),
        ("snapkv(window=8, window=9)", ValueError, "a parameter of snapkv is given twice in 'sna"),
        ("snapkv | quantize(bits=4)", ValueError, r"write chain\(snapkv, quantize\(bits=4\)\)$"),
        ("snapkv + 'h2o'", ValueError, r"got \"snapkv \+ 'h2o'\"$"),
    ],
)
def test_texts_that_are_no_method(text, kind, message):
    with pytest.raises(kind, match=message):
        kvjax.parse(text, budget=16)
