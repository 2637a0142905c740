"""From log-probabilities to confidences, in both definitions.

choices:    p_k = softmax of the choices' log-probabilities (the official way)
vocabulary: p_k = exp(log-probability): what the model gives the letter among all its tokens
"""

from dataclasses import dataclass

import numpy as np

from calibeval.records import Records

CONFIDENCES = ("choices", "vocabulary")


@dataclass(frozen=True)
class Scores:
    """Checked arrays of N questions with up to K choices, sorted by ascending confidence.

    Accuracy is that of the likeliest choice, whose probability is the confidence.
    """

    probs: np.ndarray  # (N, K); absent choices have 0
    labels: np.ndarray  # (N,)
    confidence: np.ndarray  # (N,) ascending
    correct: np.ndarray  # (N,) 0 or 1
    order: np.ndarray  # (N,) row of the record file at each sorted place


def scores(records: Records, confidence: str) -> Scores:
    """The records' probabilities under one definition of confidence."""
    logprobs = records.logprobs
    if confidence == "choices":
        top = logprobs.max(1, keepdims=True)
        logprobs = logprobs - (top + np.log(np.exp(logprobs - top).sum(1, keepdims=True)))
    return from_probs(np.exp(logprobs), records.labels)


def from_probs(
    probs: np.ndarray,  # (N, K)
    labels: np.ndarray,  # (N,)
) -> Scores:
    """Scores of given probabilities; they need not sum to 1 over the choices."""
    best = probs.argmax(1)
    confidence = probs[np.arange(len(probs)), best]
    order = np.argsort(confidence, kind="stable")
    correct = (best == labels).astype(float)
    return Scores(probs[order], labels[order], confidence[order], correct[order], order)
