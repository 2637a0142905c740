"""pass@k: the chance that one of k sampled answers is right, over problems and seeds.

    pass@k = mean over problems of 1 − C(n − c, k) / C(n, k),    c of n ≥ k answers right

Without bias for every k (Chen et al. 2021, arXiv 2107.03374, equation 1).
"""

from itertools import combinations
from math import comb

import numpy as np
from tabulate import tabulate

from calibeval import measures, stats


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k)."""
    return 1 - comb(n - c, k) / comb(n, k)


def tables(runs: dict[str, list[list[int]]], samples: int) -> str:
    """pass@1 and pass@`samples` by setting and of every two settings' difference, as Markdown.

    `runs` are the right answers to each problem, a list a seed, by the setting's name. [low, high]
    is a 95 % interval over problems and seeds (`stats.of_sides`), and a difference is paired by
    problem, and by seed where both sides have as many.
    """
    asked, ks = len(next(iter(runs.values()))[0]), (1, samples)
    draws = np.concatenate([*measures.resamples(asked, stats.RESAMPLES)]) / asked
    sides = {}  # of each setting and k: the runs' means (S,), and their draws (S, R)
    for name, of in runs.items():
        values = [np.vectorize(lambda c, k=k: pass_at_k(samples, c, k))(of) for k in ks]
        sides[name] = [(one.mean(1), one @ draws.T) for one in values]
    single = {name: [stats.of_sides(x, ends=(0, 1)) for x in of] for name, of in sides.items()}
    rows = [[name, len(runs[name]), *map(str, of)] for name, of in single.items()]
    less = {name: [(-found, -drawn) for found, drawn in of] for name, of in sides.items()}
    pairs = [
        [b, a, *map(str, map(stats.of_sides, less[a], sides[b]))] for a, b in combinations(sides, 2)
    ]
    found = [
        tabulate(of, ["", head, *(f"pass@{k}" for k in ks)], "github", disable_numparse=True)
        for of, head in ((rows, "seeds"), (pairs, "less"))
    ]
    return "\n\n".join([*found, f"{asked} problems; [low, high]: 95 % over problems and seeds.\n"])
