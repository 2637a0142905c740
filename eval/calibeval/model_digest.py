"""A digest of a model's folder, by which records know of which weights they are.

The model is not loaded for it: the digest is of the files that decide its answers.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from calibeval.io import sha256

# Patterns of the files that decide a model's answers.
CONFIGURATION = ("config.json", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
TOKENIZER = (
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_*",
)
# Files of a trainer's own state, which match `*.bin` and decide nothing.
TRAINER_STATE = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def digest(model: str, revision: str | None = None) -> str:
    """SHA-256 over names and whole contents of a folder's configuration, tokenizer and weights.

    For the name of a model on the hub, which must be in the local cache, it is the commit of its
    snapshot there.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True)).name
    paths = files_that_decide(folder)
    with ThreadPoolExecutor() as threads:  # hashlib lets other threads run
        digests = list(threads.map(sha256, paths))
    lines = [f"{path.name} {of_file}\n" for path, of_file in zip(paths, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def files_that_decide(folder: Path) -> list[Path]:
    """The files of a model folder on which its answers depend, sorted by path."""
    paths = set()
    for pattern in (*CONFIGURATION, *WEIGHTS, *TOKENIZER):
        for path in folder.glob(pattern):
            if path.is_file() and path.name not in TRAINER_STATE:
                paths.add(path)
    return sorted(paths)
