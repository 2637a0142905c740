"""The steps that need trained models: temperatures, averages of weights, and entropy gaps."""

import sys
from pathlib import Path

from tqdm import tqdm

from calibeval.io import json_lines, write_rows
from calibeval.records import meta
from studies import temperatures
from studies.claims.parts import PARTS, Study
from studies.claims.records import RunRecord
from studies.claims.training import RUN_KEYS
from sweeps.runs.files import read_rows
from sweeps.runs.run import Run


def fit_temperatures(study: Study) -> None:
    """Fit a temperature to each run of `recommended` at β = 0 that has none on record.

    Runs without a trained model, and trained ones that the part's index does not list, are named on
    stderr and left out.
    """
    results = study.part_folder("recommended") / "results"
    index = results / "index.jsonl"
    recorded = study.store.keys(study.model)
    runs_with_models = [run.name for run in trained(study, "recommended")]
    listed = []
    if index.exists():
        listed = [entry for _, entry in json_lines(index) if entry["dataset"] == "mmlu"]
    plain = []
    for entry in listed:
        is_plain = entry["label_smoothing"] == 0
        # The index also lists runs whose model was deleted after they were scored.
        has_model = entry["run"] in runs_with_models
        if is_plain and has_model and ("temperature", entry["run"]) not in recorded:
            plain.append(entry)
    tell_of_absent_models(study, "temperature", runs_with_models)
    tell_of_unlisted_runs(study, index, [entry["run"] for entry in listed])
    if not plain:
        return
    out = study.part_folder("temperature")
    for entry in temperatures.fit_to_mmlu(plain, results, Path("data/mmlu"), out):
        file = Path(entry["records"])
        run_keys = {name: entry[name] for name in RUN_KEYS}
        # A dict: what `calibeval.temperature` returned, and the file that it was fitted on.
        summary_of_fit = meta(file)["temperature"]
        temperature = summary_of_fit["temperature"]  # the number
        record = RunRecord("temperature", file.stem, temperature=temperature, **run_keys)
        # Without files, so that the record has the temperature and no answers: those in `file` are
        # not kept, as derived.at_fitted_temperatures makes them of the answers that are on record.
        study.store.add(study.model, record, {})


def tell_of_absent_models(study: Study, step: str, runs_with_models: list[str]) -> None:
    """Name on stderr the runs of `recommended` at β = 0 for which a step cannot be done.

    They have no record of `step` and no trained model here.
    """
    recorded = study.store.keys(study.model)
    absent = []
    for record in study.store.runs(study.model):
        is_plain = record.origin == "recommended" and record.label_smoothing == 0
        is_wanted = is_plain and (step, record.run) not in recorded
        if is_wanted and record.run not in runs_with_models:
            absent.append(record.run)
    if absent:
        folder = study.part_folder("recommended")
        print(
            f"{step}: skipped for {', '.join(absent)}, since no trained model is in {folder}; "
            "the records of other runs stay as they are",
            file=sys.stderr,
        )


def tell_of_unlisted_runs(study: Study, index: Path, listed: list[str]) -> None:
    """Name on stderr the trained runs of `recommended` at β = 0 that the part's index lacks.

    Without its line there, nothing says which records of a run are read at a temperature.
    """
    recorded = study.store.keys(study.model)
    unlisted = []
    for run in trained(study, "recommended"):
        is_plain = run.config().train["label_smoothing"] == 0
        is_wanted = is_plain and ("temperature", run.name) not in recorded
        if is_wanted and run.name not in listed:
            unlisted.append(run.name)
    if unlisted:
        print(
            f"temperature: skipped for {', '.join(unlisted)}, which {index} does not list; "
            "`python -m sweeps collect` of the part makes it anew once they are scored",
            file=sys.stderr,
        )


def trained(study: Study, part: str) -> list[Run]:
    """The runs of a part whose models are still there."""
    return [Run(model.parent) for model in sorted(study.part_folder(part).glob("*/model"))]


def average_weights(study: Study) -> None:
    """Average the weights of each run of `recommended` at β = 0 with the base model's.

    What is on record is not done again. Runs that are on record without a trained model are named
    on stderr and left out.
    """
    runs = trained(study, "recommended")
    tell_of_absent_models(study, "averaged", [run.name for run in runs])
    if not runs:
        return
    from studies.claims import gpu_measures  # imports torch

    recorded = study.store.keys(study.model)
    for run in tqdm(runs, "averages", unit="model"):
        run_keys = {name: run.config().train[name] for name in RUN_KEYS}
        record = RunRecord("averaged", run.name, **run_keys)
        if record.label_smoothing == 0 and record.key not in recorded:
            folder = study.part_folder("averaged") / run.name
            record.alpha = gpu_measures.score_average(run, folder)
            study.store.add(study.model, record, {"mmlu": folder / "mmlu.jsonl"})


def measure_entropy_gaps(study: Study) -> None:
    """Measure each model that is still there, but for those that only chose a rate.

    Left out as well are runs that hold no conversations out, as open-instruct's do not.
    """
    out = study.store.entropy_gap_file(study.model)
    rows = read_rows(out)
    measured = {(row["part"], row["run"]) for row in rows}  # names recur between parts
    parts = [part.name for part in PARTS if part.name != "grid"]
    runs = [(part, run) for part in parts for run in trained(study, part)]
    if not runs:
        print(
            f"entropy-gap: skipped, since no trained models are in {study.part_folder('*')}; "
            f"{len(rows)} gaps that were measured before stay on record",
            file=sys.stderr,
        )
        return
    from studies.claims import gpu_measures

    for part, run in tqdm(runs, "entropy gaps", unit="model"):
        holds_conversations_out = bool(run.config().train.get("held_out"))
        if (part, run.name) in measured or not holds_conversations_out:
            continue
        run_keys = {name: run.config().train[name] for name in (*RUN_KEYS, "smoothing_target")}
        rows.append({"run": run.name, "part": part, **run_keys, **gpu_measures.entropy_gap(run)})
        measured.add((part, run.name))
        write_rows(out, rows)
