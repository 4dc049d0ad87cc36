"""Tasks that show what compression does to a model's answers: kvjax's own and published ones."""

from .datasets import DATASETS, dataset
from .retrieval import OWN_TASKS, STATEMENT, Haystack, is_right, retrieval
from .ruler.ruler import RULER_QA, RULER_TASKS, ruler
from .squad import SQUAD, squad
from .task import NATS, Case, Frame, Task

ANSWERS = (*OWN_TASKS, STATEMENT, *RULER_TASKS, RULER_QA, *DATASETS, SQUAD)
"""Names of the tasks that ask questions."""

MEASURES = ("perplexity", "attention")
"""Names of the measures that need no question: the loss of held-out text, and recall and error of
the attention while an answer is given."""

__all__ = [
    "ANSWERS",
    "DATASETS",
    "MEASURES",
    "NATS",
    "OWN_TASKS",
    "RULER_QA",
    "RULER_TASKS",
    "SQUAD",
    "STATEMENT",
    "Case",
    "Frame",
    "Haystack",
    "Task",
    "dataset",
    "is_right",
    "retrieval",
    "ruler",
    "squad",
]
