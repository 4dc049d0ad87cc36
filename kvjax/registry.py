"""Names the transforms for the command line, and reads and writes compositions as text."""

from __future__ import annotations

import ast
import dataclasses
import keyword
import warnings
from collections.abc import Sequence
from typing import Any

from kvjax.compose.by_head import ByHead
from kvjax.compose.chain import chain, parts_of
from kvjax.compose.origins import source_of
from kvjax.compose.wrappers import Every, Everywhere, WhenFull
from kvjax.messages import brief, did_you_mean
from kvjax.protocol import Full, KVTransform, Stage, check_transform
from kvjax.serialization import TRANSFORMS, named
from kvjax.storage.codebook.transform import Codebook
from kvjax.storage.offload.transform import Offload
from kvjax.storage.quantize.transform import Quantize
from kvjax.transforms.cam import CaM
from kvjax.transforms.chelsea.chelsea import Chelsea
from kvjax.transforms.clusterkv.clusterkv import ClusterKV
from kvjax.transforms.h2o import H2O
from kvjax.transforms.infinigen.infinigen import InfiniGen
from kvjax.transforms.kvcrush.kvcrush import KVCrush
from kvjax.transforms.kvmerger.kvmerger import KVMerger
from kvjax.transforms.kvzip.kvzip import KVzip
from kvjax.transforms.own_queries import OwnQueries
from kvjax.transforms.pyramidinfer.pyramidinfer import PyramidInfer
from kvjax.transforms.pyramidkv import PyramidKV
from kvjax.transforms.quest import Quest
from kvjax.transforms.snapkv import SnapKV
from kvjax.transforms.spindlekv.layer_budget_eviction import LayerBudgetEviction
from kvjax.transforms.spindlekv.spindlekv import SpindleKV
from kvjax.transforms.streaming_llm import StreamingLLM


def _by_name(*methods: type[KVTransform]) -> dict[str, type[KVTransform]]:
    """Returns the classes by the names that `named` has given them."""
    names = {method: name for name, method in TRANSFORMS.items()}
    return {names[method]: method for method in methods}


METHODS = _by_name(
    Full,
    StreamingLLM,
    H2O,
    SnapKV,
    KVzip,
    OwnQueries,
    PyramidKV,
    PyramidInfer,
    KVMerger,
    Chelsea,
    ClusterKV,
    Quest,
    InfiniGen,
    LayerBudgetEviction,
    SpindleKV,
)
"""The methods by their names on the command line; `kvjax.register` adds to them."""

WRAPPERS = _by_name(Every, WhenFull, CaM, KVCrush, Everywhere, ByHead)
STORAGE = _by_name(Quantize, Codebook, Offload)

_MOST_CHARACTERS = 10_000  # characters of a composition; Python's parser takes long for more
_MOST_NESTED = 16  # depth of methods within methods

# Names that mean something else in texts of methods and in `kvjax compare --method`.
_OTHER_MEANINGS = ("chain", "all")


def register(name: str, method: type[KVTransform]) -> None:
    """Gives a method of your own a name, for `kvjax.parse` and for the command line.

    The command line finds the method after `--import MODULE`. MODULE is an installed module, or the
    path of a Python file, that calls `register`: `kvjax compare --import mine.py --method mine`.

    Args:
      name: a word of ASCII letters, digits and underscores that is not a name yet.
      method: the class. A class with a field `base` is a wrapper: in a text, it takes a method as
        its argument. The budget that `parse` is given goes to the field `budget`, if there is one.

    Raises:
      TypeError: the name is not text, or the method is not a subclass of `KVTransform`.
      ValueError: the name is taken, or is not such a word.

    Example:
      >>> from dataclasses import dataclass
      >>> import kvjax
      >>> @dataclass(frozen=True)
      ... class Window(kvjax.StreamingLLM):
      ...     "Keeps the newest tokens alone."
      ...     sinks: int = 0
      >>> kvjax.register("newest_only", Window)
      >>> kvjax.parse("chain(newest_only, quantize)", budget=64).parts[0]
      Window(budget=64, sinks=0, reposition=False)
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be text such as 'my_method', got {name!r}")
    if not isinstance(method, type) or not issubclass(method, KVTransform):
        hint = " (give the class, not an instance)" if isinstance(method, KVTransform) else ""
        raise TypeError(f"method must be a subclass of kvjax.KVTransform, got {method!r}{hint}")
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ValueError(
            "name must be a word of letters, digits and underscores that is not a Python keyword,"
            f" got {name!r}"
        )
    source_of(method)  # is remembered as it is now
    known = METHODS | WRAPPERS | STORAGE
    if name in known or name in _OTHER_MEANINGS:
        taken = known[name].__qualname__ if name in known else "something else"
        raise ValueError(f"name must be new, {name!r} already means {taken}")
    named(name)(method)
    if any(field.name == "base" for field in dataclasses.fields(method)):
        WRAPPERS[name] = method
    elif method.stage in (Stage.REPRESENT, Stage.PLACE):
        STORAGE[name] = method
    else:
        METHODS[name] = method


def parse(text: str, budget: int | float | None = None, *, defaults: bool = True) -> KVTransform:
    """Makes the transform that a text names: `h2o`, `snapkv(window=16)`, `every(snapkv, steps=64)`.

    A name stands for its class, `chain(...)` for `kvjax.chain`. A wrapper's positional argument is
    a method; keyword arguments are Python literals. `kvjax.register` adds names.

    Args:
      text: name of a method, or a composition.
      budget: budget of every method that takes one and has none in the text; SpindleKV takes it as
        its `reserve`.
      defaults: whether a parameter that the text lacks has its default. False refuses such a text,
        which would mean something else once a default changes: for texts in files.

    Raises:
      ValueError: a name or parameter is unknown, a budget or another parameter is missing, or the
        text is not such an expression.
      TypeError: `text` is not a string, or the class refuses an argument.

    Example:
      >>> import kvjax
      >>> tx = kvjax.parse("every(snapkv(window=16), steps=64)", budget=256)
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=999)).total
      320
    """
    if not isinstance(text, str):
        raise TypeError(f"parse takes the text of a method, got {brief(text)}")
    text = text.strip()
    node = expression(text)
    if node is None:
        reason = f"{brief(text)}{_parentheses(text)}"
        raise ValueError(f"method must be a name or a composition of names, got {reason}")
    return _build(node, text, budget, defaults)


def as_transform(transform: KVTransform | str, where: str) -> KVTransform:
    """Returns the transform that a text names; a transform is returned unchanged.

    Calls that are given a model take both. Calls within a model, such as `kvjax.bind` and
    `kvjax.attend`, take transforms alone.

    Args:
      transform: the transform, or its text for `parse`, with budgets.
      where: name of the call, for the message.

    Raises:
      TypeError, ValueError: it is neither; what `parse` raises.
    """
    if isinstance(transform, str):
        return parse(transform)
    check_transform(transform, where)
    return transform


def expression(text: str) -> ast.expr | None:
    """Returns the syntax tree of an expression; None if the text is not an expression.

    Raises:
      ValueError: the text is too long for a composition of methods.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"a composition of methods must have at most {_MOST_CHARACTERS} characters, "
            f"got {len(text)}: {brief(text)}"
        )
    with warnings.catch_warnings():  # Python warns of escapes that it does not know
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text, mode="eval").body
        # The last two come of deeply nested texts.
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None


def unparse(transform: KVTransform, *, budget: bool = True, defaults: bool = False) -> str:
    """Writes the text from which `parse` makes this transform.

    Args:
      transform: a method or composition.
      budget: whether each `budget` is written; without them, the text is one for `parse` with a
        budget.
      defaults: whether parameters at their defaults are written too. So are texts in files, which
        then mean the same after a default has changed.

    Raises:
      ValueError: a part has no name, or a parameter is not a Python literal.

    Example:
      >>> import kvjax
      >>> kvjax.unparse(kvjax.Every(kvjax.SnapKV(budget=64, window=8), steps=8))
      'every(snapkv(budget=64, window=8), steps=8)'
      >>> kvjax.unparse(kvjax.H2O(budget=64), defaults=True)
      "h2o(budget=64, group_reduce='mean')"
    """
    parts = parts_of(transform)
    if len(parts) > 1:
        texts = (unparse(part, budget=budget, defaults=defaults) for part in parts)
        return f"chain({', '.join(texts)})"
    names = {method: name for name, method in (METHODS | WRAPPERS | STORAGE).items()}
    name = names.get(type(transform))
    if name is None:
        raise ValueError(
            f"a method needs a name (kvjax.register) to be written as text, got {transform!r:.200}"
        )
    arguments = []
    for field in dataclasses.fields(transform):
        value = getattr(transform, field.name)
        if field.name == "base":
            arguments.insert(0, unparse(value, budget=budget, defaults=defaults))
        elif (field.name == "budget" and not budget) or not field.init:
            continue
        # A budget of 1 is one token, and a budget of 1.0 all of them: types count as well.
        elif defaults or value != field.default or type(value) is not type(field.default):
            arguments.append(f"{field.name}={_literal(name, field.name, value)}")
    return f"{name}({', '.join(arguments)})" if arguments else name


def _literal(method: str, field: str, value: object) -> str:
    """Writes a parameter as a Python literal; raises ValueError for one without a literal."""
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise ValueError(f"{field} of {method} is not a Python literal, got {text:.200}")
    return text


def _build(
    node: ast.expr, text: str, budget: int | float | None, defaults: bool, depth: int = 1
) -> KVTransform:
    """Makes the transform of a syntax tree.

    Args:
      text: the whole text, for messages.
      budget, defaults: as in `parse`.
      depth: number of methods around this one, itself included.
    """
    if depth > _MOST_NESTED:
        raise ValueError(f"methods are nested more than {_MOST_NESTED} deep in {brief(text)}")
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ValueError(
            "method must be a name or a composition of names, "
            f"got {brief(text)}{_chain_hint(node, text)}"
        )
    name = call.func.id
    if name == "chain":
        if call.keywords:
            raise ValueError(
                f"chain takes methods only, got {call.keywords[0].arg}= in {brief(text)}"
            )
        inner = (_build(argument, text, budget, defaults, depth + 1) for argument in call.args)
        return chain(*inner)
    known = METHODS | WRAPPERS | STORAGE
    if name not in known:
        names = (*known, "chain")
        raise ValueError(
            f"unknown method {brief(name)}; there are {', '.join(names)}{did_you_mean(name, names)}"
        )
    method = known[name]
    parameters = {field.name: field.default for field in dataclasses.fields(method) if field.init}
    is_wrapper = "base" in parameters
    parameters.pop("base", None)
    values = _keywords(name, call, text)
    _check_positional(name, call, [word for word in parameters if word not in values], text)
    wrapped = [_build(argument, text, budget, defaults, depth + 1) for argument in call.args]
    if len(wrapped) != is_wrapper:
        takes = "one method to wrap" if is_wrapper else "keywords only"
        raise ValueError(f"{name} takes {takes}, got {len(wrapped)} methods in {brief(text)}")
    for word in values:
        if word not in parameters:
            takes = ", ".join(parameters) or "nothing"
            raise ValueError(
                f"{name} has no parameter {brief(word)}; it takes {takes}"
                f"{did_you_mean(word, parameters)}"
            )
    if budget is not None:
        values = {word: budget for word in ("budget", "reserve") if word in parameters} | values
    for word, default in parameters.items():
        if word not in values and (default is dataclasses.MISSING or not defaults):
            raise ValueError(f"{name} needs {word}=")
    return method(*wrapped, **values)


def _parentheses(text: str) -> str:
    """Says that parentheses of a text are not closed or not opened; empty if they are."""
    missing = text.count("(") - text.count(")")
    if not missing:
        return ""
    return f": {abs(missing)} {')' if missing > 0 else '('} missing"


def _keywords(name: str, call: ast.Call, text: str) -> dict[Any, Any]:
    """Returns the keyword arguments of a call; raises ValueError unless all are literals.

    Their names are text, and None for what is behind `**`.
    """
    try:
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"parameters must be literals in {brief(text)}") from None
    if len(values) < len(call.keywords):
        raise ValueError(f"a parameter of {name} is given twice in {brief(text)}")
    return values


def _check_positional(name: str, call: ast.Call, unnamed: Sequence[str], text: str) -> None:
    """Raises ValueError if a parameter stands without its name; says how to write it.

    Args:
      unnamed: the parameters that the call does not name, in their order.
    """
    positional = [
        ast.get_source_segment(text, argument) or ""
        for argument in call.args
        if isinstance(argument, ast.Constant | ast.UnaryOp)
    ]
    if positional:
        pairs = zip(unnamed, positional, strict=False)
        named = ", ".join(f"{word}={value}" for word, value in pairs)
        hint = f": write {named}" if named else ""
        raise ValueError(f"{name} takes parameters by name, got {brief(text)}{hint}")


def _chain_hint(node: ast.expr, text: str) -> str:
    """Says how to write methods that a comma or an operator joins; empty for other texts."""
    parts = node.elts if isinstance(node, ast.Tuple) else []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    if not parts or not all(isinstance(part, ast.Name | ast.Call) for part in parts):
        return ""
    sources = [ast.get_source_segment(text, part) or "" for part in parts]
    return f": write chain({', '.join(sources)})"
