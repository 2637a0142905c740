"""The comparison of two checkouts: its options, the order of its processes, and its table."""

import dataclasses
from pathlib import Path

import compare
import pytest
import torch
from compare import WorkerFailed
from compare_worker import language_like

from smoothce.bench.language import language_like as language_of_package

ROOT = Path(__file__).parents[2]
FOLDERS = ["--before", str(ROOT), "--after", str(ROOT)]


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def refusal(words, capsys):
    """What the command says of words that it does not take."""
    with pytest.raises(SystemExit) as stopped:
        compare.parse(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_without_a_gpu_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA GPU; this compares GPU kernels" in refusal(FOLDERS, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (FOLDERS[:2], "the following arguments are required: --after"),
        (["--before", "/", "--after", str(ROOT)], "argument --before: / is no checkout of this"),
        ([*FOLDERS, "--rounds", "0"], "argument --rounds: must be at least 1, not 0"),
        ([*FOLDERS, "--calls", "backward"], "argument --calls: invalid choice: 'backward'"),
        ([*FOLDERS, "--shapes", "gemma"], "argument --shapes: invalid classifier_shape value"),
    ],
)
def test_bad_options_are_named(words, said, with_gpu, capsys):
    assert said in refusal(words, capsys)


def measured_by(folder, job, products):
    rows = []
    for shape, _, _ in job["shapes"]:
        for call in job["calls"]:
            failed = None if call in products else f"no {call}"
            rows.append(
                {"shape": shape, "call": call, "products": products.get(call), "failed": failed}
            )
    return rows


def test_the_two_take_turns_and_are_compared_by_their_medians(with_gpu, tmp_path, capsys):
    words = [*FOLDERS, "--shapes", "640x32", "--calls", "forward", "filtered"]
    args = compare.parse(words)
    other = tmp_path / "older"
    args = dataclasses.replace(args, folders={"before": other, "after": ROOT})
    before = iter([1.0, 1.2, 3.0])
    after = iter([0.9, 0.6, 0.7])
    order = []

    def run(folder, job, limit):
        order.append(folder)
        assert job["tokens"] == 8192 and limit == 600
        if folder == other:
            return measured_by(folder, job, {"forward": next(before)})
        return measured_by(folder, job, {"forward": next(after), "filtered": 2.0})

    rounds = compare.measure(args, run)
    assert order == [other, ROOT, ROOT, other, other, ROOT]
    lines = compare.table(args, rounds).splitlines()
    assert "N = 8192, bf16, β = 0.1, no softcap; medians of 3" in lines[1]
    assert lines[3:] == [
        "| call | 640x32 |",
        "|---|---|",
        "| forward, before | 1.200 (1.000–3.000) |",
        "| forward, after | 0.700 (0.600–0.900) |",
        "| forward, change | -41.7% |",
        "| filtered, before | – |",
        "| filtered, after | 2.000 (2.000–2.000) |",
        "| filtered, change | – |",
        "- filtered, before, 640x32: no filtered",
    ]


def test_a_process_that_fails_says_why(with_gpu, tmp_path):
    """A real one: here its checkout raises when it is imported."""
    package = tmp_path / "kernel" / "smoothce"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a checkout that is broken')")
    args = compare.parse(["--before", str(tmp_path), "--after", str(ROOT)])
    with pytest.raises(
        WorkerFailed, match=r"could not be measured:[\s\S]*a checkout that is broke"
    ):
        compare.measure(args)
    with pytest.raises(WorkerFailed, match=r"took more than 0\.01 seconds: give a higher --limit"):
        compare.measure(dataclasses.replace(args, limit=0.01))


def test_a_process_measures_the_checkout_that_it_is_given(tmp_path):
    """Not another one that Python finds."""
    with pytest.raises(WorkerFailed, match=r"smoothce was imported from .*, not from"):
        compare.run_worker(tmp_path, empty_job(), 60)


def empty_job():
    return {
        "shapes": [],
        "calls": [],
        "tokens": 8,
        "label_smoothing": 0.1,
        "softcap": None,
        "seconds": 0.0,
    }


def test_a_process_with_nothing_to_measure_returns_nothing():
    """It starts, imports the checkout, and its answer is read."""
    assert compare.run_worker(ROOT, empty_job(), 60) == []


def test_inputs_are_the_benchmarks():
    want = language_of_package(4, 32, 8, 2.0, torch.float32, device="cpu")
    found = language_like(4, 32, 8, 2.0, torch.float32, 0, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


@pytest.mark.gpu
def test_this_checkout_beside_itself(capsys):
    words = [*FOLDERS, "--shapes", "8192x256", "--tokens", "512", "--rounds", "1"]
    assert compare.main([*words, "--seconds", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert "| workspace=0, change |" in printed
    assert "failed" not in printed
    # A figure that is missing is a cell of its own; the same dash stands in every range.
    assert f"| {compare.MISSING} |" not in printed
