"""A run's stages, train and then score, and how an attempt at them ended."""

from enum import Enum

from sweeps.runs import scoring
from sweeps.runs.run import Run

STAGES = ("train", "score")


class Outcome(Enum):
    """How it ended; the value is the exit code."""

    DONE = 0
    FAILED = 1
    STOPPED = 75  # sysexits.h, EX_TEMPFAIL: saved because somebody asked; to be continued


def next_stage(run: Run) -> str | None:
    """What is to be done next: `train`, then `score`; None when all is there."""
    if not run.trained:
        return "train"
    return "score" if scoring.missing(run) else None
