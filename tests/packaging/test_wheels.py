"""The four wheels, used from an empty folder: no checkout, no editable install."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernel", "eval", "patches", "slurm")
PACKAGES = ("smoothce", "calibeval", "smoothed_open_instruct", "sweeps")


def run(*command: object, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a program in `folder` with none of this checkout on its path."""
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, text=True, capture_output=True
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Each folder's wheel, built from a copy of what git would publish."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("wheels")
    found = {}
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(PROJECT / folder, source / folder, ignore=ignored)
        options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", built / folder)
        made = run(sys.executable, "-m", "pip", "wheel", *options, source / folder, folder=source)
        assert made.returncode == 0, made.stderr
        (found[folder],) = (built / folder).glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory) -> Path:
    """The Python of a new environment with the four wheels and what they depend on.

    The dependencies are those of the environment that runs the tests: its folder is on the path,
    its `.pth` files, by which the checkout is installed there, are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    executable = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    install = ("-m", "pip", "--python", executable, "install", "--no-deps", "--quiet")
    done = run(sys.executable, *install, *wheels.values(), folder=folder)
    assert done.returncode == 0, done.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return executable


def metadata(wheel: Path) -> tuple[Parser, list[str]]:
    """A wheel's METADATA, and the names of the files in it."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode()), names


def test_the_loss_needs_torch_alone_and_brings_no_command(wheels):
    fields, names = metadata(wheels["kernel"])
    assert fields.get_all("Requires-Dist") == ["torch>=2.4"]
    assert not [name for name in names if name.endswith("entry_points.txt")]


def test_all_have_one_version_types_and_a_license(wheels):
    versions = set()
    for folder, package in zip(FOLDERS, PACKAGES, strict=True):
        fields, names = metadata(wheels[folder])
        versions.add(fields["Version"])
        assert f"{package}/py.typed" in names
        assert [name for name in names if name.endswith("licenses/LICENSE")]
        assert not [name for name in names if ".jsonl" in name or name.startswith("tests")]
    assert len(versions) == 1


def test_each_is_imported_from_its_wheel(python, tmp_path):
    for package in PACKAGES:
        code = f"import {package}; print({package}.__file__, {package}.__version__)"
        done = run(python, "-c", code, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        file, version = done.stdout.split()
        assert Path(file).is_relative_to(python.parents[1]) and version


def test_the_loss_alone_computes(python, tmp_path):
    code = """
import torch, smoothce
hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
labels = torch.randint(11, (5,))
loss = smoothce.linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1)
dense = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, label_smoothing=0.1)
assert torch.allclose(loss, dense, atol=1e-6)
loss.backward()
"""
    done = run(python, "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_calibeval_measures_records(python, tmp_path):
    records = tmp_path / "records.jsonl"
    with records.open("w") as file:
        for number in range(40):
            logprobs = [-0.5, -1.8, -2.8, -2.8]
            row = {"id": f"moons/{number}", "subject": "moons", "label": number % 4}
            file.write(json.dumps({**row, "logprobs": logprobs, "letter_mass": 0.9}) + "\n")
    calibeval = python.with_name("calibeval")
    for command in (("metrics", records), ("compare", records, records)):
        done = run(calibeval, *command, folder=tmp_path)
        assert done.returncode == 0, done.stderr


def test_a_sweep_runs_from_an_empty_folder(python, tmp_path):
    """The built-in trainer with one of its chat templates, then scoring and the tables."""
    import tiny_world

    tiny_world.main(tmp_path)
    sweep = {
        "name": "toy",
        "output_root": str(tmp_path / "out"),
        "train": {
            "model_name_or_path": str(tmp_path / "model"),
            "train_file": str(tmp_path / "alpaca.jsonl"),
            "chat_template_name": "tulu",
            "label_smoothing": 0.1,
            "max_train_samples": 8,
            "num_train_epochs": 1,
        },
        "score": {"tasks": [{"task": "mmlu", "data": str(tmp_path / "mmlu")}]},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    command = ("-m", "sweeps", "launch", tmp_path / "sweep.yaml", "--executor", "local")
    done = run(python, *command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "toy" / "results" / "runs.csv").exists()


def test_the_open_instruct_backend_finds_its_patches(python, tmp_path):
    """The wheel's apply.sh is asked about a checkout that is none, and says so."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    code = """
from sweeps.training import open_instruct_backend
for problem in open_instruct_backend.checkout_problems():
    print(problem)
"""
    done = run(python, "-c", code, folder=tmp_path, OPEN_INSTRUCT_DIR=str(checkout))
    assert done.returncode == 0, done.stderr
    assert "is no open-instruct checkout" in done.stdout
