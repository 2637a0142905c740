"""Records of a made-up model whose calibration is known, and JSON lines read and written."""

import csv
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from calibeval.__main__ import main

LETTERS = {"id": "a/0", "subject": "a", "label": 1, "logprobs": [-1.0, -2.0], "letter_mass": 0.5}
WORDS = "which of the following is a true statement about force mass light cells kings law"


def write_rows(path: Path, rows: list[list[str]]) -> None:
    """One headerless CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def table(count: int, seed: int = 0) -> list[list[str]]:
    """Rows of MMLU's official layout."""
    rows = []
    for i in range(count):
        rng, words = random.Random(seed + i), WORDS.split()
        text = " ".join(rng.choices(words, k=rng.randint(4, 12))) + "?"
        choices = (" ".join(rng.choices(words, k=3)) for _ in range(4))
        rows.append([text, *choices, rng.choice("ABCD")])
    return rows


def write_lines(path: Path, rows: Iterable[dict]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict]:
    """What `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def scored(out: Path, *options) -> list[dict]:
    """Records of `calibeval score`."""
    assert main([str(part) for part in ("score", "--out", out, *options)]) == 0
    return read_lines(out)


def plain(folder: Path, context: str, choice: str, cut: int = 0) -> float:
    """log P(choice | context) of a model, one whole prompt and one forward, without the `cut` first
    tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    bare, whole = (tokenizer(text)["input_ids"] for text in (context, context + choice))
    ids = torch.tensor([whole[cut:]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits[0]
    at = range(len(bare) - cut - 1, ids.shape[1] - 1)
    return sum(logits.log_softmax(-1)[i, ids[0, i + 1]].item() for i in at)


def draw(n: int, sharpness: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities (n, 4) and labels of a model that says its noisy logits times `sharpness`:
    1 is calibrated, more is over-confident; the same seed asks the same questions."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (n, 4))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(max=3)
    said = logits * sharpness
    return said - np.log(np.exp(said).sum(1, keepdims=True)), labels


def write_records(path: Path, n=600, sharpness=1.0, seed=0, mass=0.95) -> Path:
    """What `draw` makes; the letters have `mass` of the probability."""
    said, labels = draw(n, sharpness, seed)
    rows = [{"id": f"{seed}/{i}", "subject": "s", "model": "m"} for i in range(n)]
    for row, label, logprobs in zip(rows, labels, said + math.log(mass), strict=True):
        row |= {"label": int(label), "logprobs": logprobs.tolist(), "letter_mass": mass}
    return write_lines(path, rows)
