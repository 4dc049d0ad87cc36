"""Packages that only an extra of kvjax installs."""

from __future__ import annotations

import importlib
from typing import Any

from kvjax.messages import quiet


def extra_module(name: str, extra: str, what: str) -> Any:
    """The module `name`, of a package that `pip install 'kvjax[extra]'` installs.

    Args:
      name: of the module.
      extra: whose package it is.
      what: needs it; the message begins with it.

    Raises:
      ValueError: it is not installed; says how it is.

    Example:
      >>> from kvjax.extras import extra_module
      >>> extra_module("matplotlib", "eval", "pictures").__name__
      'matplotlib'
      >>> extra_module("no_such_package", "eval", "pictures")
      Traceback (most recent call last):
        ...
      ValueError: pictures need the package no-such-package, which is not installed: \
pip install 'kvjax[eval]'
    """
    try:
        with quiet():  # some warn of their own code
            return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ValueError(
            f"{what} need the package {package}, which is not installed: "
            f"pip install 'kvjax[{extra}]'"
        ) from error
