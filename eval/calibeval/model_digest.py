"""What can be said of a model folder before it is loaded."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from calibeval.io import sha256

# What decides a folder's answers; the rest of *.bin is a trainer's own state.
WEIGHTS = "adapter_config.json *.safetensors *.bin *.index.json"
WORDS = "tokenizer* *.model special_tokens_map.json added_tokens.json vocab.* merges.txt chat_*"
PARTS = f"config.json {WEIGHTS} {WORDS}".split()
STATE = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def digest(model: str, revision: str | None = None) -> str:
    """SHA-256 over names and whole contents of a folder's configuration, tokenizer and weights.

    For a hub name, the commit of its snapshot in the cache.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True)).name
    found = {p for part in PARTS for p in folder.glob(part) if p.is_file()}
    paths = sorted(path for path in found if path.name not in STATE)
    with ThreadPoolExecutor() as pool:  # hashlib lets other threads run
        parts = zip(paths, pool.map(sha256, paths), strict=True)
        text = "".join(f"{path.name} {part}\n" for path, part in parts)
    return hashlib.sha256(text.encode()).hexdigest()
