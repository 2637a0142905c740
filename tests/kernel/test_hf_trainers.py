"""Patched models in Hugging Face's Trainer and TRL's SFTTrainer, against upstream's own losses."""

import contextlib

import pytest
import torch

from smoothce import patch_model, patch_trainer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
tiny_models = pytest.importorskip("tiny_models")
from tiny_models import VOCABULARY, batch, sequences, tiny  # noqa: E402

THREE_STEPS = {  # of a Trainer
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}


def history(kind, arguments, model, patched, rows, **more):
    """Logged losses and other statistics of a Trainer's steps and evaluation."""
    trainer = kind(model, arguments, train_dataset=rows, eval_dataset=rows, **more)
    if patched:
        patch_trainer(trainer)
    trainer.train()
    names = [
        f"{at}{name}" for name in ("loss", "entropy", "mean_token_accuracy") for at in ("", "eval_")
    ]
    logged = [*trainer.state.log_history, trainer.evaluate()]
    return {name: [entry[name] for entry in logged if name in entry] for name in names}


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_the_trainer_trains_as_with_upstreams_loss(beta, tmp_path):
    """Columns, the number of items over accumulation steps, and evaluation, through the Trainer.

    With smoothing, evaluation reports the plain loss and upstream the smoothed one."""
    pytest.importorskip("accelerate")
    rows = [
        {"input_ids": ids, "labels": ids.where(torch.arange(9) > i, -100), "unused": "a column"}
        for i, ids in enumerate(sequences())
    ]
    arguments = {"label_smoothing_factor": beta, **THREE_STEPS}
    given = transformers.Trainer, transformers.TrainingArguments(str(tmp_path), **arguments)
    want = history(*given, tiny(), False, rows)
    found = history(*given, tiny(), True, rows)
    assert found["loss"] == pytest.approx(want["loss"], rel=1e-4)
    assert beta or found["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-4)
    with contextlib.nullcontext() if not beta else pytest.warns(UserWarning, match="no labels"):
        around = history(*given, patch_model(tiny()), False, rows)
    assert around["loss"] == pytest.approx(want["loss"], rel=1e-4)


# Where TRL itself smooths, it leaves out a mixture's auxiliary loss.
@pytest.mark.parametrize(
    ("name", "beta"),
    [("LlamaForCausalLM", 0.0), ("LlamaForCausalLM", 0.2), ("OlmoeForCausalLM", 0.0)],
)
def test_trls_trainer_and_its_metrics(name, beta, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    ids = sequences().tolist()
    rows = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    words = {f"t{i}": i for i in range(VOCABULARY)}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t3")),
        pad_token="t0",
        eos_token="t2",
    )
    arguments = trl.SFTConfig(
        str(tmp_path),
        bf16=False,
        gradient_checkpointing=False,
        label_smoothing_factor=beta,
        dataset_kwargs={"skip_prepare_dataset": True},
        **THREE_STEPS,
    )
    want, once, twice = (
        history(trl.SFTTrainer, arguments, model, patched, rows, processing_class=words)
        for model, patched in (
            (tiny(name), False),
            (tiny(name), True),
            (patch_model(tiny(name), label_smoothing=beta), True),
        )
    )
    if beta:  # evaluation is of the plain loss
        want.pop("eval_loss"), once.pop("eval_loss"), twice.pop("eval_loss")
    assert len(want["entropy"]) == len(want["loss"]) == 3
    for kind in want:
        assert once[kind] == pytest.approx(want[kind], rel=1e-3), kind
        assert twice[kind] == pytest.approx(want[kind], rel=1e-3), kind


def trainer(folder, model, beta):
    pytest.importorskip("accelerate")
    given = {"label_smoothing_factor": beta, **THREE_STEPS}
    return transformers.Trainer(model, transformers.TrainingArguments(str(folder), **given))


def test_a_trainer_keeps_what_its_model_was_patched_with(tmp_path):
    """The warning of a model that is trained around its loss asks for `patch_trainer` alone."""
    model = patch_model(tiny(), label_smoothing=0.3, workspace=7, eval_logits=False)
    want = model(**batch()).loss
    patch_trainer(trainer(tmp_path, model, 0.0))
    assert torch.equal(model(**batch()).loss, want)
    assert model.lm_head._smoothce.loss.options.workspace == 7


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("compute_loss_func", {}, "compute_loss_func needs logits"),
        ("", {"label_smoothing": 0.3}, r"label_smoothing=0.3 and .*=0.1 differ"),
        ("gpus", {}, "2 GPUs in one process"),
        ("", {"ignore_index": 0}, "ignore_index must be -100"),
    ],
)
def test_a_trainer_that_would_train_another_loss_is_refused(change, options, said, tmp_path):
    given = trainer(tmp_path, tiny(), 0.1)
    if change == "compute_loss_func":  # no argument of older Trainers
        given.compute_loss_func = lambda *_: None
    given.args._n_gpu = 2 * (change == "gpus")
    with pytest.raises(ValueError, match=said):
        patch_trainer(given, **options)
