"""The text that the bundled model is trained on, and the tokenizer made from it.

The text comes with Python itself: the language reference as `help()` shows it
(`pydoc_data.topics`) and the docstrings of the standard library (PSF licence). Every tenth topic
and module, chosen by a checksum of its name, is held out: training never sees it.
"""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
_HELD_OUT = 10  # one of this many documents is held out
# Words with the space before them, digits in pairs from the left, runs of signs, white space.
_PIECES = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def python_documents() -> Iterator[tuple[str, str]]:
    """Yields name and text of each help topic and each documented module of this Python."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if "site-packages" in parts or any(part.startswith("test") for part in parts):
            continue
        text = _docstrings(path)
        if text:
            yield "module " + ".".join(parts)[: -len(".py")], text


def _docstrings(path: Path) -> str:
    """Returns all docstrings of a file, those of outer definitions first."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken files
        return ""
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in texts if text)


def split_documents(documents: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Returns texts to train on and texts held out, by a checksum of their names."""
    training: list[str] = []
    held_out: list[str] = []
    for name, text in documents:
        chosen = zlib.crc32(name.encode()) % _HELD_OUT == 0
        (held_out if chosen else training).append(text.strip() + "\n\n")
    return training, held_out


def without_known_paragraphs(held_out: Iterable[str], training: Iterable[str]) -> str:
    """Returns the held-out texts without paragraphs that are also in a training text.

    The bundled `held_out.txt` comes from Python 3.11.7.
    """
    known = {""} | {paragraph.strip() for text in training for paragraph in text.split("\n\n")}
    paragraphs = (paragraph for text in held_out for paragraph in text.split("\n\n"))
    return "\n\n".join(kept for kept in paragraphs if kept.strip() not in known) + "\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer; texts start with `BOS`, digits are read in pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer
