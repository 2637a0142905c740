"""Metrics of a model that may keep silent: how right it is where it is sure.

They are made for answers that models write. Of choices they are computed where they are named.
"""

import numpy as np

from calibeval.measures.samples import Sample


class AccuracyAtCoverage:
    """Accuracy of the surest answers, of a share c of all, the coverage.

    Σ_i a_i y_i / (c N), where a_i says how much of answer i is among the c N surest: 1, 0, or of
    equally sure ones at the edge the share of them that has room. It is 1 less the selective risk
    at coverage c of El-Yaniv & Wiener (2010, JMLR 11).
    """

    def __init__(self, coverage: float):
        self.coverage = coverage
        self.__name__ = f"accuracy_at_{coverage * 100:.0f}"

    def __call__(self, sample: Sample) -> np.ndarray:
        """Return it for each sample, (R,)."""
        answers, right = sample.by_level
        surest_first = answers[:, ::-1]
        wanted = self.coverage * answers.sum(1, keepdims=True)
        surer = surest_first.cumsum(1) - surest_first
        taken = np.clip(wanted - surer, 0, surest_first)
        right_share = right[:, ::-1] / np.where(surest_first > 0, surest_first, 1)
        return (taken * right_share).sum(1) / wanted[:, 0]


class PenalizedScore:
    """Mean score of a model that answers only where it is surer than t.

    A right answer scores 1, a wrong one −t / (1 − t), and silence 0 (Kalai, Nachum, Vempala & Zhang
    2025, arXiv 2509.04664, section 4.2). Of a calibrated model no other threshold scores more.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.__name__ = f"penalized_{threshold * 100:.0f}"

    def __call__(self, sample: Sample) -> np.ndarray:
        """Return it for each sample, (R,)."""
        points = np.where(sample.correct, 1.0, -self.threshold / (1 - self.threshold))
        return sample.mean(np.where(sample.scores.level > self.threshold, points, 0.0))


ACCURACIES_AT_COVERAGE = tuple(AccuracyAtCoverage(coverage) for coverage in (0.5, 0.8, 0.9))
PENALIZED_SCORES = tuple(PenalizedScore(threshold) for threshold in (0.5, 0.75, 0.9))
