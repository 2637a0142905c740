"""The shapes of models' classifiers, the label of a masked token, and the error of a gradient."""

import re

from torch import Tensor

from smoothce.options import Options

IGNORED = Options().ignore_index  # the label of a masked token
# Vocabulary and hidden size of each model's classifier.
CLASSIFIERS = {
    "small": (32000, 512),
    "gemma2-2b": (256000, 2304),
    "gemma2-9b": (256000, 3584),
    "llama3-8b": (128256, 4096),
    "qwen2.5-7b": (152064, 3584),
    "mistral-7b": (32768, 4096),
}


def classifier(name: str) -> tuple[int, int]:
    """Vocabulary and hidden size of a model, or of "VxD". Raises ValueError."""
    if name in CLASSIFIERS:
        return CLASSIFIERS[name]
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
    if not sizes:
        known = ", ".join(CLASSIFIERS)
        raise ValueError(f"{name!r} is neither VxD, such as 8192x2048, nor one of {known}")
    return int(sizes[1]), int(sizes[2])


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.to(wanted.dtype) - wanted).norm() / wanted.norm()).item()
