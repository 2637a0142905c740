"""The benchmark: its options, what it measures, and its tables; ours, torch's and the paper's."""

import functools
import json
import sys

import paper
import pytest
import torch
from loss_check import DEVICE

from smoothce import triton
from smoothce.bench import __main__ as command
from smoothce.bench import measure
from smoothce.bench.peers import PEERS, Peer, dense


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
        ("--device cpu --json nowhere/out.json", "no such folder"),
        ("--device cpu --only magic", "in no method's name"),
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


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_methods_are_right(softcap, monkeypatch):
    monkeypatch.setattr(triton, "SMALL", 2)  # the interpreter's are filtered by "auto" too
    found = [p for p in PEERS["cuda"] if "compile" not in p.name and not p.floor]
    for sort in (False, True):
        unfiltered = functools.partial(paper.loss, filter_eps=None, sort=sort)
        found.append(Peer(f"paper, sorted {sort}", unfiltered))
    shape = ("", 96, 32) if DEVICE == "cpu" else ("", 8192, 64)
    given = measure.problem(shape, 24, 1.0, 0.4, softcap, DEVICE)
    rows = {row["method"]: row for row in measure.rows(given, found, [0.1], 0, 0)}
    papers = [rows.pop(f"paper, sorted {sort}") for sort in (False, True)]
    assert set(rows) == {"ours", "ours, workspace 0", "ours, filtered", "torch"}
    exact = 1e-2 if DEVICE == "cuda" else 1e-4
    for name, row in rows.items():
        assert row["error_hidden"] < (0.2 if name == "ours, filtered" else exact), row
    for row in papers:
        if softcap:  # which it does not know
            assert "softcap" in row["failed"]
        else:  # whose sums are in the inputs' dtype
            assert max(row["error_hidden"], row["error_weight"]) < 50 * exact, row
