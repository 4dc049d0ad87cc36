"""The public names of kvjax and where they are defined; `kvjax/__init__.py` reads this file.

`as` makes a name public for type checkers.
"""

from . import guests as guests
from . import kit as kit
from . import testing as testing
from .attention.attend import attend as attend
from .attention.attend import begin_document as begin_document
from .attention.dropped import check_dropped as check_dropped
from .attention.flush import flush as flush
from .attention.flush import flush_interval as flush_interval
from .attention.flush import self_flushing as self_flushing
from .attention.init_cache import init_cache as init_cache
from .attention.kept_tokens import kept_tokens as kept_tokens
from .attention.layer import LayerCache as LayerCache
from .attention.positions import positions_of as positions_of
from .attention.rows import put_rows as put_rows
from .attention.rows import take_rows as take_rows
from .cache.nbytes import nbytes as nbytes
from .cache.rope import Rope as Rope
from .compose.bind import bind as bind
from .compose.chain import chain as chain
from .compose.ring import Ring as Ring
from .compose.wrappers import HeadGroups as HeadGroups
from .compose.wrappers import PerLayer as PerLayer
from .generation.calibration import calibrated as calibrated
from .generation.calibration import load_calibration as load_calibration
from .generation.calibration import save_calibration as save_calibration
from .generation.context import Context as Context
from .generation.context_files import load_context as load_context
from .generation.context_files import save_context as save_context
from .generation.decode_loop import Generation as Generation
from .generation.generate import generate as generate
from .generation.generate import read as read
from .generation.generate import stream as stream
from .generation.new_caches import init_caches as init_caches
from .generation.sampling import Sampling as Sampling
from .protocol import KVTransform as KVTransform
from .registry import parse as parse
from .registry import register as register
from .registry import unparse as unparse
from .transforms.smallest import smallest as smallest

__version__: str

# the imports of methods, by benchmarks/results_page.py
from .compose.by_head import ByHead as ByHead
from .compose.wrappers import Every as Every
from .compose.wrappers import Everywhere as Everywhere
from .compose.wrappers import WhenFull as WhenFull
from .protocol import Full as Full
from .storage.codebook.transform import Codebook as Codebook
from .storage.offload.transform import Offload as Offload
from .storage.quantize.transform import Quantize as Quantize
from .transforms.cam import CaM as CaM
from .transforms.chelsea.chelsea import Chelsea as Chelsea
from .transforms.clusterkv.clusterkv import ClusterKV as ClusterKV
from .transforms.h2o import H2O as H2O
from .transforms.infinigen.infinigen import InfiniGen as InfiniGen
from .transforms.kvcrush.kvcrush import KVCrush as KVCrush
from .transforms.kvmerger.kvmerger import KVMerger as KVMerger
from .transforms.kvzip.kvzip import KVzip as KVzip
from .transforms.own_queries import OwnQueries as OwnQueries
from .transforms.pyramidinfer.pyramidinfer import PyramidInfer as PyramidInfer
from .transforms.pyramidkv import PyramidKV as PyramidKV
from .transforms.quest import Quest as Quest
from .transforms.snapkv import SnapKV as SnapKV
from .transforms.spindlekv.layer_budget_eviction import LayerBudgetEviction as LayerBudgetEviction
from .transforms.spindlekv.spindlekv import SpindleKV as SpindleKV
from .transforms.streaming_llm import StreamingLLM as StreamingLLM
