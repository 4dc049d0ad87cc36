"""The public calls `read`, `generate` and `stream`; `turns.py` and `decode_loop.py` do the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from kvjax.attention.dropped import check_dropped
from kvjax.checks import check_callable, check_count
from kvjax.compose.bind import bind
from kvjax.devices import automatic
from kvjax.generation.calibration import with_named
from kvjax.generation.compiler import Compiler
from kvjax.generation.context import Context
from kvjax.generation.decode_loop import Generation, Options, Writing
from kvjax.generation.documents import Document
from kvjax.generation.fingerprints import Fingerprint
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.pieces import OnPiece, check_pieces, check_pieces_so_far, read_in_pieces
from kvjax.generation.prompt_checks import Rows, as_rows, bucket, check_prompts
from kvjax.generation.sampling import Sampling, sampling_apart
from kvjax.generation.turns import Start, first_turn
from kvjax.protocol import Full, KVTransform
from kvjax.registry import as_transform


@automatic()
def read(
    model: LanguageModel | FunctionalModel,
    prompts: Sequence[Sequence[int]],
    *,
    transform: KVTransform | str | None = None,
    max_prompt: int | None = None,
    max_new: int = 512,
    max_length: int | None = None,
    dtype: DTypeLike | None = None,
    buckets: Sequence[int] | None = None,
    on_layer: Callable[[int], None] | None = None,
    on_compile: Callable[[str], None] | None = None,
    document: Document | None = None,
    piece: int | None = None,
    on_piece: OnPiece | None = None,
    context: Context | None = None,
) -> Context:
    """Reads prompts into caches that `transform` compresses, for `generate` to go on from.

    The context is at rest: it holds what it keeps. `generate` adds the room for questions and
    answers to its own copy.

    Pieces. By default a prompt is compressed when all of it has been read. With `piece`, so many
    tokens are read and compressed before the next ones are read, which see what is kept of those
    before them. Memory then holds one piece, and what is kept. A method treats each piece as a
    further prompt; those that compress documents (`KVzip`, `OwnQueries`) as a further document. A
    budget that is a number of slots is for all pieces: what is kept of earlier ones is compressed
    again, as each method documents. A prompt may have more tokens than the model has positions
    where keys are rotated at their rank in the cache (`StreamingLLM(reposition=True)`).

    Args:
      model, prompts, transform, dtype, buckets, on_layer, on_compile, document: as in `generate`.
        With `piece`, `on_layer` is called for each piece, and the last piece is padded to a whole
        one.
      max_prompt: most tokens of a row that are read, in this and all further turns. By default
        the padded length of this prompt, which leaves next to no room for questions.
      max_new: most tokens of a row that the model writes, all turns together.
      max_length: length of text by which a model decides what depends on it (LongRoPE, dynamic
        NTK), once for this context and all that go on from it. The default is `max_new` plus
        `max_prompt`, or plus the longest prompt if no `max_prompt` is given. It is not a limit, and
        counts as the model's positions if it is more.
      piece: tokens of a piece; None: the whole prompt is one.
      on_piece: called with the context behind each piece but the last one. It is awake, and the
        next piece takes its memory: what is to be kept of it is saved, or copied by `at_rest`.
      context: what `on_piece` was called with when these prompts were read before: reading goes on
        behind the tokens that it has. It stays as it is. It has its own transform and sizes. It
        knows which tokens it has read and how many, and not their order.

    Raises:
      TypeError, ValueError: as `generate`, for a `max_prompt` below the longest prompt, and for a
        context that has read other prompts or more than these.
      RuntimeError: as `kvjax.check_dropped`.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> document = kvjax.read(model, [[1, 2, 3]], transform=kvjax.SnapKV(64), max_prompt=128)
      >>> answers = kvjax.generate(model, [[4, 5], [6]], context=document, max_new_tokens=4)
      >>> len(answers.tokens), document.length.tolist(), answers.context.length.tolist()
      (2, [3], [9, 8])
    """
    compiler = Compiler(on_compile, on_layer)
    check_callable("on_piece", on_piece)
    sizes = AskedSizes(max_new, max_prompt, max_length, dtype, buckets)
    if piece is None:
        for name, value in (("on_piece", on_piece), ("context", context)):
            if value is not None:
                raise ValueError(f"{name} is for prompts that are read in pieces: give piece too")
        awake = read_awake(
            model, prompts, sizes=sizes, transform=transform, document=document, compiler=compiler
        )
        return awake.at_rest(donate=True, compiler=compiler)
    check_count("piece", piece, 1)
    functional, prompts = as_functional(model), as_rows(prompts)
    document = True if document is None else document
    if context is None:
        start = _start_of(functional, prompts, transform, sizes, piece)
    else:
        for name, value in {"transform": transform, **sizes._asdict()}.items():
            if value is not None and name != "max_new":  # which is a number in any case
                raise ValueError(f"a context has its own {name}, got {name}= as well")
        check_pieces_so_far(functional, context, prompts, piece)
        start = context.awake(compiler=compiler)
        start = start.copy() if start is context else start
    check_pieces(functional, prompts, start, piece, document)
    awake = read_in_pieces(functional, prompts, start, piece, compiler, document, on_piece)
    check_dropped(awake.held)
    return awake.at_rest(donate=True, compiler=compiler)


class AskedSizes(NamedTuple):
    """The sizes of caches that a caller of `read` asks for: its arguments of these names."""

    max_new: int
    max_prompt: int | None = None
    max_length: int | None = None
    dtype: DTypeLike | None = None
    buckets: Sequence[int] | None = None

    def of_caches(
        self,
        model: FunctionalModel,
        prompts: Sequence[Sequence[int]],
        transforms: Sequence[KVTransform],
        piece: int | None = None,
    ) -> tuple[list[int], CacheSize]:
        """Returns the padded length of each prompt, and the sizes that caches are made for.

        Raises what `read` raises for these arguments.
        """
        max_new, max_prompt, max_length, dtype, buckets = self
        check_count("max_new", max_new, 1)
        for transform in transforms:
            # No new tokens yet: each turn is checked when it comes.
            layers = bind(transform, model.num_layers, model.windows)
            check_prompts(model, prompts, layers, 0, piece)
        longest = max(map(len, prompts))
        widths = [bucket(len(prompt), model.max_positions, buckets) for prompt in prompts]
        if max_prompt is not None:
            check_count("max_prompt", max_prompt, 1)
            if max_prompt < longest:
                raise ValueError(
                    f"max_prompt must hold the prompt of {longest} tokens, got {max_prompt}"
                )
        if max_length is None:
            max_length = (max_prompt or longest) + max_new
        check_count("max_length", max_length, 1)
        padded = max(*widths, max_prompt or 0)
        return widths, CacheSize.of(model, len(prompts), padded, max_new, dtype, max_length)


@automatic()
def read_awake(
    model: LanguageModel | FunctionalModel,
    prompts: Sequence[Sequence[int]],
    *,
    sizes: AskedSizes,
    transform: KVTransform | str | None = None,
    document: Document | None = None,
    compiler: Compiler | None = None,
) -> Context:
    """Reads prompts as `read`, into a context that keeps its room.

    The sizes of a context at rest depend on what it keeps, so that many contexts compile much. This
    one is for contexts that are used at once and not kept.

    Args:
      model, prompts, transform, document: as in `read`.
      sizes: sizes of the caches.
      compiler: compiles; None: nobody is told.
    """
    functional, prompts = as_functional(model), as_rows(prompts)
    start = _start_of(functional, prompts, transform, sizes)
    context = first_turn(functional, prompts, start, compiler or Compiler(), document)
    check_dropped(context.held)
    # A kept context needs a fingerprint, so that a later call can refuse another model.
    return dataclasses.replace(context, fingerprint=Fingerprint.of(functional))


def _start_of(
    model: FunctionalModel,
    prompts: Sequence[Sequence[int]],
    transform: KVTransform | str | None,
    sizes: AskedSizes,
    piece: int | None = None,
) -> Start:
    """Returns transform and sizes of the caches that `read` makes; raises the errors of `read`."""
    transform = Full() if transform is None else as_transform(transform, "read")
    transform = with_named(transform, model)
    widths, size = sizes.of_caches(model, prompts, [transform], piece)
    layers = bind(transform, model.num_layers, model.windows, size.max_tokens)
    return Start(transform, layers, size, widths)


@sampling_apart
@automatic()
def generate(
    model: LanguageModel | FunctionalModel,
    prompts: Rows | None,
    *,
    transform: KVTransform | str | None = None,
    max_new_tokens: int = 128,
    end_tokens: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    context: Context | None = None,
    donate: bool = False,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    on_layer: Callable[[int], None] | None = None,
    on_compile: Callable[[str], None] | None = None,
    buckets: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    document: Document | None = None,
) -> Generation:
    """Continues prompts through a cache that `transform` compresses.

    Windows. A layer with a sliding window keeps exactly its window and nothing else, whatever the
    method does in other layers, unless no text can become longer than the window: see `kvjax.bind`.

    Long texts. Some models compute differently for long texts (LongRoPE, dynamic NTK). They are
    told the longest prompt plus `max_new_tokens`, for all rows and from the first token on; with a
    `context`, the length that the context was made for.

    Prompts. They are padded to one of a few lengths. Where the prompts of a batch differ much in
    length, those of similar length are read together; all rows then share one cache, which has room
    for the longest. A model that shows its parts (`kvjax.models.LayeredModel`) reads prompts layer
    by layer, so that memory holds the activations of one layer at a time.

    Compilation. Layers that are alike share compiled code. All decoding runs in one compiled loop
    with donated caches. A second call with prompts of the same buckets compiles nothing, whatever
    its end tokens, its sampling and its seed, and whatever its `max_new_tokens` up to the same
    bucket. The one exception is the choice of the first token, which is compiled once for greedy
    choices and once for draws.

    Turns. With a `context`, the prompts are a further turn after everything that the context has
    read and written. A context of one row takes any number of prompts: many questions about one
    document. A row whose prompt is None takes no part: it gets no tokens, and its caches stay as
    they are, except that a `kvjax.flush` is for all rows: a method that works every M tokens then
    works on the tokens that have come so far. Without prompts (None) every row goes on from where
    it is. When a turn is complete, methods compress what it added or everything that is live, as
    each documents. A turn that does not fit into what the context was made for, or that a method
    refuses, is refused before anything is computed, and the context stays as it is. A question of
    more tokens than a method has room for (`KVzip`) is one of them.

    Args:
      model: an NNX module or callable with the signature of `LanguageModel`, or a
        `FunctionalModel`.
      prompts: token ids of each row, in lists or arrays; rows may differ in length.
      transform: how to compress, as a transform or as its text for `kvjax.parse`, such as
        `"snapkv(budget=0.1)"`; `Full()` by default. Not to be given with a context, which has its
        own.
      max_new_tokens: most new tokens per row.
      end_tokens: tokens that end a row; they are not part of the result. By default those of the
        model (`eos_token_ids` of its `config`), if it has any. In a chat, `chat_end_tokens` returns
        further ones that end an answer.
      sampling: greedy by default.
      seed: seed of the draws, below 2**32. Each draw has its own key, by row and position.
      context: from `read`, or from an earlier result.
      donate: whether the result takes over the memory of `context`, which cannot be used again; not
        after a FloatingPointError either, which comes when the prompts have been read.
      on_tokens: called with the new tokens per row as they come, about ten times a second.
      on_layer: called with the number of each layer once it has read the prompt, in order.
      on_compile: called with the name of each program that is about to be compiled.
      buckets: padded prompt lengths to choose from; by default the multiples of 64 up to 256, then
        four per power of two.
      dtype: of keys and values; see `init_cache`. Not to be given with a context, which has its
        own.
      document: whether the prompts are documents, at which some methods look once more (`KVzip`);
        None: a first prompt is one, and a further turn is not. The model's tokenizer: they are, and
        methods may ask about them in words; otherwise they ask without words.

    Raises:
      TypeError, ValueError: before anything is computed: no prompts, an empty one, a token outside
        the vocabulary, more tokens than the model's positions, the buckets or the context can hold,
        a context of another model.
      FloatingPointError: the logits of a row are NaN or infinite; names the row and the new token.
      RuntimeError: a method keeps more than it promises, so that tokens were lost; raised behind
        the last token (see `kvjax.check_dropped`).

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> result = kvjax.generate(model, [[1, 2, 3]], transform=kvjax.SnapKV(64), max_new_tokens=4)
      >>> len(result.tokens[0])
      4
    """
    check_callable("on_tokens", on_tokens)
    options = Options(
        transform=transform, max_new_tokens=max_new_tokens, end_tokens=end_tokens,
        sampling=sampling, seed=seed, donate=donate, on_layer=on_layer, on_compile=on_compile,
        buckets=buckets, dtype=dtype, document=document,
    )  # fmt: skip
    writing = Writing(model, options, streaming=on_tokens is not None).read(prompts, context)
    for new_tokens in writing:
        if on_tokens is not None:
            on_tokens(new_tokens)
    return writing.result


@sampling_apart
@automatic()
def stream(
    model: LanguageModel | FunctionalModel,
    prompts: Rows | None,
    *,
    context: Context | None = None,
    **options: Any,
) -> Stream:
    """Generates as `generate` does, and returns an iterator over new tokens as they come.

    Args:
      model, prompts, context: as in `generate`.
      options: all other arguments of `generate` except `on_tokens`.

    Returns:
      An iterator over lists of new tokens, one per row, about ten times a second. Prompts have been
      read when it is returned. When it has ended, `result` is what `generate` would have returned.

    Raises:
      TypeError, ValueError: as `generate`.

    Example:
      >>> import kvjax
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=512))
      >>> steps = kvjax.stream(model, [[1, 2, 3]], max_new_tokens=4)
      >>> rows = [token for new in steps for token in new[0]]
      >>> rows == steps.result.tokens[0]
      True
    """
    return Stream(Writing(model, Options(**options), streaming=True).read(prompts, context))


class Stream:
    """An iterator over new tokens per row, which has a result at its end; `stream` returns it."""

    def __init__(self, writing: Writing) -> None:
        self._writing, self._steps = writing, iter(writing)

    def __iter__(self) -> Stream:
        return self

    @automatic()
    def __next__(self) -> list[list[int]]:
        return next(self._steps)

    @automatic()
    def stop(self) -> Generation:
        """Ends the stream, and returns the result of the tokens so far."""
        self._steps.close()
        return self._writing.stop()

    @property
    def result(self) -> Generation:
        """The result that `generate` would have returned.

        Raises:
          RuntimeError: there are more tokens to come.
        """
        return self._writing.result
