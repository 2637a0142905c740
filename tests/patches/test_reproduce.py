"""reproduce.md as it is typed: from an unpatched clone to a table, in small, on a real Slurm."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from sweep_tools import CLUSTER, PROJECT

PAGE = (PROJECT / "reproduce.md").read_text(encoding="utf-8")


def typed(heading: str) -> list[str]:
    """The commands of a section."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    return [line[4:] for line in section.splitlines() if re.match(r" {4}[a-z.$]", line)]


@pytest.fixture
def shell(today, pristine, tmp_path):
    """One shell after another in a fresh clone of this project, with its .venv; its output."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("needs root, and: apt-get install slurm-wlm munge")
    folder = tmp_path / "project"
    files = subprocess.run(
        ["git", "-C", PROJECT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, files.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (PROJECT / name).is_file():
            shutil.copy2(PROJECT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    slurm = tmp_path / "slurm"
    told = os.environ | {"SLURM_CONF": str(slurm / "slurm.conf"), "PYTHON": sys.executable}
    told |= {"OMP_NUM_THREADS": "1", "OPEN_INSTRUCT_DIR": str(folder / "open-instruct")}
    told |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{pristine}.insteadOf"}
    told |= {"GIT_CONFIG_VALUE_0": "https://github.com/allenai/open-instruct"}
    paths = (str(folder / part) for part in ("kernel", "patches", "slurm", "eval"))
    told["PYTHONPATH"] = os.pathsep.join(paths)

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder, env=told, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
        return done.stdout

    subprocess.run([CLUSTER, "start", slurm], check=True)
    yield run
    subprocess.run([CLUSTER, "stop", slurm], check=True)


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(2400)
def test_the_small_scale_ends_in_the_shape_of_table_1(shell):
    setup = typed("Set up, on a login node with internet")
    assert setup[0] == "make setup" and "pip install -r patches/requirements.txt" in setup[1]
    for command in setup[2:-1]:  # the last one is `export`
        shell(command)
    make, profile, launch, status, collect = typed("In small")
    shell(make)
    shell(profile)
    assert "6 runs and 1 base model to score: 7 to do" in shell(status)
    assert "submitted job " in shell(launch)
    end = time.monotonic() + 2000
    while shell("squeue --noheader").strip():
        assert time.monotonic() < end, shell(status)
        time.sleep(2)
    assert shell(status).count("done") >= 6
    lines = shell(collect).splitlines()
    best = lines[lines.index("each at its best learning rate on mmlu-val:") + 1 :]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in best if "|" in line][:9]
    heads, _, *rows = table
    assert heads[:4] == ["SFT data", "Model", "β", "Seeds"]
    columns = ("Acc ↑", "ECE ↓", "Hendrycks' RMS ↓")
    tasks = ("mmlu", "hellaswag", "arc_easy")
    assert heads[4:13] == [f"{task}: {column}" for task in tasks for column in columns]
    files = ("alpaca.jsonl", "openhermes.jsonl", "tulu3.jsonl")
    assert [row[:3] for row in rows] == [
        ["–", "model", "base"],
        *([file, "model", beta] for file in files for beta in ("0", "0.1")),
    ]
    assert all(re.match(r"\**0\.\d{3}", cell) for row in rows for cell in row[4:13])
