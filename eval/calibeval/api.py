"""Figures of records, from Python: `summarize`, `compare` and `reliability`.

Each takes records as `calibeval.score` returns them, a file of records, or a `Run`, which is what
`calibeval.stats` has computed of one. `calibeval` itself exports these functions.
"""

from pathlib import Path

from typing_extensions import TypedDict

from calibeval import stats
from calibeval.measures import METRICS
from calibeval.records import Records
from calibeval.stats import Cluster, Estimate, Run

RecordsLike = Records | Run | str | Path


class Comparison(TypedDict):
    """A metric of two runs over the same questions."""

    a: float | None
    b: float | None
    difference: float | None  # b − a; of `rms_debiased` b² − a²
    low: float | None  # of the difference's 95 % interval; None where none is known to cover
    high: float | None
    p: float | None  # of there being no difference; None where that is not asked
    better: str | None  # "a" or "b"; None where no difference survives Holm's correction


def run_of(records: RecordsLike, cluster: Cluster | None = None) -> Run:
    """Every figure of some records; those of a file are kept beside it.

    `cluster` is "subject" to resample whole subjects; of a `Run` it was said when that was made.
    """
    if isinstance(records, Run):
        return records
    if isinstance(records, Records):
        return stats.measure(records, cluster)
    return stats.load(Path(records), cluster=cluster)


def summarize(
    records: RecordsLike, cluster: Cluster | None = None
) -> dict[str, dict[str, Estimate]]:
    """Every metric in each definition of confidence: {confidence: {metric: estimate}}.

    An estimate is a value with its 95 % interval, or with its floor and p. The confidence "choices"
    is the probability among the choices; "vocabulary" among all tokens, of letters only.

    Intervals are over the questions and hold for these subjects. With `cluster="subject"` whole
    subjects are resampled, of which there must be ten, and intervals hold for subjects like these.
    Records that cannot be used raise `InputError`.
    """
    run = run_of(records, cluster)
    figures = {}
    for confidence in run.confidences:
        figures[confidence] = {
            metric: stats.estimate([run], metric, confidence) for metric in stats.METRICS
        }
    return figures


def compare(
    a: RecordsLike,
    b: RecordsLike,
    different_prompts: bool = False,
    cluster: Cluster | None = None,
) -> dict[str, dict[str, Comparison]]:
    """Whether run b is better than run a, and by how much: {confidence: {metric: comparison}}.

    Runs are paired by question over the same resamples, or with `cluster="subject"` over the same
    resamples of whole subjects. `better` is "a", "b", or None where the difference does not survive
    Holm's correction for all the comparisons that this call makes (`stats.holm`), or no interval of
    it is known to cover. Of `rms_debiased` the difference is that of the squares. Runs over other
    questions raise `InputError`, and so do questions that were asked in other words unless
    `different_prompts`.
    """
    run_a = run_of(a, cluster)
    run_b = run_of(b, cluster)
    stats.same_questions([run_a, run_b])
    stats.same_normaliser(run_a, run_b)
    if not different_prompts:
        stats.same_prompts(run_a, run_b)
    comparisons: dict[str, dict[str, Comparison]] = {}
    for confidence in run_a.confidences:
        if confidence not in run_b.confidences:
            continue
        comparisons[confidence] = {
            metric: _compare_metric(run_a, run_b, metric, confidence) for metric in stats.METRICS
        }
    made = [one for by_metric in comparisons.values() for one in by_metric.values()]
    for comparison, survives in zip(made, stats.holm([one["p"] for one in made]), strict=True):
        if not survives:
            comparison["better"] = None
    return comparisons


def _compare_metric(run_a: Run, run_b: Run, metric: str, confidence: str) -> Comparison:
    difference = stats.difference([run_a], [run_b], metric, confidence)
    return {
        "a": run_a.values[confidence][metric],
        "b": run_b.values[confidence][metric],
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "p": None if METRICS[metric].better == "neither" else difference.p_none,
        "better": stats.better(metric, difference),
    }


def reliability(records: RecordsLike, confidence: str = "choices") -> dict[str, list[float]]:
    """What a reliability diagram shows: bins, and curves with bands; see `stats.reliability`.

    `confidence` is "choices", or "vocabulary" where the records have it.
    """
    return run_of(records).reliability[confidence]
