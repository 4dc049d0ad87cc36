"""How names and values that others wrote are shown in messages: on one line, and never long."""

from __future__ import annotations

import numpy as np

_MOST = 200  # characters of a value


def printable(text: object) -> str:
    """The text with every character escaped that a terminal would not print.

    Names from files go through it: a terminal carries out control characters.

    Example:
      >>> from kvjax.messages import printable
      >>> print(printable("\\x1b[2Jname"))
      \\x1b[2Jname
    """
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in str(text)
    )


def brief(value: object) -> str:
    """The `repr` of a value, cut where it is long.

    Example:
      >>> from kvjax.messages import brief
      >>> brief("snapkv"), len(brief("a" * 10**6))
      ("'snapkv'", 203)
    """
    if isinstance(value, np.generic):  # 3 rather than np.int64(3)
        value = value.item()
    try:
        text = printable(repr(value))
    except ValueError:  # Python prints no integers of more than 4,300 digits
        text = f"a {type(value).__name__} too long to print"
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply to print"
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
