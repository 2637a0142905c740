"""Every script that users type: usage, paths, dry runs, by bash and by sbatch on a real Slurm."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from real import MARKS, PROJECT, command, empty, logs, runs_of, wait_for

DRY = ("sweep_beta", "sweep_lr", "sweep_grid", "prefetch")
SCRIPTS = (*DRY, "score", "collect")


def typed(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """`bash slurm/<script>.sh …`, from the project unless `cwd` says otherwise."""
    options = {"cwd": PROJECT, "env": os.environ | {"PYTHON": sys.executable}} | options
    return subprocess.run(
        ["bash", str(PROJECT / "slurm" / f"{script}.sh"), *map(str, arguments)],
        text=True, capture_output=True, check=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_head_of_the_script(script, tmp_path):
    done = typed(script, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for part in (f"sbatch slurm/{script}.sh", f"bash   slurm/{script}.sh"):
        assert part in done.stdout
    for option in ("--config", "--cluster", "key=value"):
        assert option in done.stdout
    assert ("--dry-run" in done.stdout) == (script in DRY)
    assert "spool" not in done.stdout


@pytest.mark.parametrize("script", DRY)
def test_a_dry_run_writes_nothing(script, tmp_path):
    done = typed(script, "--dry-run", f"output_root={tmp_path}/out", "throttle=3")
    assert done.returncode == 0, done.stderr
    said = {"prefetch": "model meta-llama/Llama-3.2-1B"}
    assert said.get(script, "to do") in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_grid_is_four_learning_rates_by_six_factors(tmp_path):
    shown = typed("sweep_grid", "--dry-run").stdout
    assert "#SBATCH --array=0-23%8" in shown
    assert "24 runs, 0 done, 24 to do" in shown


def test_nothing_trained_is_nothing_to_collect(sweep_file, tmp_path):
    path = sweep_file()
    done = command("collect", path)
    assert done.returncode == 1
    assert "nothing to collect: no run has trained yet: 0 of 2" in done.stdout
    assert not (tmp_path / "out").exists()
    assert not any(run.path.exists() for run in runs_of(path))


def test_paths_start_where_they_are_typed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "mine.yaml").write_text("account: def-mine\ngpus_per_process: 0\n")
    shipped = (PROJECT / "configs/sweeps/beta.yaml").read_text()
    (tmp_path / "there" / "own.yaml").write_text(shipped.replace("name: beta", "name: own"))
    for cluster in (("--cluster", "../mine.yaml"), ("--cluster=../mine.yaml",)):
        done = typed("sweep_beta", "--config", "own.yaml", *cluster, "--dry-run",
                     cwd=tmp_path / "there")  # fmt: skip
        assert "#SBATCH --account=def-mine" in done.stdout, done.stderr
        assert "--job-name=own.train-0" in done.stdout
    # What is not there is the project's.
    done = typed("sweep_beta", "--cluster=configs/cluster/alliance.yaml", "--dry-run", cwd=tmp_path)
    assert "#SBATCH --account=def-yourpi" in done.stdout
    assert "--cluster: expected one argument" in typed("sweep_beta", "--cluster").stderr


def test_what_scripts_refuse_names_what_to_type(tmp_path):
    spool = shutil.copy(
        PROJECT / "slurm" / "sweeps.sh", tmp_path / "slurm_script"
    )  # as sbatch does
    done = subprocess.run(["bash", spool, "status"], text=True, capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr == "error: not by sbatch: bash slurm/sweeps.sh …\n"
    line = 'project=.. && source ../slurm/run.sh launch ""'  # Slurm keeps a relative Command=
    done = subprocess.run(
        ["bash", "-c", line], cwd=PROJECT / "slurm", env=os.environ | {"PYTHON": "false"},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    made = (PROJECT / ".venv" / "bin" / "python").exists()
    mend = f"PYTHON={PROJECT}/.venv/bin/python in front" if made else f"'make setup' in {PROJECT}"
    assert done.returncode == 2 and mend in done.stderr


def test_head_may_stop_reading():
    line = f"bash {PROJECT}/slurm/sweep_grid.sh --dry-run | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        text=True, capture_output=True, check=False, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def interpreters(tmp_path) -> dict[str, str]:
    """Fake environments, each with a python that says where it lies."""
    made = {}
    for name in ("active", "conda"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "{name}: $PYTHON"\n')
        python.chmod(0o755)
        made[name] = str(tmp_path / name)
    return made


def test_an_active_environment_wins_and_python_overrides(tmp_path):
    made = interpreters(tmp_path)
    names = ("PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
    bare = {key: value for key, value in os.environ.items() if key not in names}
    venv, conda = {"VIRTUAL_ENV": made["active"]}, {"CONDA_PREFIX": made["conda"]}
    for variables, expected in (
        (venv, "active"),
        (conda | {"CONDA_DEFAULT_ENV": "mine"}, "conda"),
        (venv | {"PYTHON": f"{made['conda']}/bin/python"}, "conda"),
    ):
        done = typed("collect", env=bare | variables)
        assert done.stdout.startswith(f"{expected}: "), done.stdout + done.stderr
    # an environment for something else, while this project's is there
    (tmp_path / "active" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "slurm", project / "slurm", ignore=shutil.ignore_patterns("*.py*"))
    venv_python = project / ".venv" / "bin" / "python"
    venv_python.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "conda" / "bin" / "python", venv_python)
    done = subprocess.run(["bash", project / "slurm" / "collect.sh"], env=bare | venv,
                          text=True, capture_output=True, check=False)  # fmt: skip
    said = f"error: {made['active']}/bin/python lacks this project's packages; "
    assert done.stderr.startswith(f"{said}PYTHON={venv_python} in front of the command"), done
    # conda's base environment is active for everybody and meant by nobody
    done = typed("collect", env=bare | conda | {"CONDA_DEFAULT_ENV": "base"})
    assert "conda: " not in done.stdout


def tiny_grid(tiny, profile: str, output) -> list[str]:
    """configs/sweeps/grid.yaml with everything small, as overrides."""
    test = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    return [
        f"train.model_name_or_path={tiny / 'model'}",
        f"train.train_file={tiny / 'chat.jsonl'}",
        "train.max_train_steps=2",
        "train.gradient_accumulation_steps=1",
        "train.chat_template_name=null",
        "train.gradient_checkpointing=false",
        "world.mixed_precision=no",
        "grid.learning_rate=[1e-3, 1e-2]",
        "grid.label_smoothing=[0.1]",
        f"score.tasks={json.dumps([test, test | {'name': 'val', 'split': 'val'}])}",
        "score.select_on=val",
        f"cluster={profile}",
        f"output_root={output}",
    ]


class TestOnSlurm:
    """The stages one after the other, each by its own script."""

    pytestmark = MARKS

    def test_each_stage_by_its_own_script(self, cluster, profile, tiny, tmp_path):
        output = tmp_path / "out"
        overrides = tiny_grid(tiny, profile, output)

        def sbatch(script: str, code: int = 0) -> str:
            out = tmp_path / f"{script}.out"
            done = subprocess.run(
                ["sbatch", "--wait", "--mem=500M", f"--output={out}", f"slurm/{script}.sh",
                 *overrides],
                cwd=PROJECT, text=True, capture_output=True, check=False,
            )  # fmt: skip
            assert done.returncode == code, out.read_text() + done.stderr
            wait_for(empty)
            return out.read_text()

        assert "nothing to fetch" in sbatch("prefetch")
        # Train only: the sweep without its scores.
        overrides.append("score=null")
        assert "submitted: train-0=" in sbatch("sweep_grid")
        overrides.pop()
        text = sbatch("collect", 1)
        assert text.count("not scored") == 6, text  # (2 runs + the base model) × 2 tasks

        text = sbatch("score")
        assert "submitted: ready-0=" in text and "train" not in text.split("watch:")[0]
        assert "nothing to submit" in typed("score", *overrides).stdout
        done = typed("collect", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
        folder = output / "sweeps" / "grid"
        assert (folder / "report.html").exists()
        best = (folder / "best_learning_rates.csv").read_text().splitlines()
        assert len(best) == 2 and "accuracy on val" in best[0]
        assert "nothing to submit" in sbatch("sweep_grid")
