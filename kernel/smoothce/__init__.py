"""Linear cross-entropy with label smoothing that never holds the N × V logits."""

from smoothce.linear_cross_entropy import explain, linear_cross_entropy
from smoothce.models import patch_model, unpatch_model
from smoothce.module import LinearCrossEntropy
from smoothce.token_mean import token_mean_factor

__all__ = [
    "LinearCrossEntropy",
    "explain",
    "linear_cross_entropy",
    "patch_model",
    "token_mean_factor",
    "unpatch_model",
]
