"""Measures of what a compressed cache does to a model."""

from .compare import compare
from .diagnosis import Diagnosis, Finding, diagnose
from .fidelity import Fidelity, attention_error, measure_fidelities, measure_fidelity, recall_rate
from .files import read_results
from .grid import Cell, Grid, Unit
from .perplexity import context_nll, continuation_nll
from .results import Estimate, Proportion, Results, Row
from .retrieval import Haystack, is_right
from .speed import Speed, SpeedReport, measure_speed
from .tasks import ANSWERS, MEASURES, OWN_TASKS, Case, Frame, Task

TASKS = (*ANSWERS, *MEASURES)
"""The names of all tasks."""

__all__ = [
    "OWN_TASKS",
    "TASKS",
    "Case",
    "Cell",
    "Diagnosis",
    "Estimate",
    "Fidelity",
    "Finding",
    "Frame",
    "Grid",
    "Haystack",
    "Proportion",
    "Results",
    "Row",
    "Speed",
    "SpeedReport",
    "Task",
    "Unit",
    "attention_error",
    "compare",
    "context_nll",
    "continuation_nll",
    "diagnose",
    "is_right",
    "measure_fidelities",
    "measure_fidelity",
    "measure_speed",
    "read_results",
    "recall_rate",
]
