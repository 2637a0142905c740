"""One temperature for a model's answers (Guo et al. 2017), fitted on other questions' records.

    p_k = softmax(s / τ)_k,   τ = argmin of the mean −log p of the right choices

`s` (K,) are a question's log-probabilities, normalised as its records say; whatever is the same for
all choices falls out of p. A temperature never changes their order, so accuracy stays what it was.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from calibeval import records
from calibeval.io import InputError, counted, json_lines, sha256
from calibeval.records import Records

LOG_TEMPERATURE_LIMIT = 4.0  # of |log τ|
FEWEST_ANSWERS = 20  # to fit it on


def nll(answers: Records, tau: float, used: np.ndarray | slice = slice(None)) -> float:
    """Return the mean −log p(right choice) of the answers `used` at a temperature, in nats."""
    logits = answers.logprobs[used] / tau
    labels = answers.labels[used]
    right_logits = logits[np.arange(len(labels)), labels]
    return float(np.mean(logsumexp(logits, axis=1) - right_logits))


def temperature(validation: str | Path, test: str | Path, out: str | Path) -> dict[str, Any]:
    """Fit a temperature to the records `validation`; write those of `test` with it as `out`.

    Questions of `test` that `validation` holds as well are not fitted on. What comes out has no
    reading among all tokens: that would take the logits of them all.

    Returns:
        How the fit went: `temperature`, `nll` before and after in nats, how many `answers` it was
        fitted on and how many were `left_out`.

    Raises:
        InputError: records of another model, or read in another way; fewer than 20 to fit on.
    """
    validation = Path(validation)
    test = Path(test)
    out = Path(out)
    fitted_on = records.read(validation)
    scored = records.read(test)
    _check_alike(fitted_on, scored)
    if out.exists():
        raise InputError(f"{out}: is there already; delete it, or give another --out")
    used = _not_tested(fitted_on, scored)
    tau, after = fit(fitted_on, used)
    report = {
        "temperature": tau,
        "nll": [nll(fitted_on, 1.0, used), after],
        "answers": int(used.sum()),
        "left_out": int((~used).sum()),
    }
    source = {"records": str(validation), "sha256": sha256(validation)}
    sidecar = {**records.meta(test), "temperature": {**report, **source}}
    records.write(out, (scaled(row, tau) for _, row in json_lines(test)), sidecar)
    return report


def _check_alike(fitted_on: Records, scored: Records) -> None:
    """Raise `InputError` unless both are answers of one model, read in the same way."""
    models = {records.asked(some.path).get("model_digest") for some in (fitted_on, scored)}
    if None in models:  # by name, where nobody knows the weights
        models = {fitted_on.model, scored.model}
    for key in ("scoring", "normalise"):
        of_validation = getattr(fitted_on, key)
        of_test = getattr(scored, key)
        if of_validation != of_test:
            raise InputError(
                f"{fitted_on.path}: {key} {of_validation!r}, but {scored.path} {of_test!r}"
            )
    if len(models) > 1:
        raise InputError(
            f"{fitted_on.path}: is of another model than {scored.path}; fit on its own answers"
        )


def _not_tested(fitted_on: Records, scored: Records) -> np.ndarray:
    """Which answers may be fitted on: questions that are not asked in `scored` as well."""
    tested = set(scored.prompts) - {None}
    used = np.array([prompt not in tested for prompt in fitted_on.prompts])
    if used.sum() < FEWEST_ANSWERS:
        answers = counted(int(used.sum()), "answer")
        raise InputError(
            f"{fitted_on.path}: {answers} that {scored.path} does not hold as well; expected "
            f"{FEWEST_ANSWERS} or more to fit a temperature on"
        )
    return used


def fit(answers: Records, used: np.ndarray) -> tuple[float, float]:
    """The temperature of the least NLL, and that NLL."""
    fitted = minimize_scalar(
        lambda log_tau: nll(answers, math.exp(log_tau), used),
        bounds=(-LOG_TEMPERATURE_LIMIT, LOG_TEMPERATURE_LIMIT),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return math.exp(fitted.x), float(fitted.fun)


def scaled(row: dict[str, Any], tau: float) -> dict[str, Any]:
    """Return a record at a temperature; letters' probabilities sum to 1 then."""
    logprobs = np.array(row["logprobs"]) / tau
    if row.get("scoring", "letters") == "letters":
        logprobs -= logsumexp(logprobs)
    return {**row, "logprobs": logprobs.tolist(), "letter_mass": None}
