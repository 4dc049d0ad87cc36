"""Pictures of caches: live positions, masses and clusters, attended tokens, bytes, shares of heads.

Every function draws with matplotlib onto axes of the caller, and returns the drawn objects. Dark
means more and light means less. The colours are Okabe and Ito's, so that pictures can be read in
grey and by the colour-blind. `import kvjax` does not import this module. It needs matplotlib, which
the extra `eval` installs.
"""

from kvjax.evaluation.report.plots import LOOK

from .fields import field, held, selected, similarity
from .lines import head_shares, layer_bytes, recall
from .looks import legend, span
from .slots import clusters, masses
from .watching import Seen, watch

__all__ = [
    "LOOK",
    "Seen",
    "clusters",
    "field",
    "head_shares",
    "held",
    "layer_bytes",
    "legend",
    "masses",
    "recall",
    "selected",
    "similarity",
    "span",
    "watch",
]
