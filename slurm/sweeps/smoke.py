"""One run's whole chain in small, before a sweep is queued: ten steps, few questions, a table."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from sweeps import launch, preflight, status
from sweeps.executors import slurm
from sweeps.files import SweepError, held
from sweeps.plan import Plan, expand
from sweeps.provenance import command, shown
from sweeps.rundir import RunDir

STEPS = 10
PERIOD = 10  # seconds between questions to squeue
LIMIT = {"limit": 4}  # questions of each subject of a task


def plan(planned: Plan) -> Plan:
    """The largest model's run with the most smoothing, cut down, with an output_root of its own."""
    sweep, score = planned.sweep, planned.sweep.score
    train = max(
        (cell.config.train for cell in planned.cells),
        key=lambda t: (preflight.parameters(t["model_name_or_path"]), t["label_smoothing"]),
    )
    batch = sweep.world.size * train.get("gradient_accumulation_steps", 1)
    batch *= train.get("per_device_train_batch_size", 1)
    most = {"max_train_steps": STEPS, "max_train_samples": STEPS * batch, "held_out": batch}
    most |= {"checkpointing_steps": STEPS // 2, "logging_steps": 1, "keep_last_n_checkpoints": 1}
    cut = {"name": f"{sweep.name}-smoke", "grid": {}, "train": _cut(train, most)}
    cut["output_root"] = str(Path(sweep.output_root) / "smoke" / sweep.name)
    if score:
        cut["keep"] = "scores"
        few = [one.model_copy(update=_cut(vars(one), LIMIT)) for one in score.measured]
        entropy = few.pop() if score.entropy else None
        cut["score"] = score.model_copy(update={"tasks": tuple(few), "entropy": entropy})
    small = sweep.model_copy(update=cut)
    cells = expand(small, str(planned.source))
    return replace(planned, name=small.name, sweep=small, cells=cells)


def _cut(given: dict, most: dict[str, int]) -> dict:
    """The same with these limits, where they are keys and no number is smaller already."""
    cut = dict(given)
    for key in most.keys() & given.keys():
        cut[key] = min(given[key], most[key]) if isinstance(given[key], int) else most[key]
    return cut


def run(planned: Plan, executor: str) -> int:
    """Train, score and collect `plan(planned)` anew, wait for it, and say what of it worked.

    What is queued already is only waited for. Returns 0 if a launch may follow, else 1.
    """
    small = plan(planned)
    if executor == "slurm" and slurm.queued(small.sweep):
        print(f"queued already, and waited for; {small.again('cancel')} ends it", flush=True)
    else:
        if any(held(RunDir(cell.folder).lock) for cell in small.cells):
            raise SweepError(
                f"{shown(small.folder)}: another process tries this, or did until just now: "
                "the same again in two minutes"
            )
        shutil.rmtree(small.sweep.output_root, ignore_errors=True)
        launch.start(small, executor)
    try:
        while executor == "slurm" and slurm.queued(small.sweep):
            time.sleep(PERIOD)
    except KeyboardInterrupt:
        print(f"\nstill queued: the same command waits on, {small.again('cancel')} ends it")
        return 1
    if not verdict(small):
        print(f"smoke: FAILED; the end of its logs: {small.again('logs')}")
        return 1
    here = ["--executor", "local"] if executor == "local" else []
    print(f"smoke: passed; to go on: {command('sweeps.sh', 'launch', *planned.typed, *here)}")
    return 0


def verdict(small: Plan) -> bool:
    """Print which stages worked, and why the others did not; returns whether all did."""
    runs, bases = status.of_sweep(small.sweep, small.cells)
    subjects, report = [*bases.values(), *runs], small.folder / "report.html"
    reached = "" if runs[0].trouble else f": {runs[0].detail}"  # why not, stands below
    stages = {f"train {runs[0].name}{reached}": runs[0].state == "done"}
    for one in subjects if small.sweep.score else []:
        done, _, of = one.scored.partition("/")
        stages[f"score {one.name}: {one.scored} tasks"] = done == of
    stages[f"collect: {shown(report)}"] = report.exists()
    lines = [f"{'ok' if good else 'FAILED':8}{stage}" for stage, good in stages.items()]
    print("", *lines, status.troubles(subjects), sep="\n")
    return all(stages.values())
