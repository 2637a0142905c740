"""The examples run, and say what they should."""

import subprocess
import sys
from pathlib import Path

import check_smoothing
import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "kernel" / "examples"


def dense_loss(hidden, weight, labels, beta, tokens):
    logits = hidden @ weight.T
    return F.cross_entropy(logits, labels, label_smoothing=beta, reduction="sum") / tokens


def loss_without_smoothing(hidden, weight, labels, beta, tokens):
    return dense_loss(hidden, weight, labels, 0.0, tokens)


def loss_that_depends_on_the_split(hidden, weight, labels, beta, tokens):
    return dense_loss(hidden, weight, labels, beta, (labels >= 0).sum())


def loss_without_the_gradient_of_hidden(hidden, weight, labels, beta, tokens):
    return dense_loss(hidden.detach(), weight, labels, beta, tokens)


@pytest.mark.parametrize(
    ("loss", "verdicts"),
    [
        (check_smoothing.loss, [True, True, True]),
        (loss_without_smoothing, [False, False, True]),
        (loss_that_depends_on_the_split, [True, True, False]),
        (loss_without_the_gradient_of_hidden, [True, False, True]),
    ],
)
def test_the_check_tells_right_losses_from_wrong_ones(loss, verdicts):
    assert list(check_smoothing.check(loss).values()) == verdicts


@pytest.mark.parametrize("returned", [torch.Tensor.item, torch.Tensor.detach, torch.Tensor.flatten])
def test_the_check_refuses_what_is_no_loss(returned):
    with pytest.raises(SystemExit, match=r"loss must return a tensor of shape \(\)"):
        check_smoothing.check(lambda *given: returned(dense_loss(*given)))


@pytest.mark.slow
def test_trl(tmp_path):
    pytest.importorskip("trl")
    tiny_world = pytest.importorskip("tiny_world")
    tiny_world.main(tmp_path)
    data = tmp_path / "data.jsonl"
    tiny_world.write_rows(data, [{"text": tiny_world.words(3, 9)} for _ in range(9)])
    out = tmp_path / "out"
    command = [sys.executable, EXAMPLES / "trl_sft.py", tmp_path / "model", data, out]
    options = ["--max_steps=2", "--logging_steps=1", "--report_to=none", "--use_cpu=true"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'loss'" in done.stdout
    assert (out / "model.safetensors").is_file()
