"""How often 95 % intervals hold the truth: python tests/eval/interval_coverage.py

Prints the Markdown table of eval/METRICS. In a made-up world every model's true error is known: a
question's label is seen through two noisy channels, one that all seeds share and one of a seed's
own; the posterior of the choices is calibrated exactly, and a model states it shifted or sharpened.
"""

import argparse
import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from calibeval import stats
from calibeval.measures import METRICS, Sample, Scores, resamples, rms

DRAWS = 199  # resamples a replication: `stats.quantile` keeps its level whatever their number
POOL = 40_000  # questions that stand for the population
NOISE = {"near chance": (4.0, 2.5), "sure": (1.0, 0.6)}  # sd of the shared and own channel
# Log-probabilities (2000, 4) that stories260K gives HellaSwag's endings, with a temperature.
REAL, TEMPERATURE = Path(__file__).with_name("stories260k_hellaswag.npy"), 5.0
REGULAR = tuple(stats.REGULAR)
BOTH = "rms_debiased", *REGULAR  # of differences; the figure itself has no interval


@dataclass(frozen=True)
class World:
    """Confidences near chance, sure or a real model's; gaps of one size or growing with them.

    `opposite`: of a pair one is sharpened and the other flattened, as β = 0 and β > 0 may be.
    """

    shape: str = "near chance"
    pattern: str = "shift"
    questions: int = POOL
    opposite: bool = False

    def posterior(self, n: int, seeds: int, rng: np.random.Generator) -> tuple:
        """Labels (n,) and each seed's exact log posterior, (seeds, n, 4)."""
        if self.shape == "real":
            exact = pool(self.shape, self.questions)
            exact = exact[rng.integers(0, len(exact), n)]
            labels = (rng.random((n, 1)) > np.exp(exact).cumsum(1)).sum(1).clip(max=3)
            return labels, np.broadcast_to(exact, (seeds, *exact.shape))
        labels = rng.integers(0, 4, n)
        shown = np.eye(4)[labels]
        shared, own = NOISE[self.shape]
        evidence = (shown + shared * rng.normal(size=(n, 4))) / shared**2
        evidence = evidence + (shown + own * rng.normal(size=(seeds, n, 4))) / own**2
        return labels, evidence - np.logaddexp.reduce(evidence, -1, keepdims=True)

    def said(self, exact: np.ndarray, size: float) -> np.ndarray:
        """The log-probabilities that a model whose miscalibration has this size states, (n, 4)."""
        if self.pattern == "sharpen":
            said = exact * math.exp(size)
            return said - np.logaddexp.reduce(said, -1, keepdims=True)
        best = exact.argmax(-1)[:, None]
        top = np.exp(np.take_along_axis(exact, best, -1))
        new = np.clip(top + size, 0.001, 0.999)
        said = exact + np.log((1 - new) / (1 - top))
        np.put_along_axis(said, best, np.log(new), -1)
        return said

    def truth(self, size: float) -> dict[str, float]:
        """Population values of a model: every label of a question, as often as it is right."""
        exact = pool(self.shape, self.questions)
        said = self.said(exact, size)
        n, choices = exact.shape
        every = Scores(np.repeat(said, choices, 0), np.tile(np.arange(choices), n))
        expected = Sample(every, np.exp(exact).reshape(1, -1))
        found = {name: METRICS[name](expected)[0] for name in set(REGULAR) - {"aurc"}}
        right = np.exp(exact)[np.arange(n), said.argmax(1)]
        # From the surest on: wrong answers' share of the first k, equally sure ones in any order.
        order = np.argsort(-said.max(1), kind="stable")
        found["aurc"] = (np.cumsum(1 - right[order]) / np.arange(1, n + 1)).mean()
        return found | {"squared": rms(expected)[0] ** 2}

    def mean_truth(self, size: float, spread: float) -> dict[str, float]:
        """Mean of `truth` over seeds whose sizes are normal with this standard deviation."""
        if not spread:
            return self.truth(size)
        nodes, weights = np.polynomial.hermite_e.hermegauss(5)
        found = [self.truth(size + spread * node) for node in nodes]
        return {k: np.average([f[k] for f in found], weights=weights) for k in found[0]}

    @cache  # noqa: B019
    def size_of(self, error: float, spread: float = 0.0, sign: int = 1) -> float:
        """The size, of this sign, at which the (mean) l2 calibration error is this."""
        low, high = 0.0, 2.0 if self.pattern == "sharpen" else 0.3
        if not error:
            return 0.0
        for _ in range(10):
            middle = (low + high) / 2
            below = self.mean_truth(sign * middle, spread)["squared"] < error**2
            low, high = (middle, high) if below else (low, middle)
        return sign * high


@cache
def pool(shape: str, questions: int) -> np.ndarray:
    """The population's exact log posteriors, (questions, 4)."""
    if shape == "real":
        said = np.load(REAL).astype(float) / TEMPERATURE
        return said - np.logaddexp.reduce(said, 1, keepdims=True)
    return World(shape).posterior(questions, 1, np.random.default_rng(99))[1][0]


@cache
def times(n: int) -> np.ndarray:
    """The resamples that every replication shares, as every run does."""
    return np.concatenate(list(resamples(n, DRAWS)))


def run_of(exact: Sample, drawn: Sample, names: tuple[str, ...]) -> stats.Run:
    """A run as `stats.measure` makes it, without the simulations of floors."""
    regular, c = [name for name in names if name in REGULAR], "choices"
    figures = {name: float(METRICS[name](exact)[0]) for name in regular}
    draws = {name: METRICS[name](drawn) for name in regular}
    draws["rms_debiased"] = stats.squares(exact.top, [drawn.top])
    about = Path("simulated"), "sum", "letters", "m", len(exact.scores.labels), "", None, 1.0
    return stats.Run(*about, (c,), {c: {}}, {c: figures}, {c: {}}, {c: draws})


@dataclass(frozen=True)
class Cell:
    """What is repeated: an estimate over seeds, or (with `other`) a difference of two rows."""

    error: float
    n: int
    seeds: int = 1
    spread: float = 0.0  # between-seed sd of the gaps, in units of the questions' own
    other: float | None = None  # row B's error; row A has `error`
    names: tuple[str, ...] = REGULAR

    def run(self, world: World, replications: int) -> dict[str, float]:
        """{metric: share of intervals that hold the truth}."""
        spread = self.spread * math.sqrt(0.2 / self.n)
        sides = [self.error] if self.other is None else [self.error, self.other]
        signs = (1, -1 if world.opposite else 1)
        sizes = [world.size_of(error, spread, s) for error, s in zip(sides, signs, strict=False)]
        truths = [world.mean_truth(size, spread) for size in sizes]
        seed = zlib.crc32(repr((self, world)).encode())
        rng = np.random.default_rng(seed)
        held = dict.fromkeys(self.names, 0)
        for _ in range(replications):
            labels, exact = world.posterior(self.n, self.seeds * len(sides), rng)
            at = np.repeat(sizes, self.seeds) + spread * rng.normal(size=len(exact))
            said = [world.said(e, s) for e, s in zip(exact, at, strict=True)]
            every = [Scores(one, labels) for one in said]
            runs = [run_of(Sample(s), Sample(s, times(self.n)), self.names) for s in every]
            for name in self.names:
                key = "squared" if name == "rms_debiased" else name
                true = [float(truth[key]) for truth in truths]
                if self.other is None:
                    found, expected = stats.estimate(runs, name, "choices"), true[0]
                else:
                    a, b = runs[: self.seeds], runs[self.seeds :]
                    found = stats.difference(a, b, name, "choices")
                    expected = true[1] - true[0]
                held[name] += found.low - 1e-9 <= expected <= found.high + 1e-9
        return {name: count / replications for name, count in held.items()}


WORLDS = tuple(World(shape, pattern) for shape in NOISE for pattern in ("shift", "sharpen"))
OPPOSITE = tuple(
    World(shape, "sharpen", 2000 if shape == "real" else POOL, opposite=True)
    for shape in ("real", "sure")
)
SIZES = (500, 2000, 14042)
ERRORS = (0.0, 0.02, 0.035, 0.1)
SOME = WORLDS[0], WORLDS[3]
GROUPS = {  # worlds, and what is repeated in each
    "ordinary": (WORLDS, [Cell(e, n) for e in ERRORS for n in SIZES]),
    "seeds": (
        SOME,
        [Cell(0.035, 500, seeds, spread) for seeds, spread in product((2, 3, 5), (0.0, 1.0, 3.0))],
    ),
    "opposite": (
        OPPOSITE,
        [
            Cell(a, n, other=b, names=BOTH)
            for n in SIZES
            for a, b in ((0.02, 0.02), (0.05, 0.05), (0.1, 0.1), (0.0, 0.05), (0.03, 0.08))
        ],
    ),
    "pairs": (
        SOME,
        [
            Cell(a, n, seeds, spread, b, BOTH)
            for n in SIZES[:2]
            for seeds, spread in ((1, 0.0), *product((2, 3, 5), (1.0, 3.0)))
            for a, b in ((0.0, 0.0), (0.035, 0.035), (0.0, 0.035), (0.035, 0.1))
        ],
    ),
}


def simulate(worlds: Sequence[World], cells: list[Cell], replications: int) -> Iterator[dict]:
    """Yield a row a cell: coverage of each metric, in brackets the worst of the worlds."""
    with ProcessPoolExecutor(2) as pool:
        jobs = [(cell, world, replications) for cell in cells for world in worlds]
        results = pool.map(Cell.run, *zip(*jobs, strict=True))
        for cell in cells:
            error = f"{cell.error:g}" + ("" if cell.other is None else f" and {cell.other:g}")
            row = {"N": cell.n, "true error": error, "seeds": cell.seeds, "seed sd": cell.spread}
            for name, covered in pd.DataFrame(islice(results, len(worlds))).items():
                row[name] = f"{covered.mean():.3f} ({covered.min():.3f})"
            yield row


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replications", type=int, default=500, help="of a cell, all worlds")
    parser.add_argument("--only", choices=GROUPS)
    a = parser.parse_args()
    for group, (worlds, cells) in GROUPS.items():
        if a.only not in (None, group):
            continue
        each = a.replications // len(worlds)
        total = each * len(worlds)
        print(
            f"\n{group}: {total} replications a cell, standard error of 0.95 "
            f"{math.sqrt(0.95 * 0.05 / total):.3f}; in brackets the worst of {len(worlds)} worlds\n"
        )
        rows = tqdm(simulate(worlds, cells, each), group, len(cells))
        print(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
