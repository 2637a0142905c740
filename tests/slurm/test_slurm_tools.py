"""One run cancelled, several clusters, and what a user's shell and queue hold, on a real Slurm."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_tools import CLUSTER, MARKS, command, empty, launch, logs, runs_of, wait_for

from sweeps.runs.processes import run_checked

pytestmark = MARKS
LONG = {"steps": 300, "pace": 0.1}


def submit(path: Path, *overrides: str, code: int = 0) -> str:
    """What a launch on Slurm prints."""
    return launch(path, "--executor", "slurm", *overrides, code=code)


def test_cancel_ends_the_runs_that_are_named_and_no_others(cluster, profile, toy_file):
    path = toy_file(grid={"seed": [1, 2, 3, 4]}, train=LONG, cluster=profile())
    submit(path)
    first, second, third, fourth = runs_of(path)
    done = command("cancel", path, "grid.seed=[2]")
    assert second.name in done.stdout and done.stdout.count("cancelled") == 1, done.stdout
    left = f"still queued or running, and not asked for: {first.name}, {third.name}, {fourth.name}"
    assert left in done.stderr, done.stderr
    assert f"to cancel all: python -m sweeps cancel {first.path.parent}" in done.stderr
    shown = command("status", path, "grid.seed=[1,3,4]").stdout
    assert "stopped" not in shown and "dead" not in shown, shown
    assert "1 stopped" in command("status", path, "grid.seed=[2]").stdout
    done = command("cancel", path)
    assert all(run.name in done.stdout for run in (first, third, fourth)), done
    assert "the job that makes the tables" in done.stdout and not done.stderr
    wait_for(empty)


def test_what_the_shell_and_the_queue_hold_changes_nothing(
    cluster, profile, toy_file, tmp_path, monkeypatch
):
    """Slurm's tools read variables of the shell; another job may have any name."""
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, cluster=profile())
    odd_name = "two\n12|0|PENDING|lines"
    other = ["sbatch", "--parsable", "--hold", f"--job-name={odd_name}", "--wrap=true"]
    subprocess.run(other, check=True, cwd=tmp_path)
    submit(path)
    first, second = runs_of(path)
    wait_for(first.metrics.exists)
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
    assert "SLURM_CLUSTERS: beta: jobs go where the profile says: write `clusters: beta`" in refusal, refusal
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
