"""Linear cross-entropy with label smoothing that never holds the N × V logits."""

from smoothce.linear_cross_entropy import explain, linear_cross_entropy
from smoothce.module import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "explain", "linear_cross_entropy"]
