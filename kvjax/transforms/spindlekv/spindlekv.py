"""SpindleKV: eviction for deep layers, a codebook for shallow ones (arXiv 2507.06517)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.compose.chain import chain
from kvjax.protocol import Card, KVTransform, Needs, Stage
from kvjax.serialization import named
from kvjax.storage.codebook.transform import Codebook
from kvjax.transforms.spindlekv.layer_budget_eviction import LayerBudgetEviction


@named("spindlekv")
@dataclass(frozen=True)
class SpindleKV(KVTransform):
    """Evicts tokens in deep layers, and stores similar vectors of shallow layers once.

    For each layer, `for_layer` returns `chain(LayerBudgetEviction(...), Codebook(...))`. At a
    prompt's end each layer keeps its part of the tokens (equations 2 to 7). Their keys and values
    are stored as references to a few directions, and norms (equations 8 to 14). Pass the transform
    to `bind`.

    Args:
      reserve, window, beta, unfold: as in `LayerBudgetEviction`. `reserve` concerns eviction only;
        with 1 only the codebook compresses.
      theta_key, theta_value, capacity, interval, magnitude: as in `Codebook`.

    Raises:
      TypeError, ValueError: as in `LayerBudgetEviction` and `Codebook`.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.SpindleKV(reserve=0.5), num_layers=2)[1].parts[1]
      Codebook(theta_key=0.98, theta_value=0.95, capacity=1.0, interval=32, magnitude=True)

    References:
      Tang et al., SpindleKV: A Novel KV Cache Reduction Method Balancing Both Shallow and Deep
      Layers, arXiv 2507.06517.

    Deviations from the paper:
      Both parts deviate as their own descriptions say. By default heads are not unfolded, which in
      the paper is the weaker form where query heads share keys. On the bundled model unfolding
      finds fewer needles (docs/results/costs.md, "Cost of every part"); on SmolLM2 both forms lose
      about as much as the eviction alone, and `capacity=0.5` without unfolding loses more
      (docs/results/studies.md).
    """

    reserve: float
    window: int = 32
    beta: float = 0.05
    unfold: bool = False
    theta_key: float = 0.98
    theta_value: float = 0.95
    capacity: int | float = 1.0
    interval: int = 32
    magnitude: bool = True

    stage: ClassVar[Stage] = Stage.REPRESENT
    card = Card(
        acts="prompt, every 32 tokens", paper="SpindleKV, arXiv 2507.06517", when="now",
        small={"reserve": 0.5, "window": 4, "interval": 16},
    )  # fmt: skip

    @property
    def needs(self) -> Needs:
        """Needs of its parts."""
        return self.for_layer(0, 1).needs

    def __post_init__(self):
        self._parts()

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the chain of both parts, the eviction with its schedule."""
        eviction, codebook = self._parts()
        return chain(eviction.for_layer(layer, num_layers), codebook)

    def _parts(self) -> tuple[LayerBudgetEviction, Codebook]:
        """Makes both parts, which check the options."""
        return (
            LayerBudgetEviction(self.reserve, self.window, self.beta, self.unfold),
            Codebook(
                self.theta_key, self.theta_value, self.capacity, self.interval, self.magnitude
            ),
        )
