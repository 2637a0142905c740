"""Bootstrap resamples of the questions, the same ones for every run of as many questions."""

from collections.abc import Iterator

import numpy as np

RESAMPLES, SEED, CHUNK = 1000, 0, 50


def resamples(
    order: np.ndarray,  # (N,) row of the record file at each sorted place
    count: int = RESAMPLES,
) -> Iterator[np.ndarray]:
    """Yield (R, N) places in the sorted order, each row ascending.

    Draws are made on the record file's rows, so runs over the same questions are resampled alike:
    differences between them are paired.
    """
    rng = np.random.default_rng(SEED)
    n = len(order)
    places = np.arange(n)
    for start in range(0, count, CHUNK):
        rows = []
        for _ in range(min(CHUNK, count - start)):
            times = np.bincount(rng.integers(0, n, n, dtype=np.int32), minlength=n)
            rows.append(np.repeat(places, times[order]))
        yield np.stack(rows)
