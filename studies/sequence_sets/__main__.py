"""Do prediction sets hold a tagger's right labels? `python -m studies.sequence_sets`.

On a hidden Markov model, whose posterior is known. The table goes to `output` as well.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt
from tabulate import tabulate

import studies
from calibeval.io import write_text
from calibeval.validation import Strict
from studies.sequence_sets import markov, sets

# By the name of a kind of set of labelings, its score in `conformal.nonconformity`. There
# `sets.labeling_sets` gives zeros as the random numbers of aps: the score of a labeling is then the
# summed probability of it and of all likelier ones.
SCORES = {"lac": "lac", "cumulative": "aps"}


class Config(Strict):
    """The keys of config.yaml."""

    output: Path
    alpha: float = Field(gt=0, lt=1)
    k: PositiveInt
    splits: PositiveInt
    sentences: PositiveInt
    seeds: list[int] = Field(min_length=1)
    noise: PositiveFloat


def study(config: Config) -> None:
    """Write and print the table: a row a kind of set, means ± standard deviations over seeds.

    Seeds of which no sentence is counted in a row are left out of it.
    """
    tables = [results_of_seed(config, seed) for seed in config.seeds]
    by_kind = pd.concat(tables).groupby(level=0, sort=False)
    means = by_kind.mean()
    deviations = by_kind.std()
    rows = []
    for kind in means.index:
        mean = means.loc[kind]
        deviation = deviations.loc[kind]
        coverage = format_cell(mean.coverage, deviation.coverage, digits=3)
        size = format_cell(mean.set_size, deviation.set_size, digits=2)
        rows.append([kind, coverage, size])
    heads = [f"sets at 1 − α = {1 - config.alpha:g}", "coverage", "size"]
    text = tabulate(rows, heads, "github", disable_numparse=True)
    print(text)
    write_text(config.output / "table.md", f"{text}\n")


def format_cell(mean: float, deviation: float, digits: int) -> str:
    """`mean ± deviation`, or the mean alone: one seed, or infinite sizes, have no deviation."""
    if np.isnan(mean):
        return "no sentence"
    text = f"{mean:.{digits}f}"
    if np.isnan(deviation):
        return text
    return f"{text} ± {deviation:.{digits}f}"


def results_of_seed(config: Config, seed: int) -> pd.DataFrame:
    """Coverage and mean size of each kind of set, on sentences drawn with a seed."""
    sentences = markov.sentences(config.sentences, seed, config.k, config.noise)
    results: dict[str, tuple[float, float]] = {}
    for kind, score in SCORES.items():
        results[kind] = sets.labeling_sets(sentences, config.alpha, score, config.splits)
    results.update(sets.entity_sets(sentences, config.alpha, config.splits))
    return pd.DataFrame.from_dict(results, orient="index", columns=["coverage", "set_size"])


if __name__ == "__main__":
    sys.exit(studies.command(__doc__, Config, study, Path(__file__).parent))
