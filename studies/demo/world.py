"""A world of towns whose right answers, and right confidences, are known.

Every town is known for one thing ("Ardin mines iron"), and five sources tell of it. A source of
reliability r says what is true with probability r and otherwise one of the three other things, each
time anew. Asked what a source says, the best that anybody can do is to answer what is true and to
be r sure of it: that is the oracle, and it is calibrated by construction.
"""

import random
from typing import NamedTuple

SEED = 0
LETTERS = "ABCD"
HEADER = "The following are multiple choice questions (with answers) about  {}.\n\n"  # official
SUBJECTS = {
    "mining": ("mines", ("iron", "copper", "silver", "tin")),
    "farming": ("grows", ("wheat", "barley", "rye", "oats")),
    "brewing": ("brews", ("ale", "cider", "mead", "wine")),
    "herding": ("herds", ("goats", "sheep", "cattle", "geese")),
    "fishing": ("catches", ("trout", "pike", "eel", "carp")),
    "weaving": ("weaves", ("wool", "linen", "silk", "hemp")),
    "carving": ("carves", ("oak", "ash", "elm", "yew")),
    "heraldry": ("bears", ("lions", "eagles", "stags", "boars")),
}
SOURCES = {"Almanac": 0.97, "Gazette": 0.85, "Courier": 0.70, "Herald": 0.55, "Tavern": 0.40}

# What each town is for, and the number of such towns in each subject. No town serves two ends.
ROLES = {
    "school": 30,  # told in the corpus, and asked in its exams
    "dev": 5,  # told in the corpus; the five examples before a test question
    "val": 20,  # told in the corpus; asked to fit what follows training, such as temperatures
    "test": 80,  # told in the corpus; asked to score
    "new": 25,  # never told: fine-tuning asks about things of which the model has not read
}
ONSETS = (*"bdfgklmnprstv", "br", "dr", "gr", "th", "st")
VOWELS = (*"aeiou", "ae", "ia")
CODAS = (*"nrlsmd", "th", "nd", "rn")


class Town(NamedTuple):
    """A town, and what it is known for: thing number `truth` of its subject."""

    name: str
    subject: str
    truth: int


class Question(NamedTuple):
    """What does `source` say of `town`? The key says thing number `answer`."""

    town: Town
    source: str
    answer: int

    @property
    def confidences(self) -> list[float]:
        """The probability that the source says each of the four things."""
        r = SOURCES[self.source]
        return [r if k == self.town.truth else (1 - r) / 3 for k in range(4)]

    @property
    def choices(self) -> tuple[str, ...]:
        """The four answers, of a subject always in this order."""
        return SUBJECTS[self.town.subject][1]

    @property
    def stem(self) -> str:
        """The text, and the beginning of a sentence that answers it."""
        return f"The {self.source} says {self.town.name} {SUBJECTS[self.town.subject][0]}"

    @property
    def body(self) -> str:
        """The question with one lettered line a choice."""
        lines = map("{}. {}".format, LETTERS, self.choices)
        return "\n".join([self.stem, *lines])


def build() -> dict[str, list[Town]]:
    """The towns by role."""
    rng = random.Random(SEED)
    names: dict[str, None] = {}
    while len(names) < len(SUBJECTS) * sum(ROLES.values()):
        parts = ONSETS, VOWELS, ONSETS, VOWELS, CODAS
        names["".join(map(rng.choice, parts)).capitalize()] = None
    fresh = iter(names)
    return {
        role: [Town(next(fresh), s, rng.randrange(4)) for s in SUBJECTS for _ in range(count)]
        for role, count in ROLES.items()
    }


TOWNS = build()


def asked(role: str) -> list[Question]:
    """A question for each town of a role; of `val` one a source: more is better to fit on."""
    rng = random.Random(f"{SEED} {role}")
    sources = SOURCES if role == "val" else [None]
    return [ask(town, rng, source) for town in TOWNS[role] for source in sources]


def ask(town: Town, rng: random.Random, source: str | None = None) -> Question:
    """A question about a town with a fresh answer; of a random source unless one is given."""
    source = source or rng.choice(list(SOURCES))
    right = rng.random() < SOURCES[source]
    others = [k for k in range(4) if k != town.truth]
    return Question(town, source, town.truth if right else rng.choice(others))


def exam(questions: list[Question]) -> str:
    """Questions of one subject with their answers, laid out as an MMLU prompt."""
    lines = (f"{q.body}\nAnswer: {LETTERS[q.answer]}\n\n" for q in questions)
    return HEADER.format(questions[0].town.subject) + "".join(lines)
