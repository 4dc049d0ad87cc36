"""kvjax as the model `kvjax` of lm-evaluation-harness: `pip install 'kvjax[lm-eval]'`.

    python -m kvjax.lm_eval --model kvjax --tasks TASK \\
        --model_args "pretrained=DIR,transform=by_head(kvzip),budget=0.2"

This is the harness's own command, which has no plugins: importing this module is what makes the
name known, there and for `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    Collator,
    normalize_gen_kwargs,
)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)
from tqdm import tqdm

import kvjax
from kvjax.checks import check_count
from kvjax.cli import compilation_cache
from kvjax.cli.answers import Row, write
from kvjax.cli.opened import kept_sample
from kvjax.evaluation import answer_losses
from kvjax.generation.chat import raw_tokens
from kvjax.generation.continuation import TextDecoder
from kvjax.generation.generate import AskedSizes, read_awake
from kvjax.generation.model import as_functional
from kvjax.generation.prompt_checks import bucket
from kvjax.models import from_pretrained, load_tokenizer

_logger = logging.getLogger(__name__)

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request's texts, None if it is a window of a longer text, and tokens of its two parts."""


@register_model("kvjax")
class KVJaxLM(TemplateLM):
    """A language model whose caches are compressed, for lm-evaluation-harness.

    A request's context is read as one prompt and compressed at its end, with the question that it
    ends with: the harness does not tell where a question begins. For methods that look at documents
    once more (`KVzip`) the whole context is the document.

    - `loglikelihood`: the continuation goes through decode steps after the compressed context, so
      that methods which select or evict while decoding do so. A context that several requests
      share, as those of a multiple-choice question, is read once.
    - `loglikelihood_rolling`: a text is cut into the harness's windows, and each is scored as a
      continuation. The first window's context is a single token, and so is that of every window
      but the last. So everything goes through decode steps: methods that compress prompts alone
      have nothing to compress, and methods that work while decoding are measured.
    - `generate_until`: `kvjax.generate` continues the compressed context.

    A context that is too long loses its first tokens, as with the harness's model `hf`, and a
    warning says so. Draws follow NumPy's generator, to which the harness gives its `--seed`.

    Args:
      pretrained: as in `from_pretrained`: a folder, a GGUF file, a name, or a hub id.
      transform: a method or composition, as text for `kvjax.parse`. A calibration that it
        needs and does not name a file of, such as a profile of heads, is made from the bundled
        model's text, and a profile is kept in the user's cache.
      budget: of every method in `transform` that takes a budget and has none of its own: slots per
        head (256), or a share of the context (0.2).
      batch_size: contexts that are read at once, and continuations that are scored at once.
      max_length: most tokens of context and continuation; by default the model's positions.
      max_gen_toks: most new tokens of an answer whose task does not say; 256 as for `hf`.
      dtype: of the weights, as in `kvjax.models.from_pretrained`.
      device: nothing follows from it: the harness always gives one, and JAX has its own setting.

    Raises:
      TypeError, ValueError: the text names no transform, a budget is missing, a number is below 1,
        or the model cannot be loaded.

    Example:
      >>> from lm_eval.api.instance import Instance
      >>> from kvjax.models import demo
      >>> model = KVJaxLM(str(demo.directory()), "h2o", budget=8)
      >>> request = Instance("loglikelihood", {}, ("def add(a, b):", " return a"), 0)
      >>> [(log_likelihood, greedy)] = model.loglikelihood([request], disable_tqdm=True)
      >>> log_likelihood < 0, greedy
      (True, False)
    """

    def __init__(
        self,
        pretrained: str,
        transform: str = "full",
        budget: int | float | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        # The harness's command gives a text.
        self.batch_size: Any = int(batch_size) if str(batch_size).isdigit() else batch_size
        self.max_gen_toks = max_gen_toks
        check_count("batch_size", self.batch_size, 1)
        check_count("max_gen_toks", max_gen_toks, 1)
        if max_length is not None:
            check_count("max_length", max_length, 2)
        composition = kvjax.parse(transform, budget)
        self.pretrained = str(pretrained)
        self.tokenizer = load_tokenizer(pretrained)
        decoder = from_pretrained(pretrained, dtype=dtype)
        self.model = as_functional(decoder)
        positions = self.model.max_positions
        if max_length is None:
            max_length = positions
        if max_length is None:
            raise ValueError("max_length must be given: the model has no limit of its own")
        if positions is not None and max_length > positions:
            raise ValueError(
                f"max_length must be at most the model's {positions} positions, got {max_length}"
            )
        self.max_length = max_length
        self.transform = kvjax.calibrated(
            composition, self.model, kept_sample(self.tokenizer, positions),
            document=self.tokenizer,
        )  # fmt: skip
        ends = (*decoder.config.eos_token_ids, self.tokenizer.eos_token_id)
        self._end_tokens = tuple(dict.fromkeys(token for token in ends if token is not None))

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness tells apart the requests that it keeps."""
        return self.pretrained.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context, as for `hf`."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns the tokens of a text, after those that the tokenizer puts before it.

        Args:
          add_special_tokens: whether it puts them; None: unless the text begins with its first
            token, as a rendered chat template may.
        """
        start = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = start is None or not string.startswith(start)
        if add_special_tokens:
            return raw_tokens(self.tokenizer, string)
        return self.tokenizer(string, add_special_tokens=False).input_ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders messages with the model's chat template.

        Args:
          chat_history: the messages.
          add_generation_prompt: whether an answer begins after them; else the last message goes on.

        Raises:
          ValueError: there is no template.
        """
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether it is the greedy one."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, (_texts, context, continuation) in enumerate(requests):
            # The last token is predicted, and takes no position.
            kept = self._cut(context, self.max_length + 1 - len(continuation))
            by_context.setdefault(tuple(kept), []).append(number)
        # Contexts of similar length are padded to one length. The longest take the most memory.
        contexts = sorted(by_context, key=lambda context: (-len(context), context))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvjax loglikelihood") as bar:
            for batch in _batches(contexts, self.batch_size):
                rows = [(row, number) for row, x in enumerate(batch) for number in by_context[x]]
                # Continuations of similar length are padded to one length.
                rows.sort(key=lambda pair: -len(requests[pair[1]][2]))
                for number, result in self._scores(batch, rows, requests):
                    results[number] = result
                    if (texts := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, result)
                    bar.update()
        return results

    def _scores(
        self,
        contexts: Sequence[tuple[int, ...]],
        rows: Sequence[tuple[int, int]],
        requests: Sequence[Scored],
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Reads contexts; yields the number and the result of each request about them.

        Args:
          contexts: token ids of contexts that differ.
          rows: for each request, the index of its context and its number.
          requests: all requests.
        """
        answers = {number: requests[number][2] for _, number in rows}
        longest = max(map(len, answers.values()))
        sizes = AskedSizes(
            bucket(longest, None, None), max_length=max(map(len, contexts)) + longest
        )
        read = read_awake(
            self.model, contexts, sizes=sizes, transform=self.transform, document=self.tokenizer
        )
        for batch in _batches(rows, self.batch_size):
            # Steps of fewer rows would be compiled again: the last row fills the batch.
            filled = [*batch, *batch[-1:] * (self.batch_size - len(batch))]
            losses = answer_losses(
                self.model, read.take([row for row, _ in filled]),
                [answers[number] for _, number in filled],
            )  # fmt: skip
            if not np.isfinite(losses.nats).all():
                raise FloatingPointError(f"log-likelihoods are {(-losses.nats).tolist()}")
            for (_, number), nats, greedy in zip(batch, *losses, strict=False):
                yield number, (-float(nats), bool(greedy))

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of whole texts, window by window; see the class."""
        windows: list[Scored] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text after each context, up to a stop string or `max_gen_toks` tokens.

        Tokens are chosen as `kvjax.Sampling.from_settings` says, by the task's `do_sample`,
        `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`.

        Raises:
          ValueError: a task asks for what `Sampling` lacks, such as `num_beams`, or `max_gen_toks`
            leaves no room for a context.
        """
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: (-len(self.tok_encode(args[0])), args[0]),
            group_by="gen_kwargs",  # the second of a request's arguments
        )
        texts: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvjax generate_until") as bar:
            for batch in order.get_batched(n=self.batch_size):
                # All requests of a batch have these settings.
                written = self._texts([context for context, _ in batch], batch[0][1])
                for args, text in zip(batch, written, strict=True):
                    self.cache_hook.add_partial("generate_until", args, text)
                    bar.update()
                texts += written
        return order.get_original(texts)

    def _texts(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Returns the texts that follow contexts, by the settings of a task."""
        settings = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        stops, most = settings.pop("until"), settings.pop("max_gen_toks")
        sampling = kvjax.Sampling.from_settings(settings)
        room = self.max_length - most
        if room < 1:
            raise ValueError(
                f"max_gen_toks must leave room for a context in {self.max_length} tokens, got "
                f"{most}"
            )
        prompts = [self._cut(self.tok_encode(text), room) for text in contexts]
        decode = TextDecoder(self.tokenizer)
        rows = [Row(decode, prompt, [stop for stop in stops if stop]) for prompt in prompts]
        write(
            self.model, prompts, rows, streaming=bool(stops), transform=self.transform,
            max_new_tokens=most, end_tokens=self._end_tokens, sampling=sampling,
            # Repetitions of a request must differ.
            seed=int(np.random.randint(2**32, dtype=np.uint32)), document=self.tokenizer,
        )  # fmt: skip
        return [row.text for row in rows]

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        """Returns the last `most` tokens of a context; a warning says that others are left out.

        Raises:
          ValueError: there is no room for a context.
        """
        if most < 1:
            raise ValueError(
                f"a continuation must have at most max_length = {self.max_length} tokens, got "
                f"{self.max_length + 1 - most}"
            )
        if len(tokens) > most:
            _logger.warning("The first %d tokens of a context are cut.", len(tokens) - most)
        return tokens[-most:]


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yields as many items at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def main() -> None:
    """Runs the harness's command."""
    compilation_cache.enable()
    cli_evaluate()


if __name__ == "__main__":
    main()
