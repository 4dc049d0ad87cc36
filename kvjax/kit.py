"""Names for authors of methods, beside `kvjax.KVTransform`: the helpers of shipped methods.

Among them are the calibrations of shipped methods, for programs that make them in another way than
by `kvjax.calibrated`. See `docs/writing-a-method.md`.
"""

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.cache.payload import (
    Dense,
    Payload,
    RowPayload,
    sum_into,
    take_slots,
    write_slots,
)
from kvjax.cache.rearrange import compact, merge
from kvjax.cache.record import Record
from kvjax.cache.selection import evictable, keep_best, newest
from kvjax.cache.slots import Column, KVCache, append, evict
from kvjax.calibration import Calibration, Learner
from kvjax.checks import check_choice, check_count, check_number
from kvjax.compose.by_head import HeadProfile
from kvjax.compose.in_slots import in_slots
from kvjax.decisions import Decision, Keep, Mark, Merge, Order, Retain, group_scores
from kvjax.devices import all_heads
from kvjax.protocol import (
    Asking,
    Card,
    Chunk,
    Extent,
    Inputs,
    KVTransform,
    Needs,
    Probe,
    Stage,
    State,
    Step,
    View,
    Wrapper,
    accumulated_attention,
)
from kvjax.serialization import pytree_node, static_value
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads
from kvjax.transforms.document_budget import DocumentBudget, Documents, Received
from kvjax.transforms.held_budget import HeldBudget, PromptBudget, decoding_budget, decoding_extent
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from kvjax.transforms.snapkv import by_query_head, window_attention

__all__ = [
    "Asking",
    "Budget",
    "Calibration",
    "Card",
    "Chunk",
    "Column",
    "Decision",
    "Dense",
    "DocumentBudget",
    "Documents",
    "Extent",
    "HeadProfile",
    "HeldBudget",
    "InfiniGenCalibration",
    "Inputs",
    "KVCache",
    "KVTransform",
    "Keep",
    "Learner",
    "Mark",
    "Merge",
    "Needs",
    "Order",
    "OutlierHeads",
    "Payload",
    "Probe",
    "PromptBudget",
    "Received",
    "Record",
    "Retain",
    "RowPayload",
    "Stage",
    "State",
    "Step",
    "View",
    "Wrapper",
    "accumulated_attention",
    "all_heads",
    "append",
    "by_query_head",
    "check_budget",
    "check_choice",
    "check_count",
    "check_number",
    "compact",
    "decoding_budget",
    "decoding_extent",
    "evict",
    "evictable",
    "group_scores",
    "in_slots",
    "keep_best",
    "merge",
    "most_slots",
    "newest",
    "pytree_node",
    "rows_budget",
    "static_value",
    "sum_into",
    "take_slots",
    "window_attention",
    "write_slots",
]
