"""Measures of the effect that a compressed cache has on a model."""

from ..cache.nbytes import memory_bytes
from ..generation.read_once import ReadOnce
from .cells.estimates import Estimate
from .cells.files import read_results
from .cells.grid import Cell, Grid, Unit
from .cells.results import Results, Row
from .codebook_reserve import overflow_share, reserve_ratio
from .comparison.compare import compare
from .diagnosis.diagnosis import Diagnosis, Finding, diagnose
from .fidelity.fidelity import Fidelity, attention_error, measure_fidelities, recall_rate
from .fidelity.perplexity import AnswerLosses, answer_losses, answer_nll, context_nll
from .speed.speed import Speed, SpeedReport, measure_speed
from .tasks import ANSWERS, MEASURES, OWN_TASKS, Case, Frame, Haystack, Task, is_right

TASKS = (*ANSWERS, *MEASURES)
"""Names of all tasks."""

__all__ = [
    "OWN_TASKS",
    "TASKS",
    "AnswerLosses",
    "Case",
    "Cell",
    "Diagnosis",
    "Estimate",
    "Fidelity",
    "Finding",
    "Frame",
    "Grid",
    "Haystack",
    "ReadOnce",
    "Results",
    "Row",
    "Speed",
    "SpeedReport",
    "Task",
    "Unit",
    "answer_losses",
    "answer_nll",
    "attention_error",
    "compare",
    "context_nll",
    "diagnose",
    "is_right",
    "measure_fidelities",
    "measure_speed",
    "memory_bytes",
    "overflow_share",
    "read_results",
    "recall_rate",
    "reserve_ratio",
]
