"""Train and score what of a part has no records yet, and keep the records of each run."""

import subprocess
import sys
import time
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

VARIED = ("learning_rate", "label_smoothing")  # within a part, beside the seed
SETTING = (*VARIED, "seed")  # what tells a part's runs apart
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
        from studies.claims import model_figures  # imports torch

        first_run = plan_sweep(CONFIG, overrides).runs[0]
        train_options = first_run.config().train_options
        model_figures.write_base_mean(train_options, Path(train_options.smoothing_target))


def score_missing_baselines(study: Study, part: Part, plan: SweepPlan) -> int:
    """Score the base model if it has no records while no run lacks them; returns the exit code.

    A sweep scores it beside runs that it trains, of which there are none.
    """
    recorded = study.store.keys(study.model)
    for run in plan.baselines:
        if record_key(part, run) in recorded:
            continue
        run.create()
        done = subprocess.run([sys.executable, "-m", "sweeps", "score", str(run.path)], check=False)
        if done.returncode:
            return done.returncode
        keep_run(study, part, run)
    return 0


def overrides_of_missing_runs(study: Study, part: Part, plan: SweepPlan) -> list[list[str]]:
    """Overrides that select the trained runs of a plan that have no records.

    There is one list of overrides for each group of seeds that lack the same runs.
    """
    recorded = study.store.keys(study.model)
    settings_of_runs = [
        run.config().train for run in plan.runs if record_key(part, run) not in recorded
    ]
    seeds_by_changes: dict[tuple[str, ...], list[int]] = {}
    settings = pd.DataFrame(settings_of_runs, columns=SETTING)
    for seed in sorted(settings.seed.unique().tolist()):
        runs_of_seed = settings[settings.seed == seed]
        changes = tuple(f"grid.{name}={runs_of_seed[name].unique().tolist()}" for name in VARIED)
        seeds_by_changes.setdefault(changes, []).append(seed)
    base: list[str] = []
    if plan.baselines and all(record_key(part, run) in recorded for run in plan.baselines):
        base = ["score.base=false"]
    return [[*changes, f"grid.seed={seeds}", *base] for changes, seeds in seeds_by_changes.items()]


def record_key(part: Part, run: Run) -> tuple[str, str]:
    """The part and the name of a run in the records; the base model's run is no part's own."""
    if run.config().backend:
        return part.name, run.name
    return "base", run.name


def keep_records(study: Study, part: Part, plan: SweepPlan) -> None:
    """Keep the records of the runs that have ended."""
    recorded = study.store.keys(study.model)
    for run in (*plan.baselines, *plan.runs):
        if run.done and record_key(part, run) not in recorded:
            keep_run(study, part, run)


def keep_run(study: Study, part: Part, run: Run) -> None:
    """Keep the records of a run that was scored."""
    config = run.config()
    setting: dict[str, Any] = {name: config.train.get(name) for name in SETTING}
    key = record_key(part, run)
    record = RunRecord(*key, held_out_loss=held_out_loss(run), **setting)
    tasks = config.score.tasks if config.score else ()
    files = {task.key: run.scores / f"{task.key}.jsonl" for task in tasks}
    study.store.add(study.model, record, files)


def write_conversations() -> None:
    """Write the conversations as open-instruct's finetune.py reads them, unless they are there."""
    if OPEN_INSTRUCT_CONVERSATIONS.exists():
        return
    alpaca = OPEN_INSTRUCT_CONVERSATIONS.with_name("alpaca_data.json")
    rows = ({"messages": messages} for messages in conversations(alpaca))
    write_rows(OPEN_INSTRUCT_CONVERSATIONS, rows)
