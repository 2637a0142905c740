"""Figures of records, from Python: metrics, compare, reliability."""

from pathlib import Path

from calibeval import stats
from calibeval.records import Records
from calibeval.stats import Estimate, Run


def run_of(records: Records | Run | str | Path) -> Run:
    """Every figure of records; of a file they are kept beside it."""
    if isinstance(records, Run):
        return records
    if isinstance(records, Records):
        return stats.measure(records)
    return stats.load(Path(records))


def metrics(records: Records | Run | str | Path) -> dict[str, dict[str, Estimate]]:
    """{confidence: {metric: value with its 95 % interval, or floor and p}}.

    "choices": probabilities among the choices; "vocabulary": among all tokens, letters only.
    """
    run = run_of(records)
    return {c: {m: stats.estimate([run], m, c) for m in stats.METRICS} for c in run.confidences}


def compare(
    a: Records | Run | str | Path, b: Records | Run | str | Path, different_prompts: bool = False
) -> dict[str, dict[str, dict]]:
    """{confidence: {metric: {"a", "b", "difference", "low", "high", "better"}}} of b less a.

    Paired by question over the same resamples; "better" is "a", "b", or None where the interval
    holds 0 or none is known to cover. Of `rms_debiased` the difference is that of the squares.
    Questions that were asked in other words are refused unless `different_prompts`.
    """
    runs = [run_of(one) for one in (a, b)]
    stats.same_questions(runs)
    if not different_prompts:
        stats.same_prompts(*runs)
    found = {}
    for confidence in (c for c in runs[0].confidences if c in runs[1].confidences):
        found[confidence] = of = {}
        for name in stats.METRICS:
            gap = stats.difference(*([run] for run in runs), name, confidence)
            line = {"a": runs[0].values[confidence][name], "b": runs[1].values[confidence][name]}
            line |= {"difference": gap.value, "low": gap.low, "high": gap.high}
            of[name] = line | {"better": stats.better(name, gap)}
    return found


def reliability(
    records: Records | Run | str | Path, confidence: str = "choices"
) -> dict[str, list]:
    """What a reliability diagram shows, bins and curves with bands: see `stats.reliability`."""
    return run_of(records).reliability[confidence]
