"""What is measured: shapes, by the models they come from, and tensors of such a shape."""

import re
from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class Case:
    """One problem: N tokens, V entries, D features, the dtype's name, and the smoothing β."""

    model: str
    tokens: int
    dtype: str
    label_smoothing: float

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.tokens, *classifier(self.model)

    def __str__(self) -> str:
        n, v, d = self.shape
        return (
            f"{self.model} (N={n}, V={v}, D={d}), {self.dtype} on cpu, β={self.label_smoothing:g}"
        )


def tensors(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden (N, D), weight (V, D), both of which require grad, and labels (N,)."""
    n, v, d = case.shape
    settings = {"generator": torch.Generator().manual_seed(seed)}
    dtype = getattr(torch, case.dtype)
    hidden = torch.randn(n, d, **settings).to(dtype)
    weight = (torch.randn(v, d, **settings) / d**0.5).to(dtype)
    labels = torch.randint(v, (n,), **settings)
    return hidden.requires_grad_(), weight.requires_grad_(), labels
