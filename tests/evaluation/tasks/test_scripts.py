"""Needles in texts of other scripts: they stand after sentences, and no character is cut."""

# ruff: noqa: RUF001

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvjax.evaluation import Haystack
from kvjax.evaluation.tasks import Frame, ruler
from kvjax.evaluation.tasks.datasets import split_tokens
from kvjax.evaluation.tasks.encoder import Encoder, sentences_of
from kvjax.models import demo, load_tokenizer

SENTENCES = {
    "English": (
        "Boats wait in the harbour. Is anyone there? A café on the quay opens – at noon! "
        "Old fishermen mend their nets. The fog lifts."
    ),
    "Korean": (
        "배들은 항구를 떠나지 못하고 기다렸다. 늙은 어부는 그물을 고치면서 날씨를 살폈다. "
        "정오가 되자 바람이 바뀌었다! 누가 그 집에 살까? 밤에는 별이 밝았다."
    ),
    "Chinese": (
        "船在港口里等着。老渔夫一边补网一边看天气。孩子们在堤上扔石子！谁住在那座老房子里？"
        "他说：“风向变了。”夜里的星星很亮。"
    ),
    "Japanese": (
        "船は港で待っていた。漁師は網を直しながら空を見ていた。昼になると風向きが変わった！"
        "誰が住んでいるのか？「霧が晴れた。」夜は星が明るかった．"
    ),
    "Hindi": (
        "नावें बंदरगाह में प्रतीक्षा करती रहीं। बूढ़ा मछुआरा जाल ठीक करता रहा। "
        "दोपहर होते ही हवा बदल गई॥ उस घर में कौन रहता है? रात में तारे चमकीले थे।"
    ),
    "Arabic": "كانت السفن تنتظر في الميناء. هل عاد الصيادون من البحر؟ تغيرت الريح ظهرا.",
    "Urdu": "کشتیاں بندرگاہ میں رکی رہیں۔ کیا مچھیرے واپس آئے؟ رات کو ستارے چمکے۔",
    "Amharic": "ዛሬ ጠዋት በባሕሩ ላይ ጭጋግ ነበር። መርከቦቹ በወደቡ ውስጥ ጠበቁ። ልጆቹ ተጫወቱ።",
}
SPACED = {"English", "Korean", "Hindi", "Arabic", "Urdu", "Amharic"}
STOP = regex.compile(r"\p{Sentence_Terminal}[\p{Pe}\p{Pf}]*$")


def text_of(language: str) -> str:
    """The sentences in many orders."""
    parts, rng = sentences_of(SENTENCES[language]), np.random.default_rng(0)
    space = " " if language in SPACED else ""
    return space.join(parts[i] for _ in range(400) for i in rng.permutation(len(parts)))


def like_sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: a mark in place of spaces and before each text, and bytes of other letters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def like_bert() -> PreTrainedTokenizerFast:
    """Single letters, with a mark inside words; white space is lost."""
    letters = sorted({*map(chr, range(33, 127)), *"".join(SENTENCES.values()).replace(" ", "")})
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def of_model(variable: str) -> Callable[[], Any]:
    def load():
        path = os.environ.get(variable)
        if not path or not Path(path).exists():
            pytest.skip(f"no tokenizer of a real model: set {variable}")
        return load_tokenizer(path)

    return load


TOKENIZERS = {
    "bytes": lambda: load_tokenizer(demo.directory()),
    "sentencepiece": like_sentencepiece, "wordpiece": like_bert,
    "smollm2": of_model("KVJAX_SMOLLM2"), "qwen": of_model("KVJAX_QWEN"),
    "gemma": of_model("KVJAX_GEMMA"),
}  # fmt: skip


# The tokenizer of a GGUF file takes some seconds to load.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen", "gemma")]


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "wordpiece", "smollm2", *SLOW])
def tokenizer(request):
    return TOKENIZERS[request.param]()


def without_spaces(text: str) -> str:
    return "".join(text.split())


def check_halves(before: str, after: str, language: str) -> None:
    """What stands on both sides of a needle: runs of the text, with whole characters.

    Dots may take the place of one character at the end of the filler. RULER's text begins again
    after its end.
    """
    text = without_spaces(text_of(language)) * 2
    for part in (before, after):
        run = part if part in text else part.rstrip(".")
        assert run in text, f"no run of the text: {part[:20]} ... {part[-20:]}"
        assert len(part) - len(run) < 20
    assert not regex.match(r"[\p{M}\p{Pe}\p{Pf}]", after), after[:20]
    at_the_end = not after.rstrip(".")
    assert at_the_end or not before or STOP.search(before), before[-40:]


@pytest.mark.parametrize("language", SENTENCES)
def test_our_needles_stand_between_sentences(tokenizer, language):
    haystack = Haystack(tokenizer, text_of(language))
    for seed in range(20):
        case = haystack.case("needle", length=900, depth=(seed + 0.5) / 20, seed=seed)
        assert len(case.prompt) == 900
        at = case.details["position"]
        before = without_spaces(tokenizer.decode(case.prompt[len(haystack.start) : at]))
        before = before.removeprefix("##")  # a window may begin inside a word
        rest = without_spaces(tokenizer.decode(case.context[at:]))
        assert rest.startswith("Thecodeofthe")
        check_halves(before, rest.split(f"{case.answers[0]}.", 1)[1], language)


@pytest.mark.parametrize("language", SENTENCES)
def test_rulers_needles_stand_between_sentences(tokenizer, language):
    frame = Frame.of(tokenizer, chat=False)
    task = ruler(
        "niah_single_2", tokenizer, text_of(language), length=1200, cases=20, seed=0, frame=frame
    )
    for case in task.cases:
        assert len(case.prompt) == 1200
        body = without_spaces(tokenizer.decode(case.context[len(frame.before) :]))
        body = body.split("afterwards.", 1)[1]
        before, rest = body.split("Oneofthespecialmagic", 1)
        check_halves(before, rest.split(f"{case.answers[0]}.", 1)[1], language)


@pytest.mark.parametrize("task", ["needle", "multi_needle", "key_value", "chain"])
def test_no_mark_stands_before_what_follows(task):
    """Tokenizers like SentencePiece put a space before each text that is encoded by itself."""
    tokenizer = like_sentencepiece()
    haystack = Haystack(tokenizer, text_of("English"))
    case = haystack.case(task, length=2500, depth=0.3, seed=1)
    assert tokenizer.decode(case.question).startswith("\n\nQuestion: ")
    if task == "key_value":
        assert regex.search(r"[.?!]\n\n\w+ \w+: \d{6}\n", tokenizer.decode(case.context))
    begins = tokenizer.decode(case.prompt[case.details["position"] :])
    pattern = r"\w+ \w+: \d{6}\n" if task == "key_value" else " The code of the"
    assert regex.match(pattern, begins)
    assert task == "chain" or case.max_new == len(" 123456.") + 1


def test_where_no_sentence_ends_characters_stay_whole():
    """Letters with vowel signs, a family of several people, and a letter of three syllables."""
    tokenizer = load_tokenizer(demo.directory())
    for characters in ("हिन्दी", "👨‍👩‍👧‍👦", "한글", "e\u0301o\u0308"):
        haystack = Haystack(tokenizer, characters * 400)
        pieces = set(regex.findall(r"\X", characters))
        for seed, depth in enumerate((0.2, 0.31, 0.5, 0.77)):
            case = haystack.case("needle", length=700, depth=depth, seed=seed)
            written = tokenizer.decode(case.context[1:])
            before, rest = written.split(" The code", 1)
            before, after = before.rstrip("."), rest.split(f"{case.answers[0]}.", 1)[1].rstrip(".")
            assert {*regex.findall(r"\X", before), *regex.findall(r"\X", after)} <= pieces


def test_a_text_of_one_character_is_a_filler():
    tokenizer, rooms = load_tokenizer(demo.directory()), set()
    haystack = Haystack(tokenizer, "船")
    assert len(haystack.filler) == 3
    for length in range(40, 100):
        with contextlib.suppress(ValueError):  # there is no room, or more than the text has
            case = haystack.case("needle", length=length, depth=0.0, seed=0)
            assert len(case.prompt) == length
            written = tokenizer.decode(case.context)
            rooms.add(written.partition(f"{case.answers[0]}.")[2])
    assert rooms <= {"", ".", "..", "船"} and rooms


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Is 3.5 three? os.path", ["One.", "Two!", "Is 3.5 three?", "os.path"]),
        ("一。二！三？（四。）五", ["一。", "二！", "三？", "（四。）", "五"]),
        ("「霧が晴れた。」と言った。", ["「霧が晴れた。」", "と言った。"]),
        ("एक। दो॥ तीन", ["एक।", "दो॥", "तीन"]),
        ("واحد؟ اثنان۔ ثلاثة", ["واحد؟", "اثنان۔", "ثلاثة"]),
        ("什么？！走。", ["什么？！", "走。"]),
        ("一．二｡三", ["一．", "二｡", "三"]),
        ("Ends here.\n\n  And  here", ["Ends here.", "And here"]),
    ],
)
def test_sentences(text, sentences):
    assert sentences_of(text) == sentences


def test_bytes_of_the_next_character_belong_to_the_question():
    tokenizer = like_sentencepiece()
    context, question = split_tokens(tokenizer, "船", "港")
    assert [tokenizer.decode(part).strip() for part in (context, question)] == ["船", "港"]


def test_a_tokenizer_without_characters_of_tokens_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Encoder(Slow())
