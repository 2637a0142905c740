"""The examples run, and say what they should."""

import subprocess
import sys
from pathlib import Path

import check_smoothing
import pytest
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "kernel" / "examples"


def test_the_check_tells_right_losses_from_wrong_ones():
    def dense(e, c, y, beta, tokens):
        return F.cross_entropy(e @ c.T, y, label_smoothing=beta, reduction="sum") / tokens

    def deaf(e, c, y, beta, tokens):
        return dense(e, c, y, 0.0, tokens)

    def of_its_part(e, c, y, beta, tokens):
        return dense(e, c, y, beta, (y >= 0).sum())

    losses = check_smoothing.loss, dense, deaf, of_its_part
    found = [list(check_smoothing.check(loss).values()) for loss in losses]
    assert found == [[True] * 3, [True] * 3, [False, False, True], [True, True, False]]


@pytest.mark.slow
def test_trl(tmp_path):
    pytest.importorskip("trl")
    tiny_world = pytest.importorskip("tiny_world")
    tiny_world.main(tmp_path)
    data = tmp_path / "data.jsonl"
    tiny_world.write_rows(data, [{"text": tiny_world.words(3, 9)} for _ in range(9)])
    words = [str(x) for x in ("trl_sft.py", tmp_path / "model", data, tmp_path / "out")]
    options = ["--max_steps=2", "--logging_steps=1", "--report_to=none", "--use_cpu=true"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / words[0], *words[1:], *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'loss'" in done.stdout and (tmp_path / "out" / "model.safetensors").is_file()
