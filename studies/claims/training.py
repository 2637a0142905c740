"""Train and score what of a part has no records yet, and keep the records of each run."""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibeval.io import InputError, write_rows
from studies.claims.parts import CONFIG, OPEN_INSTRUCT_CONVERSATIONS, Part, Study
from studies.claims.records import RunRecord
from sweeps.results.selection import held_out_loss
from sweeps.runs.conversations import conversations
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

# The keys of `train:` that tell a part's runs apart. In a part that is scored the learning rate is
# the same for all: of two runs that are alike in β and seed nothing says which a table means, and
# `answers.files_by_seed` refuses them.
RUN_KEYS = ("learning_rate", "label_smoothing", "seed")
SECONDS_BETWEEN_LOOKS = 2


def train(study: Study, part: Part, overrides: list[str]) -> int:
    """Run what has no records, keeping those of each run as it ends; returns the exit code.

    `overrides` are all that the part changes in config.yaml, which `parts.sweep_overrides` returns.
    """
    plan = plan_sweep(CONFIG, overrides)
    selections = overrides_of_missing_runs(study, part, plan)
    if not selections:
        return score_missing_baselines(study, part, plan)
    for selection in selections:
        prepare(part, overrides)
        launch_overrides = [*overrides, *selection]
        command = [sys.executable, "-m", "sweeps", "launch", str(CONFIG), "--executor", "local"]
        # Leaving this block waits for the launch. An InputError of `keep_records` is therefore told
        # once the launch has ended, and runs that end meanwhile are not kept before the next call.
        with subprocess.Popen([*command, *launch_overrides]) as process:
            while process.poll() is None:
                keep_records(study, part, plan_sweep(CONFIG, launch_overrides))
                time.sleep(SECONDS_BETWEEN_LOOKS)
        keep_records(study, part, plan_sweep(CONFIG, launch_overrides))
        if process.returncode:
            return process.returncode
    return 0


def prepare(part: Part, overrides: list[str]) -> None:
    """Make the file that a part's runs need beyond what prefetch brings, unless it is there.

    Where the path of that file is a setting of the runs, `parts.sweep_overrides` sets it. Raises
    InputError where `script` is to use a chat template that only this project has.
    """
    if part.name == "script":
        refuse_alpaca_template(overrides)
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
class Launch:
    """Runs to train in one launch: every pair of these learning rates and β, of each seed."""

    learning_rates: tuple[float, ...]
    label_smoothings: tuple[float, ...]
    seeds: tuple[int, ...]

    def overrides(self, leave_base_out: bool) -> list[str]:
        """The words that select these runs of their part's sweep, and its base model or not."""
        words = [
            f"grid.learning_rate={[*self.learning_rates]}",
            f"grid.label_smoothing={[*self.label_smoothings]}",
            f"grid.seed={[*self.seeds]}",
        ]
        if leave_base_out:
            words.append("score.base=false")
        return words


def launches_of(runs: list[Run]) -> list[Launch]:
    """The launches that train these runs of a part and no others.

    Seeds that lack the same runs are trained together.
    """
    seeds_of_rectangle: dict[tuple[tuple[float, ...], tuple[float, ...]], list[int]] = {}
    pairs_of_seed: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        train_keys = run.config().train
        pair = (train_keys["learning_rate"], train_keys["label_smoothing"])
        pairs_of_seed.setdefault(train_keys["seed"], []).append(pair)
    for seed in sorted(pairs_of_seed):
        for rectangle in rectangles_of(pairs_of_seed[seed]):
            seeds_of_rectangle.setdefault(rectangle, []).append(seed)
    return [
        Launch(learning_rates, label_smoothings, tuple(seeds))
        for (learning_rates, label_smoothings), seeds in seeds_of_rectangle.items()
    ]


def rectangles_of(
    pairs: list[tuple[float, float]],
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Pairs of a learning rate and a β, as rectangles: rates and β, all pairs of which are there.

    Rates are in one rectangle if they have the very same list of β, in the same order: 1e-5 and
    2e-5, both with [0.0, 0.1], are in one, and 5e-5 with [0.0] alone is in another. Only the part
    grid has several rates.
    """
    # First the list of β of each rate; then, the other way round, the rates that share a list.
    smoothings_of_rate: dict[float, list[float]] = {}
    for learning_rate, label_smoothing in pairs:
        smoothings = smoothings_of_rate.setdefault(learning_rate, [])
        if label_smoothing not in smoothings:
            smoothings.append(label_smoothing)
    rates_of_smoothings: dict[tuple[float, ...], list[float]] = {}
    for learning_rate, smoothings in smoothings_of_rate.items():
        rates_of_smoothings.setdefault(tuple(smoothings), []).append(learning_rate)
    return [(tuple(rates), smoothings) for smoothings, rates in rates_of_smoothings.items()]


def overrides_of_missing_runs(study: Study, part: Part, plan: SweepPlan) -> list[list[str]]:
    """For each launch that is needed, the overrides that select the runs without records."""
    recorded = recorded_runs(study)
    missing = [run for run in plan.runs if lacks_records(recorded, part, run)]
    lacks_base = any(lacks_records(recorded, part, run) for run in plan.baselines)
    # A part without base models may have no `score:` at all, as the part grid. There the override
    # `score.base=false` would add one, so that it is not given.
    leave_base_out = bool(plan.baselines) and not lacks_base
    return [launch.overrides(leave_base_out) for launch in launches_of(missing)]


def recorded_runs(study: Study) -> dict[tuple[str, str], RunRecord]:
    """The runs of the study's model that have records, by their keys."""
    return {record.key: record for record in study.store.runs(study.model)}


def lacks_records(recorded: dict[tuple[str, str], RunRecord], part: Part, run: Run) -> bool:
    """Whether a run has no records, or the base model lacks those of a task that this part asks.

    All parts share the one record of the base model, and some ask it fewer tasks than others.
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
    """The origin and the name of a run in the records; the base model's run is no part's own."""
    if run.config().is_baseline:
        return "base", run.name
    return part.name, run.name


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
    run_keys: dict[str, Any] = {name: config.train.get(name) for name in RUN_KEYS}
    key = record_key(part, run)
    record = RunRecord(*key, held_out_loss=held_out_loss(run), **run_keys)
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


def refuse_alpaca_template(overrides: list[str]) -> None:
    """Raise InputError where open-instruct's script would be given the template `alpaca`.

    The script has no template of this name, and would take the tokenizer's own without a word.
    """
    template = plan_sweep(CONFIG, overrides).runs[0].config().train_options.chat_template_name
    if template == "alpaca":
        raise InputError(
            "train.chat_template_name: found 'alpaca', which open-instruct's finetune.py does not "
            "have; name the part script alone and add one that it has, as in "
            "train.chat_template_name=tulu"
        )


def write_conversations() -> None:
    """Write the conversations as open-instruct's finetune.py reads them, unless they are there."""
    if OPEN_INSTRUCT_CONVERSATIONS.exists():
        return
    alpaca = OPEN_INSTRUCT_CONVERSATIONS.with_name("alpaca_data.json")
    rows = ({"messages": messages} for messages in conversations(alpaca))
    write_rows(OPEN_INSTRUCT_CONVERSATIONS, rows)
