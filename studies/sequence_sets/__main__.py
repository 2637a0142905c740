"""Do prediction sets hold a tagger's right labels? `python -m studies.sequence_sets`.

On a hidden Markov model, whose posterior is known. The table goes to `output` as well.
"""

import sys
from pathlib import Path

import pandas as pd
from pydantic import PositiveFloat, PositiveInt
from tabulate import tabulate

import studies
from calibeval.io import write_text
from calibeval.request import Strict
from studies.sequence_sets import markov, sets

SCORES = {"lac": "lac", "cumulative": "aps"}  # which is aps without its random number


class Config(Strict):
    """The keys of config.yaml."""

    output: Path
    alpha: PositiveFloat
    k: PositiveInt
    splits: PositiveInt
    sentences: PositiveInt
    seeds: list[int]
    noise: PositiveFloat


def study(c: Config) -> None:
    """A row a kind of set: means ± standard deviations over seeds."""
    found = []
    for seed in c.seeds:
        of = markov.sentences(c.sentences, seed, c.k, c.noise)
        every = {
            name: sets.labeling_sets(of, c.alpha, score, c.splits) for name, score in SCORES.items()
        }
        every |= sets.entity_sets(of, c.alpha, c.splits)
        found.append(pd.DataFrame(every, index=["coverage", "held"]).T)
    over = pd.concat(found).groupby(level=0, sort=False)
    rows = [
        [kind, f"{m.coverage:.3f} ± {s.coverage:.3f}", f"{m.held:.2f} ± {s.held:.2f}"]
        for (kind, m), (_, s) in zip(over.mean().iterrows(), over.std().iterrows(), strict=True)
    ]
    heads = [f"sets at 1 − α = {1 - c.alpha:g}", "coverage", "size"]
    text = tabulate(rows, heads, "github", disable_numparse=True)
    print(text)
    write_text(c.output / "table.md", f"{text}\n")


if __name__ == "__main__":
    sys.exit(studies.command(__doc__, Config, study, Path(__file__).parent))
