"""Whether record files may be compared: the same questions, asked alike and read alike.

    same_questions    the same ids and right answers, resampled alike; of the same subjects too
                      where whole subjects are resampled
    same_normaliser   texts' log-probabilities divided by the same lengths
    same_prompts      letters or texts, the same chat template, as many examples, the same wording,
                      and as many prompts that were cut at their beginning to fit the model

Anything else would be part of a difference that is to be the models' alone. What may stand in one
file is `calibeval.records`' to say, and which unfinished scoring may go on is `records.store`'s.
"""

from collections.abc import Sequence
from typing import Any

from calibeval import records
from calibeval.io import InputError
from calibeval.measures.evaluations import Evaluation

SHOWN_IDS = 5  # of the questions that files do not share


def same_questions(evaluations: Sequence[Evaluation], remedy: str = "") -> None:
    """Raise `InputError` unless all evaluations are of the same questions, resampled alike.

    `remedy` says what to do about other questions.
    """
    first = evaluations[0]
    for other in evaluations[1:]:
        if other.questions_sha256 != first.questions_sha256:
            raise InputError(
                f"{first.path} and {other.path}: {first.questions:,} and {other.questions:,} "
                "questions; expected the same ids and right answers in both"
                f"{_named_differences(first, other)}{remedy}"
            )
        by_subject = "subject" in (first.cluster, other.cluster)
        if by_subject and other.subjects_sha256 != first.subjects_sha256:
            raise InputError(
                f"{first.path} and {other.path}: the same questions with other subjects "
                f"({first.subjects} and {other.subjects} of them), so whole subjects cannot be "
                "resampled alike; give each id the same `subject` in both, or leave out "
                "--cluster subject"
            )
        # The cluster comes last. `index.read` resamples a file with too few subjects by
        # question, so the clusters may differ only because the subjects do, and the message about
        # subjects is the one to give.
        if other.cluster != first.cluster:
            raise InputError(
                f"{first.path} and {other.path}: resampled by {first.cluster or 'question'} and "
                f"by {other.cluster or 'question'}; load both with the same `cluster`"
            )


def _named_differences(first: Evaluation, second: Evaluation) -> str:
    """The first questions that two files do not share; nothing where a file is gone."""
    try:
        files = [records.read(one.path, one.normalise) for one in (first, second)]
    except InputError:
        return ""
    asked_of_first, asked_of_second = (
        dict.fromkeys(zip(file.ids, file.labels.tolist(), strict=True)) for file in files
    )
    # In the order of the files, once where both have it with other right answers.
    names = dict.fromkeys(
        name
        for name, label in [*asked_of_first, *asked_of_second]
        if (name, label) not in asked_of_first or (name, label) not in asked_of_second
    )
    shown = ", ".join(map(repr, [*names][:SHOWN_IDS]))
    return f"; not the same: {len(names)} of them, such as {shown}"


# What to do about questions that were asked or read otherwise, where two files are compared.
COMMON_REMEDY = "; `compare --common` takes what both have"
NORMALISER_REMEDY = "`--normalise sum` of `compare` reads both alike"
PROMPTS_REMEDY = "if it is meant, `compare --different-prompts`"


def same_normaliser(a: Evaluation, b: Evaluation, remedy: str = NORMALISER_REMEDY) -> None:
    """Raise `InputError` where texts' log-probabilities were divided by other lengths.

    A model's calibration by sums is not that by characters, so a difference would be mostly the
    normaliser's. Letters have none, so they are compared with texts of any.
    """
    if a.scoring != "continuation" or b.scoring != "continuation":
        return
    if a.normalise != b.normalise:
        raise InputError(
            f"{a.path} and {b.path}: the same questions, read with normalise {a.normalise!r} and "
            f"{b.normalise!r}, so a difference is not the models' alone; {remedy}"
        )


def same_prompts(
    a: Evaluation, b: Evaluation, wording: bool = True, remedy: str = PROMPTS_REMEDY
) -> None:
    """Raise `InputError` where the questions of two evaluations were asked in other words.

    A difference would be the prompts' as well. Compared are letters or texts, the chat template and
    the number of examples that were wanted; with `wording` also the prompts' very words, and how
    many of them were cut to fit the model. Where one of the two has no digests of its prompts, its
    wording is taken to be alike; so is its chat template where it is the import of a program that
    does not tell of chats.
    """
    conditions_of_b = _conditions(b, wording)
    for name, first in _conditions(a, wording).items():
        second = conditions_of_b[name]
        if first is not None and second is not None and first != second:
            if name == "prompts" and a.shown_shots != b.shown_shots:
                name = "examples that fit"
                first = a.shown_shots
                second = b.shown_shots
            raise InputError(
                f"{a.path} and {b.path}: the same questions, asked with {name} {first!r} and "
                f"{second!r}, so a difference is not the models' alone; {remedy}"
            )


def _conditions(evaluation: Evaluation, wording: bool) -> dict[str, Any]:
    """How an evaluation's questions were asked; None where that is not known or not wanted.

    Of cut prompts alone the number is 0 where it is not known: other programs' logs do not tell it.
    """
    chat_template = evaluation.chat_template
    if chat_template is None and evaluation.chat_template_is_known:
        chat_template = "none"
    return {
        "scoring": evaluation.scoring,
        "chat template": chat_template,
        "shots": evaluation.shots,
        "prompts": evaluation.prompts_sha256 if wording else None,
        # The digest is of a prompt as it was before it was cut.
        "truncated prompts": evaluation.truncated_prompts if wording else None,
    }
