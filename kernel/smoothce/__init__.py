"""Linear cross-entropy with label smoothing that never holds the N × V logits."""

from typing import TYPE_CHECKING, Any

from smoothce.hf_patch import patch_model, patch_trainer, unpatch_model
from smoothce.linear_cross_entropy import explain, linear_cross_entropy
from smoothce.module import LinearCrossEntropy
from smoothce.options import TokenStatistics
from smoothce.packed_attention import use_packed_attention
from smoothce.token_mean import token_mean_factor
from smoothce.token_statistics import token_statistics

if TYPE_CHECKING:
    from smoothce.hf_patch.callback import SmoothingCallback as SmoothingCallback

__version__ = "0.1.0"

# Without SmoothingCallback, so that `from smoothce import *` needs torch alone.
__all__ = [
    "LinearCrossEntropy",
    "TokenStatistics",
    "explain",
    "linear_cross_entropy",
    "patch_model",
    "patch_trainer",
    "token_mean_factor",
    "token_statistics",
    "unpatch_model",
    "use_packed_attention",
]


def __getattr__(name: str) -> Any:
    """`SmoothingCallback` is a transformers class, and transformers is imported for it alone."""
    if name == "SmoothingCallback":
        from smoothce.hf_patch.callback import SmoothingCallback

        return SmoothingCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
