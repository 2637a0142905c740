"""What is used of submitit is there, and its absence is told with the versions that have it."""

import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.launch import submitit_adapter

REMOVE = {
    "the writer of scripts": "import submitit.slurm.slurm as m; del m._make_sbatch_string",
    "what is pickled": "import submitit.core.utils as m; del m.DelayedSubmission",
    "the handler of USR2": (
        "import submitit.core.job_environment as m; del m.SignalHandler.checkpoint_and_try_requeue"
    ),
}


@pytest.mark.parametrize("removal", REMOVE.values(), ids=list(REMOVE))
def test_a_part_that_is_gone_is_told_with_the_tested_versions(removal):
    # submitit's own modules import what is removed, so all are loaded before.
    code = f"import submitit, submitit.helpers; {removal}; import sweeps.launch.submitit_adapter"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith("ImportError: submitit "), done.stderr
    assert "lacks a part that sweeps needs" in error and "submitit==1.5.4" in error


def test_no_other_module_uses_submitit():
    package = Path(submitit_adapter.__file__).parents[1]
    users = [path.name for path in package.rglob("*.py") if "import submitit" in path.read_text()]
    users += [path.name for path in package.rglob("*.py") if "from submitit" in path.read_text()]
    assert set(users) == {"submitit_adapter.py"}
