"""Every known architecture, tiny, against upstream's own logits and torch's loss."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F

from smoothce import patch_model, unpatch_model
from smoothce.models import ARCHITECTURES

transformers = pytest.importorskip("transformers")

VOCABULARY = 67
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
EXTRA = {
    "GemmaForCausalLM": {"num_key_value_heads": 2},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 1.5, "sliding_window": 8},
    "Gemma3ForCausalLM": {"final_logit_softcapping": 1.5, "sliding_window": 8},
    "CohereForCausalLM": {"logit_scale": 0.3},
    "GraniteForCausalLM": {"logits_scaling": 6.0},
    "OlmoForCausalLM": {"num_key_value_heads": 2},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
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


def batch(masked="some"):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    labels = ids.clone()
    if masked != "none":
        labels[:, :3] = -100
    if masked == "all":
        labels.fill_(-100)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    labels[0, 6:] = -100
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PRESENT)
def test_loss_and_gradients(name, tied):
    model, data = tiny(name, tied), batch()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for reduction in ("mean", "sum"):
        loss = expected(model, data, 0.1, reduction)
        theirs = gradients(model, loss)
        patch_model(model, label_smoothing=0.1, reduction=reduction)
        outputs = model(**data)
        torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        assert outputs.logits is None
        assert_same(gradients(model, outputs.loss), theirs)
        unpatch_model(model)


@pytest.mark.parametrize("name", PRESENT)
def test_bias_of_the_head_counts(name):
    """None of them comes with one; what is added is inside softcap and scale."""
    model, data = tiny(name), batch()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    loss = expected(model, data, 0.2)
    theirs = gradients(model, loss)
    patch_model(model, label_smoothing=0.2)
    ours = gradients(model, model(**data).loss)
    assert "lm_head.bias" in ours
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", PRESENT)
def test_without_labels_or_training_nothing_changes(name):
    model, data = tiny(name), batch()
    prompt = data["input_ids"][:, :4]
    copied = patch_model(copy.deepcopy(model), label_smoothing=0.3)
    torch.testing.assert_close(copied(prompt).logits, model(prompt).logits, rtol=0, atol=0)
    ours, theirs = copied.eval()(**data), model.eval()(**data)
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.logits, theirs.logits)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(copied.generate(prompt, **options), model.generate(prompt, **options))


def test_auxiliary_loss_of_a_mixture():
    model, data = tiny("MixtralForCausalLM", output_router_logits=True), batch()
    theirs = model(**data)
    assert theirs.aux_loss > 0
    want = gradients(model, theirs.loss)
    patch_model(model)
    ours = model(**data)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert_same(gradients(model, ours.loss), want)
    with pytest.raises(ValueError, match=r"output_router_logits.*reduction='mean'"):
        patch_model(model, reduction="sum")
    patch_model(tiny("MixtralForCausalLM"), reduction="sum")


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_num_items_in_batch_divides_a_mean_and_leaves_a_sum(items):
    model, data = tiny(), batch()
    total = expected(model, data, 0.1, "sum").detach()
    patch_model(model, label_smoothing=0.1)
    torch.testing.assert_close(model(**data, num_items_in_batch=items).loss, total / 7)
    patch_model(model, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(model(**data, num_items_in_batch=items).loss, total)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model, data = tiny(), batch()
    theirs = gradients(model, expected(model, data, 0.1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    patch_model(model, label_smoothing=0.1)
    assert_same(gradients(model, model(**data).loss), theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_masked_is_zero_and_connected(reduction):
    model, data = patch_model(tiny(), label_smoothing=0.1, reduction=reduction), batch("all")
    loss = model(**data).loss
    assert loss == 0
    for name, gradient in gradients(model, loss).items():
        assert not gradient.any(), name
    assert model.lm_head.weight.grad is not None


def test_the_signature_stays_and_positional_labels_work():
    model, data = tiny(), batch()
    before = inspect.signature(model.forward)
    names = list(before.parameters)
    patch_model(model, label_smoothing=0.1)
    assert inspect.signature(model.forward) == before
    positional = [data.get(name) for name in names[: names.index("labels") + 1]]
    assert torch.equal(model(*positional).loss, model(**data).loss)
    assert torch.equal(model(**data, return_dict=False)[0], model(**data).loss)


def test_patching_again_replaces_and_unpatching_restores():
    model, data = tiny(), batch()
    plain = model(**data)
    patch_model(model, label_smoothing=0.5)
    patch_model(model, label_smoothing=0.0)
    torch.testing.assert_close(model(**data).loss, plain.loss)
    unpatch_model(model)
    assert torch.equal(model(**data).logits, plain.logits)
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    with pytest.raises(TypeError, match="LlamaForCausalLM is not patched"):
        unpatch_model(model)


def test_a_refused_second_call_leaves_the_first_in_place():
    model, data = patch_model(tiny(), label_smoothing=0.5), batch()
    before = model(**data).loss
    for wrong in ({"label_smoothing": 2.0}, {"reduction": "none"}, {"workspace": 1e9}):
        with pytest.raises(ValueError):
            patch_model(model, **wrong)
        assert torch.equal(model(**data).loss, before)


def test_a_copy_trains_its_own_head():
    model = patch_model(tiny(), label_smoothing=0.1)
    copied = copy.deepcopy(model)
    copied(**batch()).loss.backward()
    assert copied.lm_head.weight.grad is not None and model.lm_head.weight.grad is None


def test_the_trainer_trains_as_with_upstreams_loss(tmp_path):
    """Columns, the number of items over accumulation steps, and evaluation, through the Trainer."""
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(2)
    rows = [{"input_ids": torch.randint(3, 67, (9,), generator=generator)} for _ in range(8)]
    for i, row in enumerate(rows):
        row["labels"] = row["input_ids"].where(torch.arange(9) > i, -100)
        row["unused"] = "a column that the model does not take"

    def history(model):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*logged, trainer.evaluate()["eval_loss"]]

    assert history(patch_model(tiny())) == pytest.approx(history(tiny()), rel=1e-4)


def test_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model, data = peft.get_peft_model(tiny(), config).train(), batch()
    theirs = gradients(model, expected(model, data, 0.1))
    assert theirs and all("lora" in name for name in theirs)
    patch_model(model, label_smoothing=0.1)
    assert_same(gradients(model, model(**data).loss), theirs)


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_an_adapter_on_the_head_is_refused(first, where):
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    settings[where] = [*settings.get(where, []), "lm_head"]
    model = tiny()
    with pytest.raises(TypeError, match="lm_head carries an adapter"):
        if first == "patch":
            model = peft.get_peft_model(patch_model(model), peft.LoraConfig(**settings))
            model.train()(**batch())
        else:
            patch_model(peft.get_peft_model(model, peft.LoraConfig(**settings)))


def test_known_architectures_are_missing_only_from_versions_before_them():
    """transformers 4.43 has nine of the thirteen, 5.x has all."""
    newer = {"Gemma3ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM"}
    missing = set(ARCHITECTURES) - set(PRESENT)
    assert missing <= newer and (not missing or transformers.__version__.startswith("4."))


def test_an_unknown_architecture_is_told_every_known_one():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)
    with pytest.raises(TypeError) as refusal:
        patch_model(transformers.GPT2LMHeadModel(config))
    assert all(name in str(refusal.value) for name in ARCHITECTURES)


def test_a_head_that_might_not_come_out_exact_is_refused():
    model = tiny()
    model.config.pretraining_tp = 2
    with pytest.raises(TypeError, match="LlamaForCausalLM with pretraining_tp=2"):
        patch_model(model)

    class Quantised(torch.nn.Linear):
        """Stands for the linear layers of bitsandbytes and the like."""

    model = tiny()
    model.lm_head = Quantised(16, VOCABULARY, bias=False)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Linear, not .*Quantised"):
        patch_model(model)
    model = tiny()
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(TypeError, match="forward is already wrapped"):
        patch_model(model)


def test_refusals():
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """Somebody's own variant under a known name."""

    with pytest.raises(TypeError, match=r"does not know .*LlamaForCausalLM"):
        patch_model(LlamaForCausalLM(tiny().config))
    with pytest.raises(ValueError, match="mean or sum for a model, not 'none'"):
        patch_model(tiny(), reduction="none")
    with pytest.raises(ValueError, match="label_smoothing"):
        patch_model(tiny(), label_smoothing=-1)
    model = patch_model(tiny())
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(**batch(), logits_to_keep=1)
    model.lm_head = torch.nn.Linear(16, VOCABULARY, bias=False)
    with pytest.raises(TypeError, match="lm_head was replaced after patch_model"):
        model(**batch())
    model = patch_model(tiny())
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(TypeError, match="wrapped after patch_model"):
        unpatch_model(model)
