"""From log-probabilities to confidences, in both definitions.

choices:    p_k = softmax of the choices' log-probabilities (the official way)
vocabulary: p_k = exp(log-probability): what the model gives the letter among all its tokens
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibeval.records import Records

CONFIDENCES = ("choices", "vocabulary")


@dataclass(frozen=True)
class Scores:
    """Probabilities and labels of N questions with up to K choices, in the records' order."""

    probs: np.ndarray  # (N, K); an absent choice has 0; rows need not sum to 1
    labels: np.ndarray  # (N,)

    @cached_property
    def best(self) -> np.ndarray:
        """Index of the likeliest choice, the first of equals."""
        return self.probs.argmax(1)

    @cached_property
    def confidence(self) -> np.ndarray:
        """Probability of the likeliest choice."""
        return self.probs[np.arange(len(self.probs)), self.best]

    @cached_property
    def correct(self) -> np.ndarray:
        """1 where the likeliest choice is right, else 0."""
        return (self.best == self.labels).astype(float)

    @cached_property
    def right(self) -> np.ndarray:
        """Probability of the right choice."""
        return self.probs[np.arange(len(self.probs)), self.labels]

    @cached_property
    def order(self) -> np.ndarray:
        """Questions by ascending confidence."""
        return np.argsort(self.confidence, kind="stable")

    @cached_property
    def folded_order(self) -> np.ndarray:
        """Questions by ascending max(p, 1 − p) of the confidence."""
        folded = np.where(self.confidence < 0.5, 1 - self.confidence, self.confidence)
        return np.argsort(folded, kind="stable")

    @cached_property
    def class_order(self) -> list[np.ndarray]:
        """Questions by ascending probability of choice k, for each k."""
        return [np.argsort(column, kind="stable") for column in self.probs.T]


def scores(records: Records, confidence: str) -> Scores:
    """The records' probabilities under one definition of confidence."""
    logprobs = records.logprobs
    if confidence == "choices":
        top = logprobs.max(1, keepdims=True)
        logprobs = logprobs - (top + np.log(np.exp(logprobs - top).sum(1, keepdims=True)))
    return Scores(np.exp(logprobs), records.labels)
