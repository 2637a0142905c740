"""slurm/claims.py: its sweeps are what configs/sweeps/gemma.yaml takes, and share their runs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
from made_records import write_records
from real import wait_for

import claims
from calibeval import stats
from sweeps import assets, launch, plan
from sweeps.cluster import Cluster
from sweeps.files import SweepError
from sweeps.provenance import PROJECT

RUNS = {"grid": 24, "seeds": 30, "vocabulary": 12, "softcap": 12, "sum": 6, "mean": 6}
RUNS |= {"filtered": 6, "paper-filter": 6, "half": 3, "twice": 3}


def test_every_part_is_a_sweep_and_equal_runs_are_shared():
    path, names = PROJECT / "configs" / "sweeps" / "gemma.yaml", {}
    for part, changes in claims.PARTS.items():
        at = [] if part == "grid" else ["grid.learning_rate=[2e-5]"]
        found = launch.plan(path, [f"name=gemma-{part}", *at, *changes])
        names[part] = {cell.config.name for cell in found.cells}
    assert {name: len(runs) for name, runs in names.items()} == RUNS
    assert len(names["grid"] & names["seeds"]) == 6  # seed 0 at that rate
    assert sum(RUNS.values()) - 6 == len(set.union(*names.values()))


def test_the_cut_models_are_made_before_they_are_trained(monkeypatch):
    """The documented prefetch leaves them: the sweep file's own grid has the whole model."""
    monkeypatch.chdir(PROJECT)
    asked = []
    monkeypatch.setattr(claims, "sweeps", lambda words: asked.append(words) or 0)
    monkeypatch.setattr(claims, "chosen_rate", lambda: "2e-05")
    assert claims.sweep("softcap", ["workers=2"]) == claims.sweep("vocabulary", ["workers=2"]) == 0
    assert [words[0] for words in asked] == ["launch", "prefetch", "launch"]
    path, *words = asked[1][1:]
    planned = launch.plan(PROJECT / path, words)
    wanted = assets.of_sweep(planned.sweep, planned.cells, Cluster())
    made = [asset.place for asset in wanted if asset.used and " pruned" in asset.name]
    assert made == ["models/gemma-74k", "models/gemma-8k"]
    monkeypatch.setattr(claims, "sweeps", lambda words: int(words[0] == "prefetch"))
    assert claims.sweep("vocabulary", []) == 1


def test_what_an_earlier_trial_left_is_not_taken_for_this(tmp_path, monkeypatch):
    """The other parts read these folders: a launch beside them would change nothing."""
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(claims, "sweeps", lambda words: 0)
    at = f"output_root={tmp_path}"
    plan.claim(launch.plan(PROJECT / claims.FILE, ["name=gemma-grid", "grid.seed=[7]", at]))
    with pytest.raises(SweepError, match=r"gemma-grid: holds other runs \(.*seed=\[7\]"):
        claims.sweep("grid", [at])
    assert claims.sweep("grid", [at, "name=another"]) == claims.sweep("grid", [at, "grid.seed=[7]"])


def test_the_rate_is_that_of_beta_0(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "SWEEPS", tmp_path)
    with pytest.raises(SweepError, match="grid comes first"):
        claims.chosen_rate()
    (tmp_path / "gemma-grid").mkdir()
    table = "label_smoothing,best_learning_rate\n0.1,0.0002\n0.0,5e-05\n"
    (tmp_path / "gemma-grid" / "best_learning_rates.csv").write_text(table)
    assert claims.chosen_rate() == "5e-05"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A factory of what stands for claims.py, one part at a time, on three GPUs."""

    def write(*lines: str) -> None:
        start = "import os, pathlib, sys, time", f"here = pathlib.Path({str(tmp_path)!r})"
        (tmp_path / "claims.py").write_text("\n".join([*start, *lines]))
        monkeypatch.setattr(claims, "__file__", str(tmp_path / "claims.py"))
        monkeypatch.setattr(claims, "gpus", lambda: ["4", "5", "7"])

    return write


def test_all_but_the_grid_start_at_once_each_at_another_gpu(tmp_path, script):
    script(
        "(here / sys.argv[1]).write_text(sys.argv[2] + os.environ['CUDA_VISIBLE_DEVICES'])",
        "while len(list(here.iterdir())) < 10: time.sleep(0.01)",  # itself and the nine parts
        "sys.exit(sys.argv[1] == 'filtered')",
    )
    parts = [part for part in claims.PARTS if part != "grid"]
    assert claims.together(parts, ["workers=2 "]) == ["filtered"]
    assert {path.name for path in tmp_path.iterdir()} == {"claims.py", *parts}
    begun = [(tmp_path / part).read_text() for part in parts]
    assert begun[:4] == [f"workers=2 {gpus}" for gpus in ("4,5,7", "5,7,4", "7,4,5", "4,5,7")]


@pytest.fixture
def done(monkeypatch, tmp_path):
    """Call main: what it does, in order, if nothing fails but these parts."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, failing=()) -> list:
        order = []

        def together(parts, overrides):
            order.extend([parts] * bool(parts))
            return [part for part in parts if part in failing]

        monkeypatch.setattr(claims, "together", together)
        monkeypatch.setattr(claims, "sweep", lambda part, overrides: order.append(part) or 0)
        monkeypatch.setattr(claims, "after", lambda: order.append("after"))
        monkeypatch.setattr(claims, "report", lambda: order.append("report"))
        if failing:
            with pytest.raises(SweepError, match=f"not whole: {', '.join(failing)}; why is said"):
                claims.main([*words])
        else:
            assert claims.main([*words]) == 0
        return order

    return call


def test_the_grid_comes_first_and_the_report_last(done):
    others = [part for part in claims.PARTS if part != "grid"]
    assert done("workers=2") == [["grid"], others, "after", "report"]
    assert done("report", "twice", "mean") == [["mean", "twice"], "report"]
    assert done("after", "seeds") == [["seeds"], "after"]
    assert done("seeds") == ["seeds"]
    assert done(failing=["sum", "mean"])[2:] == ["after", "report"]
    assert done(failing=["grid"]) == [["grid"]]  # whose rate is that of all others


def test_ctrl_c_lets_the_part_save_and_starts_no_other(tmp_path, script):
    script(
        "try: (here / sys.argv[1]).touch(); time.sleep(60)",
        "except KeyboardInterrupt: time.sleep(0.5); (here / 'saved').touch()",
    )
    asked = f"claims.__file__ = {claims.__file__!r}; sys.exit(claims.main(['grid', 'seeds']))"
    code = f"import sys; sys.path[:] = {sys.path!r}; import claims; {asked}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: (tmp_path / "grid").exists())
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped; the same command goes on" in said
    assert {path.name for path in tmp_path.iterdir()} == {"claims.py", "grid", "saved"}


def test_the_verdicts_are_differences_paired_by_seed(tmp_path, monkeypatch):
    """Of sharpened models, which miscalibration is known to part; rows without runs are dashes."""
    monkeypatch.setattr(claims, "SWEEPS", tmp_path)
    sharpness = {("seeds", None): 1.0, ("seeds", 0.0): 2.0, ("seeds", 0.1): 1.5}
    sharpness |= {("sum", 0.0): 2.0, ("sum", 0.1): 2.0, ("after", 0.0): 1.5}
    for (part, beta), sharp in sharpness.items():
        folder = tmp_path / f"gemma-{part}"
        folder.mkdir(exist_ok=True)
        for seed in (None,) if beta is None else (0, 1):
            name = f"{beta}-{seed}.jsonl"
            write_records(folder / name, 400, sharp * (1 + 0.02 * (seed or 0)), seed=7)
            entry = {"records": name, "dataset": "mmlu", "label_smoothing": beta, "seed": seed}
            if part == "after":
                entry["calibrator"] = "temperature"
            with open(folder / "index.jsonl", "a") as index:
                index.write(json.dumps(entry) + "\n")
    claims.report()
    table = (tmp_path / "verdicts.md").read_text().splitlines()
    rows = [line.split(" | ") for line in table[2:]]
    found = {row[0].removeprefix("| "): row[1] for row in rows}
    cell = re.compile(r"(\*\*)?([+-][\d.]+)(\*\*)? \[([+-][\d.]+), ([+-][\d.]+)\] \(2\)")
    runs = {
        beta: [stats.load(tmp_path / "gemma-seeds" / f"{beta}-{seed}.jsonl") for seed in (0, 1)]
        for beta in (0.0, 0.1)
    }
    expected = stats.difference(runs[0.0], runs[0.1], "rms_debiased", "choices")
    bold, *figures = cell.fullmatch(found["β = 0.1 less 0"]).group(1, 2, 4, 5)
    assert figures == [f"{1000 * x:+.1f}" for x in (expected.value, expected.low, expected.high)]
    assert bold and expected.high < 0
    assert cell.fullmatch(found["β = 0 less base"]).group(1, 2)[1].startswith("+")
    nothing = cell.fullmatch(found["sum, clipped: 0.1 less 0"]).group(2, 4, 5)
    assert [*map(float, nothing)] == [0.0, 0.0, 0.0]
    other = cell.fullmatch(found["– less that of `seeds`, sum, clipped"]).group(2)
    assert float(other) == -float(figures[0])
    posthoc = found["temperature after β = 0, less β = 0"]
    assert posthoc == found["β = 0.1 less 0"]  # sharpened as much
    assert found["β = 0.2 less 0"] == found["softcap 30: 0.1 less 0"] == "–"


def test_an_unknown_part_is_named():
    with pytest.raises(SweepError, match=r"gird: no such part; known: grid, seeds"):
        claims.main(["gird"])
