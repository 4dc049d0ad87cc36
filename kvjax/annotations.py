"""Types that annotations share."""

from __future__ import annotations

from typing import Any, TypeAlias

NoneElsewhere: TypeAlias = Any
"""Beside a type, as in `Array | NoneElsewhere`: the value is None wherever nobody reads it.

Whoever reads such a value knows that it is there, as the method that asks for the mass of a decode
step does in `on_step`. A type checker would ask for a test of `Array | None` at each such place. Of
this type it asks for none, and still knows the value as an array.
"""
