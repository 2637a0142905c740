"""The benchmark command: its options, what it measures, and its tables."""

import json
import sys

import pytest
import torch

from smoothce.bench import __main__ as command
from smoothce.bench import measure
from smoothce.bench.peers import dense


def test_table_and_json(tmp_path, capsys, monkeypatch):
    file = tmp_path / "bench.json"
    options = ["--device", "cpu", "--models", "640x32", "--tokens", "16", "--repeats", "1"]
    options += ["--seconds", "0.01", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    command.main()
    said = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert "torch" in written["versions"] and "--models 640x32" in written["command"]
    rows = {row["method"]: row for row in written["results"]}
    assert list(rows) == ["ours, chunked", "torch", "the products alone"]
    for name, row in rows.items():
        assert "failed" not in row and row["both_ms"] > 0 and row["forward_ms"] > 0
        assert f"| {name} |" in said
    assert all(rows[name]["error_weight"] < 1e-4 for name in ("ours, chunked", "torch"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--device cuda", "no CUDA GPU"),
        ("--models gemma", "--models"),
        ("--json nowhere/out.json", "no such folder"),
        ("--only magic", "in no method's name"),
        ("--method nowhere:loss", "'nowhere:loss' is no module:function"),
    ],
)
def test_bad_options_are_named(options, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        command.parse(options.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def mine(hidden, weight, labels, label_smoothing):
    return dense(hidden, weight, labels, label_smoothing)


def test_a_loss_of_ones_own():
    args = command.parse(["--device", "cpu", "--only", "chunked", "--method", f"{__name__}:mine"])
    assert [peer.name for peer in args.peers] == ["ours, chunked", f"{__name__}:mine"]
    given = measure.problem(("64x8", 64, 8), 24, 1.0, 0.0, 2.0, "cpu")
    rows = measure.rows(given, args.peers, [0.1], 0, 0)
    assert rows[0]["error_weight"] < 1e-4 and "softcap" in rows[1]["failed"]
    assert rows[1]["failed"] in command.table("made", rows).splitlines()[-1]
