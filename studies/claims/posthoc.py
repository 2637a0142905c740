"""What is done with trained models: temperatures, averages of weights, and entropy gaps."""

from pathlib import Path

from tqdm import tqdm

from calibeval.io import json_lines, write_rows
from calibeval.records import meta
from studies import temperatures
from studies.claims.parts import PARTS, Study
from studies.claims.records import RunRecord
from studies.claims.training import SETTING
from sweeps.runs.files import read_rows
from sweeps.runs.run import Run


def fit_temperatures(study: Study) -> None:
    """Fit a temperature to each of the runs of `recommended` at β = 0."""
    results = study.part_folder("recommended") / "results"
    entries = [entry for _, entry in json_lines(results / "index.jsonl")]
    plain = [
        entry for entry in entries if entry["dataset"] == "mmlu" and entry["label_smoothing"] == 0
    ]
    out = study.part_folder("temperature")
    for entry in temperatures.fit_to_mmlu(plain, results, Path("data/mmlu"), out):
        file = Path(entry["records"])
        setting = {name: entry[name] for name in SETTING}
        temperature = meta(file)["temperature"]["temperature"]
        record = RunRecord("temperature", file.stem, temperature=temperature, **setting)
        study.store.add(study.model, record, {})


def trained(study: Study, part: str) -> list[Run]:
    """The runs of a part whose models are still there."""
    return [Run(model.parent) for model in sorted(study.part_folder(part).glob("*/model"))]


def average_weights(study: Study) -> None:
    """Average the weights of each of the runs of `recommended` at β = 0 with the base model's."""
    from studies.claims import model_figures  # imports torch

    recorded = study.store.keys(study.model)
    for run in tqdm(trained(study, "recommended"), "averages", unit="model"):
        setting = {name: run.config().train[name] for name in SETTING}
        record = RunRecord("averaged", run.name, **setting)
        if record.label_smoothing == 0 and record.key not in recorded:
            folder = study.part_folder("averaged") / run.name
            record.alpha = model_figures.score_average(run, folder)
            study.store.add(study.model, record, {"mmlu": folder / "mmlu.jsonl"})


def measure_entropy_gaps(study: Study) -> None:
    """Measure each model that is still there, but for those that only chose a rate."""
    from studies.claims import model_figures

    out = study.store.entropy_gap_file(study.model)
    rows = read_rows(out)
    measured = {(row["part"], row["run"]) for row in rows}  # names recur between parts
    parts = [part.name for part in PARTS if part.name != "grid"]
    runs = [(part, run) for part in parts for run in trained(study, part)]
    for part, run in tqdm(runs, "entropy gaps", unit="model"):
        if (part, run.name) in measured:
            continue
        setting = {name: run.config().train[name] for name in (*SETTING, "smoothing_target")}
        rows.append({"run": run.name, "part": part, **setting, **model_figures.entropy_gap(run)})
        measured.add((part, run.name))
        write_rows(out, rows)
