"""kvjax: key-value cache compression for JAX.

Small pure transforms over an immutable cache, each one a paper, composable, inside one `jit`.
"""

from kvjax.attention import attend
from kvjax.cache import Column, KVCache, append, compact, evict, merge, nbytes, widen
from kvjax.chain import Chain, bind, chain
from kvjax.generate import Generation, generate
from kvjax.layer_cache import LayerCache, init_cache
from kvjax.model import FunctionalModel, LanguageModel
from kvjax.payloads import Dense, Payload
from kvjax.registry import METHODS, parse
from kvjax.rope import Rope
from kvjax.sampling import Sampling
from kvjax.transform import Extent, Full, KVTransform, Needs, Stage, Step, View
from kvjax.transforms.h2o import H2O
from kvjax.transforms.pyramidkv import LayerBudget, PyramidKV
from kvjax.transforms.snapkv import SnapKV
from kvjax.transforms.streaming_llm import StreamingLLM
from kvjax.wrappers import Every, HeadGroups, PerLayer, WhenFull

__version__ = "0.1.0"

__all__ = [
    "H2O",
    "METHODS",
    "Chain",
    "Column",
    "Dense",
    "Every",
    "Extent",
    "Full",
    "FunctionalModel",
    "Generation",
    "HeadGroups",
    "KVCache",
    "KVTransform",
    "LanguageModel",
    "LayerBudget",
    "LayerCache",
    "Needs",
    "Payload",
    "PerLayer",
    "PyramidKV",
    "Rope",
    "Sampling",
    "SnapKV",
    "Stage",
    "Step",
    "StreamingLLM",
    "View",
    "WhenFull",
    "append",
    "attend",
    "bind",
    "chain",
    "compact",
    "evict",
    "generate",
    "init_cache",
    "merge",
    "nbytes",
    "parse",
    "widen",
]
