"""The public names of kvjax and where they are defined; `kvjax/__init__.py` reads this file."""

from . import kit, testing
from .attention.attend import attend
from .attention.flush import flush, flush_interval
from .attention.init_cache import init_cache
from .attention.kept_tokens import kept_tokens
from .attention.layer import LayerCache
from .attention.rows import put_rows, take_rows
from .cache.nbytes import nbytes
from .cache.rope import Rope
from .compose.bind import bind
from .compose.by_head import ByHead, HeadProfile
from .compose.chain import chain
from .compose.in_slots import in_slots
from .compose.ring import Ring
from .compose.wrappers import Every, Everywhere, HeadGroups, PerLayer, WhenFull
from .generation.calibration import calibrated, load_calibration, save_calibration
from .generation.chat import chat_end_tokens
from .generation.context import Context
from .generation.context_files import load_context, save_context
from .generation.decode_loop import Generation
from .generation.generate import generate, read, stream
from .generation.model import FunctionalModel, LanguageModel, LayeredModel, ModelParts
from .generation.sampling import Sampling
from .protocol import Full, KVTransform
from .registry import parse, register, unparse
from .storage.codebook.transform import Codebook
from .storage.offload.transform import Offload
from .storage.quantize.transform import Quantize
from .transforms.cam import CaM
from .transforms.chelsea.chelsea import Chelsea
from .transforms.chelsea.outlier_heads import OutlierHeads
from .transforms.clusterkv.clusterkv import ClusterKV
from .transforms.h2o import H2O
from .transforms.infinigen.infinigen import InfiniGen
from .transforms.infinigen.projections import InfiniGenCalibration
from .transforms.kvcrush.kvcrush import KVCrush
from .transforms.kvmerger.kvmerger import KVMerger
from .transforms.kvzip.kvzip import KVzip
from .transforms.pyramidinfer.pyramidinfer import PyramidInfer
from .transforms.pyramidkv import PyramidKV
from .transforms.quest import Quest
from .transforms.snapkv import SnapKV
from .transforms.spindlekv.layer_budget_eviction import LayerBudgetEviction
from .transforms.spindlekv.spindlekv import SpindleKV
from .transforms.streaming_llm import StreamingLLM

__version__: str

__all__ = [
    "H2O",
    "ByHead",
    "CaM",
    "Chelsea",
    "ClusterKV",
    "Codebook",
    "Context",
    "Every",
    "Everywhere",
    "Full",
    "FunctionalModel",
    "Generation",
    "HeadGroups",
    "HeadProfile",
    "InfiniGen",
    "InfiniGenCalibration",
    "KVCrush",
    "KVMerger",
    "KVTransform",
    "KVzip",
    "LanguageModel",
    "LayerBudgetEviction",
    "LayerCache",
    "LayeredModel",
    "ModelParts",
    "Offload",
    "OutlierHeads",
    "PerLayer",
    "PyramidInfer",
    "PyramidKV",
    "Quantize",
    "Quest",
    "Ring",
    "Rope",
    "Sampling",
    "SnapKV",
    "SpindleKV",
    "StreamingLLM",
    "WhenFull",
    "attend",
    "bind",
    "calibrated",
    "chain",
    "chat_end_tokens",
    "flush",
    "flush_interval",
    "generate",
    "in_slots",
    "init_cache",
    "kept_tokens",
    "kit",
    "load_calibration",
    "load_context",
    "nbytes",
    "parse",
    "put_rows",
    "read",
    "register",
    "save_calibration",
    "save_context",
    "stream",
    "take_rows",
    "testing",
    "unparse",
]
