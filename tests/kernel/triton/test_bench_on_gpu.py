"""The benchmark of a GPU's methods with every option. Without a GPU, tiny and interpreted."""

import json
import subprocess
import sys

import pytest
import torch
from loss_check import DEVICE, runs_schedule

from smoothce import triton
from smoothce.bench import arguments, measure
from smoothce.bench.inputs import IGNORED
from smoothce.bench.peers import Products, dense, peers
from smoothce.bench.problems import problems

# some vocabulary blocks, whose sizes are the tiles'
SHAPE = ("--models", "96x32" if DEVICE == "cpu" else "2048x64", "--tokens", "24")
SHAPE += ("--contexts", "1", "--repeats", "1")


def parse(*options):
    args = arguments.parse([*SHAPE, *options], True, "")
    args.device = DEVICE
    return args


@pytest.fixture
def interpreted(monkeypatch):
    """The interpreter in the GPU's place, where there is none; true fp32 in any case."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    if DEVICE == "cpu":
        monkeypatch.setattr(triton, "unsupported", lambda *_: None)
    yield
    torch.set_float32_matmul_precision(precision)


def methods(args):
    found, _ = peers("cuda", args.filter_eps, args.only)
    asked = [peer for peer in found if arguments.asked(peer.name, args.only)]
    return [peer for peer in asked if peer.name != "torch.compile"]


def rows_of(args):
    for problem in problems(args, torch.float32):
        for row in measure.measure(problem, methods(args), args):
            assert "failed" not in row, row
            yield row


def test_every_method_of_ours_masked_and_capped(interpreted):
    args = parse("--masked", "0.4", "--softcap", "3", "--only", "ours", "torch")
    found = list(rows_of(args))
    assert len(found) == 4
    for row in found:
        # so small a vocabulary is not filtered by "auto"
        assert row["pairs"] == (1 if "filter" in row["method"] else None)
        assert max(row["error_hidden"], row["error_weight"], row["error_unseen"]) < 1e-4


@runs_schedule
def test_thresholds(interpreted):
    args = parse("--filter-eps", "0.1", "0.4", "--only", "ours, filtered, 2^", "--tokens", "160")
    low, high = rows_of(args)
    assert low["method"] == "ours, filtered, 2^-3.32" and high["method"].endswith("2^-1.32")
    assert 0 < high["pairs"] < low["pairs"] < 1
    assert 1e-4 < low["error_weight"] < high["error_weight"] < 1


def test_a_threshold_with_nothing_to_do(capsys):
    args = parse("--only", "ours, exact", "--filter-eps", "0.1")
    args.device = "cuda"
    with pytest.raises(SystemExit, match="2"):
        measure.chosen(args)
    assert "--filter-eps" in capsys.readouterr().err


def test_methods_that_cannot_do_it_say_so(interpreted):
    args = parse("--softcap", "none", "3", "--only", "paper")
    paper = [peer for peer in methods(args) if peer.name == "paper"]
    capped = list(problems(args, torch.float32))[1]
    (row,) = measure.measure(capped, paper, args)
    assert row == {"method": "paper", "beta": 0.1, "failed": "knows no softcap"}


def test_methods_without_smoothing_are_measured_once(interpreted):
    plain = measure.Peer("plain", lambda e, c, y, beta: dense(e, c, y, beta), smooths=False)
    args = parse("--label-smoothing", "0.1", "0.2")
    (problem,) = problems(args, torch.float32)
    found = measure.measure(problem, [plain, measure.Peer("torch", dense)], args)
    assert [row["beta"] for row in found] == [0, 0.1, 0.2]
    assert all(row["error_weight"] < 1e-4 for row in found)


def test_what_fails_is_a_row(interpreted):
    def broken(*_):
        raise RuntimeError("no memory\nat all")

    args = parse()
    (problem,) = problems(args, torch.float32)
    first, second = measure.measure(
        problem, [measure.Peer("broken", broken), measure.Peer("torch", dense)], args
    )
    assert first["failed"] == "RuntimeError: no memory" and "failed" not in second


def test_methods_take_turns_in_another_order_each_repeat(interpreted, monkeypatch):
    names, asked = "abcdef", []
    steps = 3 * len(names)  # of a repeat: product, forward, both

    def milliseconds(step, calls, device):
        run = getattr(step, "__self__", None)  # the product is no method's
        repeat = 1 + len(asked) // steps
        asked.append((run and run.peer.name, calls))
        return repeat * (3.0 if run else 2.0)

    monkeypatch.setattr(measure, "milliseconds", milliseconds)
    args = parse("--in-a-row", "10", "--repeats", "3")
    (problem,) = problems(args, torch.float32)
    found = measure.measure(problem, [measure.Peer(name, dense) for name in names], args)
    assert [row["method"] for row in found] == list(names)
    assert {calls for _, calls in asked} == {10}
    turns = [[name for name, _ in asked[i : i + steps]] for i in range(0, 3 * steps, steps)]
    assert all(name is None for turn in turns for name in turn[::3])
    orders = ["".join(turn[1::3]) for turn in turns]
    assert orders == ["".join(turn[2::3]) for turn in turns]
    assert all(sorted(order) == list(names) for order in orders) and len(set(orders)) == 3
    assert {(row["gemm_ms"], row["both_gemms"]) for row in found} == {(4.0, 1.5)}


def test_the_lower_bound_is_no_loss(interpreted):
    args = parse("--only", "three", "--masked", "0.4", "--softcap", "3")
    (row,) = rows_of(args)
    assert row["error_hidden"] is row["error_weight"] is row["pairs"] is None


def test_the_lower_bound_is_three_products():
    e, c, y = (t.to(DEVICE) for t in (torch.randn(9, 4), torch.randn(7, 4), torch.arange(9) % 7))
    y[2:5] = IGNORED
    leaves = e.requires_grad_(), c.requires_grad_()
    found = torch.autograd.grad(Products.apply(e, c, y), leaves)
    valid = (y != IGNORED)[:, None]
    # The gradients of half the squared logits are the logits times the other factor.
    want = torch.autograd.grad(((e @ c.T).square() * valid).sum() / 2, leaves)
    torch.testing.assert_close(found, want)


def test_only_what_is_asked_for_is_imported(monkeypatch):
    """Some libraries change torch when they are."""
    loaded = []
    others = [(name, True, True, lambda name=name: loaded.append(name) or dense) for name in "xy"]
    monkeypatch.setattr("smoothce.bench.peers.OTHERS", others)
    found, missing = peers("cuda", only=["ours", "x"])
    assert loaded == ["x"] and found[-1].name == "x" and missing == {"y": "not asked for"}


def test_names_tell_methods_apart():
    found, missing = peers("cuda", [2**-8.6, 2**-9.1, 0.01])
    names = [peer.name for peer in found] + list(missing)
    assert len(names) == len(set(names)) and "ours, filtered, 2^-8.6" in names
    filtered = next(peer for peer in found if peer.name == "ours, filtered, 2^-9.1")
    assert filtered.filter.filter_eps == 2**-9.1


def test_what_is_printed_and_written(interpreted, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measure.report, "provenance", lambda device: {"command": "this one"})
    made = [measure.Peer("ours, made", dense), measure.Peer("torch", dense)]
    monkeypatch.setattr(measure, "peers", lambda *_: (made, {"quack": "not here"}))
    path = tmp_path / "out.json"
    options = ("--masked", "0", "0.5", "--label-smoothing", "0", "0.1", "--json", str(path))
    measure.main(parse(*options))
    out, err = capsys.readouterr()
    assert "not measured: quack (not here)" in err
    assert out.count("| torch | 0.1 |") == out.count("| ours, made | 0 |") == 2
    rows = json.loads(path.read_text())["results"]
    assert len(rows) == 8 and len({row["problem"] for row in rows}) == 2


@pytest.mark.gpu
def test_memory_of_forward_and_backward():
    args = parse("--models", "65536x64", "--tokens", "1024")
    (problem,) = problems(args)
    found = measure.measure(
        problem, [p for p in peers("cuda")[0] if p.floor or p.name == "torch"], args
    )
    logits, gradients = 1024 * 65536 * 2 / 1e6, (1024 + 65536) * 64 * 2 / 1e6
    bound, full = found
    assert bound["forward_mb"] == pytest.approx(logits, rel=0.02)
    assert bound["backward_mb"] == pytest.approx(logits + gradients, rel=0.02)
    assert bound["extra_mb"] == pytest.approx(logits, rel=0.02)
    # logits and log-softmax, both fp32; in the backward a third
    assert full["forward_mb"] == pytest.approx(4 * logits, rel=0.02)
    assert full["backward_mb"] == pytest.approx(6 * logits, rel=0.02)


@pytest.mark.gpu
def test_the_command_on_a_gpu():
    options = "--models 16384x256 --tokens 512 --repeats 1 --in-a-row 2"
    options += " --masked 0.5 --softcap 30 --filter-eps 2^-7 --only ours"
    command = [sys.executable, "-m", "smoothce.bench", *options.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Error" not in result.stdout and "ours, exact" in result.stdout
