"""Patched models in Hugging Face's Trainer and TRL's SFTTrainer, against upstream's own losses."""

import dataclasses
import importlib.metadata
import sys
import types

import pytest
import torch

from smoothce import patch_model, patch_trainer, unpatch_model
from smoothce.hf_patch.head import LossSettings
from smoothce.hf_patch.patching import install

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
tiny_models = pytest.importorskip("tiny_models")
from tiny_models import VOCABULARY, batch, expected, gradients, sequences, tiny  # noqa: E402

from smoothce import SmoothingCallback  # noqa: E402


def trl_of_fused_heads():
    """TRL, of a version whose SFTTrainer `patch_trainer` serves: tests/eval/peers_env.sh."""
    return pytest.importorskip("trl", minversion="1.15")


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
    around = history(*given, patch_model(tiny()), False, rows)
    assert around["loss"] == pytest.approx(want["loss"], rel=1e-4)


def words():
    """A tokenizer of as many tokens as the model's."""
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t3")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="t0", eos_token="t2"
    )


def sft_config(trl, folder, **settings):
    return trl.SFTConfig(
        str(folder),
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        **{**THREE_STEPS, **settings},
    )


def trls_rows():
    datasets = pytest.importorskip("datasets")
    ids = sequences().tolist()
    return datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


# Where TRL itself smooths, it leaves out a mixture's auxiliary loss.
@pytest.mark.parametrize(
    ("name", "beta"),
    [("LlamaForCausalLM", 0.0), ("LlamaForCausalLM", 0.2), ("OlmoeForCausalLM", 0.0)],
)
def test_trls_trainer_and_its_metrics(name, beta, tmp_path):
    trl = trl_of_fused_heads()
    arguments = sft_config(trl, tmp_path, label_smoothing_factor=beta)
    more = {"rows": trls_rows(), "processing_class": words()}
    want = history(trl.SFTTrainer, arguments, tiny(name), False, **more)
    once = history(trl.SFTTrainer, arguments, tiny(name), True, **more)
    patched = patch_model(tiny(name), label_smoothing=beta)
    twice = history(trl.SFTTrainer, arguments, patched, True, **more)
    if beta:  # evaluation is of the plain loss
        want.pop("eval_loss"), once.pop("eval_loss"), twice.pop("eval_loss")
    assert len(want["entropy"]) == len(want["loss"]) == 3
    for kind in want:
        assert once[kind] == pytest.approx(want[kind], rel=1e-3), kind
        assert twice[kind] == pytest.approx(want[kind], rel=1e-3), kind


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_trls_trainer_and_its_metrics_on_a_gpu(half, tmp_path):
    """At β = 0 loss, entropy and accuracy are TRL's own, by the Triton kernels."""
    trl = trl_of_fused_heads()
    arguments = sft_config(trl, tmp_path, use_cpu=False, learning_rate=1e-3)
    arguments.bf16 = half
    arguments._n_gpu = 1  # else several GPUs are taken at once by torch's DataParallel
    more = {"rows": trls_rows(), "processing_class": words()}
    want = history(trl.SFTTrainer, arguments, tiny().cuda(), False, **more)
    found = history(trl.SFTTrainer, arguments, tiny().cuda(), True, **more)
    assert len(want["entropy"]) == len(want["loss"]) == 3
    for kind in want:
        print(kind, want[kind], found[kind])
        assert found[kind] == pytest.approx(want[kind], rel=1e-2 if half else 1e-3), kind


def test_trls_trainer_with_an_explicit_beta_trains_as_with_its_own_factor(tmp_path):
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    losses = []
    for factor in (0.2, 0.0):
        arguments = sft_config(trl, tmp_path, label_smoothing_factor=factor)
        trainer = trl.SFTTrainer(tiny(), arguments, **more)
        if not factor:
            patch_trainer(trainer, label_smoothing=0.2)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_model_patched_by_itself_is_refused_under_trls_trainer(tmp_path):
    """It would train without smoothing. Without any there is nothing to lose."""
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    model = patch_model(tiny(), label_smoothing=0.2)
    trainer = trl.SFTTrainer(model, sft_config(trl, tmp_path), **more)
    with pytest.raises(ValueError, match=r"trl.*without label_smoothing=0.2.*patch_trainer"):
        trainer.train()
    plain = trl.SFTTrainer(patch_model(tiny()), sft_config(trl, tmp_path), **more)
    with pytest.warns(UserWarning, match="around its loss"):
        plain.train()


SUM_UNDER_TRL = r"reduction must be 'mean'.*not 'sum'"


@pytest.mark.parametrize("patched_before", [False, True])
def test_a_sum_is_refused_under_trls_trainer(patched_before, tmp_path):
    """By each call: an earlier one has taken TRL's forward off the model, but not TRL's loss."""
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    trainer = trl.SFTTrainer(tiny(), sft_config(trl, tmp_path), **more)
    if patched_before:
        patch_trainer(trainer, label_smoothing=0.2)
    before = dict(vars(trainer.model))
    with pytest.raises(ValueError, match=SUM_UNDER_TRL):
        patch_trainer(trainer, reduction="sum")
    assert vars(trainer.model) == before


def test_a_sum_of_a_later_patch_model_is_refused_under_trls_trainer(tmp_path):
    """In training alone: evaluation is a mean whatever `reduction` is."""
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    arguments = sft_config(trl, tmp_path)
    trainer = trl.SFTTrainer(tiny(), arguments, eval_dataset=trls_rows(), **more)
    patch_trainer(trainer, label_smoothing=0.2)
    want = trainer.evaluate()["eval_loss"]
    patch_model(trainer.model, label_smoothing=0.2, reduction="sum")
    assert trainer.evaluate()["eval_loss"] == want
    with pytest.raises(ValueError, match=SUM_UNDER_TRL):
        trainer.train()
    # As the message says.
    patch_trainer(trainer, reduction="mean")
    trainer.train()


@pytest.mark.parametrize("trainer_name", ["DPOTrainer", "SFTTrainer"])
def test_a_model_of_sft_goes_on_to_another_trainer_of_trls(trainer_name, tmp_path):
    """As it is, the error says what to call; once it is called, the model trains."""
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    model = tiny()
    first = trl.SFTTrainer(model, sft_config(trl, tmp_path), **more)
    patch_trainer(first, label_smoothing=0.2).train()

    def next_trainer():
        if trainer_name == "SFTTrainer":
            return trl.SFTTrainer(model, sft_config(trl, tmp_path), **more)
        return dpo_trainer(trl, model, tmp_path)

    with pytest.raises(ValueError, match=r"without label_smoothing=0.2.*unpatch_model\(model\)"):
        next_trainer().train()
    unpatch_model(model)
    trainer = next_trainer()
    trainer.train()
    assert trainer.state.global_step == 3
    if trainer_name == "DPOTrainer":
        with pytest.raises(ValueError, match="TRL's DPOTrainer computes a loss of its own"):
            patch_trainer(trainer, label_smoothing=0.1)


def dpo_trainer(trl, model, folder):
    datasets = pytest.importorskip("datasets")
    pairs = {"prompt": "t5 t6 t7", "chosen": " t8 t9", "rejected": " t10 t11"}
    arguments = trl.DPOConfig(str(folder), bf16=False, gradient_checkpointing=False, **THREE_STEPS)
    return trl.DPOTrainer(
        model,
        ref_model=tiny(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([pairs] * 8),
        processing_class=words(),
    )


def test_metrics_that_need_logits_are_refused_where_evaluation_has_none(tmp_path):
    more = {"compute_metrics": lambda prediction: {}, "model": tiny(), "beta": None}
    with pytest.raises(ValueError, match="compute_metrics needs logits, which eval_logits=False"):
        patch_trainer(with_callback(tmp_path, **more), eval_logits=False)
    trainer = patch_trainer(with_callback(tmp_path, **more), label_smoothing=BETA)
    trainer.eval_dataset = uneven_rows()
    assert "eval_loss" in trainer.evaluate()


def dispatched(model):
    """The model with the hooks that `device_map` puts on it."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


@pytest.mark.parametrize("first", ["trainer", "patch_model"])
def test_trls_trainer_of_a_dispatched_model(first, tmp_path):
    """TRL puts its forward around that of accelerate's hook, which has to stay."""
    trl = trl_of_fused_heads()
    arguments = sft_config(trl, tmp_path, label_smoothing_factor=0.2)
    more = {"rows": trls_rows(), "processing_class": words()}
    want = history(trl.SFTTrainer, arguments, tiny(), True, **more)
    model = dispatched(tiny())
    if first == "patch_model":
        patch_model(model, label_smoothing=0.2)
    found = history(trl.SFTTrainer, arguments, model, True, **more)
    for kind in want:
        assert found[kind] == pytest.approx(want[kind], rel=1e-6)
    assert "_hf_hook" in vars(model)


def smoothed_densely(hidden, weight, labels):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels, label_smoothing=0.2)


@pytest.mark.parametrize("way", ["patch_trainer", "patch_model"])
def test_trls_trainer_with_a_loss_of_ones_own(way, tmp_path):
    """Its gradient is the given loss's; entropy and accuracy stay the model's."""
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    logged = []
    for settings in ({"label_smoothing": 0.2}, {"loss": smoothed_densely}):
        model = tiny()
        if way == "patch_model":
            patch_model(model, **settings)
            settings = {}
        trainer = trl.SFTTrainer(model, sft_config(trl, tmp_path), **more)
        patch_trainer(trainer, **settings)
        trainer.train()
        names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        logged.append([entry[name] for entry in steps for name in names])
    assert len(logged[0]) == 12
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)


def test_what_trl_would_train_instead_is_refused_by_name(tmp_path):
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    trainer = trl.SFTTrainer(tiny(), sft_config(trl, tmp_path, loss_type="dft"), **more)
    with pytest.raises(ValueError, match="not 'dft', which would ignore label_smoothing"):
        patch_trainer(trainer, label_smoothing=0.1)
    with pytest.raises(ValueError, match="TRL's trainers compute losses of their own"):
        callback = SmoothingCallback(label_smoothing=0.1)
        trl.SFTTrainer(tiny(), sft_config(trl, tmp_path), callbacks=[callback], **more)


UPDATE = {  # of one optimizer step over all eight rows, which changes nothing
    "max_steps": 1,
    "learning_rate": 0.0,
    "max_grad_norm": 1e9,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
BETA = 0.2


def uneven_rows():
    """Eight rows with one to eight labels."""
    rows = []
    for i, ids in enumerate(sequences()):
        rows.append({"input_ids": ids, "labels": ids.where(torch.arange(9) > i, -100)})
    return rows


def norm(gradient_of):
    return torch.stack([gradient.norm() for gradient in gradient_of.values()]).norm().item()


@pytest.mark.parametrize("way", ["callback", "patch_trainer", "the trainer's own factor"])
@pytest.mark.parametrize(("rows", "accumulation"), [(8, 1), (4, 2), (2, 4)])
def test_the_gradient_is_dense_smoothings_for_any_accumulation(way, rows, accumulation, tmp_path):
    pytest.importorskip("accelerate")
    factor = BETA if way == "the trainer's own factor" else 0.0
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=factor,
        **UPDATE,
    )
    callbacks = [SmoothingCallback(label_smoothing=BETA)] if way == "callback" else []
    trainer = transformers.Trainer(
        tiny(), arguments, train_dataset=uneven_rows(), callbacks=callbacks
    )
    if way == "patch_trainer":
        patch_trainer(trainer, label_smoothing=BETA)
    if not getattr(trainer, "model_accepts_loss_kwargs", False):
        pytest.skip("this Trainer does not count an update's tokens")
    trainer.train()
    (found,) = (entry for entry in trainer.state.log_history if "grad_norm" in entry)

    model = tiny()
    data = {}
    for key in ("input_ids", "labels"):
        data[key] = torch.stack([row[key] for row in uneven_rows()])
    dense = expected(model, data, BETA)
    assert found["loss"] == pytest.approx(dense.item(), rel=1e-4)
    assert found["grad_norm"] == pytest.approx(norm(gradients(model, dense)), rel=1e-4)


def with_callback(folder, *, beta=BETA, model=None, arguments=None, **more):
    pytest.importorskip("accelerate")
    settings = {"per_device_train_batch_size": 4, **UPDATE, **(arguments or {})}
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **settings),
        train_dataset=uneven_rows(),
        callbacks=[SmoothingCallback(label_smoothing=beta)] if beta is not None else [],
        **more,
    )


def test_the_callback_smooths_a_model_that_the_trainer_makes_itself(tmp_path):
    trainer = with_callback(tmp_path, model_init=lambda: tiny(), arguments={})
    trainer.train()
    assert trainer.model.lm_head.settings.label_smoothing == BETA


@pytest.mark.parametrize("how", ["model_init", "added late", "added late to adapters"])
def test_the_callback_patches_a_model_that_mixed_precision_has_wrapped(how, tmp_path):
    """accelerate has put its autocast around the forward by then, and it stays there."""
    arguments = {"bf16": True}
    if how == "model_init":
        trainer = with_callback(tmp_path, model_init=lambda: tiny(), arguments=arguments)
    else:
        model = tiny()
        if "adapters" in how:
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, config)
        trainer = with_callback(tmp_path, model=model, arguments=arguments, beta=None)
        trainer.add_callback(SmoothingCallback(label_smoothing=BETA))
    first = with_callback(tmp_path, model=tiny(), arguments=arguments)
    for one in (trainer, first):
        one.train()
    losses = []
    for one in (trainer, first):
        losses.append([entry["loss"] for entry in one.state.log_history if "loss" in entry])
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]


def test_patch_trainer_refuses_a_trainer_whose_callback_would_patch_the_model_anew(tmp_path):
    trainer = with_callback(tmp_path, model=tiny(), arguments={}, beta=0.1)
    with pytest.raises(ValueError, match="has a SmoothingCallback"):
        patch_trainer(trainer, label_smoothing=0.2)


@pytest.mark.parametrize("bf16", [False, True])
def test_patch_trainer_refuses_a_trainer_that_makes_another_model_when_it_trains(bf16, tmp_path):
    trainer = with_callback(
        tmp_path,
        model_init=lambda: tiny(),
        arguments={"label_smoothing_factor": 0.9, "bf16": bf16},
        beta=None,
    )
    with pytest.raises(ValueError, match=r"model_init makes a new model.*SmoothingCallback"):
        patch_trainer(trainer)
    assert trainer.label_smoother is not None


def test_a_trainer_whose_model_is_replaced_after_patch_trainer_does_not_train(tmp_path):
    trainer = patch_trainer(with_callback(tmp_path, model=tiny(), beta=None), label_smoothing=BETA)
    trainer.model = trainer.model_wrapped = tiny()
    with pytest.raises(ValueError, match="another one than when patch_trainer was called"):
        trainer.train()


def test_a_trainer_whose_step_takes_another_loss_after_patch_trainer_is_refused(tmp_path):
    trainer = patch_trainer(with_callback(tmp_path, model=tiny(), beta=None), label_smoothing=BETA)
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.mean()
    trainer.label_smoother = None
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="did not ask the model"):
        trainer.train()
    patch_trainer(trainer_without(tmp_path), label_smoothing=0.0).train()


def trainer_without(folder):
    return with_callback(folder, model=tiny(), beta=None)


def test_the_callback_refuses_another_ignore_index():
    with pytest.raises(ValueError, match="ignore_index must be -100, the trainer's, not 5"):
        SmoothingCallback(label_smoothing=0.1, ignore_index=5)


def test_another_ignore_index_of_a_later_patch_model_is_refused(tmp_path):
    """The trainer would divide by a number of labels among which are those that do not count."""
    trainer = patch_trainer(trainer_without(tmp_path), label_smoothing=BETA)
    patch_model(trainer.model, label_smoothing=BETA, ignore_index=5)
    with pytest.raises(ValueError, match="ignore_index must be -100, the trainer's, not 5"):
        trainer.train()
    patch_trainer(trainer, ignore_index=-100).train()
    assert trainer.state.global_step == trainer.args.max_steps


def test_the_callback_sets_the_model_anew_when_training_begins(tmp_path):
    trainer = with_callback(tmp_path, model=tiny())
    patch_model(trainer.model, label_smoothing=BETA, ignore_index=5)
    trainer.train()
    assert trainer.model.lm_head.settings.ignore_index == -100


def test_the_callback_refuses_a_trainer_that_smooths_by_itself(tmp_path):
    with pytest.raises(ValueError, match="leave the factor at 0"):
        with_callback(tmp_path, model=tiny(), arguments={"label_smoothing_factor": 0.1})


def test_the_callback_refuses_a_step_that_took_another_loss(tmp_path):
    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    callback = SmoothingCallback(label_smoothing=BETA)
    arguments = transformers.TrainingArguments(str(tmp_path), **UPDATE)
    trainer = OwnLoss(tiny(), arguments, train_dataset=uneven_rows(), callbacks=[callback])
    with pytest.raises(ValueError, match="did not ask the model for its loss"):
        trainer.train()


def test_the_callback_trains_with_its_own_settings_whatever_another_has_patched(tmp_path):
    trainer = with_callback(tmp_path, model=tiny())
    with_callback(tmp_path, model=trainer.model, beta=0.0)
    trainer.train()
    assert trainer.model.lm_head.settings.label_smoothing == BETA


def test_a_loss_of_the_trainers_own_beside_metrics_of_the_model_is_seen(tmp_path):
    """TRL asks the model for its metrics without gradients, which is no training."""
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    trainer = trl.SFTTrainer(tiny(), sft_config(trl, tmp_path), **more)
    patch_trainer(trainer, label_smoothing=0.2)
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.mean()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="did not ask the model"):
        trainer.train()


def test_the_callback_needs_its_beta():
    with pytest.raises(TypeError, match="label_smoothing"):
        SmoothingCallback(z_loss=0.1)
    with pytest.raises(TypeError, match="label_smoothing"):
        SmoothingCallback()


def test_ligers_loss_is_refused(tmp_path):
    """It is put in the model when training begins, over this one."""
    model = patch_model(tiny(), label_smoothing=0.1)
    given = trainer(tmp_path, model, 0.0)
    given.args.use_liger_kernel = True
    with pytest.raises(ValueError, match="Liger's loss, which ignores label_smoothing"):
        patch_trainer(given, label_smoothing=0.1)

    def lce_forward(self, input_ids, **kwargs):
        return self.model(input_ids)

    function = types.FunctionType(lce_forward.__code__, {"__name__": "liger_kernel.llama"})
    model.forward = types.MethodType(function, model)
    with pytest.raises(ValueError, match=r"liger_kernel.* without label_smoothing=0.1"):
        model(batch()["input_ids"])


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
    assert model.lm_head.settings.workspace == 7


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("compute_loss_func", {}, "compute_loss_func would train another loss"),
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


@pytest.mark.parametrize(
    "order", ["peft_config", "adapters first", "patched first", "patched last"]
)
def test_trls_trainer_with_adapters_in_any_order(order, tmp_path):
    """The adapters train as with TRL's own factor, whatever is done before what."""
    trl = trl_of_fused_heads()
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0
    )
    more = {"train_dataset": trls_rows(), "processing_class": words()}

    def losses(model, beta=None, factor=0.0, **settings):
        arguments = sft_config(trl, tmp_path, label_smoothing_factor=factor)
        trainer = trl.SFTTrainer(model, arguments, **more, **settings)
        if not factor:
            patch_trainer(trainer, **({} if beta is None else {"label_smoothing": beta}))
        trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert trainable and all("lora_" in name for name in trainable)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def with_adapters(model):
        torch.manual_seed(0)
        return peft.get_peft_model(model, adapters)

    if order == "peft_config":  # TRL adds the adapters, which are as random as it has drawn before
        model, again = tiny(), tiny()
        torch.manual_seed(0)
        want = losses(model, factor=0.2, peft_config=adapters)
        torch.manual_seed(0)
        assert losses(again, 0.2, peft_config=adapters) == pytest.approx(want, rel=1e-4)
        return
    want = losses(with_adapters(tiny()), factor=0.2)
    if order == "adapters first":
        found = losses(with_adapters(tiny()), 0.2)
    elif order == "patched first":
        found = losses(with_adapters(patch_model(tiny(), label_smoothing=0.2)))
    else:
        model = with_adapters(tiny())
        patch_model(model, label_smoothing=0.2)
        found = losses(model)
    assert len(found) == 3
    assert found == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"label_smoothing": 2}, ValueError),
        ({"impl": "nope"}, ValueError),
        ({"softcap": -3.0}, ValueError),
        ({"smoothing": 0.1}, TypeError),
    ],
)
@pytest.mark.parametrize("patched_before", [False, True])
def test_a_refused_patch_trainer_leaves_trls_forward(wrong, error, patched_before, tmp_path):
    trl = trl_of_fused_heads()
    more = {"train_dataset": trls_rows(), "processing_class": words()}
    model = tiny()
    if patched_before:
        patch_model(model)
    trainer = trl.SFTTrainer(model, sft_config(trl, tmp_path), **more)
    before = dict(vars(model))
    head_before = dict(vars(model.lm_head))
    with pytest.raises(error):
        patch_trainer(trainer, **wrong)
    assert vars(model) == before
    assert vars(model.lm_head) == head_before
    trainer.train()


class SFTTrainer(transformers.Trainer):
    """A trainer that says that it is TRL's."""

    __module__ = "trl.trainer.sft_trainer"


@pytest.mark.parametrize("fields", [None, ("log_probs", "entropy")])
def test_an_sfttrainer_of_another_version_of_trl_is_refused_by_name(fields, tmp_path, monkeypatch):
    """Before its loss_type is looked at, which the advice to change would lead nowhere."""
    pytest.importorskip("accelerate")
    utils = types.ModuleType("trl.trainer.utils")
    if fields is not None:
        utils.FusedCausalLMOutput = dataclasses.make_dataclass("FusedCausalLMOutput", fields)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.9.0" if name == "trl" else version(name)
    )
    arguments = transformers.TrainingArguments(str(tmp_path), **THREE_STEPS)
    arguments.loss_type = "chunked_nll"
    with pytest.raises(ValueError, match=r"TRL 1\.9\.0.*install trl 1\.15 or 1\.16"):
        patch_trainer(SFTTrainer(tiny(), arguments), label_smoothing=0.1)


def with_forward_of_trl(model):
    """The model with a forward of a version of TRL that nobody has seen."""

    def chunked_forward(self, input_ids, **inputs):
        return self.model(input_ids)

    function = types.FunctionType(chunked_forward.__code__, {"__name__": "trl.models.utils"})
    model.forward = types.MethodType(function, model)
    return model


def test_trls_output_has_the_loss_that_trl_reads_under_sequence_parallelism():
    """Its documentation says what `loss` is. Trainer reads it where ranks share a sequence."""
    trl_of_fused_heads()
    from trl.trainer.utils import add_fused_lm_head

    theirs = tiny("OlmoeForCausalLM")
    add_fused_lm_head(theirs)
    ours = install(tiny("OlmoeForCausalLM"), LossSettings(), for_trl=True)
    for divisor in ({}, {"num_items_in_batch": 3}, {"output_router_logits": True}):
        want = theirs(**batch(), **divisor, fused_lm_head=True).loss
        found = ours(**batch(), **divisor, fused_lm_head=True).loss
        torch.testing.assert_close(found, want)


def mean_loss(hidden, weight, labels, **model_options):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


@pytest.mark.parametrize(
    ("settings", "lost"),
    [({"z_loss": 1e-4}, "z_loss=0.0001"), ({"loss": mean_loss}, "loss=mean_loss")],
)
def test_what_another_loss_would_lose_is_named(settings, lost, tmp_path):
    model = with_forward_of_trl(patch_model(tiny(), **settings))
    with pytest.raises(ValueError, match=lost) as refusal:
        model(batch()["input_ids"])
    assert "label_smoothing=" not in str(refusal.value)
    trainer = patch_trainer(with_callback(tmp_path, model=tiny(), beta=None), **settings)
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.mean()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=rf"so that {lost} had no"):
        trainer.train()
    factor = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=BETA, **UPDATE)
    callback = SmoothingCallback(label_smoothing=0, **settings)
    with pytest.raises(ValueError, match=rf"beside SmoothingCallback's {lost}: leave"):
        transformers.Trainer(tiny(), factor, callbacks=[callback])


class Unpatching(transformers.TrainerCallback):
    """Takes the patch off within the second step, or before it."""

    def __init__(self, event):
        setattr(self, event, self.unpatch)

    def unpatch(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1 and is_patched(model):
            unpatch_model(model)


def is_patched(model):
    return hasattr(model, "_smoothce_forward")


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end"])
def test_a_model_that_is_unpatched_while_it_trains_trains_on(event, tmp_path):
    """Whoever calls `unpatch_model` knows that the loss is upstream's from then on."""
    model = tiny()
    made = trainer(tmp_path, model, 0.0)
    made.train_dataset = uneven_rows()
    made.add_callback(Unpatching(event))
    patch_trainer(made, label_smoothing=0.2)
    made.train()
    assert made.state.global_step == 3 and not is_patched(model)
