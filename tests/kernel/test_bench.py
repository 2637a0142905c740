"""The benchmark runs on a CPU at a tiny shape and prints its table; its losses are right."""

import functools
import json
from importlib.util import find_spec
from pathlib import Path

import bench
import methods
import paper
import pytest
import torch
from loss_check import DEVICE

ROOT = Path(__file__).parents[2]
EXACT = 1e-2 if DEVICE == "cuda" else 1e-4  # errors of exact gradients in the inputs' dtype
TINY = ["--device", "cpu", "--models", "640x32", "--tokens", "16", "--repeats", "1"]
TINY += ["--seconds", "0.01"]


def test_table_and_json(tmp_path, capsys):
    """With a peer that is not installed, one that knows no softcap, and a checkout beside this."""
    file = tmp_path / "bench.json"
    names = ["ours", "torch", "torch-linear", "quack", "bound", "methods:dense"]
    words = [*TINY, "--json", str(file), "--softcap", "none", "30", "--beside", str(ROOT)]
    bench.main([*words, "--methods", *names])
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert "torch" in written["versions"] and "--models 640x32" in written["command"]
    names = [row["method"] for row in written["results"]]
    plain = dict(zip(names[:7], written["results"], strict=False))
    capped = dict(zip(names[7:], written["results"][7:], strict=True))
    for name in ("ours", "ours, beside", "torch", "methods:dense"):
        for row in (plain[name], capped[name]):
            assert row["both_ms"] > 0 and row["forward_ms"] > 0
            assert row["error_weight"] < EXACT and row["same_bits"]
        assert f"| {name} |" in printed
    linear, quack = names[2:4]
    if find_spec("quack") is None:
        assert plain[quack]["failed"].startswith("ModuleNotFoundError")
    assert plain[linear]["label_smoothing"] == 0
    assert capped[linear]["failed"] == capped[quack]["failed"] == "ValueError: knows no softcap"
    assert "| the products alone (bound) | – |" in printed
    assert "### 640x32, N=16, V=640, D=32, context 2, β=0.1, softcap 30, mean loss" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cuda", "no CUDA GPU"),
        ("--device cpu --json nowhere/out.json", "no such folder"),
        ("--device cpu --methods magic", "'magic' is none of ours, "),
        ("--device cpu --repeats 0", "must be at least 1, not 0"),
        ("--device cpu --methods nowhere:loss", "'nowhere:loss' is none of"),
        ("--beside /", "/ is no checkout"),
    ],
)
def test_bad_options_are_named(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.parse(options.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def errors_of(losses, softcap, draws=1):
    model = "96x32" if DEVICE == "cpu" else "8192x64"
    problem = bench.make_problem(DEVICE, model, 24, ("context", 1.0), 0.4, 0.1, softcap)
    _, rows = bench.measure(problem, losses, draws, repeats=0, seconds=0)
    return {row.method: row for row in rows}


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_methods_are_right(softcap):
    losses = [methods.METHODS[name] for name in ("ours", "workspace=0", "torch")]
    losses.append(methods.Method("triton, filtered", methods.ours(filter_eps=0.3, impl="triton")))
    rows = errors_of(losses, softcap)
    for name in ("ours", "ours, workspace=0", "torch"):
        assert rows[name].error_hidden < EXACT and rows[name].same_bits
    assert rows["triton, filtered"].error_hidden < 0.2


def test_the_mean_of_several_draws_of_the_filter_is_less_off():
    filtered = methods.Method("filtered", methods.ours(filter_eps=0.5, impl="triton"))
    one, sixteen = (errors_of([filtered], None, draws)["filtered"] for draws in (1, 16))
    assert 0 < sixteen.error_hidden < one.error_hidden


@pytest.mark.parametrize("sort", [False, True])
def test_the_papers_algorithm_is_right_unfiltered(sort):
    unfiltered = functools.partial(paper.loss, filter_eps=None, sort=sort)
    row = errors_of([methods.Method("paper", unfiltered)], None)["paper"]
    # Its sums are in the inputs' dtype.
    assert max(row.error_hidden, row.error_weight) < 50 * EXACT
