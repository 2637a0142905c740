"""Generated sbatch scripts: golden files, what they export, and that no Slurm is needed for them.

To accept changed scripts after reading the difference: `python tests/slurm/test_scripts.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real import PROJECT, command

from sweeps.cluster import Cluster, load_cluster
from sweeps.config import Sweep, World, read_yaml
from sweeps.executors import scripts
from sweeps.executors.scripts import Places
from sweeps.files import SweepError

GOLDEN = Path(__file__).with_name("golden")
CASES = {
    "generic": World(),
    "alliance": World(processes_per_node=4, mixed_precision="bf16"),
    "cloud": World(nodes=2, processes_per_node=8, deepspeed="configs/deepspeed/zero3.json"),
    "alliance-2-nodes": World(nodes=2, processes_per_node=4, mixed_precision="bf16"),
}


def render(case: str) -> str:
    """All scripts of a sweep of 24 runs under a profile, with this machine's paths named."""
    file = f"configs/cluster/{case.split('-')[0]}.yaml"
    profile = load_cluster(str(PROJECT / file))
    sweep = Sweep(
        name="grid", output_root="runs", train={}, throttle=8, world=CASES[case], cluster=file
    )
    places = Places(Path("/project"), Path("/project/runs/sweeps/grid/jobs/a1b2c3"))
    text = scripts.text(sweep, profile, places, "train", "train-0", 24)
    if "-" not in case:  # machines matter to the training alone
        text += scripts.text(sweep, profile, places, "score", "ready-0", 24)
        text += scripts.text(sweep, profile, places, "collect", "collect", dependency="afterany:7")
    return text.replace(sys.executable, "PYTHON").replace(str(PROJECT), "/project")


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_are_the_golden_ones(case):
    assert render(case) == (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_bash_can_read_them(case):
    done = subprocess.run(["bash", "-n"], input=render(case), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_generic_documents_every_key():
    path = PROJECT / "configs" / "cluster" / "generic.yaml"
    assert set(read_yaml(path)) == set(Cluster.model_fields)
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            assert " # " in line, f"{line}: a comment was expected"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("partitoin", "gpu", "did you mean 'partition'?"),
        (
            "time",
            "tomorrow",
            'text of the form ^(\\d+-)?\\d{1,2}(:\\d{2}){0,2}$, such as "0-12:00"',
        ),
        ("time", 12, 'found 12, expected text in quotes, such as "0-12:00"'),
        ("time", "0-00:05", "more than signal_seconds (300):"),  # it would save, and leave, at once
        ("score_time", "5:00", "more than signal_seconds (300):"),
        ("memory_per_node", "lots", "text of the form"),
        ("cpus_per_process", 0, "greater than or equal to 1"),
        ("extra", "[-C gpu]", "text of the form"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path, key, value, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(f"{key}: {value}\n")
    with pytest.raises(SweepError) as caught:
        load_cluster(str(path))
    assert str(path) in str(caught.value)
    assert key in str(caught.value)
    assert expected in str(caught.value)


def test_a_profiles_home_is_the_submitting_shells(tmp_path, monkeypatch):
    """A job's shell would read `"~/hf"` as it stands."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.yaml").write_text(
        "cache: ~/hf\nsecrets_file: ~/.tokens\nscratch: $TMP/x\nenvironment: {A: ~/a}\n"
    )
    cluster = load_cluster(str(tmp_path / "mine.yaml"))
    places = Places(Path("/project"), Path("/jobs"))
    sweep = Sweep(name="grid", output_root="runs", train={})
    script = scripts.text(sweep, cluster, places, "train", "train-0")
    assert "~" not in script and 'export TMPDIR="$TMP/x"' in script
    for line in ('export HF_HOME="/home/me/hf"', 'export A="/home/me/a"', "/home/me/.tokens"):
        assert line in script


def test_a_dry_run_needs_no_slurm_and_writes_nothing(sweep_file, tmp_path):
    path = sweep_file(cluster=str(PROJECT / "configs" / "cluster" / "alliance.yaml"))
    nowhere = os.environ | {"PATH": "/nonexistent"}
    done = command("launch", path, "--dry-run", env=nowhere, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --array=0-1" in done.stdout
    assert "#SBATCH --account=def-yourpi" in done.stdout
    assert "--dependency=afterany:TRAIN_0\n" in done.stdout
    assert "2 runs, 0 done, 2 to do" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_module_that_does_not_load_is_named_with_its_key(tmp_path):
    """The job's last line is what `status` shows."""
    sweep = Sweep(name="grid", output_root="runs", train={}, cluster="my profile.yaml")
    places = Places(tmp_path, tmp_path / "jobs")
    text = scripts.text(sweep, Cluster(modules=("python/9",)), places, "train", "train-0")
    module = "module() { echo 'Lmod: these are unknown: python/9' >&2; return 1; }\n"
    done = subprocess.run(
        ["bash"], input=module + text, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Lmod: these are unknown: python/9",
        "error: module load python/9 failed (modules: in my profile.yaml)",
    ]


def test_a_large_sweep_becomes_several_arrays(sweep_file, tmp_path):
    profile = tmp_path / "small.yaml"
    profile.write_text("array_limit: 3\n")
    path = sweep_file(grid={"seed": list(range(7))}, cluster=str(profile))
    done = command("launch", path, "--dry-run", cwd=tmp_path)
    arrays = [line for line in done.stdout.splitlines() if line.startswith("#SBATCH --array")]
    assert arrays == ["#SBATCH --array=0-2%3"] * 2  # the seventh run is a job by itself


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        (GOLDEN / f"{name}.txt").write_text(render(name), encoding="utf-8")
