"""pass@1 and pass@n: the share of n sampled answers that are right, and of problems with one."""

from itertools import combinations

import numpy as np
from tabulate import tabulate

from calibeval.measures import evaluations, stats
from calibeval.measures.samples import resamples as drawn_resamples


def tables(runs: dict[str, list[list[int]]], samples: int) -> str:
    """pass@1 and pass@`samples` by setting and of every two settings' difference, as Markdown.

    `runs` are the numbers of right answers to each problem, a list a seed, by the setting's name.
    [low, high] is a 95 % interval over problems and seeds: of a setting by `stats.estimate_mean`,
    of a difference by `stats.estimate_sum`. A difference is paired by problem, and by seed where
    both sides have as many. Where they have not, a sentence below the tables says so. Where few
    problems differ, the interval is widened to Bonett and Price's (`stats.bonett_price`).
    """
    problems = len(next(iter(runs.values()))[0])
    resamples = list(drawn_resamples(problems, evaluations.RESAMPLES))
    weights = np.concatenate(resamples) / problems  # (resamples, problems)
    # Of each setting two: pass@1 and pass@`samples`.
    rates_of_setting = {
        name: pass_rates(np.array(counts), samples, weights) for name, counts in runs.items()
    }
    setting_rows = []
    for name, rates in rates_of_setting.items():
        estimates = [stats.estimate_mean(rate, lowest=0, highest=1) for rate in rates]
        setting_rows.append([name, len(runs[name]), *map(str, estimates)])
    difference_rows = []
    not_paired = []
    for minus, plus in combinations(rates_of_setting, 2):
        if not stats.are_paired([rates_of_setting[minus][0], rates_of_setting[plus][0]]):
            not_paired.append(f"{plus} less {minus}")
        estimates = [
            stats.estimate_sum(minus_rate.weighted(-1), plus_rate)
            for minus_rate, plus_rate in zip(
                rates_of_setting[minus], rates_of_setting[plus], strict=True
            )
        ]
        difference_rows.append([plus, minus, *map(str, estimates)])
    texts = []
    for rows, heading in ((setting_rows, "seeds"), (difference_rows, "less")):
        headings = ["", heading, "pass@1", f"pass@{samples}"]
        texts.append(tabulate(rows, headings, "github", disable_numparse=True))
    note = f"{problems} problems; [low, high]: 95 % over problems and seeds.\n"
    if not_paired:
        note += f"Not paired by seed, since the numbers of seeds differ: {', '.join(not_paired)}.\n"
    return "\n\n".join([*texts, note])


def pass_rates(counts: np.ndarray, samples: int, weights: np.ndarray) -> list[stats.Side]:
    """A setting's pass@1 and pass@n: of each seed, and of each seed's resamples of the problems.

    `counts` (seeds, problems) are the numbers of right answers out of `samples`; `weights`
    (resamples, problems) say how much a problem counts in each resample.
    """
    rates = []
    for passed in (counts / samples, counts > 0):
        rate_of_each_problem = passed.astype(float)  # (seeds, problems)
        side = stats.Side(
            values=passed.mean(1),
            draws=passed @ weights.T,
            unit_values=rate_of_each_problem,
            right_answers=rate_of_each_problem,
        )
        rates.append(side)
    return rates
