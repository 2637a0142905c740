"""What is said of other programs that fail, and of those that do not answer."""

import socket

import pytest

from calibeval.io import InputError
from sweeps.runs.processes import free_meeting_port, run_checked


def words_of(script: str, patience: float = 20) -> str:
    """With which words a shell script is refused that plays one of Slurm's tools."""
    with pytest.raises(InputError) as caught:
        run_checked("sh", "-c", script, patience=patience)
    return str(caught.value)


def test_a_refusal_is_told_in_the_tools_own_words_and_nobody_is_sent_to_try_again():
    refusal = "scancel: error: Kill job error on job id 5: Access/permission denied"
    words = words_of(f"echo '{refusal}' >&2; exit 1")
    assert words == "sh fails: error: Kill job error on job id 5: Access/permission denied"


@pytest.mark.parametrize(
    "message",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
    ],
)
def test_a_controller_that_is_away_is_to_be_asked_again(message):
    words = words_of(f"echo '{message}' >&2; exit 1")
    assert words.startswith("sh does not answer: ") and "try again in a minute" in words
    assert message.partition("error: ")[2] in words


def test_a_port_that_another_program_listens_on_is_passed_over():
    """As where an earlier run's ranks, or another user's program, still has the job's own port."""
    free = free_meeting_port(4711)
    with socket.socket() as listener:
        listener.bind(("", free))
        listener.listen()
        assert free_meeting_port(4711) > free
    assert free_meeting_port(4711) == free
