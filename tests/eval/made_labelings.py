"""Sentences of a hidden Markov model with IOB2 labels, whose posterior over labelings is exact."""

import numpy as np

from calibeval import records, sequences

LABELS = ["O", "B-A", "I-A", "B-B", "I-B"]
START = np.array([0.6, 0.2, 0.0, 0.2, 0.0])
TRANSITIONS = np.array(
    [
        [0.6, 0.2, 0.0, 0.2, 0.0],
        [0.4, 0.1, 0.4, 0.1, 0.0],
        [0.6, 0.1, 0.2, 0.1, 0.0],
        [0.5, 0.1, 0.0, 0.1, 0.3],
        [0.5, 0.1, 0.0, 0.1, 0.3],
    ]
)
MEANS = np.array([[0.0, 0], [1.8, 0], [1.8, 1], [0, 1.8], [-1, 1.8]])  # of what a label shows


def draw(rng: np.random.Generator, length: int, noise: float = 0.5):
    """Labels (T,), and the model's emissions (T, L) and transitions (L, L)."""
    labels = [rng.choice(5, p=START)]
    for _ in range(length - 1):
        labels.append(rng.choice(5, p=TRANSITIONS[labels[-1]]))
    seen = MEANS[labels] + noise * rng.normal(size=(length, 2))
    with np.errstate(divide="ignore"):
        transitions, start = np.log(TRANSITIONS), np.log(START)
    emissions = -((seen[:, None] - MEANS) ** 2).sum(2) / (2 * noise**2)
    emissions[0] += start
    return labels, emissions, transitions


def rows(n: int, seed: int, k: int = 40, sharpness=1.0, lengths=(3, 7), noise=0.5):
    """Records of n sentences; a model that sharpens its scores is calibrated only at 1."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        labels, emissions, transitions = draw(rng, int(rng.integers(*lengths)), noise)
        paths, logprobs = sequences.k_best(sharpness * emissions, sharpness * transitions, k)
        gold, *labelings = [[LABELS[j] for j in path] for path in [labels, *paths]]
        yield sequences.record(f"{i:06}", "hmm", gold, labelings, logprobs)


def made(path, n: int, seed: int = 0, **options) -> records.Records:
    """The records of a file of them."""
    records.write(path, rows(n, seed, **options), {})
    return records.read(path)
