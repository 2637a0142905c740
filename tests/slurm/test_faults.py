"""Full disks, folders that cannot be written, killed collectors, absent networks."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from real import PROJECT, command, prepare

from sweeps import launch

pytestmark = pytest.mark.timeout(1200)  # whole sweeps, on a machine that others keep busy
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder))
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this machine does not let us mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


@root
@pytest.mark.slow
def test_a_full_disk_is_named_and_the_same_command_continues(sweep_file, disk):
    run = prepare(sweep_file(grid={}, train={"checkpointing_steps": 4}), f"output_root={disk}")
    full = command("train", run.path)
    assert full.returncode in (1, 2)
    assert "Traceback" not in full.stderr
    said = full.stderr + run.manifest().get("error", "")
    assert "No space left" in said or "is full" in said, said
    assert "make room" in said and str(disk) in said, said
    assert not run.done and not run.model.exists()
    mount("-o", "remount,size=50M", str(disk))
    assert command("train", run.path).returncode == 0
    assert run.done


@root
@pytest.mark.slow
def test_a_read_only_folder_is_named_and_the_same_command_continues(sweep_file, disk):
    mount("-o", "remount,size=50M", str(disk))
    path = sweep_file(grid={}, train={"max_train_steps": 2})
    run = prepare(path, f"output_root={disk}")
    mount("-o", "remount,ro", str(disk))
    for refused in (
        command("train", run.path),
        command("launch", path, "--executor", "local", f"output_root={disk}"),
    ):
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert str(disk) in refused.stderr
        assert "Traceback" not in refused.stderr
    mount("-o", "remount,rw", str(disk))
    assert command("train", run.path).returncode == 0


def test_too_little_space_is_refused_before_anything_starts(sweep_file, disk):
    refused = command("launch", sweep_file(), "--executor", "local", f"output_root={disk}")
    assert refused.returncode == 2
    assert "MiB free" in refused.stderr


# `python -m sweeps`, killed when it is about to open or rename a file below a folder for the nth
# time. Locks do not count: whoever waits for one tries to open it again and again.
DIES = """
import os, runpy, signal, sys
left, folder = int(sys.argv.pop(1)), sys.argv.pop(1)
def hook(event, words):
    global left
    writes = event == "open" and isinstance(words[2], int) and words[2] & (os.O_WRONLY | os.O_RDWR)
    path = str(words[0]) if writes or event == "os.rename" else ""
    if path.startswith(folder) and ".lock" not in path:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
runpy.run_module("sweeps", run_name="__main__")
"""


@pytest.mark.slow
def test_a_killed_collector_leaves_whole_files_and_can_be_repeated(sweep_file, tiny, tmp_path):
    tasks = [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}]
    path = sweep_file(train={"max_train_steps": 2}, workers=2, score={"tasks": tasks})
    assert command("launch", path, "--executor", "local").returncode == 0
    table = tmp_path / "out" / "sweeps" / "tiny" / "results" / "table.csv"
    folder = table.parents[1]
    report = folder / "report.html"
    whole = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    for writes in (1, 2, 3, 5, 8, 13, 21):
        dies = [sys.executable, "-c", DIES, str(writes), str(folder), "collect", str(path)]
        assert subprocess.run(dies, capture_output=True, check=False).returncode == -signal.SIGKILL
        # The same records give the same files, so each is either the old or the new one.
        assert [p for p, content in whole.items() if p.read_bytes() != content] == []
    done = command("collect", path)
    assert done.returncode == 0, done.stderr
    assert 'src="http' not in report.read_text()

    victim = launch.plan(path, []).cells[1]
    (victim.folder / "scores" / "mmlu.jsonl").unlink()
    gaps = command("collect", path)
    assert gaps.returncode == 1
    assert f"gap: {victim.config.name} · mmlu: not scored" in gaps.stdout
    assert "not scored" in report.read_text()


@root
@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_the_whole_chain_runs_without_a_network(sweep_file, tiny, tmp_path, executor):
    """train → score → collect in a network namespace that has no way out.

    Here without even a loopback; a Slurm of its own needs that one, to reach itself.
    """
    unshare = ("unshare", "--net")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine has no network namespaces")
    (tmp_path / "mine.yaml").write_text("gpus_per_process: 0\ncpus_per_process: 1\noffline: true\n")
    path = sweep_file(
        grid={},
        train={"max_train_steps": 2},
        score={"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}]},
        cluster=str(tmp_path / "mine.yaml"),
    )
    if executor == "local":
        done = command("launch", path, "--executor", "local", prefix=unshare)
        assert "report: " in done.stdout
    else:
        if not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
            pytest.skip("needs: apt-get install slurm-wlm munge")
        inside = f"""
            set -e
            ! python3 -c 'import socket; socket.create_connection(("1.1.1.1", 53), 3)' 2>/dev/null
            ip link set lo up
            ip addr add 192.0.2.1/32 dev lo  # Slurm looks for an address that is no loopback's
            cluster="{Path(__file__).with_name("cluster.sh")}" SLURM_CONF="{tmp_path}/s/slurm.conf"
            export SLURM_CONF
            "$cluster" start "{tmp_path}/s"
            trap '"$cluster" stop "{tmp_path}/s"' EXIT
            "{sys.executable}" -m sweeps launch "{path}" --executor slurm
            until left=$(squeue --noheader) && [[ -z $left ]]; do sleep 0.5; done
        """
        done = subprocess.run(
            [*unshare, "bash", "-c", inside],
            text=True, capture_output=True, check=False, timeout=900,
        )  # fmt: skip
        assert "submitted: train-0=" in done.stdout
        (job,) = (tmp_path / "out").rglob("collect.id")
        said = job.with_name(f"{job.read_text().strip()}_0_log.out")
        assert "report: " in said.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "out" / "sweeps" / "tiny"
    table = (results / "results" / "table.md").read_text().split("\n\n")[0]
    assert len(table.splitlines()) == 4  # two of head, the base model, the run
    assert (results / "report.html").exists()


def test_prefetch_fetches_once_and_preflight_names_what_is_missing(sweep_file, tiny, tmp_path):
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tiny / "mmlu", "data")
    archive = {
        "url": f"file://{tmp_path}/data.tar",
        "to": str(tmp_path / "fetched" / "mmlu"),
        "strip": 1,
        "sha256": hashlib.sha256((tmp_path / "data.tar").read_bytes()).hexdigest(),
    }
    path = sweep_file(
        prefetch={"archives": [archive]},
        score={"tasks": [{"task": "mmlu", "data": archive["to"]}]},
    )
    refused = command("launch", path, "--executor", "local")
    assert refused.returncode == 2
    assert refused.stderr.count("data.tar") == 1 and refused.stderr.count(archive["to"]) == 1
    assert f"where there is internet: bash slurm/prefetch.sh --config {path}\n" in refused.stderr
    # A sweep that an override points elsewhere does not need what it no longer reads.
    elsewhere = f"score.tasks.0.data={tiny / 'mmlu'}"
    assert (
        "nothing is missing" in command("preflight", path, "--executor", "local", elsewhere).stdout
    )
    done = subprocess.run(
        ["bash", PROJECT / "slurm" / "prefetch.sh", "--config", path],
        text=True, capture_output=True, check=False, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fetched" / "mmlu" / "test" / "shapes_test.csv").exists()
    assert command("prefetch", path).stdout.count("here: ") == 1
    assert command("preflight", path, "--executor", "local").returncode == 0

    wrong = archive | {"to": str(tmp_path / "other"), "sha256": "0" * 64}
    path = sweep_file(
        prefetch={"archives": [wrong]},
        score={"tasks": [{"task": "mmlu", "data": wrong["to"]}]},
    )
    failed = command("prefetch", path)
    assert failed.returncode == 1
    assert "sha256" in failed.stderr and not (tmp_path / "other").exists()
