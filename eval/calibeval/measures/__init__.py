"""What records say: the one door to metrics, their intervals and what they are computed from.

`summarize`, `summarize_subjects`, `compare` and `reliability`, which `calibeval` exports too, take
records as `calibeval.score` returns them, a file of records, or an `Evaluation`. Commands, reports
and studies find here whatever else they need. Behind the door, each built on those above it:

    bins, kernel_smoothing   sums over bins, and smooth curves
    squared_error            the squared calibration error without bias
    samples                  `Scores` of questions, and `Sample`s of them
    definitions              every metric, and the table `METRICS`
    evaluations              `Evaluation`: a file's metrics, resampled and simulated, and kept
    comparable               which evaluations may be compared
    stats                    `Estimate`s: intervals, means over seeds, differences
    scaling, conformal       a temperature, and prediction sets
"""

from collections.abc import Collection
from pathlib import Path
from statistics import fmean

from typing_extensions import TypedDict

from calibeval import records as record_files
from calibeval.io import InputError
from calibeval.measures import stats
from calibeval.measures.comparable import (
    COMMON_REMEDY,
    same_normaliser,
    same_prompts,
    same_questions,
)
from calibeval.measures.definitions import (
    COMPARED_BY_SQUARE,
    MAIN_ERROR,
    METRICS,
    SUMMARY,
    WITH_INTERVAL,
)
from calibeval.measures.evaluations import (
    CONFIDENCES,
    PARTS,
    SIGNIFICANCE,
    SUMMARY_PARTS,
    Cluster,
    Evaluation,
    Part,
    TooFewClusters,
    floor_tests,
    in_order,
    load,
    measure,
    samples_of,
)
from calibeval.measures.samples import (
    AMONG_WORDS,
    ConfidenceDefinition,
    Sample,
    Scores,
    scores_of_records,
)
from calibeval.measures.stats import Estimate
from calibeval.records import Records

__all__ = [
    "AMONG_WORDS",
    "COMPARED_BY_SQUARE",
    "CONFIDENCES",
    "MAIN_ERROR",
    "METRICS",
    "PARTS",
    "SIGNIFICANCE",
    "SUMMARY",
    "SUMMARY_PARTS",
    "WITH_INTERVAL",
    "Cluster",
    "Comparison",
    "ConfidenceDefinition",
    "Estimate",
    "Evaluation",
    "Part",
    "RecordsLike",
    "Sample",
    "Scores",
    "SubjectSummary",
    "TooFewClusters",
    "compare",
    "floor_tests",
    "in_order",
    "load",
    "measure",
    "reliability",
    "same_normaliser",
    "same_prompts",
    "same_questions",
    "samples_of",
    "scores_of_records",
    "stats",
    "summarize",
    "summarize_subjects",
]

RecordsLike = Records | Evaluation | str | Path


class Comparison(TypedDict):
    """A metric of two models' answers to the same questions."""

    a: float | None
    b: float | None
    difference: float | None  # b − a; of a metric compared by its square T_b − T_a, not cut at 0
    low: float | None  # of the difference's 95 % interval; None where none is known to cover
    high: float | None
    p: float | None  # of there being no difference; None without an interval, and of `ece_signed`
    better: str | None  # "a" or "b"; None where no difference survives Holm's correction


def evaluation_of(
    records: RecordsLike,
    cluster: Cluster | None,
    parts: Collection[Part],
    metrics: Collection[str] | None = None,
) -> Evaluation:
    """The evaluation of some records, with these parts; that of a file is kept beside it.

    `cluster` is "subject" to resample whole subjects; of an `Evaluation` it was said when that was
    made, and so were its parts and its metrics.
    """
    if isinstance(records, Evaluation):
        return records
    if isinstance(records, Records):
        return measure(records, cluster, metrics, parts)
    return load(Path(records), cluster=cluster, parts=parts, metrics=metrics)


def summarize(
    records: RecordsLike,
    cluster: Cluster | None = None,
    metrics: Collection[str] | None = None,
) -> dict[str, dict[str, Estimate]]:
    """Metrics in each definition of confidence, by default all: {confidence: {metric: estimate}}.

    With `metrics` these alone are computed, of a file each time anew. Of an `Evaluation` it is what
    that holds: one that was measured for some metrics alone has no floors.

    An estimate is a value with its 95 % interval, or with its floor and p. Where neither is known
    it is the value alone, as of accuracy where all answers are right. The confidence "choices" is
    the probability among the choices; "vocabulary" among all tokens, of letters only.

    Intervals are over the questions and hold for these subjects. With `cluster="subject"` whole
    subjects are resampled, of which there must be ten, and intervals hold for subjects like these.
    Records that cannot be used raise `InputError`.
    """
    evaluation = evaluation_of(records, cluster, SUMMARY_PARTS, metrics)
    estimates: dict[str, dict[str, Estimate]] = {}
    # `among` is a definition of confidence: "choices" or "vocabulary".
    for among in evaluation.confidences:
        estimates[among] = {
            metric: stats.estimate([evaluation], metric, among)
            for metric in evaluation.metrics
            if metrics is None or metric in metrics
        }
    return estimates


class SubjectSummary(TypedDict):
    """The figures of each subject, and their means over the subjects."""

    subjects: dict[str, dict[str, float]]  # {subject: {"questions": N, metric: value}}
    macro: dict[str, float]


def summarize_subjects(records: RecordsLike, normalise: str | None = None) -> SubjectSummary:
    """The metrics that are means over questions, among the choices, by subject.

    Other calibration errors of a subject's few questions would be mostly noise. Every subject
    counts alike in `macro`; in `summarize` every question does. `normalise` is as of `records.read`
    for a file.
    """
    if isinstance(records, Evaluation):
        records = record_files.read(records.path, normalise or records.normalise)
    elif not isinstance(records, Records):
        records = record_files.read(Path(records), normalise)
    scores = scores_of_records(records, "choices")
    by_subject: dict[str, dict[str, float]] = {}
    for subject in sorted(set(records.subjects)):
        own = records.subjects == subject
        sample = Sample.observed(Scores(scores.logprobs[own], scores.labels[own]))
        by_subject[subject] = {"questions": int(own.sum())}
        for name, metric in METRICS.items():
            if metric.is_mean:
                by_subject[subject][name] = float(metric(sample)[0])
    macro: dict[str, float] = {}
    for name in next(iter(by_subject.values())):
        if name != "questions":
            macro[name] = fmean(values[name] for values in by_subject.values())
    return {"subjects": by_subject, "macro": macro}


def compare(
    a: RecordsLike,
    b: RecordsLike,
    different_prompts: bool = False,
    cluster: Cluster | None = None,
) -> dict[str, dict[str, Comparison]]:
    """Whether b is better than a, and by how much: {confidence: {metric: comparison}}.

    The answers are paired by question over the same resamples, or with `cluster="subject"` over the
    same resamples of whole subjects. Of `rms_debiased` the difference is that of the squared
    errors T, before they are cut at 0.

    `better` is "a" or "b" where the difference survives Holm's correction for all the comparisons
    that this call makes (`stats.holm`). It is None where the difference does not, and where no
    interval of it is known to cover.

    Of an `Evaluation` that was measured for some metrics alone only these are compared.

    `records.common` reads the questions that two files share, to compare these alone.

    Raises `InputError` for other questions, for questions that were asked in other words unless
    `different_prompts`, and for two evaluations without a metric in common.
    """
    evaluation_a = evaluation_of(a, cluster, ["draws"])
    evaluation_b = evaluation_of(b, cluster, ["draws"])
    same_questions([evaluation_a, evaluation_b], COMMON_REMEDY)
    same_normaliser(evaluation_a, evaluation_b)
    if not different_prompts:
        same_prompts(evaluation_a, evaluation_b)
    metrics = [metric for metric in evaluation_a.metrics if metric in evaluation_b.metrics]
    if not metrics:
        raise InputError(
            f"{evaluation_a.path} and {evaluation_b.path}: no metric in common; found "
            f"{', '.join(evaluation_a.metrics)} and {', '.join(evaluation_b.metrics)}; measure "
            "both for the same `metrics`"
        )
    comparisons: dict[str, dict[str, Comparison]] = {}
    for among in evaluation_a.confidences:
        if among not in evaluation_b.confidences:
            continue
        comparisons[among] = {
            metric: _compare_metric(evaluation_a, evaluation_b, metric, among) for metric in metrics
        }
    made = [one for by_metric in comparisons.values() for one in by_metric.values()]
    for comparison, survives in zip(made, stats.holm([one["p"] for one in made]), strict=True):
        if not survives:
            comparison["better"] = None
    return comparisons


def _compare_metric(
    evaluation_a: Evaluation, evaluation_b: Evaluation, metric: str, among: ConfidenceDefinition
) -> Comparison:
    difference = stats.difference([evaluation_a], [evaluation_b], metric, among)
    return {
        "a": evaluation_a.values[among][metric],
        "b": evaluation_b.values[among][metric],
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "p": stats.p_of_comparison(metric, difference),
        "better": stats.better(metric, difference),
    }


def reliability(
    records: RecordsLike, confidence: ConfidenceDefinition = "choices"
) -> dict[str, list[float]]:
    """What a reliability diagram shows: bins, and curves with bands; see `evaluations.reliability`.

    `confidence` is the definition of confidence (`calibeval.measures`): "choices", or "vocabulary"
    where the records have it; else `InputError`.
    """
    evaluation = evaluation_of(records, None, ["curves"])
    if confidence not in evaluation.reliability:
        known = ", ".join(map(repr, evaluation.reliability)) or "none, since it was not computed"
        raise InputError(f"{evaluation.path}: no confidence {confidence!r}; there is {known}")
    return evaluation.reliability[confidence]
