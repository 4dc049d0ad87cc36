"""Chooses the next token from logits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.checks import check_count, check_number
from kvjax.messages import brief

_ALL = 2**31 - 1  # a `top_k` that cuts nothing
_TRANSFORMERS_TOP_K = 50  # default of `transformers` 5 for a model that draws and gives no `top_k`

# The settings of `generation_config.json`, in four groups. kvjax lacks any other setting.
_SUPPORTED = frozenset(
    {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
)
# Settings that change nothing in kvjax: the length of a text, which every call gives itself; tokens
# that begin and end it; what is returned; how it is computed; and details of beam search.
_WITHOUT_EFFECT = frozenset(
    """
    max_length max_new_tokens max_time bos_token_id eos_token_id pad_token_id decoder_start_token_id
    use_cache cache_implementation cache_config max_cache_len return_legacy_cache
    return_dict_in_generate num_return_sequences output_attentions output_hidden_states
    output_scores output_logits transformers_version trust_remote_code compile_config
    disable_compile continuous_batching_config low_memory prefill_chunk_size use_mtp
    early_stopping length_penalty diversity_penalty num_beam_groups
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
    prompt_lookup_num_tokens max_matching_ngram_size speculation_type
    """.split()
)
# Settings that kvjax lacks, each with the value at which it changes nothing.
_NEUTRAL = {
    "num_beams": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0,
    "min_new_tokens": 0, "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "guidance_scale": 1.0, "penalty_alpha": 0.0,
}  # fmt: skip
# Settings that kvjax lacks and that change nothing if the choice is greedy.
_ONLY_DRAWN = frozenset({"typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"})


@dataclass(frozen=True)
class Sampling:
    """The way tokens are chosen: greedily, or by draws from the softmax of `logits / temperature`.

    Draws can be restricted to the likely tokens. The cuts apply in this order, each to the tokens
    that the one before it kept: `top_k`, `top_p`, `min_p`. A token that is exactly as likely as the
    last one kept is kept too. The repetition penalty comes before the temperature, and works at
    temperature 0 as well.

    Args:
      temperature: 0 (the default) takes the most likely token, and so does any temperature that is
        0 in float32.
      top_k: keeps the k most likely tokens.
      top_p: keeps the smallest set of most likely tokens whose probability reaches `top_p`.
      min_p: keeps tokens that are at least `min_p` times as likely as the most likely one.
      repetition_penalty: changes the logit of every token that the row has read or written before:
        a logit above 0 is divided by it, one below 0 is multiplied by it, as `transformers` does.
        1 changes nothing.

    Raises:
      TypeError: `top_k` is not an int.
      ValueError: a number is out of its range, or there is a cut at temperature 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from kvjax import Sampling
      >>> logits = jnp.array([[0.0, 3.0, 1.0]])
      >>> Sampling().choose(logits, jax.random.split(jax.random.key(0), 1)).tolist()
      [1]
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        check_number("repetition_penalty", self.repetition_penalty, above=0)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None:
            check_count("top_k", self.top_k, 1)
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, most=1)
        cuts = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and cuts:
            raise ValueError(f"{cuts[0]} needs a temperature above 0; at 0 the choice is greedy")

    @property
    def numbers(self) -> Numbers:
        """The settings as arrays, so that other numbers compile nothing."""
        cuts = any(x is not None for x in (self.top_k, self.top_p, self.min_p))
        return Numbers(
            temperature=np.float32(self.temperature),
            cuts=np.bool_(cuts),
            top_k=np.int32(min(self.top_k or _ALL, _ALL)),
            top_p=np.float32(1.0 if self.top_p is None else self.top_p),
            min_p=np.float32(self.min_p or 0.0),
            repetition_penalty=np.float32(self.repetition_penalty),
        )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Sampling:
        """Makes the sampling that a model asks for, in the names of `generation_config.json`.

        As in `transformers`, the choice is greedy unless `do_sample` is true. If it is, the
        temperature is 1 and `top_k` 50 by default. A repetition penalty counts in both cases.
        `kvjax.models.load_sampling` reads the settings of a model.

        Args:
          settings: names and values; None stands for a setting that is not given.

        Raises:
          ValueError: a number is out of its range, or a setting that kvjax lacks would change the
            text, such as `no_repeat_ngram_size`; the message names all of these.

        Example:
          >>> from kvjax import Sampling
          >>> Sampling.from_settings({"do_sample": True, "temperature": 0.6, "top_k": 20}).top_k
          20
        """
        unsupported = unsupported_settings(settings)
        if unsupported:
            named = ", ".join(f"{name} = {brief(value)}" for name, value in unsupported.items())
            raise ValueError(f"kvjax has no {named}; a kvjax.Sampling of the other settings can be "
                             "made by hand")  # fmt: skip
        numbers = {"repetition_penalty": settings.get("repetition_penalty")}
        if settings.get("do_sample"):
            defaults = {
                "temperature": 1.0,
                "top_k": _TRANSFORMERS_TOP_K,
                "top_p": None,
                "min_p": None,
            }
            for name, default in defaults.items():
                value = settings.get(name)
                numbers[name] = default if value is None else value
            if numbers["top_k"] == 0:  # means in `transformers` that nothing is cut
                numbers["top_k"] = None
        return cls(**{name: value for name, value in numbers.items() if value is not None})

    def choose(
        self,
        logits: Float[Array, "B V"],
        keys: Key[Array, " B"],
        seen: Bool[Array, "B V"] | None = None,
    ) -> Int[Array, " B"]:
        """Chooses one token per row, drawn with that row's key.

        Args:
          logits: logits of the next token.
          keys: one random key per row.
          seen: which tokens each row has read or written, for the repetition penalty.

        Raises:
          ValueError: there is a repetition penalty, and `seen` is None.
        """
        if seen is None:
            if self.repetition_penalty != 1:
                raise ValueError("a repetition_penalty needs seen, the tokens of each row so far")
            seen = jnp.zeros(logits.shape, bool)
        return self.numbers.choose(logits, keys, seen)[0]

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the logits with -inf for every token that may not be drawn."""
        return self.numbers.cut(logits)


class Numbers(NamedTuple):
    """A `Sampling` as arrays, so that one program serves all numbers.

    Args:
      temperature: 0 is greedy.
      cuts: whether any of `top_k`, `top_p` and `min_p` is given.
      top_k, top_p, min_p: as in `Sampling`; the largest int32, 1 and 0 cut nothing.
      repetition_penalty: as in `Sampling`; 1 changes nothing.
    """

    temperature: Float[Array, ""] | np.number
    cuts: Bool[Array, ""] | np.bool_
    top_k: Int[Array, ""] | np.number
    top_p: Float[Array, ""] | np.number
    min_p: Float[Array, ""] | np.number
    repetition_penalty: Float[Array, ""] | np.number

    def choose(
        self, logits: Float[Array, "B V"], keys: Key[Array, " B"], seen: Bool[Array, "B V"]
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        """Chooses one token per row; returns also whether the row's highest logit is finite.

        The token is drawn with the row's key; at temperature 0 it is the most likely one.
        """
        logits = self.penalised(logits, seen)
        return jax.lax.cond(
            self.temperature > 0, self._draw, lambda logits, keys: most_likely(logits), logits, keys
        )

    def penalised(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"]
    ) -> Float[Array, "B V"]:
        """Returns the logits in float32, with the repetition penalty on those of `seen` tokens."""

        def penalise(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
            penalty = self.repetition_penalty
            return jnp.where(
                seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits
            )

        logits = logits.astype(jnp.float32)
        return jax.lax.cond(self.repetition_penalty != 1, penalise, lambda x: x, logits)

    def _draw(
        self, logits: Float[Array, "B V"], keys: Key[Array, " B"]
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        """Draws one token per row; returns also whether the row's highest logit is finite."""
        # Differences to the highest logit: divided by a tiny temperature, they become 0 or -inf,
        # while the logits themselves could become infinite.
        highest = logits.max(-1)  # NaN if any logit is NaN
        logits = (logits - highest[:, None]) / self.temperature
        logits = jax.lax.cond(self.cuts, self.cut, lambda x: x, logits)
        drawn = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
        return drawn, jnp.isfinite(highest)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the logits with -inf for every token that may not be drawn."""
        vocab_size = logits.shape[-1]
        ordered = jnp.sort(logits, axis=-1, descending=True)
        # top_k: the limit is the k-th highest logit.
        last = jnp.clip(self.top_k, 1, vocab_size) - 1
        limit = jax.lax.dynamic_slice_in_dim(ordered, last, 1, axis=1)
        logits = jnp.where(logits < limit, -jnp.inf, logits)
        ordered = jnp.where(ordered < limit, -jnp.inf, ordered)
        # top_p: the limit is the logit of the last token before which the share is not reached.
        share = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share  # probability of the tokens ranked before
        reached = (before >= self.top_p) & (self.top_p < 1)  # at 1, rounding could cut tokens
        limit = jnp.where(reached, jnp.inf, ordered).min(-1, keepdims=True)
        logits = jnp.where(logits < limit, -jnp.inf, logits)
        # min_p: logits differ by the logarithm of the ratio of probabilities.
        limit = logits.max(-1, keepdims=True) + jnp.log(self.min_p)
        return jnp.where(logits < limit, -jnp.inf, logits)


def most_likely(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Returns the most likely token of each row, and whether its logit is a finite number.

    `argmax` takes a NaN for the highest number, so that this one logit shows whether any is NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.generation.sampling import most_likely
      >>> [x.tolist() for x in most_likely(jnp.array([[0.0, 2.0, 1.0], [0.0, 1.0, jnp.nan]]))]
      [[1, 2], [True, False]]
    """
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    highest = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, jnp.isfinite(highest)


def unsupported_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a model that would change its text and that kvjax does not have.

    Args:
      settings: as in `Sampling.from_settings`.

    Example:
      >>> from kvjax.generation.sampling import unsupported_settings
      >>> unsupported_settings({"temperature": 0.6, "num_beams": 1, "no_repeat_ngram_size": 3})
      {'no_repeat_ngram_size': 3}
    """
    known = _SUPPORTED | _WITHOUT_EFFECT
    return {
        name: value
        for name, value in settings.items()
        if name not in known and value not in (None, False, [], _NEUTRAL.get(name))
        and not (name in _ONLY_DRAWN and not settings.get("do_sample"))
        and not name.startswith("_")
    }  # fmt: skip


F = TypeVar("F", bound=Callable[..., Any])


def sampling_apart(function: F) -> F:
    """Makes a function refuse settings of `Sampling` that are given as its own arguments.

    Raises:
      TypeError: when the function is called with such a setting; says how to give it.

    Example:
      >>> import kvjax
      >>> kvjax.generate(None, [[1]], temperature=0.7)
      Traceback (most recent call last):
      ...
      TypeError: generate takes temperature by sampling=kvjax.Sampling(temperature=0.7)
    """
    names = {field.name for field in dataclasses.fields(Sampling)}

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if given := [name for name in options if name in names]:
            settings = ", ".join(f"{name}={brief(options[name])}" for name in given)
            raise TypeError(
                f"{function.__name__} takes {' and '.join(given)} by "
                f"sampling=kvjax.Sampling({settings})"
            )
        return function(*args, **options)

    return call  # type: ignore[return-value]  # it has the signature of `function`
