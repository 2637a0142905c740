"""What a log of another program is read as, and what several programs' readers need."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeval.ask.task_files import Normaliser
from calibeval.ask.written import agreement
from calibeval.records import RawRecord
from calibeval.validation import is_unicode

# What is added to the log-probability of a question's least likely choice to make that of an
# impossible one, which has −∞ where a model's softmax in 16 bits comes to 0. It is just below the
# logarithm of the least positive float32, −103.3.
IMPOSSIBLE = -104.0
MMLU_SUBJECTS = (
    *("abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge"),
    *("college_biology", "college_chemistry", "college_computer_science", "college_mathematics"),
    *("college_medicine", "college_physics", "computer_security", "conceptual_physics"),
    *("econometrics", "electrical_engineering", "elementary_mathematics", "formal_logic"),
    *("global_facts", "high_school_biology", "high_school_chemistry"),
    *("high_school_computer_science", "high_school_european_history", "high_school_geography"),
    *("high_school_government_and_politics", "high_school_macroeconomics"),
    *("high_school_mathematics", "high_school_microeconomics", "high_school_physics"),
    *("high_school_psychology", "high_school_statistics", "high_school_us_history"),
    *("high_school_world_history", "human_aging", "human_sexuality", "international_law"),
    *("jurisprudence", "logical_fallacies", "machine_learning", "management", "marketing"),
    *("medical_genetics", "miscellaneous", "moral_disputes", "moral_scenarios", "nutrition"),
    *("philosophy", "prehistory", "professional_accounting", "professional_law"),
    *("professional_medicine", "professional_psychology", "public_relations", "security_studies"),
    *("sociology", "us_foreign_policy", "virology", "world_religions"),
)
# What a sample that is no multiple choice makes its reader raise.
NOT_A_SAMPLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Why a sample is left out: a key of the sidecar's settings, and what follows "2 samples".
LEFT_OUT = {
    "errored": "that ended in an error",
    "unanswered": "without an answer",
    "ambiguous": "whose reply does not show which letter is its answer",
    "impossible": "whose choices all have probability 0",
}


class LeftOut(Exception):
    """A sample of which nothing is known; `reason` is a key of `LEFT_OUT`."""

    def __init__(self, reason: str):
        super().__init__(LEFT_OUT[reason])
        self.reason = reason


@dataclass(frozen=True)
class LogSample:
    """One question of a log, and the function that makes its record."""

    place: str  # for messages: the file, and the line or the sample's id
    make_row: Callable[[], RawRecord]  # may raise `LeftOut`
    epoch: int = 1  # which time it is that the question is asked


@dataclass(frozen=True)
class Log:
    """What a log file is read as."""

    data_set: str  # names the file of its records
    shared: RawRecord  # what all its records have
    samples: list[LogSample]
    tells_of_chats: bool  # whether no `chat_template` in `shared` means that no chat was asked


@dataclass(frozen=True)
class LogFormat:
    """How the logs of a program are read."""

    program: str  # goes into the sidecar as the engine
    read: Callable[[Path], Log]
    expected: str  # what a sample must have, for messages


def split_task(task: str) -> tuple[str, str]:
    """The data set and the subject of a task: mmlu_anatomy is of mmlu, arc_easy of itself."""
    name = task.removesuffix("_continuation")
    for subject in MMLU_SUBJECTS:
        if name.endswith(f"_{subject}"):
            return name.removesuffix(f"_{subject}").removesuffix("_continuation"), subject
    return task, task


def normaliser(metrics: Mapping[str, Any]) -> Normaliser:
    """By what texts' log-probabilities are divided, as the metrics that a log has say."""
    if "acc_norm" in metrics:
        return "characters"
    return "bytes" if "acc_bytes" in metrics else "sum"


def choice_fields(
    texts: list[str], logprobs: list[float], are_letters: bool, metrics: Mapping[str, Any]
) -> RawRecord:
    """What a record holds of its choices: the letters' mass, or the texts' lengths."""
    if are_letters:
        return {"letter_mass": math.fsum(map(math.exp, logprobs))}
    return {
        "scoring": "continuation",
        "normalise": normaliser(metrics),
        "bytes": [len(text.encode()) for text in texts],
        "characters": [len(text) for text in texts],
    }


def written_fields(
    answer: str, is_right: bool, token_logprobs: Sequence[float], others: Sequence[str]
) -> RawRecord:
    """Return what a record holds of an answer that the model wrote.

    Args:
        answer: The answer as it was scored.
        is_right: Whether it is right by the log.
        token_logprobs: The log-probability of each of its tokens; none where the log has none.
        others: What the model answered when it was asked again.
    """
    fields: RawRecord = {
        "label": 0 if is_right else 1,
        "scoring": "generate",
        "normalise": "tokens" if token_logprobs else "agreement",
        "logprobs": [math.fsum(token_logprobs)] if token_logprobs else [],
        "answer": answer,
    }
    if token_logprobs:
        fields["tokens"] = [len(token_logprobs)]
    if others:
        fields["agreement"] = agreement(answer, others)
        fields["samples"] = list(others)
    return fields


def possible(logprobs: list[float]) -> list[float]:
    """The log-probabilities, with a finite one for choices of probability 0.

    `LeftOut` where all are impossible: by texts' lengths one would be the model's answer.
    """
    possible = [value for value in logprobs if value != -math.inf]
    if logprobs and not possible:
        raise LeftOut("impossible")
    least = min(possible, default=0.0)
    return [least + IMPOSSIBLE if value == -math.inf else value for value in logprobs]


def versions_as_texts(versions: dict[str, Any]) -> dict[str, str]:
    """The packages' versions that are texts which a file can hold."""
    return {
        name: version
        for name, version in versions.items()
        if isinstance(version, str) and is_unicode(name) and is_unicode(version)
    }
