"""Freed memory that the C library keeps, and how to give it back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Gives freed memory that the C library has kept back to the system, as far as possible."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
