"""Published tasks that show what compression does to a model's answers."""

from .ruler import RULER_TASKS, ruler
from .task import Case, Frame, Task

__all__ = ["RULER_TASKS", "Case", "Frame", "Task", "ruler"]
