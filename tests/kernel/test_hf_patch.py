"""Patched models against upstream's own logits and torch's loss: what a patch changes and keeps."""

import copy
import warnings

import pytest
import torch

from smoothce import explain, patch_model, unpatch_model
from smoothce.hf_patch.deferred_logits import DeferredLogits

transformers = pytest.importorskip("transformers")

tiny_models = pytest.importorskip("tiny_models")
from tiny_models import VOCABULARY, assert_same, batch, expected, gradients, tiny  # noqa: E402

# One a way of making logits and losses; all classes are in test_families.py, which is slow.
MIXTURES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM"]
FAMILIES = [
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "CohereForCausalLM",
    "GraniteForCausalLM",
    *MIXTURES,
]
# GPT-2's decoder has another name, Mamba's no past_key_values, GPT-NeoX's head another.
OTHER_NAMES = ["GPT2LMHeadModel", "MambaForCausalLM", "GPTNeoXForCausalLM"]
V5 = int(transformers.__version__.split(".")[0]) >= 5
DROPOUTS = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, head) for name in FAMILIES for head in ("untied", "tied", "bias")),
        *((name, "its own") for name in OTHER_NAMES),
    ],
)
def test_loss_and_gradients(name, head, reduction):
    """None comes with a bias; one that is added is inside softcap and scale."""
    model, data = tiny(name, head == "tied", **DROPOUTS), batch()
    if head == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    loss = expected(model, data, 0.1, reduction)
    theirs = gradients(model, loss)
    patch_model(model, label_smoothing=0.1, reduction=reduction)
    outputs = model(**data)
    torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    assert isinstance(outputs.logits, DeferredLogits)
    assert_same(gradients(model, outputs.loss), theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_labels_or_training_nothing_changes(name):
    model, data = tiny(name), batch()
    prompt = data["input_ids"][:, :4]
    copied = patch_model(copy.deepcopy(model), label_smoothing=0.3)
    torch.testing.assert_close(copied(prompt).logits, model(prompt).logits, rtol=0, atol=0)
    ours, theirs = copied.eval()(**data), model.eval()(**data)
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.logits, theirs.logits)
    patch_model(copied, label_smoothing=0.3, eval_logits=False)
    fused = copied(**data)
    torch.testing.assert_close(fused.logits.dense(), theirs.logits)
    torch.testing.assert_close(fused.loss, theirs.loss)
    assert isinstance(copied(prompt).logits, torch.Tensor)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(copied.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.parametrize("name", MIXTURES)
def test_auxiliary_loss_of_a_mixture(name):
    """Beside a sum it is refused, for it is a mean."""
    model, data = tiny(name, output_router_logits=True), batch()
    theirs = model(**data)
    assert theirs.aux_loss > 0
    want = gradients(model, theirs.loss)
    patch_model(model)
    ours = model(**data)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert_same(gradients(model, ours.loss), want)
    with pytest.raises(ValueError, match="output_router_logits"):
        patch_model(model, reduction="sum")(**data)
    with pytest.raises(ValueError, match="output_router_logits"):
        model(**data, return_dict=False)


class TakesNoItems(transformers.LlamaForCausalLM):
    """As models of transformers before 4.46."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels)


def own_loss(hidden, weight, labels):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(0.75), 0])
@pytest.mark.parametrize("architecture", [transformers.LlamaForCausalLM, TakesNoItems])
@pytest.mark.parametrize(
    "settings",
    [{"label_smoothing": 0.1}, {"label_smoothing": 0.1, "reduction": "sum"}, {"loss": own_loss}],
)
def test_the_trainers_count_of_items_divides_a_mean(settings, architecture, items):
    """It is a fraction where trainers divide by ranks and micro-batches once more. Where all is
    masked the loss is zero and connected; 0 / 0 would turn weights into NaN."""
    model, data = patch_model(tiny_models.tiny_of(architecture), **settings), batch()
    beta = settings.get("label_smoothing", 0)
    if items != 0:
        divides = items is not None and "reduction" not in settings
        reduction = "sum" if divides else settings.get("reduction", "mean")
        want = expected(tiny(), data, beta, reduction) / (items if divides else 1)
        torch.testing.assert_close(model(**data, num_items_in_batch=items).loss, want)
    data["labels"].fill_(-100)
    loss = model(**data, num_items_in_batch=items).loss
    assert loss == 0
    for name, gradient in gradients(model, loss).items():
        assert not gradient.any(), name
    assert model.lm_head.weight.grad is not None


def test_patching_again_replaces_and_unpatching_restores():
    """A refused call leaves the one before in place, and a copy trains its own head."""
    model, data = tiny(), batch()
    plain = model(**data)
    patch_model(model, label_smoothing=0.5)
    assert "label_smoothing=0.5" in explain(model)
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
    patch_model(model).resize_token_embeddings(VOCABULARY + 1)
    with pytest.raises(TypeError, match="head was replaced"):
        model(**data)


@pytest.mark.parametrize("eval_logits", [True, False])
@pytest.mark.parametrize("items", [None, 7])
def test_evaluation_is_a_mean_whatever_the_training_sums(eval_logits, items):
    """As upstream's, so that it can be compared; `num_items_in_batch` divides, as ever."""
    if eval_logits and items is not None and not V5:
        pytest.skip("older models take no num_items_in_batch")
    model, data = tiny(), batch()
    want = expected(model, data, 0.0)
    if items is not None:
        want = expected(model, data, 0.0, "sum") / items
        data["num_items_in_batch"] = items
    patch_model(model, label_smoothing=0.3, reduction="sum", eval_logits=eval_logits).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**data).loss, want.detach())


@pytest.mark.parametrize("eval_logits", [True, False])
@pytest.mark.parametrize("shifted", [False, True])
def test_evaluation_ignores_the_labels_that_training_ignores(eval_logits, shifted):
    if shifted and not V5:
        pytest.skip("older models take no shift_labels")
    model, data = tiny(), batch()
    want = expected(model, data, 0.0)
    ignored = 1  # No sequence has it.
    labels = data["labels"].masked_fill(data["labels"] == -100, ignored)
    if shifted:
        data["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)
    data["labels"] = labels
    patch_model(model, ignore_index=ignored, eval_logits=eval_logits).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that training would do is left out here
        torch.testing.assert_close(model(**data).loss, want)


@pytest.mark.parametrize("eval_logits", [True, False])
@pytest.mark.parametrize("settings", [{"reduction": "sum"}, {"z_loss": 0.1}, {"loss": own_loss}])
def test_training_in_evaluation_mode_warns_for_whatever_is_left_out(settings, eval_logits):
    """Times a factor that expects a sum, the mean would train far too weakly."""
    model = patch_model(tiny(), **settings, eval_logits=eval_logits).eval()
    with pytest.warns(UserWarning, match=f"{next(iter(settings))}="):
        model(**batch())


def test_a_second_call_of_the_decoder_gives_no_warning():
    """The decoder calls the model once more, inside its forward."""
    model = patch_model(tiny(), label_smoothing=0.1)
    calls = []

    def call_once(decoder, inputs):
        calls.append("called")
        if len(calls) == 1:
            model(**batch())

    model.model.register_forward_pre_hook(call_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch()).loss.backward()


class QuantizedLinear(torch.nn.Linear):
    """As bitsandbytes' are."""

    def forward(self, hidden):
        return super().forward(hidden.round())


def with_another_linear(model):
    model.lm_head = QuantizedLinear(16, VOCABULARY)
    return model


@pytest.mark.parametrize(
    ("change", "options", "error", "named"),
    [
        (with_another_linear, {}, TypeError, "QuantizedLinear"),
        (torch.compile, {}, TypeError, "before"),
        (torch.nn.DataParallel, {}, TypeError, "before"),
        (None, {"reduction": "none"}, ValueError, "reduction"),
        (None, {"smoothing": 0.1}, TypeError, "smoothing"),
        (None, {"smoothing_target": torch.ones(3)}, ValueError, "smoothing_target"),
        (None, {"smoothing_target": torch.ones(VOCABULARY)}, ValueError, "smoothing_target"),
        (None, {"eval_logits": 1}, ValueError, "eval_logits"),
        (None, {"loss": 1}, ValueError, "loss"),
    ],
)
def test_what_cannot_be_patched(change, options, error, named):
    model = tiny()
    with pytest.raises(error, match=named):
        patch_model(change(model) if change else model, **options)


@pytest.mark.gpu
def test_the_smoothing_target_is_copied_to_the_gpu_once():
    from torch.utils._python_dispatch import TorchDispatchMode

    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default and args[0].shape == (VOCABULARY,):
                copied.append((args[0].device.type, result.device.type))
            return result

    target = torch.rand(VOCABULARY).softmax(0)
    model = patch_model(tiny(), label_smoothing=0.1, smoothing_target=target).cuda()
    data = {name: value.cuda() for name, value in batch().items()}
    with Copies():
        for _ in range(3):
            model(**data).loss.backward()
    assert copied.count(("cpu", "cuda")) == 1
