"""Pictures of caches: what is live, what slots stand for, what steps look at, what layers take.

Every function draws with matplotlib onto axes that it is given, and returns what it has drawn. Dark
is more and light is less, and colours are Okabe and Ito's, so that pictures can be read in grey and
by the colour-blind. `import kvjax` does not import this module, which needs matplotlib: the extra
`eval` installs it.
"""

from kvjax.evaluation.report.plots import LOOK

from .fields import field, held, selected, similarity
from .lines import layer_bytes, recall
from .looks import legend, span
from .slots import clusters, masses
from .watching import Seen, watch

__all__ = [
    "LOOK",
    "Seen",
    "clusters",
    "field",
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
