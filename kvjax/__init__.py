"""kvjax: key-value cache compression for JAX.

Small pure transforms over an immutable cache, each one a paper, composable, inside one `jit`.
"""

from kvjax.attention import attend
from kvjax.cache import (
    Column,
    KVCache,
    append,
    compact,
    evict,
    memory_bytes,
    merge,
    nbytes,
    widen,
)
from kvjax.calibration import calibrate_infinigen, calibrate_outlier_heads, calibrated
from kvjax.chain import Chain, bind, chain
from kvjax.codebook import Codebook
from kvjax.codebook_payload import Book, CodebookPayload
from kvjax.generate import Generation, generate
from kvjax.infinigen_calibration import InfiniGenCalibration
from kvjax.layer_cache import LayerCache, init_cache, kept_tokens
from kvjax.model import FunctionalModel, LanguageModel
from kvjax.offload import Offload
from kvjax.outlier_heads import OutlierHeads, RemainingBudget
from kvjax.payloads import Dense, Payload
from kvjax.quantize import Quantize
from kvjax.registry import METHODS, parse
from kvjax.reserve import Reserve, reserve_ratio
from kvjax.rope import Rope
from kvjax.sampling import Sampling
from kvjax.transform import Extent, Full, KVTransform, Needs, Stage, Step, View
from kvjax.transforms.cam import CaM
from kvjax.transforms.chelsea import Chelsea
from kvjax.transforms.clusterkv import ClusterKV
from kvjax.transforms.h2o import H2O
from kvjax.transforms.infinigen import InfiniGen
from kvjax.transforms.kvcrush import KVCrush
from kvjax.transforms.kvmerger import KVMerger
from kvjax.transforms.layer_budget_eviction import LayerBudgetEviction, LayerEviction
from kvjax.transforms.pyramidinfer import PyramidInfer, PyramidInferLayer
from kvjax.transforms.pyramidkv import LayerBudget, PyramidKV
from kvjax.transforms.quest import Quest
from kvjax.transforms.snapkv import SnapKV
from kvjax.transforms.spindlekv import SpindleKV
from kvjax.transforms.streaming_llm import StreamingLLM
from kvjax.wrappers import Every, HeadGroups, PerLayer, WhenFull

__version__ = "0.1.0"

__all__ = [
    "H2O",
    "METHODS",
    "Book",
    "CaM",
    "Chain",
    "Chelsea",
    "ClusterKV",
    "Codebook",
    "CodebookPayload",
    "Column",
    "Dense",
    "Every",
    "Extent",
    "Full",
    "FunctionalModel",
    "Generation",
    "HeadGroups",
    "InfiniGen",
    "InfiniGenCalibration",
    "KVCache",
    "KVCrush",
    "KVMerger",
    "KVTransform",
    "LanguageModel",
    "LayerBudget",
    "LayerBudgetEviction",
    "LayerCache",
    "LayerEviction",
    "Needs",
    "Offload",
    "OutlierHeads",
    "Payload",
    "PerLayer",
    "PyramidInfer",
    "PyramidInferLayer",
    "PyramidKV",
    "Quantize",
    "Quest",
    "RemainingBudget",
    "Reserve",
    "Rope",
    "Sampling",
    "SnapKV",
    "SpindleKV",
    "Stage",
    "Step",
    "StreamingLLM",
    "View",
    "WhenFull",
    "append",
    "attend",
    "bind",
    "calibrate_infinigen",
    "calibrate_outlier_heads",
    "calibrated",
    "chain",
    "compact",
    "evict",
    "generate",
    "init_cache",
    "kept_tokens",
    "memory_bytes",
    "merge",
    "nbytes",
    "parse",
    "reserve_ratio",
    "widen",
]
