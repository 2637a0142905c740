"""The claims: each part is a sweep that plans; what is computed with models is what a plain loop
computes; the report is right on runs of known calibration."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import tiny_world
import torch
from made_records import read_lines, write_lines, write_records
from studies import temperatures
from studies.claims import __main__ as claims
from studies.claims import (
    answers,
    contrasts,
    derived,
    forest,
    gpu_measures,
    parts,
    posthoc,
    quick_evaluation,
    report,
    summary,
    training,
)
from studies.claims.parts import CONFIG, PARTS, Study
from studies.claims.records import STEPS_PER_NAT, RecordStore, RunRecord
from training_runs import collated
from transformers import AutoModelForCausalLM, AutoTokenizer

import calibeval
from calibeval import evaluations, records, scaling, stats
from calibeval.diagnosis import cross_fitted
from calibeval.io import InputError, sha256, write_text
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run

MODEL = "smollm2-135m"
LARGE = "qwen2.5-coder-1.5b"
PUBLISHED = RecordStore(parts.HERE / "records")
TASKS = [{"task": "mmlu", "data": "data/mmlu", "split": s, "name": s} for s in ("val", "test")]
PART = {part.name: part for part in PARTS}
LAST = ["temperature", "averaged", "entropy-gap", "summary", "report"]
RUNS = {
    "grid": 4,
    "recommended": 25,
    "high-rate": 25,
    "over-trained": 25,
    "sum": 6,
    "filtered": 3,
    "equal": 3,
}
RUNS |= {"script": 6, "unigram": 5, "base-mean": 5, "half-data": 5, "two-epochs": 5}
WITH_THREE_SEEDS = {"recommended": 15, "high-rate": 15, "over-trained": 15}
WITH_THREE_SEEDS |= dict.fromkeys(("unigram", "base-mean", "half-data", "two-epochs"), 3)


def test_a_new_model_has_five_seeds():
    plan = plan_sweep(CONFIG, parts.sweep_overrides(Study("new"), PART["over-trained"], []))
    assert len(plan.runs) == RUNS["over-trained"]
    plan = plan_sweep(
        CONFIG, parts.sweep_overrides(Study("new"), PART["over-trained"], ["grid.seed=[7]"])
    )
    assert {run.config().train["seed"] for run in plan.runs} == {7}


def test_every_part_is_a_sweep(monkeypatch):
    """Where the grid has chosen 5e-5, of a model whose published runs have three seeds."""
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    monkeypatch.setattr(parts, "equal_rate", lambda study: 5e-5)
    targets = {"unigram": "unigram", "base-mean": f"runs/claims/targets/{MODEL}.npy"}
    for part in PARTS:
        name = part.name
        plan = plan_sweep(CONFIG, parts.sweep_overrides(Study(MODEL), part, ["workers=2"]))
        assert len(plan.runs) == {**RUNS, **WITH_THREE_SEEDS}[name]
        assert plan.sweep.name == f"{MODEL}-{name}"
        rates = {run.config().train["learning_rate"] for run in plan.runs}
        assert name == "grid" or rates == ({2e-4} if name == "high-rate" else {5e-5})
        (target,) = {run.config().train.get("smoothing_target") for run in plan.runs}
        assert target == targets.get(name)
        assert (plan.sweep.keep == "all") == (name in ("grid", "recommended", *targets))


def test_every_part_trains_gemma_with_its_own_settings(monkeypatch):
    """`script`, which replaces all of `train:`, lost them: no <bos>, and the template tulu."""
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    monkeypatch.setattr(parts, "equal_rate", lambda study: 5e-5)
    for part in PARTS:
        plan = plan_sweep(CONFIG, parts.sweep_overrides(Study("gemma-3-270m"), part, []))
        for run in plan.runs:
            options = run.config().train_options
            assert (options.add_bos, options.chat_template_name) == (True, "alpaca"), part.name
    overrides = parts.sweep_overrides(
        Study("gemma-3-270m"), PART["script"], ["train.chat_template_name=tulu"]
    )
    options = plan_sweep(CONFIG, overrides).runs[0].config().train_options
    assert (options.add_bos, options.chat_template_name) == (True, "tulu")


def test_script_refuses_a_template_that_open_instruct_lacks(study, folders, monkeypatch):
    """finetune.py would take the tokenizer's own template instead, without a word."""
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    overrides = parts.sweep_overrides(replace(study, model="gemma-3-270m"), PART["script"], [])
    with pytest.raises(InputError, match="chat_template_name: found 'alpaca'"):
        training.prepare(PART["script"], overrides)


def test_the_grid_comes_first_and_the_report_last(monkeypatch, capsys):
    order, fails = [], []

    def train(study: Study, part: parts.Part, overrides: list[str]) -> int:
        order.append(part.name)
        return part.name in fails

    monkeypatch.setattr(claims, "sweep_overrides", lambda *_: [])
    monkeypatch.setattr(claims, "train", train)
    assert list(claims.STEPS) == LAST
    for name in LAST:
        monkeypatch.setitem(claims.STEPS, name, lambda _, name=name: order.append(name))

    def done(*words: str, failing=()) -> tuple[int, list[str]]:
        order[:], fails[:] = [], failing
        return claims.main([*words]), [*order]

    assert done(MODEL, "workers=2") == (0, [*RUNS, *LAST])
    assert done(MODEL, failing=["sum", "filtered"]) == (2, [*RUNS, *LAST])
    assert "not whole: sum, filtered; why is said above" in capsys.readouterr().err
    own_rates = ["grid", "high-rate", "over-trained"]  # the others have the rate of the grid
    assert done(MODEL, failing=["grid"]) == (2, [*own_rates, *LAST])
    others = [name for name in RUNS if name not in own_rates[1:]]
    assert f"not whole: {', '.join(others)}; why is said above" in capsys.readouterr().err
    # Nothing is on record of a new model, and so no step has anything to do.
    assert done("new", failing=["grid"]) == (2, own_rates)
    capsys.readouterr()
    without_equal = [name for name in (*RUNS, *LAST) if name != "equal"]  # whose rate seeds tell
    assert done(MODEL, failing=["recommended"]) == (2, without_equal)
    assert "not whole: recommended, equal; why is said above" in capsys.readouterr().err
    assert done(MODEL, "gird") == (2, [])
    assert "gird: no such part or step; known: grid, recommended" in capsys.readouterr().err
    assert done() == (2, [])


def test_help_is_no_error_and_nothing_asked_is(capsys):
    assert claims.main(["--help"]) == 0
    assert claims.main(["-h", MODEL]) == 0
    assert claims.main([]) == 2
    assert capsys.readouterr().out.count("python -m studies.claims MODEL") == 3


def test_a_stopped_study_says_that_it_goes_on(monkeypatch, capsys):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(claims, "do_parts", stop)
    assert claims.main([MODEL]) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder for what a study writes, which leaves the repository alone."""
    monkeypatch.chdir(tmp_path)  # and back, wherever a study goes
    return tmp_path


@pytest.fixture
def study(folders):
    """The study of MODEL in a folder of its own."""
    return Study(MODEL, folders / "runs", RecordStore(folders / "records"))


@pytest.fixture
def command(study):
    """command(*words) → the exit code of the command line, in the study's folders."""
    return lambda *words: claims.main([*words], study.runs_folder, study.store)


def test_the_grid_chooses_the_rate_of_other_parts(study, command, folders, capsys):
    assert command(MODEL, "recommended") == 2
    assert "grid: no run is trained; the part grid comes first" in capsys.readouterr().err
    overrides = [f"output_root={folders}", *parts.sweep_overrides(study, PART["grid"], [])]
    plan = plan_sweep(CONFIG, overrides)
    for loss, run in zip((1.4, 1.2, 1.3, 1.5), plan.runs, strict=True):
        run.model.mkdir(parents=True)
        run.metrics.write_text(f'{{"step": 1, "held_out_loss": {loss}}}\n')
        (run.path / "DONE").touch()
    training.keep_records(study, PART["grid"], plan)
    assert parts.chosen_rate(study) == 2e-5
    assert training.overrides_of_missing_runs(study, PART["grid"], plan) == []
    for loss in (1.3, 1.5):  # in the mean that of 1e-4, where the losses of 5e-5 and 2e-4 meet
        setting = {"label_smoothing": 0.1, "held_out_loss": loss}
        study.store.add(MODEL, RunRecord("recommended", f"{loss}", **setting), {})
    assert parts.equal_rate(study) == 1e-4


def add_grid(study: Study, losses: dict[float, tuple[float | None, ...]]) -> None:
    """Runs of the grid with the held-out losses of each rate, a seed each."""
    for rate, losses_of_seeds in losses.items():
        for seed, loss in enumerate(losses_of_seeds):
            record = RunRecord(
                "grid", f"{rate}-{seed}", learning_rate=rate, seed=seed, held_out_loss=loss
            )
            study.store.add(MODEL, record, {})


def test_a_rate_is_chosen_by_its_mean_over_seeds(study):
    """Not by the luckiest seed, and not where a run has diverged."""
    add_grid(study, {1e-5: (1.5, 1.5), 2e-5: (1.1, 2.1), 5e-5: (1.0, float("nan"))})
    assert parts.chosen_rate(study) == 1e-5


def test_no_rate_is_chosen_where_all_have_diverged(study):
    add_grid(study, {1e-5: (float("nan"),), 2e-5: (float("nan"),)})
    with pytest.raises(InputError, match=f"{MODEL}, grid: no learning rate has a held-out loss"):
        parts.chosen_rate(study)


def test_no_rate_is_chosen_where_nothing_is_held_out(study):
    """As with `train.held_out=0`; it was a TypeError."""
    add_grid(study, {1e-5: (None,), 2e-5: (None,)})
    with pytest.raises(
        InputError, match=r"no learning rate has a held-out loss; .*train\.held_out"
    ):
        parts.chosen_rate(study)


def test_an_equal_loss_needs_the_loss_that_it_equals(study):
    with pytest.raises(InputError, match="the part grid comes first"):
        parts.equal_rate(study)
    add_grid(study, {1e-5: (1.5,), 2e-5: (1.6,)})
    with pytest.raises(InputError, match=f"{MODEL}, recommended: no run at β = 0.1 is trained"):
        parts.equal_rate(study)


def test_an_equal_loss_is_not_that_of_fewer_seeds(study):
    """A seed that had diverged was left out of the mean, and nothing said so."""
    add_grid(study, {1e-5: (1.2,), 2e-5: (1.6,)})
    for seed, loss in enumerate((1.5, float("nan"))):
        smoothed = RunRecord("recommended", f"s{seed}", label_smoothing=0.1, seed=seed)
        smoothed.held_out_loss = loss
        study.store.add(MODEL, smoothed, {})
    with pytest.raises(
        InputError, match=r"no finite held-out loss of s1 at β = 0\.1, which diverged"
    ):
        parts.equal_rate(study)
    equal = RunRecord("equal", "e", label_smoothing=0.0, learning_rate=1e-5, held_out_loss=1.2)
    study.store.add(MODEL, equal, {})
    line, _ = report.equal_loss_lines(study)  # Such a seed does not stop the report.
    assert line.startswith("Equal held-out loss: unknown. ") and "s1" in line


def test_an_equal_loss_of_a_run_that_diverged_is_unknown(study):
    """It was told as "nan at β = 0"."""
    add_grid(study, {1e-5: (1.2,), 2e-5: (1.6,)})
    smoothed = RunRecord("recommended", "s", label_smoothing=0.1, seed=0, held_out_loss=1.5)
    equal = RunRecord("equal", "e", label_smoothing=0.0, learning_rate=1e-5)
    equal.held_out_loss = float("nan")
    for record in (smoothed, equal):
        study.store.add(MODEL, record, {})
    line, _ = report.equal_loss_lines(study)
    assert line.startswith(f"Equal held-out loss: unknown. {MODEL}, equal: ") and " e " in line


def test_a_loss_below_all_of_the_grid_is_told(study, capsys):
    """The best rate was taken for one of equal loss in silence."""
    add_grid(study, {1e-5: (1.2,), 2e-5: (1.6,)})
    smoothed = RunRecord("recommended", "s", label_smoothing=0.1, seed=0, held_out_loss=1.1)
    study.store.add(MODEL, smoothed, {})
    assert parts.equal_rate(study) == 1e-5
    assert (
        "all learning rates of the grid have a held-out loss above 1.1000 at β = 0; takes 1e-05"
        in (capsys.readouterr().err)
    )
    equal = RunRecord("equal", "e", label_smoothing=0.0, learning_rate=1e-5, held_out_loss=1.2)
    study.store.add(MODEL, equal, {})
    line, _ = report.equal_loss_lines(study)
    assert line.endswith(
        "the best of the grid, since its rates all have a larger loss than β = 0.1."
    )


def test_a_loss_that_only_the_other_side_of_the_grid_reaches_is_told(study, capsys):
    """It was told that no rate of the grid has a loss of 2.8 or more, but 2e-5 has 3.0."""
    add_grid(study, {1e-5: (2.0,), 2e-5: (3.0,), 5e-5: (1.0,), 1e-4: (2.5,)})
    smoothed = RunRecord("recommended", "s", label_smoothing=0.1, seed=0, held_out_loss=2.8)
    study.store.add(MODEL, smoothed, {})
    assert parts.equal_rate(study) == 1e-4
    assert capsys.readouterr().err == (
        f"{MODEL}, equal: no learning rate of the grid from the best one, 5e-05, to 0.0001 reaches "
        "a held-out loss of 2.8000 at β = 0; takes 0.0001, where it is 2.5000\n"
    )
    equal = RunRecord("equal", "e", label_smoothing=0.0, learning_rate=1e-4, held_out_loss=2.5)
    study.store.add(MODEL, equal, {})
    line, _ = report.equal_loss_lines(study)
    assert line.endswith(
        "an end of the grid, since no rate from its best one to there reaches the loss of β = 0.1."
    )


def test_an_equal_loss_needs_losses_that_grow(study):
    """Where they fall on the way, several rates have the loss that is sought."""
    add_grid(study, {5e-6: (1.2,), 2e-5: (1.5,), 5e-5: (1.4,), 2e-4: (1.8,)})
    smoothed = RunRecord("recommended", "s", label_smoothing=0.1, seed=0, held_out_loss=1.45)
    study.store.add(MODEL, smoothed, {})
    with pytest.raises(InputError, match=r"do not grow from the chosen rate on .*1\.5000 at 2e-05"):
        parts.equal_rate(study)
    equal = RunRecord("equal", "e", label_smoothing=0.0, learning_rate=5e-5, held_out_loss=1.4)
    study.store.add(MODEL, equal, {})
    assert report.equal_loss_lines(study)  # A report of what was trained needs no rate.


def test_a_part_without_a_learning_rate_does_not_stop_the_others(study, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(claims, "train", lambda study, part, _: trained.append(part.name) or 0)
    add_grid(study, {5e-6: (1.2,), 2e-5: (1.5,)})
    assert claims.main([MODEL, "equal", "half-data"], study.runs_folder, study.store) == 2
    assert trained == ["half-data"]
    said = capsys.readouterr().err
    assert "recommended: no run at β = 0.1 is trained" in said and "not whole: equal;" in said


def test_an_override_that_one_part_does_not_know_does_not_stop_the_others(
    study, monkeypatch, capsys
):
    """open-instruct's options have no `max_tokens`; the parts after `script` were left undone."""
    add_grid(study, {5e-6: (1.2,), 2e-5: (1.5,)})
    trained = []

    def train(study: Study, part: parts.Part, overrides: list[str]) -> int:
        if part.name == "script":
            return training.train(study, part, overrides)
        trained.append(part.name)
        return 0

    monkeypatch.setattr(claims, "train", train)
    words = [MODEL, "script", "half-data", "train.max_tokens=4096"]
    assert claims.main(words, study.runs_folder, study.store) == 2
    assert trained == ["half-data"]
    printed_errors = capsys.readouterr().err
    assert "train.max_tokens: unknown key" in printed_errors
    assert "not whole: script;" in printed_errors


def test_runs_are_trained_in_the_studys_folder(folders):
    study = Study("new", folders / "elsewhere")
    plan = plan_sweep(CONFIG, parts.sweep_overrides(study, PART["grid"], []))
    assert {run.path.parent for run in plan.runs} == {study.part_folder("grid")}


def test_two_runs_of_a_setting_and_seed_are_refused(study, folders):
    """As they are after a changed learning rate, beside the ones before; neither would be right."""
    write_records(file := folders / "mmlu.jsonl", 50, 1.5, seed=7)
    for rate in (1e-5, 2e-5):
        record = RunRecord(
            "recommended", f"r{rate}", learning_rate=rate, label_smoothing=0.1, seed=0
        )
        study.store.add(MODEL, record, {"mmlu": file})
    with pytest.raises(
        InputError, match=r"r1e-05 and r2e-05 are both runs of recommended, β = 0\.1, "
    ):
        answers.files_by_seed(derived.answered_runs(study), answers.SMOOTHED, "mmlu")


def test_the_base_model_alone_is_scored_where_only_it_lacks_records(
    tiny, tiny_study, folders, monkeypatch
):
    seeds = PART["recommended"]
    more = [
        *tiny,
        f"grid.model_name_or_path=[{folders}/models/tiny]",
        "grid.seed=[0]",
        f"score={{tasks: [{{task: mmlu, data: {folders}/data/mmlu, shots: 0, scoring: letters}}]}}",
    ]
    overrides = parts.sweep_overrides(tiny_study, seeds, more)
    for run in plan_sweep(CONFIG, overrides).runs:
        tiny_study.store.add("tiny", RunRecord(*training.record_key(seeds, run)), {})
    assert training.train(tiny_study, seeds, overrides) == 0
    (base,) = (record for record in tiny_study.store.runs("tiny") if record.origin == "base")
    assert base.tasks["mmlu"] > 0
    monkeypatch.setattr(training.subprocess, "run", None)  # it is not scored again
    assert training.train(tiny_study, seeds, overrides) == 0


def test_runs_with_records_are_not_run_again(study, folders, monkeypatch):
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    seeds = PART["recommended"]
    overrides = parts.sweep_overrides(study, seeds, [])
    plan = plan_sweep(CONFIG, overrides)
    write_records(file := folders / "answers.jsonl", 20, 1.5, seed=7)
    for run in (*plan.baselines, *plan.runs[:7]):
        files = dict.fromkeys(training.files_of_tasks(run), file)
        study.store.add(MODEL, RunRecord(*training.record_key(seeds, run)), files)
    lacking = training.overrides_of_missing_runs(study, seeds, plan)
    plans = [plan_sweep(CONFIG, [*overrides, *more]) for more in lacking]
    left = [run.name for each in plans for run in each.runs]
    assert left == [run.name for run in plan.runs[7:]]
    assert not any(each.baselines for each in plans)


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
    """The temperature at which entropy is NLL, and NLL least; what is known is not measured anew,
    and what only chose a rate not at all."""
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
    monkeypatch.setattr(gpu_measures, "entropy_gap", None)
    posthoc.measure_entropy_gaps(tiny_study)
    assert len((folders / "records/tiny/entropy_gap.jsonl").read_text().splitlines()) == 2
    # A run of another part may have the same name, and is another model all the same.
    shutil.copytree(cells[0].path, folders / "runs/tiny-half-data" / cells[0].name)
    monkeypatch.setattr(gpu_measures, "entropy_gap", lambda run: {"nll": 0.0})
    posthoc.measure_entropy_gaps(tiny_study)
    rows = [json.loads(line) for line in (folders / "records/tiny/entropy_gap.jsonl").open()]
    assert [row["part"] for row in rows] == ["unigram", "unigram", "half-data"]


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
    files = sorted((folders / "records/tiny/averaged").glob("*.parquet"))
    times = [file.stat().st_mtime_ns for file in files]
    posthoc.average_weights(tiny_study)  # they stay
    assert times == [file.stat().st_mtime_ns for file in files]


def test_of_a_temperature_the_number_is_kept(tiny, tiny_study, folders):
    cell, _ = make_trained(tiny_study, "recommended", [*tiny, "grid.label_smoothing=[0.0]"])
    AutoTokenizer.from_pretrained("models/tiny").save_pretrained(cell.model)
    calibeval.score(cell.model, tasks=TASKS, out=(scores := cell.scores), progress=False)
    entry = {key: cell.config().train[key] for key in training.RUN_KEYS} | {"dataset": "mmlu"}
    entry |= {"run": cell.name, "records": f"../{cell.name}/scores/test.jsonl"}
    write_text(folders / "runs/tiny-recommended/results/index.jsonl", json.dumps(entry))
    posthoc.fit_temperatures(tiny_study)
    (record,) = tiny_study.store.runs("tiny")
    fitted = calibeval.temperature(scores / "val.jsonl", scores / "test.jsonl", folders / "out")
    assert record.key == ("temperature", cell.name) and record.tasks == {}
    assert record.temperature == fitted["temperature"]


def test_a_run_without_a_temperature_does_not_stop_the_others(folders, monkeypatch, capsys):
    """One whose answers are all right, say; no temperature of any run was kept."""

    def fit(val: Path, test: Path, out: Path) -> None:
        if out.stem == "all-right":
            raise scaling.NoTemperature(val, "all 20 answers are right", "fit it on other records")

    monkeypatch.setattr(calibeval, "score", lambda *_, **__: None)
    monkeypatch.setattr(calibeval, "temperature", fit)
    runs = ("all-right", "other")
    entries = [{"run": run, "records": f"../{run}/scores/mmlu.jsonl"} for run in runs]
    rows = temperatures.fit_to_mmlu(entries, folders / "results", folders / "mmlu", folders / "out")
    assert [row["run"] for row in rows] == ["other"]
    assert "temperature: skipped for all-right: " in capsys.readouterr().err


def test_a_run_of_the_index_whose_model_was_deleted_is_skipped_by_name(study, capsys):
    """It was scored, which stopped the steps after this one."""
    plain = {"learning_rate": 2e-5, "label_smoothing": 0.0, "seed": 0}
    study.store.add(MODEL, RunRecord("recommended", "r", **plain), {})
    entry = {**plain, "run": "r", "dataset": "mmlu", "records": "../r/scores/mmlu.jsonl"}
    write_text(study.part_folder("recommended") / "results/index.jsonl", json.dumps(entry))
    posthoc.fit_temperatures(study)
    assert "temperature: skipped for r, since no trained model is" in capsys.readouterr().err


def test_a_trained_run_that_the_index_lacks_is_skipped_for_that_reason(study, capsys):
    """It was said to have no trained model, or nothing was said at all."""
    add_grid(study, {2e-5: (1.2,)})
    overrides = parts.sweep_overrides(study, PART["recommended"], [])
    plan = plan_sweep(CONFIG, overrides)
    plan.create()
    (run, *_) = (run for run in plan.runs if run.config().train["label_smoothing"] == 0)
    run.model.mkdir()
    plain = {"learning_rate": 2e-5, "label_smoothing": 0.0, "seed": 0}
    study.store.add(MODEL, RunRecord("recommended", run.name, **plain), {})
    posthoc.fit_temperatures(study)
    printed_errors = capsys.readouterr().err
    index = study.part_folder("recommended") / "results/index.jsonl"
    assert f"temperature: skipped for {run.name}, which {index} does not list" in printed_errors
    assert "no trained model" not in printed_errors


def test_runs_without_held_out_conversations_have_no_entropy_gap(study, folders, monkeypatch):
    """As those of open-instruct's script, whose options lack what the gap is measured on."""
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    overrides = parts.sweep_overrides(study, PART["script"], ["grid.seed=[0]", "keep=all"])
    plan = plan_sweep(CONFIG, overrides)
    plan.create()
    plan.runs[0].model.mkdir(parents=True)
    posthoc.measure_entropy_gaps(study)
    assert not study.store.entropy_gap_file(MODEL).exists()


def test_over_trained_answers_without_a_temperature_are_skipped(study, folders, capsys):
    """All right: the lower the better. It stopped every table."""
    write_records(file := folders / "mmlu.jsonl", 50, 1.5, seed=7)
    rows = read_lines(file)
    for row in rows:
        row["label"] = int(np.argmax(row["logprobs"]))
    write_lines(file, rows)
    study.store.add(
        MODEL, RunRecord("over-trained", "h", label_smoothing=0.0, seed=0), {"mmlu": file}
    )
    assert [run.record.origin for run in derived.answered_runs(study)] == ["over-trained"]
    assert "over-trained-temperature: skipped for" in capsys.readouterr().err


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


def test_open_instruct_reads_the_same_conversations(tiny, tiny_study, folders, monkeypatch):
    row = {"instruction": "Add", "input": "1 and 2", "output": "3"}
    write_text(folders / "data/alpaca/alpaca_data.json", json.dumps([row]))
    started = training.subprocess.Popen
    monkeypatch.setattr(training.subprocess, "Popen", lambda words: started("true"))
    overrides = parts.sweep_overrides(tiny_study, PART["script"], tiny[:1])
    assert training.train(tiny_study, PART["script"], overrides) == 0
    asked, answer = json.loads((folders / "data/alpaca/messages.jsonl").read_text())["messages"]
    assert asked == {"role": "user", "content": "Add\n\n### Input:\n1 and 2"}
    assert answer == {"role": "assistant", "content": "3"}


def test_confidences_by_the_norm_of_the_answers_logits(folders):
    """Ranks of what Cattelan & Silva divide, one question after another."""
    write_records(file := folders / "mmlu.jsonl", 300, 1.5, seed=1)
    run, of = contrasts.with_normalized_logits(file), records.read(file)
    sure = []
    for logits, label in zip(of.logprobs, of.labels, strict=True):
        centred = logits - sum(logits) / len(logits)
        sure.append((-max(centred) / sum(centred**2) ** 0.5, logits.argmax() != label))
    wrong = np.array([wrong for _, wrong in sorted(sure)])
    expected = np.mean(wrong.cumsum() / np.arange(1, 301))
    assert run.values["choices"]["aurc"] == pytest.approx(expected, abs=1e-9)
    plain = evaluations.load(file)
    assert abs(plain.values["choices"]["aurc"] - expected) > 1e-3
    draws = run.draws["choices"]["aurc"]
    assert draws.shape == plain.draws["choices"]["aurc"].shape
    assert np.corrcoef(draws, plain.draws["choices"]["aurc"])[0, 1] > 0.5  # the same resamples


def test_confidences_are_those_of_the_file_as_it_is_now(folders):
    """A temperature that was fitted anew changes a file within the process."""
    file = folders / "mmlu.jsonl"
    found = []
    for seed in (1, 2):
        write_records(file, 100, 1.5, seed=seed)
        found.append(contrasts.with_normalized_logits(file).values["choices"]["aurc"])
    assert found[0] != found[1]


def test_a_temperature_by_agreement_is_fitted_where_models_agree(folders):
    """The tuned model is twice as sharp, and as sure of its own answers where it differs."""
    write_records(base := folders / "base.jsonl", 300, 1.0, seed=1)
    rows = read_lines(base)
    for number, row in enumerate(rows):
        logits = 2 * np.array(row["logprobs"])
        if number % 3 == 0:
            logits = 10 * np.roll(logits, 1)
        row["logprobs"] = (logits - np.logaddexp.reduce(logits)).tolist()
        row["letter_mass"] = 1.0
    tuned = write_lines(folders / "tuned.jsonl", rows)
    assert derived.agreement_temperature(base, tuned) == pytest.approx(2, abs=1e-3)


def test_models_that_agree_on_no_question_have_no_temperature_by_agreement(study, folders, capsys):
    """It was NaN, and the rows of the part were too."""
    write_records(base := folders / "base.jsonl", 50, 1.0, seed=1)
    rows = read_lines(base)
    for row in rows:
        row["logprobs"] = np.roll(row["logprobs"], 1).tolist()
    tuned = write_lines(folders / "tuned.jsonl", rows)
    study.store.add(MODEL, RunRecord("base", "b"), {"mmlu": base})
    plain = RunRecord("recommended", "p", label_smoothing=0.0, seed=0)
    study.store.add(MODEL, plain, {"mmlu": tuned})
    assert {run.record.origin for run in derived.answered_runs(study)} == {"base", "recommended"}
    assert "daca: skipped for" in capsys.readouterr().err


def test_records_of_other_questions_are_not_packed_together(study, folders):
    for name, count in (("a", 300), ("b", 200)):
        write_records(folders / f"{name}.jsonl", count, 1.0, seed=1)
    study.store.add("m", RunRecord("base", "a"), {"mmlu": folders / "a.jsonl"})
    with pytest.raises(InputError, match="mmlu was asked in other words, or of other questions"):
        study.store.add("m", RunRecord("base", "b"), {"mmlu": folders / "b.jsonl"})


def test_the_verdicts_are_differences_paired_by_seed(study, command, folders):
    """Of sharpened models, which miscalibration is known to part; rows without runs go."""
    sharpness = {("base", None): 1.0, ("recommended", 0.0): 2.0, ("recommended", 0.1): 1.5}
    sharpness |= {("sum", 0.0): 2.0, ("sum", 0.1): 2.0}
    for (part, beta), sharp in sharpness.items():
        for seed in (None,) if beta is None else (0, 1, 2):
            file = folders / f"{part}-{beta}-{seed}.jsonl"
            write_records(file, 400, sharp * (1 + 0.02 * (seed or 0)), seed=7)
            record = RunRecord(part, file.stem, label_smoothing=beta, seed=seed)
            tasks = ("mmlu", "arc-letters") if part == "recommended" else ("mmlu",)
            study.store.add(MODEL, record, dict.fromkeys(tasks, file))
    for seed in (0, 1, 2):
        record = RunRecord(
            "temperature", f"{seed}", label_smoothing=0.0, seed=seed, temperature=2 / 1.5
        )
        study.store.add(MODEL, record, {})
    rows = [
        {"part": part, "label_smoothing": 0.1} for part in ("recommended", "unigram", "recommended")
    ]
    for nll, row in enumerate(rows):
        row |= dict.fromkeys(report.ENTROPY_COLUMNS, 0.5) | {"nll": nll}
    write_text(folders / "records" / MODEL / "entropy_gap.jsonl", "\n".join(map(json.dumps, rows)))
    assert command(MODEL, "report") == 0
    text = (folders / "runs" / f"{MODEL}.md").read_text()
    rows = [line.split(" | ") for line in text.split("\n\n")[0].splitlines()[2:]]
    found = {row[0].removeprefix("| "): row[1] for row in rows}
    cell = re.compile(r"(\*\*)?([+-][\d.]+)(\*\*)? \[([+-][\d.]+), ([+-][\d.]+)\] \(3\)")
    at = folders / "runs" / "unpacked" / MODEL / "recommended"
    runs = {
        beta: [
            evaluations.load(at / f"recommended-{beta}-{seed}" / "mmlu.jsonl") for seed in range(3)
        ]
        for beta in (0.0, 0.1)
    }
    expected = stats.difference(runs[0.0], runs[0.1], "rms_debiased", "choices")
    bold, *figures = cell.fullmatch(found["recommended: β = 0.1 less 0"]).group(1, 2, 4, 5)
    assert figures == [f"{1000 * x:+.2f}" for x in (expected.value, expected.low, expected.high)]
    assert bold and expected.high < 0
    assert cell.fullmatch(found["β = 0 less base"]).group(1, 2)[1].startswith("+")
    assert "0.00" in found["sum, clipped: 0.1 less 0"]
    assert "[" not in found["sum, clipped: 0.1 less 0"]  # the same answers, which tell of no others
    other = cell.fullmatch(found["– less that of `recommended`, sum, clipped"]).group(2)
    assert float(other) == -float(figures[0])
    assert "| fitted after β = 0, on MMLU's validation questions | 1.33 |\n" in text
    posthoc = next(row for row in rows if "temperature after β = 0, less β = 0" in row[0])
    assert posthoc[1] == posthoc[3] and posthoc[2] == "–"  # the other task has MMLU's records
    value = float(cell.fullmatch(posthoc[1]).group(2))
    assert value == pytest.approx(float(figures[0]), abs=0.3)  # sharpened as much as β = 0.1
    # Base and β = 0 agree on every answer here, so their confidences become the same.
    aligned = float(cell.fullmatch(found["DACA's temperature after β = 0, less β = 0"]).group(2))
    harm = float(cell.fullmatch(found["β = 0 less base"]).group(2))
    assert aligned == pytest.approx(-harm, abs=0.3)
    costs = {line.split()[1]: line.split()[3::2] for line in text.splitlines()[-2:]}
    half = ["0.5000"] * 4
    assert costs["recommended"] == ["0.1000", "1.0000", *half, "2"]  # the mean of 0 and 2
    assert costs["unigram"] == ["0.1000", "1.0000", *half, "1"]
    ranked = {
        b: [contrasts.with_normalized_logits(run.path) for run in of] for b, of in runs.items()
    }
    expected = stats.difference(ranked[0.0], ranked[0.1], "aurc", "choices")
    figures = (f"{100 * x:+.2f}" for x in (expected.value, expected.low, expected.high))
    guards = next(line for line in text.split("\n\n")[1].splitlines() if "0.1 less 0" in line)
    assert guards.endswith(" | {} [{}, {}] (3) |".format(*figures))
    assert (folders / "runs" / "forest.png").read_bytes().startswith(b"\x89PNG")
    assert "recommended: β = 0.2 less 0" not in found and "high-rate: β = 0.1 less 0" not in found


def test_the_summary_is_what_calibeval_estimates_over_seeds(study, command, folders):
    for beta, sharpness in ((0.0, 2.0), (0.1, 1.5)):
        for seed in (0, 1, 2):
            file = folders / f"{beta}-{seed}.jsonl"
            write_records(file, 400, sharpness * (1 + 0.02 * seed), seed=7)
            record = RunRecord("recommended", file.stem, label_smoothing=beta, seed=seed)
            study.store.add(MODEL, record, {"mmlu": file})
    assert command(MODEL, "summary") == 0

    text = (folders / "runs" / f"{MODEL}-summary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "as recom" in line]
    assert [row[:3] for row in rows] == [["as recommended", beta, "3"] for beta in ("0", "0.1")]
    at = folders / "runs" / "unpacked" / MODEL / "recommended"
    runs = [evaluations.load(at / f"0.1-{seed}" / "mmlu.jsonl") for seed in (0, 1, 2)]
    accuracy = stats.estimate(runs, "accuracy", "choices")
    ends = [100 * end for end in (accuracy.value, accuracy.low, accuracy.high)]
    assert rows[1][3] == "{:.1f} [{:.1f}, {:.1f}]".format(*ends)
    for column, confidence in ((4, "choices"), (5, "vocabulary")):
        ece = stats.estimate(runs, "ece", confidence)
        assert rows[1][column] == f"{ece.value:.3f}"
        loss = stats.estimate(runs, "nll", confidence)
        assert rows[1][column + 2] == f"{loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]"
    stated = float(re.search(r"an ECE of up to (\d\.\d+) here", text).group(1))
    runs += [evaluations.load(at / f"0.0-{seed}" / "mmlu.jsonl") for seed in (0, 1, 2)]
    ceilings = [run.floor_tests[c]["ece"].floor for run in runs for c in ("choices", "vocabulary")]
    assert stated == round(max(ceilings), 3)


def test_over_trained_answers_are_read_at_a_temperature_of_others(study, folders):
    """On MMLU of the other half of the questions, elsewhere of all of MMLU's."""
    tasks = {}
    for seed, task in enumerate(("mmlu", "arc-letters")):
        write_records(folders / f"{task}.jsonl", 200, 3.0, seed=seed)
        tasks[task] = folders / f"{task}.jsonl"
    study.store.add(MODEL, RunRecord("over-trained", "h", label_smoothing=0.0, seed=0), tasks)
    over_trained, at_temperature = derived.answered_runs(study)
    assert at_temperature.record.key == ("over-trained-temperature", "0")

    before = records.read(over_trained.folder / "mmlu.jsonl")
    expected, halves = cross_fitted(before)
    found = records.read(at_temperature.folder / "mmlu.jsonl")
    assert halves[0] != halves[1] and min(halves) > 1.5
    np.testing.assert_allclose(found.logprobs, expected.logprobs)
    assert np.isnan(found.letter_mass).all() and found.ids == before.ids

    elsewhere = records.read(at_temperature.folder / "arc-letters.jsonl")
    carried = records.read(over_trained.folder / "arc-letters.jsonl").logprobs
    scaled = torch.tensor(carried / at_temperature.record.temperature).log_softmax(-1)
    np.testing.assert_allclose(elsewhere.logprobs, scaled)
    assert at_temperature.record.temperature == scaling.fit(before, np.ones(200, bool))[0]


@pytest.mark.parametrize("normalise", [None, "sum"])
def test_the_quick_figures_are_those_of_stats(folders, normalise):
    write_records(folders / "mmlu.jsonl", 300, 1.5, seed=7)
    expected = evaluations.load(folders / "mmlu.jsonl", normalise)
    metrics = ("accuracy", "nll", "aurc", "rms_debiased")
    found = quick_evaluation.load(folders / "mmlu.jsonl", metrics, normalise)
    assert found.confidences == expected.confidences == ("choices", "vocabulary")
    assert found.questions_sha256 == expected.questions_sha256
    for confidence in found.confidences:
        name = "rms_debiased"
        squares = found.squares[confidence][name], expected.squares[confidence][name]
        assert found.squared_values[confidence][name] == expected.squared_values[confidence][name]
        np.testing.assert_array_equal(squares[0].noise_part, squares[1].noise_part)
        np.testing.assert_array_equal(squares[0].gap_part, squares[1].gap_part)
        for name in ("accuracy", "nll", "aurc"):
            assert found.values[confidence][name] == expected.values[confidence][name]
            draws = found.draws[confidence][name], expected.draws[confidence][name]
            np.testing.assert_array_equal(*draws)


def test_the_quick_figures_are_those_of_the_file_as_it_is_now(folders):
    accuracies = []
    for seed in (1, 2):
        write_records(file := folders / "mmlu.jsonl", 100, 1.5, seed=seed)
        accuracies.append(quick_evaluation.load(file, ("accuracy",)).values["choices"]["accuracy"])
    assert accuracies[0] != accuracies[1]


def test_two_models_of_one_label_are_refused():
    """The forest plot drew the second one alone."""
    labels = forest.labels_of_models(["one", "two"], {"models/one": "Mine"})
    assert labels == {"one": "Mine", "two": "two"}
    with pytest.raises(InputError, match=r"model_labels\.models/two: found 'Mine'"):
        forest.labels_of_models(["one", "two"], {"models/one": "Mine", "models/two": "Mine"})


def test_a_line_is_drawn_where_another_setting_begins():
    """Also where a model lacks a β."""
    names = ["A: β = 0.1", "A: β = 0.2", "A, over-trained: β = 0.1", "B: β = 0.1", "B: β = 0.2"]
    assert forest.first_rows_of_groups(names) == [2, 3]


def test_a_part_stands_in_the_first_tables_by_its_label_alone():
    """Without a temperature that was fitted to its runs it has no row of one."""
    labels = {"recommended": "as recommended", "sum": "summed loss"}
    rows = summary.recipes_of_first_tables(labels)
    assert [row.beta for row in rows if row.setting == "summed loss"] == [
        "0",
        "0.1",
        "0.2",
        "0.3",
        "0.5",
    ]
    at_a_temperature = [row.setting for row in rows if row.setting.endswith(", then a temperature")]
    assert at_a_temperature == ["as recommended, then a temperature"]


def test_a_contrast_of_the_base_model_with_itself_is_nothing(study, folders):
    write_records(folders / "base.jsonl", 50, 1.5, seed=7)
    study.store.add(MODEL, RunRecord("base", "b"), {"mmlu": folders / "base.jsonl"})
    itself = contrasts.pair("itself", answers.BASE, answers.BASE)
    found = contrasts.difference(derived.answered_runs(study), itself, contrasts.CALIBRATION[0])
    assert found.estimate.value == 0 and found.seeds == 1
    lacking = contrasts.pair("lacking", answers.BASE, answers.PLAIN)
    quantity = contrasts.CALIBRATION[0]
    assert contrasts.difference(derived.answered_runs(study), lacking, quantity) is None


def test_records_that_have_changed_are_unpacked_again(study, folders):
    for sharpness in (1.5, 2.0):
        write_records(folders / "base.jsonl", 50, sharpness, seed=7)
        study.store.add(MODEL, RunRecord("base", "b"), {"mmlu": folders / "base.jsonl"})
        (run,) = derived.answered_runs(study)
        expected = records.read(folders / "base.jsonl").logprobs
        found = records.read(run.folder / "mmlu.jsonl").logprobs
        assert abs(found - expected).max() < 0.01


NOT_RUN = {
    "high-rate",
    "over-trained",
    "sum",
    "script",
}  # of all models but the 1.5B and, in part, the 0.5B


@pytest.mark.parametrize("model", PUBLISHED.models())
def test_planned_runs_are_the_published_ones(model, capsys):
    """By their names; otherwise they would be trained again. What is not published was not run."""
    study = Study(model)
    planned = set()
    for part in PARTS:
        plan = plan_sweep(CONFIG, parts.sweep_overrides(study, part, []))
        planned |= {training.record_key(part, run) for run in (*plan.baselines, *plan.runs)}
    trained = {key for key in PUBLISHED.keys(model) if key[0] not in ("temperature", "averaged")}
    assert trained - planned == set()
    lacking = {part for part, _ in planned - trained}
    if model == "qwen2.5-coder-1.5b":
        assert lacking == set()
    elif model == "qwen2.5-coder-0.5b":
        assert lacking == NOT_RUN - {"over-trained"}
    else:
        assert lacking == NOT_RUN


@pytest.mark.parametrize(("model", "rate"), [("smollm2-135m", "5e-06"), ("gemma-3-270m", "0.0002")])
def test_a_loss_that_no_rate_of_the_grid_reaches_is_told(model, rate, capsys):
    """Both published models have their largest loss at that end of the grid."""
    assert parts.equal_rate(Study(model)) == float(rate)
    said = capsys.readouterr().err
    assert f"{model}, equal: no learning rate of the grid from the best one" in said
    assert f"takes {rate}, where it is" in said


def test_losses_within_the_grid_are_told_nothing_of(capsys):
    assert parts.equal_rate(Study("qwen2.5-coder-0.5b")) == 7e-5
    assert capsys.readouterr().err == ""


def test_the_manifest_tells_the_published_files():
    manifest = json.loads(PUBLISHED.manifest.read_text())
    files = {path.name: path for path in PUBLISHED.folder.glob("*.parquet")}
    assert manifest.keys() == files.keys()
    for name, path in files.items():
        assert manifest[name]["sha256"] == sha256(path)
        assert manifest[name]["bytes"] == path.stat().st_size
        assert manifest[name]["rows"] == len(pd.read_parquet(path))


def test_pandas_alone_reads_the_published_records():
    runs = pd.read_parquet(PUBLISHED.model_file(MODEL))
    questions = pd.read_parquet(PUBLISHED.question_file)
    chosen = (runs.part == "base") & (runs.task == "arc-letters")
    answers = runs[chosen].merge(questions, on=["task", "question"])
    assert len(answers) == 2376
    assert (answers.logprob_steps.map(len) == answers.choices).all()
    assert (answers.logprob_steps.map(max) <= 0).all()
    unscored = runs[runs.task.isna()]
    assert sorted(unscored.part.unique()) == ["grid", "temperature"]
    assert unscored[unscored.part == "grid"].held_out_loss.notna().all()


def test_published_records_need_no_runs(folders, monkeypatch, capsys):
    """In a fresh clone `python -m studies.claims MODEL` ends well: nothing is trained, and what
    needs a trained model says so and is left out."""
    monkeypatch.setattr(training.subprocess, "Popen", None)
    monkeypatch.setattr(training.subprocess, "run", None)
    order = []
    for step in ("summary", "report"):  # which take minutes
        monkeypatch.setitem(claims.STEPS, step, lambda _, step=step: order.append(step))
    before = sha256(PUBLISHED.model_file(LARGE))
    # The name of a run of `base-mean` has the published folder of runs in it.
    names = [part.name for part in PARTS if part.name != "base-mean"]
    assert claims.main([LARGE, *names, *LAST], folders / "runs", PUBLISHED) == 0
    assert order == ["summary", "report"]
    printed_errors = capsys.readouterr().err
    assert "entropy-gap: skipped, since no trained models are in" in printed_errors
    assert "temperature:" not in printed_errors and "averaged:" not in printed_errors
    assert sha256(PUBLISHED.model_file(LARGE)) == before
    assert not list((PUBLISHED.folder / LARGE).glob("*/*.parquet"))


def test_what_lacks_its_model_is_skipped_by_name(study, capsys):
    """Of a recorded run without a temperature or an average, where its model is not there."""
    setting = {"learning_rate": 2e-5, "label_smoothing": 0.0}
    for seed in (0, 1):
        study.store.add(MODEL, RunRecord("recommended", f"r{seed}", seed=seed, **setting), {})
    study.store.add(MODEL, RunRecord("temperature", "r0", temperature=1.2, seed=0, **setting), {})
    posthoc.fit_temperatures(study)
    posthoc.average_weights(study)
    lines = capsys.readouterr().err.splitlines()
    folder = study.part_folder("recommended")
    assert f"temperature: skipped for r1, since no trained model is in {folder}" in lines[0]
    assert f"averaged: skipped for r0, r1, since no trained model is in {folder}" in lines[-1]
    assert [record.run for record in study.store.runs(MODEL) if record.origin == "temperature"] == [
        "r0"
    ]


@pytest.mark.parametrize("first", ["high-rate", "recommended"])
def test_the_base_model_is_asked_the_tasks_of_all_parts(study, folders, monkeypatch, first):
    """Whichever part comes first: `high-rate` asks MMLU alone, and `recommended` five tasks."""
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    second = "recommended" if first == "high-rate" else "high-rate"
    wanted = ["mmlu", "arc-letters", "arc-continuation"]
    wanted += ["hellaswag-letters", "hellaswag-continuation"]
    for name in (first, second):
        part = PART[name]
        overrides = [*parts.sweep_overrides(study, part, []), f"output_root={study.runs_folder}"]
        plan = plan_sweep(CONFIG, overrides)
        selections = training.overrides_of_missing_runs(study, part, plan)
        recorded = {record.origin: record for record in study.store.runs(MODEL)}
        asked = {task.key for run in plan.baselines for task in run.config().score.tasks}
        is_complete = "base" in recorded and asked <= recorded["base"].tasks.keys()
        assert all(("score.base=false" in words) == is_complete for words in selections)
        (base,) = plan.baselines
        base.scores.mkdir(parents=True, exist_ok=True)
        for task in asked:
            write_records(base.scores / f"{task}.jsonl", 50, 1.5, seed=7)
        base.done_file.touch()
        training.keep_records(study, part, plan)
    (record,) = study.store.runs(MODEL)
    assert sorted(record.tasks) == sorted(wanted)


def test_a_task_that_is_added_leaves_the_base_models_others(study, folders, monkeypatch):
    monkeypatch.setattr(parts, "chosen_rate", lambda study: 5e-5)
    part = PART["recommended"]
    write_records(folders / "mmlu.jsonl", 50, 1.5, seed=7)
    overrides = [*parts.sweep_overrides(study, part, []), f"output_root={study.runs_folder}"]
    for task in ("mmlu", "new"):
        asked = f"score.tasks=[{{task: mmlu, name: {task}, data: data/mmlu, shots: 5}}]"
        (base,) = plan_sweep(CONFIG, [*overrides, asked]).baselines
        base.scores.mkdir(parents=True, exist_ok=True)
        write_records(base.scores / f"{task}.jsonl", 50, 1.5, seed=7)
        training.keep_run(study, part, base)
    (record,) = study.store.runs(MODEL)
    assert sorted(record.tasks) == ["mmlu", "new"]
    study.store.unpack(MODEL, record, study.store.questions(), folders / "unpacked")
    kept = records.read(folders / "unpacked/mmlu.jsonl").logprobs
    assert abs(kept - records.read(folders / "mmlu.jsonl").logprobs).max() < 0.01


def test_a_difference_without_an_interval_is_told_as_such(study, folders):
    """Two runs all right and all wrong differ in AURC by a value that has no interval."""
    for part, is_right in (("recommended", True), ("base", False)):
        write_records(file := folders / f"{part}.jsonl", 8, 1.5, seed=7)
        rows = read_lines(file)
        for row in rows:
            chosen = row["label"] if is_right else (row["label"] + 1) % 4
            row["logprobs"] = [-0.1 if choice == chosen else -5.0 for choice in range(4)]
        write_lines(file, rows)
        seed = 0 if part == "recommended" else None
        record = RunRecord(part, part, label_smoothing=0.0, seed=seed)
        study.store.add(MODEL, record, {"mmlu": file})
    difference = contrasts.difference(
        derived.answered_runs(study),
        contrasts.pair("β = 0 less base", answers.PLAIN, answers.BASE),
        contrasts.GUARDS["aurc"],
    )
    assert difference.estimate.value == pytest.approx(-100)
    assert difference.estimate.low is None and difference.estimate.high is None
    assert report.format_cell(difference) == "-100.00 (1)"
    assert not forest.has_interval(difference)


def test_every_quantity_has_a_heading_of_its_own():
    quantities = [
        *contrasts.CALIBRATION,
        *contrasts.GUARDS.values(),
        contrasts.Quantity("mmlu", "choices", metric="nll"),
        contrasts.Quantity("mmlu", "choices", metric="nll", scale=100),
    ]
    titles = {quantity.title for quantity in quantities}
    assert len(titles) == len(set(quantities))
    assert contrasts.CALIBRATION[0].title == "mmlu, choices"  # as the published reports have it
    with pytest.raises(InputError, match="mmlu, choices: two columns of this name"):
        report.columns_by_title([contrasts.CALIBRATION[0], contrasts.CALIBRATION[0]])


def add_runs(store: RecordStore, folder: Path, names: str, sharpness: float = 1.0) -> None:
    """A run of `recommended` for each letter of `names`, of other answers each."""
    for seed, name in enumerate(names):
        write_records(folder / f"{name}.jsonl", 30, sharpness + seed, seed=1)
        record = RunRecord("recommended", name, label_smoothing=0.1, seed=seed)
        store.add("m", record, {"mmlu": folder / f"{name}.jsonl"})


def unpacked_texts(store: RecordStore, out: Path) -> dict[str, str]:
    texts = {}
    for record in store.runs("m"):
        store.unpack("m", record, store.questions(), out)
        texts[record.run] = (out / "mmlu.jsonl").read_text()
    return texts


def test_merging_changes_where_records_are_and_not_what_they_say(study, folders):
    store = study.store
    add_runs(store, folders, "ab")
    store.merge("m")
    earlier = unpacked_texts(store, folders / "earlier")
    add_runs(store, folders, "abc", sharpness=3.0)  # two of which are there already
    runs = store.runs("m")
    texts = unpacked_texts(store, folders / "before")
    assert all(texts[name] != earlier[name] for name in "ab")
    store.merge("m")
    assert store.runs("m") == runs
    assert [record.run for record in runs] == ["a", "b", "c"]
    assert unpacked_texts(store, folders / "after") == texts
    assert list((folders / "records/m").glob("*/*.parquet")) == []
    manifest = json.loads(store.manifest.read_text())
    assert manifest["m.parquet"]["rows"] == 90
    assert manifest["m.parquet"]["sha256"] == sha256(store.model_file("m"))


def test_a_run_that_is_recorded_again_has_its_new_records(study):
    """Before and after the next merge, and so a temperature that is fitted anew."""
    store = study.store
    for temperature in (1.1, 2.2):
        store.add("m", RunRecord("temperature", "r", seed=0, temperature=temperature), {})
        assert [record.temperature for record in store.runs("m")] == [temperature]
        store.merge("m")
        assert [record.temperature for record in store.runs("m")] == [temperature]


def test_a_merge_that_is_cut_short_is_done_again(study, folders, monkeypatch):
    """Whether the model's file, the manifest or both are written."""
    store = study.store
    add_runs(store, folders, "ab")
    texts = unpacked_texts(store, folders / "before")
    for cut in ("write_text", "sha256"):
        with monkeypatch.context() as patch:
            patch.setattr(f"studies.claims.records.{cut}", None)
            with pytest.raises(TypeError):
                store.merge("m")
        assert unpacked_texts(store, folders / "between") == texts
    store.merge("m")
    assert unpacked_texts(store, folders / "after") == texts
    assert json.loads(store.manifest.read_text())["m.parquet"]["rows"] == 60


def test_a_run_that_was_not_scored_has_its_setting(study, folders):
    store = study.store
    record = RunRecord("grid", "r", learning_rate=2e-5, seed=0, held_out_loss=1.5)
    store.add("m", record, {})
    store.merge("m")
    assert store.runs("m") == [record]
    (row,) = pd.read_parquet(store.model_file("m")).to_dict("records")
    assert row["held_out_loss"] == 1.5 and row["task"] is None


def test_a_temperature_at_the_end_of_the_search_is_told():
    records = [RunRecord("temperature", f"{t}", temperature=t) for t in (1.15, 54.584, 1 / 54.584)]
    assert report.temperature_lines(records)[2] == (
        "| fitted after β = 0, on MMLU's validation questions "
        "| 0.02 to 54.58; 2 of 3 at the end of the search |"
    )
    assert report.temperature_lines([RunRecord("grid", "r")]) == []


def test_the_report_tells_whether_held_out_losses_are_equal(study):
    assert report.equal_loss_lines(study) == []
    add_grid(study, {1e-5: (1.2,), 2e-5: (1.6,)})
    smoothed = RunRecord("recommended", "s", label_smoothing=0.1, seed=0, held_out_loss=1.7)
    equal = RunRecord("equal", "e", label_smoothing=0.0, learning_rate=2e-5, held_out_loss=1.61)
    for record in (smoothed, equal):
        study.store.add(MODEL, record, {})
    line, _ = report.equal_loss_lines(study)
    assert line == (
        "Equal held-out loss: 1.700 at β = 0.1, 1.610 at β = 0 with a learning rate of 2e-05, an "
        "end of the grid, since no rate from its best one to there reaches the loss of β = 0.1."
    )
    smoothed.held_out_loss = 1.5
    study.store.add(MODEL, smoothed, {})
    line, _ = report.equal_loss_lines(study)
    assert line.endswith("1.610 at β = 0 with a learning rate of 2e-05.")
