"""Digests of models: one byte anywhere tells two apart, and nothing is taken for another's."""

import shutil

import pytest

from calibeval.ask import model_digest

WEIGHTS_BYTES = 4 << 20


@pytest.fixture
def model(tmp_path):
    """A folder of 4 MB of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(WEIGHTS_BYTES))
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_byte_in_the_middle_tells(model, name):
    before = model_digest.digest(str(model))
    assert model_digest.digest(str(model)) == before
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    (model / name).write_bytes(content)
    assert model_digest.digest(str(model)) != before


def test_a_copy_has_the_same_digest_whatever_else_is_beside_it(model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for name in ("training_args.bin", "optimizer.bin", "README.md"):
        (copy / name).write_text("x")
    assert model_digest.digest(str(copy)) == model_digest.digest(str(model))


def test_a_hub_model_is_its_snapshots_commit(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"
    folder = tmp_path / "models--some--model"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert model_digest.digest("some/model") == commit
    assert model_digest.digest("some/model", commit) == commit
