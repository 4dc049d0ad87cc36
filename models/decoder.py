"""The decoder: one Flax NNX module for every family, with kvjax as its attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.attention.layer import Cache, check_layer_cache
from kvjax.generation.pruning import drops_tokens, pass_on, states_at, whole_prompt
from kvjax.protocol import Phase

from .blocks import DecoderLayer, Linear, RMSNorm, soft_capped, wants_prediction
from .config import DecoderConfig
from .rope_scaling import RopeLengths


@functools.partial(jax.jit, static_argnums=0, static_argnames=("layer", "phase", "last"))
def _run_block(
    graph: nnx.GraphDef,
    weights: nnx.State,
    x: Float[Array, "B T C"],
    positions: Int[Array, "B T"],
    cache: Cache,
    predicted_query: Float[Array, "B Q T D"] | None,
    **options: Any,
) -> tuple[Float[Array, "B T C"], Cache]:
    """Runs a block; it is traced and lowered once for all layers that are alike.

    XLA inlines it at its calls.
    """
    block = nnx.merge(graph, weights)
    return block(x, positions, cache, predicted_query=predicted_query, **options)


class Decoder(nnx.Module):
    """A causal language model that keeps its keys and values in kvjax caches.

    The module holds weights only; caches are arguments and results. For speed, split it once and
    run `jax.jit` over the pair (`graphdef, state = nnx.split(model)`): dispatch then costs a
    fraction of that of `nnx.jit`.

    Args:
      config: configuration of the decoder.
      dtype: dtype of the weights and of the computation between them; norms, softmax and logits are
        always float32.
      rngs: source of the random initial weights; None: only the embeddings are random, and the
        other matrices zero.

    Attributes:
      config: configuration of the decoder.
      num_layers, query_heads, kv_heads, head_dim, vocab_size, max_positions, windows, length_class,
        attention_scale, attention_soft_cap:
        settings from `config` that `kvjax.generate` reads of any model.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> from flax import nnx
      >>> from kvjax.models import Decoder, DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> layers = kvjax.bind(kvjax.Full(), model.num_layers)
      >>> caches = tuple(kvjax.init_cache(layer, batch=1, kv_heads=2, head_dim=8, max_prompt=3,
      ...                max_new=2, dtype=jnp.float32, query_heads=4) for layer in layers)
      >>> call = nnx.jit(Decoder.__call__, static_argnames=("layers", "phase"))
      >>> logits, caches = call(model, jnp.array([[5, 6, 7]]), jnp.array([[0, 1, 2]]), caches,
      ...                       layers=layers, phase="prompt")
      >>> logits.shape
      (1, 3, 64)
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None
    ) -> None:
        dtype = jnp.dtype(dtype)  # one spelling: equal decoders share compiled code
        self.config = config
        self.num_layers = config.num_layers
        self.query_heads, self.kv_heads = config.query_heads, config.kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed = nnx.Embed(vocab, hidden, param_dtype=dtype, rngs=rngs or nnx.Rngs(0))
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config, hidden, dtype)
        if not config.tie_embeddings:
            self.lm_head = Linear(
                hidden, vocab, bias=False, dtype=dtype, rngs=rngs, accumulate=jnp.float32
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        caches: tuple[Cache, ...],
        *,
        layers: tuple[kvjax.KVTransform, ...],
        phase: Phase,
        last: bool = True,
        logits_at: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N V"], tuple[Cache, ...]]:
        """Runs new tokens through the model.

        Args:
          tokens: token ids `[B, T]`; ids at padding are ignored.
          positions: token positions `[B, T]`, −1 for padding, which may be anywhere in a row.
          caches: one cache per layer, from `kvjax.init_cache` or an earlier call.
          layers: one transform per layer, from `kvjax.bind`.
          phase: `"prompt"` for a prompt or a chunk of it, `"probe"` for tokens that look at it and
            are not stored, `"decode"` for tokens after it.
          last: whether this is the prompt's last chunk.
          logits_at: token indices `[B, N]` (0 to T − 1) to return logits for; by default all T. The
            output projection is computed there only, so that a prompt costs one row of logits
            instead of T.

        Returns:
          Logits `[B, T, V]` or `[B, N, V]` in float32 (meaningless at padding), and the
          caches with the new tokens. A transform may drop tokens of a prompt before the next layer
          (PyramidInfer, if the prompt is read in one piece): their logits are 0.

        Raises:
          TypeError: caches or layers are not tuples, or a cache is not from `kvjax.init_cache`.
          ValueError: shapes do not fit, or the number of caches or transforms is not that of
            layers.
        """
        self._check(tokens, positions, caches, layers, logits_at)
        x = self.embed_tokens(tokens, positions)
        is_whole_prompt, reaching_positions = whole_prompt(caches, phase, last), positions
        written, below = [], None
        for block, layer, cache in zip(self.layers, layers, caches, strict=True):
            # Only decode steps select slots, so only they need predicted queries.
            predicted = None
            if phase == "decode" and below is not None and wants_prediction(layer):
                predicted = block.predict_queries(*below)
            below = block, x
            x, cache = _run_block(
                *nnx.split(block), x, reaching_positions, cache, predicted,
                layer=layer, phase=phase, last=last,
            )  # fmt: skip
            written.append(cache)
            if is_whole_prompt and len(written) < self.num_layers and drops_tokens(layer, cache):
                x, reaching_positions = pass_on(x, reaching_positions, kvjax.kept_tokens(cache))
        if reaching_positions is not positions:  # some tokens were dropped between layers
            if logits_at is not None:
                positions = jnp.take_along_axis(positions, logits_at, axis=1)
            x = states_at(x, reaching_positions, positions)
        elif logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
        return self.head(x), tuple(written)

    windows = property(lambda self: self.config.windows)
    attention_scale = property(lambda self: self.config.attention_scale)
    attention_soft_cap = property(lambda self: self.config.attention_soft_cap)
    length_class = property(lambda self: RopeLengths.of(self.config))

    def embed_tokens(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Returns the residual stream as it enters the first layer."""
        # A padding token may be outside the table (a [PAD] added without resizing the model). Its
        # embedding would be NaN, and NaN survives a masked sum.
        x = self.embed(jnp.where(positions >= 0, tokens, 0))
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def head(self, x: Float[Array, "B N C"]) -> Float[Array, "B N V"]:
        """Returns logits of the last layer's output: final norm and output projection."""
        return self.logits(self.norm(x))

    def logits(self, x: Float[Array, "B N C"]) -> Float[Array, "B N V"]:
        """Projects normalised states to logits, in float32, with the soft cap."""
        if not self.config.tie_embeddings:
            return soft_capped(self.lm_head(x), self.config.logit_soft_cap)
        table = self.embed.embedding[...]
        logits = jnp.einsum("bnc,vc->bnv", x, table, preferred_element_type=jnp.float32)
        return soft_capped(logits, self.config.logit_soft_cap)

    def _check(
        self,
        tokens: Array,
        positions: Array,
        caches: tuple,
        layers: tuple,
        logits_at: Array | None,
    ) -> None:
        if tokens.ndim != 2 or tokens.shape != positions.shape:
            raise ValueError(
                "tokens and positions must have one shape [B, T], got "
                f"{tokens.shape} and {positions.shape}"
            )
        for name, entries in (("caches", caches), ("layers", layers)):
            if not isinstance(entries, tuple | list):
                type_name = type(entries).__name__
                raise TypeError(f"{name} must be a tuple, one entry per layer, got {type_name}")
            if len(entries) != self.num_layers:
                raise ValueError(f"{name} must have {self.num_layers} entries, got {len(entries)}")
        for number, cache in enumerate(caches):
            check_layer_cache(cache, f"layer {number}")
        if logits_at is not None and (logits_at.ndim != 2 or len(logits_at) != len(tokens)):
            raise ValueError(
                f"logits_at must have the shape [{len(tokens)}, N], got {logits_at.shape}"
            )
