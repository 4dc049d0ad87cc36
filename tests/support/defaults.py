"""Another version of a method: one of its parameters has another default, or is new."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import kvjax


def change_default(
    monkeypatch: pytest.MonkeyPatch, method: type[kvjax.KVTransform], **defaults: Any
) -> None:
    """Gives parameters of a method other defaults."""
    signature = inspect.signature(method.__init__).parameters.values()
    names = [x.name for x in signature if x.default is not inspect.Parameter.empty]
    before = dict(zip(names, method.__init__.__defaults__, strict=True))
    assert defaults.keys() <= before.keys()
    monkeypatch.setattr(method.__init__, "__defaults__", tuple((before | defaults).values()))
    for field in dataclasses.fields(method):
        if field.name in defaults:
            monkeypatch.setattr(field, "default", defaults[field.name])
            monkeypatch.setattr(method, field.name, defaults[field.name])
