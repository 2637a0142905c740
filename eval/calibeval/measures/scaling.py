"""One temperature for a model's answers (Guo et al. 2017), fitted on other questions' records.

    p_k = softmax(s / τ)_k,   τ = argmin of the mean −log p of the right choices

`s` (K,) are a question's log-probabilities, normalised as its records say; whatever is the same for
all choices falls out of p. A temperature never changes their order, so accuracy stays what it was.

Of an answer that the model wrote, p = exp(s / τ), and τ is the argmin of the mean −log p where the
answer is right and −log (1 − p) where it is wrong.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from calibeval import records
from calibeval.io import InputError, counted, hanging, json_lines, sha256, show
from calibeval.records import WRITTEN_CONFIDENCES, Records

LOG_TEMPERATURE_LIMIT = 4.0  # of |log τ|
AT_THE_LIMIT = 1e-3  # so near to it, the search has ended there
FLAT_NLL = 1e-9  # nats
CERTAIN = -1e-12  # log-probability of a written answer that is as good as certain
OTHER_RECORDS = "fit on other records, or check their labels"
FEWEST_ANSWERS = 20  # to fit it on
# The share of common ids whose right answers must agree for these to be the same questions.
SHARE_OF_SAME_QUESTIONS = 0.9


class NoTemperature(InputError):
    """No temperature can be fitted to answers.

    Attributes:
        reason: Why, without the file and the remedy.
    """

    def __init__(self, path: Path, reason: str, remedy: str):
        super().__init__(f"{path}: {reason}; {remedy}")
        self.reason = reason


def nll(answers: Records, tau: float, used: np.ndarray | slice = slice(None)) -> float:
    """Return the mean −log p(right choice) of the answers `used` at a temperature, in nats."""
    logits = answers.logprobs[used] / tau
    labels = answers.labels[used]
    if answers.scoring == "generate":
        log_p = np.minimum(logits[:, 0], CERTAIN)
        return float(-np.mean(np.where(labels == 0, log_p, np.log(-np.expm1(log_p)))))
    right_logits = logits[np.arange(len(labels)), labels]
    return float(np.mean(logsumexp(logits, axis=1) - right_logits))


def temperature(
    validation: str | Path, test: str | Path, out: str | Path, *, normalise: str | None = None
) -> dict[str, Any]:
    """Fit a temperature to the records `validation`; write those of `test` with it as `out`.

    Questions of `test` that `validation` holds as well are not fitted on: by prompt, or by id and
    right answer where nearly all common ids have the same right answer. What comes out has no
    reading among all tokens: that would take the logits of them all.

    `normalise` is as of `records.read`, and what comes out is read by it: "sum" divides the
    log-likelihood of a whole written answer.

    Returns:
        How the fit went: `temperature`, `nll` before and after in nats, how many `answers` it was
        fitted on and how many were `left_out`.

    Raises:
        InputError: records of another model, or read in another way; fewer than 20 to fit on; any
            temperature fits, all answers are right, or all are wrong and none fits best; `out` is
            there already.
    """
    validation = Path(validation)
    test = Path(test)
    out = Path(out)
    fitted_on = records.read(validation, normalise)
    scored = records.read(test, normalise)
    _check_alike(fitted_on, scored)
    if out.exists():
        raise InputError(f"{out}: is there already; delete it, or give another --out")
    used = _not_tested(fitted_on, scored)
    tau, after = fit(fitted_on, used)
    summary = {
        "temperature": tau,
        "nll": [nll(fitted_on, 1.0, used), after],
        "answers": int(used.sum()),
        "left_out": int((~used).sum()),
    }
    source = {"records": str(validation), "sha256": sha256(validation)}
    source["normalise"] = fitted_on.normalise
    sidecar = {**records.meta(test), "temperature": {**summary, **source}}
    read_by = {} if normalise is None else {"normalise": normalise}
    rows = ({**scaled(row, tau), **read_by} for _, row in json_lines(test))
    records.write(out, rows, sidecar)
    return summary


def _check_alike(fitted_on: Records, scored: Records) -> None:
    """Raise `InputError` unless both are answers of one model, read in the same way."""
    models = {
        records.settings_of_scoring(some.path).get("model_digest") for some in (fitted_on, scored)
    }
    if None in models:  # by name, where nobody knows the weights
        models = {fitted_on.model, scored.model}
    for key in ("scoring", "normalise", "chat_template"):
        of_validation = getattr(fitted_on, key)
        of_test = getattr(scored, key)
        if of_validation != of_test:
            raise InputError(
                f"{fitted_on.path}: {key} {of_validation!r}, but {scored.path} {of_test!r}"
            )
    if scored.normalise in WRITTEN_CONFIDENCES:
        raise InputError(
            f"{scored.path}: normalise {scored.normalise!r}: is no likelihood, which a temperature "
            "would divide"
        )
    if len(models) > 1:
        raise InputError(
            f"{fitted_on.path}: is of another model than {scored.path}; fit on its own answers"
        )


def _not_tested(fitted_on: Records, scored: Records) -> np.ndarray:
    """Which answers may be fitted on: questions that are not asked in `scored` as well.

    A question is asked in both if its prompt is, or its id and right answer are. Two splits of a
    task may number their questions alike, so ids tell only where the right answers of nearly all
    common ones agree, which those of different questions do not. Of written answers no right
    answer is recorded; behind as many examples their prompts tell by themselves.
    """
    tested = set(scored.prompts) - {None}
    used = np.array([prompt not in tested for prompt in fitted_on.prompts])
    prompts_are_known = None not in (*scored.prompts, *fitted_on.prompts)
    asked_alike = prompts_are_known and fitted_on.shots == scored.shots
    if not asked_alike or fitted_on.scoring != "generate":
        label_of = dict(zip(scored.ids, scored.references.tolist(), strict=True))
        answers = zip(fitted_on.ids, fitted_on.references.tolist(), strict=True)
        in_both = np.array([label_of.get(name) == label for name, label in answers])
        common_ids = sum(name in label_of for name in fitted_on.ids)
        if common_ids and in_both.sum() > SHARE_OF_SAME_QUESTIONS * common_ids:
            used &= ~in_both
    if used.sum() < FEWEST_ANSWERS:
        left = counted(int(used.sum()), "answer")
        raise InputError(
            f"{fitted_on.path}: {left} that {scored.path} does not hold as well (by prompt, or by "
            f"id and right answer); expected {FEWEST_ANSWERS} or more to fit a temperature on. "
            "Give records of other questions, such as `score --split val` makes"
        )
    return used


def fit(answers: Records, used: np.ndarray) -> tuple[float, float]:
    """The temperature of the least NLL of the answers `used`, (N,) of bool, and that NLL.

    `NoTemperature` where there is none: where any fits, where all answers are right, or where all
    are wrong and NLL falls on towards infinity. Where NLL falls on to one side for another reason,
    as of a model at chance, stderr says so.
    """
    logprobs = answers.logprobs[used]
    right = logprobs.argmax(1) == answers.labels[used]
    is_choice = np.isfinite(logprobs)  # −∞ stands where a question has fewer choices than others
    least_logprob = np.where(is_choice, logprobs, np.inf).min(1)
    spread = logprobs.max(1) - least_logprob
    if right.all() and spread.max() > FLAT_NLL:
        # NLL is 0 in floating point from some temperature down, so the search may end anywhere.
        raise NoTemperature(answers.path, _falls_on(right, "0"), OTHER_RECORDS)
    if np.ptp([nll(answers, tau, used) for tau in (0.5, 1.0, 2.0)]) < FLAT_NLL:
        raise NoTemperature(
            answers.path,
            "any temperature fits, since all choices have the same probability in every answer",
            "there is nothing to scale",
        )
    fitted = minimize_scalar(
        lambda log_tau: nll(answers, math.exp(log_tau), used),
        bounds=(-LOG_TEMPERATURE_LIMIT, LOG_TEMPERATURE_LIMIT),
        method="bounded",
        options={"xatol": 1e-6},
    )
    if abs(fitted.x) > LOG_TEMPERATURE_LIMIT - AT_THE_LIMIT:
        side = "0" if fitted.x < 0 else "infinity"
        reason = _falls_on(right, side)
        if not right.any() or right.all():
            raise NoTemperature(answers.path, reason, OTHER_RECORDS)
        limit = math.exp(fitted.x)
        warning = f"warning: {answers.path}: {reason}; took {limit:.3g}, the end of the search"
        show(hanging(warning), to_stderr=True)
    return math.exp(fitted.x), float(fitted.fun)


def _falls_on(right: np.ndarray, side: str) -> str:
    """That no temperature is best; `right` says of each answer whether it is, (N,)."""
    return (
        f"no temperature is best, since NLL falls on towards {side} "
        f"({int(right.sum())} of {len(right)} answers are right)"
    )


def scaled(row: dict[str, Any], tau: float) -> dict[str, Any]:
    """Return a record at a temperature; letters' probabilities sum to 1 then.

    A written answer has no other confidence then, since the temperature is the likelihood's.
    """
    logprobs = np.array(row["logprobs"]) / tau
    if row.get("scoring") == "generate":
        row = {key: value for key, value in row.items() if key not in WRITTEN_CONFIDENCES}
    if row.get("scoring", "letters") == "letters":
        logprobs -= logsumexp(logprobs)
    return {**row, "logprobs": logprobs.tolist(), "letter_mass": None}
