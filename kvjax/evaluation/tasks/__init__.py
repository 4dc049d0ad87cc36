"""Published tasks that show what compression does to a model's answers."""

from .task import Case, Frame, Task

__all__ = ["Case", "Frame", "Task"]
