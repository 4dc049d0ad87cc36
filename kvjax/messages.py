"""Shows names and values in messages; silences other libraries, and says where one is missing."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

_MOST = 200  # characters of a value
_MOST_GUESSED = 40  # characters of an unknown name that are compared with known names


def printable(text: object, most: int = 1000) -> str:
    """Escapes every character that cannot be printed, and cuts the text after `most` characters.

    Errors and names from files go through it before a command prints them, because a terminal
    executes control characters.

    Example:
      >>> from kvjax.messages import printable
      >>> print(printable("\\x1b[2Jname"))
      \\x1b[2Jname
    """
    text = str(text)
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:most]
    )
    return escaped if len(text) <= most else f"{escaped}..."


def brief(value: Any) -> str:
    """Returns the `repr` of a value, cut if it is long.

    Example:
      >>> from kvjax.messages import brief
      >>> brief("snapkv"), len(brief("a" * 10**6))
      ("'snapkv'", 203)
    """
    # If NumPy has not been imported, the value is not one of its numbers.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()  # prints as 3 rather than np.int64(3)
    try:
        return printable(repr(value), _MOST)
    except ValueError:  # Python prints no integers of more than 4,300 digits
        return f"a {type(value).__name__} too long to print"
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to print"


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Asks for the known name that was perhaps meant, as the end of a message; "" if there is none.

    It is the name that differs only in case, hyphens, underscores and spaces; else the only name
    that begins with the given one; else the most similar name.

    Example:
      >>> from kvjax.messages import did_you_mean
      >>> did_you_mean("snapvk", ["h2o", "snapkv"]), did_you_mean("x", ["h2o", "snapkv"])
      ('; did you mean snapkv?', '')
      >>> did_you_mean("SnapKV", ["h2o", "snapkv"]), did_you_mean("gen", ["eval", "generate"])
      ('; did you mean snapkv?', '; did you mean generate?')
    """
    letters = _letters(str(name)[:_MOST_GUESSED])
    by_letters = {_letters(word): word for word in known if isinstance(word, str)}
    beginning = [word for word in by_letters if len(letters) > 1 and word.startswith(letters)]
    if letters in by_letters:
        close = [letters]
    elif len(beginning) == 1:
        close = beginning
    else:
        close = difflib.get_close_matches(letters, by_letters, n=1)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""


def _letters(name: str) -> str:
    """Returns a name in small letters, without hyphens, underscores and spaces."""
    return "".join(character for character in name.casefold() if character not in "-_ ")


def one_line(error: Exception) -> str:
    """Returns the message of another library's exception in one line; its type if it has none.

    Example:
      >>> from kvjax.messages import one_line
      >>> one_line(RuntimeError("no\\nnetwork")), one_line(KeyError())
      ('no network', 'KeyError')
    """
    return printable(" ".join(str(error).split())) or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences log lines and warnings of other libraries, so that an error is one line."""
    disabled_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_before)


def extra_module(name: str, extra: str, purpose: str) -> Any:
    """Imports a module of a package that `pip install 'kvjax[extra]'` installs.

    Args:
      name: name of the module.
      extra: the extra that installs it.
      purpose: what the module is needed for; the error message begins with it.

    Raises:
      ValueError: the package is not installed; says how to install it.

    Example:
      >>> from kvjax.messages import extra_module
      >>> extra_module("matplotlib", "eval", "pictures").__name__
      'matplotlib'
      >>> extra_module("no_such_package", "eval", "pictures")
      Traceback (most recent call last):
        ...
      ValueError: pictures need the package no-such-package, which is not installed: \
pip install 'kvjax[eval]'
    """
    try:
        with quiet():  # some packages warn of their own code when they are imported
            return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ValueError(
            f"{purpose} need the package {package}, which is not installed: "
            f"pip install 'kvjax[{extra}]'"
        ) from error
