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
# MMLU's official header, with its two spaces.
HEADER = "The following are multiple choice questions (with answers) about  {}.\n\n"
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
        reliability = SOURCES[self.source]
        probabilities = [(1 - reliability) / 3] * 4
        probabilities[self.town.truth] = reliability
        return probabilities

    @property
    def choices(self) -> tuple[str, ...]:
        """The four answers, of a subject always in this order."""
        _, things = SUBJECTS[self.town.subject]
        return things

    @property
    def stem(self) -> str:
        """The text, and the beginning of a sentence that answers it."""
        verb, _ = SUBJECTS[self.town.subject]
        return f"The {self.source} says {self.town.name} {verb}"

    @property
    def body(self) -> str:
        """The question with one lettered line a choice."""
        pairs = zip(LETTERS, self.choices, strict=True)
        lines = [f"{letter}. {choice}" for letter, choice in pairs]
        return "\n".join([self.stem, *lines])


def build() -> dict[str, list[Town]]:
    """The towns by role."""
    rng = random.Random(SEED)
    names: dict[str, None] = {}  # in the order in which they were drawn, each once
    while len(names) < len(SUBJECTS) * sum(ROLES.values()):
        sounds = [rng.choice(choices) for choices in (ONSETS, VOWELS, ONSETS, VOWELS, CODAS)]
        names["".join(sounds).capitalize()] = None
    unused_names = iter(names)
    towns: dict[str, list[Town]] = {}
    for role, count in ROLES.items():
        towns[role] = [
            Town(next(unused_names), subject, rng.randrange(4))
            for subject in SUBJECTS
            for _ in range(count)
        ]
    return towns


TOWNS = build()


def asked(role: str) -> list[Question]:
    """A question for each town of a role; of `val` one a source: more is better to fit on."""
    rng = random.Random(f"{SEED} {role}")
    sources: list[str | None] = [None]
    if role == "val":
        sources = list(SOURCES)
    return [ask(town, rng, source) for town in TOWNS[role] for source in sources]


def ask(town: Town, rng: random.Random, source: str | None = None) -> Question:
    """A question about a town with a fresh answer; of a random source unless one is given."""
    if source is None:
        source = rng.choice(list(SOURCES))
    says_the_truth = rng.random() < SOURCES[source]
    if says_the_truth:
        return Question(town, source, town.truth)
    others = [thing for thing in range(4) if thing != town.truth]
    return Question(town, source, rng.choice(others))


def exam(questions: list[Question]) -> str:
    """Questions of one subject with their answers, laid out as an MMLU prompt."""
    header = HEADER.format(questions[0].town.subject)
    answered = [f"{each.body}\nAnswer: {LETTERS[each.answer]}\n\n" for each in questions]
    return header + "".join(answered)
