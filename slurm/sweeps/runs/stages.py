"""A run's stages, training and then scoring, and how the work on them ended."""

from enum import Enum

from sweeps.runs import scoring
from sweeps.runs.run import Run

TRAIN = "train"
SCORE = "score"
STAGES = (TRAIN, SCORE)  # in their order; each is also the `python -m sweeps` command that does it


class Outcome(Enum):
    """How the work on a run ended, of an element or of a worker here; the value is the exit code.

    FINISHED_STAGES does not imply that the run is done: where another array scores it, the stages
    of the first one end with the training, and its folder has no file DONE yet.
    """

    FINISHED_STAGES = 0  # those that this element or worker was to do
    FAILED = 1
    STOPPED = 75  # sysexits.h, EX_TEMPFAIL: saved because somebody asked; to be continued


def next_stage(run: Run) -> str | None:
    """The stage to be done next, `train` or `score`; None when everything is there."""
    if not run.trained:
        return TRAIN
    if scoring.unscored_tasks(run):
        return SCORE
    return None
