"""Do prediction sets hold a tagger's right labels? `python -m studies.sequence_sets`.

On a hidden Markov model, whose posterior is known. The table goes to `output` as well.
"""

import sys
from pathlib import Path

import numpy as np
from pydantic import PositiveFloat, PositiveInt
from tabulate import tabulate

import studies
from calibeval.io import write_text
from studies.sequence_sets import markov, sets


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
    """Every kind of set, one row each."""
    found = [sets.entity_sets(of, alpha, splits) for of in files]
    for every, of in zip(found, files, strict=True):
        for score in ("lac", "cumulative"):
            every[score] = sets.labeling_sets(of, alpha, score, splits)
    rows = []
    for kind in ("lac", "cumulative", sets.ALL, sets.SIDAK):
        rows.append([kind, *figure([every[kind] for every in found])])
        for name in found[0][kind].by:
            of = [every[kind].by[name] for every in found if name in every[kind].by]
            rows.append([f"{kind}: {name}", *figure(of)])
    missing = np.mean([np.mean([s.gold not in s.labelings for s in of]) for of in files])
    right = np.mean([np.mean([s.gold == s.labelings[0] for s in of]) for of in files])
    head = f"α = {alpha}, likeliest labeling right {right:.3f}, right one missing {missing:.4f}\n"
    columns = ["sets", "coverage", "size", "hold all"]
    return head + tabulate(rows, columns, "github", disable_numparse=True)


def figure(found: list[sets.Sets]) -> list[str]:
    """Coverage and size, mean ± standard deviation over seeds."""
    values = np.array([(of.coverage, of.size, of.unbounded) for of in found])
    (coverage, size, unbounded), (a, b, _) = values.mean(0), values.std(0, ddof=1)
    return [f"{coverage:.3f} ± {a:.3f}", f"{size:.2f} ± {b:.2f}", f"{unbounded:.2%}"]


if __name__ == "__main__":
    sys.exit(main())
