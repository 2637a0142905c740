"""Figures with intervals, for one run, several seeds of it, and the difference of two.

Questions are resampled with replacement, the same way for every run over the same questions, so
that what runs share is counted once over seeds and cancels in a difference. An interval is given
only where simulation has shown that it covers (tests/eval/interval_coverage.py).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from calibeval import records
from calibeval.io import InputError, atomic_write, sha256
from calibeval.metrics import samples, values
from calibeval.metrics.samples import Bins, Sample, calibrated, resamples, scores
from calibeval.metrics.values import BINS, CALIBRATION, METRICS, REGULAR
from calibeval.records import Records

CONFIDENCES = ("choices", "vocabulary")
DEFAULT = ("accuracy", "nll", "brier", "ece", "rms_debiased", "auroc")
HIGHER_IS_BETTER = {"accuracy", "auroc", "accuracy_at_50", "accuracy_at_80"}
INVERTED = ("ece", "rms_debiased")  # whose intervals `invert` makes
RESAMPLES, SIMULATIONS = 1000, 499
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
    normalise: str | None  # as `load` was told
    model: str
    questions: int
    questions_sha256: str  # of the ids and right answers, whatever their order
    letter_mass: float
    confidences: tuple[str, ...]
    reliability: dict[str, dict[str, list]]
    values: dict[str, dict[str, float]]  # [confidence][metric]
    floors: dict[str, dict[str, tuple[float, float]]]  # (floor, p)
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)  # [confidence][metric] (R,)
    errors: dict[str, dict[str, "Squares | Absolutes"]] = field(repr=False)


@dataclass(frozen=True)
class Squares:
    """T = Σ w_b (Δ_b² − s_b²), and what it reads on resamples under another true error.

    A resample's noise is G_b = Δ*_b − Δ_b, so with gaps c Δ_b it reads T* = A + c B + c² D with
    A = Σ w*_b (G_b² − s*_b²), B = 2 Σ w*_b Δ_b G_b, D = Σ w*_b Δ_b², where the error is
    c sqrt(size), size = Σ w_b Δ_b².
    """

    array: np.ndarray  # (3, R + 1): A, B, D of each resample, then T, 0, size
    # Near 0 only the lower end can miss: over seeds that differ 0.975 covers more than 0.99.
    lower, upper = 0.96, LOW

    @classmethod
    def mean(cls, of: Sequence["Squares"]) -> "Squares":
        """Of the mean of several runs' T."""
        return cls(np.mean([one.array for one in of], axis=0))

    @property
    def value(self) -> float:
        """T."""
        return float(self.array[0, -1])

    @property
    def scale(self) -> float:
        """sqrt(size), the error that reads T with the gaps' own noise."""
        return math.sqrt(self.array[2, -1])

    def at(self, error: float) -> np.ndarray:
        """T* under this true error, (R,)."""
        c = error / self.scale if self.scale else 0.0
        a, b, d = self.array[:, :-1]
        return a + c * (b + c * d)

    @property
    def drawn(self) -> np.ndarray:
        """T* under about the error that T itself says, (R,).

        Half a standard deviation less than T: near 0 max(T, 0) is too large in the mean, and the
        spread of T* grows with the error.
        """
        return self.at(math.sqrt(max(self.value - self.array[0, :-1].std() / 2, 0)))


@dataclass(frozen=True)
class Absolutes:
    """E = Σ w_b |Δ_b|, and what it reads on resamples under another true error θ.

    Σ w*_b |±θ + G_b|: gaps as large in every bin, with the signs observed. What the observed sizes
    are besides noise cannot be told near calibration, and equal ones hide best behind noise.
    """

    value: float
    array: np.ndarray  # (2, R, B): w*_b, and G_b with the sign of Δ_b
    # Gaps that are not alike raise the upper end's misses from 0.025 to 0.04 in simulation.
    lower, upper = HIGH, 0.0175

    @classmethod
    def mean(cls, of: Sequence["Absolutes"]) -> "Absolutes":
        """Of the mean of several runs' E."""
        array = np.concatenate([one.array for one in of], axis=2)
        array[0] /= len(of)
        return cls(float(np.mean([one.value for one in of])), array)

    @property
    def scale(self) -> float:
        """E."""
        return self.value

    def at(self, error: float) -> np.ndarray:
        """E* under this true error, (R,)."""
        weight, noise = self.array
        return (weight * np.abs(error + noise)).sum(1)

    @property
    def drawn(self) -> np.ndarray:
        """E* under the error that E itself says, (R,)."""
        return self.at(self.value)


def errors(observed: Bins, drawn: Sequence[Bins]) -> tuple[Squares, Absolutes]:
    """From the bins of the questions as they are (1, B) and of resamples, (R, B) each."""
    gap, several = observed.gap, observed.count > 1
    # Resampling n_b residuals spreads them by (n_b − 1) / n_b too little.
    full = np.where(several, observed.count / np.maximum(observed.count - 1, 1), 1)
    squares, absolutes = [], []
    for b in drawn:
        noise = np.where(b.count > 0, (b.gap - gap) * np.sqrt(full), 0)
        weight = np.where(several & (b.count > 1), b.weight, 0)
        a = (weight * (noise**2 - full * b.noise)).sum(1)
        cross = 2 * (weight * gap * noise).sum(1)
        squares.append(np.stack([a, cross, (weight * gap**2).sum(1)]))
        absolutes.append(np.stack([b.weight, np.where(gap < 0, -noise, noise)]))
    size = np.where(several, observed.weight * gap**2, 0).sum()
    last = np.array([[values.squared(observed)[0]], [0], [size]])
    absolute = Absolutes(float(values.expected(observed)[0]), np.concatenate(absolutes, axis=1))
    return Squares(np.hstack([*squares, last])), absolute


def invert(of: Squares | Absolutes, widening: float = 1.0) -> tuple[float, float]:
    """95 % interval: the true errors under which the value is no extreme one.

    P(drawn ≥ value | low) = P(drawn ≤ max(value, 0) | high) = 0.025. The upper end takes T for no
    less than 0: else chance alone could make an interval of nothing but 0.
    """

    def error(level: float, value: float) -> float:
        def below(true: float) -> bool:
            drawn = of.at(true)
            mean, part = drawn.mean(), min(true / of.scale, 1.0) ** 2 if of.scale else 0.0
            return mean + (1 + part * (widening - 1)) * (quantile(drawn, level) - mean) < value

        low, high = 0.0, 1.0
        if not below(low) or below(high):
            return low if not below(low) else high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle) else (low, middle)
        return high

    return error(of.lower if widening > 1 else HIGH, of.value), error(of.upper, max(of.value, 0.0))


def quantile(drawn: np.ndarray, level: float | list[float]) -> np.ndarray:
    """What a further draw stays below with this probability."""
    return np.quantile(drawn, level, method="weibull")


def widening(sides: Sequence[Side]) -> float:
    """How much wider than its question noise an interval of means over seeds must be.

    sqrt(1 + Σ max(0, t² s² / z² − o) / (S q)) for the resampled mean's variance q, where s² is the
    variance of the S figures, o the question noise that each has for itself (the mean variance
    less the mean covariance of their draws), and t Student's quantile of S − 1 degrees of freedom.
    """
    question = joint(sides).var(ddof=1)
    extra = 0.0
    for found, drawn in sides:
        if (n := len(found)) > 1:
            covariance = np.cov(drawn)
            trace = np.trace(covariance)
            own = max((trace - (covariance.sum() - trace) / (n - 1)) / n, 0.0)
            from scipy.special import stdtrit  # scipy.stats takes half a second to load

            t = float(stdtrit(n - 1, HIGH)) / 1.959964
            extra += max(t**2 * found.var(ddof=1) - own, 0.0) / n
    return math.sqrt(1 + extra / question) if question else 1.0


def joint(sides: Sequence[Side]) -> np.ndarray:
    """Draws of the last side's mean over seeds, less the first's if there are two, (R,)."""
    means = [drawn.mean(0) for _, drawn in sides]
    return means[-1] - means[0] if len(means) == 2 else means[0]


def interval(value: float, sides: Sequence[Side]) -> tuple[float | None, float | None]:
    """95 % interval around a mean over seeds or a difference of two; None where undefined."""
    drawn = joint(sides)
    if not np.isfinite(drawn).all():
        return None, None
    low, high = value + widening(sides) * (quantile(drawn, [LOW, HIGH]) - drawn.mean())
    return float(low), float(high)


def load(path: Path, normalise: str | None = None) -> Run:
    """A record file's figures; kept beside it, and made anew when records or code change."""
    path = Path(path)
    records.require(path)
    key = {"records": sha256(path), "code": code(), "normalise": normalise}
    kept = path.with_name(f"{path.name}{f'.{normalise}' if normalise else ''}.stats.npz")
    try:
        with np.load(kept) as file:
            about = json.loads(bytes(file["about"]).decode())
            if about.pop("key") == key:
                return unpack(path, normalise, about, file)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass  # absent or of another make: computed anew below
    run = measure(records.read(path, normalise), normalise=normalise)
    try:
        with atomic_write(kept, "wb") as file:
            np.savez(file, **pack(run, key))
    except InputError:
        pass  # a read-only folder only costs the time to compute it again
    return run


@cache
def code() -> str:
    """SHA-256 of the sources that say what a figure is."""
    sources = (Path(module.__file__) for module in (samples, values, records))
    text = b"".join(path.read_bytes() for path in (*sources, Path(__file__)))
    return hashlib.sha256(text).hexdigest()


def pack(run: Run, key: dict) -> dict:
    """A run as arrays: what JSON can hold as its bytes, and the rest."""
    arrays = "path", "normalise", "draws", "errors"
    about = {k: v for k, v in vars(run).items() if k not in arrays} | {"key": key}
    errors = run.errors.values()
    return {
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "draws": [[of[name] for name in REGULAR] for of in run.draws.values()],
        "squares": [of["rms_debiased"].array for of in errors],
        "absolutes": [of["ece"].array.astype(np.float32) for of in errors],
    }


def unpack(path: Path, normalise: str | None, about: dict, file: Mapping) -> Run:
    """The run that `pack` packed."""
    draws, found = {}, {}
    squares, absolutes, drawn = (file[name] for name in ("squares", "absolutes", "draws"))
    for i, c in enumerate(about["confidences"]):
        draws[c] = dict(zip(REGULAR, drawn[i], strict=True))
        absolute = Absolutes(about["values"][c]["ece"], absolutes[i])
        found[c] = {"rms_debiased": Squares(squares[i]), "ece": absolute}
    return Run(path, normalise, **about, draws=draws, errors=found)


def measure(
    of: Records, names: Sequence[str] = tuple(METRICS), normalise: str | None = None
) -> Run:
    """The figures of records in memory."""
    # In the order of the ids: the same resamples for every file of these questions.
    of = take(of, np.argsort(np.array(of.ids), kind="stable"))
    confidences = CONFIDENCES if of.scoring == "letters" else CONFIDENCES[:1]
    scored = {c: scores(of, c) for c in confidences}
    exact = {c: Sample(s) for c, s in scored.items()}
    draws = {c: {name: [] for name in REGULAR if name in names} for c in confidences}
    bins = {c: [] for c in confidences}
    for times in resamples(len(of), RESAMPLES):
        for c, s in scored.items():
            sample = Sample(s, times)
            bins[c].append(sample.top.equal_width(BINS))
            for name, parts in draws[c].items():
                parts.append(METRICS[name](sample))
    found = {}
    for c, sample in exact.items():
        square, absolute = errors(sample.top.equal_width(BINS), bins[c])
        found[c] = {"rms_debiased": square, "ece": absolute}
    asked = json.dumps([*zip(of.ids, of.labels.tolist(), strict=True)], ensure_ascii=False)
    return Run(
        of.path,
        normalise,
        of.model,
        len(of),
        hashlib.sha256(asked.encode()).hexdigest(),
        finite(of.letter_mass.mean()),
        confidences,
        {c: reliability(sample.top.equal_width(BINS)) for c, sample in exact.items()},
        {c: {m: finite(METRICS[m](s)[0]) for m in names} for c, s in exact.items()},
        {c: consistency(s, [m for m in names if m in CALIBRATION]) for c, s in exact.items()},
        {c: {m: np.concatenate(parts) for m, parts in draws[c].items()} for c in confidences},
        found,
    )


def take(of: Records, at: np.ndarray) -> Records:
    """The records at some places."""
    arrays = {name: v[at] for name, v in vars(of).items() if isinstance(v, np.ndarray)}
    return replace(of, ids=[of.ids[i] for i in at], **arrays)


def reliability(b: Bins) -> dict[str, list]:
    """Counts, summed confidence and right answers of each bin; they add over runs."""
    sums = {"confidence": b.confidence_sum[0].tolist(), "correct": b.correct_sum[0].tolist()}
    return {"count": b.count[0].astype(int).tolist()} | sums


def consistency(sample: Sample, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """{metric: (95 % floor, p)} under "these confidences are right", p = (1 + k) / (1 + n)."""
    drawn = {name: [] for name in names}
    for simulated in calibrated(sample.scores, SIMULATIONS):
        for name, parts in drawn.items():
            parts.append(CALIBRATION[name](simulated))
    found = {}
    for name, parts in drawn.items():
        read, value = np.concatenate(parts), CALIBRATION[name](sample)[0]
        # Sums in another order differ in the last digits; a tie is as much.
        reached = (read >= value - 1e-12).sum()
        floor = quantile(read, 0.95)
        found[name] = float(floor), float((1 + reached) / (1 + len(read)))
    return found


def finite(value: float) -> float | None:
    """The number, or None where it is not finite: JSON has no other."""
    return float(value) if math.isfinite(value) else None


def estimate(runs: Sequence[Run], metric: str, confidence: str) -> Estimate:
    """A metric of one run, or its mean over seeds, with a 95 % interval.

    For `rms_debiased` over seeds the root of the mean of the squared errors.
    """
    same_questions(runs)
    if confidence not in runs[0].confidences:
        return Estimate()
    noise = {}
    if metric in CALIBRATION:
        floors, ps = zip(*(run.floors[confidence][metric] for run in runs), strict=True)
        # Seeds answer the same questions, so their p-values depend on each other: Bonferroni's
        # bound.
        noise = {"floor": float(np.mean(floors)), "p": min(1.0, len(runs) * min(ps))}
    found, drawn = side(runs, metric, confidence)
    if metric in INVERTED:
        every = [run.errors[confidence][metric] for run in runs]
        mean = type(every[0]).mean(every)
        value = mean.value if metric == "ece" else math.sqrt(max(mean.value, 0))
        if metric == "ece" and len(runs) > 1:
            # Its bias differs from seed to seed: where they differ, 0.82 to 0.94 in simulation.
            return Estimate(value, **noise)
        return Estimate(value, *invert(mean, widening([(found, drawn)])), **noise)
    value = finite(found.mean())
    if value is None or drawn is None:
        return Estimate(value, **noise)
    return Estimate(value, *interval(value, [(found, drawn)]))


def side(runs: Sequence[Run], metric: str, confidence: str) -> tuple:
    """(S,) figures, of `rms_debiased` squared, NaN where undefined; (S, R) their draws or None."""
    if metric in INVERTED:
        every = [run.errors[confidence][metric] for run in runs]
        return np.array([one.value for one in every]), np.stack([one.drawn for one in every])
    found = np.array([run.values[confidence][metric] for run in runs], float)
    regular = metric in REGULAR
    return found, np.stack([run.draws[confidence][metric] for run in runs]) if regular else None


def difference(a: Sequence[Run], b: Sequence[Run], metric: str, confidence: str) -> Estimate:
    """b − a with a 95 % interval; each a run or the seeds of one row, over the same questions.

    As many runs on both sides are paired in their order. For `rms_debiased` the figure is the
    difference of the *squared* errors (what miscalibration adds to the Brier score of the likeliest
    choice): roots differ irregularly near 0, so that no interval of theirs is known to cover.
    """
    same_questions([*a, *b])
    if confidence not in a[0].confidences or confidence not in b[0].confidences:
        return Estimate()
    found, drawn = zip(*(side(runs, metric, confidence) for runs in (a, b)), strict=True)
    value = finite(found[1].mean() - found[0].mean())
    if value is None or drawn[0] is None or metric == "ece":
        return Estimate(value)
    sides = list(zip(found, drawn, strict=True))
    if len(a) == len(b):
        sides = [(found[1] - found[0], drawn[1] - drawn[0])]
    return Estimate(value, *interval(value, sides))


def same_questions(runs: Sequence[Run]) -> None:
    """Raise `InputError` unless all runs answered the same questions, and say which differs."""
    for run in runs[1:]:
        if run.questions_sha256 == runs[0].questions_sha256:
            continue
        first, second = (records.read(r.path) for r in (runs[0], run))
        labels = [dict(zip(r.ids, r.labels.tolist(), strict=True)) for r in (first, second)]
        both = f"{runs[0].path} and {run.path}"
        if alone := sorted(set(labels[0]) ^ set(labels[1])):
            raise InputError(
                f"{both}: {alone[0]!r} is in one of them only; "
                f"a comparison needs the same questions in both"
            )
        other = next(id for id in labels[0] if labels[0][id] != labels[1][id])
        raise InputError(f"{both}: other answers to {other!r}")


def better(metric: str, found: Estimate) -> str | None:
    """Which run a difference speaks for, "a" or "b"; None where the interval holds 0 or is none.

    None for `ece_signed` too, of which neither direction is better.
    """
    if found.low is None or found.low <= 0 <= found.high or metric == "ece_signed":
        return None
    return "b" if (found.low > 0) == (metric in HIGHER_IS_BETTER) else "a"


# The four categories of Hendrycks et al. 2021, Table 8; subjects of other data have none.
CATEGORIES = {
    "STEM": """abstract_algebra astronomy college_biology college_chemistry
        college_computer_science college_mathematics college_physics computer_security
        conceptual_physics electrical_engineering elementary_mathematics high_school_biology
        high_school_chemistry high_school_computer_science high_school_mathematics
        high_school_physics high_school_statistics machine_learning""",
    "humanities": """formal_logic high_school_european_history high_school_us_history
        high_school_world_history international_law jurisprudence logical_fallacies moral_disputes
        moral_scenarios philosophy prehistory professional_law world_religions""",
    "social sciences": """econometrics high_school_geography high_school_government_and_politics
        high_school_macroeconomics high_school_microeconomics high_school_psychology
        human_sexuality professional_psychology public_relations security_studies sociology
        us_foreign_policy""",
    "other": """anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging
        management marketing medical_genetics miscellaneous nutrition professional_accounting
        professional_medicine virology""",
}


def groups(of: Records, by: str) -> np.ndarray:
    """Each question's "subject" or MMLU "category", (N,) str."""
    if by == "subject":
        return of.subjects
    category = {s: name for name, subjects in CATEGORIES.items() for s in subjects.split()}
    return np.array([category.get(s, "uncategorised") for s in of.subjects])


def breakdown(of: Records, by: str) -> dict[str, Run]:
    """The `DEFAULT` metrics of each subject or category."""
    keys = groups(of, by)
    return {str(g): measure(take(of, np.flatnonzero(keys == g)), DEFAULT) for g in np.unique(keys)}
