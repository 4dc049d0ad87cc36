"""kvjax: key-value cache compression for JAX.

Small pure transforms over an immutable cache, each one a paper, composable, inside one `jit`.
"""

from kvjax import kit, testing
from kvjax.attention.attend import attend, flush, flush_interval
from kvjax.attention.layer import LayerCache, init_cache, kept_tokens
from kvjax.cache.slots import KVCache, append, compact, evict, memory_bytes, merge, nbytes
from kvjax.compose.chain import bind, chain
from kvjax.compose.wrappers import Every, Everywhere, HeadGroups, PerLayer, WhenFull
from kvjax.decisions import Keep, Mark, Merge, Order, Retain
from kvjax.generation.calibration import calibrate_infinigen, calibrate_outlier_heads, calibrated
from kvjax.generation.context import Context
from kvjax.generation.generate import generate, read, stream
from kvjax.generation.model import FunctionalModel, LanguageModel, LayeredModel, ModelParts
from kvjax.generation.reading_once import ReadOnce
from kvjax.generation.sampling import Sampling
from kvjax.generation.saving import context_about, load_context, save_context
from kvjax.generation.writing import Generation
from kvjax.protocol import Extent, Full, KVTransform, Needs, Stage, Step, View
from kvjax.registry import METHODS, parse, register, unparse
from kvjax.rope import Rope
from kvjax.storage.codebook import Codebook
from kvjax.storage.offload import Offload
from kvjax.storage.quantize import Quantize
from kvjax.transforms.cam import CaM
from kvjax.transforms.chelsea.chelsea import Chelsea
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads
from kvjax.transforms.clusterkv.clusterkv import ClusterKV
from kvjax.transforms.h2o import H2O
from kvjax.transforms.infinigen.infinigen import InfiniGen
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from kvjax.transforms.kvcrush.kvcrush import KVCrush
from kvjax.transforms.kvmerger.kvmerger import KVMerger
from kvjax.transforms.pyramidinfer import PyramidInfer
from kvjax.transforms.pyramidkv import PyramidKV
from kvjax.transforms.quest import Quest
from kvjax.transforms.ring import Ring
from kvjax.transforms.snapkv import SnapKV
from kvjax.transforms.spindlekv.layer_budget_eviction import LayerBudgetEviction
from kvjax.transforms.spindlekv.reserve import reserve_ratio
from kvjax.transforms.spindlekv.spindlekv import SpindleKV
from kvjax.transforms.streaming_llm import StreamingLLM

__version__ = "0.1.0"

__all__ = [
    "H2O",
    "METHODS",
    "CaM",
    "Chelsea",
    "ClusterKV",
    "Codebook",
    "Context",
    "Every",
    "Everywhere",
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
    "Keep",
    "LanguageModel",
    "LayerBudgetEviction",
    "LayerCache",
    "LayeredModel",
    "Mark",
    "Merge",
    "ModelParts",
    "Needs",
    "Offload",
    "Order",
    "OutlierHeads",
    "PerLayer",
    "PyramidInfer",
    "PyramidKV",
    "Quantize",
    "Quest",
    "ReadOnce",
    "Retain",
    "Ring",
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
    "context_about",
    "evict",
    "flush",
    "flush_interval",
    "generate",
    "init_cache",
    "kept_tokens",
    "kit",
    "load_context",
    "memory_bytes",
    "merge",
    "nbytes",
    "parse",
    "read",
    "register",
    "reserve_ratio",
    "save_context",
    "stream",
    "testing",
    "unparse",
]


def __dir__() -> list[str]:
    return __all__
