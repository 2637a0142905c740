"""Train and score what of a part has no records yet, and keep the records of each run."""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from calibeval.io import write_rows
from studies.claims.parts import CONFIG, OPEN_INSTRUCT_CONVERSATIONS, Part, Study
from studies.claims.records import RunRecord
from sweeps.results.selection import held_out_loss
from sweeps.runs.conversations import conversations
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

# What varies within a part beside the seed. Nothing else tells the runs of a part apart: two runs
# that are alike in these are refused by `answers.files_by_seed`.
VARIED = ("learning_rate", "label_smoothing")
RUN_KEYS = (*VARIED, "seed")  # the keys of `train:` that tell a part's runs apart
SECONDS_BETWEEN_LOOKS = 2


def train(study: Study, part: Part, overrides: list[str]) -> int:
    """Run what has no records, keeping those of each run as it ends; returns the exit code."""
    plan = plan_sweep(CONFIG, overrides)
    selections = overrides_of_missing_runs(study, part, plan)
    if not selections:
        return score_missing_baselines(study, part, plan)
    for selection in selections:
        prepare(study, part, overrides)
        changes = [*overrides, *selection]
        command = [sys.executable, "-m", "sweeps", "launch", str(CONFIG), "--executor", "local"]
        with subprocess.Popen([*command, *changes]) as process:
            while process.poll() is None:
                keep_records(study, part, plan_sweep(CONFIG, changes))
                time.sleep(SECONDS_BETWEEN_LOOKS)
        keep_records(study, part, plan_sweep(CONFIG, changes))
        if process.returncode:
            return process.returncode
    return 0


def prepare(study: Study, part: Part, overrides: list[str]) -> None:
    """Make the file that a part's runs need beyond what prefetch brings, unless it is there."""
    if part.name == "script":
        write_conversations()
    elif part.name == "base-mean":
        from studies.claims import gpu_measures  # imports torch

        first_run = plan_sweep(CONFIG, overrides).runs[0]
        train_options = first_run.config().train_options
        gpu_measures.write_base_mean(train_options, Path(train_options.smoothing_target))


def score_missing_baselines(study: Study, part: Part, plan: SweepPlan) -> int:
    """Score the base model where it lacks records; returns the exit code.

    This is called where no run of the part is missing. A launch would score the base model along
    with its runs; without any, it is scored here.
    """
    recorded = recorded_runs(study)
    for run in plan.baselines:
        if not lacks_records(recorded, part, run):
            continue
        run.create()
        done = subprocess.run([sys.executable, "-m", "sweeps", "score", str(run.path)], check=False)
        if done.returncode:
            return done.returncode
        keep_run(study, part, run)
    return 0


@dataclass(frozen=True)
class MissingRuns:
    """Trained runs without records: every learning rate and β of `values`, of every seed."""

    values: tuple[tuple[float, ...], ...]  # of each key in VARIED
    seeds: tuple[int, ...]

    def overrides(self, with_base: bool) -> list[str]:
        """The words that select these runs of their part's sweep, and its base model or not."""
        words = [
            f"grid.{name}={[*values]}" for name, values in zip(VARIED, self.values, strict=True)
        ]
        words.append(f"grid.seed={[*self.seeds]}")
        if not with_base:
            words.append("score.base=false")
        return words


def missing_runs(runs: list[Run]) -> list[MissingRuns]:
    """Runs that have no records, in groups: seeds that lack the same runs are trained together."""
    settings = pd.DataFrame([run.config().train for run in runs], columns=RUN_KEYS)
    seeds_of_values: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for seed in sorted(settings.seed.unique().tolist()):
        runs_of_seed = settings[settings.seed == seed]
        values = tuple(tuple(runs_of_seed[name].unique().tolist()) for name in VARIED)
        seeds_of_values.setdefault(values, []).append(seed)
    return [MissingRuns(values, tuple(seeds)) for values, seeds in seeds_of_values.items()]


def overrides_of_missing_runs(study: Study, part: Part, plan: SweepPlan) -> list[list[str]]:
    """For each launch that is needed, the overrides that select the runs without records."""
    recorded = recorded_runs(study)
    missing = missing_runs([run for run in plan.runs if lacks_records(recorded, part, run)])
    lacks_base = any(lacks_records(recorded, part, run) for run in plan.baselines)
    with_base = lacks_base or not plan.baselines
    return [each.overrides(with_base) for each in missing]


def recorded_runs(study: Study) -> dict[tuple[str, str], RunRecord]:
    """The runs of the study's model that have records, by their keys."""
    return {record.key: record for record in study.store.runs(study.model)}


def lacks_records(recorded: dict[tuple[str, str], RunRecord], part: Part, run: Run) -> bool:
    """Whether a run has no records or, being the base model, none of a task that the part asks.

    All parts share the record of the base model, and some ask it fewer tasks than others.
    """
    record = recorded.get(record_key(part, run))
    if record is None:
        return True
    if not run.config().is_baseline:
        return False
    return not files_of_tasks(run).keys() <= record.tasks.keys()


def files_of_tasks(run: Run) -> dict[str, Path]:
    """The file of each task that a run is asked, whether it is there or not, by the task."""
    score = run.config().score
    tasks = score.tasks if score else ()
    return {task.key: run.scores / f"{task.key}.jsonl" for task in tasks}


def record_key(part: Part, run: Run) -> tuple[str, str]:
    """The part and the name of a run in the records; the base model's run is no part's own."""
    if run.config().backend:
        return part.name, run.name
    return "base", run.name


def keep_records(study: Study, part: Part, plan: SweepPlan) -> None:
    """Keep the records of the runs that have ended."""
    recorded = recorded_runs(study)
    for run in (*plan.baselines, *plan.runs):
        if not run.done or not lacks_records(recorded, part, run):
            continue
        if run.config().is_baseline and not all(
            file.exists() for file in files_of_tasks(run).values()
        ):
            continue  # It was done before it was asked a further task.
        keep_run(study, part, run)


def keep_run(study: Study, part: Part, run: Run) -> None:
    """Keep the records of a run that has ended.

    What the base model has answered to tasks of other parts stays in its record.
    """
    config = run.config()
    setting: dict[str, Any] = {name: config.train.get(name) for name in RUN_KEYS}
    key = record_key(part, run)
    record = RunRecord(*key, held_out_loss=held_out_loss(run), **setting)
    files = files_of_tasks(run)
    with tempfile.TemporaryDirectory() as folder:
        if config.is_baseline:
            earlier_files = unpack_other_tasks(study, key, files, Path(folder))
            files = {**earlier_files, **files}
        study.store.add(study.model, record, files)


def unpack_other_tasks(
    study: Study, key: tuple[str, str], files: dict[str, Path], folder: Path
) -> dict[str, Path]:
    """Unpack what a run's record has of tasks that `files` lacks; returns their files by task.

    Packing them again changes nothing: log-probabilities are whole steps already.
    """
    record = recorded_runs(study).get(key)
    if record is None:
        return {}
    other_tasks = {task: count for task, count in record.tasks.items() if task not in files}
    others = replace(record, tasks=other_tasks)
    study.store.unpack(study.model, others, study.store.questions(), folder)
    return {task: folder / f"{task}.jsonl" for task in other_tasks}


def write_conversations() -> None:
    """Write the conversations as open-instruct's finetune.py reads them, unless they are there."""
    if OPEN_INSTRUCT_CONVERSATIONS.exists():
        return
    alpaca = OPEN_INSTRUCT_CONVERSATIONS.with_name("alpaca_data.json")
    rows = ({"messages": messages} for messages in conversations(alpaca))
    write_rows(OPEN_INSTRUCT_CONVERSATIONS, rows)
