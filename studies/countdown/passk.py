"""pass@1 and pass@n: the share of n sampled answers that are right, and of problems with one."""

from itertools import combinations

import numpy as np
from tabulate import tabulate

from calibeval import measures, stats


def tables(runs: dict[str, list[list[int]]], samples: int) -> str:
    """pass@1 and pass@`samples` by setting and of every two settings' difference, as Markdown.

    `runs` are the right answers to each problem, a list a seed, by the setting's name. [low, high]
    is a 95 % interval over problems and seeds (`stats.estimate_sum`), and a difference is paired by
    problem, and by seed where both sides have as many.
    """
    asked = len(next(iter(runs.values()))[0])
    draws = np.concatenate([*measures.resamples(asked, stats.RESAMPLES)]) / asked
    sides = {}  # of each setting and column: the runs' means (S,), and their draws (S, R)
    for name, right in runs.items():
        values = np.array(right) / samples, np.array(right) > 0
        sides[name] = [stats.Side(one.mean(1), one @ draws.T) for one in values]
    single = {name: [stats.estimate_sum(x, ends=(0, 1)) for x in of] for name, of in sides.items()}
    rows = [[name, len(runs[name]), *map(str, of)] for name, of in single.items()]
    less = {name: [side.times(-1) for side in of] for name, of in sides.items()}
    pairs = [
        [b, a, *map(str, map(stats.estimate_sum, less[a], sides[b]))]
        for a, b in combinations(sides, 2)
    ]
    found = [
        tabulate(of, ["", head, "pass@1", f"pass@{samples}"], "github", disable_numparse=True)
        for of, head in ((rows, "seeds"), (pairs, "less"))
    ]
    return "\n\n".join([*found, f"{asked} problems; [low, high]: 95 % over problems and seeds.\n"])
