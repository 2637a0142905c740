"""The claims: each part is a sweep that plans; what is computed with models is what a plain loop
computes; the report is right on runs of known calibration."""

import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import tiny_world
import torch
from made_records import read_lines, write_lines, write_records
from studies.claims import __main__ as claims
from studies.claims import (
    derived,
    gpu_measures,
    parts,
    posthoc,
    training,
)
from studies.claims.parts import CONFIG, PARTS, Study
from studies.claims.records import STEPS_PER_NAT, RecordStore, RunRecord
from training_runs import collated
from transformers import AutoModelForCausalLM, AutoTokenizer

import calibeval
from calibeval import records
from calibeval.io import InputError, sha256
from calibeval.measures import evaluations, scaling, stats
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run

MODEL = "smollm2-135m"
PUBLISHED = RecordStore(parts.HERE / "records")
TASKS = [{"task": "mmlu", "data": "data/mmlu", "split": s, "name": s} for s in ("val", "test")]
PART = {part.name: part for part in PARTS}
# Of all models but the 1.5B and, in part, the 0.5B.
NOT_RUN = {"high-rate", "over-trained", "sum", "script"}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder for what a study writes, which leaves the repository alone."""
    monkeypatch.chdir(tmp_path)  # and back, wherever a study goes
    return tmp_path


@pytest.fixture
def study(folders):
    """The study of MODEL in a folder of its own."""
    return Study(MODEL, folders / "runs", RecordStore(folders / "records"))


NAN = float("nan")


@pytest.mark.parametrize(
    ("grid", "smoothed", "rate"),
    [
        ({2e-5: (1.2,), 5e-5: (1.3,), 2e-4: (1.5,)}, (1.3, 1.5), 1e-4),  # between two rates
        ({1e-5: (1.2,), 2e-5: (1.6,)}, (1.7,), 2e-5),  # an end of the grid
        # 2e-5 has 3.0, but on the other side of the best rate.
        ({1e-5: (2.0,), 2e-5: (3.0,), 5e-5: (1.0,), 1e-4: (2.5,)}, (2.8,), 1e-4),
        # The mean over seeds, not the luckiest one, nor what a diverged seed leaves.
        ({1e-5: (1.5, 1.5), 2e-5: (1.1, 2.1), 5e-5: (1.0, NAN)}, (1.4,), 1e-5),
        ({}, (), "grid"),
        ({1e-5: (1.2,), 2e-5: (1.6,)}, (), "recommended"),
        ({1e-5: (1.2,), 2e-5: (1.6,)}, (1.5, NAN), "s1"),  # not the mean of fewer seeds
        ({5e-6: (1.2,), 2e-5: (1.5,), 5e-5: (1.4,), 2e-4: (1.8,)}, (1.45,), "1.5000 at 2e-05"),
    ],
)
def test_the_rate_of_an_equal_loss_or_what_is_lacking(grid, smoothed, rate, study, capsys):
    """A part without a rate does not stop the others."""
    for learning_rate, losses in grid.items():
        for seed, loss in enumerate(losses):
            setting = {"learning_rate": learning_rate, "seed": seed, "held_out_loss": loss}
            study.store.add(MODEL, RunRecord("grid", f"{learning_rate}-{seed}", **setting), {})
    for seed, loss in enumerate(smoothed):
        setting = {"label_smoothing": 0.1, "seed": seed, "held_out_loss": loss}
        study.store.add(MODEL, RunRecord("recommended", f"s{seed}", **setting), {})
    if isinstance(rate, float):
        assert parts.equal_rate(study) == rate
        return
    with pytest.raises(InputError, match=rate):
        parts.equal_rate(study)
    words = [MODEL, "equal", "entropy-gap"]
    assert claims.main(words, study.runs_folder, study.store) == 2
    assert "not whole: equal;" in capsys.readouterr().err


def test_no_launch_has_a_run_with_records(study, folders):
    """Though the missing runs are no rectangle of learning rates and β."""
    part = PART["recommended"]
    words = ["grid.learning_rate=[1e-5,2e-5]", "grid.label_smoothing=[0.0,0.1]", "grid.seed=[0,1]"]
    overrides = [*parts.sweep_overrides(study, PART["grid"], []), *words]
    plan = plan_sweep(CONFIG, overrides)
    missing = []
    for run in plan.runs:
        train = run.config().train
        is_missing = (train["learning_rate"], train["label_smoothing"]) in ((1e-5, 0), (2e-5, 0.1))
        if is_missing:
            missing.append(run.name)
        else:
            study.store.add(MODEL, RunRecord(*training.record_key(part, run)), {})
    launched = []
    for selection in training.overrides_of_missing_runs(study, part, plan):
        launched += [run.name for run in plan_sweep(CONFIG, [*overrides, *selection]).runs]
    assert len(missing) == 4
    assert sorted(launched) == sorted(missing)


@pytest.fixture
def tiny(folders, monkeypatch):
    """Overrides for a tiny model, models/tiny, with data/mmlu."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folders / "cache")
    tiny_world.main(folders / "data")
    (folders / "models").mkdir()
    (folders / "data" / "model").rename(folders / "models" / "tiny")
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    return [
        f"output_root={folders}/runs",
        "train.train_file=data/alpaca.jsonl",
        "train.held_out=20",
    ]


@pytest.fixture
def tiny_study(folders):
    """The study of the tiny model."""
    return Study("tiny", folders / "runs", RecordStore(folders / "records"))


def target_logits(folder: str | Path, updates, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits (N, V) and tokens (N,) of all targets of some conversations, one by one."""
    model, z, y = AutoModelForCausalLM.from_pretrained(folder).eval(), [], []
    for row in rows:
        batch = collated(updates, [row])
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits[:, :-1].double()
        labels = batch["labels"][:, 1:]
        z.append(logits[labels != -100]), y.append(labels[labels != -100])
    return torch.cat(z), torch.cat(y)


def make_trained(study: Study, part: str, overrides: list[str]) -> list[Run]:
    """Runs of a part whose models have learnt something of the conversations."""
    changes = parts.sweep_overrides(study, PART[part], [*overrides, "grid.seed=[0,1]"])
    plan = plan_sweep(CONFIG, changes)
    plan.create()
    for number, cell in enumerate(plan.runs):
        model = AutoModelForCausalLM.from_pretrained("models/tiny")
        _, updates = gpu_measures.tokenizer_and_dataset(cell.config().train_options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(10 + number):
            model(**collated(updates, updates.train_conversations[:20])).loss.backward()
            optimizer.step(), optimizer.zero_grad()
        model.save_pretrained(cell.model)
    return plan.runs


def test_the_entropy_gap_is_what_a_plain_loop_reads(tiny, tiny_study, folders, monkeypatch):
    """The temperature at which entropy is NLL, and NLL least, of runs that are more than a
    choice of rate."""
    monkeypatch.setattr(gpu_measures, "CHUNK", 7)
    monkeypatch.setattr(gpu_measures, "TOP", 10)
    make_trained(tiny_study, "grid", [*tiny, "grid.learning_rate=[1.0e-5]"])
    cells = make_trained(tiny_study, "unigram", tiny)
    posthoc.measure_entropy_gaps(tiny_study)
    found = [json.loads(line) for line in (folders / "records/tiny/entropy_gap.jsonl").open()]
    assert [row["run"] for row in found] == sorted(cell.name for cell in cells)
    for row, cell in zip(found, sorted(cells, key=lambda cell: cell.name), strict=True):
        assert row["part"] == row["smoothing_target"] == "unigram"
        assert row["label_smoothing"] == 0.1 and row["seed"] == cell.config().train["seed"]
        _, updates = gpu_measures.tokenizer_and_dataset(cell.config().train_options)
        z, y = target_logits(cell.model, updates, updates.held_out_conversations)

        def read(tau: float, z=z, y=y) -> tuple[float, float]:
            p = (z / tau).softmax(-1)
            entropy = torch.distributions.Categorical(p).entropy().mean().item()
            return -p[torch.arange(len(y)), y].log().mean().item(), entropy

        nll, entropy = read(1.0)
        assert len(updates.held_out_conversations) == 20 and row["tokens"] == len(y)
        assert row["nll"] == pytest.approx(nll, rel=1e-5)
        assert row["entropy"] == pytest.approx(entropy, rel=1e-5)
        assert row["entropy_gap"] == pytest.approx(entropy - nll, rel=1e-4)
        outside = z.softmax(-1).sort(-1).values[:, :-10].sum(-1).mean().item()
        assert row["mass_outside_top"] == pytest.approx(outside, rel=1e-4)
        at, there = row["entropy_temperature"], read(row["entropy_temperature"])
        assert 0.35 < at < 1.95 and abs(at - 1) > 0.05
        assert there[0] == pytest.approx(there[1], abs=1e-4)
        assert there[0] < min(read(0.95 * at)[0], read(1.05 * at)[0])


def test_weights_are_averaged_as_val_questions_choose(tiny, tiny_study, folders, monkeypatch):
    """And what is packed of their records loses nothing but digits."""
    monkeypatch.setattr(gpu_measures, "ALPHAS", (0.2, 0.7))
    cells = make_trained(tiny_study, "recommended", [*tiny, "grid.label_smoothing=[0.0,0.1]"])
    plain = [cell for cell in cells if cell.config().train["label_smoothing"] == 0]
    posthoc.average_weights(tiny_study)
    packed_runs = {
        run.record.run: (run.record, run.folder) for run in derived.answered_runs(tiny_study)
    }
    assert packed_runs.keys() == {cell.name for cell in plain}
    base = AutoModelForCausalLM.from_pretrained("models/tiny")
    tokenizer = AutoTokenizer.from_pretrained("models/tiny")
    for cell in plain:
        (record, out), losses, made = packed_runs[cell.name], {}, {}
        for alpha in gpu_measures.ALPHAS:
            model = AutoModelForCausalLM.from_pretrained(cell.model)
            ours = model.state_dict()
            for name, theirs in base.state_dict().items():
                ours[name].copy_((1 - alpha) * theirs + alpha * ours[name])
            made[alpha] = calibeval.score(model, tokenizer, TASKS, progress=False)
            losses[alpha] = scaling.nll(made[alpha]["val"], 1.0)
        assert record.origin == "averaged" and record.seed == cell.config().train["seed"]
        assert record.alpha == min(losses, key=losses.get)
        before, after = made[record.alpha]["test"], records.read(out / "mmlu.jsonl")
        assert record.tasks == {"mmlu": len(before.ids)} and (out / "DONE").exists()
        assert before.ids == after.ids and before.prompts.tolist() == after.prompts.tolist()
        assert abs(before.logprobs - after.logprobs).max() <= 0.5 / STEPS_PER_NAT + 1e-4


def test_answers_that_no_temperature_fits_are_skipped(study, folders, capsys):
    """All right after over-training: the lower the better. Or never the base model's choices. They
    stopped every table, or made it NaN."""
    write_records(base := folders / "base.jsonl", 50, 1.5, seed=7)
    all_right = read_lines(base)
    others = read_lines(base)
    for row, other in zip(all_right, others, strict=True):
        row["label"] = int(np.argmax(row["logprobs"]))
        other["logprobs"] = np.roll(other["logprobs"], 1).tolist()
    plain = {"label_smoothing": 0.0, "seed": 0}
    right = write_lines(folders / "right.jsonl", all_right)
    study.store.add("all-right", RunRecord("over-trained", "h", **plain), {"mmlu": right})
    elsewhere = Study("all-right", study.runs_folder, study.store)
    assert [run.record.origin for run in derived.answered_runs(elsewhere)] == ["over-trained"]
    tuned = write_lines(folders / "tuned.jsonl", others)
    other_store = RecordStore(folders / "other")
    other_store.add(MODEL, RunRecord("base", "b"), {"mmlu": base})
    other_store.add(MODEL, RunRecord("recommended", "p", **plain), {"mmlu": tuned})
    runs = derived.answered_runs(Study(MODEL, folders / "other-runs", other_store))
    assert {run.record.origin for run in runs} == {"base", "recommended"}
    printed_errors = capsys.readouterr().err
    assert "over-trained-temperature: skipped" in printed_errors
    assert "daca: skipped" in printed_errors


def test_the_base_models_mean_prediction_is_made_before_it_is_a_target(
    tiny, tiny_study, folders, monkeypatch
):
    monkeypatch.setattr(gpu_measures, "CONVERSATIONS", 9)
    monkeypatch.setattr(gpu_measures, "CHUNK", 7)
    asked, found = parts.sweep_overrides(tiny_study, PART["base-mean"], tiny), []

    def launch(words: list[str], started=training.subprocess.Popen):
        found.append(np.load(folders / "runs/targets/tiny.npy"))
        return started("true")

    monkeypatch.setattr(training.subprocess, "Popen", launch)
    assert training.train(tiny_study, PART["base-mean"], asked) == 0
    _, updates = gpu_measures.tokenizer_and_dataset(
        plan_sweep(CONFIG, asked).runs[0].config().train_options
    )
    z, _ = target_logits("models/tiny", updates, updates.train_conversations[:9])
    (u,) = found
    assert u.dtype == float and abs(u.sum() - 1) < 1e-12
    np.testing.assert_allclose(u, z.softmax(-1).mean(0), rtol=1e-5)
    monkeypatch.setattr(gpu_measures, "load_for_inference", None)  # it is not made again
    assert training.train(tiny_study, PART["base-mean"], asked) == 0


def add_answers(study: Study, folder: Path, sharpness, tasks=("mmlu",), count=200) -> None:
    """Record answers of known sharpness, by (part, β), of three seeds or of the base model."""
    for (part, beta), sharp in sharpness.items():
        for seed in (None,) if part == "base" else (0, 1, 2):
            file = folder / f"{part}-{beta}-{seed}.jsonl"
            write_records(file, count, sharp * (1 + 0.02 * (seed or 0)), seed=7)
            record = RunRecord(part, file.stem, label_smoothing=beta, seed=seed)
            study.store.add(MODEL, record, dict.fromkeys(tasks, file))


def test_the_reports_differences_and_the_summarys_estimates_are_calibevals(study, folders):
    """Paired by seed, of sharpened models, which miscalibration is known to part."""
    sharpness = {("base", None): 1.0, ("recommended", 0.0): 2.0, ("recommended", 0.1): 1.5}
    sharpness |= {("sum", 0.0): 2.0, ("sum", 0.1): 2.0}
    add_answers(study, folders, sharpness, count=400)
    study.store.add(MODEL, RunRecord("recommended", "4", label_smoothing=0.0, seed=4), {})
    assert claims.main([MODEL, "report", "summary"], study.runs_folder, study.store) == 0
    text = (folders / "runs" / f"{MODEL}.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.split("\n\n")[0].splitlines()[2:]]
    found = {row[0]: row[1] for row in rows}
    at = folders / "runs" / "unpacked" / MODEL / "recommended"
    runs = {
        beta: [
            evaluations.load(at / f"recommended-{beta}-{seed}" / "mmlu.jsonl") for seed in range(3)
        ]
        for beta in (0.0, 0.1)
    }
    expected = stats.difference(runs[0.0], runs[0.1], "rms_debiased", "choices")
    assert expected.high < 0
    value, low, high = (
        f"{1000 * number:+.2f}" for number in (expected.value, expected.low, expected.high)
    )
    assert found["recommended: β = 0.1 less 0"] == f"**{value}** [{low}, {high}] (3)"
    assert found["β = 0 less base"].removeprefix("**").startswith("+")
    # The same answers tell of no others, and so the effect beyond `recommended` is its negative.
    assert "0.00" in found["sum, clipped: 0.1 less 0"]
    assert "[" not in found["sum, clipped: 0.1 less 0"]
    values = {name: float(re.search(r"[+-][\d.]+", cell)[0]) for name, cell in found.items()}
    assert values["– less that of `recommended`, sum, clipped"] == -float(value)
    # Base and β = 0 agree on every answer here, so their confidences become the same.
    aligned = values["DACA's temperature after β = 0, less β = 0"]
    assert aligned == pytest.approx(-values["β = 0 less base"], abs=0.3)
    assert "high-rate: β = 0.1 less 0" not in found
    assert (folders / "runs" / "forest.png").exists()
    text = (folders / "runs" / f"{MODEL}-summary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "as recom" in line]
    assert [row[:3] for row in rows] == [["as recommended", beta, "3"] for beta in ("0", "0.1")]
    accuracy = stats.estimate(runs[0.1], "accuracy", "choices")
    ends = [100 * end for end in (accuracy.value, accuracy.low, accuracy.high)]
    assert rows[1][3] == "{:.1f} [{:.1f}, {:.1f}]".format(*ends)
    for column, confidence in ((4, "choices"), (5, "vocabulary")):
        assert rows[1][column] == f"{stats.estimate(runs[0.1], 'ece', confidence).value:.3f}"
        loss = stats.estimate(runs[0.1], "nll", confidence)
        assert rows[1][column + 2] == f"{loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]"


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        "gemma-3-270m",
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow),
    ],
)
def test_planned_runs_are_the_published_ones(model):
    """By their names; otherwise they would be trained again. What is not published was not run."""
    study = Study(model)
    planned = set()
    for part in PARTS:
        plan = plan_sweep(CONFIG, parts.sweep_overrides(study, part, []))
        planned |= {training.record_key(part, run) for run in (*plan.baselines, *plan.runs)}
    trained = {key for key in PUBLISHED.keys(model) if key[0] not in ("temperature", "averaged")}
    assert trained - planned == set()
    not_run = {"qwen2.5-coder-1.5b": set(), "qwen2.5-coder-0.5b": NOT_RUN - {"over-trained"}}
    assert {part for part, _ in planned - trained} == not_run.get(model, NOT_RUN)


def test_merging_changes_where_records_are_and_not_what_they_say(study, folders):
    """Of a run that is recorded again the new ones count; one of other questions is refused."""
    store = study.store

    def add(names: str, sharpness: float) -> None:
        for seed, name in enumerate(names):
            write_records(folders / f"{name}.jsonl", 30, sharpness + seed, seed=1)
            record = RunRecord("recommended", name, label_smoothing=0.1, seed=seed)
            store.add("m", record, {"mmlu": folders / f"{name}.jsonl"})

    def texts() -> dict[str, str]:
        unpacked = {}
        for record in store.runs("m"):
            if not record.tasks:
                continue
            store.unpack("m", record, store.questions(), folders / "unpacked")
            unpacked[record.run] = (folders / "unpacked/mmlu.jsonl").read_text()
        return unpacked

    add("ab", sharpness=1.0)
    earlier = texts()
    store.merge("m")
    assert texts() == earlier
    add("abc", sharpness=3.0)  # two of which are there already
    store.add("m", RunRecord("grid", "r", learning_rate=2e-5, seed=0, held_out_loss=1.5), {})
    runs = store.runs("m")
    before = texts()
    assert all(before[name] != earlier[name] for name in "ab")
    store.merge("m")
    assert store.runs("m") == runs
    assert texts() == before
    assert list((folders / "records/m").glob("*/*.parquet")) == []
    manifest = json.loads(store.manifest.read_text())
    assert manifest["m.parquet"]["sha256"] == sha256(store.model_file("m"))
    write_records(folders / "other.jsonl", 20, 1.0, seed=1)
    with pytest.raises(InputError, match="mmlu was asked in other words"):
        store.add("m", RunRecord("base", "b"), {"mmlu": folders / "other.jsonl"})
