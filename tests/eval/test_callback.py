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

from calibeval import CalibrationCallback
from calibeval.measures import evaluations, stats

TOKENS = [[5 + i, 6, 7, 8 + i, 9] for i in range(12)]
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


class Report(TrainerCallback):
    """What a report is told; the Trainer puts such callbacks before its user's."""

    def __init__(self):
        self.logs = []  # (step, logs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))

    def calibration(self) -> dict[int, dict[str, float]]:
        """The logs that hold calibration figures, by their step."""
        return {step: logs for step, logs in self.logs if "eval_mmlu_ece" in logs}


@pytest.fixture
def task(mmlu):
    return {"task": "mmlu", "data": str(mmlu)}


@pytest.fixture
def make_trainer(tiny_model, tmp_path):
    """make_trainer(*callbacks) → a Trainer of six steps."""

    def make(*callbacks, kind=Trainer, arguments=TrainingArguments, rows=ROWS):
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.pad_token = tokenizer.eos_token = tokenizer.decode([5])
        training_arguments = arguments(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=2,
            num_train_epochs=1,
            learning_rate=1e-2,
            seed=1,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return kind(
            AutoModelForCausalLM.from_pretrained(tiny_model),
            training_arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )

    return make


@pytest.fixture
def command_figures(mmlu, tmp_path):
    """command_figures(folder) → the same figures of `calibeval score` on a saved model."""

    def figures(folder) -> dict[str, float]:
        out = tmp_path / f"{folder.name}.jsonl"
        scored(out, "--task", "mmlu", "--data", mmlu, "--model", folder)
        run = evaluations.load(out)
        choices = stats.estimate([run], "ece", "choices")
        vocabulary = stats.estimate([run], "ece", "vocabulary")
        return {
            "eval_mmlu_accuracy": stats.estimate([run], "accuracy", "choices").value,
            "eval_mmlu_nll": stats.estimate([run], "nll", "choices").value,
            "eval_mmlu_ece": choices.value,
            "eval_mmlu_ece_floor": choices.floor,
            "eval_mmlu_ece_vocabulary": vocabulary.value,
            "eval_mmlu_ece_vocabulary_floor": vocabulary.floor,
        }

    return figures


def test_the_best_model_is_scored_where_the_trainer_puts_it_in_the_place_of_the_last(
    make_trainer, task
):
    """Both are at the last step, whose model may have been scored already."""
    report = Report()

    def arguments(**keywords):
        keywords["save_strategy"] = "steps"
        return TrainingArguments(
            **keywords,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # so that the first checkpoint is the best
        )

    def trainer_with_evaluation(*positional, **keywords):
        return Trainer(*positional, eval_dataset=ROWS, **keywords)

    trainer = make_trainer(report, kind=trainer_with_evaluation, arguments=arguments)
    trainer.add_callback(CalibrationCallback([task], every=2, trainer=trainer))
    trainer.train()
    assert trainer.state.best_global_step == 2
    logged = [(step, logs) for step, logs in report.logs if "eval_mmlu_nll" in logs]
    assert [step for step, _ in logged] == [0, 2, 4, 6, 6]
    losses = [logs["eval_mmlu_nll"] for _, logs in logged]
    assert losses[-1] == losses[1] != losses[-2]


def test_what_is_logged_is_what_the_saved_model_reads(
    make_trainer, task, tiny_model, tmp_path, command_figures
):
    report = Report()
    trainer = make_trainer(report, CalibrationCallback([task], every=4))
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    logged = report.calibration()
    assert list(logged) == [0, 4, 6]
    assert logged[0] == {**command_figures(tiny_model), "epoch": 0}
    assert logged[6] == {**command_figures(tmp_path / "trained"), "epoch": 1}
    assert logged[6]["eval_mmlu_nll"] != logged[0]["eval_mmlu_nll"]


def test_training_goes_on_as_without(make_trainer, task):
    report = Report()
    watched = make_trainer(report, CalibrationCallback([task], every=4))
    watched.train()
    plain = make_trainer()
    plain.train()
    assert [step for step, logs in report.logs if "loss" in logs] == [2, 4, 6]
    for with_callback, without in zip(
        watched.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(with_callback, without)


@pytest.mark.slow
def test_trls_trainer(make_trainer, task, tmp_path, command_figures):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    report = Report()
    rows = datasets.Dataset.from_list([{"text": f"which light {i} kings"} for i in range(12)])
    trainer = make_trainer(
        report,
        CalibrationCallback([task], every=100),
        kind=trl.SFTTrainer,
        arguments=trl.SFTConfig,
        rows=rows,
    )
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    *_, last = report.calibration().values()
    del last["epoch"]
    assert last == command_figures(tmp_path / "trained")
