"""A digest of a model, by which records know of which weights they are.

Of a model's folder it is that of the files in it that decide the answers, for which nothing is
loaded. What an adapter's folder names as its base model lies elsewhere and is not part of it. Of a
model in memory it is that of the weights, so it differs from the digest of its folder.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from calibeval.io import sha256

if TYPE_CHECKING:
    import torch

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


def digest_of_loaded(model: "torch.nn.Module") -> str | None:
    """SHA-256 over the names, types, shapes and bytes of a model's weights and buffers.

    None where some of them are not plain tensors in memory, as of a model that is partly on disk,
    quantized, or spread over processes.
    """
    import torch

    tensors = sorted(model.state_dict().items())
    for _, tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
            return None
    with ThreadPoolExecutor() as threads:  # hashlib lets other threads run
        digests = list(threads.map(_sha256_of_tensor, [tensor for _, tensor in tensors]))
    lines = [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {of_tensor}\n"
        for (name, tensor), of_tensor in zip(tensors, digests, strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256_of_tensor(tensor: "torch.Tensor") -> str:
    import torch

    as_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(as_bytes.numpy().data).hexdigest()
