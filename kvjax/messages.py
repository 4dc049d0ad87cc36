"""How messages show names and values that others wrote, and what other libraries may not say."""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

_MOST = 200  # characters of a value
_MOST_GUESSED = 40  # characters of a name that is compared with those that are known


def printable(text: object, most: int = 1000) -> str:
    """The text with every character escaped that is not printed, cut after `most` characters.

    Errors and names from files go through it before a command prints them: a terminal carries out
    control characters.

    Example:
      >>> from kvjax.messages import printable
      >>> print(printable("\\x1b[2Jname"))
      \\x1b[2Jname
    """
    given = str(text)
    shown = "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode()
        for sign in given[:most]
    )
    return shown if len(given) <= most else f"{shown}..."


def brief(value: Any) -> str:
    """The `repr` of a value, cut where it is long.

    Example:
      >>> from kvjax.messages import brief
      >>> brief("snapkv"), len(brief("a" * 10**6))
      ("'snapkv'", 203)
    """
    numpy = sys.modules.get("numpy")  # not imported for a value that is none of its own
    if numpy is not None and isinstance(value, numpy.generic):  # 3 rather than np.int64(3)
        value = value.item()
    try:
        return printable(repr(value), _MOST)
    except ValueError:  # Python prints no integers of more than 4,300 digits
        return f"a {type(value).__name__} too long to print"
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to print"


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A question about the name that was perhaps meant, for the end of a message.

    It is one that differs in case, hyphens, underscores and spaces alone; else the only one that
    begins so; else the one that is most alike.

    Example:
      >>> from kvjax.messages import did_you_mean
      >>> did_you_mean("snapvk", ["h2o", "snapkv"]), did_you_mean("x", ["h2o", "snapkv"])
      ('; did you mean snapkv?', '')
      >>> did_you_mean("SnapKV", ["h2o", "snapkv"]), did_you_mean("gen", ["eval", "generate"])
      ('; did you mean snapkv?', '; did you mean generate?')
    """
    given = _letters(str(name)[:_MOST_GUESSED])
    by_letters = {_letters(word): word for word in known if isinstance(word, str)}
    begun = [letters for letters in by_letters if len(given) > 1 and letters.startswith(given)]
    if given in by_letters:
        close = [given]
    elif len(begun) == 1:
        close = begun
    else:
        close = difflib.get_close_matches(given, by_letters, n=1)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""


def _letters(name: str) -> str:
    """A name in small letters, without what stands between words."""
    return "".join(sign for sign in name.casefold() if sign not in "-_ ")


def one_line(error: Exception, most: int = 1000) -> str:
    """The message of another library's exception in one line, its type where it has none.

    Example:
      >>> from kvjax.messages import one_line
      >>> one_line(RuntimeError("no\\nnetwork")), one_line(KeyError())
      ('no network', 'KeyError')
    """
    return printable(" ".join(str(error).split()), most) or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines and warnings of the libraries underneath: an error is one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
