"""From questions to prompt text.

official  hendrycks/test's evaluate.py, byte for byte
lm-eval   lm-evaluation-harness's mmlu tasks: one space in the header, questions stripped
"""

import hashlib
from dataclasses import dataclass

from calibeval.tasks import LETTERS, Question, Subject

HEADER = "The following are multiple choice questions (with answers) about {topic}.\n\n"
STYLES = ("official", "lm-eval")


@dataclass(frozen=True)
class Prompt:
    """A question's prompt text, ready to be followed by " A", " B", …"""

    question: Question
    text: str
    shots: int

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 text, kept in the record."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def build(subject: Subject, question: Question, shots: int, style: str = "official") -> Prompt:
    """Header, the first `shots` examples with their answers, then the question up to `Answer:`."""
    # The official formatter puts a space before each word of the subject, after one of its own.
    topic = f" {subject.topic}" if style == "official" else subject.topic
    examples = [f"{body(shot, style)} {LETTERS[shot.label]}\n\n" for shot in subject.shots[:shots]]
    text = HEADER.format(topic=topic) + "".join(examples) + body(question, style)
    return Prompt(question, text, shots)


def body(question: Question, style: str = "official") -> str:
    """The question, one lettered line a choice, and `Answer:` without a trailing space."""
    text = question.text if style == "official" else question.text.strip()
    lines = [f"{LETTERS[i]}. {choice}" for i, choice in enumerate(question.choices)]
    return "\n".join([text, *lines, "Answer:"])
