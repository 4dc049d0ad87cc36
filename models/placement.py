"""Placement of weights on a mesh: an axis divides heads, the MLP and the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.devices import TENSOR, check_mesh, put

from .config import DecoderConfig
from .decoder import Decoder
from .tensor_names import ParameterPath

Rule = Callable[[ParameterPath], NamedSharding]
"""A parameter's path in the decoder's state → its placement."""

_DIVIDED = {  # by the axis "tensor": axes of a kernel, of a bias, or of the embedding
    "qkv_proj": P(TENSOR), "o_proj": P(None, TENSOR), "gate_up_proj": P(TENSOR),
    "down_proj": P(None, TENSOR), "embed": P(TENSOR), "lm_head": P(TENSOR),
}  # fmt: skip
_OUT_OF = {"o_proj", "down_proj"}  # divided by input, so that their biases are not


def weight_placement(config: DecoderConfig, mesh: Mesh | AbstractMesh) -> Rule:
    """Returns a function that gives the placement of each weight of a decoder on a mesh.

    The axis "tensor" divides projections by heads (queries, keys and values by KV heads, the output
    by query heads), those of the MLP by its width, and the embedding and the output projection
    by the vocabulary. A weight that it does not divide evenly is on all of its devices, like the
    norms. The axis "data" divides no weight.

    Args:
      config: configuration of the decoder.
      mesh: a mesh with the axes "data" and "tensor", or one of them.

    Raises:
      TypeError, ValueError: no mesh, or one with other axes.

    Example:
      >>> import jax
      >>> from jax.sharding import AbstractMesh
      >>> from kvjax.models import DecoderConfig, RopeConfig
      >>> from kvjax.models.placement import weight_placement
      >>> config = DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128)
      >>> rule = weight_placement(config, AbstractMesh((2, 2), ("data", "tensor")))
      >>> tuple(rule(("layers", 0, "mlp", "gate_up_proj", "kernel")).spec)
      ('tensor',)
    """
    mesh = check_mesh(mesh)
    tensor = mesh.shape.get(TENSOR, 1)
    units = {
        "qkv_proj": config.kv_heads, "o_proj": config.query_heads,
        "gate_up_proj": config.intermediate_size, "down_proj": config.intermediate_size,
        "embed": config.vocab_size, "lm_head": config.vocab_size,
    }  # fmt: skip

    def rule(path: ParameterPath) -> NamedSharding:
        module, name = str(path[-2]), path[-1]
        rows = (config.query_heads // config.kv_heads + 2) * config.head_dim
        if module == "qkv_proj" and config.kv_heads % tensor and rows % tensor == 0:
            # Parts of heads: XLA gathers them before attention, which such a mesh does not divide.
            return NamedSharding(mesh, P(None, TENSOR))
        divides = tensor > 1 and module in units and units[module] % tensor == 0
        if not divides or (name == "bias" and module in _OUT_OF):
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, _DIVIDED[module])

    return rule


def on_mesh(model: Decoder, mesh: Mesh) -> Decoder:
    """Moves a decoder's weights onto a mesh, as `from_pretrained(mesh=)` places them.

    Args:
      model: a decoder on any devices.
      mesh: as for `weight_placement`.

    Raises:
      TypeError, ValueError: no mesh, or one with other axes.

    Example:
      >>> import jax
      >>> from kvjax.models import DecoderConfig, RopeConfig, on_mesh, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> model = on_mesh(model, jax.make_mesh((1, 1), ("data", "tensor")))
      >>> dict(model.embed.embedding.get_value().sharding.mesh.shape)
      {'data': 1, 'tensor': 1}
    """
    rule = weight_placement(model.config, mesh)
    graphdef, state = nnx.split(model)
    moved = {}
    for path, variable in nnx.to_flat_state(state):
        x, sharding = variable.get_value(), rule(path)
        if sharding.is_fully_addressable:
            x = jax.device_put(x, sharding)
        else:  # other processes hold a part of the mesh
            x = put(x, sharding.mesh, *sharding.spec)
        moved[path] = variable.replace(x)
    return nnx.merge(graphdef, nnx.from_flat_state(moved))
