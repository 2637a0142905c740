"""The comparisons that the verdicts rest on, and how each is estimated from records.

A contrast is the sum of its `plus` terms less that of its `minus` terms, paired by seed. A quantity
is what is compared: a metric of a task, read in one way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from calibeval import evaluations, measures, scaling, stats
from calibeval.diagnosis import cross_fitted
from calibeval.io import InputError, json_lines, read_text, write_rows, write_text
from calibeval.measures import Sample
from calibeval.records import read as read_records
from studies.claims import calibration_runs
from studies.claims.parts import BETAS, Study
from studies.claims.records import RunRecord


@dataclass(frozen=True)
class Term:
    """The runs of a part, at one label smoothing or, without it, at any."""

    part: str
    label_smoothing: float | None = None

    def matches(self, record: RunRecord) -> bool:
        """Whether a run is one of these."""
        if record.part != self.part:
            return False
        return self.label_smoothing is None or record.label_smoothing == self.label_smoothing


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
    confidence: measures.Among
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
            words.append("logits normalised")
        if self.scale != DEFAULT_SCALE:
            words.append(f"× {self.scale}")
        return ", ".join(words)


@dataclass(frozen=True)
class Difference:
    """An estimate of a contrast, and the number of seeds that it is a mean over."""

    estimate: stats.Estimate
    seeds: int


@dataclass(frozen=True)
class UnpackedRun:
    """A run, and the folder of its records as JSON lines."""

    record: RunRecord
    folder: Path


DONE = "DONE"  # beside a run's unpacked records, with the digest of what was unpacked
BASE = Term("base")
PLAIN = Term("recommended", 0.0)
SMOOTHED = Term("recommended", 0.1)
OVER_TRAINED = Term("over-trained", 0.0)
# OVER_TRAINED at a temperature that is fitted on MMLU's test questions, each half for the other.
OVER_TRAINED_COOLED = Term("over-trained-temperature")


def pair(name: str, plus: Term, minus: Term) -> Contrast:
    """A contrast of one term and another."""
    return Contrast(name, (plus,), (minus,))


def smoothing_effect(name: str, part: str, label_smoothing: float = 0.1) -> Contrast:
    """What label smoothing changes within a part."""
    return pair(name, Term(part, label_smoothing), Term(part, 0.0))


def less_recommended_effect(name: str, part: str) -> Contrast:
    """What label smoothing changes within a part, less what it changes within `recommended`."""
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
    smoothing_effect("sum, clipped: 0.1 less 0", "sum"),
    less_recommended_effect("– less that of `recommended`, sum, clipped", "sum"),
    smoothing_effect("open-instruct's script: 0.1 less 0", "script"),
    less_recommended_effect("– less that of `recommended`, open-instruct's script", "script"),
    pair("equal held-out loss: 0.1 less 0", SMOOTHED, Term("equal", 0.0)),
    pair("temperature after β = 0, less β = 0", Term("temperature"), PLAIN),
    pair("temperature after β = 0, less β = 0.1", Term("temperature"), SMOOTHED),
    pair("temperature after β = 0, less β = 0.3", Term("temperature"), Term("recommended", 0.3)),
    pair("DACA's temperature after β = 0, less β = 0", Term("daca"), PLAIN),
    pair("DACA's temperature after β = 0, less β = 0.1", Term("daca"), SMOOTHED),
    # Not alike: DACA's is fitted on the test questions themselves, the other one on val questions.
    pair("DACA's temperature (of the test) less one of val", Term("daca"), Term("temperature")),
    pair("over-trained: temperature after β = 0, less β = 0", OVER_TRAINED_COOLED, OVER_TRAINED),
    pair(
        "over-trained: temperature after β = 0, less β = 0.3",
        OVER_TRAINED_COOLED,
        Term("over-trained", 0.3),
    ),
    pair(
        "over-trained: temperature after β = 0, less β = 0.5",
        OVER_TRAINED_COOLED,
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
LETTER_TASKS = {"mmlu": "MMLU", "arc-letters": "ARC-Easy", "hellaswag-letters": "HellaSwag"}
# What must not get worse while calibration gets better: figures of MMLU by name, ×100.
GUARDS = {
    "accuracy": Quantity("mmlu", "choices", None, "accuracy", 100),
    "nll": Quantity("mmlu", "choices", None, "nll", 100),
    "brier": Quantity("mmlu", "choices", None, "brier", 100),
    "auroc": Quantity("mmlu", "choices", None, "auroc", 100),
    "aurc": Quantity("mmlu", "choices", None, "aurc", 100),
    "nll, all tokens": Quantity("mmlu", "vocabulary", None, "nll", 100),
    "aurc, logits normalised": Quantity(
        "mmlu", "choices", None, "aurc", 100, normalized_logits=True
    ),
}


def unpack_answers(study: Study) -> list[UnpackedRun]:
    """Every run of a model that has answers, with its records unpacked into the runs' folder.

    Beside the runs that were scored these are parts whose answers are made of others':
    `temperature`, those of `recommended` at β = 0 at the temperature that was fitted to each;
    `daca`, the same at DACA's; and `over-trained-temperature`, which
    `over_trained_at_a_temperature` makes.
    """
    records = study.store.runs(study.model)
    if not records:
        raise InputError(f"{study.store.folder}: no records of {study.model}")
    runs = unpack_scored_runs(study, records)
    for record in records:
        if record.part == "temperature":
            after = UnpackedRun(record, unpacked_folder(study, record))
            apply_temperature(runs, after)
            runs.append(after)
    folder = study.runs_folder / "unpacked" / study.model
    return runs + at_dacas_temperature(runs, folder) + over_trained_at_a_temperature(runs, folder)


def unpacked_folder(study: Study, record: RunRecord) -> Path:
    """Where a run's records are unpacked."""
    return study.runs_folder / "unpacked" / study.model / record.part / record.run


def unpack_scored_runs(study: Study, records: list[RunRecord]) -> list[UnpackedRun]:
    """Unpack the runs that were scored, where their folders do not have their records already."""
    questions = study.store.questions()
    runs = []
    for record in records:
        if not record.tasks:
            continue
        folder = unpacked_folder(study, record)
        if not _is_unpacked(study, record, folder):
            (folder / DONE).unlink(missing_ok=True)
            study.store.unpack(study.model, record, questions, folder)
            write_text(folder / DONE, study.store.digest(study.model, record))
        runs.append(UnpackedRun(record, folder))
    return runs


def _is_unpacked(study: Study, record: RunRecord, folder: Path) -> bool:
    """Whether the folder has what the store has of a run, and not what it once had."""
    done = folder / DONE
    return done.exists() and read_text(done) == study.store.digest(study.model, record)


def apply_temperature(runs: list[UnpackedRun], after: UnpackedRun) -> None:
    """Write what a run of `recommended` answers by letters at the temperature fitted to it.

    It was fitted on MMLU's val questions, and is carried to the other tasks.
    """
    for task in LETTER_TASKS:
        plain = files_by_seed(runs, PLAIN, task).get(after.record.seed)
        if plain:
            temperature = after.record.temperature
            assert temperature is not None  # every run of the part `temperature` has one
            rows = [scaling.scaled(row, temperature) for _, row in json_lines(plain)]
            write_rows(after.folder / f"{task}.jsonl", rows)
            after.record.tasks[task] = len(rows)


def at_dacas_temperature(runs: list[UnpackedRun], folder: Path) -> list[UnpackedRun]:
    """Write what the runs of `recommended` at β = 0 answer by letters at DACA's temperature.

    It is fitted on MMLU's test questions, on which it is judged too, without their right answers
    (`agreement_temperature`), and carried to the other tasks: no records of val questions are kept.
    Returns the runs, of the part `daca`.
    """
    bases = files_by_seed(runs, BASE, "mmlu")
    runs_at_temperature = []
    for seed, plain in files_by_seed(runs, PLAIN, "mmlu").items():
        if not bases:
            break
        base = bases.get(seed) or bases[None]
        temperature = agreement_temperature(base, plain)
        record = RunRecord(
            "daca", f"{seed}", label_smoothing=0.0, seed=seed, temperature=temperature
        )
        run = UnpackedRun(record, folder / "daca" / f"{seed}")
        for task in LETTER_TASKS:
            file = files_by_seed(runs, PLAIN, task).get(seed)
            if file:
                rows = [scaling.scaled(row, temperature) for _, row in json_lines(file)]
                write_rows(run.folder / f"{task}.jsonl", rows)
                record.tasks[task] = len(rows)
        runs_at_temperature.append(run)
    return runs_at_temperature


def over_trained_at_a_temperature(runs: list[UnpackedRun], folder: Path) -> list[UnpackedRun]:
    """Write what the over-trained runs at β = 0 answer by letters at a temperature.

    No validation questions were kept of these runs. On MMLU each half of the test questions is
    therefore read at the temperature that was fitted on the other half (`diagnosis.cross_fitted`);
    the other tasks are read at one that was fitted on all of MMLU's. Returns the runs, of the part
    `over-trained-temperature`.
    """
    runs_at_temperature = []
    for seed, mmlu in files_by_seed(runs, OVER_TRAINED, "mmlu").items():
        answers = read_records(mmlu)
        halves, _ = cross_fitted(answers)
        logprobs = dict(zip(halves.ids, halves.logprobs.tolist(), strict=True))
        rows = [
            {**row, "logprobs": logprobs[row["id"]], "letter_mass": None}
            for _, row in json_lines(mmlu)
        ]
        temperature, _ = scaling.fit(answers, np.ones(len(answers), bool))
        record = RunRecord(
            "over-trained-temperature",
            f"{seed}",
            label_smoothing=0.0,
            seed=seed,
            temperature=temperature,
        )
        run = UnpackedRun(record, folder / "over-trained-temperature" / f"{seed}")
        write_rows(run.folder / "mmlu.jsonl", rows)
        record.tasks["mmlu"] = len(rows)
        for task in LETTER_TASKS:
            file = files_by_seed(runs, OVER_TRAINED, task).get(seed)
            if file and task != "mmlu":
                rows = [scaling.scaled(row, temperature) for _, row in json_lines(file)]
                write_rows(run.folder / f"{task}.jsonl", rows)
                record.tasks[task] = len(rows)
        runs_at_temperature.append(run)
    return runs_at_temperature


def agreement_temperature(base: Path, tuned: Path) -> float:
    """The temperature that aligns a tuned model's confidence with its base model's.

        τ = argmin Σ_q KL(softmax(s_base) ‖ softmax(s_tuned / τ))

    over the questions q whose likeliest choice is the same for both, s the choices'
    log-probabilities (DACA; Luo et al. 2025, arXiv 2505.16690). No right answers are needed. Where
    the models disagree the base model's confidence is in another answer, and says nothing.
    """
    base_scores = read_records(base).logprobs
    tuned_scores = read_records(tuned).logprobs
    agree = base_scores.argmax(1) == tuned_scores.argmax(1)
    target = softmax(base_scores[agree], axis=1)

    def cross_entropy(log_temperature: float) -> float:
        log_p = log_softmax(tuned_scores[agree] / np.exp(log_temperature), axis=1)
        return float(-(target * np.where(target > 0, log_p, 0)).sum(1).mean())

    limit = scaling.LOG_TEMPERATURE_LIMIT
    fitted = minimize_scalar(
        cross_entropy, bounds=(-limit, limit), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(fitted.x))


def files_by_seed(runs: list[UnpackedRun], term: Term, task: str) -> dict[int | None, Path]:
    """The files of a task's records by seed; the base model's has the seed None.

    Raises InputError where two runs have one seed, as they have once a learning rate was changed:
    nothing says which of them is meant.
    """
    runs_by_seed: dict[int | None, UnpackedRun] = {}
    for run in runs:
        if task not in run.record.tasks or not term.matches(run.record):
            continue
        seed = run.record.seed
        if seed in runs_by_seed:
            both = f"{runs_by_seed[seed].record.run} and {run.record.run}"
            smoothing = "" if term.label_smoothing is None else f", β = {term.label_smoothing:g}"
            raise InputError(
                f"{both} are both runs of {term.part}{smoothing}, seed {seed}; move the records "
                f"of one of them out of records/"
            )
        runs_by_seed[seed] = run
    return {seed: run.folder / f"{task}.jsonl" for seed, run in runs_by_seed.items()}


def difference(
    runs: list[UnpackedRun], contrast: Contrast, quantity: Quantity
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
    load: Callable[[Path], evaluations.Evaluation] = partial(
        evaluations.load, normalise=quantity.normalise
    )
    if quantity.metric in calibration_runs.METRIC_NAMES:  # the same figures, in seconds
        load = partial(calibration_runs.load, normalise=quantity.normalise)
    if quantity.normalized_logits:
        load = with_normalized_logits
    sides = []
    for position, weight in enumerate(weights):
        sides.append((weight, [load(files[position]) for files in paired]))
    estimate = stats.contrast(sides, quantity.metric, quantity.confidence)
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


def with_normalized_logits(path: Path) -> evaluations.Evaluation:
    """The evaluation in `path` as it is now, as `_with_normalized_logits` measures it."""
    status = path.stat()
    return _with_normalized_logits(path, (status.st_mtime_ns, status.st_size))


@cache
def _with_normalized_logits(path: Path, state: tuple[int, int]) -> evaluations.Evaluation:
    """An evaluation with the AURC alone, of confidences divided by the norm of the answers' logits.

    The confidences are max_k (s_k − s̄) / ‖s − s̄‖₂, s the choices' log-probabilities, which are
    logits but for a constant (Cattelan & Silva 2024; Xia et al. 2025). A run stands in many
    contrasts and is measured once for each `state` of its file, which a new temperature changes.
    """
    observed = evaluations.in_order(read_records(path))
    scores = measures.scores(observed, "choices")
    centered = observed.logprobs - observed.logprobs.mean(1, keepdims=True)
    # Where all choices are equally likely, the norm is 0 and the confidence shall be 0.
    scores.confidence = centered.max(1) / np.maximum(np.linalg.norm(centered, axis=1), 1e-12)
    (value,) = measures.aurc(Sample(scores))
    resamples = measures.resamples(len(observed), evaluations.RESAMPLES)
    draws = np.concatenate([measures.aurc(Sample(scores, counts)) for counts in resamples])
    return replace(
        evaluations.load(path),
        values={"choices": {"aurc": value}},
        draws={"choices": {"aurc": draws}},
    )
