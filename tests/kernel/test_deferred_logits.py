"""What a model may do to its logits, against its own run with an `F.cross_entropy` that smooths."""

import copy
import inspect
import io
import warnings

import pytest
import torch
import torch.nn.functional as F

from smoothce import patch_model, unpatch_model

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")
from families import smoothing_cross_entropy  # noqa: E402
from tiny_models import VOCABULARY, assert_same, batch, expected, gradients, tiny  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

BETA = 0.2
V5 = int(transformers.__version__.split(".")[0]) >= 5


class WithLoss(transformers.LlamaForCausalLM):
    """A Llama whose logits and loss are made by two functions."""

    def forward(self, input_ids, attention_mask=None, labels=None, loss_scale=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.make_logits(self, self.lm_head(hidden))
        loss = None
        if labels is not None:
            loss = self.make_loss(logits, labels, attention_mask)
            if loss_scale is not None:
                loss = loss * loss_scale
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def with_loss(make_logits, make_loss=None):
    model = tiny_models.tiny_of(WithLoss)
    model.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
    model.scale = torch.nn.Parameter(torch.tensor(0.5))
    WithLoss.make_logits = staticmethod(make_logits)
    WithLoss.make_loss = staticmethod(make_loss or shifted_mean)
    return model


def as_they_are(model, logits):
    return logits


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def shifted_mean(logits, labels, mask):
    return cross_entropy(logits[:, :-1], labels[:, 1:])


def compare(model, data, **inputs):
    """Loss and gradients of the patched model are upstream's with smoothing, and so are logits."""
    with smoothing_cross_entropy(BETA):
        upstream = model(**data, **inputs)
    theirs = gradients(model, upstream.loss)
    patch_model(model, label_smoothing=BETA)
    outputs = model(**data, **inputs)
    torch.testing.assert_close(outputs.loss, upstream.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs.logits.dense(), upstream.logits, rtol=1e-4, atol=1e-5)
    assert_same(gradients(model, outputs.loss), theirs)


def in_place(model, logits):
    logits = logits.float()
    logits /= 3.0
    logits.mul_(0.5)
    return logits.tanh_() * 3.0


LOGITS = {
    "times a number": lambda model, logits: logits * 0.3,
    "a number times": lambda model, logits: 0.3 * logits,
    "by a tensor": lambda model, logits: logits / torch.tensor(2.0),
    "a tensor times": lambda model, logits: torch.tensor([0.7]) * logits,
    "capped": lambda model, logits: 2.0 * torch.tanh(logits.float() / 2.0),
    "capped by a negative number": lambda model, logits: -2.0 * torch.tanh(logits / 2.0),
    "scaled, capped and scaled": lambda model, logits: (logits * 0.5 / 2.0).tanh() * 2.0 * 1.5,
    "in place": in_place,
    "plus a bias": lambda model, logits: (logits + model.bias) * 0.5,
    "a bias plus, capped": lambda model, logits: ((model.bias + logits) / 3.0).tanh() * 3.0,
    "the whole vocabulary": lambda model, logits: logits[..., :VOCABULARY].contiguous().to("cpu"),
}


@pytest.mark.parametrize("make_logits", LOGITS.values(), ids=LOGITS)
def test_what_is_made_of_logits(make_logits):
    compare(with_loss(make_logits), batch())


def of_masked_tokens(logits, labels, mask):
    """As Qwen2-Audio and Gemma 3 leave out padding, whatever its labels are."""
    chosen = mask[:, 1:] != 0
    return torch.nn.CrossEntropyLoss()(logits[..., :-1, :][chosen], labels[:, 1:][chosen])


def of_another_ignored_token(logits, labels, mask):
    targets = labels[:, 1:].clamp(min=0).flatten()
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), targets, ignore_index=0)


def weighed_by_token(logits, labels, mask):
    each = cross_entropy(logits[:, :-1], labels[:, 1:], reduction="none")
    return (each * torch.linspace(0, 1, 24)).sum()


LOSSES = {
    "masked": of_masked_tokens,
    "transposed": lambda logits, labels, mask: F.cross_entropy(
        logits[:, :-1].transpose(0, 1).reshape(-1, VOCABULARY), labels[:, 1:].T.flatten()
    ),
    "of the last row": lambda logits, labels, mask: F.cross_entropy(
        logits[-1, :-1], labels[-1, 1:]
    ),
    "another token ignored": of_another_ignored_token,
    "weighed by token": weighed_by_token,
}


@pytest.mark.parametrize("make_loss", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_takes(make_loss):
    """Padding keeps its labels here, so that a mask counts."""
    data = batch()
    data["labels"] = data["input_ids"].clone()
    compare(with_loss(as_they_are, make_loss), data)


def test_an_argument_of_a_subclass_counts():
    compare(with_loss(as_they_are), batch(), loss_scale=2.0)


def set_in_place(model, logits):
    logits[..., 0] = -100.0
    return logits


def in_place_after_a_view(model, logits):
    view = logits[:, :-1]
    logits += model.bias
    return view


def viewed_within_the_vocabulary(logits, labels, mask):
    return F.cross_entropy(logits.view(-1), labels.flatten())


def of_log_probabilities(logits, labels, mask):
    return F.nll_loss(logits.flatten(0, 1).log_softmax(-1), labels.flatten())


REFUSED = {
    "in place after a view": (in_place_after_a_view, None),
    "a trained scale": (lambda model, logits: logits * model.scale, None),
    "a scale an entry": (lambda model, logits: logits * model.bias, None),
    "capped twice": (lambda model, logits: logits.tanh().tanh(), None),
    "a bias after the cap": (lambda model, logits: logits.tanh() + model.bias, None),
    "another activation": (lambda model, logits: torch.sigmoid(logits), None),
    "subtracted": (lambda model, logits: logits - model.bias, None),
    "set in place": (set_in_place, None),
    "a part of the vocabulary": (lambda model, logits: logits[..., :9], None),
    "a part in a view": (as_they_are, viewed_within_the_vocabulary),
    "log probabilities": (as_they_are, of_log_probabilities),
    "two losses": (as_they_are, lambda *loss: shifted_mean(*loss) + shifted_mean(*loss)),
    "no loss of logits": (as_they_are, lambda *_: torch.zeros((), requires_grad=True)),
    "classes weighed": (
        as_they_are,
        lambda logits, labels, mask: cross_entropy(logits, labels, weight=torch.ones(VOCABULARY)),
    ),
    "smoothed already": (
        as_they_are,
        lambda logits, labels, mask: cross_entropy(logits, labels, label_smoothing=0.1),
    ),
}


@pytest.mark.parametrize(("make_logits", "make_loss"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused_and_upstream_goes_on(make_logits, make_loss):
    model = with_loss(make_logits, make_loss)
    patch_model(model, label_smoothing=BETA)
    with pytest.raises(ValueError, match=r"logits|smooths its labels"):
        model(**batch())
    assert isinstance(unpatch_model(model)(batch()["input_ids"]).logits, torch.Tensor)


def test_a_given_scale_or_cap_has_to_be_the_models():
    name = "Gemma2ForCausalLM"
    patch_model(tiny(name), softcap=1.5, logit_scale=None)(**batch())
    patch_model(tiny(name), logit_scale=1.0)(**batch())
    for wrong in ({"softcap": 3.0}, {"softcap": None}, {"logit_scale": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            patch_model(tiny(name), **wrong)(**batch())


def test_token_weights_are_an_argument_of_the_forward():
    """They belong to labels, and go wherever the model takes these."""
    model, data = patch_model(tiny(), label_smoothing=BETA), batch()
    assert "token_weights" in inspect.signature(model.forward).parameters
    weights = torch.rand(data["labels"].shape)
    logits = tiny()(data["input_ids"], attention_mask=data["attention_mask"]).logits
    targets = data["labels"][:, 1:]
    each = cross_entropy(logits[:, :-1], targets, label_smoothing=BETA, reduction="none")
    kept = weights[:, 1:][targets != -100].sum()
    want = (each * weights[:, 1:].flatten()).sum() / kept
    torch.testing.assert_close(model(**data, token_weights=weights).loss, want)
    if V5:
        shifted = F.pad(targets, (0, 1), value=-100)
        moved = F.pad(weights[:, 1:], (0, 1))
        given = {**data, "shift_labels": shifted, "token_weights": moved}
        torch.testing.assert_close(model(**given).loss, want)
    with pytest.raises(ValueError, match="token_weights"):
        model(**data, token_weights=weights[:, 1:])
    plain = model.eval()(**data).loss
    torch.testing.assert_close(model(**data, token_weights=torch.ones_like(weights)).loss, plain)
    assert model(**data, token_weights=weights).loss != plain
    _, logits, *_ = model(**data, token_weights=weights, return_dict=False)
    assert isinstance(logits, torch.Tensor)


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_an_adapter_on_the_head_is_refused(first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = patch_model(tiny()) if first == "patch" else tiny()
    model = peft.get_peft_model(model, config)
    with pytest.raises(TypeError, match="head carries an adapter"):
        patch_model(model) if first == "adapter" else model.train()(**batch())


@pytest.mark.parametrize("is_patched_first", [False, True])
def test_a_head_that_is_trained_as_a_whole_beside_adapters(is_patched_first):
    """`modules_to_save`, as TRL sets it where a chat template brings new tokens."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    plain = peft.get_peft_model(tiny(), config).train()
    theirs = gradients(plain, expected(plain, batch(), BETA))
    assert any("lm_head.modules_to_save" in name for name in theirs)
    model = patch_model(tiny(), label_smoothing=BETA) if is_patched_first else tiny()
    model = peft.get_peft_model(model, config).train()
    model.load_state_dict(plain.state_dict())
    if not is_patched_first:
        patch_model(model, label_smoothing=BETA)
    assert_same(gradients(model, model(**batch()).loss), theirs)
    unpatch_model(model)
    assert isinstance(model(**batch()).logits, torch.Tensor)


def test_a_model_that_accelerate_has_unwrapped(tmp_path):
    """`keep_fp32_wrapper=False` binds the forward anew, to this model or to a copy of it."""
    accelerate = pytest.importorskip("accelerate")
    want = patch_model(tiny(), label_smoothing=BETA)(**batch()).loss
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of other tests
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare_model(patch_model(tiny(), label_smoothing=BETA))
    assert model(**batch()).loss.dtype == torch.float32
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(model(**batch()).loss, want)
    patch_model(model, label_smoothing=BETA)
    torch.testing.assert_close(model(**batch()).loss, want)
    copied = copy.deepcopy(model)
    copied(**batch()).loss.backward()
    assert copied.lm_head.weight.grad is not None and model.lm_head.weight.grad is None
    plain = unpatch_model(model)(**batch())
    torch.testing.assert_close(plain.loss, tiny()(**batch()).loss)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_with_hooks_of_accelerates(when):
    """As `device_map` puts them on; whoever puts them on again leaves the patch in place."""
    accelerate = pytest.importorskip("accelerate")
    want = patch_model(tiny(), label_smoothing=BETA)(**batch()).loss
    model = tiny()
    if when == "after":
        patch_model(model, label_smoothing=BETA)
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    if when == "before":
        patch_model(model, label_smoothing=BETA)
        model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    torch.testing.assert_close(model(**batch()).loss, want)
    unpatch_model(model)
    torch.testing.assert_close(model(**batch()).loss, tiny()(**batch()).loss)


def test_a_forward_that_takes_anything_is_followed():
    model = tiny()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    want = expected(model, batch(), BETA)
    patch_model(model, label_smoothing=BETA)
    data = batch()
    torch.testing.assert_close(model(data.pop("input_ids"), **data).loss, want)


def test_hooks_on_the_head_never_see_or_change_the_loss():
    model = patch_model(tiny(), label_smoothing=BETA)
    want = model(**batch()).loss
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append("called"))
    torch.testing.assert_close(model(**batch()).loss, want)
    assert calls == ["called"]
    model.lm_head.register_forward_hook(lambda *_: torch.ones(()))
    with pytest.raises(ValueError, match="hook on the head"):
        model(**batch())


def test_what_else_is_done_to_logits_after_a_step_is_refused():
    outputs = patch_model(tiny(), label_smoothing=BETA)(**batch())
    assert outputs.logits.shape == (3, 9, VOCABULARY)
    with pytest.raises(ValueError, match=r"\.argmax .*\.dense\(\)"):
        outputs.logits.argmax(-1)
    assert not hasattr(outputs.logits, "argmax")


def test_who_trains_around_the_loss_is_told():
    """A forward in the place of the patched one would train without smoothing in silence."""
    model, data = patch_model(tiny(), label_smoothing=BETA), batch()
    ids = data["input_ids"]
    with pytest.warns(UserWarning, match=r"no labels.*unpatch_model"):
        model(ids)
    with pytest.warns(UserWarning, match=r"around its loss.*patch_trainer"):
        model.model(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()(**data).loss.backward()
        model.generate(ids, max_new_tokens=2)
        patch_model(tiny()).eval()(**data)  # nothing to smooth

    def another_forward(self, input_ids, **inputs):
        return self.model(input_ids)

    model.forward = another_forward.__get__(model)
    with pytest.raises(ValueError, match=r"without label_smoothing=0.2.*unpatch_model\(model\)"):
        model.train()(**data)


def test_a_saved_model_comes_back_patched():
    """As from `torch.save`, or sent to another process: with its settings, and undone likewise."""
    target = torch.rand(VOCABULARY).softmax(0)
    model = patch_model(tiny(), label_smoothing=0.1, smoothing_target=target)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).train()
    assert torch.equal(loaded(**batch()).loss, model(**batch()).loss)
    unpatch_model(loaded)
    assert torch.equal(loaded(**batch()).logits, unpatch_model(model)(**batch()).logits)


@pytest.mark.skipif(not V5, reason="older models call CrossEntropyLoss, which breaks the graph")
def test_a_compiled_forward_is_one_graph():
    """Under a softcap and autocast."""
    model = patch_model(tiny("Gemma2ForCausalLM"), label_smoothing=BETA)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for each in (compiled, model):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = each(**batch())
        found.append([outputs.loss.detach(), outputs.logits.dense()])
        found[-1] += gradients(model, outputs.loss).values()
    torch.testing.assert_close(*found)
