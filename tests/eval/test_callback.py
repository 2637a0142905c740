"""Calibration while a model trains, in transformers' Trainer and TRL's SFTTrainer."""

import pytest
import torch
from made_records import scored
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from calibeval import CalibrationCallback, stats

TOKENS = [[5 + i, 6, 7, 8 + i, 9] for i in range(12)]
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


class Report(TrainerCallback):
    """What a report is told; the Trainer puts such callbacks before its user's."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append((state.global_step, dict(logs)))


@pytest.fixture
def train(tiny_model, tmp_path):
    """train(callbacks) → a Trainer after six steps."""

    def run(*callbacks, kind=Trainer, arguments=TrainingArguments, rows=ROWS, **options):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        given = {"output_dir": str(tmp_path / "run"), "report_to": [], "disable_tqdm": True}
        given |= {"per_device_train_batch_size": 2, "num_train_epochs": 1, "seed": 1}
        given |= {"learning_rate": 1e-2, "logging_steps": 2, "save_strategy": "no"}
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.pad_token = tokenizer.eos_token = tokenizer.decode([5])
        trainer = kind(
            model,
            arguments(**given, use_cpu=True, **options),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[*callbacks],
        )
        trainer.train()
        return trainer

    return run


def as_scored(folder, data, tmp_path) -> dict[str, float]:
    """The same figures of `calibeval score` on a saved model."""
    out = tmp_path / "saved.jsonl"
    scored(out, "--task", "mmlu", "--data", data, "--model", folder)
    run, found = stats.load(out), {}
    for name in ("accuracy", "nll"):
        found[f"eval_mmlu_{name}"] = stats.estimate([run], name, "choices").value
    for confidence, end in (("choices", ""), ("vocabulary", "_vocabulary")):
        ece = stats.estimate([run], "ece", confidence)
        found |= {f"eval_mmlu_ece{end}": ece.value, f"eval_mmlu_ece{end}_floor": ece.null_q95}
    return found


def test_what_is_logged_is_what_the_saved_model_reads(train, mmlu, tiny_model, tmp_path):
    report = Report()
    task = {"task": "mmlu", "data": str(mmlu)}
    trainer = train(report, CalibrationCallback([task], every=4), CalibrationCallback([task], 0))
    seen = {step: logs for step, logs in report.told if "eval_mmlu_ece" in logs}
    assert list(seen) == [0, 4, 6]
    assert seen[0] == as_scored(tiny_model, mmlu, tmp_path) | {"epoch": 0}
    trainer.save_model(tmp_path / "model")
    (tmp_path / "saved.jsonl").unlink()
    after = as_scored(tmp_path / "model", mmlu, tmp_path)
    assert {k: v for k, v in seen[6].items() if k != "epoch"} == after != seen[0]
    history = [line for line in trainer.state.log_history if "eval_mmlu_ece" in line]
    assert [line["step"] for line in history] == [0, 0, 4, 6, 6]
    # The loss is logged as without, and training takes the same steps.
    assert [step for step, logs in report.told if "loss" in logs] == [2, 4, 6]
    other = train()
    for one, two in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_trls_trainer(train, mmlu, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    report = Report()
    rows = datasets.Dataset.from_list([{"text": f"which light {i} kings"} for i in range(12)])
    watch = CalibrationCallback([{"task": "mmlu", "data": str(mmlu)}], every=100)
    kind = {"kind": trl.SFTTrainer, "arguments": trl.SFTConfig, "rows": rows}
    trainer = train(report, watch, **kind)
    trainer.save_model(tmp_path / "model")
    last = [logs for _, logs in report.told if "eval_mmlu_ece" in logs][-1]
    after = as_scored(tmp_path / "model", mmlu, tmp_path)
    assert {k: v for k, v in last.items() if k != "epoch"} == after
