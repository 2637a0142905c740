"""Real DeepSpeed on two CPU ranks over gloo, against one process with torch's loss.

One launch runs every case, for start-up is slow; tests read their case from its results.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
for module in ("deepspeed", "peft", "transformers"):
    pytest.importorskip(module, reason=f"{module} is not installed")

WORKER = Path(__file__).with_name("zero_worker.py")
PLAIN = {"stage": 3, "tied": False, "accumulation": 1, "checkpointing": "off", "lora": False}
CASES = [
    {},
    {"tied": True},
    {"accumulation": 2},
    {"tied": True, "accumulation": 2, "lora": True},
    {"checkpointing": "reentrant", "lora": True},
    {"checkpointing": "non-reentrant"},
    {"tied": True, "accumulation": 2, "checkpointing": "reentrant"},
    {"stage": 2, "accumulation": 2},
    {"stage": 2, "tied": True, "checkpointing": "reentrant", "lora": True},
    {"stage": 0, "tied": True, "accumulation": 2},
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Those of all cases, by name."""
    folder = tmp_path_factory.mktemp("zero")
    cases = {str(case): {**PLAIN, **case} for case in CASES}
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [WORKER, folder / "cases.json", folder / "results.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(results, case):
    """Of even and ragged batches, and of one whose last rank has no valid label; under ZeRO-3 an
    untied head is freed after its own backward."""
    for batch, result in results[str(case)].items():
        assert result["error"] <= 1e-6 and result["worst_error"] <= 1e-5, (batch, result)
        if case.get("stage", 3) == 3 and not case.get("tied"):
            assert result["resident"] and not any(result["resident"]), (batch, result)
