"""How well the confidence ranks right answers above wrong ones."""

import numpy as np

from calibeval.metrics.samples import Sample


def auroc(sample: Sample) -> np.ndarray:
    """P(confidence right > wrong) + ½ P(equal), over pairs of answers; NaN without such pairs."""
    top = sample.top
    starts = np.flatnonzero(np.diff(top.run_start, prepend=-1))
    runs = slice(None) if len(starts) == top.n else np.append(starts, top.n)
    right = np.diff(top.corrects[:, runs], axis=1)
    wrong = (top.counts - top.corrects)[:, runs]
    below = (wrong[:, :-1] + wrong[:, 1:]) / 2
    pairs = top.corrects[:, -1] * wrong[:, -1]
    return np.einsum("rn,rn->r", right, below) / np.where(pairs > 0, pairs, np.nan)


def accuracy_at_coverage(sample: Sample, coverage: float) -> np.ndarray:
    """Accuracy when only the most confident share of the questions is answered.

    Where the cut falls among equal confidences, they count in proportion.
    """
    top = sample.top
    total = top.counts[0, -1]
    cut = total * (1 - coverage)
    place = top.places(np.array([cut]))  # (R or 1, 1)
    start, end = top.run_start[place], top.run_end[place]
    counts = [np.take_along_axis(top.counts, at, 1) for at in (start, end)]
    corrects = [np.take_along_axis(top.corrects, at, 1) for at in (start, end)]
    share = (cut - counts[0]) / np.maximum(counts[1] - counts[0], 1)
    below = corrects[0] + share * (corrects[1] - corrects[0])
    return (top.corrects[:, -1] - below[:, 0]) / (total - cut)
