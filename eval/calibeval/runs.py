"""The figures of one record file: every metric, and what its interval or floor is made from.

`measure` computes a `Run` from records in memory. `load` does so from a file and keeps the result
beside it, since the resamples of a large file take seconds to minutes. `calibeval.stats` turns one
run, or the runs of several seeds, into estimates, and two into differences.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from calibeval import kernel_smoothing, measures
from calibeval import records as record_files
from calibeval.io import InputError, counted, read_text, sha256, write_text
from calibeval.measures import METRICS, WITH_FLOOR, WITH_INTERVAL, Bins, Sample
from calibeval.records import Records

CONFIDENCES = ("choices", "vocabulary")
RESAMPLES = 1000  # of the questions, for intervals
SIMULATIONS = 499  # of calibrated answers, for floors and p-values
BAND_SAMPLES = 199  # for the bands of a reliability curve
CURVE_POINTS = 101  # at which a reliability curve is drawn
PARALLEL_QUESTIONS = 50_000  # from which definitions of confidence are computed side by side
LOW = 0.025  # the ends of a 95 % interval
HIGH = 0.975


FEWEST_CLUSTERS = 10  # to resample: with fewer no interval is known to cover

Cluster = Literal["subject"]  # what questions may be resampled by
T = TypeVar("T")


class TooFewClusters(InputError):
    """The records have too few subjects to resample these."""


class NullTest(NamedTuple):
    """A calibration error beside what calibrated models with the same confidences read."""

    null_q95: float  # the 95th percentile of what they read; printed as "floor"
    p: float  # the share of them that read as much, (1 + k) / (1 + SIMULATIONS)


@dataclass(frozen=True)
class SquareDraws:
    """What resamples of the squared error T = Σ w_b (Δ_b² − s_b²) read, in two parts.

    A resample's noise is G_b = Δ*_b − Δ_b, so with gaps c Δ_b it reads T* = A + c B + c² D with
    A = Σ w*_b (G_b² − s*_b²), B = 2 Σ w*_b Δ_b G_b and D = Σ w*_b Δ_b².
    """

    observed: float  # T of the questions as they are
    noise: np.ndarray  # (R,) A, what resamples read by noise alone
    gaps: np.ndarray  # (R,) B + D, what they read by gaps as they were observed


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
    letter_mass: float | None
    confidences: tuple[str, ...]
    # By definition of confidence, and then by metric.
    reliability: dict[str, dict[str, list]]  # as `reliability` returns it
    values: dict[str, dict[str, float | None]]
    floors: dict[str, dict[str, NullTest]]
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)  # (R,) of R resamples
    squares: dict[str, SquareDraws] = field(repr=False)  # of `rms_debiased`
    subjects: int = 1  # how many the questions are of
    cluster: Cluster | None = None  # what is resampled as a whole; None: each question by itself
    chat_template: str | None = None  # SHA-256 of the template's text; None: not asked in a chat
    shots: int | None = None  # the most examples before a question; None where nobody knows


def load(path: Path, normalise: str | None = None, cluster: Cluster | None = None) -> Run:
    """Return a record file's figures, which are kept beside it in `<file>.stats.json`.

    They are made anew when the records, their sidecar or the code that makes them change, and where
    the kept ones are not what was written.

    Args:
        path: The records.
        normalise: sum, bytes or characters; by default the records' convention.
        cluster: "subject" to resample whole subjects, not single questions.

    Raises:
        InputError: The records cannot be read; or TooFewClusters, of the same kind.
    """
    path = Path(path)
    options = [option for option in (normalise, cluster) if option is not None]
    kept = path.with_name(".".join([path.name, *options, "stats.json"]))
    key = [sha256(path), _sidecar_digest(path), code_digest(), *options]
    run = _read_kept(kept, key, path)
    if run is None:
        run = measure(record_files.read(path, normalise), cluster)
        figures = _to_json(run)
        with suppress(InputError):  # a read-only folder only costs the time to compute it again
            write_text(kept, json.dumps([key, _digest(figures), figures]))
    return run


def _sidecar_digest(path: Path) -> str | None:
    """SHA-256 of a record file's sidecar, which says what the file must hold; None without one."""
    sidecar = record_files.sidecar(path)
    return sha256(sidecar) if sidecar.is_file() else None


def _digest(figures: dict[str, Any]) -> str:
    """SHA-256 of figures as JSON has them, which reads back every number as it was."""
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()


def _read_kept(kept: Path, key: list[str | None], path: Path) -> Run | None:
    """The run that was kept under this key, unless what is kept is not what was written."""
    if not kept.is_file():
        return None
    with suppress(InputError, ValueError, TypeError):  # another version's or a damaged file
        known_key, digest, figures = json.loads(read_text(kept))
        if known_key == key and _digest(figures) == digest:
            return _from_json(figures, path)
    return None


def _to_json(run: Run) -> dict[str, Any]:
    """A run as JSON has it, without its path."""
    figures = {name: value for name, value in vars(run).items() if name != "path"}
    figures["draws"] = {
        confidence: {metric: draws.tolist() for metric, draws in by_metric.items()}
        for confidence, by_metric in run.draws.items()
    }
    figures["squares"] = {
        confidence: [square.observed, square.noise.tolist(), square.gaps.tolist()]
        for confidence, square in run.squares.items()
    }
    return figures


def _from_json(figures: dict[str, Any], path: Path) -> Run:
    """The run that `_to_json` wrote."""
    floors = {
        confidence: {metric: NullTest(*test) for metric, test in by_metric.items()}
        for confidence, by_metric in figures["floors"].items()
    }
    draws = {
        confidence: {metric: np.array(drawn) for metric, drawn in by_metric.items()}
        for confidence, by_metric in figures["draws"].items()
    }
    squares = {
        confidence: SquareDraws(observed, np.array(noise), np.array(gaps))
        for confidence, (observed, noise, gaps) in figures["squares"].items()
    }
    converted = {"floors": floors, "draws": draws, "squares": squares}
    return Run(path, **{**figures, **converted})


@cache
def code_digest() -> str:
    """SHA-256 of the sources that say what a figure is."""
    sources = (measures.__file__, kernel_smoothing.__file__, record_files.__file__, __file__)
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()


def samples(records: Records) -> dict[str, Sample]:
    """The questions under each definition of confidence that the records have."""
    confidences = CONFIDENCES if np.isfinite(records.letter_mass).all() else CONFIDENCES[:1]
    return {confidence: Sample(measures.scores(records, confidence)) for confidence in confidences}


def measure(records: Records, cluster: Cluster | None = None) -> Run:
    """Return the figures of records in memory, and the curves of their reliability diagrams.

    With `cluster` whole subjects are resampled; fewer than ten raise `TooFewClusters`.
    """
    records = in_order(records)
    subjects, subject_of = np.unique(records.subjects, return_inverse=True)
    clusters = None
    if cluster is not None:
        if len(subjects) < FEWEST_CLUSTERS:
            found = counted(len(subjects), "subject")
            raise TooFewClusters(
                f"{records.path}: {found}; expected {FEWEST_CLUSTERS} or more to resample subjects"
            )
        clusters = subject_of
    observed = samples(records)
    resampled = resample(observed, clusters)
    answers = [*zip(records.ids, records.labels.tolist(), strict=True)]
    questions = json.dumps(answers, ensure_ascii=False)
    prompts = None
    if None not in records.prompts:
        asked = zip(records.prompts, records.labels.tolist(), strict=True)
        prompts = record_files.prompts_digest(asked)
    return Run(
        path=records.path,
        convention=records.normalise,
        scoring=records.scoring,
        model=records.model,
        questions=len(records),
        questions_sha256=hashlib.sha256(questions.encode()).hexdigest(),
        prompts_sha256=prompts,
        letter_mass=finite(records.letter_mass.mean()),
        confidences=tuple(observed),
        reliability=_of_each(lambda sample: reliability(sample, clusters), observed),
        values=_of_each(values, observed),
        floors=_of_each(lambda sample: consistency(sample, tuple(WITH_FLOOR)), observed),
        draws={c: draws for c, (draws, _) in resampled.items()},
        squares={c: squares for c, (_, squares) in resampled.items()},
        subjects=len(subjects),
        cluster=cluster,
        chat_template=records.chat_template,
        shots=records.shots,
    )


def _of_each(work: Callable[[Sample], T], samples: Mapping[str, Sample]) -> dict[str, T]:
    """What `work` makes of each sample; side by side where the questions are many."""
    questions = max(len(sample.scores.labels) for sample in samples.values())
    if questions < PARALLEL_QUESTIONS:
        return {name: work(sample) for name, sample in samples.items()}
    with ThreadPoolExecutor(len(samples)) as pool:  # NumPy lets other threads run
        return dict(zip(samples, pool.map(work, samples.values()), strict=True))


def in_order(records: Records) -> Records:
    """The records sorted by id: the same resamples for every file of these questions."""
    order = sorted(range(len(records)), key=records.ids.__getitem__)
    return replace(
        records,
        ids=[records.ids[place] for place in order],
        labels=records.labels[order],
        logprobs=records.logprobs[order],
        letter_mass=records.letter_mass[order],
        prompts=records.prompts[order],
        subjects=records.subjects[order],
    )


def values(sample: Sample) -> dict[str, float | None]:
    """Every metric of the questions as they are; None where it is not defined."""
    return {name: finite(metric(sample)[0]) for name, metric in METRICS.items()}


def finite(value: float) -> float | None:
    """The number, or None where it is not finite: JSON has no other."""
    return float(value) if math.isfinite(value) else None


def resample(
    observed: Mapping[str, Sample], clusters: np.ndarray | None = None
) -> dict[str, tuple[dict[str, np.ndarray], SquareDraws]]:
    """Metrics over RESAMPLES resamples of the questions, under each definition of confidence.

    These are every metric that has an interval, (R,) by its name, and the squared error.
    `clusters` are the numbers of the questions' clusters, (N,), if these are drawn as a whole.
    """
    chunks: dict[str, list[tuple[dict[str, np.ndarray], Bins]]] = {name: [] for name in observed}
    (questions,) = {len(sample.scores.labels) for sample in observed.values()}
    for times in measures.resamples(questions, RESAMPLES, clusters):

        def draws_of(sample: Sample, times: np.ndarray = times) -> tuple[dict, Bins]:
            resampled = Sample(sample.scores, times)
            draws = {name: metric(resampled) for name, metric in WITH_INTERVAL.items()}
            return draws, resampled.bins

        for confidence, draws_and_bins in _of_each(draws_of, observed).items():
            chunks[confidence].append(draws_and_bins)
    joined = {}
    for confidence, sample in observed.items():
        draws = {
            name: np.concatenate([some[name] for some, _ in chunks[confidence]])
            for name in WITH_INTERVAL
        }
        bins = [bins for _, bins in chunks[confidence]]
        joined[confidence] = draws, square_draws(sample.bins, bins)
    return joined


def square_draws(observed: Bins, resampled: Sequence[Bins]) -> SquareDraws:
    """The squared error's draws, from bins (1, B) as they are and resampled ones (R, B)."""
    gap = observed.gap
    several = observed.count > 1
    # Resampling n_b residuals spreads them by (n_b − 1) / n_b too little.
    undo = np.where(several, observed.count / np.maximum(observed.count - 1, 1), 1)
    by_noise = []
    by_gaps = []
    for bins in resampled:
        noise = np.where(bins.count > 0, (bins.gap - gap) * np.sqrt(undo), 0)
        weight = np.where(several & (bins.count > 1), bins.weight, 0)
        by_noise.append((weight * (noise**2 - undo * bins.noise)).sum(1))
        by_gaps.append((weight * (2 * gap * noise + gap**2)).sum(1))
    return SquareDraws(
        observed=float(measures.debiased_square(observed)[0]),
        noise=np.concatenate(by_noise),
        gaps=np.concatenate(by_gaps),
    )


def quantile(drawn: np.ndarray, level: float | list[float]) -> np.ndarray:
    """What a further draw, along the first axis, stays below with this probability."""
    return np.quantile(drawn, level, axis=0, method="weibull")


def reliability(sample: Sample, clusters: np.ndarray | None = None) -> dict[str, list]:
    """What a reliability diagram shows of some answers and their confidences.

    `clusters` are the numbers of the questions' clusters, (N,), if these are drawn as a whole.

    count: answers of each bin
    at: confidences from the least to the greatest, at which the curves are
    smooth, smooth_low, smooth_high: accuracy by the kernel of `smooth_ece`, with a 95 % band over
        resamples of the questions
    isotonic: accuracy by isotonic regression (CORP); isotonic_low, isotonic_high: where it lies in
        95 % of calibrated models with these confidences
    """
    p = sample.scores.confidence
    at = np.linspace(p.min(), p.max(), CURVE_POINTS)
    ascending = sample.scores.ranked_confidence

    def isotonic(of: Sample) -> np.ndarray:
        return np.stack([np.interp(at, ascending, row) for row in measures.recalibrated(of)])

    bandwidth = max(float(measures.smooth_ece_at(sample)[1][0]), kernel_smoothing.LEAST_BANDWIDTH)
    smooth_draws = []
    for times in measures.resamples(len(p), BAND_SAMPLES, clusters):
        smooth_draws.append(measures.smooth_curve(Sample(sample.scores, times), bandwidth, at))
    isotonic_draws = [isotonic(of) for of in measures.calibrated(sample.scores, BAND_SAMPLES)]
    smooth_low, smooth_high = quantile(np.vstack(smooth_draws), [LOW, HIGH])
    isotonic_low, isotonic_high = quantile(np.vstack(isotonic_draws), [LOW, HIGH])
    return {
        "count": sample.bins.count[0].astype(int).tolist(),
        "at": at.tolist(),
        "smooth": measures.smooth_curve(sample, bandwidth, at)[0].tolist(),
        "smooth_low": smooth_low.tolist(),
        "smooth_high": smooth_high.tolist(),
        "isotonic": isotonic(sample)[0].tolist(),
        "isotonic_low": isotonic_low.tolist(),
        "isotonic_high": isotonic_high.tolist(),
    }


def consistency(
    sample: Sample, names: Sequence[str], simulations: int = SIMULATIONS
) -> dict[str, NullTest]:
    """Compare calibration errors, by name, with what calibrated models read.

    Those have these confidences, and answers that are right as often as they say; as many of them
    are simulated as `simulations` says.
    """
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for simulated in measures.calibrated(sample.scores, simulations):
        for name, parts in drawn.items():
            parts.append(WITH_FLOOR[name](simulated))
    tests = {}
    for name, parts in drawn.items():
        read = np.concatenate(parts)
        value = WITH_FLOOR[name](sample)[0]
        # Sums in another order differ in the last digits; a tie is as much.
        reached = (read >= value - 1e-12).sum()
        tests[name] = NullTest(
            null_q95=float(quantile(read, 0.95)), p=float((1 + reached) / (1 + len(read)))
        )
    return tests
