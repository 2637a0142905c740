"""One temperature for a model's answers (Guo et al. 2017), fitted on other questions' records.

    p_k = softmax(s / τ)_k,   τ = argmin of the mean −log p of the right choices

`s` (K,) are a question's log-probabilities, normalised as its records say; whatever is the same for
all choices falls out of p. A temperature never changes their order, so accuracy stays what it was.
"""

import math
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from calibeval import records
from calibeval.io import InputError, counted, json_lines, sha256
from calibeval.records import Records

LIMIT = 4.0  # of |log τ|
FEWEST = 20  # answers to fit it on


def nll(of: Records, tau: float, used: np.ndarray | slice = slice(None)) -> float:
    """Mean −log p(right choice) at a temperature, in nats."""
    scores, labels = of.logprobs[used] / tau, of.labels[used]
    return float(np.mean(logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]))


def temperature(validation: str | Path, test: str | Path, out: str | Path) -> dict:
    """Fit a temperature to the records `validation`; write those of `test` with it as `out`.

    Questions of `test` that `validation` holds as well are not fitted on. What comes out has no
    reading among all tokens: that would take the logits of them all. Returns how the fit went.

    Raises:
        InputError: records of another model, or read in another way; fewer than 20 to fit on.
    """
    validation, test, out = map(Path, (validation, test, out))
    fitted_on, scored = records.read(validation), records.read(test)
    about = [records.asked(path) for path in (validation, test)]
    models = {one.get("model_digest") for one in about}
    for key in ("scoring", "normalise"):
        if (found := getattr(fitted_on, key)) != (other := getattr(scored, key)):
            raise InputError(f"{validation}: {key} {found!r}, but {test} {other!r}")
    if len(models if None not in models else {fitted_on.model, scored.model}) > 1:
        raise InputError(f"{validation}: is of another model than {test}; fit on its own answers")
    if out.exists():
        raise InputError(f"{out}: is there already; delete it, or give another --out")
    seen = set(scored.prompts) - {None}
    used = np.array([prompt not in seen for prompt in fitted_on.prompts])
    if used.sum() < FEWEST:
        few = f"{counted(int(used.sum()), 'answer')} that {test} does not hold as well"
        raise InputError(f"{validation}: {few}; expected {FEWEST} or more to fit a temperature on")
    found = minimize_scalar(
        lambda log_tau: nll(fitted_on, math.exp(log_tau), used),
        bounds=(-LIMIT, LIMIT),
        method="bounded",
        options={"xatol": 1e-6},
    )
    tau = math.exp(found.x)
    report = {"temperature": tau, "nll": [nll(fitted_on, 1.0, used), float(found.fun)]}
    report |= {"answers": int(used.sum()), "left_out": int((~used).sum())}
    made = {"temperature": report | {"records": str(validation), "sha256": sha256(validation)}}
    rows = (scaled(row, tau) for _, row in json_lines(test))
    records.write(out, rows, records.meta(test) | made)
    return report


def scaled(row: dict, tau: float) -> dict:
    """A record at a temperature; letters' probabilities sum to 1 then."""
    logprobs = np.array(row["logprobs"]) / tau
    if row.get("scoring", "letters") == "letters":
        logprobs -= logsumexp(logprobs)
    return row | {"logprobs": logprobs.tolist(), "letter_mass": None}
