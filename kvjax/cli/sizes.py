"""Lines on what a cache keeps, on its room, and on stored forms that would take no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.filesize import decimal

import kvjax
from kvjax.attention.init_cache import default_dtype
from kvjax.attention.occupancy import Occupancy
from kvjax.generation.planning import Plan, plan, too_long, whole_plans


def kept_and_room(occupancy: Occupancy, kept: str) -> str:
    """Describes the contents of a cache, which `kept` names, and its room; slots are means."""
    return (
        f"{decimal(occupancy.kept_bytes)} for {kept} ({occupancy.kept_slots:,.0f} slots per head) "
        f"and {decimal(occupancy.room_bytes)} of room ({occupancy.room_slots:,.0f} slots)"
    )


class Whole(NamedTuple):
    """A stored form that keeps every token, and the bytes of its cache with room."""

    method: str
    cache_bytes: int

    @classmethod
    def instead_of(cls, planned: Plan, others: Iterable[Plan]) -> Whole | None:
        """Finds a stored form that keeps every token and takes no more memory; None: there is none.

        Args:
          planned: plan of the method.
          others: `kvjax.generation.planning.whole_plans` for the same sizes.
        """
        found = planned.whole(others)
        if found is None:
            return None
        return cls(kvjax.unparse(found.transform), round(found.caches(1).device))

    @classmethod
    def instead_of_context(
        cls, model: Any, transform: kvjax.KVTransform, max_prompt: int, max_new: int
    ) -> Whole | None:
        """Does so for a context of one row, which `kvjax.read` has yet to make."""
        if too_long(model, max_prompt=max_prompt, max_new=max_new):
            return None
        sizes = {"max_prompt": max_prompt, "max_new": max_new, "dtype": default_dtype()}
        return cls.instead_of(plan(model, transform, **sizes), whole_plans(model, **sizes))

    def line(self, method: str) -> str:
        """Tells users of a method about it."""
        return (
            f"{method} and its room take no fewer bytes than {self.method}, which keeps every "
            f"token in {decimal(self.cache_bytes)}"
        )
