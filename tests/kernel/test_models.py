"""Every known architecture, tiny, against upstream's own logits and torch's loss."""

import copy
import inspect
import io
import warnings

import pytest
import torch
import torch.nn.functional as F

from smoothce import linear_cross_entropy, patch_model, patch_trainer, unpatch_model
from smoothce.models import ARCHITECTURES

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

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
    "OlmoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "Qwen2MoeForCausalLM": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
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


def test_outputs_without_a_cache():
    """Mamba's decoder has no past_key_values to hand on."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    torch.manual_seed(0)
    model, data = transformers.MambaForCausalLM(config).train(), batch()
    want = expected(model, data, 0.1).detach()
    patch_model(model, label_smoothing=0.1, softcap=None, logit_scale=None)
    torch.testing.assert_close(model(**data).loss, want)


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
    with pytest.raises(ValueError, match=r"output_router_logits.*reduction='mean'"):
        patch_model(model, reduction="sum")
    patch_model(tiny(name), reduction="sum")


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


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_masked_is_zero_and_connected(reduction, items):
    """Also where the Trainer counts nothing: 0 / 0 would turn every weight into NaN."""
    model, data = patch_model(tiny(), label_smoothing=0.1, reduction=reduction), batch("all")
    loss = model(**data, num_items_in_batch=items).loss
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


def test_a_saved_model_comes_back_unpatched():
    """As from `save_pretrained`; it says so when it trains, and can be patched again."""
    model, data, file = patch_model(tiny(), label_smoothing=0.1), batch(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval()(**data).logits, model.eval()(**data).logits)
    with pytest.warns(UserWarning, match=r"around its loss.*patch_model"):
        loaded.train()(**data)
    patch_model(loaded, label_smoothing=0.1)
    assert torch.equal(loaded(**data).loss, model.train()(**data).loss)


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


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_the_trainer_trains_as_with_upstreams_loss(beta, tmp_path):
    """Columns, the number of items over accumulation steps, and evaluation, through the Trainer.

    With smoothing, evaluation reports the plain loss and upstream the smoothed one."""
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(2)
    rows = [{"input_ids": torch.randint(3, 67, (9,), generator=generator)} for _ in range(8)]
    for i, row in enumerate(rows):
        row["labels"] = row["input_ids"].where(torch.arange(9) > i, -100)
        row["unused"] = "a column that the model does not take"

    def history(model, patch=lambda trainer: trainer):
        arguments = transformers.TrainingArguments(
            str(tmp_path), label_smoothing_factor=beta, **THREE_STEPS
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        patch(trainer)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*logged, trainer.evaluate()["eval_loss"]]

    want = history(tiny())
    found = history(tiny(), patch_trainer)
    assert found[:-1] == pytest.approx(want[:-1], rel=1e-4)
    if beta:
        with pytest.warns(UserWarning, match="got no labels"):
            assert history(patch_model(tiny())) == pytest.approx(want, rel=1e-4)
    else:
        assert found[-1] == pytest.approx(want[-1], rel=1e-4)
        assert history(patch_model(tiny())) == pytest.approx(want, rel=1e-4)


def test_a_trainer_keeps_what_its_model_was_patched_with(tmp_path):
    """The warning of a model that is trained around its loss asks for `patch_trainer` alone."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    model = patch_model(tiny(), label_smoothing=0.3, workspace=7, eval_logits=False)
    want = model(**batch()).loss
    patch_trainer(transformers.Trainer(model, arguments))
    assert torch.equal(model(**batch()).loss, want)
    assert model.lm_head._smoothce["workspace"] == 7
    with torch.no_grad():
        assert model.eval()(**batch()).logits is None
    arguments.label_smoothing_factor = 0.1
    with pytest.raises(ValueError, match=r"label_smoothing=0.3 and .*=0.1 differ"):
        patch_trainer(transformers.Trainer(model, arguments))
    model = patch_model(tiny())
    patch_trainer(transformers.Trainer(model, arguments))
    assert model.lm_head._smoothce["label_smoothing"] == 0.1


def test_a_loss_that_needs_logits_is_refused(tmp_path):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, label_smoothing_factor=0.1, report_to=[]
    )
    trainer = transformers.Trainer(tiny(), arguments)
    trainer.compute_loss_func = lambda *_: None  # no argument of older Trainers
    with pytest.raises(ValueError, match="compute_loss_func needs logits"):
        patch_trainer(trainer)
    with pytest.raises(ValueError, match=r"label_smoothing=0.3 and .*=0.1 differ"):
        patch_trainer(transformers.Trainer(tiny(), arguments), label_smoothing=0.3)
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs in one process.*torchrun.*CUDA_VISIBLE_DEVICES"):
        patch_trainer(transformers.Trainer(tiny(), arguments))
    arguments._n_gpu = 0
    with pytest.raises(ValueError, match=r"ignore_index must be -100, .* not 0"):
        patch_trainer(transformers.Trainer(tiny(), arguments), ignore_index=0)


# Where TRL itself smooths, it leaves out a mixture's auxiliary loss.
@pytest.mark.parametrize(
    ("name", "beta"),
    [("LlamaForCausalLM", 0.0), ("LlamaForCausalLM", 0.2), ("OlmoeForCausalLM", 0.0)],
)
def test_trls_trainer_and_its_metrics(name, beta, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 67, (9,), generator=generator).tolist() for _ in range(8)]
    rows = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])

    class Tokenizer(transformers.PreTrainedTokenizerFast):
        def __init__(self):
            vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
            model = tokenizers.models.WordLevel(vocabulary, unk_token="t3")
            super().__init__(
                tokenizer_object=tokenizers.Tokenizer(model), pad_token="t0", eos_token="t2"
            )

    def history(patch=lambda trainer: None, model=None):
        arguments = trl.SFTConfig(
            str(tmp_path),
            bf16=False,
            gradient_checkpointing=False,
            label_smoothing_factor=beta,
            dataset_kwargs={"skip_prepare_dataset": True},
            **THREE_STEPS,
        )
        model = model or tiny(name)
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=Tokenizer()
        )
        patch(trainer)
        trainer.train()
        kinds = ("loss", "entropy", "mean_token_accuracy")
        entries = [e for e in trainer.state.log_history if "loss" in e]
        evaluated = trainer.evaluate()
        return [e[kind] for e in entries for kind in kinds], [
            evaluated[f"eval_{kind}"] for kind in kinds[beta > 0 :]
        ]

    want, found = history(), history(patch_trainer)
    for a, b in zip(found, want, strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    if not beta:
        with pytest.warns(UserWarning, match="around its loss"):
            history(model=patch_model(tiny(name), label_smoothing=0.1))
    # patched before as well as after
    again = history(patch_trainer, patch_model(tiny(name), label_smoothing=beta))
    assert again[0] == pytest.approx(want[0], rel=1e-3)
    with pytest.raises(ValueError, match=r"reduction must be 'mean', .* not 'sum'"):
        history(lambda trainer: patch_trainer(trainer, reduction="sum"))


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
    """transformers 4.43 has ten of the eighteen, 5.x has all."""
    newer = {"Gemma3ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM"}
    newer |= {"Qwen3MoeForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM", "SmolLM3ForCausalLM"}
    missing = set(ARCHITECTURES) - set(PRESENT)
    assert missing <= newer and (not missing or transformers.__version__.startswith("4."))


def test_an_unknown_architecture_is_told_every_known_one():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)
    with pytest.raises(TypeError) as refusal:
        patch_model(transformers.GPT2LMHeadModel(config))
    assert all(name in str(refusal.value) for name in ARCHITECTURES)


def test_an_unknown_architecture_with_its_head_described():
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=1, vocab_size=VOCABULARY, resid_pdrop=0, attn_pdrop=0
    )
    config.embd_pdrop = 0
    torch.manual_seed(0)
    model, data = transformers.GPT2LMHeadModel(config).train(), batch()
    theirs = gradients(model, expected(model, data, 0.1))
    patch_model(model, label_smoothing=0.1, softcap=None, logit_scale=None)
    assert_same(gradients(model, model(**data).loss), theirs)
    with pytest.raises(TypeError, match="no setting smoothing"):
        patch_model(model, smoothing=0.1)


def test_evaluation_without_logits():
    """The loss is upstream's, without smoothing."""
    model, data = tiny().eval(), batch()
    want = model(**data).loss
    patch_model(model, label_smoothing=0.3, eval_logits=False)
    found = model(**data)
    assert found.logits is None
    torch.testing.assert_close(found.loss, want)
    assert model(data["input_ids"]).logits is not None


def test_training_without_the_fused_loss_warns_once():
    model, data = patch_model(tiny(), label_smoothing=0.1), batch()
    with pytest.warns(UserWarning, match=r"no labels.*label_smoothing_factor.*patch_trainer"):
        model(data["input_ids"])
    with pytest.warns(UserWarning, match=r"around its loss.*SFTTrainer.*patch_trainer"):
        model.model(data["input_ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(data["input_ids"])
        model.model(data["input_ids"])
        model(**data).loss.backward()
        with torch.no_grad():
            patch_model(tiny()).eval()(**data)
        model.generate(data["input_ids"], max_new_tokens=2)


@pytest.mark.parametrize("eval_logits", [True, False])
def test_training_in_evaluation_mode_warns(eval_logits):
    """`from_pretrained` returns models in it: without a word they would train unsmoothed."""
    model = patch_model(tiny(), label_smoothing=0.1, eval_logits=eval_logits).eval()
    with pytest.warns(UserWarning, match=r"evaluation mode.*without smoothing.*model\.train\(\)"):
        model(**batch())
    with pytest.warns(UserWarning, match="got no labels"):  # each of its own
        model.train()(batch()["input_ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is to be smoothed, or to be trained
        patch_model(tiny(), eval_logits=eval_logits).eval()(**batch())
        frozen = patch_model(tiny(), label_smoothing=0.1, eval_logits=eval_logits).eval()
        frozen.requires_grad_(False)(**batch())


def test_a_model_spread_over_devices():
    """accelerate's hooks of a device_map stay around the patched forwards."""
    accelerate = pytest.importorskip("accelerate")
    model, data = tiny(), batch()
    theirs = gradients(model, expected(model, data, 0.1))
    where = {"model": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(model, where, main_device="cpu", force_hooks=True)
    seen = []
    hook = model.lm_head._hf_hook
    before = hook.pre_forward
    hook.pre_forward = lambda *args, **kw: seen.append(args) or before(*args, **kw)
    patch_model(model, label_smoothing=0.1)
    found = model(**data)
    assert found.logits is None and len(seen) == 1
    assert_same(gradients(model, found.loss), theirs)
    unpatch_model(model)
    assert model(**data).logits is not None


@pytest.mark.parametrize("patched", ["before", "after"])
def test_fsdp2(patched, tmp_path):
    """The head is gathered for its forward and its gradient is sharded again."""
    import torch.distributed as dist

    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")
    model, data = tiny(), batch()
    theirs = gradients(model, expected(model, data, 0.1))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        if patched == "before":
            patch_model(model, label_smoothing=0.1)
        for layer in (*model.model.layers, model.lm_head, model):
            fsdp.fully_shard(layer, mesh=mesh)
        if patched == "after":
            with pytest.raises(TypeError, match="call patch_model before fully_shard"):
                patch_model(model, label_smoothing=0.1)
            return
        ours = gradients(model, model(**data).loss)
        assert type(ours["lm_head.weight"]).__name__ == "DTensor"
        assert_same({name: g.full_tensor() for name, g in ours.items()}, theirs)
    finally:
        dist.destroy_process_group()


def test_a_sharded_weight_is_refused_by_name():
    class DTensor(torch.Tensor):
        """Stands for a parameter of FSDP2 that is not gathered."""

    weight = torch.randn(9, 4).as_subclass(DTensor)
    with pytest.raises(TypeError, match=r"weight is a DTensor.*fully_shard"):
        linear_cross_entropy(torch.randn(3, 4), weight, torch.tensor([0, 1, 2]))


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
    with pytest.raises(ValueError, match=r"ignore_index=0 .*patched with ignore_index=-100"):
        model(**batch(), ignore_index=0)
    with pytest.raises(ValueError, match=r"impl must be auto or one of .*'fast'"):
        patch_model(tiny(), impl="fast")
    with pytest.raises(TypeError, match=r"OptimizedModule .*call patch_model before"):
        patch_model(torch.compile(tiny()))
    with pytest.raises(TypeError, match=r"DataParallel .*call patch_model before"):
        patch_model(torch.nn.DataParallel(tiny()))
    model.lm_head = torch.nn.Linear(16, VOCABULARY, bias=False)
    with pytest.raises(TypeError, match="lm_head was replaced after patch_model"):
        model(**batch())
    model = patch_model(tiny())
    model.model = tiny().model
    unpatch_model(model)  # a decoder that was set since has no hook to remove
    model = patch_model(tiny())
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(TypeError, match="wrapped after patch_model"):
        unpatch_model(model)
