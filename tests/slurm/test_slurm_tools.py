"""One run cancelled, several clusters, and what a user's shell and queue hold, on a real Slurm."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_tools import (
    CLUSTER,
    MARKS,
    command,
    empty,
    launch,
    logs,
    rows,
    runs_of,
    wait_for,
)

from sweeps.runs.processes import run_checked

pytestmark = MARKS
LONG = {"steps": 1000, "pace": 0.1}


def submit(path: Path, *overrides: str, code: int = 0) -> str:
    """What a launch on Slurm prints."""
    return launch(path, "--executor", "slurm", *overrides, code=code)


def test_what_the_shell_and_the_queue_hold_changes_nothing(
    cluster, profile, toy_file, tmp_path, monkeypatch
):
    """Slurm's tools read variables of the shell; another job may have any name."""
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, cluster=profile())
    odd_name = "two\n12|0|PENDING|lines"
    other = ["sbatch", "--parsable", "--hold", f"--job-name={odd_name}", "--wrap=true"]
    subprocess.run(other, check=True, cwd=tmp_path)
    submit(path)
    wait_for(runs_of(path)[0].metrics.exists)
    for name, value in {
        "SQUEUE_STATES": "PENDING",
        "SCANCEL_STATE": "PENDING",
        "SACCT_FORMAT": "JobID",
        "SINFO_FORMAT": "%n",
    }.items():
        monkeypatch.setenv(name, value)
    assert "2 queued or running, nothing to add" in submit(path)
    assert "2 running" in command("status", path).stdout
    assert "cancelled" in command("cancel", path).stdout
    for name in ("SQUEUE_STATES", "SCANCEL_STATE"):
        monkeypatch.delenv(name)
    subprocess.run(["scancel", "--user=root", "--state=PENDING"], check=True)
    wait_for(empty)
    assert "2 stopped" in command("status", path).stdout, logs(tmp_path)


@pytest.fixture
def two_clusters(tmp_path_factory, monkeypatch) -> Iterator[None]:
    """Clusters alpha, where commands are typed, and beta."""
    if not os.path.exists("/usr/sbin/slurmdbd"):
        pytest.skip("needs: apt-get install slurmdbd mariadb-server")
    alpha = tmp_path_factory.mktemp("alpha")
    beta = tmp_path_factory.mktemp("beta")
    subprocess.run([CLUSTER, "start", alpha, "account=def-ann", "name=alpha"], check=True)
    options = ("account=def-ann", "name=beta", f"beside={alpha}", "nodes=2")
    subprocess.run([CLUSTER, "start", beta, *options], check=True)
    monkeypatch.setenv("SLURM_CONF", str(alpha / "slurm.conf"))
    yield
    subprocess.run([CLUSTER, "stop", beta], check=True)
    subprocess.run([CLUSTER, "stop", alpha], check=True)


def empty_beta() -> bool:
    """Whether nothing is queued on the other cluster."""
    return not run_checked("squeue", "--noheader", cluster="beta")


def test_another_cluster_is_asked_by_every_tool(
    two_clusters, profile, toy_file, tmp_path, monkeypatch
):
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, cluster=profile())
    with monkeypatch.context() as shell:
        shell.setenv("SLURM_CLUSTERS", "beta")
        refusal = submit(path, code=2)
    assert (
        "SLURM_CLUSTERS: beta: jobs go where the profile says: write `clusters: beta`" in refusal
    ), refusal
    refusal = submit(path, f"cluster={profile(extra=['--clusters=beta'])}", code=2)
    assert "--clusters is not for profiles: name the cluster in clusters" in refusal, refusal
    refusal = submit(path, f"cluster={profile(clusters='gamma')}", code=2)
    assert "'gamma'" in refusal and "alpha, beta" in refusal, refusal

    profile(clusters="beta")
    assert "trains 2 runs" in submit(path)
    assert empty()  # on alpha
    first, second = runs_of(path)
    wait_for(lambda: second.last_saved_step() >= 5)
    assert "2 queued or running, nothing to add" in submit(path)
    assert "2 running" in command("status", path).stdout
    profile()  # jobs are asked about where they are, whatever the profile says now
    assert "2 queued or running, nothing to add" in submit(path)
    assert first.name in command("cancel", path, "grid.seed=[1]").stdout
    wait_for(lambda: "1 stopped" in command("status", path).stdout)
    job = command("status", path, "grid.seed=[2]").stdout
    assert "1 running" in job, job
    profile(clusters="beta")
    subprocess.run(
        ["scancel", "--clusters=beta", "--signal=USR2", f"--name={queued_name()}"], check=True
    )
    wait_for(lambda: "Slurm starts it again" in logs(tmp_path))
    command("cancel", path.parent / "out" / "toy")
    wait_for(empty_beta)
    assert "2 stopped" in command("status", path).stdout
    submit(path, "train.steps=5")
    wait_for(empty_beta)
    assert all(run.done for run in runs_of(path, "train.steps=5")), logs(tmp_path)


def queued_name() -> str:
    """The name of the array on the other cluster."""
    names = run_checked("squeue", "--noheader", "--format=%j", cluster="beta").split()
    return next(name for name in names if ".train." in name)


@pytest.fixture
def without_arrays(tmp_path_factory, monkeypatch) -> Iterator[None]:
    """A private Slurm that forbids arrays."""
    folder = tmp_path_factory.mktemp("without")
    subprocess.run([CLUSTER, "start", folder, "nodes=2", "array=0"], check=True)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    yield
    subprocess.run([CLUSTER, "stop", folder], check=True)


def test_where_there_are_no_arrays_each_run_is_a_job(
    without_arrays, profile, toy_file, tiny, tmp_path
):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(grid={"seed": [1, 2, 3]}, train=LONG, throttle=2, cluster=profile())
    shown = launch(path, "--dry-run", "--executor", "slurm")
    assert shown.count("trains 1 run") == 3, shown
    printed = submit(path)
    assert printed.count("trains 1 run") == 3, printed
    first, second, _ = runs_of(path)
    wait_for(lambda: second.last_saved_step() >= 5 and first.last_saved_step() >= 5)
    assert "2 running · 1 queued" in command("status", path).stdout
    assert first.name in command("cancel", path, "grid.seed=[1]").stdout
    wait_for(lambda: "1 stopped" in command("status", path, "grid.seed=[1]").stdout)
    (job,) = {row["job"] for row in rows(second, "began")}
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    wait_for(lambda: len(rows(second, "began")) == 2)
    assert "2 queued or running, nothing to add" in submit(path, "grid.seed=[2,3]")
    command("cancel", path.parent / "out" / "toy")
    wait_for(empty)
    assert "3 stopped" in command("status", path).stdout
    apart = ("train.steps=5", "world.processes_per_node=2", "grid.seed=[1]")
    scored = toy_file(grid={}, name="scored", cluster=profile(), score={"tasks": [task]})
    submit(scored, *apart[:2], "score.base=false")
    wait_for(empty)
    (run,) = runs_of(scored, *apart[:2], "score.base=false")
    assert [row["stage"] for row in rows(run, "began")] == ["train", "score"], logs(tmp_path)


def test_a_container_without_slurms_tools_saves_and_comes_back(
    cluster, profile, toy_file, tmp_path
):
    """Its scontrol is that of the batch script, outside of it, which must outlive Slurm's TERM at
    the time limit. The last element of an array has the array's own number, by which Slurm would
    requeue all elements."""
    python = f"env PATH={tmp_path}/nothing {sys.executable}"
    limit = profile(python=python, time="1", signal_seconds=25)
    train = {"pace": 0.1, "steps": 2000}
    path = toy_file(grid={"deaf": [True, False]}, train=train, cluster=limit)
    submit(path)
    late, warned = runs_of(path)
    wait_for(lambda: rows(late, "began") and warned.last_saved_step() >= 5)
    label = rows(warned, "began")[0]["job"]
    subprocess.run(["scancel", "--signal=USR2", label], check=True)
    wait_for(lambda: len(rows(warned, "began")) >= 2)
    assert {row["job"] for row in rows(warned, "began")} == {label}
    wait_for(lambda: len(rows(late, "began")) >= 2)
    (log,) = tmp_path.rglob(f"{rows(late, 'began')[0]['job']}_0_log.out")
    assert "TIME LIMIT" in log.read_text(), logs(tmp_path)
    command("cancel", path)
    wait_for(empty)
    assert "2 stopped" in command("status", path).stdout, logs(tmp_path)


def test_a_run_saves_whatever_signal_somebody_sends(cluster, profile, toy_file, tmp_path):
    signals = ["INT", "USR1", "HUP"]
    train = {**LONG, "save_every": None}
    keys = profile(memory_per_node="200M")
    path = toy_file(grid={"seed": [1, 2, 3]}, train=train, cluster=keys)
    submit(path)
    runs = runs_of(path)
    for name, run in zip(signals, runs, strict=True):
        wait_for(run.metrics.exists)
        label = rows(run, "began")[0]["job"]
        subprocess.run(["scancel", f"--signal={name}", label], check=True)
    for run in runs:
        (ended,) = wait_for(lambda run=run: rows(run, "ended"))
        assert ended["stopped"] and run.last_saved_step() > 0, logs(tmp_path)
    wait_for(lambda: "1 stopped" in command("status", path).stdout)  # INT: somebody wants an end
    wait_for(lambda: [len(rows(run, "began")) for run in runs] == [1, 2, 2])
    command("cancel", path)
    wait_for(empty)


def test_one_run_is_cancelled_and_launched_again_by_its_folder(
    cluster, profile, toy_file, tmp_path
):
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, cluster=profile())
    submit(path)
    first, second = runs_of(path)
    launched = (first.path.parent / "launched.yaml").read_bytes()
    wait_for(lambda: second.last_saved_step() >= 5)
    done = command("cancel", second.path)
    assert re.fullmatch(rf"cancelled \d+_1: {second.name}\n", done.stdout), done
    wait_for(lambda: "1 stopped" in command("status", second.path).stdout)
    refusal = submit(second.path, "train.steps=5", code=2)
    assert f"{second.path}: train.steps=5: would be another run" in refusal, refusal
    larger = profile(memory_per_node="600M")
    assert "trains 1 run" in submit(second.path, f"cluster={larger}")
    assert (first.path.parent / "launched.yaml").read_bytes() == launched
    wait_for(lambda: len(rows(second, "began")) == 2)
    assert "2 running" in command("status", path).stdout
    for words in ([second.path], [path, "grid.seed=[2]"]):
        shown = command("logs", *words).stdout
        assert f"==> {second.path}/train.log" in shown and "device: none in" in shown, shown
    done = command("logs", path)
    assert done.returncode == 2 and f"2 runs; type the folder of one:\n       {first.path}" in (
        done.stderr
    )
    command("cancel", first.path.parent)
    wait_for(empty)
