"""Figures with intervals, for one run, several seeds of it, and the difference of two.

Questions are resampled with replacement, the same way for every run over the same questions, so
that what runs share is counted once over seeds and cancels in a difference. An interval is given
only where simulation has shown that it covers (tests/eval/interval_coverage.py).
"""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from calibeval import measures, records
from calibeval.io import InputError, read_text, sha256, write_text
from calibeval.measures import CALIBRATION, METRICS, REGULAR, Bins, Sample
from calibeval.records import Records

CONFIDENCES = ("choices", "vocabulary")
# 1 the more the better, -1 the less, 0 the nearer to 0.
DIRECTION = dict.fromkeys(METRICS, -1) | {"accuracy": 1, "auroc": 1, "dsc": 1, "ece_signed": 0}
ENDS = {"accuracy": (0, 1), "nll": (0, math.inf), "brier": (0, 2), "auroc": (0, 1)}
ENDS |= {"ece_signed": (-1, 1), "aurc": (0, 1)}
RESAMPLES, SIMULATIONS, BANDS = 1000, 499, 199
POINTS = 101  # of a reliability curve
LOW_MASS = 0.9  # below this the letters are not what the model wants to say
LOW, HIGH = 0.025, 0.975
Side = tuple[np.ndarray, np.ndarray]  # (S,) figures of S runs, (S, R) their draws


@dataclass(frozen=True)
class Estimate:
    """A figure; `low` and `high`, its 95 % interval, are None where none is known to cover.

    `floor` and `p` (calibration errors only): the 95th percentile of what calibrated models with
    these confidences read, and the share of them that read as much as this one.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    p: float | None = None

    @property
    def told_apart(self) -> bool:
        """Whether a difference's interval leaves out 0."""
        return self.low is not None and not self.low <= 1e-12 <= self.high + 2e-12

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        text = f"{self.value:.4f}"
        if self.low is not None:
            text += f" [{self.low:.4f}, {self.high:.4f}]"
        if self.floor is not None:
            text += f" floor {self.floor:.3f}, p {self.p:.3f}"
        return text


@dataclass(frozen=True)
class Run:
    """What tables and figures need of one record file."""

    path: Path
    convention: str  # by what texts' log-probabilities were compared
    scoring: str
    model: str
    questions: int
    questions_sha256: str  # of the ids and right answers, whatever their order
    prompts_sha256: str | None  # of what each was asked with, if the records say
    letter_mass: float
    confidences: tuple[str, ...]
    reliability: dict[str, dict[str, list]]
    values: dict[str, dict[str, float]]  # [confidence][metric]
    floors: dict[str, dict[str, tuple[float, float]]]  # (floor, p)
    # [confidence][metric] (R,); of rms_debiased its `squares` (2, R + 1)
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)


def squares(observed: Bins, drawn: Sequence[Bins]) -> np.ndarray:
    """(2, R + 1): what resamples of T = Σ w_b (Δ_b² − s_b²) read, in two parts; then T and 0.

    A resample's noise is G_b = Δ*_b − Δ_b, so with gaps c Δ_b it reads T* = A + c B + c² D with
    A = Σ w*_b (G_b² − s*_b²), B = 2 Σ w*_b Δ_b G_b, D = Σ w*_b Δ_b². The parts are A, by noise
    alone, and B + D, by gaps as they were observed. Bins are (1, B) as they are, (R, B) resampled.
    """
    gap, several = observed.gap, observed.count > 1
    # Resampling n_b residuals spreads them by (n_b − 1) / n_b too little.
    full = np.where(several, observed.count / np.maximum(observed.count - 1, 1), 1)
    found = []
    for b in drawn:
        noise = np.where(b.count > 0, (b.gap - gap) * np.sqrt(full), 0)
        weight = np.where(several & (b.count > 1), b.weight, 0)
        a = (weight * (noise**2 - full * b.noise)).sum(1)
        found.append(np.stack([a, (weight * (2 * gap * noise + gap**2)).sum(1)]))
    return np.hstack([*found, [[measures.squared(observed)[0]], [0]]])


def quantile(drawn: np.ndarray, level: float | list[float]) -> np.ndarray:
    """What a further draw, along the first axis, stays below with this probability."""
    return np.quantile(drawn, level, axis=0, method="weibull")


def widening(sides: Sequence[Side]) -> float:
    """How much wider than its question noise an interval of means over seeds must be.

    sqrt(1 + Σ max(0, r² s² − r^1.5 o) / (S q)) for the resampled mean's variance q, where s² is
    the variance of the S figures, o the question noise that each has for itself (the mean variance
    less the mean covariance of their draws), and r = t/z, Student's quantile of S − 1 degrees of
    freedom over the normal one. Taking off o makes seeds that do not differ cover more than 0.98,
    and r² o makes seeds that differ by about o cover less than 0.93.
    """
    question = sum(drawn.mean(0) for _, drawn in sides).var(ddof=1)
    extra = 0.0
    for found, drawn in sides:
        if (n := len(found)) > 1:
            covariance = np.cov(drawn)
            trace = np.trace(covariance)
            own = max((trace - (covariance.sum() - trace) / (n - 1)) / n, 0.0)
            from scipy.special import stdtrit  # scipy.stats takes half a second to load

            ratio = float(stdtrit(n - 1, HIGH)) / 1.959964
            extra += max(ratio**2 * found.var(ddof=1) - ratio**1.5 * own, 0.0) / n
    return math.sqrt(1 + extra / question) if question else 1.0


def load(path: Path, normalise: str | None = None) -> Run:
    """A record file's figures; kept beside it, and made anew when records or code change."""
    path = Path(path)
    key = [sha256(path), code(), normalise]
    kept = path.with_name(f"{path.name}{f'.{normalise}' if normalise else ''}.stats.json")
    if kept.is_file():
        with suppress(InputError, ValueError, TypeError):  # of another make
            known, about = json.loads(read_text(kept))
            if known == key:
                for of in about["draws"].values():
                    of |= {metric: np.array(drawn) for metric, drawn in of.items()}
                return Run(path, **about)
    run = measure(records.read(path, normalise))
    about = {k: v for k, v in vars(run).items() if k != "path"}
    with suppress(InputError):  # a read-only folder only costs the time to compute it again
        write_text(kept, json.dumps([key, about], default=np.ndarray.tolist))
    return run


@cache
def code() -> str:
    """SHA-256 of the sources that say what a figure is."""
    sources = (measures.__file__, records.__file__, __file__)
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()


def samples(of: Records) -> dict[str, Sample]:
    """The questions under each definition of confidence that they have."""
    confidences = CONFIDENCES[: 1 + bool(np.isfinite(of.letter_mass).all())]
    return {c: Sample(measures.scores(of, c)) for c in confidences}


def measure(of: Records) -> Run:
    """The figures of records in memory, and the curves of a reliability diagram."""
    of = in_order(of)
    exact = samples(of)
    draws = {c: {name: [] for name in REGULAR} for c in exact}
    bins = {c: [] for c in exact}
    for times in measures.resamples(len(of), RESAMPLES):
        for c, observed in exact.items():
            sample = Sample(observed.scores, times)
            bins[c].append(sample.top)
            for name, parts in draws[c].items():
                parts.append(METRICS[name](sample))
    asked = json.dumps([*zip(of.ids, of.labels.tolist(), strict=True)], ensure_ascii=False)
    prompts = records.prompts_digest(zip(of.prompts, of.labels.tolist(), strict=True))
    return Run(
        of.path,
        of.normalise,
        of.scoring,
        of.model,
        len(of),
        hashlib.sha256(asked.encode()).hexdigest(),
        None if None in of.prompts else prompts,
        finite(of.letter_mass.mean()),
        tuple(exact),
        {c: reliability(sample) for c, sample in exact.items()},
        {c: {m: finite(METRICS[m](sample)[0]) for m in METRICS} for c, sample in exact.items()},
        {c: consistency(sample, tuple(CALIBRATION)) for c, sample in exact.items()},
        {
            c: {m: np.concatenate(parts) for m, parts in draws[c].items()}
            | {"rms_debiased": squares(sample.top, bins[c])}
            for c, sample in exact.items()
        },
    )


def in_order(of: Records) -> Records:
    """The records by their ids: the same resamples for every file of these questions."""
    at = np.argsort(np.array(of.ids), kind="stable")
    arrays = {name: v[at] for name, v in vars(of).items() if isinstance(v, np.ndarray)}
    return replace(of, ids=[of.ids[i] for i in at], **arrays)


def reliability(sample: Sample) -> dict[str, list]:
    """What a reliability diagram shows of some answers and their confidences.

    count: answers of each bin
    at: confidences from the least to the greatest, at which the curves are
    smooth, smooth_low, smooth_high: accuracy by the kernel of `smooth_ece`, with a 95 % band over
        resamples of the questions
    isotonic: accuracy by isotonic regression (CORP); isotonic_low, isotonic_high: where it lies in
        95 % of calibrated models with these confidences
    """
    p = sample.scores.confidence
    at, order = np.linspace(p.min(), p.max(), POINTS), np.argsort(p, kind="stable")

    def steps(of: Sample) -> np.ndarray:
        fitted = measures.recalibrated(of)[:, order]
        return np.stack([np.interp(at, p[order], row) for row in fitted])

    sigma = max(float(measures.smooth_ece_at(sample)[1][0]), measures.LEAST)
    drawn = (Sample(sample.scores, times) for times in measures.resamples(len(p), BANDS))
    curves = [measures.smooth_curve(of, sigma, at) for of in drawn]
    expected = [steps(of) for of in measures.calibrated(sample.scores, BANDS)]
    found = {"count": sample.top.count[0].astype(int), "at": at}
    found["smooth"] = measures.smooth_curve(sample, sigma, at)[0]
    found["smooth_low"], found["smooth_high"] = quantile(np.vstack(curves), [LOW, HIGH])
    found["isotonic"] = steps(sample)[0]
    found["isotonic_low"], found["isotonic_high"] = quantile(np.vstack(expected), [LOW, HIGH])
    return {k: v.tolist() for k, v in found.items()}


def consistency(sample: Sample, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """{metric: (95 % floor, p)} under "these confidences are right", p = (1 + k) / (1 + n)."""
    drawn = {name: [] for name in names}
    for simulated in measures.calibrated(sample.scores, SIMULATIONS):
        for name, parts in drawn.items():
            parts.append(CALIBRATION[name](simulated))
    found = {}
    for name, parts in drawn.items():
        read, value = np.concatenate(parts), CALIBRATION[name](sample)[0]
        # Sums in another order differ in the last digits; a tie is as much.
        reached = (read >= value - 1e-12).sum()
        found[name] = float(quantile(read, 0.95)), float((1 + reached) / (1 + len(read)))
    return found


def finite(value: float) -> float | None:
    """The number, or None where it is not finite: JSON has no other."""
    return float(value) if math.isfinite(value) else None


def estimate(runs: Sequence[Run], metric: str, confidence: str) -> Estimate:
    """A metric of one run, or its mean over seeds, with a 95 % interval.

    For `rms_debiased` over seeds the root of the mean of the squared errors.
    """
    same_questions(runs)
    if any(confidence not in run.confidences for run in runs):
        return Estimate()
    noise = {}
    if metric in CALIBRATION:
        floors, ps = zip(*(run.floors[confidence][metric] for run in runs), strict=True)
        # Seeds answer the same questions, so their p-values depend on each other: Bonferroni's
        # bound.
        noise = {"floor": float(np.mean(floors)), "p": min(1.0, len(runs) * min(ps))}
    found, drawn = side(runs, metric, confidence)
    if metric == "rms_debiased":
        return Estimate(math.sqrt(max(found.mean(), 0)), **noise)
    return replace(of_sides((found, drawn), ends=ENDS.get(metric)), **noise)


def of_sides(
    *sides: Side, ends: tuple[float, float] | None = None, paired: bool = True
) -> Estimate:
    """The sum of the sides' means over seeds, with a 95 % interval if their draws are finite.

    Sides of as many runs are paired in their order, if `paired`. `ends` are the least and the
    greatest that one side's figure can be.
    """
    if paired and len({len(found) for found, _ in sides}) == 1:
        sides = (tuple(map(sum, zip(*sides, strict=True))),)
    value = finite(sum(found.mean() for found, _ in sides))
    if value is None:
        return Estimate()
    drawn = sum(drawn.mean(0) for _, drawn in sides)
    if not np.isfinite(drawn).all():
        return Estimate(value)
    apart = widening(sides) * (quantile(drawn, [LOW, HIGH]) - drawn.mean())
    low, high = (value + apart).tolist()
    # What varies over no resample (one question, all right) says nothing of other questions, but
    # for a difference of 0 on each.
    if (ends or abs(value) > 1e-12) and high - low < 1e-12:
        return Estimate(value)
    least, most = ends or (-math.inf, math.inf)
    return Estimate(value, max(low, least), min(high, most))


def side(runs: Sequence[Run], metric: str, confidence: str) -> Side:
    """(S,) figures, of `rms_debiased` squared, and their draws; NaN where there are none."""
    none = np.full((len(runs), 1), np.nan)
    if metric == "rms_debiased":
        return np.array([run.draws[confidence][metric][0, -1] for run in runs]), none
    found = np.array([run.values[confidence][metric] for run in runs], float)
    regular = metric in REGULAR
    return found, np.stack([run.draws[confidence][metric] for run in runs]) if regular else none


def sides_of(
    terms: Sequence[tuple[int, Sequence[Run]]], metric: str, confidence: str
) -> list[Side]:
    """The side of each (weight, runs) of a sum that an interval is of.

    The squared error's draws are A + κ (B + D), κ² = max(0, V − v min(2, 4 v / V)) / V with V the
    variance of the sum's part in B + D and v that in A. The gaps B is made of hold their own noise,
    which adds 2 v to V in the mean; where two sides err in opposite directions their parts in B add
    up, and shrinking each side's gaps by itself would lose that. V is noisy: taking off all of 2 v
    wherever V is large covers 0.92 to 0.98 in simulation, this 0.95 to 0.98.
    """
    weights, sides = [w for w, _ in terms], [side(runs, metric, confidence) for _, runs in terms]
    if metric == "rms_debiased":
        parts = [
            np.stack([run.draws[confidence][metric][:, :-1] for run in runs], 1)
            for _, runs in terms
        ]  # (2, S, R) each
        noise, slope = sum(w * part.mean(1) for w, part in zip(weights, parts, strict=True))
        ratio = noise.var() / slope.var() if slope.any() else math.inf
        kappa = math.sqrt(max(1 - ratio * min(2, 4 * ratio), 0))
        sides = [(of, a + kappa * b) for (of, _), (a, b) in zip(sides, parts, strict=True)]
    return [(w * found, w * drawn) for w, (found, drawn) in zip(weights, sides, strict=True)]


def difference(
    a: Sequence[Run], b: Sequence[Run], metric: str, confidence: str, paired: bool = True
) -> Estimate:
    """b − a as a `contrast`; each a run or the seeds of one row."""
    return contrast([(-1, a), (1, b)], metric, confidence, paired)


def contrast(
    terms: Sequence[tuple[int, Sequence[Run]]],
    metric: str,
    confidence: str = "choices",
    paired: bool = True,
) -> Estimate:
    """Σ weight × mean figure of each term's runs, over the same questions; 95 % interval.

    How far an effect is another one in another setting: (1, b′), (−1, a′), (−1, b), (1, a). As many
    runs in all terms are paired in their order, if `paired`. For `rms_debiased` the figure is of
    the *squared* errors (what miscalibration adds to the Brier score of the likeliest choice):
    roots differ irregularly near 0, so no interval of theirs is known to cover.
    """
    every = [run for _, runs in terms for run in runs]
    same_questions(every)
    if any(confidence not in run.confidences for run in every):
        return Estimate()
    return of_sides(*sides_of(terms, metric, confidence), paired=paired)


def same_questions(runs: Sequence[Run]) -> None:
    """Raise `InputError` unless all runs answered the same questions."""
    for run in runs[1:]:
        if run.questions_sha256 != runs[0].questions_sha256:
            raise InputError(
                f"{runs[0].path} and {run.path}: {runs[0].questions:,} and {run.questions:,} "
                "questions; expected the same ids and right answers in both"
            )


def same_prompts(a: Run, b: Run, texts: bool = True) -> None:
    """Raise `InputError` where the questions of two runs were asked in other words.

    A difference would be the prompts' as well: letters or texts, how many examples, and, if
    `texts`, their very words; as far as the records and their sidecars say.
    """

    def asked(run: Run) -> dict:
        settings = records.meta(run.path).get("settings") or {}
        prompts = run.prompts_sha256 if texts else None
        return {"scoring": run.scoring, "shots": settings.get("shots"), "prompts": prompts}

    second_of = asked(b)
    for name, first in asked(a).items():
        if first != (second := second_of[name]) and None not in (first, second):
            raise InputError(
                f"{a.path} and {b.path}: the same questions, asked with {name} {first!r} and "
                f"{second!r}, so a difference is not the models' alone; if it is meant, "
                "`compare --different-prompts`, or another 'dataset' in the index"
            )


def better(metric: str, found: Estimate) -> str | None:
    """Which run a difference speaks for, "a" or "b"; None where the interval holds 0 or is none.

    None for `ece_signed` too, of which neither direction is better.
    """
    if not found.told_apart or not DIRECTION[metric]:
        return None
    return "b" if (found.low > 0) == (DIRECTION[metric] > 0) else "a"
