"""What goes wrong on the first day on a cluster, on a real Slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
import yaml
from real import LONG, MARKS, PROJECT, command, empty, logs, runs_of, wait_for

from sweeps import launch
from sweeps.executors import slurm

pytestmark = MARKS


def change(profile: str, **keys) -> None:
    path = Path(profile)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys))


def test_a_wrong_profile_is_named_by_status_and_mended_by_retry(
    cluster, profile, sweep_file, tmp_path
):
    """A set-up line that does not work here ends every job within a second."""
    path = sweep_file(train={"max_train_steps": 2}, cluster=profile)
    change(profile, setup=["module load python/3.11 || exit 1"])
    assert command("launch", path, "--executor", "slurm").returncode == 0
    wait_for(empty)
    folder = launch.plan(path, []).folder
    shown = command("status", folder).stdout
    assert "2 failed" in shown and "module: command not found" in shown, shown
    assert "FAILED, exit 1:0, before training" in shown and "(and 1 more like it)" in shown
    assert f"Once that is mended: bash slurm/sweeps.sh retry {folder}" in shown
    assert "module: command not found" in command("logs", folder).stdout
    change(profile, setup=[])
    assert "again: " in command("retry", folder).stdout
    wait_for(empty)
    assert all(run.done for run in runs_of(path)), logs(tmp_path)
    assert "Once that is mended" not in command("status", folder).stdout


DIES = """#!/bin/bash
# Python, but whoever trains is killed with everything it started as soon as it has begun.
case $SLURM_JOB_NAME in
*.train-*)
    setsid {python} "$@" &
    pid=$!
    while kill -0 $pid 2>/dev/null && ! grep -qs '"state": "running"' {run}/manifest.json; do
        sleep 0.1
    done
    while kill -0 $pid 2>/dev/null; do # until there is a group to kill
        kill -9 -- -$pid 2>/dev/null
        sleep 0.1
    done
    exit 137 ;;
*) exec {python} "$@" ;;
esac
"""


def test_a_supervisor_that_always_dies_does_not_queue_itself_for_ever(
    cluster, profile, sweep_file, tmp_path
):
    path = sweep_file(grid={}, train=LONG, cluster=profile, max_idle_restarts=1)
    (run,) = runs_of(path)
    (tmp_path / "dies").write_text(DIES.format(python=sys.executable, run=run.path))
    (tmp_path / "dies").chmod(0o755)
    change(profile, python=str(tmp_path / "dies"))
    assert command("launch", path, "--executor", "slurm").returncode == 0
    wait_for(empty)
    submissions = list((launch.plan(path, []).folder / "jobs").iterdir())
    assert len(submissions) <= 3, submissions
    assert run.manifest()["state"] == "failed"
    assert "2 times in a row without a new checkpoint" in run.manifest()["error"]
    assert len(run.manifest()["attempts"]) <= 3


def test_a_cancelled_element_stays_away_when_another_is_lost(
    cluster, profile, sweep_file, tmp_path
):
    path = sweep_file(grid={"seed": [1, 2]}, train=LONG, cluster=profile)
    assert command("launch", path, "--executor", "slurm").returncode == 0
    gone, lost = runs_of(path)
    with chaos.held(gone), chaos.held(lost):
        active = slurm.active(launch.plan(path, []).sweep)
        subprocess.run(["scancel", active["train", gone.name].job], check=True)
        assert chaos.disturb("kill -9 supervisor", "", lost.name)
    wait_for(empty)
    assert lost.done, logs(tmp_path)
    assert not gone.done and len(gone.manifest()["attempts"]) == 1
    assert command("status", path).stdout.count("CANCELLED") >= 1


@pytest.fixture
def short(cluster):
    """A partition where no job may ask for more than twenty minutes."""
    subprocess.run(["scontrol", "update", "PartitionName=all", "MaxTime=20"], check=True)
    yield
    subprocess.run(["scontrol", "update", "PartitionName=all", "MaxTime=INFINITE"], check=True)


def test_the_collect_job_fits_where_the_others_do(short, profile, sweep_file, tmp_path):
    change(profile, score_time="10:00")
    path = sweep_file(grid={}, train={"max_train_steps": 2}, cluster=profile)
    assert command("launch", path, "--executor", "slurm").returncode == 0
    wait_for(empty)
    assert (launch.plan(path, []).folder / "report.html").exists(), logs(tmp_path)


@pytest.fixture
def spaced(tmp_path):
    """A checkout whose path has spaces, with a .venv of its own."""
    project = tmp_path / "my own work" / "a project"
    for name in ("kernel", "slurm", "eval", "configs"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("*.pyc"))
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (project / ".venv" / "bin" / "python").chmod(0o755)
    return project


@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_sbatch_works_from_any_folder_and_with_spaces_in_paths(
    cluster, profile, tiny, spaced, tmp_path, export
):
    """Relative paths included: they start at the project, as in a sweep file."""
    (spaced / "data").mkdir()
    shutil.copy(tiny / "chat.jsonl", spaced / "data" / "my chat.jsonl")
    change(profile, python=f'"{spaced}/.venv/bin/python"')
    here = tmp_path / "else where"
    here.mkdir()
    bare = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "PYTHONPATH")}
    done = subprocess.run(
        ["sbatch", "--wait", "--mem=500M", f"--export={export}", f"--output={here}/job.out",
         spaced / "slurm" / "sweep_beta.sh",
         f"train.model_name_or_path={tiny / 'model'}", "train.train_file=data/my chat.jsonl",
         "train.max_train_steps=2", "train.gradient_accumulation_steps=1",
         "train.chat_template_name=null", "train.gradient_checkpointing=false",
         "world.mixed_precision=no", "grid.label_smoothing=[0.1]", "score=null",
         "output_root=my runs", f"cluster={profile}"],
        cwd=here, text=True, capture_output=True, check=False, env=bare,
    )  # fmt: skip
    said = (here / "job.out").read_text()
    assert done.returncode == 0, said + done.stderr
    wait_for(empty)
    assert (spaced / "my runs" / "sweeps" / "beta" / "report.html").exists(), said + logs(tmp_path)
    assert len(list((spaced / "my runs" / "runs").glob("*/DONE"))) == 1
