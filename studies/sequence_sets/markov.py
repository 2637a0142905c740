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
SHORTEST = 4  # words of a sentence
LONGEST = 8


def draw(
    rng: np.random.Generator, length: int, noise: float
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """A sentence: its labels (T,), and the model's emissions (T, L) and transitions (L, L).

    A word shows its label's mean and Gaussian noise. Emissions are log-densities but for a
    constant, transitions log-probabilities; the start's are in the first emission.
    """
    labels = [rng.choice(len(LABELS), p=START)]
    for _ in range(length - 1):
        labels.append(rng.choice(len(LABELS), p=TRANSITIONS[labels[-1]]))
    shown = MEANS[labels] + noise * rng.normal(size=(length, 2))
    with np.errstate(divide="ignore"):
        log_transitions = np.log(TRANSITIONS)
        log_start = np.log(START)
    emissions = -((shown[:, None] - MEANS) ** 2).sum(2) / (2 * noise**2)
    emissions[0] += log_start
    return labels, emissions, log_transitions


def sentences(count: int, seed: int, k: int, noise: float) -> list[Sentence]:
    """Sentences of 4 to 8 words, with the k likeliest labelings of each."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(SHORTEST, LONGEST + 1))
        labels, emissions, transitions = draw(rng, length, noise)
        paths, logprobs = k_best(emissions, transitions, k)
        gold = tuple(LABELS[label] for label in labels)
        labelings = tuple(tuple(LABELS[label] for label in path) for path in paths)
        made.append(Sentence(gold, labelings, logprobs))
    return made
