"""Write a record file of many questions with four letters each; NumPy alone is needed.

    python benchmarks/many_questions.py OUT.jsonl [QUESTIONS]

By default there are a million questions, which take about 430 MB. eval/METRICS.md says how long
their metrics take.
"""

import json
import sys

import numpy as np

CHOICES = 4
SUBJECTS = 57


def main(path: str, questions: int) -> None:
    rng = np.random.default_rng(0)
    # The model is over-confident by a temperature of 1.4: it states softmax(logits), and right
    # answers are drawn from softmax(logits / 1.4).
    logits = rng.normal(0, 2, (questions, CHOICES))
    true = np.exp(logits / 1.4)
    true /= true.sum(1, keepdims=True)
    labels = (rng.random((questions, 1)) > true.cumsum(1)).sum(1).clip(max=CHOICES - 1)
    # What the four letters have together of the probability of all tokens.
    letter_mass = rng.beta(30, 1, questions)
    among_letters = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    logprobs = among_letters + np.log(letter_mass)[:, None]
    with open(path, "w") as file:
        for number in range(questions):
            row = {
                "id": f"subject {number % SUBJECTS}/{number // SUBJECTS}",
                "subject": f"subject {number % SUBJECTS}",
                "label": int(labels[number]),
                "logprobs": logprobs[number].tolist(),
                "letter_mass": float(letter_mass[number]),
                "model": "million",
                "prompt_sha256": f"{number:064x}",
                "shots": 5,
                "scoring": "letters",
                "normalise": "sum",
                "versions": {"calibeval": "0.1", "torch": "2.6", "transformers": "4.57"},
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
