"""Profiles of a model's heads in files: made once, found again, refused for other weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

import kvjax
from kvjax.attention.layer import Reading
from kvjax.attention.prompt import step_of
from kvjax.budgets.profile import ladder, profile
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.compose.by_head import ByHead, HeadProfile
from kvjax.compose.foreseen import foreseen
from kvjax.compose.walks import MethodHeads, chosen, map_methods, walk
from kvjax.compose.wrappers import PerLayer
from kvjax.decisions import made_by
from kvjax.devices import automatic
from kvjax.files import check_regular, user_cache, write_whole
from kvjax.generation.compiler import Compiler
from kvjax.generation.fingerprints import Fingerprint, checksum, differences
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.prompt_checks import check_prompts
from kvjax.generation.repetition import Repetition
from kvjax.generation.turns import begin
from kvjax.messages import brief
from kvjax.origins import origin
from kvjax.protocol import KVTransform
from kvjax.registry import as_transform, parse, unparse

FORMAT = "kvjax head profile 1"
_MOST_BYTES = 2**26
_ANY_BUDGET = 0.5  # of a method whose scores make a profile for all budgets
SAMPLE_TEXTS, SAMPLE_TOKENS = 3, 1024  # of the text from which a profile is made

OnMade = Callable[[HeadProfile, float], None]
"""Is called with a profile that has been made, and the seconds that it took."""


@automatic()
def calibrate_heads(
    model: LanguageModel | FunctionalModel,
    transform: KVTransform | str,
    sample: Sequence[Sequence[int]],
    *,
    repetition: Repetition | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> HeadProfile:
    """Measures which share of a budget each head of a model needs, for all budgets at once.

    The model reads each text of the sample, and the method scores its tokens. The scores of all
    heads of all layers together make a ladder of thresholds. A head's share at a threshold is that
    of its tokens with higher scores, averaged over the texts; see `kvjax.budgets.profile`.

    Layers with sliding windows hold their windows, whatever the method does elsewhere (`bind`). So
    the layers without one share the budget; heads of the others get the mean share, for texts that
    are no longer than a window.

    Args:
      model: as for `kvjax.generate`.
      transform: a method that `ByHead` takes, or its text form: it keeps the tokens with the
        highest scores at a prompt's end, and leaves new ones alone, such as `KVzip` and `SnapKV`.
        Its budget does not matter.
      sample: token ids of some texts, of a thousand tokens or more.
      repetition: how the texts are repeated, if the method looks at that.
      on_layer: called with the number of each layer once it has read a text, text after text.

    Returns:
      The profile for `kvjax.ByHead`.

    Raises:
      TypeError, ValueError: what `kvjax.generate` raises for prompts; a method without scores,
        without a name, or one that `ByHead` does not take; a model all of whose layers have sliding
        windows.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> profile = kvjax.calibrate_heads(model, kvjax.KVzip(0.5), [list(range(64))])
      >>> profile.table.shape
      (2, 2, 64)
    """
    functional = as_functional(model)
    transform = as_transform(transform, "calibrate_heads")
    check_scores(transform)
    name = heads_method(transform)  # raises where there is none
    windows = functional.windows or (None,) * functional.num_layers
    whole = np.array([window is None for window in windows])  # layers without a window
    if not whole.any():
        raise ValueError(
            "calibrate_heads needs a model with layers without a sliding window, which alone hold "
            f"more than their windows, got windows of {brief(windows)}"
        )
    check_prompts(functional, sample, (transform,), 0)
    layers = bind(transform, functional.num_layers)
    scores = []
    for text in sample:
        width = len(text)
        size = CacheSize.of(functional, 1, width, 0, None, width)
        context = begin(
            functional, [text], [width], transform, layers, size, Compiler(), on_layer,
            last=False, repetition=repetition,
        )  # fmt: skip
        readings = [reading for reading, x in zip(context.caches, whole, strict=True) if x]
        scores.append(np.stack([np.asarray(_head_scores(reading)) for reading in readings]))
    of_whole = profile(scores, ladder(scores))
    table = np.tile(of_whole.mean((0, 1)), (functional.num_layers, functional.kv_heads, 1))
    table[whole] = of_whole
    return HeadProfile(table, name)


def check_scores(transform: KVTransform) -> None:
    """Raises ValueError unless a profile of heads can be made of a method's scores, and be used."""
    try:
        ByHead(dataclasses.replace(transform, budget=0.5))  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError) as error:
        raise ValueError(
            "a profile of heads needs a method that by_head takes, such as KVzip and SnapKV, got "
            f"{brief(transform)}"
        ) from error
    if getattr(foreseen(transform, "prompt"), "score", None) is None:
        raise ValueError(
            f"a profile of heads needs a method that scores tokens, got {brief(transform)}"
        )


def heads_method(method: KVTransform) -> str:
    """Returns the text of a method whose scores make a profile.

    It is without budget, and parameters that change no score have their defaults.

    Example:
      >>> import kvjax
      >>> from kvjax.generation.head_profiles import heads_method
      >>> heads_method(kvjax.KVzip(0.1, fit=True)), heads_method(kvjax.KVzip(0.1, values=False))
      ('kvzip', 'kvzip(values=False)')
    """
    unscored = {
        field.name: field.default
        for field in dataclasses.fields(method)
        if field.name in method.card.unscored
    }
    return unparse(dataclasses.replace(method, **unscored), budget=False)


def in_full(method: str) -> str:
    """Writes the method of a profile for a file, in which no parameter is left to its default.

    Raises:
      ValueError: the text names no method.

    Example:
      >>> from kvjax.generation.head_profiles import from_full, in_full
      >>> in_full("snapkv(window=8)")
      "snapkv(window=8, kernel=7, pooling='max', group_reduce='mean')"
      >>> from_full(in_full("snapkv(window=8)"))
      'snapkv(window=8)'
    """
    return unparse(parse(method, _ANY_BUDGET), budget=False, defaults=True)


def from_full(method: str) -> str:
    """Returns what `heads_method` writes today for a method that `in_full` wrote, perhaps long ago.

    Raises:
      ValueError: a parameter is missing, since an earlier version wrote the text or this one has
        more parameters; or the method has another name or other parameters today.
    """
    return heads_method(parse(method, _ANY_BUDGET, defaults=False))


@compiled()
def _head_scores(reading: Reading) -> Float[Array, "H S"]:
    """Returns the scores by which the method would keep the tokens of a prompt of one row."""
    cache, transform = reading.cache, reading.transform
    decision: Any = made_by(transform, cache.kv, cache.state, step_of(reading))[0]
    # Slots are filled in the order of tokens, and there are some for tokens that did not come.
    return decision.head_score(cache.kv)[0, :, : cache.kv.max_prompt]


def save_profile(
    path: str | os.PathLike[str], profile: HeadProfile, model: LanguageModel | FunctionalModel
) -> None:
    """Writes a profile to a safetensors file, from which `load_profile` reads it back.

    The file has the table, and as metadata the method with all its parameters, so that it is
    refused once a default has changed, and the description of the model by which it is refused for
    other weights.

    Args:
      path: the file. One that is there is replaced.
      profile: from `kvjax.calibrate_heads`.
      model: the model that it is of.

    Raises:
      OSError: the file cannot be written.
      ValueError: the profile's method is no method.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> profile = kvjax.calibrate_heads(model, kvjax.KVzip(0.5), [list(range(64))])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.save_profile(f"{folder}/heads.safetensors", profile, model)
      ...     kvjax.load_profile(f"{folder}/heads.safetensors", model) == profile
      True
    """
    path = Path(path)
    description = Fingerprint.of(as_functional(model)).content
    about = {"format": FORMAT, "kvjax": kvjax.__version__, "method": in_full(profile.method)}
    about["model"] = json.dumps(description)
    # Written here, since errors of safetensors' own writing are no OSError.
    write_whole(path, save({"table": profile.table}, metadata=about))


def load_profile(
    path: str | os.PathLike[str], model: LanguageModel | FunctionalModel
) -> HeadProfile:
    """Reads the profile that `save_profile` or `kvjax profile` wrote.

    Args:
      path: the file.
      model: the model that it is for.

    Raises:
      ValueError: there is no such file, it holds no profile, or it is of another model; says what
        differs. Or an earlier version wrote it, which did not write all parameters of its method:
        nobody can tell whether their defaults were those of today.
    """
    profile, there = _read(Path(path))
    here = Fingerprint.of(as_functional(model)).content
    if differing := differences(there, here):
        raise ValueError(f"the profile in {path} is of another model: its {differing}")
    return profile


def _read(path: Path) -> tuple[HeadProfile, dict[str, Any]]:
    """Reads a profile and the description of its model."""
    check_regular(path, _MOST_BYTES)
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(f"{path} is no profile of heads: it has no format {FORMAT!r}")
            table, model = file.get_tensor("table"), json.loads(about["model"])
            version, method = about["kvjax"], about["method"]
    except (SafetensorError, OSError, KeyError) as error:
        raise ValueError(f"{path} is no profile of heads: {error}") from error
    try:
        return HeadProfile(table, from_full(method)), model
    except ValueError as error:
        raise ValueError(
            f"the profile in {path}, which kvjax {version} wrote, is of the scores of {method}, "
            f"which kvjax {kvjax.__version__} does not read: {error}. kvjax profile makes another"
        ) from error


def sample_of(text: Sequence[int], max_positions: int | None) -> list[list[int]]:
    """Cuts a long text into the sample of a profile: three pieces of 1,024 tokens from all over it.

    A model with few positions gets shorter ones, since the repetition of a piece follows it.

    Args:
      text: token ids.
      max_positions: of the model; None: no limit.
    """
    most = SAMPLE_TOKENS if max_positions is None else min(SAMPLE_TOKENS, max_positions // 2 - 64)
    size = max(min(most, len(text) // SAMPLE_TEXTS), 1)
    step = (len(text) - size) // max(SAMPLE_TEXTS - 1, 1)
    return [list(text[n * step : n * step + size]) for n in range(SAMPLE_TEXTS)]


def kept_profile(
    model: FunctionalModel,
    method: KVTransform,
    sample: Sequence[Sequence[int]],
    repetition: Repetition | None = None,
    on_made: OnMade | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> HeadProfile:
    """Returns what `calibrate_heads` does; makes it once for all processes of a user.

    It is kept in the folder `profiles` of the user's cache (see `kvjax.files.user_cache`), under
    the checksum of the weights, the method with all its parameters and its origin
    (`kvjax.origins`), the sample and the repetition. Without such a folder, and for a method whose
    source cannot be read, it is made each time.
    """
    root, path, method_origin = user_cache(), None, origin(method)
    if root is not None and method_origin["source"] is not None:
        made_from = {
            "origin": method_origin,
            "format": FORMAT,
            "model": Fingerprint.of(model).digest,
            "method": in_full(heads_method(method)),
            "sample": [[int(token) for token in text] for text in sample],
            "repetition": dataclasses.asdict(repetition or Repetition()),
        }
        path = root / "profiles" / f"{checksum(made_from)}.safetensors"
        if path.exists():
            with contextlib.suppress(ValueError):  # it is damaged, and made again
                return load_profile(path, model)
    start = time.monotonic()
    profile = calibrate_heads(model, method, sample, repetition=repetition, on_layer=on_layer)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_profile(path, profile, model)
    if on_made is not None:
        on_made(profile, time.monotonic() - start)
    return profile


def with_profiles(
    transform: KVTransform,
    model: LanguageModel | FunctionalModel,
    sample: Callable[[], Sequence[Sequence[int]]],
    repetition: Repetition | None = None,
    on_made: OnMade | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> KVTransform:
    """Returns the composition in which every `ByHead` has a profile of the model.

    Args:
      transform: any.
      model: as for `calibrate_heads`.
      sample: gives token ids of some texts; is called only if a profile is missing.
      repetition, on_made, on_layer: as in `kept_profile`.
    """
    # Files come first: what they are refused for costs nothing.
    transform = with_named_profiles(transform, model)
    return _with_profiles(
        transform,
        lambda: as_functional(model).num_layers,
        lambda part: kept_profile(
            as_functional(model), part.method, sample(), repetition, on_made, on_layer
        ),
    )


def with_named_profiles(
    transform: KVTransform, model: LanguageModel | FunctionalModel
) -> KVTransform:
    """Returns the composition in which every `ByHead` that names a file has its profile.

    Raises:
      ValueError: a file holds no profile, or one of another model or of another method's scores.
    """
    return _with_profiles(
        transform,
        lambda: as_functional(model).num_layers,
        lambda part: None if part.profile is None else _profile_in(part, model),
    )


def with_profiles_of_files(transform: KVTransform, num_layers: int, kv_heads: int) -> KVTransform:
    """Returns the composition in which every `ByHead` that names a file has its profile.

    The weights are not compared: `with_named_profiles` does that.

    Raises:
      ValueError: a file holds no profile, or one of another method or of other layers or heads.
    """

    def profile_of(part: ByHead) -> HeadProfile | None:
        if part.profile is None:
            return None
        profile = _profile_in(part)
        layers, heads, _ = profile.table.shape
        if (layers, heads) != (num_layers, kv_heads):
            raise ValueError(
                f"the profile in {part.profile} is of another model: it has {layers} layers of "
                f"{heads} KV heads, and this one {num_layers} of {kv_heads}"
            )
        return profile

    return _with_profiles(transform, lambda: num_layers, profile_of)


def _with_profiles(
    transform: KVTransform,
    num_layers: Callable[[], int],
    profile_of: Callable[[ByHead], HeadProfile | None],
) -> KVTransform:
    """Returns the composition in which each `ByHead` without a profile has the one it is given.

    Args:
      num_layers: of the model; is asked only if something depends on it.
      profile_of: is called once for each `ByHead` with no profile, or the path of one; None leaves
        it as it is.
    """
    profiles = {part: profile_of(part) for part in _without_profile(transform, num_layers)}
    added = tuple((part, profile) for part, profile in profiles.items() if profile is not None)
    return map_methods(_WithProfile(added), transform, by_head=False) if added else transform


def _without_profile(transform: KVTransform, num_layers: Callable[[], int]) -> list[ByHead]:
    """Returns each `ByHead` of a composition that has no profile, or the path of one."""
    layers = [transform]
    # The methods of a `PerLayer` are known only once it is asked for each layer.
    if any(isinstance(part, PerLayer) for part in walk(transform)):
        number = num_layers()
        layers = [chosen(transform, layer, number) for layer in range(number)]
    parts = (part for layer in layers for part in walk(layer))
    by_head = (part for part in parts if isinstance(part, ByHead))
    return list(dict.fromkeys(x for x in by_head if not isinstance(x.profile, HeadProfile)))


def _profile_in(part: ByHead, model: LanguageModel | FunctionalModel | None = None) -> HeadProfile:
    """Returns the profile in the file that a `ByHead` names; None: of whatever model.

    Raises:
      ValueError: as `load_profile`, or the profile is of another method's scores.
    """
    path, method = str(part.profile), heads_method(part.method)
    if not Path(path).exists():
        raise ValueError(
            f"there is no profile of heads at {path}: kvjax profile --method {method!r} --out "
            f"{path} makes one, and by_head without profile= finds its own"
        )
    profile = _read(Path(path))[0] if model is None else load_profile(path, model)
    if profile.method != method:
        raise ValueError(
            f"the profile in {path} is of the scores of {profile.method}, and by_head here needs "
            f"one of {method}: kvjax profile --method {method!r} makes it"
        )
    return profile


@dataclass(frozen=True)
class _WithProfile:
    """Gives each `ByHead` its profile; a function for `map_methods`."""

    profiles: tuple[tuple[ByHead, HeadProfile], ...]

    def __call__(self, method: Any, heads: MethodHeads) -> KVTransform:
        profile = dict(self.profiles).get(method)
        return method if profile is None else dataclasses.replace(method, profile=profile)
