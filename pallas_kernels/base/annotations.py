"""Types that annotations share."""

from __future__ import annotations

from typing import Any, TypeAlias

NoneElsewhere: TypeAlias = Any
"""Stands beside a type, as in `Array | NoneElsewhere`, where a value is None unless it is read.

Whoever reads such a value knows that it is there. A method that asks for the mass of decode steps
finds it at each of them, and does not look for it at other moments. A type checker would demand a
test at each place that reads an `Array | None`. Here it demands none, and still knows the array.
"""
