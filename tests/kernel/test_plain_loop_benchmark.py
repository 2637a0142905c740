"""The benchmark of a plain training loop."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plain_loop.py"


def run(*words, **environment):
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_without_a_gpu_it_says_so():
    pytest.importorskip("transformers")
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "torch finds no CUDA GPU" in done.stderr


@pytest.mark.gpu
def test_every_loss_trains():
    pytest.importorskip("transformers")
    done = run("--models", "tiny", "--steps", "2", "--length", "128")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^\| tiny \| (\S+) \| ([\d,]+) \| [\d.]+ \| ([\d.]+) \|", done.stdout, re.M)
    losses = {name: float(loss) for name, _, loss in rows}
    assert set(losses) == {"smoothed", "workspace=0", "transformers"}
    assert losses["smoothed"] == pytest.approx(losses["workspace=0"], abs=0.01)
