"""A sweep's results: which cells have which records, the index for calibeval, the gaps."""

import html
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath

import calibeval.report
from calibeval import entropy
from calibeval.io import InputError
from sweeps import report, score
from sweeps.config import Entropy, Sweep
from sweeps.errors import SweepError
from sweeps.files import make_folder, write_text
from sweeps.locks import lease
from sweeps.plan import Cell, sweep_folder
from sweeps.rundir import RunDir


@dataclass(frozen=True)
class Gap:
    """A result that the table lacks, and why."""

    name: str
    task: str
    reason: str


def label(sweep: Sweep, model: str) -> str:
    """A model's name in tables."""
    return sweep.model_labels.get(model, PurePath(model).name)


def index(sweep: Sweep, cells: list[Cell]) -> tuple[list[dict], list[Gap]]:
    """One entry for each record file that exists, and the gaps; paths relative to the index."""
    folder = sweep_folder(sweep)
    entries, gaps = [], []
    subjects = [
        (subject, {"model_name_or_path": model}, None)
        for model, subject in score.bases(sweep, cells).items()
    ]
    subjects += [(score.of_cell(cell), cell.config.train, cell) for cell in cells]
    for subject, train, cell in subjects:
        for task in sweep.score.measured:
            if not score.scored(subject, task, sweep.score):
                trained = cell is None or (cell.folder / "DONE").exists()
                why = score.damage(subject, task, sweep.score) or "not scored"
                gaps.append(Gap(subject.name, task.key, why if trained else "not trained"))
                continue
            entries.append(
                {
                    "records": os.path.relpath(subject.records(task), folder),
                    "dataset": task.key,
                    "model": label(sweep, train["model_name_or_path"]),
                    "label_smoothing": train.get("label_smoothing"),
                    "learning_rate": train.get("learning_rate"),
                    "seed": train.get("seed"),
                    "run": subject.name,
                    **(training(cell) if cell else {}),
                }
            )
    return entries, gaps


def _write(
    sweep: Sweep, cells: list[Cell], entries: list[dict], gaps: list[Gap], results: Path
) -> None:
    folder, part = results.parent, results.with_name(".results.part")
    shutil.rmtree(part, ignore_errors=True)
    make_folder(part)
    rows = report.cells_table(sweep, cells)
    best = report.best_learning_rates(sweep, cells)
    report.write_csv(rows, folder / "cells.csv")
    if best:
        report.write_csv(best, folder / "best_learning_rates.csv")
    else:
        (folder / "best_learning_rates.csv").unlink(missing_ok=True)
    report.curves(cells, folder / "curves.svg")
    page, sections = folder / "report.html", report.sections(sweep, rows, best, folder)
    note = report.note(rows, gaps)
    own = [e | {"records": folder / e["records"]} for e in entries if e["dataset"] == Entropy.key]
    entries = [entry for entry in entries if entry["dataset"] != Entropy.key]
    if own:
        try:
            text = entropy.collect(own, part / "entropy.csv")
        except InputError as error:
            raise SweepError(f"collect: {error}") from error
        write_text(part / "entropy.md", text)
        sections.append(f"<h2>Entropy calibration</h2><pre>{html.escape(text)}</pre>")
    if entries:
        write_text(folder / "index.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries))
        options = {"title": sweep.name, "note": note, "sections": sections, "page": page}
        try:
            said = calibeval.report.collect(folder / "index.jsonl", part, **options)
        except InputError as error:
            raise SweepError(f"collect: {error}") from error
        print(said.replace(str(part), str(results)), end="")
    else:
        (folder / "index.jsonl").unlink(missing_ok=True)
        calibeval.report.html.page(sweep.name, [note, *sections], page)
    _replace(part, results)


def _replace(part: Path, results: Path) -> None:
    """Put the files of `part` in the place of those in `results`, where no older one stays."""
    new = {path.relative_to(part) for path in part.rglob("*") if path.is_file()}
    for name in new:
        make_folder((results / name).parent)
        (part / name).replace(results / name)
    for path in results.rglob("*"):
        if path.is_file() and path.relative_to(results) not in new:
            path.unlink()
    shutil.rmtree(part)


def training(cell: Cell) -> dict:
    """What a run was trained on, how long, and what else the grid varies."""
    train = cell.config.train
    found = {"train_data": report.data(train), "epochs": train.get("num_train_epochs")}
    named = {"label_smoothing", "learning_rate", "seed", "model_name_or_path", "num_train_epochs"}
    named |= {"train_file", "dataset_name", "dataset_mixer_list"}
    values = {key: value for key, value in cell.values.items() if key not in named}
    return found | {k: v if isinstance(v, (str, int, float)) else str(v) for k, v in values.items()}


def collect(sweep: Sweep, cells: list[Cell]) -> list[Gap]:
    """Write everything that can be written from what is there; returns the gaps.

    To `<output_root>/sweeps/<name>/`: index.jsonl, cells.csv, best_learning_rates.csv, curves.svg,
    report.html and, in results/, calibeval's tables and diagrams.
    """
    folder = sweep_folder(sweep)
    results = folder / "results"
    gaps = [
        Gap(cell.config.name, "train", "not trained")
        for cell in cells
        if sweep.score is None and not (cell.folder / "DONE").exists()
    ]
    entries = []
    if sweep.score is not None:
        entries, gaps = index(sweep, cells)
    if not entries and not any(RunDir(cell.folder).metrics.exists() for cell in cells):
        print(
            f"{sweep.name}: nothing to collect: no run has trained yet: 0 of {len(cells)} "
            f"({cells[0].folder.parent})"
        )
        return gaps
    make_folder(results)
    with lease(folder / "collect.lock", timeout=-1):  # a person may collect beside a job
        _write(sweep, cells, entries, gaps, results)
    for gap in gaps:
        print(f"gap: {gap.name} · {gap.task}: {gap.reason}")
    print(f"report: {folder / 'report.html'}")
    return gaps
