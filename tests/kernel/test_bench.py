"""The benchmark command: its options, what it measures, and its tables."""

import json
import subprocess
import sys

import pytest
import torch

from smoothce import linear_cross_entropy
from smoothce.bench import arguments, report
from smoothce.bench.inputs import CLASSIFIERS, IGNORED, classifier
from smoothce.bench.problems import Problem, gradients, mask, problems


def bench(*arguments):
    command = [sys.executable, "-m", "smoothce.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def parse(*options, gpu=True):
    return arguments.parse(list(options), gpu, "")


def made(*options):
    args = parse(*options)
    args.device = "cpu"
    return list(problems(args, torch.float32))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_table_and_json(tmp_path):
    path = tmp_path / "bench.json"
    options = ("--tokens", "16", "--label-smoothing", "0.1", "--repeats", "1", "--json", str(path))
    result = bench("--device", "cpu", *options)
    assert result.returncode == 0, result.stderr
    assert "python -m smoothce.bench --device cpu --tokens 16" in result.stdout
    written = json.loads(path.read_text())
    assert "torch" in written["versions"]
    rows = {row["method"]: row for row in written["results"]}
    assert list(rows) == ["ours, chunked", "three products", "torch"]
    for name, row in rows.items():
        assert "failed" not in row and row["both_ms"] > 0
        assert row["backward_mb"] > 32000 * 512 * 4 / 1e6  # the weight's gradient at the least
        assert f"| {name} |" in result.stdout
    assert all(
        max(rows[name]["error_hidden"], rows[name]["error_weight"]) < 1e-4
        for name in ("ours, chunked", "torch")
    )


def test_unknown_method_lists_the_known():
    result = bench("--device", "cpu", "--only", "magic")
    assert result.returncode == 2 and "chunked" in result.stderr


def test_help_without_a_gpu_has_its_options():
    result = bench("--help")
    assert result.returncode == 0
    for option in ("--masked", "on a GPU", "on a CPU 2048"):
        assert option in result.stdout


def test_defaults_are_the_devices():
    on_gpu, on_cpu = parse(), parse(gpu=False)
    assert (on_gpu.device, on_gpu.models, on_gpu.label_smoothing) == ("cuda", ["gemma2-2b"], [0.1])
    assert (on_gpu.in_a_row, on_cpu.in_a_row) == (3, 1)
    assert on_gpu.masked == on_cpu.masked == [0.0] and on_gpu.contexts == [2.0]
    assert (on_cpu.device, on_cpu.models, on_cpu.label_smoothing) == ("cpu", ["small"], [0.0, 0.1])
    assert parse("--device", "cpu").device == "cpu"


def test_options_with_several_values():
    args = parse(
        *("--label-smoothing", "0", "0.1", "--masked", "0", "0.5", "--softcap", "none", "30"),
        *("--filter-eps", "2^-8.6", "0.01", "--in-a-row", "10"),
    )
    assert args.label_smoothing == [0, 0.1] and args.masked == [0, 0.5]
    assert args.softcap == [None, 30] and args.in_a_row == 10
    assert args.filter_eps == [2**-8.6, 0.01]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--masked 1", "[0, 1)"),
        ("--softcap 0", "positive"),
        ("--softcap inf", "positive"),
        ("--filter-eps auto", "(0, 1)"),
        ("--filter-eps 2^1", "(0, 1)"),
        ("--in-a-row 0", "1 or more"),
        ("--tokens 0", "1 or more"),
        ("--contexts -1", "0 or more"),
        ("--label-smoothing 1.1", "[0, 1]"),
        ("--models gemma", "gemma2-2b"),
        ("--models 8192x0", "VxD"),
        ("--device cpu --filter-eps 0.1", "--filter-eps is for --device cuda"),
        ("--tensors nowhere.pt", "no such file"),
        ("--tensors nowhere.pt --tokens 5", "--tensors has its own"),
        ("--json nowhere/out.json", "no such folder"),
    ],
)
def test_bad_options_are_named(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*options.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        parse("--device", "cuda", gpu=False)
    assert "no CUDA GPU" in capsys.readouterr().err


def test_select(capsys):
    names = ["ours, exact", "ours, filtered", "torch"]
    assert arguments.select(names, [""]) == names
    assert arguments.select(names, ["exact", "torch"]) == ["ours, exact", "torch"]
    assert arguments.select(names, ["torch", "quack"], ["quack"]) == ["torch"]
    with pytest.raises(SystemExit, match="2"):
        arguments.select(names, ["torch", "magic"])
    with pytest.raises(SystemExit, match="2"):
        arguments.select(names, ["quack"], ["quack"])
    first, second = capsys.readouterr().err.splitlines()
    assert "'magic': in no method's name" in first and "ours, exact" in first and "quack" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tokenize nowhere.json ids.npz", "nowhere.json: no such file"),
        ("tokenize text.json nowhere/ids.npz", "nowhere/ids.npz: no such folder"),
        ("compare text.json --json nowhere/out.json", "nowhere/out.json: no such folder"),
        ("tokenize text.json ids.npz", "text.json: expected a JSON list of instruction, input"),
    ],
)
def test_mistakes_of_the_language_models_command(words, said, tmp_path, monkeypatch, capsys):
    lm = pytest.importorskip("smoothce.bench.lm")
    pytest.importorskip("tokenizers")
    (tmp_path / "text.json").write_text("# no JSON")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lm", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        lm.main()
    assert said in capsys.readouterr().err


def test_classifiers():
    assert classifier("gemma2-2b") == CLASSIFIERS["gemma2-2b"]
    assert classifier("8192x2048") == (8192, 2048)


def test_mask():
    labels = torch.arange(10)
    assert mask(labels, 0.0).equal(labels)
    for share, count in ((0.5, 5), (0.99, 9)):
        masked = mask(labels, share)
        ignored = masked == IGNORED
        assert ignored.sum() == count
        assert masked[~ignored].equal(labels[~ignored])
    assert labels.equal(torch.arange(10))


def test_problems_are_the_product_of_the_options():
    found = made(
        *("--models", "64x8", "40x8", "--tokens", "12", "20", "--contexts", "1", "2"),
        *("--masked", "0", "0.25", "--softcap", "none", "5"),
    )
    assert len({problem.name for problem in found}) == len(found) == 32
    first, capped, masked = found[:3]
    assert first.name == "64x8, N=12, V=64, D=8, context 1"
    assert first.hidden.shape == (12, 8) and first.weight.shape == (64, 8)
    assert capped.name.endswith("softcap 5") and capped.softcap == 5
    assert "25 % of labels masked" in masked.name
    assert (masked.labels == IGNORED).sum() == 3 and (first.labels == IGNORED).sum() == 0


def test_problems_of_tensors(tmp_path):
    data = {"hidden": torch.ones(4, 2), "weight": torch.ones(6, 2), "labels": torch.arange(4)}
    data["weight"] = torch.nn.Parameter(data["weight"])  # as a model has it
    torch.save(data, tmp_path / "real.pt")
    (problem,) = made("--tensors", str(tmp_path / "real.pt"), "--masked", "0.5")
    assert problem.name == "real, 50 % of labels masked"
    assert not problem.weight.requires_grad
    assert problem.weight.equal(data["weight"]) and (problem.labels == IGNORED).sum() == 2


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_right_gradients(beta, softcap, share):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(25, 6, generator=g), torch.randn(11, 6, generator=g)
    labels = mask(torch.randint(11, (25,), generator=g), share)
    problem = Problem("", hidden, weight, labels, softcap)
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    options = {"label_smoothing": beta, "softcap": softcap, "impl": "reference"}
    truth = torch.autograd.grad(linear_cross_entropy(*leaves, labels, **options), leaves)
    for found, want in zip(gradients(problem, beta), truth, strict=True):
        torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-4)


def test_comparison():
    row = {"method": "ours, filtered", "beta": 0.1, "forward_ms": 11.0, "both_ms": 14.0}
    row |= {"forward_gemms": 1.1, "both_gemms": 1.4, "extra_mb": 62.0, "pairs": 0.0604}
    row |= {"error_hidden": 1e-2, "error_weight": 2e-2, "error_unseen": 3e-2}
    row |= {"forward_mb": 7.0, "backward_mb": 71.0}
    floor = row | {"error_hidden": None, "error_weight": None, "error_unseen": None, "pairs": None}
    failed = {"method": "paper", "beta": 0.1, "failed": "knows no softcap"}
    lines = report.comparison("made", [row, floor, failed]).splitlines()
    assert "### made" in lines
    assert len({line.count("|") for line in lines[3:]}) == 1  # as many cells in every row
    assert lines[-3].endswith("| 1.10 | 1.40 | 7 | 71 | 62 | 1.0e-02 | 2.0e-02 | 3.0e-02 | 6.0 % |")
    assert lines[-2].endswith("| 62 | – | – | – | – |")
    assert lines[-1].startswith("| paper | 0.1 | knows no softcap |")
