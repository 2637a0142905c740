"""Sentences of a hidden Markov model with IOB2 labels, whose posterior over labelings is exact."""

import numpy as np

from studies.sequence_sets.sets import Sentence, k_best

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


def draw(rng: np.random.Generator, length: int, noise: float):
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


def sentences(n: int, seed: int, k: int, noise: float) -> list[Sentence]:
    """n sentences of 4 to 8 words, with the k likeliest labelings of each."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(n):
        labels, emissions, transitions = draw(rng, int(rng.integers(4, 9)), noise)
        paths, logprobs = k_best(emissions, transitions, k)
        gold, *labelings = (tuple(LABELS[j] for j in path) for path in [labels, *paths])
        found.append(Sentence(gold, tuple(labelings), logprobs))
    return found
