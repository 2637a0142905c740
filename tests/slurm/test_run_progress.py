"""Whether an attempt brought a run further, as the names of its checkpoints tell."""

import pytest

from sweeps.runs.events import EventKind
from sweeps.runs.run import Run, RunConfig
from sweeps.runs.stages import TRAIN


@pytest.fixture
def run(tmp_path):
    config = RunConfig(backend="trainer", train={"model_name_or_path": "m"})
    run = Run(tmp_path, config)
    run.checkpoints.mkdir()
    return run


@pytest.mark.parametrize(
    ("names", "step"),
    [
        ([], 0),
        (["step-5", "step-40", ".part", "damaged-step-50"], 40),
        (["step_5", "step_40"], 40),
        (["epoch_3"], 0),
        (["step_7", "epoch_12"], 7),
        (["checkpoint-500"], 500),
    ],
)
def test_the_last_saved_step(run, names, step):
    for name in names:
        (run.checkpoints / name).mkdir()
    assert run.last_saved_step() == step


def test_an_epochs_checkpoint_is_progress(run):
    """Also the first one, whose number is 0, and where a checkpoint of more steps is there."""
    for name in ("epoch_0", "step_57", "epoch_1"):
        run.note(EventKind.BEGAN, stage=TRAIN, progress=run.progress())
        run.note(EventKind.ENDED, killed=True)
        assert run.attempts_without_progress(TRAIN) == 1
        (run.checkpoints / name).mkdir()
        assert run.attempts_without_progress(TRAIN) == 0
