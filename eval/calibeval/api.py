"""Figures of records, from Python: `metrics`, `compare` and `reliability`.

Each takes records as `calibeval.score` returns them, a file of records, or a `Run`, which is what
`calibeval.stats` has computed of one. `calibeval` itself exports these functions.
"""

from pathlib import Path

from typing_extensions import TypedDict

from calibeval import stats
from calibeval.records import Records
from calibeval.stats import Estimate, Run

RecordsLike = Records | Run | str | Path


class Comparison(TypedDict):
    """A metric of two runs over the same questions."""

    a: float | None
    b: float | None
    difference: float | None  # b − a; of `rms_debiased` b² − a²
    low: float | None  # of the difference's 95 % interval; None where none is known to cover
    high: float | None
    better: str | None  # "a" or "b"; None where the interval holds 0 or none is known


def run_of(records: RecordsLike) -> Run:
    """Every figure of some records; those of a file are kept beside it."""
    if isinstance(records, Run):
        return records
    if isinstance(records, Records):
        return stats.measure(records)
    return stats.load(Path(records))


def metrics(records: RecordsLike) -> dict[str, dict[str, Estimate]]:
    """Every metric in each definition of confidence: {confidence: {metric: estimate}}.

    An estimate is a value with its 95 % interval, or with its floor and p. The confidence "choices"
    is the probability among the choices; "vocabulary" among all tokens, of letters only. Records
    that cannot be used raise `InputError`.
    """
    run = run_of(records)
    figures = {}
    for confidence in run.confidences:
        figures[confidence] = {
            metric: stats.estimate([run], metric, confidence) for metric in stats.METRICS
        }
    return figures


def compare(
    a: RecordsLike, b: RecordsLike, different_prompts: bool = False
) -> dict[str, dict[str, Comparison]]:
    """Whether run b is better than run a, and by how much: {confidence: {metric: comparison}}.

    Runs are paired by question over the same resamples; `better` is "a", "b", or None where the
    interval holds 0 or none is known to cover. Of `rms_debiased` the difference is that of the
    squares. Runs over other questions raise `InputError`, and so do questions that were asked in
    other words unless `different_prompts`.
    """
    run_a = run_of(a)
    run_b = run_of(b)
    stats.same_questions([run_a, run_b])
    if not different_prompts:
        stats.same_prompts(run_a, run_b)
    comparisons: dict[str, dict[str, Comparison]] = {}
    for confidence in run_a.confidences:
        if confidence not in run_b.confidences:
            continue
        comparisons[confidence] = {
            metric: _compare_metric(run_a, run_b, metric, confidence) for metric in stats.METRICS
        }
    return comparisons


def _compare_metric(run_a: Run, run_b: Run, metric: str, confidence: str) -> Comparison:
    difference = stats.difference([run_a], [run_b], metric, confidence)
    return {
        "a": run_a.values[confidence][metric],
        "b": run_b.values[confidence][metric],
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "better": stats.better(metric, difference),
    }


def reliability(records: RecordsLike, confidence: str = "choices") -> dict[str, list[float]]:
    """What a reliability diagram shows: bins, and curves with bands; see `stats.reliability`.

    `confidence` is "choices", or "vocabulary" where the records have it.
    """
    return run_of(records).reliability[confidence]
