"""What a launch refuses before anything is queued, and what prefetch does about it."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from real import PROJECT, command, launch, prepare

from calibeval import records
from calibeval.io import InputError
from calibeval.store import part_of
from sweeps.launch import assets, preflight
from sweeps.runs import scoring
from sweeps.runs.grid import plan_sweep


def problems(path: Path, *overrides: str) -> str:
    """What a launch on Slurm would refuse."""
    return "\n".join(preflight.problems(plan_sweep(path, list(overrides)), "slurm"))


def test_a_whole_sweep_passes(toy_file, profile, tmp_path):
    """And what Slurm, the jobs' shell or its program cannot read does not."""
    path = toy_file(cluster=profile())
    assert problems(path) == ""
    (odd := tmp_path / "odd.json").write_text('{"zero":')
    for named, said in ((f"deepspeed={odd}", "Expecting"), ("fsdp=no.json", "no.json: could")):
        script = ("backend=open-instruct", "train.train_file=x", f"world.{named}")
        assert f"world.{named}: {said}" in problems(path, *script)
    for key, value in (("secrets_file", "/no/secrets"), ("python", "/no/python")):
        assert f"{profile(**{key: value})}: {key}: {value}: " in problems(path)
    profile(python="made", setup=["make it"])
    assert problems(path) == ""
    assert "Slurm reads % in paths" in problems(path, f"output_root={tmp_path}/100%A")
    profile(cache="$WORK/hub")
    with pytest.raises(InputError, match=r"cache: \$WORK/hub: \$WORK is not set here: export"):
        problems(path)


def test_each_model_and_file_that_is_not_there_is_named_once(sweep_file, tmp_path):
    said = launch(
        path := sweep_file(), "--executor", "local", "train.train_file=no.jsonl",
        "train.model_name_or_path=./no/thing", f"train.tokenizer_name={tmp_path}", code=2,
    )  # fmt: skip
    assert said.count(f"train.train_file: {PROJECT}/no.jsonl: could not be read (No such file") == 1
    assert said.count(f"train.model_name_or_path: {PROJECT}/no/thing: no such folder") == 1
    assert f"train.tokenizer_name: {tmp_path}: no tok* or vocab*, or not all" in said
    (tmp_path / "chat.jsonl").touch()
    said = problems(path, "backend=open-instruct", f"train.train_file={tmp_path}/chat.jsonl")
    assert f"train.train_file: {tmp_path}/chat.jsonl: no conversation with" in said
    asks = '{"messages": [{"role": "user", "content": "And?"}]}'
    (tmp_path / "chat.jsonl").write_text(asks)
    said = problems(path, f"train.train_file={tmp_path}/chat.jsonl")
    assert f"train.train_file: {tmp_path}/chat.jsonl: no conversation with an assistant" in said
    said = problems(path, "backend=open-instruct", "prefetch.made_by=make it")
    assert "OPEN_INSTRUCT_DIR" in said and "make it" not in said  # all that it makes is there
    for absent in ("train.train_file=made.jsonl", "train.model_name_or_path=models/absent"):
        assert "are made by: make it" in problems(path, absent, "prefetch.made_by=make it")


def test_questions_that_cannot_be_asked_are_named(toy_file, profile, tiny):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 99}
    said = problems(toy_file(score={"tasks": [task]}, cluster=profile()))
    assert said.startswith("score: mmlu: ") and "but --shots 99" in said, said


def test_what_comes_from_the_hub_is_fetched_by_prefetch(sweep_file, profile, tmp_path, monkeypatch):
    tasks = [{"task": "mmlu", "data": "hub:cais/mmlu"}]
    train = {"model_name_or_path": "owner/absent"}
    path = sweep_file(train=train, score={"tasks": tasks}, cluster=profile())
    env = os.environ | {"HF_HOME": str(tmp_path)}
    done = command("launch", path, "--executor", "local", "grid.seed=[1, 2]", env=env)
    assert done.returncode == 2 and done.stderr.count("owner/absent") == 1
    assert "not fetched: model owner/absent" in done.stderr
    assert "not fetched: questions hub:cais/mmlu" in done.stderr
    typed = f"python -m sweeps prefetch {path} 'grid.seed=[1, 2]'"
    assert f"where there is internet: {typed}" in done.stderr
    asked = []

    def load_dataset(*names, **_):
        asked.append(names)
        raise OSError("no internet")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = [one for one in assets.assets(plan_sweep(path, [])) if "hub:cais/mmlu" in one.name]
    assert assets.fetch(found)
    assert asked == [("cais/mmlu", "all")]  # as scoring reads it: it has no default configuration


@pytest.mark.parametrize("kind", ["models", "tokenizers"])
def test_a_model_that_is_half_there_is_not_there(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--owner--name"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert not assets.on_disk("owner/name", kind)
    (snapshot / "tokenizer.json").touch()
    assert assets.on_disk("owner/name", kind) == (kind == "tokenizers")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert not assets.on_disk("owner/name", kind)
    (snapshot / "a.safetensors").touch()
    (folder / "blobs").mkdir()
    (folder / "blobs" / "stale.incomplete").touch()  # of a file that came by another download
    assert assets.on_disk("owner/name", kind)
    (folder / "refs").mkdir()
    (folder / "refs" / "v1").write_text("abc")
    assert assets.on_disk("owner/name", kind, "v1")
    assert not assets.on_disk("owner/name", kind, "v2")


def test_prefetch_fetches_once_and_says_what_failed(toy_file, tiny, tmp_path):
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tiny / "mmlu", "data")
    archive = {"url": f"file://{tmp_path}/data.tar", "to": str(tmp_path / "got" / "mmlu")}
    archive["strip"] = 1
    path = toy_file(
        grid={}, prefetch={"archives": [archive]},
        score={"tasks": [{"task": "mmlu", "data": archive["to"], "shots": 1}]},
    )  # fmt: skip
    failed = command("prefetch", path, f"prefetch.archives.0.url=file://{tmp_path}/none.tar")
    assert failed.returncode == 1 and not (tmp_path / "got" / "mmlu").exists()
    assert "No such file or directory" in failed.stderr and "none.tar" in failed.stderr
    # A sweep that an override points elsewhere does not need what it no longer reads.
    elsewhere = f"score.tasks.0.data={tiny / 'mmlu'}"
    assert problems(path).count("data.tar") == 1 and problems(path, elsewhere) == ""
    done = subprocess.run(
        ["bash", PROJECT / "slurm" / "sweeps.sh", "prefetch", path],
        text=True, capture_output=True, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / "mmlu" / "test" / "moons_test.csv").exists()
    assert command("prefetch", path).stdout.count("here: ") == 1


def test_a_launch_is_queued_whole_or_not_at_all(toy_file, profile, tmp_path, monkeypatch):
    """And sbatch's refusal comes with what there is."""
    taken = "grep -q job-name=toy.collect || { echo 71; exit; }"
    refused = "invalid partition specified: gpu"
    (folder := tmp_path / "bin").mkdir()
    for name, text in {
        "sbatch": f"{taken}; echo 'sbatch: error: {refused}' >&2; exit 1",
        "squeue": "",
        "sinfo": "printf 'y\\nx\\n'",
        "scancel": f"echo $@ > '{tmp_path}/cancelled'",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    path = toy_file(cluster=profile(partition="gpu"))
    said = launch(path, "--executor", "slurm", code=2)
    assert f"cluster.yaml: sbatch refuses: {refused}" in said
    assert "partition: found gpu, there is x, y" in said
    assert (tmp_path / "cancelled").read_text() == "71\n"


def test_packages_that_runs_need_are_named(toy_file, profile, tiny):
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(score={"engine": "vllm", "tasks": [task]}, cluster=profile())
    assert f"packages that runs need: vllm: {sys.executable} -m pip install" in problems(path)
    assert problems(path, f"score.python={sys.executable}") == ""  # which is not asked
    said = "score.python: /other/python: no such program"  # which would show after the training
    assert problems(path, "score.python=/other/python") == said
    profile(python="$HOME/mine")  # nor this one
    assert problems(path) == ""


def test_records_that_answer_another_request_are_not_overwritten(toy_file, tiny):
    """Whole or begun; what is not as large as it was written is damaged."""
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1}
    path = toy_file(grid={}, score={"tasks": [task], "base": False})
    run = prepare(path)
    asked = run.config().score
    whole = scoring.records(run, asked.tasks[0])
    for file in (part_of(whole), whole):
        records.write(file, [{}], {"settings": scoring.request(asked.tasks[0], asked)})
        assert (scoring.missing(run) == []) == (file == whole)
        said = launch(path, "--executor", "local", "score.tasks.0.shots=2", code=2)
        assert f"{whole}: was asked with shots 1, now 2; give the task another `name`" in said
    whole.write_text("")
    said = scoring.gap(run, asked.tasks[0])
    assert said == f"{whole}: 0 bytes, scoring wrote 3: damaged since"
    records.sidecar(whole).write_text("{")
    assert scoring.gap(run, asked.tasks[0]) == "not trained"
    (run.path / "DONE").touch()  # and the model deleted
    said = launch(path, "--executor", "local", code=2)
    assert f"{run.path}: its model is gone: to score it, delete the folder" in said
