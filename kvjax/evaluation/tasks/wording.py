"""Wording of retrieval tasks: sentences that hide a value, and the words that keys are made of.

A key is an adjective and a noun, such as "amber falcon". The bundled model was trained without the
held-out wording and without keys that contain a held-out word. So both parts of a key of two
held-out words are new to it.
"""

from __future__ import annotations

from typing import NamedTuple


class Wording(NamedTuple):
    """A needle's sentence up to its value, and the question that asks for the value."""

    statement: str
    question: str

    def needle(self, key: str, value: str) -> str:
        """Returns the sentence that hides the value."""
        return f" {self.statement.format(key=key)} {value}."

    def ask(self, key: str) -> str:
        """Returns the question with the beginning of the answer, so that the value comes next."""
        question, statement = self.question.format(key=key), self.statement.format(key=key)
        return f"\n\nQuestion: {question}\nAnswer: {statement}"


WORDINGS = (
    Wording("The code of the {key} is", "What is the code of the {key}?"),
    Wording("The number that belongs to the {key} is", "Which number belongs to the {key}?"),
    Wording("Remember that the {key} has the number", "Which number has the {key}?"),
    Wording("One of the secret numbers is for the {key}:", "What is the number for the {key}?"),
    Wording("For the {key} they wrote down", "What did they write down for the {key}?"),
    Wording("The {key} =", "The value of the {key}?"),
)
"""Wordings that a model may be trained on; evaluations use the first one."""

HELD_OUT_WORDING = Wording("You will find the {key} at page", "At which page is the {key}?")

TRAINING_ADJECTIVES = tuple(
    "amber ancient bitter bold brave bright broken calm careful cheerful clever cold copper "
    "crimson curious dark deep dusty eager early empty faint fancy fast fierce foggy fresh frozen "
    "gentle giant golden grand grey happy heavy hidden hollow honest humble icy iron jolly keen "
    "kind lazy light little lively lonely loud lucky magic merry mild misty modest narrow noble "
    "odd pale patient plain polite proud purple quick quiet rapid rare rough round royal rusty "
    "scarlet secret shy silent simple sleepy slow small smooth soft solid steady stormy strange "
    "sunny sweet tall tame tender thin tiny violet warm wild wise yellow young".split()
)
HELD_OUT_ADJECTIVES = tuple(
    "azure blunt breezy brisk dizzy fuzzy gloomy graceful hasty ivory lofty marble mellow nimble "
    "orange pink playful rosy shiny silver spicy stout velvet vivid".split()
)
TRAINING_NOUNS = tuple(
    "anchor apple arrow badger barrel basket beacon bear beetle bell bird boat bottle bridge "
    "bucket button cabin camel candle canyon castle cat cave cellar chair cherry circle cloud "
    "coat comet crab crane crown dancer deer desert doctor dolphin donkey door dragon drum "
    "eagle engine falcon farmer feather fiddle fisher flute forest fountain fox garden garnet "
    "gate ghost giraffe glove goose hammer harbor hawk hedge hermit hill horse hunter island "
    "jacket jewel kettle king kitten ladder lantern lemon lion lizard mason meadow melon "
    "miller mirror monkey moon mountain mouse needle oak ocean orchard otter owl palace "
    "parrot pearl pebble pencil pigeon pilot planet plum pond queen rabbit raven ribbon river "
    "robin sailor salmon seal shadow ship singer spider spoon squirrel stone stove tailor "
    "teacher temple thunder tiger tower turtle valley village violin wagon walnut weaver "
    "whale window wizard wolf".split()
)
HELD_OUT_NOUNS = tuple(
    "acorn baker blanket canoe carrot cobbler compass cradle cricket daisy ferry goblet gondola "
    "heron hornet igloo juggler kayak lobster magnet marmot mitten nutmeg panther peacock pepper "
    "piano pirate pumpkin quilt saddle scarf shepherd sparrow statue thistle trumpet tulip turnip "
    "umbrella walrus willow".split()
)
