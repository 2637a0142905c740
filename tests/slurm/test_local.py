"""Runs on this machine: killed, resumed, stopped, locked, repeated."""

import itertools
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from real import calm, command, equal, kill, launch, prepare, programs, rows, runs_of, wait_for

from sweeps import cli as cli
from sweeps.launch import local, worker
from sweeps.runs.files import is_locked
from sweeps.runs.grid import plan_sweep
from sweeps.runs.processes import run_or_empty
from sweeps.runs.stages import Outcome

LONG = {"steps": 40, "pace": 0.05}


def start(*words: object) -> subprocess.Popen:
    """A launch on this machine, in the background."""
    call = [sys.executable, "-m", "sweeps", "launch", *map(str, words), "--executor", "local"]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_whole_chain_without_a_network(sweep_file, tiny):
    """Base model, two runs, tables; again: nothing is done twice."""
    tasks = [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}]
    train = {"max_train_steps": 2}
    path = sweep_file(workers=2, score={"tasks": tasks}, train=train, keep="scores")
    unshare = ("unshare", "--net")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        unshare = ()  # this machine has no network namespaces
    said = launch(path, "--executor", "local", prefix=unshare)
    assert "report: " in said and "gap: " not in said
    planned = plan_sweep(path, [])
    for cell in (*planned.baselines, *planned.runs):
        assert cell.done and not cell.checkpoints.exists() and not cell.model.exists()
        assert (cell.scores / "mmlu.jsonl").exists()
        # What trains goes on to score.
        stage = "train" if cell.config().backend else "score"
        assert [row["stage"] for row in rows(cell, "began")] == [stage]
    results = planned.folder / "results"
    for line in (results / "index.jsonl").read_text().splitlines():
        assert (results / json.loads(line)["records"]).exists()
    assert "Runs</h2>" in (results / "report.html").read_text()
    before = [cell.attempts() for cell in planned.runs]
    launch(planned.folder, "--executor", "local")  # by its folder, as well
    assert [cell.attempts() for cell in planned.runs] == before
    assert "2 done" in command("status", path).stdout


def test_a_trainer_killed_with_9_starts_again_and_after_its_launch_the_same_command_goes_on(
    toy_file, hold, tmp_path
):
    """A launch that is killed takes its trainers along."""
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, workers=2)
    runs = one, other = runs_of(path)
    process = start(path)
    wait_for(lambda: all(run.step() >= 10 for run in runs))
    kill(programs(one))
    wait_for(lambda: len(rows(one, "began")) == 2)
    os.utime(one.metrics, (4e9, 4e9))  # by the clock of a file server
    shown = command("status", path).stdout
    assert "2 running" in shown and " day" not in shown, shown
    process.kill()
    wait_for(lambda: not any(programs(run) for run in runs))
    assert "2 dead" in command("status", path).stdout
    hold.unlink()
    launch(path, "--executor", "local")
    assert all(row["progress"][0] > 0 for row in rows(one, "began")[1:])
    assert len(rows(one, "began")) == 3 and len(rows(other, "began")) == 2
    assert all(map(equal, runs, calm(path, tmp_path / "calm")))


def test_ctrl_c_saves_and_leaves_no_traceback(toy_file, hold):
    path = toy_file(grid={"seed": [1, 2]}, train=LONG | {"save_every": None})
    process = start(path)
    wait_for(lambda: runs_of(path)[0].metrics.exists())
    process.send_signal(signal.SIGINT)
    said = "".join(process.communicate(timeout=60))
    assert process.returncode == 130, said
    assert "Traceback" not in said and "stopped; the same command continues" in said
    assert runs_of(path)[0].step() > 0 and "2 stopped" in command("status", path).stdout


def test_of_two_launches_one_works_and_the_other_says_so(toy_file, hold, monkeypatch, capsys):
    """And nobody else trains a run that is held."""
    path = toy_file(grid={}, train=LONG)
    (run,) = runs_of(path)
    process = start(path)
    wait_for(run.metrics.exists)
    said = launch(path, "--executor", "local", "grid.seed=[5]", code=2)
    assert "another launch is at it; Ctrl-C there ends it" in said
    assert [*run.path.parent.glob("*/config.yaml")] == [run.config_file]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which the command sets
    clock = SimpleNamespace(monotonic=itertools.count(0, 20).__next__, sleep=lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr("sweeps.runs.files.time", clock)
        patch.delenv("TOY_HOLD")  # what trains all the same shall end
        assert cli.main(["train", str(run.path)]) == 2
    assert "another process is at this run" in capsys.readouterr().err
    assert is_locked(run.lock)
    hold.unlink()
    assert process.wait() == 0 and len(rows(run, "began")) == 1
    assert not is_locked(run.lock)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fail_at": 7}, "exit 2: error: step 7: the loss is nan"),
        ({"nothing": True}, "its program ended well and left nothing"),
    ],
)
def test_a_run_that_fails_says_why_and_is_not_tried_again(toy_file, keys, said):
    path = toy_file(grid={}, train=keys)
    assert said in launch(path, "--executor", "local", code=1)
    (run,) = runs_of(path)
    assert not run.done and len(rows(run, "began")) == 1
    shown = command("status", path).stdout
    assert "1 dead" in shown and said in shown and "train.log" in shown
    assert "Once that is mended: " in shown
    launch(path, "--executor", "local", code=1)  # launching again is trying again
    assert len(rows(run, "began")) == 2


def test_killed_again_and_again_without_progress_it_gives_up(toy_file, hold):
    path = toy_file(grid={}, train=LONG | {"save_every": None}, max_idle_restarts=1)
    (run,) = runs_of(path)
    process = start(path)
    for count in (1, 2):
        wait_for(lambda n=count: len(rows(run, "began")) == n and programs(run))
        kill(programs(run))
    said = process.communicate()[0]
    assert process.returncode == 1
    assert "2 attempts in a row brought it no further" in said and "out of memory, perhaps" in said
    hold.unlink()
    launch(path, "--executor", "local")
    assert run.done


def test_what_dies_with_its_supervisor_is_counted_too(toy_file):
    run = prepare(toy_file(grid={}))
    for _ in range(4):
        run.began("train")
    assert worker.work(run, lambda: False) is Outcome.FAILED
    assert "4 attempts in a row" in run.attempts()[-1]["error"]
    run.note("queued")  # by a launch: somebody asks for it again
    assert run.attempts_without_progress() == 0


def test_a_run_by_hand_from_any_folder_is_trained_once_and_as_its_config_was(toy_file):
    run = prepare(path := toy_file(grid={}))
    said = [command("train", run.name, cwd=run.path.parent).stdout for _ in range(2)]
    assert f"device: none in {cli.PROJECT}, from" in said[0] and "device" not in said[1]
    (run.path.parent / "jobs").mkdir()  # of a launch that no Slurm answered
    launch(path, "--executor", "local")
    run.config_file.write_text(run.config_file.read_text().replace("seed: 0", "seed: 3"))
    done = command("train", run.path)
    assert done.returncode == 2 and "was edited" in done.stderr


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
    assert local.workers(sweep) == expected


def test_a_program_sees_only_its_gpus_and_the_snapshot(toy_file, monkeypatch):
    path, seen = toy_file(grid={"seed": [1, 2]}), []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")

    def execute(run, stage, asked_to_stop, environment):
        seen.append(environment)
        run.model.mkdir()
        return worker.ProgramEnd(code=0, lines=[])

    monkeypatch.setattr(worker, "_execute", execute)
    assert local.launch(plan_sweep(path, [])) == (0, [])
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen) == ["4", "5"]
    code = seen[0]["PYTHONPATH"].split(os.pathsep)[0]
    assert f"{plan_sweep(path, []).folder}/code/" in code
    assert os.path.exists(f"{code}/sweeps/runs/run.py") and os.path.exists(f"{code}/COMMIT")
    assert rows(runs_of(path)[0], "queued")[0]["code"] == os.path.basename(code)
    assert (
        run_or_empty("printf", r"caf\351") == "caf\udce9"
    )  # as in a diff, which need not be UTF-8
    said = launch(path, "--executor", "local", "world.processes_per_node=3", code=2)
    assert "world.processes_per_node: 3: 2 GPUs here" in said


def test_status_stands_broken_files(toy_file):
    path = toy_file(grid={"seed": [1, 2]})
    launch(path, "--executor", "local")
    one, other = runs_of(path)
    for file in (one.path / "attempts.jsonl", one.metrics, other.metrics):
        file.write_text('[]\n{"step": \n\x00\n')
    (other.path / "DONE").unlink()
    other.model.rename(other.model.with_name("gone"))
    shown = command("status", path)
    assert shown.returncode == 0, shown.stderr
    assert "1 to do · 1 done" in shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_rank_outlives_a_launch_and_a_killed_one_starts_all_again(toy_file, hold, tmp_path):
    path = toy_file(grid={}, train=LONG, world={"processes_per_node": 2})
    (run,) = runs_of(path)
    process = start(path)
    wait_for(lambda: run.step() >= 10)
    assert len(programs(run)) == 3  # torchrun and its ranks
    kill(programs(run)[-1:])
    wait_for(lambda: len(rows(run, "began")) == 2 and len(programs(run)) == 3)
    process.kill()
    wait_for(lambda: not programs(run))
    hold.unlink()
    launch(path, "--executor", "local")
    assert equal(run, *calm(path, tmp_path / "calm"))
