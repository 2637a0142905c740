"""Do prediction sets hold a tagger's right labels? `python -m studies.sequence_sets`.

On a hidden Markov model, whose posterior is known. The table goes to `output` as well.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import PositiveFloat, PositiveInt
from tabulate import tabulate

import studies
from calibeval.io import write_text
from studies.sequence_sets import markov, sets

SCORES = ("lac", "cumulative")


class Config(studies.Config):
    """The keys of config.yaml."""

    output: Path
    alpha: PositiveFloat
    k: PositiveInt
    splits: PositiveInt
    sentences: PositiveInt
    seeds: list[int]
    noise: PositiveFloat


def main(words: list[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    return studies.command(__doc__, Config, study, Path(__file__).parent, words)


def study(c: Config) -> None:
    """The hidden Markov model's table."""
    of = [markov.sentences(c.sentences, seed, c.k, c.noise) for seed in c.seeds]
    text = table(of, c.alpha, c.splits)
    print(text)
    write_text(c.output / "table.md", f"{text}\n")


def table(files: list[list[sets.Sentence]], alpha: float, splits: int) -> str:
    """Every kind of set, one row each: means ± standard deviations over seeds."""
    found = []
    for of in files:
        every = {score: sets.labeling_sets(of, alpha, score, splits) for score in SCORES}
        for kind, tested in (every | sets.entity_sets(of, alpha, splits)).items():
            parts = tested[tested.number != ""].sort_values("number")
            parts = parts.assign(sets=f"{kind}: " + parts.number)
            found.append(sets.means(pd.concat([tested.assign(sets=kind), parts]), "sets"))
    over = pd.concat(found).groupby("sets", sort=False)
    rows = [
        [name, f"{m.hit:.3f} ± {s.hit:.3f}", f"{m.held:.2f} ± {s.held:.2f}", f"{m.unbounded:.2%}"]
        for (name, m), (_, s) in zip(over.mean().iterrows(), over.std().iterrows(), strict=True)
    ]
    missing = np.mean([np.mean([s.gold not in s.labelings for s in of]) for of in files])
    right = np.mean([np.mean([s.gold == s.labelings[0] for s in of]) for of in files])
    head = f"α = {alpha}, likeliest labeling right {right:.3f}, right one missing {missing:.4f}\n"
    columns = ["sets", "coverage", "size", "hold all"]
    return head + tabulate(rows, columns, "github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
