"""Runs on this machine: killed, resumed, stopped, locked, repeated."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sweep_tools import (
    PROJECT,
    calm,
    command,
    equal,
    kill,
    launch,
    prepare,
    programs,
    rows,
    runs_of,
    wait_for,
)

from sweeps import cli
from sweeps.launch import local, snapshot, worker
from sweeps.launch.program_end import ProgramEnd
from sweeps.runs.events import EventKind
from sweeps.runs.files import is_locked
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.processes import run_or_empty
from sweeps.runs.run import Run
from sweeps.runs.stages import Outcome, next_stage

LONG = {"steps": 40, "pace": 0.05}
UNSAVED = {**LONG, "save_every": None}


def start(*words: object) -> subprocess.Popen:
    """A launch on this machine, in the background."""
    call = [sys.executable, "-m", "sweeps", "launch", *map(str, words), "--executor", "local"]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def without_network() -> tuple[str, ...]:
    """The words that keep the network from a command; none where the machine knows no way."""
    words = ("unshare", "--net")
    possible = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    return words if possible else ()


@pytest.mark.slow
def test_the_whole_chain_needs_no_network_and_nothing_is_done_twice(sweep_file, tiny):
    """Of a base model and two runs of the real trainer, of which no model is kept."""
    tasks = [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}]
    train = {"max_train_steps": 2}
    path = sweep_file(train=train, workers=2, score={"tasks": tasks}, keep="scores")
    printed = launch(path, "--executor", "local", prefix=without_network())
    assert "report: " in printed and "gap: " not in printed
    plan = plan_sweep(path, [])
    for run in plan.baselines_and_runs:
        assert run.done and (run.scores / "mmlu.jsonl").exists()
        assert not run.checkpoints.exists() and not run.model.exists()
        # A program that trains goes on to score.
        stage = "train" if run.config().backend else "score"
        assert [row["stage"] for row in rows(run, "began")] == [stage]
    results = plan.folder / "results"
    for line in (results / "index.jsonl").read_text().splitlines():
        assert (results / json.loads(line)["records"]).exists()
    assert "Runs</h2>" in (results / "report.html").read_text()

    before = [run.events() for run in plan.runs]
    launch(plan.folder, "--executor", "local")  # a sweep's folder names it, too
    assert [run.events() for run in plan.runs] == before
    assert "2 done" in command("status", plan.folder).stdout


def test_a_trainer_killed_with_9_starts_again_and_after_its_launch_the_same_command_goes_on(
    toy_file, hold, tmp_path
):
    """A launch that is killed takes its trainers along."""
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, workers=2)
    runs = runs_of(path)
    killed, other = runs
    process = start(path)
    wait_for(lambda: all(run.last_saved_step() >= 10 for run in runs))
    kill(programs(killed))
    wait_for(lambda: len(rows(killed, "began")) == 2)
    assert "2 running" in command("status", path).stdout
    process.kill()
    wait_for(lambda: not any(programs(run) for run in runs))
    wait_for(lambda: "2 dead" in command("status", path).stdout)  # a lock goes with its holder
    hold.unlink()
    launch(path, "--executor", "local")
    assert all(row["progress"][0] > 0 for row in rows(killed, "began")[1:])
    assert len(rows(killed, "began")) == 3 and len(rows(other, "began")) == 2
    assert all(map(equal, runs, calm(path, tmp_path / "calm")))


def test_ctrl_c_while_a_launch_begins_leaves_no_traceback(toy_file, hold):
    """Before there is a worker that could be asked to save."""
    path = toy_file(grid={"seed": [1, 2]}, train=UNSAVED)
    process = start(path)
    first = runs_of(path)[0]
    wait_for(first.path.parent.exists, pause=0.001)
    process.send_signal(signal.SIGINT)
    printed = "".join(process.communicate(timeout=60))
    assert process.returncode == 130, printed
    assert "Traceback" not in printed and "the same command continues" in printed
    hold.unlink()
    launch(path, "--executor", "local")
    assert all(run.done for run in runs_of(path))


def test_ctrl_c_saves_and_leaves_no_traceback(toy_file, hold):
    path = toy_file(grid={"seed": [1, 2]}, train=UNSAVED)
    process = start(path)
    first = runs_of(path)[0]
    wait_for(first.metrics.exists)
    process.send_signal(signal.SIGINT)
    printed = "".join(process.communicate(timeout=60))
    assert process.returncode == 130, printed
    assert "Traceback" not in printed and "stopped; the same command continues" in printed
    assert first.last_saved_step() > 0 and "2 stopped" in command("status", path).stdout


@pytest.fixture
def running(toy_file, hold):
    """The path of a sweep of one run which is being trained, the run, and the launch."""
    path = toy_file(grid={}, train=LONG)
    (run,) = runs_of(path)
    process = start(path)
    wait_for(run.metrics.exists)
    yield path, run, process
    process.kill()
    process.wait()


def test_of_two_launches_one_works_and_the_other_says_so(running, hold):
    path, run, process = running
    printed = launch(path, "--executor", "local", "grid.seed=[5]", code=2)
    assert "another launch is at it; Ctrl-C there ends it" in printed
    assert list(run.path.parent.glob("*/config.yaml")) == [run.config_file]
    hold.unlink()
    assert process.wait() == 0 and len(rows(run, "began")) == 1


def test_nobody_else_trains_a_run_that_is_held(running, hold, monkeypatch, capsys):
    _, run, process = running
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the command sets it, and would not unset it
    with monkeypatch.context() as patch:
        # Twenty seconds pass between any two looks at the clock.
        clock = itertools.count(0, 20)
        patch.setattr(
            "sweeps.runs.files.time",
            SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None),
        )
        patch.delenv("TOY_HOLD")  # if it trains all the same, it shall end
        assert cli.main(["train", str(run.path)]) == 2
    assert "another process is at this run" in capsys.readouterr().err
    assert is_locked(run.lock_file)
    hold.unlink()
    process.wait()
    assert not is_locked(run.lock_file)


def test_killed_again_and_again_without_progress_it_gives_up(toy_file, hold):
    path = toy_file(grid={}, train=UNSAVED, max_idle_restarts=1)
    (run,) = runs_of(path)
    process = start(path)
    for count in (1, 2):
        wait_for(lambda n=count: len(rows(run, "began")) == n and programs(run))
        kill(programs(run))
    printed = process.communicate()[0]
    assert process.returncode == 1
    assert "2 attempts in a row brought it no further" in printed
    assert "out of memory, perhaps" in printed
    hold.unlink()
    launch(path, "--executor", "local")
    assert run.done


def test_a_stop_file_is_heeded_once_the_process_that_held_the_run_has_left(
    toy_file, tiny, monkeypatch
):
    """A worker that began while another process held the run never heeded a stop file."""
    score = {"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}], "base": False}
    run = prepare(toy_file(grid={}, score=score))
    holders = ["another process"]
    asked = []

    def execute(run: Run, stage: str, is_asked_to_stop, environment) -> ProgramEnd:
        run.stop_file.touch()
        asked.append((stage, is_asked_to_stop()))
        if stage == "train":
            run.model.mkdir()
            holders.clear()
        return ProgramEnd(0, [])

    monkeypatch.setattr(worker, "is_locked", lambda _: bool(holders))
    monkeypatch.setattr(worker, "_execute", execute)
    assert worker.work(run, lambda: False) is Outcome.STOPPED
    assert asked == [("train", False), ("score", True)]


def test_a_worker_that_fails_is_told_with_its_run_and_the_others_go_on(toy_file):
    """Its error waited for all other runs, and no tables were made."""
    path = toy_file(grid={"seed": [1, 2]}, train={"steps": 3})
    broken, whole = runs_of(path)
    broken.path.mkdir(parents=True)
    (broken.path / "train.log").mkdir()  # which the worker cannot open
    printed = launch(path, "--executor", "local", "workers=1", code=1)
    assert f"failed: {broken.name}: [Errno 21]" in printed and f"done: {whole.name}" in printed
    assert "report: " in printed


def test_a_training_that_went_well_is_no_idle_attempt_at_scoring(toy_file, tiny):
    """A run without checkpoints has made no progress that can be seen when it is trained."""
    score = {"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}], "base": False}
    run = prepare(toy_file(grid={}, score=score, max_idle_restarts=0))
    run.note_beginning("train")
    run.note(EventKind.ENDED, exit=0)
    run.model.mkdir()
    assert worker.work(run, lambda: True) is Outcome.STOPPED  # and is not given up
    run.note_beginning("score")
    assert run.attempts_without_progress("score") == 1
    assert worker.work(run, lambda: True) is Outcome.FAILED


def test_a_launch_that_asks_for_more_undoes_done(toy_file, tiny):
    score = {"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}], "base": False}
    path = toy_file(grid={}, score=score)
    run = prepare(path, "score=null")
    run.model.mkdir()
    run.done_file.touch()
    prepare(path, "score=null")
    assert run.done
    assert next_stage(prepare(path)) == "score"
    assert not run.done
    shutil.rmtree(run.model)
    run.done_file.touch()
    prepare(path)  # its model is gone, and only DONE says that it was trained
    assert run.done


@pytest.mark.parametrize(
    ("visible", "workers", "each", "expected"),
    [
        ("0,1,2,3", None, 1, ["0", "1", "2", "3"]),
        ("4,5,6,7", None, 2, ["4,5", "6,7"]),
        ("0,1", 4, 1, ["0", "1", "0", "1"]),
        ("", 3, 1, ["", "", ""]),
        ("", None, 2, [""]),
    ],
)
def test_each_worker_has_gpus_of_its_own(toy_file, monkeypatch, visible, workers, each, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sweep = plan_sweep(toy_file(workers=workers, world={"processes_per_node": each}), []).sweep
    assert local.gpus_of_workers(sweep) == expected


def test_one_machine_is_not_several_nodes(toy_file, tmp_path):
    words = (toy_file(grid={}), "world.nodes=2")
    refusal = "world.nodes: 2: this is one machine: launch on Slurm, or type world.nodes=1"
    assert refusal in launch(*words, "--executor", "local", code=2)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def environments(toy_file, monkeypatch) -> tuple[SweepPlan, list[dict[str, str]]]:
    """A sweep of two runs that was launched on two GPUs, and what its programs' shells held."""
    seen = []

    def execute(run: Run, stage, asked_to_stop, environment) -> worker.ProgramEnd:
        seen.append(environment)
        run.model.mkdir()
        return worker.ProgramEnd(exit_code=0, lines=[])

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(worker, "_execute", execute)
    plan = plan_sweep(toy_file(grid={"seed": [1, 2]}), [])
    assert local.launch_here(plan) == local.LaunchEnd(stop_signal=None, unfinished=[])
    return plan, seen


def test_a_program_sees_only_its_gpus_and_runs_the_snapshot_of_its_launch(environments):
    plan, seen = environments
    assert sorted(each["CUDA_VISIBLE_DEVICES"] for each in seen) == ["4", "5"]
    code = Path(seen[0]["PYTHONPATH"].split(os.pathsep)[0])
    assert code.parent == plan.folder / "code"
    assert (code / "sweeps" / "runs" / "run.py").exists() and (code / "COMMIT").exists()
    assert rows(plan.runs[0], "queued")[0]["code"] == code.name


@pytest.fixture
def small_package(tmp_path, monkeypatch) -> Path:
    """The folder of a package that is all that snapshots copy, with a template in it."""
    package = tmp_path / "sweeps"
    (package / "templates").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "templates" / "chat.jinja").write_text("old")
    monkeypatch.setattr(snapshot, "_package_folders", lambda: {"sweeps": package})
    return package


def test_a_snapshot_is_made_anew_when_any_of_its_files_changes(small_package, tmp_path):
    first = snapshot.snapshot(tmp_path)
    (small_package / "__pycache__").mkdir()
    (small_package / "__pycache__" / "x.pyc").touch()
    assert snapshot.snapshot(tmp_path) == first
    (small_package / "templates" / "chat.jinja").write_text("new")
    second = snapshot.snapshot(tmp_path)
    assert second != first
    assert (second / "sweeps" / "templates" / "chat.jinja").read_text() == "new"


def test_a_diff_need_not_be_utf_8():
    assert run_or_empty("printf", r"caf\351") == "caf\udce9"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_rank_outlives_a_launch_and_a_killed_one_starts_all_again(toy_file, hold, tmp_path):
    path = toy_file(grid={}, train=LONG, world={"processes_per_node": 2})
    (run,) = runs_of(path)
    process = start(path)
    wait_for(lambda: run.last_saved_step() >= 10)
    assert len(programs(run)) == 3  # torchrun and its ranks
    kill(programs(run)[-1:])
    wait_for(lambda: len(rows(run, "began")) == 2 and len(programs(run)) == 3)
    process.kill()
    wait_for(lambda: not programs(run))
    hold.unlink()
    launch(path, "--executor", "local")
    assert equal(run, *calm(path, tmp_path / "calm"))


def test_a_run_by_hand_from_any_folder_is_trained_once_as_its_config_was(toy_file):
    path = toy_file(grid={})
    run = prepare(path)
    first, second = (command("train", run.name, cwd=run.path.parent).stdout for _ in range(2))
    assert f"device: none in {PROJECT}, from" in first and "device" not in second
    (run.path.parent / "jobs").mkdir()  # a launch made it that no Slurm answered
    launch(path, "--executor", "local")
    assert not rows(run, "began") and "1 done" in command("status", path).stdout
    run.config_file.write_text(run.config_file.read_text().replace("seed: 0", "seed: 3"))
    done = command("train", run.path)
    assert done.returncode == 2 and "was edited" in done.stderr


@pytest.mark.slow
def test_a_run_that_another_process_is_at_is_no_failed_run(toy_file, hold):
    """Its program gives up after half a minute, and the run itself is well."""
    path = toy_file(grid={}, train=LONG)
    run = prepare(path)
    by_hand = subprocess.Popen([sys.executable, "-m", "sweeps", "train", str(run.path)])
    try:
        wait_for(run.metrics.exists)
        printed = launch(path, "--executor", "local", code=1)
        assert f"failed: {run.name}: another process is at this run" in printed
        assert not [event.error for event in run.events() if event.error]
        assert "1 running" in command("status", path).stdout
    finally:
        by_hand.kill()
        by_hand.wait()
    assert "1 to do" in command("status", path).stdout


def test_what_a_tracker_writes_lies_in_the_runs_folder(toy_file, tmp_path, monkeypatch):
    """wandb writes into the folder that WANDB_DIR names, or else into the project's."""
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\necho "$WANDB_DIR ${{WANDB_MODE-unset}}" > "{tmp_path}/seen"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = prepare(toy_file(grid={}))
    worker.work(run, lambda: False)
    assert (tmp_path / "seen").read_text() == f"{run.path} unset\n"  # which calls wandb's server
