"""Imports packages that only an extra of kvjax installs."""

from __future__ import annotations

import importlib
from typing import Any

from kvjax.messages import quiet


def extra_module(name: str, extra: str, purpose: str) -> Any:
    """Imports a module of a package that `pip install 'kvjax[extra]'` installs.

    Args:
      name: name of the module.
      extra: the extra that installs it.
      purpose: what the module is needed for; the error message begins with it.

    Raises:
      ValueError: the package is not installed; says how to install it.

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
        with quiet():  # some packages warn of their own code when they are imported
            return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ValueError(
            f"{purpose} need the package {package}, which is not installed: "
            f"pip install 'kvjax[{extra}]'"
        ) from error
