"""The comparisons that the verdicts rest on, and how each is estimated from records.

A contrast is the sum of its `plus` terms less that of its `minus` terms, paired by seed. A quantity
is what is compared: a metric of a task, read in one way.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from calibeval.measures import definitions, evaluations, samples, stats
from calibeval.measures.samples import Sample
from calibeval.records import read as read_records
from studies.claims import quick_evaluation
from studies.claims.answers import (
    BASE,
    OVER_TRAINED,
    OVER_TRAINED_AT_TEMPERATURE,
    PLAIN,
    PLAIN_AT_TEMPERATURE,
    SMOOTHED,
    AnsweredRun,
    Term,
    files_by_seed,
)
from studies.claims.parts import BETAS
from studies.claims.quick_evaluation import FileState


@dataclass(frozen=True)
class Contrast:
    """A row of the report: the `plus` terms less the `minus` terms."""

    name: str
    plus: tuple[Term, ...]
    minus: tuple[Term, ...]

    def weighted_terms(self) -> list[tuple[int, Term]]:
        """Each term with +1 or −1."""
        return [(1, term) for term in self.plus] + [(-1, term) for term in self.minus]


SQUARED_ERROR = "rms_debiased"
DEFAULT_SCALE = 1000


@dataclass(frozen=True)
class Quantity:
    """What is compared: `metric` of `task`, times `scale`.

    `rms_debiased`, a root, is compared by its square, as `stats.contrast` does: the squared
    calibration error, debiased.
    `confidence` says whose probabilities: among the choices ("choices") or all tokens
    ("vocabulary"). `normalise` is the length by which continuations are divided (None: the task's
    own). With `normalized_logits`, confidences are divided by the norm of the answers' logits.
    """

    task: str
    confidence: samples.ConfidenceDefinition
    normalise: str | None = None
    metric: str = SQUARED_ERROR
    scale: int = DEFAULT_SCALE
    normalized_logits: bool = False

    @property
    def title(self) -> str:
        """The heading of a column; what is as in most columns is not named."""
        words = [self.task, self.confidence]
        if self.normalise:
            words.append(self.normalise)
        if self.metric != SQUARED_ERROR:
            words.append(self.metric)
        if self.normalized_logits:
            words.append("logits normalized")
        if self.scale != DEFAULT_SCALE:
            words.append(f"× {self.scale}")
        return ", ".join(words)


@dataclass(frozen=True)
class Difference:
    """An estimate of a contrast, and the number of seeds that it is a mean over."""

    estimate: stats.Estimate
    seeds: int


def pair(name: str, plus: Term, minus: Term) -> Contrast:
    """A contrast of one term and another."""
    return Contrast(name, (plus,), (minus,))


def smoothing_effect(name: str, part: str, label_smoothing: float = 0.1) -> Contrast:
    """What label smoothing changes within a part."""
    return pair(name, Term(part, label_smoothing), Term(part, 0.0))


def effect_beyond_recommended(name: str, part: str) -> Contrast:
    """What label smoothing changes within a part beyond what it changes within `recommended`.

    That is (part at 0.1 − part at 0) − (`recommended` at 0.1 − `recommended` at 0).
    """
    return Contrast(name, (Term(part, 0.1), PLAIN), (Term(part, 0.0), SMOOTHED))


CONTRASTS = [
    pair("β = 0 less base", PLAIN, BASE),
    pair("over-trained less base", OVER_TRAINED, BASE),
    pair("two epochs less base", Term("two-epochs", 0.0), BASE),
    pair("two epochs less one", Term("two-epochs", 0.0), PLAIN),
    *(
        smoothing_effect(f"{part}: β = {beta} less 0", part, beta)
        for part in ("recommended", "high-rate", "over-trained")
        for beta in BETAS[1:]
    ),
    pair("recommended: β = 0.3 less 0.1", Term("recommended", 0.3), SMOOTHED),
    # A row "– less that of `recommended`" is the difference of the row above it, less the same
    # difference within `recommended`.
    smoothing_effect("sum, clipped: 0.1 less 0", "sum"),
    effect_beyond_recommended("– less that of `recommended`, sum, clipped", "sum"),
    smoothing_effect("open-instruct's script: 0.1 less 0", "script"),
    effect_beyond_recommended("– less that of `recommended`, open-instruct's script", "script"),
    pair("equal held-out loss: 0.1 less 0", SMOOTHED, Term("equal", 0.0)),
    pair("temperature after β = 0, less β = 0", PLAIN_AT_TEMPERATURE, PLAIN),
    pair("temperature after β = 0, less β = 0.1", PLAIN_AT_TEMPERATURE, SMOOTHED),
    pair("temperature after β = 0, less β = 0.3", PLAIN_AT_TEMPERATURE, Term("recommended", 0.3)),
    pair("DACA's temperature after β = 0, less β = 0", Term("daca"), PLAIN),
    pair("DACA's temperature after β = 0, less β = 0.1", Term("daca"), SMOOTHED),
    # Not alike: DACA's is fitted on the test questions themselves, the other one on val questions.
    pair("DACA's temperature (of the test) less one of val", Term("daca"), PLAIN_AT_TEMPERATURE),
    pair(
        "over-trained: temperature after β = 0, less β = 0",
        OVER_TRAINED_AT_TEMPERATURE,
        OVER_TRAINED,
    ),
    pair(
        "over-trained: temperature after β = 0, less β = 0.3",
        OVER_TRAINED_AT_TEMPERATURE,
        Term("over-trained", 0.3),
    ),
    pair(
        "over-trained: temperature after β = 0, less β = 0.5",
        OVER_TRAINED_AT_TEMPERATURE,
        Term("over-trained", 0.5),
    ),
    pair("averaged with base, less β = 0", Term("averaged"), PLAIN),
    pair("averaged with base, less β = 0.1", Term("averaged"), SMOOTHED),
    pair("half the conversations, less β = 0", Term("half-data"), PLAIN),
    pair("half the conversations, less β = 0.1", Term("half-data"), SMOOTHED),
    pair("filtered less exact, β = 0.1", Term("filtered", 0.1), SMOOTHED),
    pair("unigram less uniform, β = 0.1", Term("unigram", 0.1), SMOOTHED),
    pair("base mean less uniform, β = 0.1", Term("base-mean", 0.1), SMOOTHED),
]

# Squared calibration errors, ×1000, in every reading of every task.
CALIBRATION = [
    Quantity("mmlu", "choices"),
    Quantity("mmlu", "vocabulary"),
    Quantity("arc-letters", "choices"),
    Quantity("arc-letters", "vocabulary"),
    Quantity("arc-continuation", "choices"),
    Quantity("arc-continuation", "choices", "sum"),
    Quantity("hellaswag-letters", "choices"),
    Quantity("hellaswag-letters", "vocabulary"),
    Quantity("hellaswag-continuation", "choices"),
    Quantity("hellaswag-continuation", "choices", "sum"),
]
# What must not get worse while calibration gets better: figures of MMLU by name, ×100.
GUARDS = {
    "accuracy": Quantity("mmlu", "choices", None, "accuracy", 100),
    "nll": Quantity("mmlu", "choices", None, "nll", 100),
    "brier": Quantity("mmlu", "choices", None, "brier", 100),
    "auroc": Quantity("mmlu", "choices", None, "auroc", 100),
    "aurc": Quantity("mmlu", "choices", None, "aurc", 100),
    "nll, all tokens": Quantity("mmlu", "vocabulary", None, "nll", 100),
    "aurc, normalized logits": Quantity(
        "mmlu", "choices", None, "aurc", 100, normalized_logits=True
    ),
}


def difference(
    runs: list[AnsweredRun], contrast: Contrast, quantity: Quantity
) -> Difference | None:
    """A contrast over the seeds that all its terms have; None without any.

    Where the resamples tell no interval, the estimate has a value alone.
    """
    weights = []
    files_of_terms = []
    for weight, term in contrast.weighted_terms():
        weights.append(weight)
        files_of_terms.append(files_by_seed(runs, term, quantity.task))
    paired = paired_files(files_of_terms)
    if not paired:
        return None
    weighted_evaluations = []
    for position, weight in enumerate(weights):
        evaluations_of_seeds = [load(files[position], quantity) for files in paired]
        weighted_evaluations.append((weight, evaluations_of_seeds))
    estimate = stats.contrast(weighted_evaluations, quantity.metric, quantity.confidence)
    if estimate.value is None:
        return None
    scaled = replace(
        estimate,
        value=quantity.scale * estimate.value,
        low=None if estimate.low is None else quantity.scale * estimate.low,
        high=None if estimate.high is None else quantity.scale * estimate.high,
    )
    return Difference(scaled, len(paired))


def paired_files(files_of_terms: list[dict[int | None, Path]]) -> list[list[Path]]:
    """For each seed that all terms have, the file of each term; empty where a term has no runs.

    The base model has one run, without a seed, which stands beside every seed; where all terms are
    the base model, there is that one pair.
    """
    if not all(files_of_terms):
        return []
    seeds_of_terms = [set(files) for files in files_of_terms if None not in files]
    if not seeds_of_terms:
        return [[files[None] for files in files_of_terms]]
    common_seeds = set.intersection(*seeds_of_terms)
    seeds = sorted(seed for seed in common_seeds if seed is not None)
    return [
        [files[seed] if seed in files else files[None] for files in files_of_terms]
        for seed in seeds
    ]


def load(path: Path, quantity: Quantity) -> evaluations.Evaluation:
    """The evaluation in `path` as it is now, with the metric of a quantity and its draws."""
    if quantity.normalized_logits:
        return with_normalized_logits(path)
    return quick_evaluation.load(path, (quantity.metric,), quantity.normalise)


def with_normalized_logits(path: Path) -> evaluations.Evaluation:
    """The evaluation in `path` as it is now, as `_with_normalized_logits` measures it."""
    return _with_normalized_logits(path, quick_evaluation.state_of(path))


@cache
def _with_normalized_logits(path: Path, state: FileState) -> evaluations.Evaluation:
    """An evaluation whose AURC is of confidences divided by the norm of the answers' logits.

    It has no other metric. Its `unit_values` are those of the ordinary confidences.

    The confidences are max_k (s_k − s̄) / ‖s − s̄‖₂, s the choices' log-probabilities, which are
    logits but for a constant (Cattelan & Silva 2024; Xia et al. 2025). A run stands in many
    contrasts and is measured once for each `state` of its file, which a new temperature changes.
    """
    # Sorted by id as `measure` sorts them, so that the resamples pair with those of other files.
    observed = evaluations.in_order(read_records(path))
    scores = samples.scores_of_records(observed, "choices")
    centered = observed.logprobs - observed.logprobs.mean(1, keepdims=True)
    # Where all choices are equally likely, the norm is 0 and the confidence shall be 0.
    scores.confidence = centered.max(1) / np.maximum(np.linalg.norm(centered, axis=1), 1e-12)
    # A metric returns a number for each sample; the observed questions are one sample.
    (value,) = definitions.aurc(Sample.observed(scores))
    draws_of_chunks = []
    for counts in samples.resamples(len(observed), evaluations.RESAMPLES):
        draws_of_chunks.append(definitions.aurc(Sample.resampled(scores, counts)))
    return replace(
        quick_evaluation.load(path, ("aurc",)),
        values={"choices": {"aurc": value}},
        draws={"choices": {"aurc": np.concatenate(draws_of_chunks)}},
    )
