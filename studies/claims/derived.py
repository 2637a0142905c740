"""Derivations: runs that nobody trained, whose answers are made of other runs' answers.

`DERIVATIONS` has a function for each. It reads the answers of the runs that were scored, divides
their log-probabilities by a temperature, and returns runs like the scored ones, whose `origin` is
the derivation's name. A further derivation is a function here, a line in `DERIVATIONS`, one in
`report.TEMPERATURES`, and a `Term` of its name in a contrast. Of each part `summary` prints the one
that `summary.TEMPERATURE_TERMS` names.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from calibeval.io import json_lines, write_rows
from calibeval.measures import scaling
from calibeval.records import read as read_records
from calibeval.report.diagnosis import cross_fitted
from studies.claims.answers import (
    BASE,
    LETTER_TASKS,
    OVER_TRAINED,
    PLAIN,
    AnsweredRun,
    Term,
    files_by_seed,
    unpack_scored_runs,
    unpacked_folder,
)
from studies.claims.parts import Study
from studies.claims.records import RunRecord


def answered_runs(study: Study) -> list[AnsweredRun]:
    """Every run of a model that has answers: those that were scored, and those of `DERIVATIONS`.

    The answers are written below the study's folder of runs.
    """
    scored = unpack_scored_runs(study)
    runs = [*scored]
    for derive in DERIVATIONS.values():
        runs += derive(study, scored)
    return runs


def at_fitted_temperatures(study: Study, scored: list[AnsweredRun]) -> list[AnsweredRun]:
    """The runs of `recommended` at β = 0, each at the temperature that is on record for it.

    It was fitted on MMLU's val questions, and is carried to the other tasks.
    """
    runs = []
    # The records of the step `temperature` have a temperature and no answers, so that they are not
    # among `scored`. Their answers are made here: each run keeps its record's key and gets tasks.
    for record in study.store.runs(study.model):
        if record.origin == "temperature":
            assert record.temperature is not None  # every run of the step `temperature` has one
            folder = unpacked_folder(study, *record.key)
            files = files_of_seed(scored, PLAIN, record.seed)
            tasks = write_at_temperature(files, record.temperature, folder)
            runs.append(AnsweredRun(replace(record, tasks=tasks), folder))
    return runs


def at_dacas_temperature(study: Study, scored: list[AnsweredRun]) -> list[AnsweredRun]:
    """The runs of `recommended` at β = 0, each at DACA's temperature.

    It is fitted on MMLU's test questions, on which it is judged too, without their right answers
    (`agreement_temperature`), and carried to the other tasks: no records of val questions are kept.
    """
    base = files_by_seed(scored, BASE, "mmlu").get(None)
    if base is None:
        return []
    runs = []
    for seed, plain in files_by_seed(scored, PLAIN, "mmlu").items():
        temperature = agreement_temperature(base, plain)
        if temperature is None:
            print(
                f"daca: skipped for {plain}, which agrees with {base} on no question",
                file=sys.stderr,
            )
            continue
        record = RunRecord("daca", f"{seed}", label_smoothing=0.0, seed=seed)
        record.temperature = temperature
        folder = unpacked_folder(study, *record.key)
        files = files_of_seed(scored, PLAIN, seed)
        record.tasks = write_at_temperature(files, temperature, folder)
        runs.append(AnsweredRun(record, folder))
    return runs


def over_trained_at_a_temperature(study: Study, scored: list[AnsweredRun]) -> list[AnsweredRun]:
    """The over-trained runs at β = 0, each at a temperature fitted on MMLU's test questions.

    No validation questions were kept of these runs. On MMLU each half of the test questions is
    therefore read at the temperature that was fitted on the other half (`diagnosis.cross_fitted`);
    the other tasks are read at one that was fitted on all of MMLU's, which is the run's.
    """
    runs = []
    for seed, mmlu in files_by_seed(scored, OVER_TRAINED, "mmlu").items():
        answers = read_records(mmlu)
        record = RunRecord("over-trained-temperature", f"{seed}", label_smoothing=0.0, seed=seed)
        every_answer = np.ones(len(answers), bool)  # the mask of those that are fitted on
        try:
            record.temperature, _ = scaling.fit(answers, every_answer)
            cross_fitted_answers, _ = cross_fitted(answers)
        except scaling.NoTemperature as error:
            print(f"over-trained-temperature: skipped for {mmlu}: {error}", file=sys.stderr)
            continue
        folder = unpacked_folder(study, *record.key)
        files = files_of_seed(scored, OVER_TRAINED, seed)
        del files["mmlu"]
        logprobs_of_question = dict(
            zip(cross_fitted_answers.ids, cross_fitted_answers.logprobs.tolist(), strict=True)
        )
        # A temperature of the choices says nothing of all tokens, so that the letters' share among
        # these is unknown (None), as `scaling.scaled` writes it too.
        rows = [
            {**row, "logprobs": logprobs_of_question[row["id"]], "letter_mass": None}
            for _, row in json_lines(mmlu)
        ]
        write_rows(folder / "mmlu.jsonl", rows)
        record.tasks = {"mmlu": len(rows)}
        record.tasks.update(write_at_temperature(files, record.temperature, folder))
        runs.append(AnsweredRun(record, folder))
    return runs


# What makes the runs of each derivation, of a study and its scored runs. That of `temperature`
# reads the temperatures which the step of that name has fitted.
DERIVATIONS: dict[str, Callable[[Study, list[AnsweredRun]], list[AnsweredRun]]] = {
    "temperature": at_fitted_temperatures,
    "daca": at_dacas_temperature,
    "over-trained-temperature": over_trained_at_a_temperature,
}


def files_of_seed(scored: list[AnsweredRun], term: Term, seed: int | None) -> dict[str, Path]:
    """The files of a run's answers by letters, by task."""
    files = {}
    for task in LETTER_TASKS:
        file = files_by_seed(scored, term, task).get(seed)
        if file:
            files[task] = file
    return files


def write_at_temperature(
    files: dict[str, Path], temperature: float, folder: Path
) -> dict[str, int]:
    """Write the answers in `files` at a temperature to `folder`; returns their number by task."""
    tasks = {}
    for task, file in files.items():
        rows = [scaling.scaled(row, temperature) for _, row in json_lines(file)]
        write_rows(folder / f"{task}.jsonl", rows)
        tasks[task] = len(rows)
    return tasks


def agreement_temperature(base: Path, tuned: Path) -> float | None:
    """The temperature that aligns a tuned model's confidence with its base model's.

        τ = argmin Σ_q KL(softmax(s_base) ‖ softmax(s_tuned / τ))

    over the questions q whose likeliest choice is the same for both, s the choices'
    log-probabilities (DACA; Luo et al. 2025, arXiv 2505.16690). No right answers are needed. Where
    the models disagree the base model's confidence is in another answer, and says nothing. None
    where they agree on no question.
    """
    base_scores = read_records(base).logprobs
    tuned_scores = read_records(tuned).logprobs
    agree = base_scores.argmax(1) == tuned_scores.argmax(1)
    if not agree.any():
        return None
    target = softmax(base_scores[agree], axis=1)

    def cross_entropy(log_temperature: float) -> float:
        # Where the target is 0, log p may be −∞, and their product is to be 0 and not NaN.
        log_p = log_softmax(tuned_scores[agree] / np.exp(log_temperature), axis=1)
        return float(-(target * np.where(target > 0, log_p, 0)).sum(1).mean())

    limit = scaling.LOG_TEMPERATURE_LIMIT
    fitted = minimize_scalar(
        cross_entropy, bounds=(-limit, limit), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(fitted.x))
