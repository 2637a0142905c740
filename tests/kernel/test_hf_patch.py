"""Every known architecture, tiny, against upstream's own logits and torch's loss."""

import contextlib
import copy
import inspect
import io
import warnings

import pytest
import torch
import torch.nn.functional as F

from smoothce import patch_model, patch_trainer, unpatch_model
from smoothce.hf_patch.logit_map import ARCHITECTURES

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

VOCABULARY = 67
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
SOFTCAPPED = {"final_logit_softcapping": 1.5, "sliding_window": 8}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXTRA = {
    "Gemma2ForCausalLM": SOFTCAPPED,
    "Gemma3ForCausalLM": SOFTCAPPED,
    "CohereForCausalLM": {"logit_scale": 0.3},
    "GraniteForCausalLM": {"logits_scaling": 6.0},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "OlmoeForCausalLM": EXPERTS,
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3MoeForCausalLM": EXPERTS,
}
PRESENT = [name for name in ARCHITECTURES if hasattr(transformers, name)]


def tiny(name="LlamaForCausalLM", tied=False, **settings):
    """A model in training mode, without dropout, with weights large enough for a skewed softmax."""
    architecture = getattr(transformers, name)
    config = architecture.config_class(
        **{**SHAPE, **EXTRA.get(name, {}), "tie_word_embeddings": tied, **settings}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = architecture(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def sequences(count=8):
    return torch.randint(3, VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(1))


def batch():
    """Three sequences; their prompts and what is padded have no labels."""
    ids = sequences(3)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3] = labels[0, 6:] = -100
    mask[0, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def expected(model, batch, beta, reduction="mean", **settings):
    """Upstream's logits, shifted, through torch's loss."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, **settings).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=beta, reduction=reduction)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm().item()
        assert error <= 2e-5 * gradient.norm().item() + 1e-6, (name, error)


@pytest.mark.parametrize("head", ["untied", "tied", "bias"])
@pytest.mark.parametrize("name", PRESENT)
def test_loss_and_gradients(name, head):
    """None comes with a bias; one that is added is inside softcap and scale."""
    model, data = tiny(name, head == "tied"), batch()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (head == "tied")
    if head == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    for reduction in ("mean", "sum"):
        loss = expected(model, data, 0.1, reduction)
        theirs = gradients(model, loss)
        patch_model(model, label_smoothing=0.1, reduction=reduction)
        outputs = model(**data)
        torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        assert outputs.logits is None
        assert_same(gradients(model, outputs.loss), theirs)
        unpatch_model(model)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MambaForCausalLM"])
def test_an_unknown_architecture_with_its_head_described(name):
    """GPT-2's decoder has another name, Mamba's no past_key_values to hand on."""
    model, data = tiny(name, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0), batch()
    with pytest.raises(TypeError) as refusal:
        patch_model(model)
    assert all(known in str(refusal.value) for known in ARCHITECTURES)
    theirs = gradients(model, expected(model, data, 0.1))
    patch_model(model, label_smoothing=0.1, softcap=None, logit_scale=None)
    assert_same(gradients(model, model(**data).loss), theirs)


@pytest.mark.parametrize("name", PRESENT)
def test_without_labels_or_training_nothing_changes(name):
    model, data = tiny(name), batch()
    prompt = data["input_ids"][:, :4]
    copied = patch_model(copy.deepcopy(model), label_smoothing=0.3)
    torch.testing.assert_close(copied(prompt).logits, model(prompt).logits, rtol=0, atol=0)
    ours, theirs = copied.eval()(**data), model.eval()(**data)
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.logits, theirs.logits)
    patch_model(copied, label_smoothing=0.3, eval_logits=False)
    fused = copied(**data)
    assert fused.logits is None and copied(prompt).logits is not None
    torch.testing.assert_close(fused.loss, theirs.loss)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(copied.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.parametrize("name", [name for name in PRESENT if "Mixtral" in name or "oe" in name])
def test_auxiliary_loss_of_a_mixture(name):
    model, data = tiny(name, output_router_logits=True), batch()
    theirs = model(**data)
    assert theirs.aux_loss > 0
    want = gradients(model, theirs.loss)
    patch_model(model)
    ours = model(**data)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert_same(gradients(model, ours.loss), want)


def test_inside_adapters():
    """With gradient checkpointing they are in tests/kernel/test_zero.py."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model, data = peft.get_peft_model(tiny(), config).train(), batch()
    theirs = gradients(model, expected(model, data, 0.1))
    assert theirs and all("lora" in name for name in theirs)
    patch_model(model, label_smoothing=0.1)
    assert_same(gradients(model, model(**data).loss), theirs)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7), 0, torch.tensor(0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_trainers_count_of_items_divides_a_mean(reduction, items):
    """Where all is masked the loss is zero and connected; 0 / 0 would turn weights into NaN."""
    model, data = patch_model(tiny(), label_smoothing=0.1, reduction=reduction), batch()
    want = expected(tiny(), data, 0.1, "sum" if items else reduction)
    if items != 0:
        want = want / items if items and reduction == "mean" else want
        torch.testing.assert_close(model(**data, num_items_in_batch=items).loss, want)
    data["labels"].fill_(-100)
    loss = model(**data, num_items_in_batch=items).loss
    assert loss == 0
    for name, gradient in gradients(model, loss).items():
        assert not gradient.any(), name
    assert model.lm_head.weight.grad is not None


def test_the_signature_stays_and_positional_labels_work():
    model, data = tiny(), batch()
    before = inspect.signature(model.forward)
    patch_model(model, label_smoothing=0.1)
    assert inspect.signature(model.forward) == before
    names = list(before.parameters)
    positional = [data.get(name) for name in names[: names.index("labels") + 1]]
    assert torch.equal(model(*positional, return_dict=False)[0], model(**data).loss)


def test_patching_again_replaces_and_unpatching_restores():
    """A refused call leaves the one before in place, and a copy trains its own head."""
    model, data = tiny(), batch()
    plain = model(**data)
    patch_model(model, label_smoothing=0.5)
    patch_model(model, label_smoothing=0.0)
    with pytest.raises(ValueError):
        patch_model(model, label_smoothing=2.0)
    torch.testing.assert_close(model(**data).loss, plain.loss)
    copied = copy.deepcopy(model)
    copied(**data).loss.backward()
    assert copied.lm_head.weight.grad is not None and model.lm_head.weight.grad is None
    unpatch_model(model)
    assert torch.equal(model(**data).logits, plain.logits)
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    with pytest.raises(TypeError, match="LlamaForCausalLM is not patched"):
        unpatch_model(model)


def test_a_saved_model_comes_back_patched():
    """As from `torch.save`, or sent to another process: with its settings, and undone likewise."""
    target = torch.rand(VOCABULARY).softmax(0)
    model = patch_model(tiny(), label_smoothing=0.1, smoothing_target=target)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loaded.train()(**batch())
    assert found.logits is None
    assert torch.equal(found.loss, model(**batch()).loss)
    found.loss.backward()
    assert loaded.lm_head.weight.grad is not None and model.lm_head.weight.grad is None
    unpatch_model(loaded)
    assert "forward" not in vars(loaded) and "forward" not in vars(loaded.lm_head)
    assert torch.equal(loaded(**batch()).logits, unpatch_model(model)(**batch()).logits)


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


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_an_adapter_on_the_head_is_refused(first, where):
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    settings[where] = [*settings.get(where, []), "lm_head"]
    model = patch_model(tiny()) if first == "patch" else tiny()
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with pytest.raises(TypeError, match="lm_head carries an adapter"):
        patch_model(model) if first == "adapter" else model.train()(**batch())


@pytest.mark.parametrize("eval_logits", [True, False])
def test_training_without_the_fused_loss_warns_once(eval_logits):
    """`from_pretrained` returns models in evaluation mode: they would train unsmoothed."""
    options = {"label_smoothing": 0.1, "eval_logits": eval_logits}
    model, data = patch_model(tiny(), **options), batch()
    ids = data["input_ids"]
    with pytest.warns(UserWarning, match=r"no labels.*patch_trainer"):
        model(ids)
    with pytest.warns(UserWarning, match=r"around its loss.*patch_trainer"):
        model.model(ids)
    with pytest.warns(UserWarning, match=r"evaluation mode.*model\.train\(\)"):
        model.eval()(**data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()(ids), model.model(ids), model.eval()(**data)
        model.train()(**data).loss.backward()
        patch_model(tiny(), eval_logits=eval_logits).eval()(**data)  # nothing to smooth
        patch_model(tiny(), **options).eval().requires_grad_(False)(**data)  # nothing to train
        model.generate(ids, max_new_tokens=2)


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """Somebody's own variant under a known name."""


def test_a_model_that_might_not_come_out_exact_is_refused():
    several, quantised, wrapped, own = (tiny() for _ in range(4))
    several.config.pretraining_tp = 2
    quantised.lm_head = torch.nn.LazyLinear(VOCABULARY)  # another Linear, as bitsandbytes' are
    wrapped.forward = torch.no_grad()(wrapped.forward)
    own.__class__ = LlamaForCausalLM
    mixture = tiny("MixtralForCausalLM", output_router_logits=True)
    for model, options, error, said in (
        (several, {}, TypeError, "LlamaForCausalLM with pretraining_tp=2"),
        (quantised, {}, TypeError, r"must be a torch.nn.Linear, not .*LazyLinear"),
        (wrapped, {}, TypeError, "forward is already wrapped"),
        (own, {}, TypeError, r"does not know .*LlamaForCausalLM"),
        (torch.compile(tiny()), {}, TypeError, "call patch_model before"),
        (torch.nn.DataParallel(tiny()), {}, TypeError, "call patch_model before"),
        (tiny(), {"reduction": "none"}, ValueError, "mean or sum for a model, not 'none'"),
        (tiny(), {"smoothing": 0.1}, TypeError, "no setting smoothing"),
        (tiny(), {"smoothing_target": torch.ones(3)}, ValueError, r"must be \(67,\), not \(3,\)"),
        (mixture, {"reduction": "sum"}, ValueError, "output_router_logits"),
    ):
        with pytest.raises(error, match=said):
            patch_model(model, **options)


def test_what_is_refused_once_a_model_is_patched():
    model = patch_model(tiny())
    for wrong in ({"logits_to_keep": 1}, {"ignore_index": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model(**batch(), **wrong)
    model.lm_head = torch.nn.Linear(16, VOCABULARY, bias=False)
    with pytest.raises(TypeError, match="lm_head was replaced after patch_model"):
        model(**batch())
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(TypeError, match="wrapped after patch_model"):
        unpatch_model(model)
