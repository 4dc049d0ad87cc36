"""Measures what methods learn from a model, and keeps it in files that other weights refuse."""

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

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvjax.attention.layer import Reading
from kvjax.attention.prompt import step_of
from kvjax.calibration import Calibration, Learner
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.compose.origins import origin
from kvjax.compose.walks import learners, map_methods, walk
from kvjax.devices import automatic
from kvjax.files import VERSION, check_regular, user_cache, write_whole
from kvjax.generation.compiler import Compiler
from kvjax.generation.documents import Document, words_of
from kvjax.generation.fingerprints import Fingerprint, checksum, differences
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.prompt_checks import as_rows, check_positions, check_prompts
from kvjax.generation.turns import Start, first_turn
from kvjax.messages import brief
from kvjax.protocol import Full, KVTransform, MethodHeads
from kvjax.registry import as_transform, parse, unparse
from kvjax.serialization import from_json, to_json

CALIBRATION_TOKENS = 1024
"""Tokens at the beginning of a prompt that serve as the sample where no other text does."""

FORMAT = "kvjax calibration 1"
_MOST_BYTES = 2**26
_ANY_BUDGET = 0.5  # of a method whose calibration serves all budgets
SAMPLE_TEXTS = 3  # pieces of a text that are the sample of what is kept
KEPT = "calibrations"  # folder in the user's cache

Texts = Sequence[Sequence[int]]
OnMade = Callable[[Learner, float], None]
"""Is called with a method whose calibration has been made, and the seconds that it took."""


def calibrated(
    transform: KVTransform | str,
    model: LanguageModel | FunctionalModel,
    sample: Texts,
    *,
    document: Document | None = None,
    on_made: OnMade | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> KVTransform:
    """Returns the composition in which every method has the calibration that it needs.

    Such methods are `InfiniGen`, `ByHead`, `Chelsea` with a threshold for outlier heads, and those
    of your own that have a `kvjax.kit.Calibration`. A calibration is read from the file that a
    method names, or made from the sample. A profile of heads is then kept in the user's cache
    folder, and found there for the same weights, method and sample.

    Args:
      transform: any, or its text as in `kvjax.generate`.
      model: as for `kvjax.generate`; is called only if a calibration has to be made.
      sample: token ids of some texts; of a thousand tokens or more for a profile of heads.
      document: as in `kvjax.read`, for methods with a probe.
      on_made: called with a method whose calibration has been made, and the seconds that it took.
      on_layer: called with the number of each layer once it has read a text, text after text.

    Raises:
      TypeError, ValueError: what `kvjax.generate` raises for prompts; a model or texts from which a
        method cannot learn; the file of a calibration holds none that fits; what is to be kept is
        of a method without a name (`kvjax.register`).

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> tx = kvjax.calibrated("chain(snapkv(budget=64), infinigen)", model, [list(range(64))])
      >>> tx.parts[1].calibration.projections.shape[:3]
      (3, 2, 8)
    """
    transform = as_transform(transform, "calibrated")
    return completed(transform, model, lambda _: sample, document, on_made, on_layer)


def completed(
    transform: KVTransform,
    model: LanguageModel | FunctionalModel,
    sample: Callable[[Learner], Texts | None],
    document: Document | None = None,
    on_made: OnMade | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> KVTransform:
    """Does what `calibrated` does, with a sample for each method.

    A calibration is kept in the user's cache (see `kvjax.files.user_cache`). The file's name is a
    checksum of the weights, the method that makes the calibration (`Learner.source`) with all its
    parameters and its origin (`kvjax.compose.origins`), the sample and the words of its probe.
    Without such a folder, and for a method whose source cannot be read, it is made each time.

    Args:
      sample: is called with a method that has to learn; None: it does not.
    """

    def made(method: Learner) -> Calibration | None:
        texts = sample(method)
        if texts is None:
            return None
        source = method.with_learned(None).source()
        text = _text(method, defaults=True) if method.kept else ""
        path, root = None, user_cache() if method.kept else None
        if root is not None and (method_origin := origin(source))["source"] is not None:
            made_from = {
                "origin": method_origin,
                "format": FORMAT,
                "model": Fingerprint.of(as_functional(model)).digest,
                "method": text,
                "sample": [[int(token) for token in text] for text in texts],
                "instructions": _instructions(source, document),
            }
            path = root / KEPT / f"{checksum(made_from)}.safetensors"
            if path.exists():
                with contextlib.suppress(ValueError):  # it is damaged, and made again
                    return load_calibration(path, model)
        start = time.monotonic()
        calibration = measured(method, model, texts, document, on_layer)
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                save_calibration(path, method.with_learned(calibration), model)
        if on_made is not None:
            on_made(method, time.monotonic() - start)
        return calibration

    # Files come first: what they are refused for costs nothing.
    transform = with_named(transform, model)
    return with_missing(transform, model, lambda method: _named(method, model) or made(method))


def _instructions(method: KVTransform, document: Document | None) -> list[list[int]]:
    """Returns the tokens with which the method's probe asks."""
    probe, words = method.needs.probe, words_of(document)
    if probe is None or words is None:
        return []
    return [[int(token) for token in words(text)] for text in probe.instructions]


def with_named(transform: KVTransform, model: Any, *, weights: bool = True) -> KVTransform:
    """Returns the composition in which every calibration that is named is read from its file.

    Args:
      model: the model; its configuration will do if its weights are not compared.
      weights: whether they must be those that the calibration is of.

    Raises:
      ValueError: a file holds no calibration, or one of another model or method.
    """
    return with_missing(transform, model, lambda method: _named(method, model, weights))


def with_missing(
    transform: KVTransform, model: Any, calibration_for: Callable[[Learner], Calibration | None]
) -> KVTransform:
    """Returns the composition in which each method that lacks a calibration has the one for it.

    Inner methods come before those around them, which learn from what they do.

    Args:
      calibration_for: is called once for each different method that lacks its calibration, or has
        the path of one; None leaves it, and what is around it, as they are.
    """
    left: set[KVTransform] = set()
    while True:
        methods = learners(transform, lambda: model.num_layers)
        lacking = [x for x in methods if x.lacks_calibration and left.isdisjoint(walk(x))]
        if not lacking:
            return transform
        calibration = calibration_for(lacking[-1])
        if calibration is None:
            left.add(lacking[-1])
        else:
            transform = map_methods(_With(lacking[-1], calibration), transform)


@dataclass(frozen=True)
class _With:
    """Gives a method its calibration; a function for `map_methods`."""

    learner: Learner
    calibration: Calibration

    def __call__(self, method: KVTransform, heads: MethodHeads) -> KVTransform:
        return self.learner.with_learned(self.calibration) if method == self.learner else method


@automatic()
def measured(
    method: Learner,
    model: LanguageModel | FunctionalModel,
    sample: Texts,
    document: Document | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> Any:
    """Makes the calibration of one method for a model.

    Args:
      method: the method, which learns.
      model, sample, document, on_layer: as in `calibrated`.
    """
    functional, texts = as_functional(model), as_rows(sample)
    check_prompts(functional, texts, (Full(),), 0)
    lengths = [len(text) for text in texts]
    layers = bind(method.reader(functional, lengths), functional.num_layers)
    check_positions(functional, layers, max(lengths), 0)
    observed = []
    for text, width in zip(texts, lengths, strict=True):
        size = CacheSize.of(functional, 1, width, 0, method.dtype, width)
        start, compiler = Start(layers[0], layers, size, [width]), Compiler(on_layer=on_layer)
        context = first_turn(functional, [text], start, compiler, document, last=False)
        observed.append([jax.device_get(_observed(method, x)) for x in context.held])
    return method.learn(functional, observed)


@compiled(static_argnums=0)
def _observed(method: Learner, reading: Reading) -> Any:
    """Returns the arrays that a method observes when a layer has read a text."""
    return method.observe(reading.transform, reading.kv, reading.cache.state, step_of(reading))


def save_calibration(
    path: str | os.PathLike[str],
    transform: KVTransform,
    model: LanguageModel | FunctionalModel,
) -> None:
    """Writes a method's calibration to a safetensors file, from which other processes take it.

    A method takes it by the path, such as `ByHead(KVzip(0.05), "heads.safetensors")`. The file has
    all parameters of the method that it depends on, so that it is refused for another method, and
    once a default has changed; and the description of the model, by which it is refused for other
    weights.

    Args:
      path: the file. One that is there is replaced.
      transform: from `kvjax.calibrated`; the outermost calibration in it is written.
      model: the model that it is of.

    Raises:
      OSError: the file cannot be written.
      ValueError: there is no calibration, or the method has no name (`kvjax.register`).

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> tx = kvjax.calibrated(kvjax.ByHead(kvjax.KVzip(0.5)), model, [list(range(64))])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.save_calibration(f"{folder}/heads.safetensors", tx, model)
      ...     kvjax.load_calibration(f"{folder}/heads.safetensors", model) == tx.profile
      True
    """
    methods = [x for x in walk(transform) if isinstance(x, Learner) and x.learned is not None]
    if not methods or methods[0].lacks_calibration:
        raise ValueError(
            "save_calibration takes a transform with a calibration, such as kvjax.calibrated "
            f"returns, got {brief(transform)}"
        )
    calibration = methods[0].learned
    about = {
        "format": FORMAT,
        "kvjax": VERSION,
        "method": _text(methods[0], defaults=True),
        "others": json.dumps(others_of(calibration)),
        "model": json.dumps(Fingerprint.of(as_functional(model)).content),
    }
    # Written here, since errors of safetensors' own writing are not OSErrors.
    write_whole(Path(path), save(calibration.arrays, metadata=about))


def load_calibration(path: str | os.PathLike[str], model: LanguageModel | FunctionalModel) -> Any:
    """Reads the calibration that `save_calibration` or `kvjax profile` wrote.

    Args:
      path: the file.
      model: the model that it is for.

    Returns:
      The value of the method's field, such as a `kvjax.kit.HeadProfile`.

    Raises:
      ValueError: there is no such file, it holds no calibration, or it is of another model; says
        what differs. Or an earlier version wrote it, with other parameters of its method: nobody
        can tell whether their defaults were those of today.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> table = np.array([[[0.8, 1.0], [0.0, 1.0]], [[0.2, 1.0], [0.4, 1.0]]])
      >>> tx = kvjax.ByHead(kvjax.KVzip(0.5), kvjax.kit.HeadProfile(table))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.save_calibration(f"{folder}/heads.safetensors", tx, model)
      ...     profile = kvjax.load_calibration(f"{folder}/heads.safetensors", model)
      >>> kvjax.ByHead(kvjax.KVzip(0.1), profile).profile.shape  # layers and KV heads
      (2, 2)
    """
    return _read(Path(path), model)[0]


def _named(method: Learner, model: Any, weights: bool = True) -> Calibration | None:
    """Returns the calibration in the file that a method names, if it does; see `with_named`."""
    path, kind = method.learned, method.learns[1].__name__
    if path is None:
        return None
    if not Path(path).exists():
        raise ValueError(
            f"there is no {kind} at {path}: kvjax profile writes profiles of heads, and "
            "kvjax.save_calibration any calibration"
        )
    calibration, belongs_to = _read(Path(path), model if weights else None)
    if (there := _text(belongs_to)) != (here := _text(method)):
        raise ValueError(f"the {kind} in {path} is of {there}, and {here} needs one of its own")
    calibration.check_model(model.num_layers, model.kv_heads)
    return calibration


def _read(path: Path, model: Any) -> tuple[Calibration, Learner]:
    """Reads a calibration and the method that it belongs to; `model` None: of any model."""
    check_regular(path, _MOST_BYTES)
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(
                    f"{path} holds no calibration: it has the format {about.get('format')!r}, and "
                    f"kvjax {VERSION} reads {FORMAT!r}"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            others, there = json.loads(about["others"]), json.loads(about["model"])
            version, text = about["kvjax"], about["method"]
    except (SafetensorError, OSError, KeyError) as error:
        raise ValueError(f"{path} holds no calibration: {error}") from error
    here = there if model is None else Fingerprint.of(as_functional(model)).content
    if differing := differences(there, here):
        raise ValueError(f"the calibration in {path} is of another model: its {differing}")
    try:
        method: Any = parse(text, _ANY_BUDGET, defaults=False)
        return from_arrays(method, arrays, others), method
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the calibration in {path}, which kvjax {version} wrote, is of {text}, which kvjax "
            f"{VERSION} does not read: {error}. Make another"
        ) from error


def others_of(calibration: Calibration) -> dict[str, Any]:
    """Returns the fields of a calibration that are not arrays, as JSON holds them."""
    return {name: to_json(x) for name, x in calibration.others.items()}


def from_arrays(
    method: Learner, arrays: dict[str, np.ndarray], others: dict[str, Any]
) -> Calibration:
    """Makes a method's calibration from its arrays and from what `others_of` has returned."""
    return method.learns[1](**arrays, **{name: from_json(x) for name, x in others.items()})


def _text(method: Learner, *, defaults: bool = False) -> str:
    """Returns the text of a method, by what its calibration depends on.

    It is without budgets. Parameters that change no score have their defaults. Calibrations of
    inner methods stand as their ids.

    Args:
      defaults: whether parameters at their defaults are written, as in files.

    Raises:
      ValueError: a method has no name.

    Example:
      >>> import kvjax
      >>> from kvjax.generation.calibration import _text
      >>> _text(kvjax.ByHead(kvjax.chain(kvjax.KVzip(0.1, room=64), kvjax.Quantize())))
      'by_head(kvzip)'
      >>> _text(kvjax.ByHead(kvjax.SnapKV(0.1, window=8)))
      'by_head(snapkv(window=8))'
    """
    source = map_methods(_plain, method.with_learned(None).source())
    return unparse(source, budget=False, defaults=defaults)


def _plain(method: KVTransform, heads: MethodHeads) -> KVTransform:
    """Resets parameters that change no score; a function for `map_methods`."""
    fields: Any = [x for x in dataclasses.fields(method) if x.name in method.card.unscored]
    method = dataclasses.replace(method, **{x.name: x.default for x in fields})
    if isinstance(method, Learner) and isinstance(method.learned, Calibration):
        return method.with_learned(method.learned.id)
    return method


def sample_of(text: Sequence[int] | np.ndarray, max_positions: int | None) -> list[list[int]]:
    """Cuts a long text into a sample for profiles: three pieces of up to 1,024 tokens.

    They come from all over the text. A model with few positions gets shorter ones, since
    what looks at a piece follows it.

    Args:
      text: token ids.
      max_positions: of the model; None: no limit.
    """
    most = CALIBRATION_TOKENS
    if max_positions is not None:
        most = min(most, max_positions // 2 - 64)
    size = max(min(most, len(text) // SAMPLE_TEXTS), 1)
    step = (len(text) - size) // (SAMPLE_TEXTS - 1)
    return [list(text[n * step : n * step + size]) for n in range(SAMPLE_TEXTS)]
