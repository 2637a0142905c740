"""What sbatch is handed: golden files, what it exports, the scripts that users type.

To accept changed scripts after reading the difference: `python tests/slurm/test_scripts.py`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real import PROJECT, command

from sweeps.launch import sbatch, slurm
from sweeps.launch.sbatch import Job, JobKind
from sweeps.runs import slurm_queue
from sweeps.runs.grid import plan_sweep
from sweeps.runs.schema import Cluster, load_cluster

GOLDEN = Path(__file__).with_name("golden")
CASES = {
    "generic": [],
    "alliance": ["world.processes_per_node=4"],
    "cloud": ["world.processes_per_node=8"],
}


def render(case: str) -> str:
    """All scripts of a sweep of 24 runs under a profile, with this machine's paths named."""
    file = f"configs/cluster/{case}.yaml"
    os.chdir(PROJECT)
    asked = [f"cluster={file}", "output_root=/project/runs", "score.base=false", *CASES[case]]
    planned = plan_sweep(PROJECT / "configs" / "sweeps" / "grid.yaml", asked)
    cluster, code = load_cluster(file), planned.folder / "code" / "5eed5eed"
    text = ""
    for job in slurm.design(planned, []):
        place = planned.folder / "jobs" / f"{job.kind.value}1"
        text += sbatch.script(planned.sweep, cluster, job, place, code, ["7", "8"])
    return text.replace(sys.executable, "PYTHON").replace(str(PROJECT), "/project")


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_are_the_golden_ones_and_bash_can_read_them(case, monkeypatch):
    monkeypatch.chdir(PROJECT)
    assert (text := render(case)) == (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_dry_run_needs_no_slurm_and_writes_nothing(toy_file, tmp_path):
    path = toy_file(cluster=str(PROJECT / "configs" / "cluster" / "alliance.yaml"))
    done = command("launch", path, "--dry-run", env=os.environ | {"PATH": "/nonexistent"})
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --array=0-1%2" in done.stdout and "--account=def-yourpi" in done.stdout
    assert "--dependency=afterany:JOB0\n" in done.stdout
    assert "2 runs: 2 to do\n" in done.stdout
    assert not (tmp_path / "out").exists()


def test_what_is_missing(toy_file):
    """One process goes on to score; several score apart, as base models and what is trained do."""
    tasks = {"tasks": [{"task": "mmlu", "data": "x"}]}
    path = toy_file(grid={"seed": [1, 2, 3]}, score=tasks)
    one, several = plan_sweep(path, []), plan_sweep(path, ["world.processes_per_node=2"])
    for planned in (one, several):
        planned.create()
        planned.runs[0].model.mkdir()
    train, score, collect = slurm.design(one, [])
    assert train.runs == tuple(run.name for run in one.runs[1:])
    assert score.runs == (one.baselines[0].name, one.runs[0].name)
    assert (score.kind, collect) == (JobKind.SCORE, Job(JobKind.COLLECT))
    busy = [slurm_queue.QueuedJob(f"9_{n}", "", "", name) for n, name in enumerate(train.runs)]
    assert slurm.design(one, busy) == [score, collect]
    busy += [slurm_queue.QueuedJob("8_0", "", "", name) for name in score.runs]
    assert slurm.design(one, busy) == [collect]
    train, apart, score, collect = slurm.design(several, [])
    assert apart == Job(JobKind.SCORE, train.runs, after_training=True)
    assert (len(train.runs), len(score.runs)) == (2, 2) and not score.after_training


def test_what_another_user_of_the_folder_has_queued_is_queued(tmp_path, monkeypatch):
    (names := tmp_path / "jobs" / "abc123" / "names").parent.mkdir(parents=True)
    names.write_text("one\n")
    if not os.geteuid():  # else his own
        os.chown(names, 12345, -1)
    asked, said = names.stat().st_uid, "9|0|R|x.train.abc123|None"
    (squeue := tmp_path / "squeue").write_text(
        f"#!/bin/sh\ncase $* in *--user=*{asked}*) echo '{said}'; esac\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_queue.queued_jobs(tmp_path) == [slurm_queue.QueuedJob("9_0", "R", "None", "one")]


def test_set_up_lines_fail_aloud_and_what_they_export_holds(tmp_path):
    def setup(**keys) -> list[str]:
        return sbatch.setup(Cluster(**keys), tmp_path / "code")

    def run(*lines: str) -> subprocess.CompletedProcess:
        return subprocess.run(["bash"], input="\n".join(lines), text=True, capture_output=True)

    module = "module() { echo 'Lmod: these are unknown: python/9' >&2; return 1; }"
    done = run(module, *setup(modules=("python/9",)))
    assert (done.returncode, done.stderr) == (1, "Lmod: these are unknown: python/9\n")
    assert run(*setup(setup=("false", "true")), "echo on").stdout == ""
    done = run(*setup(setup=("export PYTHONPATH=/mine",)), 'echo "$PYTHONPATH"')
    assert done.stdout == f"{tmp_path}/code:/mine\n"


def test_a_profiles_home_is_the_submitting_shells(tmp_path, monkeypatch):
    """A job's shell would read `"~/hf"` as it stands."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.yaml").write_text("cache: ~/hf\nsecrets_file: ~/.tokens\n")
    lines = sbatch.setup(load_cluster(str(tmp_path / "mine.yaml")), tmp_path)
    assert 'export HF_HOME="/home/me/hf"' in lines
    assert not any("~" in line for line in lines)


def test_the_scripts_take_files_from_where_they_are_typed(tmp_path):
    def said(script: str, *words: str, cwd: Path) -> str:
        call = ["bash", PROJECT / "slurm" / f"{script}.sh", *words, "--dry-run"]
        env = os.environ | {"PYTHON": sys.executable}
        done = subprocess.run(call, text=True, capture_output=True, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (there := tmp_path / "there").mkdir()
    (tmp_path / "mine.yaml").write_text("account: def-mine\ngpus_per_process: 0\n")
    shipped = (PROJECT / "configs/sweeps/beta.yaml").read_text()
    (there / "own.yaml").write_text(shipped.replace("name: beta", "name: own"))
    for cluster in (("--cluster", "../mine.yaml"), ("--cluster=../mine.yaml",)):
        own = said("sweep_beta", "--config", "own.yaml", *cluster, "throttle=3", cwd=there)
        assert "#SBATCH --account=def-mine" in own and "--job-name=own.train" in own
        assert "--array=0-5%3" in own
    whole = said("sweep_grid", cwd=tmp_path)
    assert "24 runs and 1 base model to score: 25 to do" in whole
    assert f"bash {PROJECT}/slurm/sweeps.sh prefetch configs/sweeps/grid.yaml" in whole


def test_an_environment_that_cannot_is_named_with_what_to_type(tmp_path):
    names = ("PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
    bare = {key: value for key, value in os.environ.items() if key not in names}
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "slurm", project / "slurm", ignore=shutil.ignore_patterns("*.py*"))
    for name, text in (("active", "exit 1"), ("project/.venv", "echo venv: $3")):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && [ {name} != active ] && exit 0\n{text}\n')
        python.chmod(0o755)
    call = ["bash", project / "slurm" / "sweep_lr.sh"]
    active = bare | {"VIRTUAL_ENV": str(tmp_path / "active")}
    done = subprocess.run(call, env=active, text=True, capture_output=True)
    mend = f"PYTHON={project}/.venv/bin/python in front of the command"
    assert done.returncode == 2 and done.stderr.endswith(f"lacks this project's packages; {mend}\n")
    conda = bare | {"CONDA_PREFIX": str(tmp_path / "active"), "CONDA_DEFAULT_ENV": "base"}
    done = subprocess.run(call, env=conda, text=True, capture_output=True)
    assert done.stdout == "venv: launch\n", done.stderr  # base is active for all, meant by nobody


if __name__ == "__main__":
    for name in CASES:
        (GOLDEN / f"{name}.txt").write_text(render(name), encoding="utf-8")
