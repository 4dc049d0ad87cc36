"""Published tasks that show what compression does to a model's answers."""

from .datasets import DATASETS, dataset
from .ruler import RULER_TASKS, ruler
from .task import Case, Frame, Task

OWN_TASKS = ("needle", "multi_needle", "key_value", "chain")
"""`needle`: one sentence in the text. `multi_needle`: several, one is asked for. `key_value`: a
list of keys and values, one is asked for. `chain`: a key has the code of another key, and another
sentence tells that one's code."""

ANSWERS = (*OWN_TASKS, *RULER_TASKS, *DATASETS)
"""The tasks that ask questions, by name."""

MEASURES = ("perplexity", "attention")
"""What is measured without a question: the loss of held-out text, and recall and error of the
attention while an answer is given."""

__all__ = [
    "ANSWERS",
    "DATASETS",
    "MEASURES",
    "OWN_TASKS",
    "RULER_TASKS",
    "Case",
    "Frame",
    "Task",
    "dataset",
    "ruler",
]
