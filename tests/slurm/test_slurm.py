"""Sweeps on a real one-machine Slurm, and a day of faults."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sweep_tools import (
    CLUSTER,
    MARKS,
    PROJECT,
    SECRET,
    calm,
    command,
    empty,
    equal,
    launch,
    logs,
    programs,
    rows,
    runs_of,
    wait_for,
)

from sweeps.runs import slurm_queue
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run

pytestmark = MARKS
LONG = {"steps": 200, "pace": 0.1}
UNSAVED = {**LONG, "save_every": None}
LONG_UNSAVED = {**UNSAVED, "steps": 400}


def submit(path: Path, *overrides: str) -> str:
    """What a launch on Slurm prints."""
    return launch(path, "--executor", "slurm", *overrides)


def element(path: Path, number: int = 0) -> slurm_queue.LiveElement:
    """The queued or running element of a sweep's run."""
    run = runs_of(path)[number]
    jobs = slurm_queue.live_elements(run.path.parent)
    return next(job for job in jobs if job.run == run.name)


def under_way(path: Path, number: int = 0) -> Run:
    """A run once it has saved something in its job."""
    run = runs_of(path)[number]
    wait_for(lambda: run.last_saved_step() >= 5)
    return run


def test_a_warned_element_requeues_itself_alone_and_one_killed_whole_waits_for_a_launch(
    cluster, profile, toy_file, tmp_path
):
    path = toy_file(grid={"seed": [1, 2]}, train=LONG, cluster=profile())
    printed = submit(path)
    assert re.match(r"folder: .*/out/toy\nsubmitted job \d+: trains 2 runs\n", printed), printed
    first = under_way(path)
    second = under_way(path, 1)
    mine = element(path).label
    subprocess.run(["scancel", "--signal=USR2", mine], check=True)
    wait_for(lambda: rows(first, "ended"))
    assert "2 queued or running, nothing to add" in submit(path)
    psutil.Process(*programs(second)).parent().kill()
    wait_for(empty)
    assert first.done, logs(tmp_path)
    assert [row["job"] for row in rows(first, "began")] == [mine, mine]
    before, after = (row["progress"][0] for row in rows(first, "began"))
    assert before == 0 < after and len(rows(second, "began")) == 1
    shown = command("status", path).stdout
    assert "1 dead" in shown and re.search(r"\d+_1 FAILED, exit .*, step \d+/200", shown), shown
    submit(path)
    wait_for(empty)
    assert second.done and "2 done, nothing to add" in submit(path), logs(tmp_path)
    assert all(map(equal, (first, second), calm(path, tmp_path / "calm")))
    report = plan_sweep(path, []).folder / "results" / "report.html"
    assert report.exists(), logs(tmp_path)


def test_a_preemption_with_grace_is_no_scancel(cluster, profile, toy_file, tmp_path):
    """Slurm sends TERM, says RUNNING for GraceTime more, and requeues nothing that left before."""
    path = toy_file(grid={}, train=UNSAVED, cluster=profile())
    submit(path)
    (run,) = runs_of(path)
    wait_for(run.metrics.exists)
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    subprocess.run([*urgent, "--wrap=srun sleep 3"], check=True)
    wait_for(lambda: rows(run, "ended"))
    assert rows(run, "ended")[-1]["stopped"] and run.last_saved_step() > 0
    again = f"saved at step {run.last_saved_step()}; Slurm starts it again shortly"
    wait_for(lambda: again in command("status", path).stdout)
    wait_for(empty)
    assert run.done, logs(tmp_path)
    assert len(rows(run, "began")) == 2 and equal(run, *calm(path, tmp_path / "calm"))
    printed = "".join(log.read_text() for log in tmp_path.rglob("*_log.out"))
    assert re.search(r"saved at step \d+; Slurm starts it again", printed), printed
    assert "timed-out" not in printed and "Traceback" not in printed


def test_at_the_time_limit_a_run_goes_on_whether_it_heard_the_warning_or_not(
    cluster, profile, toy_file, tmp_path
):
    """Slurm's shortest limit is a minute. Some trainers save when they are warned, others only at
    the limit's own TERM; those done before are left alone."""
    keys = {"steps": [450, 5], "deaf": [False, True]}
    path = toy_file(grid=keys, train={"pace": 0.1}, cluster=profile(time="1", signal_seconds=25))
    submit(path)
    runs = runs_of(path)
    warned, late, *short = runs
    label = wait_for(lambda: element(path, 1).label)
    wait_for(empty)
    assert all(run.done for run in runs), logs(tmp_path)
    assert [len(rows(run, "began")) for run in short] == [1, 1]
    assert len(rows(warned, "began")) >= 2 and len(rows(late, "began")) >= 2
    printed = plan_sweep(path, []).folder / "jobs"
    (log,) = printed.rglob(f"{label}_0_log.out")
    assert "TIME LIMIT" in log.read_text()
    assert all(map(equal, runs, calm(path, tmp_path / "calm")))


def test_a_requeue_waits_for_the_controller(cluster, profile, toy_file, tmp_path):
    path = toy_file(grid={}, train=LONG, cluster=profile())
    submit(path)
    run = under_way(path)
    supervisor = psutil.Process(*programs(run)).ppid()
    subprocess.run([CLUSTER, "stop-slurmctld", cluster], check=True)
    try:
        os.kill(supervisor, signal.SIGUSR2)
        wait_for(lambda: rows(run, "ended"))
        began = time.monotonic()
        shown = command("status", path).stdout
        assert "1 unknown" in shown and "what is queued is not known" in shown, shown
        assert time.monotonic() - began < 60
        wait_for(lambda: re.search(r"scontrol requeue .*; again in", logs(tmp_path)))
    finally:
        subprocess.run([CLUSTER, "start-slurmctld", cluster], check=True)
    wait_for(empty)
    assert run.done and len(rows(run, "began")) == 2, logs(tmp_path)


def test_a_run_leaves_a_node_without_its_slurmd_before_that_is_back(
    cluster, impatient, profile, toy_file, tmp_path
):
    """What stays would be killed then, and its end be taken for that of the job's new start."""
    path = toy_file(grid={}, train=LONG_UNSAVED, cluster=profile(extra=["--nodelist=n1"]))
    submit(path)
    (run,) = runs_of(path)
    wait_for(run.metrics.exists)
    subprocess.run([CLUSTER, "kill-slurmd", cluster, "n1"], check=True)
    wait_for(lambda: rows(run, "ended"))
    assert rows(run, "ended")[0]["stopped"], logs(tmp_path)
    (supervisor,) = tmp_path.rglob("*_0_0_log.out")
    wait_for(lambda: "Slurm has requeued this job by itself" in supervisor.read_text(), seconds=60)
    assert not programs(run)
    wait_for(lambda: "n1 down* (Not responding)" in command("status", path).stdout)
    shown = command("status", path).stdout
    assert "1 queued" in shown and "1 job cannot start now" in shown, shown
    assert "Once they are back, Slurm starts it, and nothing is to be typed" in shown
    step = run.last_saved_step()
    subprocess.run([CLUSTER, "start-slurmd", cluster], check=True)
    wait_for(empty)
    assert run.done, logs(tmp_path)
    assert [row["progress"][0] for row in rows(run, "began")] == [0, step]
    assert equal(run, *calm(path, tmp_path / "calm"))


def test_what_sbatch_took_runs_once_though_its_answer_was_lost(
    cluster, profile, toy_file, tmp_path
):
    # Slow enough that the runs are still there when the second launch looks, on a busy machine too.
    train = {"steps": 5, "pace": 3.0}
    path = toy_file(grid={"seed": [1, 2]}, train=train, cluster=profile())
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    odd = tmp_path / "bin" / "sbatch"
    odd.parent.mkdir()
    once = 'rm "$0"; sbatch "$@" > /dev/null'
    odd.write_text(f"#!/bin/bash\n{once}\necho '{lost}' >&2; exit 1\n")
    odd.chmod(0o755)
    env = os.environ | {"PATH": f"{odd.parent}:{os.environ['PATH']}"}
    done = command("launch", path, "--executor", "slurm", env=env)
    assert done.returncode and "timed out" in done.stderr, done.stderr
    shown = command("status", path).stdout
    assert re.search(r"2 runs: (2|1 running · 1) (queued|running)\n", shown), shown
    again = submit(path)
    assert "trains" not in again and "makes the tables" in again, again
    for names in path.parent.glob("out/toy/jobs/*/names"):
        assert names.with_name("id").exists()  # one was written by the second launch
    wait_for(empty)
    for run in runs_of(path):
        assert run.done and len(rows(run, "began")) == 1, logs(tmp_path)


def test_of_launches_at_once_one_queues(cluster, profile, toy_file, tmp_path):
    """While all nodes are drained, too, and whatever name the shell gives them."""
    nodes = ["scontrol", "update", "NodeName=n1,n2", "Reason=maintenance"]
    subprocess.run([*nodes, "State=DRAIN"], check=True)
    named = profile(pass_environment=["OMP_NUM_THREADS", "PYTHONPATH", "SBATCH_JOB_NAME"])
    path = toy_file(grid={"seed": [1, 2, 3]}, train={"steps": 5}, cluster=named)
    call = [sys.executable, "-m", "sweeps", "launch", str(path), "--executor", "slurm"]
    shell = {**os.environ, "SBATCH_JOB_NAME": "mine"}
    started = [
        subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=shell) for _ in range(3)
    ]
    said = [process.communicate()[0] for process in started]
    shown = command("status", path).stdout
    subprocess.run([*nodes, "State=RESUME"], check=True)
    assert sum("trains 3 runs" in text for text in said) == 1, said
    assert sum("3 queued or running, nothing to add" in text for text in said) == 2
    assert "3 queued" in shown, shown
    wait_for(empty)
    assert [len(rows(run, "began")) for run in runs_of(path)] == [1, 1, 1], logs(tmp_path)


def test_a_wrong_profile_is_named_by_status_and_mended_by_a_launch(
    cluster, profile, toy_file, tmp_path
):
    """The first set-up line that fails ends a job."""
    path = toy_file(cluster=profile(setup=["module load python/3.11", "echo on"]))
    submit(path)
    wait_for(empty)
    shown = command("status", path).stdout
    assert "2 dead" in shown and "module: command not found" in shown, shown
    assert "before it began" in shown and "(and 1 more like it)" in shown
    assert "Fix the cause shown above, then type: python -m sweeps launch" in shown
    profile()
    submit(path)
    wait_for(empty)
    assert all(run.done for run in runs_of(path)), logs(tmp_path)


@pytest.fixture
def copied(tmp_path):
    """A checkout of its own, in a path with spaces, whose .venv is this one's."""
    project = tmp_path / "my own work" / "a $project's `copy`"
    for name in ("kernel", "patches", "slurm", "eval", "configs"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("*.pyc"))
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (project / ".venv" / "bin" / "python").chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(project)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    return project


def test_sbatch_from_elsewhere_and_a_checkout_that_changes_meanwhile(
    cluster, profile, tiny, copied, tmp_path
):
    """The whole chain by the script that users type: paths start where it is typed, what runs is
    the code of the launch, runs of several processes are scored in a job of its own, and no token
    is in any file."""
    source = copied / "slurm" / "sweeps" / "training" / "sft_trainer.py"
    source.write_text(source.read_text() + "\n# a change that is not committed\n")
    here = tmp_path / "else where"
    (here / "data").mkdir(parents=True)
    shutil.copy(tiny / "chat.jsonl", here / "data" / "my chat.jsonl")
    bare = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "PYTHONPATH")}
    tasks = f'score.tasks=[{{"task": "mmlu", "data": "{tiny / "mmlu"}", "shots": 2}}]'
    profile(setup=[f'while [ ! -e "{here}/go" ]; do sleep 0.2; done'])
    done = subprocess.run(
        ["sbatch", "--wait", "--mem=500M", "--export=NONE", f"--output={here}/job.out",
         copied / "slurm" / "sweep_beta.sh",
         f"train.model_name_or_path={tiny / 'model'}", "train.train_file=data/my chat.jsonl",
         "train.max_train_steps=2", "train.gradient_accumulation_steps=1",
         "train.chat_template_name=null", "train.gradient_checkpointing=false",
         "world.mixed_precision=no", "grid.label_smoothing=[0.1]", tasks, "score.select_on=null",
         "output_root=my runs", f"cluster={tmp_path / 'cluster.yaml'}",
         "world.processes_per_node=2"],
        cwd=here, text=True, capture_output=True, check=False,
        env=bare | {"SBATCH_ACCOUNT": ""},
    )  # fmt: skip
    said = (here / "job.out").read_text()
    assert done.returncode == 0, said + done.stderr
    jobs = re.findall(r"submitted job \d+: (\w+)", said)
    assert jobs == ["trains", "scores", "scores", "makes"], said
    source.write_text("raise SystemExit('the checkout of now')")  # while all is queued
    (here / "go").touch()
    wait_for(empty)
    sweep = here / "my runs" / "beta"
    table = sweep / "results" / "table.csv"
    assert table.exists(), said + logs(tmp_path)
    assert {line.split(",")[2] for line in table.read_text().splitlines()[1:]} == {"", "0.1"}
    (run,) = map(Run, sweep.glob("*-beta*"))
    began = {row["stage"]: row["job"].partition("_")[0] for row in rows(run, "began")}
    assert [*began] == ["train", "score"] and began["train"] != began["score"]
    (code,) = (sweep / "code").iterdir()
    assert re.fullmatch("[0-9a-f]{40}", (code / "COMMIT").read_text())
    assert "+# a change that is not committed" in (code / "DIFF").read_text()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), f"{path} holds the planted secret"


@pytest.fixture
def accounts(tmp_path_factory, monkeypatch):
    """A private Slurm on which this user has the account def-ann, and may submit two jobs."""
    if not all(map(shutil.which, ("slurmdbd", "mariadbd"))):
        pytest.skip("needs: apt-get install slurmdbd mariadb-server")
    folder = tmp_path_factory.mktemp("accounts")
    subprocess.run([CLUSTER, "start", folder, "account=def-ann"], check=True)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    limit = "sacctmgr --immediate --quiet modify user root set MaxSubmitJobs=2"
    subprocess.run(limit.split(), check=True)
    yield folder
    subprocess.run([CLUSTER, "stop", folder], check=True)


def test_accounts_partitions_and_limits_are_named_with_what_there_is(
    accounts, profile, toy_file, tmp_path
):
    path = toy_file(grid={"seed": [1, 2, 3]}, train={"steps": 5})

    def said(code: int = 2, *more: str, **keys) -> str:
        return launch(path, "--executor", "slurm", f"cluster={profile(**keys)}", *more, code=code)

    for wrong in ("def-bob", "def-yourpi"):
        assert f"account: found {wrong}, there is def-ann" in said(account=wrong)
    assert "partition: found h100, there is all" in said(account="def-ann", partition="h100")
    odd = said(2, "grid.seed=[1]", account="def-ann", extra=["--constraint=no-such-node"])
    assert "feature" in odd.lower() or "no-such-node" in odd, odd
    assert empty()
    assert "3 runs: 3 to do" in command("status", path).stdout
    refusal = said(account="def-ann")
    assert "MaxSubmitJobs is 2 for def-ann, 3 are asked for" in refusal, refusal
    assert empty()
    shown = command("status", path).stdout
    assert "3 to do" in shown and "(and 2 more like it): sbatch refuses" in shown, shown
    # Two elements fit, and their collect job does not.
    two = said(1, "grid.seed=[1, 2]", account="def-ann")
    assert "trains 2 runs" in two and "the tables will not be made by themselves" in two, two
    wait_for(empty)
    first, second, _ = runs_of(path)
    assert first.done and second.done, logs(tmp_path)
    assert "2 done" in command("status", path, "grid.seed=[1, 2]").stdout


def test_chaos(tmp_path):
    """Eight runs, five of them disturbed: all arrive, with the undisturbed weights."""
    subprocess.run([sys.executable, Path(__file__).with_name("chaos.py"), tmp_path], check=True)
