"""The examples run, and say what they should."""

import subprocess
import sys
from pathlib import Path

import check_smoothing
import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "kernel" / "examples"


def dense(hidden, weight, labels, beta, tokens):
    summed = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=beta, reduction="sum")
    return summed / tokens


def without_smoothing(hidden, weight, labels, beta, tokens):
    return dense(hidden, weight, labels, 0.0, tokens)


def by_its_own_tokens(hidden, weight, labels, beta, tokens):
    return dense(hidden, weight, labels, beta, (labels >= 0).sum())


def without_a_gradient_of_hidden(hidden, weight, labels, beta, tokens):
    return dense(hidden.detach(), weight, labels, beta, tokens)


@pytest.mark.parametrize(
    ("loss", "holds"),
    [
        (check_smoothing.loss, [True, True, True]),
        (without_smoothing, [False, False, True]),
        (by_its_own_tokens, [True, True, False]),
        (without_a_gradient_of_hidden, [True, False, True]),
    ],
)
def test_the_check_tells_right_losses_from_wrong_ones(loss, holds):
    assert list(check_smoothing.check(loss).values()) == holds


@pytest.mark.parametrize("returned", [torch.Tensor.item, torch.Tensor.detach, torch.Tensor.flatten])
def test_the_check_refuses_what_is_no_loss(returned):
    with pytest.raises(SystemExit, match=r"loss must return a tensor of shape \(\)"):
        check_smoothing.check(lambda *arguments: returned(dense(*arguments)))


def run(script, *arguments):
    command = [sys.executable, EXAMPLES / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def world(tmp_path):
    """A folder with a tiny model, and rows of text."""
    pytest.importorskip("transformers")
    tiny_world = pytest.importorskip("tiny_world")
    tiny_world.main(tmp_path)
    rows = [{"text": tiny_world.words(3, 9)} for _ in range(9)]
    tiny_world.write_rows(tmp_path / "data.jsonl", rows)
    return tmp_path


@pytest.mark.slow
def test_trl(world):
    pytest.importorskip("trl")
    own = ["--model", world / "model", "--data", world / "data.jsonl", "--label_smoothing", 0.2]
    trls = ["--output_dir", world / "out", "--max_steps=2", "--logging_steps=1"]
    said = run("trl_sft.py", *own, *trls, "--report_to=none", "--use_cpu=true")
    assert "'loss'" in said and (world / "out" / "model.safetensors").is_file()
