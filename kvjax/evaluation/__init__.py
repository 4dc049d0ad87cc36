"""Measures of what a compressed cache does to a model."""

from .compare import compare
from .fidelity import Fidelity, attention_error, measure_fidelity, recall_rate
from .grid import Cell, Grid
from .perplexity import continuation_nll
from .results import Proportion, Results
from .retrieval import TASKS, Case, Haystack, is_right

__all__ = [
    "TASKS",
    "Case",
    "Cell",
    "Fidelity",
    "Grid",
    "Haystack",
    "Proportion",
    "Results",
    "attention_error",
    "compare",
    "continuation_nll",
    "is_right",
    "measure_fidelity",
    "recall_rate",
]
