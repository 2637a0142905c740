"""What a launch does about runs of which nothing is left to train or to score."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sweep_tools import command, launch, prepare

from calibeval import records
from sweeps.launch.slurm import submit
from sweeps.runs import scoring
from sweeps.runs.events import EventKind
from sweeps.runs.files import locked
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run


@pytest.fixture
def slurm(tmp_path, monkeypatch, profile) -> Path:
    """A folder with an sbatch that takes everything and a squeue that knows nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"sbatch": "cat > /dev/null; echo 71", "squeue": "true"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def complete(path: Path) -> Run:
    """A run whose program was done when its worker was killed, before it could mark the run."""
    run = prepare(path)
    run.note(EventKind.LAUNCHED, code="5eed5eed")
    run.note_beginning("train")
    run.model.mkdir()
    (run.checkpoints / "step-5").mkdir(parents=True)
    return run


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_a_launch_finishes_what_a_kill_has_left_unmarked(toy_file, profile, slurm, executor):
    path = toy_file(grid={}, cluster=profile())
    run = complete(path)
    launch(path, "--executor", executor)
    assert run.done and run.model.is_dir() and not run.checkpoints.exists()
    assert not any(event.details.get("tag") for event in run.events())


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_a_run_that_still_runs_is_left_alone(toy_file, profile, slurm, executor):
    path = toy_file(grid={}, cluster=profile())
    run = complete(path)
    folder = run.path.parent / "jobs" / "aaaaaa"
    folder.mkdir(parents=True)
    (folder / "names").write_text(f"{run.name}\n")
    (slurm / "squeue").write_text("#!/bin/sh\necho '71|0|RUNNING|toy.train.aaaaaa|None'\n")
    launch(path, "--executor", executor, code={"local": 2, "slurm": 0}[executor])
    assert not run.done and run.checkpoints.exists()


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_models_go_where_a_later_launch_keeps_scores_alone(
    toy_file, profile, tiny, slurm, executor
):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(grid={}, cluster=profile(), score={"tasks": [task], "base": False})
    run = complete(path)
    score = run.config().score
    file = scoring.records_file(run, score.tasks[0])
    records.write(file, [{}], {"settings": scoring.record_settings(score.tasks[0], score)})
    run.done_file.touch()
    command("launch", path, "--executor", executor, "keep=all")  # whose tables find these records
    assert run.model.exists()  # kept, as this launch asks
    command("launch", path, "--executor", executor, "keep=scores")
    assert run.done and not run.model.exists() and file.exists()


def test_a_launch_here_that_begins_while_one_on_slurm_waits_keeps_it_from_submitting(
    toy_file, profile, slurm
):
    path = toy_file(grid={}, cluster=profile())
    run = prepare(path)
    jobs_folder = run.path.parent / "jobs"
    jobs_folder.mkdir()
    words = [sys.executable, "-m", "sweeps", "launch", str(path), "--executor", "slurm"]
    with contextlib.ExitStack() as launch_here:
        with locked(jobs_folder / ".lock", 1, "busy"):
            process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            assert "waiting: " in process.stderr.readline()
            launch_here.enter_context(locked(plan_sweep(path, []).lock, 1, "busy"))
        _, said = process.communicate()
    assert process.returncode == 2 and "a launch without Slurm is at it" in said
    assert not list(jobs_folder.glob("*/names"))


def test_a_launch_here_is_refused_while_one_on_slurm_submits(toy_file, profile, slurm):
    path = toy_file(grid={}, cluster=profile())
    plan = plan_sweep(path, [])
    jobs_folder = plan.folder / "jobs"
    jobs_folder.mkdir(parents=True)
    with locked(jobs_folder / ".lock", 1, "busy"):
        printed = launch(path, "--executor", "local", code=2)
    assert f"{plan.folder}: a launch on Slurm is submitting" in printed
    assert not any(run.path.exists() for run in plan.runs)


def test_a_launch_here_looks_at_the_queue_while_it_keeps_others_from_queueing(
    toy_file, profile, slurm
):
    """A job that was queued since it began is then seen, and none can be queued after the look."""
    path = toy_file(grid={}, cluster=profile())
    run = prepare(path)
    folder = run.path.parent / "jobs" / "aaaaaa"
    folder.mkdir(parents=True)
    (folder / "names").write_text(f"{run.name}\n")
    (slurm / "squeue").write_text(
        f"#!{sys.executable}\n"
        "from pathlib import Path\n"
        "from sweeps.runs.files import is_locked\n"
        f"if is_locked(Path({str(plan_sweep(path, []).lock)!r})):\n"
        "    print('71|0|PENDING|toy.train.aaaaaa|Priority')\n"
    )
    assert "is queued on Slurm" in launch(path, "--executor", "local", code=2)


def test_runs_that_save_for_longer_than_a_launch_waits_are_left_out_and_told(
    toy_file, profile, slurm, capsys
):
    path = toy_file(grid={"seed": [1, 2]}, cluster=profile())
    first, second = plan_sweep(path, []).runs
    prepare(path)
    folder = first.path.parent / "jobs" / "aaaaaa"
    folder.mkdir(parents=True)
    (folder / "names").write_text(f"{first.name}\n")
    (slurm / "squeue").write_text("#!/bin/sh\necho '71|0|COMPLETING|toy.train.aaaaaa|None'\n")
    plan = plan_sweep(path, [])
    submission = submit(plan, stop_patience=0.5)
    assert "waiting for 1 run to stop, at most 0.5 s; Ctrl-C is safe" in capsys.readouterr().err
    (problem,) = submission.problems(plan)
    assert problem == f"still stopping, and left out: {first.name}; later type the same once more"
    assert not any(event.details.get("tag") for event in first.events())
    assert any(event.details.get("tag") for event in second.events())


def test_a_launch_with_nothing_to_submit_still_writes_what_it_asks_for(toy_file, profile, slurm):
    path = toy_file(grid={}, cluster=profile())
    run = complete(path)
    run.done_file.touch()
    printed = launch(path, "--executor", "slurm", "model_labels={x: y}", "keep=scores")
    assert "nothing to add" in printed
    launched = yaml.safe_load((run.path.parent / "launched.yaml").read_text())
    assert launched["model_labels"] == {"x": "y"} and launched["keep"] == "scores"
    assert Run(run.path).config().keep == "scores"
    assert plan_sweep(run.path.parent, []).sweep.keep == "scores"
