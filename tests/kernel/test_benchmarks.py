"""The table of the benchmark of the loss has a row a method, whose errors are right."""

import json
from pathlib import Path

import bench
from loss_check import DEVICE

ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-2 if DEVICE == "cuda" else 1e-4  # errors of exact gradients in the inputs' dtype
TINY = ["--device", "cpu", "--models", "640x32", "--tokens", "16", "--repeats", "1"]
TINY += ["--seconds", "0.01"]


def test_the_loss_table_has_a_row_a_method_whose_gradient_is_right(tmp_path, capsys):
    """With a peer that is not installed, one that knows no softcap, and a checkout beside this."""
    file = tmp_path / "bench.json"
    names = ["ours", "torch", "torch-linear", "quack", "bound", "methods:dense"]
    words = [*TINY, "--json", str(file), "--softcap", "30", "--beside", str(ROOT)]
    bench.main([*words, "--methods", *names])
    printed = capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads(file.read_text())["results"]}
    for name in ("ours", "ours, beside", "torch", "methods:dense"):
        assert rows[name]["both_ms"] > 0 and rows[name]["same_bits"]
        assert rows[name]["error_weight"] < EXACT
        assert f"| {name} |" in printed
    failed = [row["failed"] for row in rows.values() if row["failed"]]
    assert failed == ["ValueError: knows no softcap"] * 2
