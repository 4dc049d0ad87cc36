import jax
import jax.numpy as jnp
import kvjax
from dataclasses import dataclass
from kvjax.kit import pytree_node

from typing import NamedTuple

import numpy as np

from kvjax.kit import Calibration, DocumentBudget, Learner


@dataclass(frozen=True)
class GateWeights(Calibration):
    """Weights of a key, a value and a constant, `[layers, KV heads, 2 D + 1]`."""

    weights: np.ndarray


def features(cache):
    """Keys, values and ones of all tokens, zeros in free slots."""
    x = jnp.concatenate((cache.k.read(), cache.v.read()), axis=-1).astype(jnp.float32)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1.0)
    return jnp.where(cache.live[..., None], x, 0.0)


@pytree_node
class GateState(NamedTuple):
    """Holds the state of `DocumentBudget`, and the layer's weights."""

    table: tuple
    tokens: jax.Array
    weights: jax.Array


@dataclass(frozen=True)
class Gate(DocumentBudget, Learner):
    """Keeps the tokens of a document to which KVzip would give high scores.

    Keys and values tell them, so that nothing looks at the document once more.
    """

    ridge: float = 1e-2
    gate: GateWeights | str | None = None

    learns = ("gate", GateWeights)

    def __post_init__(self):
        super().__post_init__()
        self.check_learned()

    def planned(self, model):
        shape = model.num_layers, model.kv_heads, 2 * model.head_dim + 1
        return self.with_learned(GateWeights(np.zeros(shape)))

    def reader(self, model, lengths):
        return kvjax.KVzip(0.5)

    def observe(self, reader, cache, state, step):
        x, y = features(cache)[0], jnp.log(step.record.slots["received"][0] + 1e-6)
        return jnp.einsum("hsf,hsg->hfg", x, x), jnp.einsum("hsf,hs->hf", x, y)

    def learn(self, model, observed):
        products = [np.sum([[layer[n] for layer in text] for text in observed], 0) for n in (0, 1)]
        ridge = self.ridge * np.eye(2 * model.head_dim + 1)
        return GateWeights(np.linalg.solve(products[0] + ridge, products[1][..., None])[..., 0])

    def init(self, cache, layer):
        if self.lacks_calibration:
            raise self.unlearned()
        cache, documents = super().init(cache, layer)
        return cache, GateState(*documents, jnp.asarray(self.gate.weights[layer]))

    def scores(self, cache, state, step, document):
        return jnp.exp(jnp.einsum("bhsf,hf->bhs", features(cache), state.weights))

kvjax.register("gate", Gate)
