"""All that is used of submitit, public and private.

submitit writes the script of a job array, pickles what an element calls, and in the job reads the
pickle, calls it and installs signal handlers. Its public way to submit an array,
`SlurmExecutor.map_array`, does not suffice here. It pickles each element under a random name, runs
sbatch, and renames the pickles by the job id that sbatch has printed. A launch that is killed
between the two, or whose sbatch times out although Slurm took the job, leaves a queued array whose
elements wait for pickles that nobody will rename, and then fail. So the script here brings all that
it needs: it copies one pickle, written before sbatch is called, to the name that submitit expects.

For this, four things are used that submitit does not promise to keep:

* `submitit.slurm.slurm._make_sbatch_string(command, folder, …)` writes the script; see
  `script_text`.
* `submitit.core.utils.DelayedSubmission` is what gets pickled: a callable, and how often it may be
  requeued at its time limit; see `write_pickle`.
* `python -m submitit.core._submit FOLDER` is the command of an element. It reads
  `FOLDER/<array>_<index>_submitted.pkl`, handles signals and calls what was pickled, with FOLDER in
  the variable SUBMITIT_FOLDER; see `element_command`.
* The USR2 handler that it installs pickles the callable's `checkpoint()` again, calls `scontrol
  requeue` and exits. That would leave a program of the run no time to save, and it would guess from
  the time that has passed whether a job is preempted or timed out. So the callable replaces it by
  a handler of its own as soon as it is called; submitit's acts only on an USR2 that comes before.

`TESTED_VERSIONS` are those with which all four were tested. Another version may work: if one of the
four is gone, the import of this module says so.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sweeps.runs.processes import job_label

TESTED_VERSIONS = ("1.5.4",)

try:
    from submitit.core.job_environment import SignalHandler
    from submitit.core.utils import DelayedSubmission
    from submitit.helpers import Checkpointable
    from submitit.slurm.slurm import _make_sbatch_string

    SignalHandler.checkpoint_and_try_requeue  # noqa: B018 its absence raises AttributeError
    if find_spec("submitit.core._submit") is None:
        raise ImportError("no module named submitit.core._submit")
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"submitit {version('submitit')} lacks a part that sweeps needs ({error}); tested with: "
        f"pip install submitit=={' or '.join(TESTED_VERSIONS)}"
    ) from error

__all__ = [
    "ENDLESS",
    "Checkpointable",
    "copy_pickle_lines",
    "element_command",
    "element_folder",
    "element_index",
    "element_log",
    "label_in_script",
    "script_text",
    "write_pickle",
]

# Stands for no limit where submitit wants a number: of minutes, requeues, or elements at a time.
ENDLESS = 1_000_000
PICKLE = "element.pkl"


def script_text(
    command: str, job_folder: Path, setup: list[str], parameters: Mapping[str, Any]
) -> str:
    """The script for sbatch of a job that runs `command` after the lines of `setup`.

    `job_folder` is the folder of its logs. `parameters` are those of
    `SlurmExecutor.update_parameters`, and `map_count`, the number of an array's elements.
    """
    text: str = _make_sbatch_string(command, job_folder, setup=setup, **parameters)
    return text


def element_command(python: str, job_folder: Path) -> str:
    """The shell command of an array's element, which calls what was pickled in `job_folder`."""
    return f"{python} -u -m submitit.core._submit {shlex.quote(str(job_folder))}"


def copy_pickle_lines(job_folder: Path, is_array: bool) -> list[str]:
    """Shell lines that put the pickle where the element's command looks for it.

    They run at every start of an element, and remove what a kill during a requeue left half
    written: submitit would refuse to write it again.
    """
    folder = shlex.quote(str(job_folder))
    return [
        f"mine={folder}/{label_in_script(is_array)}_submitted.pkl",
        f'cp {folder}/{PICKLE} "$mine"; rm -f "$mine.save_tmp"',
    ]


def label_in_script(is_array: bool) -> str:
    """What stands in a script for `job_label()` of its element.

    The last element of an array has the array's own number as its SLURM_JOB_ID, by which Slurm's
    tools understand all elements.
    """
    return "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_array else "${SLURM_JOB_ID}"


def write_pickle(element: Callable[[], None], job_folder: Path) -> None:
    """Pickle what every element of an array calls; it may be requeued without end."""
    submission = DelayedSubmission(element)
    submission.set_timeout(timeout_min=ENDLESS, max_num_timeout=ENDLESS)
    submission.dump(job_folder / PICKLE)


def element_folder() -> Path:
    """In an element: the folder that `element_command` was given."""
    return Path(os.environ["SUBMITIT_FOLDER"])


def element_index() -> int:
    """In an element: its index in the array, 0 of a job without one."""
    return int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))


def element_log() -> Path:
    """In an element: the file that holds what it prints, and what the srun above it prints."""
    return element_folder() / f"{job_label()}_0_log.out"
