"""The benchmark's methods on a GPU: ours, torch's and the paper's."""

import functools

import paper
import pytest
from loss_check import DEVICE

from smoothce import triton
from smoothce.bench import measure
from smoothce.bench.peers import PEERS, Peer


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
