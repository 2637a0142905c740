"""What the end of a stage's program means, told from what torchrun and srun print.

The lines are those that torch 2.13 and Slurm 22.05 print.
"""

import pytest

from sweeps.launch.program_end import ProgramEnd
from sweeps.runs.files import last_error

SRUN_KILLS_THE_REST = [
    "srun: First task exited 30s ago",
    "srun: StepId=10.0 task 0: running",
    "srun: launch/slurm: _step_signal: Terminating StepId=10.0",
    "srun: error: n1: task 0: Killed",
]


def rank(exit_code: int) -> str:
    """The line of torchrun's summary about a rank that has ended by itself."""
    return f"  exitcode  : {exit_code} (pid: 12)"


def node(number: int, how: str) -> str:
    """The line of srun about the program on a node."""
    return f"srun: error: n{number}: task {number - 1}: {how}"


FAILED = "Exited with exit code 1"
ENDS = {
    "well": (0, [rank(1)], 0),
    "a rank was killed, and the other one lost its connection": (
        1, [rank(1), node(1, FAILED), rank(-9), node(2, FAILED)], -9,
    ),
    "the same in the other order": (1, [rank(-9), rank(1), node(2, FAILED)], -9),
    "a rank failed, and the other one's NCCL aborted": (1, [rank(-6), rank(1)], 1),
    "all have saved": (1, [rank(75), rank(75)], 75),
    "all have saved without torchrun": (75, [node(2, "Exited with exit code 75")], 75),
    "one has failed, and srun has killed the other": (
        137, [rank(1), node(2, FAILED), *SRUN_KILLS_THE_REST], 1,
    ),
    "bad input on one node, before its torchrun": (
        137, [node(2, "Exited with exit code 2"), *SRUN_KILLS_THE_REST], 2,
    ),
    "a torchrun was killed": (137, [node(2, "Killed"), rank(1), node(1, FAILED)], -9),
    "a torchrun was killed, and srun has killed the other": (
        137, [node(2, "Killed"), *SRUN_KILLS_THE_REST], -9,
    ),
    "all aborted": (134, [rank(-6), node(1, "Aborted")], -6),
    "srun itself was killed": (-9, [], -9),
}  # fmt: skip


@pytest.mark.parametrize(("exit_code", "lines", "expected"), ENDS.values(), ids=list(ENDS))
def test_an_end_on_two_nodes_is_what_happened_first(exit_code, lines, expected):
    assert ProgramEnd(exit_code, lines, nodes=2).telling_exit_code == expected


@pytest.mark.parametrize(
    ("exit_code", "lines", "expected"),
    [(1, [rank(75), rank(-9)], -9), (1, ["no rank"], 1), (-9, [rank(1)], -9), (0, [], 0)],
)
def test_on_one_node_torchrun_prints_the_first_failure_last(exit_code, lines, expected):
    assert ProgramEnd(exit_code, lines).telling_exit_code == expected


def test_the_error_that_is_shown_is_no_consequence_of_another_ones():
    lines = [
        "RuntimeError: the loss is nan",
        "torch.distributed.DistBackendError: [gloo] Connection closed by peer [10.0.0.1]:1",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        node(1, FAILED),
    ]
    assert last_error(lines) == "RuntimeError: the loss is nan"
    assert "Connection closed" in last_error(lines[1:])
    assert last_error(lines[3:]) == f"error: n1: task 0: {FAILED}"
