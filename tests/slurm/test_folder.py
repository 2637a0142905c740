"""A sweep is a folder: its identity, its tables, what is dead in it, what no longer belongs."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from real import PROJECT, command
from test_preflight import say

from sweeps import launch, plan, score, status
from sweeps.cli import main
from sweeps.executors import slurm as executor
from sweeps.files import SweepError
from sweeps.rundir import RunDir
from sweeps.supervise import Outcome, train

pytestmark = pytest.mark.timeout(1200)  # whole sweeps, on a machine that others keep busy
TINY = {"max_train_steps": 1}


def tasks(tiny, **keys) -> dict:
    return {"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1} | keys]}


def claimed(path: Path, *overrides: str) -> launch.Plan:
    """A sweep as its launch leaves it, without any training."""
    planned = launch.plan(path, list(overrides))
    plan.claim(planned)
    for cell in planned.cells:
        RunDir(cell.folder).create(cell.config)
    return planned


def finish(cell, tiny) -> None:
    """A trained run whose model is the base."""
    run = RunDir(cell.folder)
    run.write_manifest(run.manifest() | {"state": "done"})
    run.model.symlink_to(tiny / "model")
    (run.path / "DONE").touch()


def start(cell, job: str | None = None, **more) -> RunDir:
    """A run that was begun, in a job or not; `more` of its manifest."""
    run = RunDir(cell.folder)
    attempt = {"started": "", "host": "", "job": job, "from_step": 0}
    run.write_manifest(run.manifest() | {"state": "running", "attempts": [attempt]} | more)
    return run


def rows(planned: launch.Plan) -> set[str]:
    """The smoothing factors that the table has; the base model's is empty."""
    with open(planned.folder / "results" / "table.csv", newline="") as lines:
        return {row["label_smoothing"] for row in csv.DictReader(lines)}


def test_overrides_make_another_folder_and_the_first_is_left_alone(sweep_file, capsys):
    path = sweep_file()
    first = claimed(path)
    before = (first.folder / "sweep.yaml").read_text()
    second = claimed(path, "train.seed=2")
    assert f"holds other runs ({path})" in capsys.readouterr().out
    assert second.folder.name == f"tiny-{plan.recorded(second.folder)[0]}" != first.folder.name
    assert (first.folder / "sweep.yaml").read_text() == before
    assert plan.recorded(second.folder)[1] == f"{path} train.seed=2"
    # The same sweep asked for otherwise, or with other settings, is the same folder.
    for again in ("train.seed=42", "train.weight_decay=0.0", "workers=7", "throttle=3"):
        assert launch.plan(path, [again]).folder == first.folder
    # The folder says it all: nothing has to be typed again.
    known = launch.plan(second.folder, [])
    assert [c.folder for c in known.cells] == [c.folder for c in second.cells]
    assert known.folder == second.folder


def test_a_folder_takes_no_override_that_makes_another_sweep(sweep_file):
    planned = claimed(sweep_file())
    assert launch.plan(planned.folder, ["workers=3"]).sweep.workers == 3
    with pytest.raises(SweepError, match=r"with train.seed=2 it would be another sweep; launch"):
        launch.plan(planned.folder, ["train.seed=2"])
    for above in (planned.folder.parent, planned.folder.parent.parent):
        with pytest.raises(SweepError, match=rf"no sweep.yaml in this folder.*: {planned.folder}$"):
            launch.plan(above, [])


def test_a_moved_folder_does_not_begin_anew_where_it_was(sweep_file, tmp_path):
    planned = claimed(sweep_file())
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "sweeps" / planned.folder.name
    with pytest.raises(SweepError, match=rf"moved\? .* output_root={tmp_path}/moved$"):
        launch.plan(moved, [])
    again = launch.plan(moved, [f"output_root={tmp_path}/moved"])
    assert again.folder == moved and all(cell.folder.exists() for cell in again.cells)


def test_a_command_without_a_sweep_lists_those_launched(sweep_file, tmp_path, monkeypatch, capsys):
    planned = claimed(sweep_file(output_root=str(tmp_path / "runs" / "out")))
    monkeypatch.setattr("sweeps.cli.PROJECT", tmp_path)
    assert main(["status"]) == 2
    said = capsys.readouterr().err
    assert "status: of which sweep?" in said and said.endswith(f" {planned.folder}\n")


def test_ctrl_c_ends_without_a_traceback_also_in_imports(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "sweeps.cli", type("", (), {"main": property(interrupt)})())
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        runpy.run_module("sweeps", run_name="__main__")
    assert left.value.code == 130
    assert capsys.readouterr().err == "stopped; the same command continues\n"


def test_of_two_launches_of_one_name_one_gets_it(sweep_file):
    path = sweep_file()
    one, two = launch.plan(path, []), launch.plan(path, ["train.seed=2"])
    assert one.folder == two.folder  # neither is there yet
    plan.claim(one)
    with pytest.raises(SweepError, match="another sweep took this name just now"):
        plan.claim(two)


def test_an_edited_file_says_where_its_old_runs_are(sweep_file, capsys):
    planned = claimed(sweep_file(grid={"seed": [1, 2]}))
    path = sweep_file(grid={"seed": [1, 2, 3]})
    for word in ("status", "retry", "cancel", "logs"):
        assert main([word, str(path)]) == 0
        assert word == "logs" or f"  {planned.folder}  (" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["status", str(planned.folder)]) == 0
    assert "tiny: 2 runs: 2 to do" in capsys.readouterr().out


def test_gc_lists_and_deletes_what_no_sweep_holds(sweep_file, capsys):
    old = claimed(sweep_file(grid={"seed": [1, 2]}))
    new = claimed(sweep_file(grid={"seed": [2, 3]}))
    assert main(["gc", str(new.folder)]) == 0
    assert "0 runs that no sweep of" in capsys.readouterr().out
    (old.folder / "sweep.yaml").unlink()
    old.folder.rmdir()
    lonely = old.cells[0].folder
    assert main(["gc", str(new.folder)]) == 0
    said = capsys.readouterr().out
    assert str(lonely) in said and "1 run that no sweep of" in said and lonely.exists()
    assert main(["gc", str(new.folder), "--delete"]) == 0
    assert not lonely.exists()
    assert all(cell.folder.exists() for cell in new.cells)
    assert {p.name for p in lonely.parent.iterdir()} == {c.folder.name for c in new.cells}


def test_relative_paths_start_where_they_are_typed_else_at_the_project(sweep_file, tmp_path):
    path = sweep_file()
    here = command("plan", path.name, cwd=path.parent)
    assert here.returncode == 0, here.stderr
    shipped = command("plan", "configs/sweeps/beta.yaml", cwd=tmp_path)
    assert shipped.returncode == 0 and f"to do  {PROJECT}/runs/paper" in shipped.stdout, (
        shipped.stderr
    )


def test_retry_here_collects_the_whole_plan(sweep_file, tiny):
    """Also a scoring that was killed is started again."""
    planned = claimed(sweep_file(score=tasks(tiny), train=TINY))
    first, second = planned.cells
    finish(first, tiny)
    run = start(second)
    scoring = score.of_cell(first)
    scoring.scores.mkdir()
    scoring.failure.write_text('{"error": "killed, or its machine died"}')
    shown = command("status", planned.folder).stdout
    assert "1 interrupted" in shown and "not scored: killed, or its machine died" in shown
    assert f"Once that is mended: bash slurm/sweeps.sh retry {planned.folder}" in shown
    done = command("retry", planned.folder, "--executor", "local")
    assert f"again: {first.folder.name}, {run.name}" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rows(planned)) == 3
    assert "nothing to retry" in command("retry", planned.folder, "--executor", "local").stdout


def test_figures_and_records_of_old_do_not_pass_for_new(sweep_file, tiny):
    planned = claimed(sweep_file(score=tasks(tiny, limit=8), train=TINY))
    for cell in planned.cells:
        finish(cell, tiny)
    assert command("launch", planned.folder, "--executor", "local").returncode == 0
    results = planned.folder / "results"
    (results / "reliability_of_old.svg").write_text("<svg>STALE</svg>")
    assert command("collect", planned.folder).returncode == 0
    assert not (results / "reliability_of_old.svg").exists()
    assert "reliability of old" not in (planned.folder / "report.html").read_text()

    cut, empty = (cell.folder / "scores" / "mmlu.jsonl" for cell in planned.cells)
    whole, other = cut.read_text(), len(empty.read_bytes())
    cut.write_text("".join(whole.splitlines(keepends=True)[:3]))
    empty.write_text("")
    done = command("collect", planned.folder)
    assert done.returncode == 1
    wrote = f"scoring wrote {len(whole.encode()):,}: damaged since"
    assert f"{cut}: {cut.stat().st_size:,} bytes, {wrote}" in done.stdout
    assert f"{empty}: 0 bytes, scoring wrote {other:,}: damaged since" in done.stdout
    assert len(rows(planned)) == 1  # the base model
    assert wrote in command("status", planned.folder).stdout
    assert command("retry", planned.folder, "--executor", "local").returncode == 0
    assert cut.read_text() == whole and len(rows(planned)) == 3


def test_a_run_that_dies_with_its_supervisor_is_not_started_for_ever(sweep_file):
    """Each start counts the one before, which nobody else could, and compares before it begins."""
    planned = claimed(sweep_file(grid={}))
    run = start(planned.cells[0], idle_restarts=1)
    assert train(run, idle_restarts=1) is Outcome.FAILED
    manifest = run.manifest()
    assert manifest["state"] == "failed" and len(manifest["attempts"]) == 1
    assert manifest["error"] == "killed 2 times in a row without a new checkpoint"


def test_a_run_killed_for_memory_says_what_to_raise(sweep_file):
    (cell,) = claimed(sweep_file(grid={})).cells
    run = RunDir(cell.folder)
    dead = SimpleNamespace(wait=lambda seconds: -signal.SIGKILL)
    assert train(run, start=lambda program, log: dead, idle_restarts=1) is Outcome.FAILED
    said = (
        "killed (exit -9) 2 times in a row without a new checkpoint; out of memory, perhaps: raise"
    )
    assert run.manifest()["error"].startswith(f"{said} cluster.memory_per_node")


class Slurm:
    """Programs that answer as Slurm does: a queue of what was submitted, minus what ended."""

    def __init__(self, bin: Path) -> None:
        bin.mkdir()
        self.queue, self.ended, self.count = bin / "queue", bin / "ended", bin / "count"
        self.queue.touch()
        self.ended.touch()
        self.write(
            bin / "sbatch",
            f"""[ "$1" = --test-only ] && exit 0
script="${{@: -1}}"
asked() {{ sed -n "s/^#SBATCH --$1=//p" "$script"; }}
name=$(asked job-name) last=$(asked array | sed 's/^0-//; s/%.*//')
if [ -e {bin}/full ] && [[ $name == *$(cat {bin}/full)* ]]; then kill -9 $PPID; exit 1; fi
asked dependency >> {bin}/calls
n=$(($(cat {self.count} 2>/dev/null || echo 0) + 1)); echo $n > {self.count}
for i in $(if [ -n "$last" ]; then seq 0 "$last"; else echo N/A; fi); do
    echo "$n|$i|PENDING|$name|None" >> {self.queue}
done
echo Submitted batch job $n
""",
        )
        self.write(bin / "srun", "exit 1")
        self.write(bin / "squeue", f"cat {self.queue}")
        self.write(bin / "scontrol", "exit 1")
        self.write(bin / "sacct", f"cat {self.ended}")
        self.bin = bin

    def write(self, path: Path, text: str) -> None:
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def end(self, how: str) -> None:
        """All that is queued ends."""
        for line in self.queue.read_text().splitlines():
            job, index, *_ = line.split("|")
            label = job if index == "N/A" else f"{job}_{index}"
            with open(self.ended, "a") as out:
                out.write(f"{label}|{how}\n")
        self.queue.write_text("")

    @property
    def calls(self) -> list[str]:
        return (self.bin / "calls").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return Slurm(tmp_path / "bin")


def test_what_is_lost_again_and_again_is_given_up(sweep_file, slurm, monkeypatch):
    """Its supervisor never gets as far as counting; only the lost run is queued, not the others."""
    planned = launch.plan(sweep_file(max_idle_restarts=2), [])
    launch.start(planned, "slurm")
    first, _ = planned.cells
    submissions = 0
    slurm.end("NODE_FAIL|1:0")
    start(first, "1_0")
    while launch.resubmit(planned):
        submissions += 1
        assert submissions < 5
        queued = [line.split("|")[1:4] for line in slurm.queue.read_text().splitlines()]
        assert [index for index, _, name in queued if ".train-" in name] == ["N/A"]
        slurm.end("NODE_FAIL|1:0")
    assert submissions == 2
    run = RunDir(first.folder)
    assert run.manifest()["error"] == "lost 3 times in a row without a new checkpoint"
    found, _ = status.of_sweep(planned.sweep, planned.cells)
    assert [one.state for one in found] == ["failed", "failed"] and all(o.trouble for o in found)


def test_what_was_cancelled_stays_cancelled(sweep_file, slurm):
    planned = launch.plan(sweep_file(), [])
    launch.start(planned, "slurm")
    slurm.end("CANCELLED by 0|0:15")
    start(planned.cells[0], "1_0")
    found, _ = status.of_sweep(planned.sweep, planned.cells)
    assert [one.state for one in found] == ["cancelled", "cancelled"]
    assert "1_0 CANCELLED by 0, exit 0:15" in found[0].trouble.cause
    assert not launch.resubmit(planned)
    cells, names = launch.dead(planned)  # but a person may ask for them again
    assert cells == planned.cells and len(names) == 2


@pytest.mark.parametrize("tool", ["sacct", "scontrol"])
def test_an_array_cancelled_before_it_began_is_cancelled(sweep_file, slurm, tool):
    """Slurm then has one record for all its elements."""
    planned = launch.plan(sweep_file(), [])
    launch.start(planned, "slurm")
    slurm.queue.write_text("")
    one = "JobId=1 ArrayJobId=1 ArrayTaskId=0-1%2 JobState=CANCELLED ExitCode=0:0"
    said = {"sacct": "1_[0-1%2]|CANCELLED by 0|0:0", "scontrol": one}[tool]
    slurm.write(slurm.bin / "sacct", "exit 1")
    slurm.write(slurm.bin / tool, f"echo '{said}'")
    found, _ = status.of_sweep(planned.sweep, planned.cells)
    assert [one.state for one in found] == ["cancelled", "cancelled"]
    assert found[1].detail.startswith("1_1 CANCELLED")


def test_a_job_that_dies_before_training_says_so_in_status(sweep_file, slurm, capsys):
    planned = launch.plan(sweep_file(), [])
    launch.start(planned, "slurm")
    slurm.end("FAILED|127:0")
    (jobs,) = (planned.folder / "jobs").iterdir()
    for index in (0, 1):
        output = jobs / f"1_{index}_0_log.out"
        output.write_text("slurm_script: line 9: module: command not found\n")
    capsys.readouterr()
    assert main(["status", str(planned.folder)]) == 0
    said = capsys.readouterr().out
    assert "2 failed" in said and "module: command not found" in said
    assert "(and 1 more like it): 1_0 FAILED, exit 127:0, before training" in said
    assert str(jobs / "1_0_0_log.out") in said
    assert "Once that is mended: bash slurm/sweeps.sh retry" in said
    assert main(["logs", str(planned.folder)]) == 0
    assert capsys.readouterr().out.count("module: command not found") == 2


def test_a_queue_that_does_not_answer_makes_nothing_dead(sweep_file, slurm, capsys):
    planned = launch.plan(sweep_file(grid={"seed": [1, 2, 3]}), [])
    launch.start(planned, "slurm")
    waits, broken, _ = planned.cells
    start(waits, "1_0", state="preempted")
    run = RunDir(broken.folder)
    run.write_manifest(run.manifest() | {"state": "failed", "error": "out of ideas"})
    slurm.write(
        slurm.bin / "squeue", "printf 'retrying\\nUnable to contact slurm controller' >&2; exit 1"
    )
    capsys.readouterr()
    assert main(["status", str(planned.folder)]) == 0
    said = capsys.readouterr().out
    assert "3 runs: 1 failed · 2 unknown" in said and "out of ideas" in said
    assert "squeue does not answer: Unable to contact slurm controller" in said
    assert said.rstrip().endswith("what is queued is not known") and "retry" not in said
    with pytest.raises(SweepError, match="squeue does not answer"):
        launch.dead(planned)
    assert not launch.resubmit(planned)  # the collect job goes on to its tables
    assert "controller" in capsys.readouterr().out


def test_what_somebody_stopped_needs_no_mending(sweep_file, slurm, capsys):
    """Neither out of the queue nor by Ctrl-C, whose retry goes on without Slurm.

    One run has the number of salloc's job, of which this sweep knows nothing.
    """
    planned = claimed(sweep_file())
    for cell, job in zip(planned.cells, ("7", None), strict=True):
        run = start(cell, job, state="preempted")
    assert main(["status", str(planned.folder)]) == 0
    said = capsys.readouterr().out
    assert "2 runs: 2 stopped" in said and "asked to stop, saved at step 0" in said
    retry = f"To go on: bash slurm/sweeps.sh retry {planned.folder}"
    assert said.rstrip().endswith(retry)
    # What the launch had not begun yet is not dead, but goes on too.
    run.write_manifest(run.manifest() | {"state": "new", "attempts": []})
    assert main(["status", str(planned.folder)]) == 0
    launching = f"To go on: bash slurm/sweeps.sh launch {planned.folder} --executor local"
    assert capsys.readouterr().out.rstrip().endswith(launching)

    for cell in planned.cells:
        RunDir(cell.folder).write_manifest(run.manifest() | {"state": "new", "attempts": []})
    launch.start(planned, "slurm")
    slurm.end("CANCELLED by 0|0:0")
    for cell, job in zip(planned.cells, ("1_0", "1_1"), strict=True):
        start(cell, job, state="preempted")
    capsys.readouterr()
    assert main(["status", str(planned.folder)]) == 0
    said = capsys.readouterr().out
    assert "2 runs: 2 cancelled" in said and said.rstrip().endswith(retry)


def test_retry_goes_where_the_launch_went(sweep_file, slurm, monkeypatch):
    """After Ctrl-C in salloc, say, whose shell has an sbatch."""
    planned, went = claimed(sweep_file(train=TINY)), []
    monkeypatch.setattr(launch, "start", lambda _, executor, cells: went.append(executor) or 0)
    start(planned.cells[0], "7")
    for typed in ([], ["--executor", "slurm"]):
        assert main(["retry", str(planned.folder), *typed]) == 0
    (planned.folder / "jobs" / "abc").mkdir(parents=True)
    assert main(["retry", str(planned.folder)]) == 0
    assert went == ["local", "slurm", "slurm"]


def test_a_squeue_that_waits_for_ever_is_given_up(sweep_file, slurm, monkeypatch, capsys):
    """So does the real one where SLURM_CONF names no file: for a minute, each time."""
    planned = launch.plan(sweep_file(), [])
    launch.start(planned, "slurm")
    slurm.write(slurm.bin / "squeue", f"echo >> {slurm.bin}/asked; exec sleep 60")
    monkeypatch.setattr(executor, "PATIENCE", 0.5)
    monkeypatch.setenv("SLURM_CONF", "/no/slurm.conf")
    capsys.readouterr()
    assert main(["status", str(planned.folder)]) == 0
    said = capsys.readouterr().out
    assert "2 unknown" in said
    assert "squeue does not answer: nothing for 0.5 s (SLURM_CONF=/no/slurm.conf); try" in said
    assert (slurm.bin / "asked").read_text() == "\n"  # once


LATE = ["afterany:1_0,afterany:1_1", "afterany:2,afterany:1"]


@pytest.mark.parametrize(
    ("separate", "killed", "submitted", "waits"),
    [
        (True, "score", "submitted: late-0=2 collect=3", LATE),
        (False, "collect", "submitted: collect=2", ["afterany:1"]),
    ],
)
def test_a_submission_killed_halfway_is_completed(
    sweep_file, tiny, slurm, separate, killed, submitted, waits
):
    """The trainings are queued, the scores or the collect job behind them are not."""
    path = sweep_file(score=tasks(tiny) | {"base": False, "separate": separate})
    (slurm.bin / "full").write_text(killed)
    done = command("launch", path, "--executor", "slurm")
    assert done.returncode == -signal.SIGKILL, done.stderr
    (slurm.bin / "full").unlink()
    again = command("launch", path, "--executor", "slurm")
    assert submitted in again.stdout, again.stdout + again.stderr
    assert slurm.calls[-len(waits) :] == waits
    said = command("launch", path, "--executor", "slurm").stdout
    tables = f"bash slurm/sweeps.sh collect {launch.plan(path, []).folder}"
    assert f"nothing to submit: every run is done or queued; tables: {tables}\n" in said


def test_the_collect_job_asks_for_no_more_than_scoring(sweep_file, tmp_path):
    profile = tmp_path / "short.yaml"
    profile.write_text("time: '20:00'\nscore_time: '10:00'\nmemory_per_node: 64G\n")
    shown = command("launch", sweep_file(cluster=str(profile)), "--dry-run").stdout
    collect = shown.split("### collect", 1)[1]
    assert "#SBATCH --time=10\n" in collect and "#SBATCH --mem=4G\n" in collect


def test_the_collect_job_is_shown_to_slurm_too(sweep_file, tmp_path):
    tools = say(tmp_path / "bin", squeue="", scontrol="")
    (tmp_path / "bin" / "sbatch").write_text(
        "#!/bin/sh\nif grep -q 'job-name=tiny.collect'; then echo 'limit' >&2; exit 1; fi\n"
    )
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    done = command("preflight", sweep_file(), "--executor", "slurm", env=tools)
    assert "sbatch refuses the collect job: limit" in done.stderr


def test_the_line_to_watch_with_works_without_an_environment(sweep_file, slurm, tmp_path):
    done = command("launch", sweep_file(), "--executor", "slurm", cwd=tmp_path)
    (watch,) = [line for line in done.stdout.splitlines() if line.startswith("watch: ")]
    bare = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    shown = subprocess.run(
        ["bash", "-c", watch.removeprefix("watch: ")],
        text=True, capture_output=True, check=False, env=bare, cwd=tmp_path,
    )  # fmt: skip
    assert "tiny: 2 runs: 2 queued" in shown.stdout, shown.stderr


def test_a_record_of_another_request_is_no_damage(sweep_file, tiny):
    """Other questions are asked anew, which is nothing to name."""
    planned = claimed(sweep_file(grid={}, score=tasks(tiny)))
    subject = score.of_cell(planned.cells[0])
    subject.scores.mkdir()
    subject.records(planned.sweep.score.tasks[0]).write_text("{}\n")
    (subject.scores / "mmlu.request.json").write_text(json.dumps({"limit": 1, "bytes": 900}))
    task = planned.sweep.score.tasks[0]
    assert score.damage(subject, task, planned.sweep.score) is None
    assert not score.scored(subject, task, planned.sweep.score)
