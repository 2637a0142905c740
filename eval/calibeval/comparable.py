"""Whether record files may be compared: the same questions, asked alike and read alike.

    same_questions    the same ids and right answers, resampled alike
    same_normaliser   texts' log-probabilities divided by the same lengths
    same_prompts      letters or texts, as many examples, and the same words

Anything else would be part of a difference that is to be the models' alone. What may stand in one
file is `calibeval.records`' to say, and which unfinished scoring may go on is `calibeval.store`'s.
"""

from collections.abc import Sequence
from typing import Any

from calibeval import records
from calibeval.io import InputError
from calibeval.runs import Run


def same_questions(runs: Sequence[Run]) -> None:
    """Raise `InputError` unless all runs answered the same questions, resampled alike."""
    for run in runs[1:]:
        if run.cluster != runs[0].cluster:
            raise InputError(
                f"{runs[0].path} and {run.path}: resampled by {runs[0].cluster or 'question'} and "
                f"by {run.cluster or 'question'}; load both with the same `cluster`"
            )
        if run.questions_sha256 != runs[0].questions_sha256:
            raise InputError(
                f"{runs[0].path} and {run.path}: {runs[0].questions:,} and {run.questions:,} "
                "questions; expected the same ids and right answers in both"
            )


def same_normaliser(a: Run, b: Run) -> None:
    """Raise `InputError` where texts' log-probabilities were divided by other lengths.

    A model's calibration by sums is not that by characters, so a difference would be mostly the
    normaliser's. Letters have none, so they are compared with texts of any.
    """
    if a.scoring != "continuation" or b.scoring != "continuation":
        return
    if a.convention != b.convention:
        raise InputError(
            f"{a.path} and {b.path}: the same questions, read with normalise {a.convention!r} and "
            f"{b.convention!r}, so a difference is not the models' alone; `--normalise sum` of "
            "`compare` reads both alike, and in the index another 'dataset' keeps them apart"
        )


def same_prompts(a: Run, b: Run, texts: bool = True) -> None:
    """Raise `InputError` where the questions of two runs were asked in other words.

    A difference would be the prompts' as well: letters or texts, how many examples, and, if
    `texts`, their very words; as far as the records and their sidecars say.
    """
    conditions_of_b = _conditions(b, texts)
    for name, first in _conditions(a, texts).items():
        second = conditions_of_b[name]
        if first is not None and second is not None and first != second:
            raise InputError(
                f"{a.path} and {b.path}: the same questions, asked with {name} {first!r} and "
                f"{second!r}, so a difference is not the models' alone; if it is meant, "
                "`compare --different-prompts`, or another 'dataset' in the index"
            )


def _conditions(run: Run, texts: bool) -> dict[str, Any]:
    """How a run's questions were asked; None what is not known or, of the texts, not wanted."""
    settings = records.meta(run.path).get("settings") or {}
    return {
        "scoring": run.scoring,
        "chat template": run.chat_template or "none",
        # The sidecar has what was wanted; a prompt that would not fit has fewer examples.
        "shots": settings.get("shots", run.shots),
        "prompts": run.prompts_sha256 if texts else None,
    }
