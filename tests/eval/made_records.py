"""Records of a made-up model whose calibration is known."""

import json
import math

import numpy as np


def draw(n: int, sharpness: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities (n, 4) and labels of a model that says its noisy logits times `sharpness`:
    1 is calibrated, more is over-confident; the same seed asks the same questions."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (n, 4))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(max=3)
    said = logits * sharpness
    return said - np.log(np.exp(said).sum(1, keepdims=True)), labels


def write_records(
    path, n: int, sharpness: float, seed: int, mass: float = 0.95, subjects: tuple = ("s",)
) -> None:
    """What `draw` makes; the letters have `mass` of the probability."""
    said, labels = draw(n, sharpness, seed)
    logprobs = said + math.log(mass)
    with open(path, "w") as file:
        for i in range(n):
            row = {"id": f"q{i}", "subject": subjects[i % len(subjects)], "model": "m"}
            row |= {"label": int(labels[i]), "logprobs": logprobs[i].tolist(), "letter_mass": mass}
            file.write(json.dumps(row) + "\n")
