"""Patched models in Hugging Face's Trainer and TRL's SFTTrainer, against upstream's own losses."""

import dataclasses
import importlib.metadata
import sys
import types

import pytest
import torch

from smoothce import patch_model, patch_trainer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
accelerate = pytest.importorskip("accelerate")
tiny_models = pytest.importorskip("tiny_models")
from tiny_models import VOCABULARY, batch, expected, gradients, sequences, tiny  # noqa: E402

from smoothce import SmoothingCallback  # noqa: E402

BETA = 0.2
QUIET = {
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
THREE_STEPS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    **QUIET,
}
UPDATE = {  # of one optimizer step over four rows, which changes nothing
    "per_device_train_batch_size": 4,
    "max_steps": 1,
    "learning_rate": 0.0,
    "max_grad_norm": 1e9,
    **QUIET,
}


def uneven_rows():
    """Eight rows with one to eight labels."""
    rows = []
    for i, ids in enumerate(sequences()):
        labels = ids.where(torch.arange(9) > i, -100)
        rows.append({"input_ids": ids, "labels": labels, "unused": "a column"})
    return rows


def make_trainer(folder, model=None, callbacks=(), arguments=UPDATE, kind=None, **more):
    """A Trainer of `model`, or of one that it makes itself."""
    kind = kind or transformers.Trainer
    return kind(
        model,
        transformers.TrainingArguments(str(folder), **{**UPDATE, **arguments}),
        train_dataset=uneven_rows(),
        eval_dataset=uneven_rows(),
        callbacks=[*callbacks],
        **more,
    )


def logged(trainer, *names):
    """What a Trainer has logged of each step, under these names."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry[name] for entry in steps for name in names]


@pytest.mark.parametrize("way", ["callback", "patch_trainer", "the trainer's own factor"])
@pytest.mark.parametrize(("rows", "accumulation"), [(8, 1), (2, 4)])
def test_the_gradient_is_dense_smoothings_for_any_accumulation(way, rows, accumulation, tmp_path):
    arguments = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    if way == "the trainer's own factor":
        arguments["label_smoothing_factor"] = BETA
    callbacks = [SmoothingCallback(label_smoothing=BETA)] if way == "callback" else []
    trainer = make_trainer(tmp_path, tiny(), callbacks, arguments)
    if way == "patch_trainer":
        patch_trainer(trainer, label_smoothing=BETA)
    if not getattr(trainer, "model_accepts_loss_kwargs", False):
        pytest.skip("this Trainer does not count an update's tokens")
    trainer.train()

    model = tiny()
    data = {}
    for key in ("input_ids", "labels"):
        data[key] = torch.stack([row[key] for row in uneven_rows()])
    dense = expected(model, data, BETA)
    norms = [gradient.norm() for gradient in gradients(model, dense).values()]
    expected_log = [dense.item(), torch.stack(norms).norm().item()]
    assert logged(trainer, "loss", "grad_norm") == pytest.approx(expected_log, rel=1e-4)


@pytest.mark.parametrize("how", ["model_init", "added late to adapters"])
def test_the_callback_patches_a_model_that_mixed_precision_has_wrapped(how, tmp_path):
    """accelerate has put its autocast around the forward by then, and it stays there."""
    callback = SmoothingCallback(label_smoothing=BETA)
    bf16 = {"bf16": True}
    if how == "model_init":
        trainer = make_trainer(tmp_path, None, [callback], bf16, model_init=lambda: tiny())
    else:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer = make_trainer(tmp_path, peft.get_peft_model(tiny(), config), [], bf16)
        trainer.add_callback(callback)
    first = make_trainer(tmp_path, tiny(), [SmoothingCallback(label_smoothing=BETA)], bf16)
    for each in (trainer, first):
        each.train()
    assert logged(trainer, "loss") == logged(first, "loss") != []


def mean_loss(hidden, weight, labels, **model_options):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


def own_loss_function(trainer):
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.mean()


def two_gpus(trainer):
    trainer.args._n_gpu = 2


def ligers_kernel(trainer):
    trainer.args.use_liger_kernel = True


def smoothing_callback(trainer):
    trainer.add_callback(SmoothingCallback(label_smoothing=0.1))


def metrics_of_logits(trainer):
    trainer.compute_metrics = lambda prediction: {}


def new_model(trainer):
    trainer.model_init = lambda: tiny()


@pytest.mark.parametrize(
    ("change", "keywords", "named"),
    [
        (new_model, {}, "model_init"),
        (own_loss_function, {}, "compute_loss_func"),
        (smoothing_callback, {}, "SmoothingCallback"),
        (two_gpus, {}, "2 GPUs"),
        (ligers_kernel, {}, "use_liger_kernel"),
        (metrics_of_logits, {"eval_logits": False}, "compute_metrics"),
        (None, {"label_smoothing": 0.3}, "label_smoothing_factor=0.1"),
        (None, {"ignore_index": 0}, "ignore_index"),
    ],
)
def test_patch_trainer_refuses_what_would_train_another_loss(change, keywords, named, tmp_path):
    trainer = make_trainer(tmp_path, tiny(), arguments={"label_smoothing_factor": 0.1})
    if change is not None:
        change(trainer)
    with pytest.raises(ValueError, match=named):
        patch_trainer(trainer, **keywords)
    assert trainer.label_smoother is not None and not is_patched(trainer.model)


def is_patched(model):
    return hasattr(model, "_smoothce_forward")


@pytest.mark.parametrize(
    ("keywords", "arguments", "error", "named"),
    [
        ({}, {}, TypeError, "label_smoothing"),
        ({"label_smoothing": 0.1, "ignore_index": 5}, {}, ValueError, "ignore_index"),
        ({"label_smoothing": 0.1}, {"label_smoothing_factor": 0.1}, ValueError, "factor"),
        ({"label_smoothing": 0, "z_loss": 1e-4}, {"label_smoothing_factor": 0.1}, ValueError, "z_"),
    ],
)
def test_the_callback_refuses_what_it_cannot_serve(keywords, arguments, error, named, tmp_path):
    with pytest.raises(error, match=named):
        make_trainer(tmp_path, tiny(), [SmoothingCallback(**keywords)], arguments)


@pytest.mark.parametrize(
    "settings", [{"label_smoothing": BETA}, {"z_loss": 1e-4}, {"loss": mean_loss}]
)
def test_a_step_that_takes_another_loss_after_patch_trainer_is_refused(settings, tmp_path):
    trainer = patch_trainer(make_trainer(tmp_path, tiny()), **settings)
    own_loss_function(trainer)
    trainer.label_smoother = None
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=next(iter(settings))):
        trainer.train()
    plain = patch_trainer(make_trainer(tmp_path, tiny()), label_smoothing=0.0)
    own_loss_function(plain)  # there is nothing to lose
    plain.train()


def test_the_callback_refuses_a_step_that_took_another_loss(tmp_path):
    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    callback = SmoothingCallback(label_smoothing=BETA)
    trainer = make_trainer(tmp_path, tiny(), [callback], kind=OwnLoss)
    with pytest.raises(ValueError, match="did not ask the model for its loss"):
        trainer.train()


def test_a_trainer_whose_model_is_replaced_after_patch_trainer_does_not_train(tmp_path):
    trainer = patch_trainer(make_trainer(tmp_path, tiny()), label_smoothing=BETA)
    trainer.model = trainer.model_wrapped = tiny()
    with pytest.raises(ValueError, match="another one than when patch_trainer was called"):
        trainer.train()


def test_another_ignore_index_of_a_later_patch_model_is_refused(tmp_path):
    """The trainer would divide by a number of labels among which are those that do not count. A
    callback patches the model with its own settings when training begins."""
    trainer = patch_trainer(make_trainer(tmp_path, tiny()), label_smoothing=BETA)
    patch_model(trainer.model, label_smoothing=BETA, ignore_index=5)
    with pytest.raises(ValueError, match="ignore_index must be -100"):
        trainer.train()
    patch_trainer(trainer, ignore_index=-100).train()
    assert trainer.state.global_step == 1
    with_callback = make_trainer(tmp_path, tiny(), [SmoothingCallback(label_smoothing=BETA)])
    patch_model(with_callback.model, label_smoothing=BETA, ignore_index=5)
    with_callback.train()
    assert with_callback.model.lm_head.settings.ignore_index == -100


def test_a_trainer_keeps_what_its_model_was_patched_with(tmp_path):
    """The warning of a model that is trained around its loss asks for `patch_trainer` alone."""
    model = patch_model(tiny(), label_smoothing=0.3, workspace=7, eval_logits=False)
    want = model(**batch()).loss
    patch_trainer(make_trainer(tmp_path, model))
    assert torch.equal(model(**batch()).loss, want)
    assert model.lm_head.settings.workspace == 7


class SFTTrainer(transformers.Trainer):
    """A trainer that says that it is TRL's."""

    __module__ = "trl.trainer.sft_trainer"


@pytest.mark.parametrize("fields", [None, ("log_probs", "entropy")])
def test_an_sfttrainer_of_another_version_of_trl_is_refused_by_name(fields, tmp_path, monkeypatch):
    utils = types.ModuleType("trl.trainer.utils")
    if fields is not None:
        utils.FusedCausalLMOutput = dataclasses.make_dataclass("FusedCausalLMOutput", fields)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.9.0" if name == "trl" else version(name)
    )
    trainer = make_trainer(tmp_path, tiny(), kind=SFTTrainer)
    trainer.args.loss_type = "chunked_nll"  # the advice to change it would lead nowhere
    with pytest.raises(ValueError, match=r"TRL 1\.9\.0"):
        patch_trainer(trainer, label_smoothing=0.1)


class DPOTrainer(SFTTrainer):
    """One of TRL's trainers that compute losses of their own."""

    __module__ = "trl.trainer.dpo_trainer"


def test_another_trainer_of_trls_is_refused(tmp_path):
    with pytest.raises(ValueError, match="DPOTrainer"):
        patch_trainer(make_trainer(tmp_path, tiny(), kind=DPOTrainer), label_smoothing=0.1)


# ---- TRL's own trainers


@pytest.fixture
def trl():
    """TRL, of a version whose SFTTrainer `patch_trainer` serves."""
    return pytest.importorskip("trl", minversion="1.15")


def words():
    """A tokenizer of as many tokens as the model's."""
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t3")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="t0", eos_token="t2"
    )


@pytest.fixture
def sft(trl, tmp_path):
    """sft(model, **settings) → TRL's SFTTrainer of a model."""
    datasets = pytest.importorskip("datasets")
    ids = sequences().tolist()
    rows = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])

    def make(model, callbacks=(), peft_config=None, **settings):
        own = {"bf16": False, "gradient_checkpointing": False, **THREE_STEPS, **settings}
        arguments = trl.SFTConfig(
            str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, **own
        )
        if arguments.n_gpu > 1:  # TRL refuses several in one process.
            arguments._n_gpu = 1
        return trl.SFTTrainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=words(),
            callbacks=[*callbacks],
            peft_config=peft_config,
        )

    return make


METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy")


def history(trainer):
    """Logged losses and other statistics of a trainer's three steps, and of an evaluation."""
    trainer.train()
    steps = logged(trainer, *METRICS)
    assert len(steps) == 12
    evaluation = trainer.evaluate()
    return steps, [evaluation[f"eval_{name}"] for name in ("loss", *METRICS[2:])]


# Where TRL itself smooths, it leaves out a mixture's auxiliary loss.
@pytest.mark.parametrize(
    ("name", "beta"),
    [("LlamaForCausalLM", 0.0), ("LlamaForCausalLM", BETA), ("OlmoeForCausalLM", 0.0)],
)
def test_trls_trainer_and_its_metrics(name, beta, sft):
    steps, evaluation = history(sft(tiny(name), label_smoothing_factor=beta))
    around = patch_model(tiny(name), label_smoothing=beta)
    for trainer in (
        patch_trainer(sft(tiny(name), label_smoothing_factor=beta)),
        patch_trainer(sft(around, label_smoothing_factor=beta)),
        patch_trainer(sft(tiny(name)), label_smoothing=beta),
    ):
        found_steps, found_evaluation = history(trainer)
        assert found_steps == pytest.approx(steps, rel=1e-3)
        if beta == 0:  # evaluation is of the plain loss
            assert found_evaluation == pytest.approx(evaluation, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_trls_trainer_and_its_metrics_on_a_gpu(half, sft):
    """At β = 0 loss, entropy and accuracy are TRL's own, by the Triton kernels."""
    found = []
    for is_patched in (False, True):
        trainer = sft(tiny().cuda(), use_cpu=False, learning_rate=1e-3, bf16=half)
        if is_patched:
            patch_trainer(trainer)
        steps, evaluation = history(trainer)
        found.append([*steps, *evaluation])
    assert found[1] == pytest.approx(found[0], rel=1e-2 if half else 1e-3)


def test_a_model_patched_by_itself_is_refused_under_trls_trainer(sft):
    """It would train without smoothing. Without any there is nothing to lose."""
    with pytest.raises(ValueError, match=r"without label_smoothing=0.2.*patch_trainer"):
        sft(patch_model(tiny(), label_smoothing=BETA)).train()
    with pytest.warns(UserWarning, match="around its loss"):
        sft(patch_model(tiny())).train()


@pytest.mark.parametrize("patched_before", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"reduction": "sum"}, {"label_smoothing": 2}, {"smoothing": 0.1}], ids=str
)
def test_a_refused_patch_trainer_leaves_trls_forward(wrong, patched_before, sft):
    """An earlier call has taken TRL's forward off the model, but not TRL's loss."""
    trainer = sft(tiny())
    model = trainer.model
    if patched_before:
        patch_trainer(trainer, label_smoothing=BETA)
    before = dict(vars(model))
    head_before = dict(vars(model.lm_head))
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        patch_trainer(trainer, **wrong)
    assert vars(model) == before and vars(model.lm_head) == head_before
    trainer.train()


def test_a_sum_of_a_later_patch_model_is_refused_under_trls_trainer(sft):
    """In training alone: evaluation is a mean whatever `reduction` is."""
    trainer = patch_trainer(sft(tiny()), label_smoothing=BETA)
    want = trainer.evaluate()["eval_loss"]
    patch_model(trainer.model, label_smoothing=BETA, reduction="sum")
    assert trainer.evaluate()["eval_loss"] == want
    with pytest.raises(ValueError, match="reduction"):
        trainer.train()
    patch_trainer(trainer, reduction="mean").train()


def smoothed_densely(hidden, weight, labels):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels, label_smoothing=BETA)


def test_trls_trainer_with_a_loss_of_ones_own(sft):
    """Its gradient is the given loss's; entropy and accuracy stay the model's."""
    steps = []
    for settings in ({"label_smoothing": BETA}, {"loss": smoothed_densely}):
        steps.append(history(patch_trainer(sft(tiny()), **settings))[0])
    assert steps[1] == pytest.approx(steps[0], rel=1e-4)


def test_what_trl_would_train_instead_is_refused_by_name(sft):
    with pytest.raises(ValueError, match="'dft'"):
        patch_trainer(sft(tiny(), loss_type="dft"), label_smoothing=0.1)
    with pytest.raises(ValueError, match="TRL's trainers"):
        sft(tiny(), callbacks=[SmoothingCallback(label_smoothing=0.1)])


def test_a_loss_of_the_trainers_own_beside_metrics_of_the_model_is_seen(sft):
    """TRL asks the model for its metrics without gradients, which is no training."""
    trainer = patch_trainer(sft(tiny()), label_smoothing=BETA)
    own_loss_function(trainer)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="did not ask the model"):
        trainer.train()


@pytest.mark.parametrize("patched_first", [False, True])
def test_trls_trainer_with_adapters_in_any_order(patched_first, sft):
    """The adapters train as with TRL's own factor, whatever is done before what."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0
    )

    def trained(model, is_patched, **settings):
        torch.manual_seed(0)  # of the adapters' weights
        trainer = sft(model, peft_config=adapters, **settings)
        if is_patched:
            patch_trainer(trainer, label_smoothing=BETA)
        trainer.train()
        return logged(trainer, "loss")

    want = trained(tiny(), False, label_smoothing_factor=BETA)
    model = patch_model(tiny(), label_smoothing=BETA) if patched_first else tiny()
    assert len(want) == 3
    assert trained(model, True) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("first", ["trainer", "patch_model"])
def test_trls_trainer_of_a_dispatched_model(first, sft):
    """TRL puts its forward around that of accelerate's hook, which has to stay."""
    want, _ = history(patch_trainer(sft(tiny()), label_smoothing=BETA))
    model = accelerate.dispatch_model(tiny(), {"": "cpu"}, force_hooks=True)
    if first == "patch_model":
        patch_model(model, label_smoothing=BETA)
    found, _ = history(patch_trainer(sft(model), label_smoothing=BETA))
    assert found == pytest.approx(want, rel=1e-6)
    assert "_hf_hook" in vars(model)
