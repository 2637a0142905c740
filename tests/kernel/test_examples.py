"""The examples run, and say what they should."""

import subprocess
import sys
from pathlib import Path

import check_smoothing
import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "kernel" / "examples"


def test_the_check_tells_right_losses_from_wrong_ones():
    def dense(e, c, y, beta, tokens):
        return F.cross_entropy(e @ c.T, y, label_smoothing=beta, reduction="sum") / tokens

    for loss, said in (
        (check_smoothing.loss, [True] * 3),
        (lambda e, c, y, beta, n: dense(e, c, y, 0.0, n), [False, False, True]),
        (lambda e, c, y, beta, n: dense(e, c, y, beta, (y >= 0).sum()), [True, True, False]),
        (lambda e, c, y, beta, n: dense(e.detach(), c, y, beta, n), [True, False, True]),
    ):
        assert list(check_smoothing.check(loss).values()) == said
    for returned in (torch.Tensor.item, torch.Tensor.detach, torch.Tensor.flatten):
        with pytest.raises(SystemExit, match=r"loss must return a tensor of shape \(\)"):
            check_smoothing.check(lambda *given, end=returned: end(dense(*given)))


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
