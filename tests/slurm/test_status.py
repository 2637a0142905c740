"""What `status` says of a run, by the files of its folder and what Slurm's tools answer."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_tools import command, prepare

from calibeval.io import InputError
from sweeps.results import status
from sweeps.results.status import Evidence, State, Status
from sweeps.runs import slurm_queue
from sweeps.runs.events import Event, EventKind
from sweeps.runs.files import closed_by_owner
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run
from sweeps.runs.slurm_queue import ElementEnd, LiveElement, SubmittedElement


@pytest.fixture
def slurm_says(tmp_path, monkeypatch) -> Callable[..., None]:
    """Let Slurm's tools print these texts: `slurm_says(squeue=…, sacct=…)`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/sh\nprintf %s '{text}'\n")
            (folder / name).chmod(0o755)

    return write


def submit(run: Run, tag: str, kind: str, job_id: str) -> None:
    """Leave what a launch leaves that has submitted an array of this run alone."""
    folder = run.path.parent / "jobs" / tag
    folder.mkdir(parents=True)
    (folder / "names").write_text(f"{run.name}\n")
    options = f"#SBATCH --array=0-0\n#SBATCH --job-name=toy.{kind}.{tag}\n"
    (folder / "script.sh").write_text(f"#!/bin/bash\n{options}")
    (folder / "id").write_text(f"{job_id}\n")
    (folder / f"{job_id}_0_0_log.out").write_text(f"the words of {kind}\n")
    run.note(EventKind.LAUNCHED, tag=tag)


def status_of(path: Path, *overrides: str) -> Status:
    """The status of a sweep's only run."""
    statuses, _ = status.of_sweep(plan_sweep(path, list(overrides)))
    (only,) = statuses
    return only


def test_a_done_run_that_is_queued_for_another_task_is_queued(toy_file, tiny, slurm_says):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(grid={}, score={"tasks": [task], "base": False})
    run = prepare(path, "score=null")
    run.model.mkdir()
    run.done_file.touch()
    prepare(path).done_file.touch()  # as a launch of an earlier version has left it
    submit(run, "aaaaaa", "score", "14")
    slurm_says(squeue="14|0|PENDING|toy.score.aaaaaa|Priority", sacct="")
    shown = status_of(path)
    assert (shown.state, shown.detail) == (State.QUEUED, "14_0  Priority")
    slurm_says(squeue="", sacct="14_0|OUT_OF_MEMORY|0:125|n1")
    shown = status_of(path)
    assert shown.state is State.DEAD and "14_0 OUT_OF_MEMORY" in shown.detail


@pytest.fixture
def trained_and_scored_apart(toy_file, tiny) -> tuple[Path, Run]:
    """A sweep of one run of two processes, whose two elements were submitted; and the run."""
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    world = {"processes_per_node": 2}
    path = toy_file(grid={}, world=world, score={"tasks": [task], "base": False})
    run = prepare(path)
    submit(run, "aaaaaa", "train", "14")
    submit(run, "bbbbbb", "score", "15")
    return path, run


def test_a_training_killed_with_its_job_is_dead_though_its_scoring_is_cancelled(
    trained_and_scored_apart, slurm_says
):
    path, _ = trained_and_scored_apart
    slurm_says(squeue="", sacct="14_0|OUT_OF_MEMORY|0:125|n1\n15_0|CANCELLED by 0|0:0|n1")
    shown = status_of(path)
    assert shown.state is State.DEAD
    assert shown.detail == "14_0 OUT_OF_MEMORY, exit 0:125, before it began"
    assert shown.lines == ("the words of train",)


def test_a_scoring_killed_with_its_job_is_told_by_its_own_element(
    trained_and_scored_apart, slurm_says
):
    path, run = trained_and_scored_apart
    run.model.mkdir()
    slurm_says(squeue="", sacct="14_0|COMPLETED|0:0|n1\n15_0|NODE_FAIL|0:0|n1")
    shown = status_of(path)
    assert shown.state is State.DEAD and "15_0 NODE_FAIL" in shown.detail
    assert shown.lines == ("the words of score",)


@pytest.mark.parametrize("order", [1, -1])
def test_a_training_that_can_never_start_is_told_though_its_scoring_waits_too(
    trained_and_scored_apart, slurm_says, order
):
    """Of two pending elements the one counted that squeue had listed last."""
    lines = ["14|0|PENDING|toy.train.aaaaaa|InvalidQOS", "15|0|PENDING|toy.score.bbbbbb|Dependency"]
    slurm_says(squeue="\n".join(lines[::order]))
    path, _ = trained_and_scored_apart
    shown = status.table(plan_sweep(path, []))
    assert "14_0  InvalidQOS" in shown and "1 job will not start (InvalidQOS)" in shown


def test_a_training_that_somebody_cancelled_is_stopped(trained_and_scored_apart, slurm_says):
    path, _ = trained_and_scored_apart
    slurm_says(squeue="", sacct="14_0|CANCELLED by 1000|0:0|n1\n15_0|CANCELLED by 0|0:0|n1")
    assert status_of(path).state is State.STOPPED


def test_a_banner_of_sacct_is_no_end(trained_and_scored_apart, slurm_says):
    """Wrappers of Slurm's tools print one, where a login shell does."""
    path, _ = trained_and_scored_apart
    slurm_says(squeue="", sacct="*** Maintenance on Monday ***\n14_0|OUT_OF_MEMORY|0:125|n1")
    assert status_of(path).detail == "14_0 OUT_OF_MEMORY, exit 0:125, before it began"


def test_a_run_without_metrics_shows_the_step_that_it_has_saved(toy_file, slurm_says):
    """As a script of the user's own may write none; a run that goes on again is not starting."""
    path = toy_file(grid={})
    run = prepare(path)
    submit(run, "aaaaaa", "train", "14")
    slurm_says(squeue="14|0|RUNNING|toy.train.aaaaaa|None")
    assert status_of(path).detail == "starting"
    (run.checkpoints / "checkpoint-20").mkdir(parents=True)
    assert status_of(path).detail == "saved at step 20"


LAUNCHED = Event(EventKind.LAUNCHED, "now", {"tag": "aaaaaa"})
BEGAN = Event(EventKind.BEGAN, "now", {"stage": "train"})
SAVED = Event(EventKind.ENDED, "now", {"exit": 75, "stopped": True})
FAILED = Event(EventKind.ENDED, "now", {"exit": 1, "error": "loss is nan"})
REFUSED = Event(EventKind.ENDED, "now", {"refused": "sbatch refuses"})
KILLED = Event(EventKind.ENDED, "now", {"exit": -9, "killed": True})
TAKEN = SubmittedElement("14_0", None)
NOT_TAKEN = SubmittedElement(None, None)
PENDING = LiveElement("14_0", "PENDING", "Priority", "run")
RUNNING = LiveElement("14_0", "RUNNING", "None", "run")
LEAVING = LiveElement("14_0", "COMPLETING", "None", "run")
CANCELLED = ElementEnd("CANCELLED by 1000", "0:0")
OUT_OF_MEMORY = ElementEnd("OUT_OF_MEMORY", "0:125")


def evidence_of(run: Run, last: Event | None, **known: Any) -> Evidence:
    """What tells of a run of which nothing is known but its last event and `known`."""
    nothing = {
        "is_locked": False,
        "is_launching": False,
        "live_element": None,
        "submitted": None,
        "end": None,
        "slurm_error": "",
        "scored": "-",
    }
    return Evidence(run=run, last=last, **{**nothing, **known})


@pytest.mark.parametrize(
    ("last", "known", "state"),
    [
        (None, {}, State.TO_DO),
        (BEGAN, {"is_locked": True}, State.RUNNING),
        (LAUNCHED, {"live_element": RUNNING}, State.RUNNING),
        (SAVED, {"live_element": LEAVING}, State.RUNNING),
        (LAUNCHED, {"live_element": PENDING}, State.QUEUED),
        (FAILED, {"live_element": PENDING}, State.QUEUED),
        (BEGAN, {"is_launching": True}, State.RUNNING),
        (LAUNCHED, {"is_launching": True}, State.QUEUED),
        (FAILED, {"is_launching": True}, State.DEAD),
        (LAUNCHED, {"submitted": TAKEN, "slurm_error": "away"}, State.UNKNOWN),
        (FAILED, {}, State.DEAD),
        (SAVED, {}, State.STOPPED),
        (REFUSED, {}, State.TO_DO),
        (KILLED, {}, State.TO_DO),
        (LAUNCHED, {"submitted": NOT_TAKEN}, State.TO_DO),
        (LAUNCHED, {"submitted": TAKEN, "end": CANCELLED}, State.STOPPED),
        (BEGAN, {"submitted": TAKEN, "end": OUT_OF_MEMORY}, State.DEAD),
        (BEGAN, {"submitted": TAKEN}, State.DEAD),
        (BEGAN, {}, State.DEAD),
    ],
)
def test_what_a_run_is_doing_follows_from_what_is_known(toy_file, last, known, state):
    evidence = evidence_of(prepare(toy_file(grid={})), last, **known)
    assert status.classify(evidence) is state


@pytest.fixture
def submitted(toy_file) -> tuple[Path, Run]:
    """A sweep of one run of one process, which was submitted as element 14_0; and the run."""
    path = toy_file(grid={})
    run = prepare(path)
    submit(run, "aaaaaa", "train", "14")
    return path, run


def test_a_run_killed_here_is_dead_though_an_earlier_job_of_it_was_cancelled(submitted, slurm_says):
    """That job has nothing to do with the attempt that a launch without Slurm has made since."""
    path, run = submitted
    slurm_says(squeue="", sacct="14_0|CANCELLED by 1000|0:0|n1")
    assert status_of(path).state is State.STOPPED
    run.note(EventKind.LAUNCHED, code="5eed5eed")
    run.note(EventKind.BEGAN, stage="train", job=None)
    shown = status_of(path)
    assert (shown.state, shown.detail) == (State.DEAD, "killed, at the start")
    assert shown.lines == ()
    submit(run, "bbbbbb", "train", "15")
    slurm_says(squeue="", sacct="15_0|NODE_FAIL|1:0|n1")
    assert status_of(path).detail == "15_0 NODE_FAIL, exit 1:0, before it began"


DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"


def test_a_run_whose_nodes_are_down_is_told_to_wait_and_which_they_are(submitted, slurm_says):
    path, _ = submitted
    nodes = "n1|down*|Not responding\nn1|down*|Not responding\nn2|drained|disk"
    slurm_says(squeue=f"14|0|PENDING|toy.train.aaaaaa|{DOWN}", sacct="", sinfo=nodes)
    shown = status.table(plan_sweep(path, []))
    assert f"1 job cannot start now ({DOWN})" in shown
    assert "    sinfo says: n1 down* (Not responding); n2 drained (disk)\n" in shown
    assert "Once they are back, Slurm starts it, and nothing is to be typed" in shown
    assert "will not start" not in shown


def test_a_job_whose_list_of_runs_was_cut_is_named_with_what_ends_it(submitted, slurm_says):
    path, run = submitted
    elements = [f"14|{index}|PENDING|toy.train.aaaaaa|Priority" for index in (0, 1)]
    slurm_says(squeue="\n".join(elements), sacct="")
    names = run.path.parent / "jobs" / "aaaaaa" / "names"
    reason = f"{names}: has no line 2, which says on which run 14_1 works: scancel 14_1"
    assert reason in status.table(plan_sweep(path, []))
    done = command("cancel", path)
    assert done.returncode == 2 and reason in done.stderr


def test_what_runs_on_a_node_that_was_given_up_is_told(submitted, slurm_says):
    """Its job is queued again, to start elsewhere, and its processes live on there."""
    path, run = submitted
    run.note(EventKind.BEGAN, stage="train", job="14_0", host="gpu07")
    slurm_says(squeue="14|0|PENDING|toy.train.aaaaaa|BeginTime", sacct="")
    hold_lock = f"import fcntl; file = open({str(run.lock_file)!r}, 'a')\n"
    hold_lock += "fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold_lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline()
        shown = status_of(path)
        holder.stdin.close()
    assert shown.state is State.RUNNING
    assert "still on gpu07, which Slurm has given up; 14_0 is queued again" in shown.detail


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_users_runs_are_unknown_with_whose_they_are_and_what_opens_them(
    toy_file, monkeypatch
):
    """Two users share a folder, and one has umask 077."""
    with tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o777)
        plan = plan_sweep(toy_file(grid={"seed": [1, 2]}, output_root=shared), [])
        previous = os.umask(0o077)
        plan.create()
        submit(plan.runs[0], "aaaaaa", "train", "14")
        os.umask(previous)
        plan.folder.chmod(0o755)
        (plan.folder / "jobs").chmod(0o755)
        plan.runs[1].path.chmod(0o755)
        os.seteuid(65534)
        try:
            shown = status.table(plan)
            with pytest.raises(PermissionError):
                slurm_queue.live_elements(plan.folder)
            with pytest.raises(InputError) as refusal:
                plan.create()
            told = closed_by_owner(refusal.value)
        finally:
            os.seteuid(0)
    assert "1 unknown · 1 to do" in shown and "what is queued is not known" in shown, shown
    words = f"belongs to root and is closed to you: {plan.runs[0].path}: root types "
    assert f"{words}`chmod -R g+rwX {plan.folder}`, and `umask 002` before each launch" in shown
    assert told.startswith(f"belongs to root and is closed to you: {plan.runs[0].path}: "), told
