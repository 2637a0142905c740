"""Digests of models: one byte anywhere tells two apart, and nothing is taken for another's."""

import json
import os
import shutil

import pytest

from calibeval import models
from calibeval.io import InputError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, for files of any age."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "SETTLED", -1.0)
    return tmp_path / "cache" / "calibeval" / "sha256"


@pytest.fixture
def model(tmp_path):
    """A folder of 4 MB of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(4 << 20))
    return folder


def change(path, keep_times=True):
    """Flip a bit in the middle of a file, as if by a copy that keeps times."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keep_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_byte_in_the_middle_tells(model, name):
    before = models.digest(str(model))
    assert models.digest(str(model)) == before
    change(model / name)
    assert models.digest(str(model)) != before


def test_a_copy_has_the_same_digest_and_other_files_do_not_matter(model, tmp_path):
    before = models.digest(str(model))
    shutil.copytree(model, tmp_path / "copy")
    for name in ("training_args.bin", "optimizer.bin", "README.md"):
        (tmp_path / "copy" / name).write_text("x")
    assert models.digest(str(tmp_path / "copy")) == before
    (tmp_path / "copy" / "model-00002-of-00002.safetensors").write_text("x")
    assert models.digest(str(tmp_path / "copy")) != before


def test_files_are_read_once(model, monkeypatch):
    before = models.digest(str(model))
    monkeypatch.setattr("builtins.open", None)
    assert models.digest(str(model)) == before


def test_entries_hold_for_one_file_only(model, tmp_path, cache):
    """Same size and times elsewhere, or under the same name, are another file."""
    path = model / "model.safetensors"
    first = models.file_digest(path)
    twin = tmp_path / "twin.safetensors"
    shutil.copy2(path, twin)
    change(twin)
    assert twin.stat().st_mtime_ns == path.stat().st_mtime_ns
    assert models.file_digest(twin) != first
    os.replace(twin, path)
    assert models.file_digest(path) != first
    for entry in cache.iterdir():
        entry.write_text("[1")
    assert models.file_digest(path) != first
    for entry in cache.iterdir():
        entry.write_text(json.dumps({"sha256": first}))
    assert models.file_digest(path) != first


def test_a_file_that_may_still_change_is_not_remembered(model, monkeypatch, cache):
    """Two writes within a clock's tick look alike."""
    monkeypatch.setattr(models, "SETTLED", 60.0)
    models.digest(str(model))
    assert not cache.exists()


def test_without_a_cache_folder_files_are_read_again(model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    before = models.digest(str(model))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert models.digest(str(model)) == before


def test_large_models_are_announced(model, monkeypatch, capsys):
    monkeypatch.setattr(models, "ANNOUNCED", 1 << 20)
    models.digest(str(model))
    assert "model.safetensors: 0.0 GB to read" in capsys.readouterr().err
    models.digest(str(model))
    assert not capsys.readouterr().err


def test_a_hub_model_is_its_snapshots_commit(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert models.digest("some/model") is None
    commit = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"
    folder = tmp_path / "models--some--model"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert models.digest("some/model") == models.digest("some/model", commit) == commit


def test_an_unreadable_weight_file_is_named(model):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")  # no file: left to the loader
    models.digest(str(model))
    os.symlink("/proc/self/mem", model / "x.safetensors")
    with pytest.raises(InputError, match=r"x\.safetensors: could not be read"):
        models.digest(str(model))
