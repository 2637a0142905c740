"""The evaluation of one record file: its metrics, and what their intervals or floors are made from.

`measure` makes an `Evaluation` of records in memory. `load` makes that of a file and keeps it
beside the file. Both compute the parts of it (`Part`) that are wanted, since the resamples of many
questions take seconds. `stats` turns one evaluation, or those of several seeds, into estimates, and
two into differences.

What is resampled as a whole is a cluster; of records it is always a subject. A *unit* is a question
or, where clusters are resampled, a cluster.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import TypeAdapter
from tqdm import tqdm

from calibeval import records as record_files
from calibeval.io import (
    LARGE_FILE,
    InputError,
    counted,
    parse_json,
    read_text,
    refuse_larger,
    sha256,
    write_text,
)
from calibeval.measures import bins, definitions, kernel_smoothing, samples, squared_error
from calibeval.measures.bins import Bins
from calibeval.measures.definitions import (
    COMPARED_BY_SQUARE,
    METRICS,
    WITH_FLOOR,
    WITH_INTERVAL,
    Metric,
)
from calibeval.measures.samples import ConfidenceDefinition, Sample
from calibeval.measures.squared_error import Array, SquareDraws
from calibeval.records import Records

CONFIDENCES: tuple[ConfidenceDefinition, ...] = get_args(ConfidenceDefinition)
RESAMPLES = 1000  # of the questions, for intervals
SIMULATIONS = 499  # of calibrated answers, for floors and p-values
BAND_SAMPLES = 199  # for the bands of a reliability curve
CURVE_POINTS = 101  # at which a reliability curve is drawn
SIGNIFICANCE = 0.05  # level of every test; an interval covers 1 less this
LOW = SIGNIFICANCE / 2  # the ends of a 95 % interval
HIGH = 1 - LOW
FEWEST_CLUSTERS = 10  # to resample: with fewer no interval is known to cover
PROGRESS_AFTER = 5  # seconds, after which a bar on a terminal shows how far the samples are

Cluster = Literal["subject"]  # what questions may be resampled by
# What of an evaluation takes long: `draws` and `squares`; `floor_tests`; `reliability`.
Part = Literal["draws", "floors", "curves"]
PARTS: tuple[Part, ...] = get_args(Part)
SUMMARY_PARTS: tuple[Part, ...] = ("draws", "floors")  # of estimates


class TooFewClusters(InputError):
    """The records have too few subjects to resample these."""


class FloorTest(NamedTuple):
    """A calibration error beside the errors of calibrated models with the same confidences.

    `floor` is the noise floor: 95 % of such models have an error below it.
    """

    floor: float  # the 95th percentile of their errors
    # The share of them whose error is as large or larger: (1 + k) / (1 + SIMULATIONS) of k such.
    p: float


@dataclass(frozen=True)
class Evaluation:
    """One model's answers to one data set's questions, measured: what tables and figures need.

    It is of one record file. A training run has an evaluation for each data set that it is asked.
    """

    path: Path
    normalise: str  # see `Record.normalise`
    scoring: str
    model: str
    questions: int
    questions_sha256: str  # of the ids and right answers, whatever their order
    prompts_sha256: str | None  # of what each was asked with, if the records say
    letter_mass: float | None
    confidences: tuple[ConfidenceDefinition, ...]  # the definitions of it that the records allow
    # {definition of confidence: {curve: its points}}, as the function `reliability` returns it.
    # What `Part` names is empty where it was not wanted.
    reliability: dict[ConfidenceDefinition, dict[str, list]]
    # {definition of confidence: {metric: …}}, here and in the five below.
    values: dict[ConfidenceDefinition, dict[str, float | None]]
    floor_tests: dict[ConfidenceDefinition, dict[str, FloorTest]]  # of metrics that have a floor
    # Of metrics that have an interval: (R,) of R resamples.
    draws: dict[ConfidenceDefinition, dict[str, Array]] = field(repr=False)
    # Of metrics that are compared by their squares.
    squares: dict[ConfidenceDefinition, dict[str, SquareDraws]] = field(repr=False)
    # Of metrics that are means: (U,), as the function `unit_values` returns them.
    unit_values: dict[ConfidenceDefinition, dict[str, Array]] = field(
        repr=False, default_factory=dict
    )
    # Of metrics that are compared by their squares: the square, before it is cut at 0.
    squared_values: dict[ConfidenceDefinition, dict[str, float]] = field(default_factory=dict)
    # `measure` always gives the following; the defaults serve evaluations that are made by hand.
    subjects: int = 1  # how many the questions are of
    cluster: Cluster | None = None  # what is resampled as a whole; None: each question by itself
    chat_template: str | None = None  # SHA-256 of the template's text; None: not asked in a chat
    chat_template_is_known: bool = True  # as `Records` has it
    shots: int | None = None  # likewise
    subjects_sha256: str | None = None  # of each question's subject, in the order of the ids
    truncated_prompts: int = 0  # how many lost their beginning, to fit the model
    shown_shots: str | None = None  # as `Records` has it
    tied: int = 0  # likewise
    # How many bins have one question, which does not tell its noise: `rms_debiased` and its
    # difference leave these out.
    bins_of_one: dict[ConfidenceDefinition, int] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that were computed, in the order of `METRICS`: all unless some were named."""
        return tuple(self.values[self.confidences[0]])

    @property
    def parts(self) -> tuple[Part, ...]:
        """What was computed of what takes long."""
        computed = {"draws": self.draws, "floors": self.floor_tests, "curves": self.reliability}
        return tuple(part for part in PARTS if computed[part])

    @property
    def cluster_count(self) -> int | None:
        """How many clusters were resampled; None where single questions were."""
        return None if self.cluster is None else self.subjects


KEPT_FORM: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)


def load(
    path: Path,
    normalise: str | None = None,
    cluster: Cluster | None = None,
    parts: Collection[Part] = PARTS,
    metrics: Collection[str] | None = None,
) -> Evaluation:
    """Return a record file's evaluation, which is kept beside it unless some `metrics` are named.

    That is where the records are this user's, and no other's kept evaluation is read. The file is
    `<file>.stats.json`, with the options before the ending that were given, such as
    `<file>.sum.subject.stats.json`. It is made anew when the records, their sidecar or the code
    that makes it change, and where the kept one is not what was written. It holds the parts that
    were wanted so far.

    Args:
        path: The records.
        normalise: as of `records.read`; by default the records' convention.
        cluster: "subject" to resample whole subjects, not single questions.
        parts: What is wanted of what takes long.
        metrics: As of `measure`.

    Raises:
        InputError: The records cannot be read; or TooFewClusters, of the same kind.
    """
    path = Path(path)
    if metrics is not None:
        return measure(record_files.read(path, normalise), cluster, metrics, parts)
    _check_cluster(cluster)
    if path.is_file():
        refuse_larger(path, path.stat().st_size, LARGE_FILE)
    options = [option for option in (normalise, cluster) if option is not None]
    kept_path = path.with_name(".".join([path.name, *options, "stats.json"]))
    sidecar = record_files.sidecar(path)
    sidecar_digest = sha256(sidecar) if sidecar.is_file() else None
    key = [sha256(path), sidecar_digest, code_digest(), *options]
    kept = _read_kept(kept_path, key, path)
    missing = [part for part in parts if kept is None or part not in kept.parts]
    if kept is not None and not missing:
        return kept
    evaluation = measure(record_files.read(path, normalise), cluster, parts=missing)
    if kept is not None:
        evaluation = replace(
            evaluation,
            draws=evaluation.draws or kept.draws,
            squares=evaluation.squares or kept.squares,
            floor_tests=evaluation.floor_tests or kept.floor_tests,
            reliability=evaluation.reliability or kept.reliability,
        )
    if _is_own(path):
        content = KEPT_FORM.dump_json(evaluation).decode()
        digest = hashlib.sha256(content.encode()).hexdigest()
        with suppress(InputError):  # a read-only folder only costs the time to compute it again
            write_text(kept_path, json.dumps([key, digest, content]))
    return evaluation


def _is_own(file: Path) -> bool:
    """Whether a file is this user's: what somebody else has kept beside records may say anything.

    Nor is something written beside records of somebody else, which an index may name, nor where
    somebody else's link leads.
    """
    links = [folder for folder in file.absolute().parents if folder.is_symlink()]
    owners_of_links = {link.lstat().st_uid for link in links}
    return file.lstat().st_uid == os.geteuid() and owners_of_links <= {0, os.geteuid()}


def _check_cluster(cluster: str | None) -> None:
    """Raise `InputError` where a cluster is none that there is."""
    clusters = get_args(Cluster)
    if cluster is not None and cluster not in clusters:
        known = ", ".join(map(repr, clusters))
        raise InputError(f"cluster is {cluster!r}; expected {known}, or None for single questions")


def _read_kept(kept: Path, key: list[str | None], path: Path) -> Evaluation | None:
    """The evaluation that was kept under this key, unless what is kept is not what was written."""
    if not kept.is_file() or not _is_own(kept):
        return None
    with suppress(InputError, ValueError, TypeError):  # another version's or a damaged file
        known_key, digest, content = parse_json(read_text(kept))
        if known_key == key and hashlib.sha256(content.encode()).hexdigest() == digest:
            return replace(KEPT_FORM.validate_json(content), path=path)
    return None


@cache
def code_digest() -> str:
    """SHA-256 of the sources that decide what an evaluation is, every metric's among them.

    What a metric of another module imports from a third one is not: after a change there, delete
    the `*.stats.json`.
    """
    modules = {__name__, *(metric.function.__module__ for metric in METRICS.values())}
    for module in (definitions, samples, bins, squared_error, kernel_smoothing, record_files):
        modules.add(module.__name__)
    digest = hashlib.sha256()
    for name in sorted(modules):
        source = sys.modules[name].__file__
        assert source is not None  # none of them is built in
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()


def samples_of(records: Records) -> dict[ConfidenceDefinition, Sample]:
    """The questions under each definition of confidence that the records have."""
    observed: dict[ConfidenceDefinition, Sample] = {
        "choices": Sample.observed(samples.scores_of_records(records, "choices"))
    }
    if np.isfinite(records.letter_mass).all():
        observed["vocabulary"] = Sample.observed(samples.scores_of_records(records, "vocabulary"))
    return observed


def measure(
    records: Records,
    cluster: Cluster | None = None,
    metrics: Collection[str] | None = None,
    parts: Collection[Part] | None = None,
) -> Evaluation:
    """Return the evaluation of records in memory.

    Args:
        records: The records.
        cluster: "subject" to resample whole subjects, not single questions.
        metrics: The names of the metrics that are wanted, by default all. Where some are named, the
            evaluation holds these alone, but for `unit_values`.
        parts: What is wanted of what takes long, by default all, and only the draws where some
            metrics are named.

    Raises:
        InputError: There is no metric of a name; or TooFewClusters, of fewer than ten subjects.
    """
    for name in metrics or ():
        if name not in METRICS:
            raise InputError(f"metrics: no {name!r}; expected {', '.join(METRICS)}")
    if parts is None:
        parts = PARTS if metrics is None else ("draws",)
    _check_cluster(cluster)
    if metrics is None:
        metrics = default_metrics(records)
    records = in_order(records)
    clusters = None if cluster is None else _cluster_numbers(records, cluster)
    observed = samples_of(records)
    draws: dict[ConfidenceDefinition, dict[str, np.ndarray]] = {}
    squares: dict[ConfidenceDefinition, dict[str, SquareDraws]] = {}
    tests: dict[ConfidenceDefinition, dict[str, FloorTest]] = {}
    curves: dict[ConfidenceDefinition, dict[str, list]] = {}
    if "draws" in parts:
        draws, squares = resampled_metrics(observed, clusters, metrics)
    for among, sample in observed.items():
        if "floors" in parts:
            tests[among] = floor_tests(sample, tuple(_wanted(WITH_FLOOR, metrics)))
        if "curves" in parts:
            curves[among] = reliability(sample, clusters)
    ids_and_labels = [*zip(records.ids, records.references.tolist(), strict=True)]
    prompts_sha256 = None
    if None not in records.prompts:
        prompts_and_labels = zip(records.prompts, records.references.tolist(), strict=True)
        prompts_sha256 = record_files.prompts_digest(prompts_and_labels)
    return Evaluation(
        path=records.path,
        normalise=records.normalise,
        scoring=records.scoring,
        model=records.model,
        questions=len(records),
        questions_sha256=_json_digest(ids_and_labels, ensure_ascii=False),
        prompts_sha256=prompts_sha256,
        letter_mass=finite(records.letter_mass.mean()),
        confidences=tuple(observed),
        reliability=curves,
        values={name: observed_values(sample, metrics) for name, sample in observed.items()},
        floor_tests=tests,
        draws=draws,
        squares=squares,
        unit_values={name: unit_values(sample, clusters) for name, sample in observed.items()},
        squared_values={name: squared_values(sample) for name, sample in observed.items()},
        subjects=len(set(records.subjects)),
        cluster=cluster,
        chat_template=records.chat_template,
        chat_template_is_known=records.chat_template_is_known,
        shots=records.shots,
        subjects_sha256=_json_digest(records.subjects.tolist()),
        truncated_prompts=records.truncated_prompts,
        shown_shots=records.shown_shots,
        tied=records.tied,
        bins_of_one={
            name: int((sample.bins.count == 1).sum()) for name, sample in observed.items()
        },
    )


def default_metrics(records: Records) -> list[str]:
    """The metrics that are computed unless some are named: of written answers alone, all."""
    is_written = records.scoring == "generate"
    return [name for name, metric in METRICS.items() if is_written or not metric.of_written]


def _json_digest(values: list, ensure_ascii: bool = True) -> str:
    """SHA-256 of values as JSON; digests of earlier versions decide where that is in ASCII."""
    return hashlib.sha256(json.dumps(values, ensure_ascii=ensure_ascii).encode()).hexdigest()


def _cluster_numbers(records: Records, cluster: Cluster) -> np.ndarray:
    """The number of each question's cluster, from 0, (N,); `TooFewClusters` of fewer than ten."""
    subjects, subject_of = np.unique(records.subjects, return_inverse=True)
    if len(subjects) < FEWEST_CLUSTERS:
        found = counted(len(subjects), "subject")
        raise TooFewClusters(
            f"{records.path}: {found}; expected {FEWEST_CLUSTERS} or more to resample subjects"
        )
    return subject_of


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


def observed_values(
    sample: Sample, metrics: Collection[str] | None = None
) -> dict[str, float | None]:
    """Metrics of the questions as they are, by default all; None where one is not defined."""
    return {name: finite(metric(sample)[0]) for name, metric in _wanted(METRICS, metrics).items()}


def _wanted(table: Mapping[str, Metric], names: Collection[str] | None) -> dict[str, Metric]:
    """Those of a table's metrics that are wanted, by name; all without names."""
    return {name: metric for name, metric in table.items() if names is None or name in names}


def squared_values(sample: Sample) -> dict[str, float]:
    """Metrics that are compared by their squares, squared, of the questions as they are."""
    square = float(squared_error.debiased_square(sample.bins)[0])
    return dict.fromkeys(COMPARED_BY_SQUARE, square)


def unit_values(sample: Sample, clusters: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Means of each unit that is resampled, a question or a whole cluster, by itself.

    They are (U,) for U units, in single precision, of the metrics that are means over questions.
    `stats` sees from them how many units make up a value or a difference. `clusters` are as for
    `resampled_metrics`.
    """
    values = {}
    for name, metric in METRICS.items():
        if metric.is_mean:
            of_units = metric.of_questions(sample.scores)
            if clusters is not None:
                of_units = np.bincount(clusters, weights=of_units) / np.bincount(clusters)
            values[name] = of_units.astype(np.float32)
    return values


def finite(value: float) -> float | None:
    """The number, or None where it is not finite: standard JSON, which users read, has no other.

    The arrays in the kept `.stats.json` hold NaN all the same, which Python reads and writes.
    """
    return float(value) if math.isfinite(value) else None


def resampled_metrics(
    observed: Mapping[ConfidenceDefinition, Sample],
    clusters: np.ndarray | None = None,
    metrics: Collection[str] | None = None,
) -> tuple[
    dict[ConfidenceDefinition, dict[str, np.ndarray]],
    dict[ConfidenceDefinition, dict[str, SquareDraws]],
]:
    """Metrics over RESAMPLES resamples of the questions, by definition of confidence and by metric.

    These are every metric that has an interval, (R,), and the draws of those that are compared by
    their squares. `clusters` are the numbers of the questions' clusters, (N,), if these are drawn
    as a whole; `metrics` the names of those that are wanted, by default all.
    """
    with_interval = _wanted(WITH_INTERVAL, metrics)
    compared_by_square = _wanted(COMPARED_BY_SQUARE, metrics)
    if not with_interval and not compared_by_square:
        return {among: {} for among in observed}, {among: {} for among in observed}
    drawn: dict[ConfidenceDefinition, dict[str, list[np.ndarray]]] = {}
    drawn_bins: dict[ConfidenceDefinition, list[Bins]] = {}
    for among in observed:
        drawn[among] = {name: [] for name in with_interval}
        drawn_bins[among] = []
    (questions,) = {len(sample.scores.labels) for sample in observed.values()}
    many = _MeansOfMany(observed, with_interval) if questions >= samples.MANY_QUESTIONS else None
    counts_of_chunks = samples.resamples(questions, RESAMPLES, clusters)
    for counts in _with_progress(counts_of_chunks, "resamples", RESAMPLES):
        if many is not None:
            many.append_to(drawn, counts)
        for among, sample in observed.items():
            resampled = Sample.resampled(sample.scores, counts)
            for name, metric in with_interval.items():
                if many is None or not metric.is_mean:
                    drawn[among][name].append(metric.draws(resampled))
            if compared_by_square:
                drawn_bins[among].append(resampled.coarse.bins)
    draws: dict[ConfidenceDefinition, dict[str, np.ndarray]] = {}
    squares: dict[ConfidenceDefinition, dict[str, SquareDraws]] = {}
    for among, sample in observed.items():
        draws[among] = {name: np.concatenate(parts) for name, parts in drawn[among].items()}
        squares[among] = {
            name: squared_error.square_draws(sample.bins, drawn_bins[among])
            for name in compared_by_square
        }
    return draws, squares


class _MeansOfMany:
    """The metrics that are means, of resamples of very many questions: all of them together."""

    def __init__(
        self, observed: Mapping[ConfidenceDefinition, Sample], metrics: Mapping[str, Metric]
    ):
        self._names: list[tuple[ConfidenceDefinition, str]] = []
        columns = []
        for among, sample in observed.items():
            for name, metric in metrics.items():
                if metric.is_mean:
                    self._names.append((among, name))
                    columns.append(metric.of_questions(sample.scores))
        self._values = np.stack(columns, axis=1) if columns else None

    def append_to(
        self,
        drawn: Mapping[ConfidenceDefinition, Mapping[str, list[np.ndarray]]],
        counts: np.ndarray,
    ) -> None:
        """Append each metric's draws, (R,), of resamples (R, N)."""
        if self._values is None:
            return
        means = samples.means_of_resamples(self._values, counts)
        for (among, name), of_metric in zip(self._names, means.T, strict=True):
            drawn[among][name].append(of_metric)


def _with_progress(chunks: Iterable[Sized], name: str, total: int) -> Iterator[Any]:
    """Chunks of samples, of `total` in all, with a bar on a terminal where they take long."""
    with tqdm(desc=name, total=total, disable=None, delay=PROGRESS_AFTER, leave=False) as bar:
        for chunk in chunks:
            yield chunk
            bar.update(len(chunk))


def quantile(drawn: np.ndarray, level: float | list[float]) -> np.ndarray:
    """What a further draw, along the first axis, stays below with this probability.

    The r-th smallest of R draws is the quantile at r / (R + 1), of draws that are all alike in
    distribution (Weibull's plotting positions): so levels are kept whatever R is.
    """
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

    def isotonic(of: Sample) -> np.ndarray:
        ascending = of.scores.ranked_confidence
        return np.stack([np.interp(at, ascending, row) for row in definitions.isotonic_fit(of)])

    bandwidth = max(
        float(definitions.smooth_ece_at(sample)[1][0]), kernel_smoothing.LEAST_BANDWIDTH
    )
    smooth_draws = []
    for counts in samples.resamples(len(p), BAND_SAMPLES, clusters):
        resampled = Sample.resampled(sample.scores, counts).coarse
        smooth_draws.append(definitions.smooth_curve(resampled, bandwidth, at))
    isotonic_draws = [isotonic(of) for of in samples.simulated_answers(sample.scores, BAND_SAMPLES)]
    smooth_low, smooth_high = quantile(np.vstack(smooth_draws), [LOW, HIGH])
    isotonic_low, isotonic_high = quantile(np.vstack(isotonic_draws), [LOW, HIGH])
    return {
        "count": sample.bins.count[0].astype(int).tolist(),
        "at": at.tolist(),
        "smooth": definitions.smooth_curve(sample, bandwidth, at)[0].tolist(),
        "smooth_low": smooth_low.tolist(),
        "smooth_high": smooth_high.tolist(),
        "isotonic": isotonic(sample)[0].tolist(),
        "isotonic_low": isotonic_low.tolist(),
        "isotonic_high": isotonic_high.tolist(),
    }


def floor_tests(
    sample: Sample, names: Sequence[str], simulations: int = SIMULATIONS
) -> dict[str, FloorTest]:
    """Compare calibration errors, by name, with those of calibrated models.

    Those models have these confidences, and answers that are right as often as they say; as many
    of them are simulated as `simulations` says.
    """
    if not names:
        return {}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in names}
    simulated_chunks = samples.simulated_answers(sample.scores, simulations)
    for simulated in _with_progress(simulated_chunks, "calibrated models", simulations):
        for name, parts in drawn.items():
            parts.append(WITH_FLOOR[name](simulated))
    tests = {}
    for name, parts in drawn.items():
        simulated_errors = np.concatenate(parts)
        value = WITH_FLOOR[name](sample.coarse)[0]
        # Sums in another order differ in the last digits; a tie is as much.
        reached = (simulated_errors >= value - 1e-12).sum()
        tests[name] = FloorTest(
            floor=float(quantile(simulated_errors, 1 - SIGNIFICANCE)),
            p=float((1 + reached) / (1 + len(simulated_errors))),
        )
    return tests
