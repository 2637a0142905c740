"""The claims: each part is a sweep that plans; the report is right on runs of known calibration."""

import re
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
sys.path.insert(0, str(Path(__file__).parents[1] / "slurm"))
import world
from made_records import write_records

from calibeval import records, stats
from calibeval.io import InputError
from studies.claims import __main__ as claims
from studies.claims import baselines, packed
from sweeps.plan import plan

MODEL = "smollm2-135m"
RUNS = {"grid": 4, "seeds": 25, "high": 25, "harm": 25, "sum": 6, "mean": 6}
RUNS |= {"filtered": 6, "unigram": 3, "base-mean": 3, "half": 3, "twice": 3}


def test_every_part_is_a_sweep(monkeypatch):
    """Where the grid has chosen 5e-5."""
    monkeypatch.setattr(claims, "chosen_rate", lambda model: 5e-5)
    for part in claims.PARTS:
        found = plan(claims.FILE, claims.arguments(MODEL, part, ["workers=2"]))
        assert len(found.cells) == RUNS[part] and found.sweep.name == f"{MODEL}-{part}"
        rates = {cell.config.train["learning_rate"] for cell in found.cells}
        assert part == "grid" or rates == ({2e-4} if part == "high" else {5e-5})
        targets = {"unigram": "unigram", "base-mean": f"runs/claims/targets/{MODEL}.npy"}
        (target,) = {cell.config.train["smoothing_target"] for cell in found.cells}
        assert target == targets.get(part)
        assert (found.sweep.keep == "all") == (part in ("grid", "seeds", *targets))


@pytest.fixture
def done(monkeypatch):
    """done(*words, failing) → the exit code, and what was done in order."""

    def call(*words: str, failing=()) -> tuple[int, list[str]]:
        order = []

        def train(model, part, asked):
            order.append(part)
            return int(part in failing)

        monkeypatch.setattr(claims, "arguments", lambda model, part, overrides: overrides)
        monkeypatch.setattr(claims, "train", train)
        monkeypatch.setattr(claims, "after", lambda model: order.append("after"))
        monkeypatch.setattr(claims, "report", lambda model: order.append("report"))
        return claims.main([*words]), order

    return call


def test_the_grid_comes_first_and_the_report_last(done, capsys):
    assert done(MODEL, "workers=2") == (0, [*claims.PARTS, "after", "report"])
    assert done(MODEL, failing=["sum", "mean"]) == (2, [*claims.PARTS, "after", "report"])
    assert "not whole: sum, mean; why is said above" in capsys.readouterr().err
    assert done(MODEL, failing=["grid"]) == (2, ["grid"])  # whose rate is that of all others
    assert done(MODEL, "gird") == (2, [])
    assert "gird: no such part; known: grid, seeds" in capsys.readouterr().err
    assert done() == (2, [])


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Nothing is written to the repository."""
    monkeypatch.setattr(claims, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(claims, "RECORDS", tmp_path / "records")
    monkeypatch.chdir(tmp_path)  # and back, wherever a study goes
    return tmp_path


def test_the_grid_chooses_the_rate_of_other_parts(folders, capsys):
    assert claims.main([MODEL, "seeds"]) == 2
    assert "grid: no run is trained; the part grid comes first" in capsys.readouterr().err
    asked = [f"output_root={folders}", *claims.arguments(MODEL, "grid", [])]
    of = plan(claims.FILE, asked)
    for loss, cell in zip((1.4, 1.2, 1.3, 1.5), of.cells, strict=True):
        cell.run.model.mkdir(parents=True)
        cell.run.metrics.write_text(f'{{"step": 1, "held_out_loss": {loss}}}\n')
        (cell.run.path / "DONE").touch()
    claims.pack(MODEL, "grid", of)
    assert claims.chosen_rate(MODEL) == 2e-5
    assert claims.without_records(MODEL, "grid", asked) == []


def test_runs_with_records_are_not_run_again(folders, monkeypatch):
    monkeypatch.setattr(claims, "chosen_rate", lambda model: 5e-5)
    asked = claims.arguments(MODEL, "seeds", [])
    of = plan(claims.FILE, asked)
    for cell in (*of.bases, *of.cells[:7]):
        claims.record(MODEL, "seeds", cell).parent.mkdir(parents=True, exist_ok=True)
        claims.record(MODEL, "seeds", cell).touch()
    lacking = claims.without_records(MODEL, "seeds", asked)
    left = [cell for more in lacking for cell in plan(claims.FILE, [*asked, *more]).cells]
    assert [cell.run.name for cell in left] == [cell.run.name for cell in of.cells[7:]]
    assert not any(plan(claims.FILE, [*asked, *more]).bases for more in lacking)


@pytest.fixture
def tiny(folders, monkeypatch):
    """Overrides for a tiny model, models/tiny."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folders / "cache")
    world.make_model(folders / "models/tiny")
    world.make_chat(folders / "chat.jsonl")
    monkeypatch.setattr(claims, "chosen_rate", lambda model: 5e-5)
    return [f"output_root={folders}/runs", "train.train_file=chat.jsonl", "train.held_out=20"]


def test_the_base_models_mean_prediction_is_made_before_it_is_a_target(tiny, folders, monkeypatch):
    monkeypatch.setattr(baselines, "CONVERSATIONS", 9)
    monkeypatch.setattr(baselines, "CHUNK", 7)
    asked, found = claims.arguments("tiny", "base-mean", tiny), []

    class Launch:
        returncode = 0

        def __init__(self, words: list[str]) -> None:
            found.append(np.load(folders / "runs/targets/tiny.npy"))

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None: ...

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(claims.subprocess, "Popen", Launch)
    assert claims.train("tiny", "base-mean", asked) == 0
    _, updates = baselines.read(plan(claims.FILE, asked).cells[0].config.keys)
    model, expected = AutoModelForCausalLM.from_pretrained("models/tiny").eval(), []
    for row in updates.kept[:9]:
        batch = updates.batch([row])
        with torch.no_grad():
            p = model(batch["input_ids"]).logits[:, :-1].double().softmax(-1)
        expected.append(p[batch["labels"][:, 1:] != -100])
    (u,) = found
    assert u.dtype == float and abs(u.sum() - 1) < 1e-12
    np.testing.assert_allclose(u, torch.cat(expected).mean(0), rtol=1e-5)
    monkeypatch.setattr(baselines, "mean_prediction", None)  # it is not made again
    assert claims.train("tiny", "base-mean", asked) == 0


def test_records_lose_nothing_but_digits_when_packed(folders):
    write_records(folders / "mmlu.jsonl", 300, 1.5, seed=1)
    packed.pack(
        {"mmlu": folders / "mmlu.jsonl"}, {"part": "base"}, folders / "records/m/base/run.xz"
    )
    (((about, out)),) = claims.unpacked("m")
    assert about == {"part": "base", "tasks": {"mmlu": 300}}
    before, after = records.read(folders / "mmlu.jsonl"), records.read(out / "mmlu.jsonl")
    assert before.ids == after.ids and before.prompts.tolist() == after.prompts.tolist()
    assert abs(before.logprobs - after.logprobs).max() <= 0.5 / packed.STEP
    assert (folders / "runs/unpacked/m/base/run/DONE").exists()


def test_records_of_other_questions_are_not_packed_together(folders):
    for name, count in (("a", 300), ("b", 200)):
        write_records(folders / f"{name}.jsonl", count, 1.0, seed=1)
    packed.pack({"mmlu": folders / "a.jsonl"}, {}, folders / "records/m/base/a.xz")
    with pytest.raises(InputError, match="mmlu was asked in other words, or of other questions"):
        packed.pack({"mmlu": folders / "b.jsonl"}, {}, folders / "records/m/base/b.xz")


def test_the_verdicts_are_differences_paired_by_seed(folders):
    """Of sharpened models, which miscalibration is known to part; rows without runs go."""
    sharpness = {("base", None): 1.0, ("seeds", 0.0): 2.0, ("seeds", 0.1): 1.5}
    sharpness |= {("sum", 0.0): 2.0, ("sum", 0.1): 2.0, ("after", 0.0): 1.5}
    for (part, beta), sharp in sharpness.items():
        for seed in (None,) if beta is None else (0, 1):
            file, out = folders / f"{part}-{beta}-{seed}.jsonl", folders / "records" / MODEL / part
            write_records(file, 400, sharp * (1 + 0.02 * (seed or 0)), seed=7)
            about = {"part": part, "label_smoothing": beta, "seed": seed}
            if part == "after":
                about["calibrator"] = "temperature"
            packed.pack({"mmlu": file}, about, out / f"{file.stem}.xz")
    assert claims.main([MODEL, "report"]) == 0
    table = (folders / "runs" / f"{MODEL}.md").read_text().split("\n\n")[0].splitlines()
    rows = [line.split(" | ") for line in table[2:]]
    found = {row[0].removeprefix("| "): row[1] for row in rows}
    cell = re.compile(r"(\*\*)?([+-][\d.]+)(\*\*)? \[([+-][\d.]+), ([+-][\d.]+)\] \(2\)")
    at = folders / "runs" / "unpacked" / MODEL
    runs = {
        beta: [stats.load(at / "seeds" / f"seeds-{beta}-{seed}" / "mmlu.jsonl") for seed in (0, 1)]
        for beta in (0.0, 0.1)
    }
    expected = stats.difference(runs[0.0], runs[0.1], "rms_debiased", "choices")
    bold, *figures = cell.fullmatch(found["seeds: β = 0.1 less 0"]).group(1, 2, 4, 5)
    assert figures == [f"{1000 * x:+.2f}" for x in (expected.value, expected.low, expected.high)]
    assert bold and expected.high < 0
    assert cell.fullmatch(found["β = 0 less base"]).group(1, 2)[1].startswith("+")
    nothing = cell.fullmatch(found["sum, clipped: 0.1 less 0"]).group(2, 4, 5)
    assert [*map(float, nothing)] == [0.0, 0.0, 0.0]
    other = cell.fullmatch(found["– less that of `seeds`, sum, clipped"]).group(2)
    assert float(other) == -float(figures[0])
    posthoc = found["temperature after β = 0, less β = 0"]
    assert posthoc == found["seeds: β = 0.1 less 0"]  # sharpened as much
    assert "seeds: β = 0.2 less 0" not in found and "high: β = 0.1 less 0" not in found
