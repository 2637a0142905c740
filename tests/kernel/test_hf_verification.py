"""Which models `patch_model` accepts: those whose loss it can show to be the fused one."""

import contextlib
import copy
import functools
import inspect
import types
import warnings

import pytest
import torch

from smoothce import patch_model

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")
from tiny_models import (  # noqa: E402
    VOCABULARY,
    assert_same,
    batch,
    expected,
    gradients,
    tiny,
    tiny_of,
)

from smoothce.hf_patch import families  # noqa: E402
from smoothce.hf_patch.logit_map import LogitMap  # noqa: E402

V5 = int(transformers.__version__.split(".")[0]) >= 5


@pytest.mark.parametrize(("most", "ranks", "threads"), [(0, "1", 6), (0, "3", 2), (2**28, "1", 1)])
def test_a_large_model_on_the_cpu_is_run_on_all_processors_of_its_rank(
    monkeypatch, most, ranks, threads
):
    """torchrun gives each rank one thread, on which a model that FSDP is to shard takes long."""
    monkeypatch.setattr("smoothce.hf_patch.probe.MOST_ON_ONE_THREAD", most)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    before = torch.get_num_threads()
    used = set()
    model = tiny()
    model.model.register_forward_pre_hook(lambda *_: used.add(torch.get_num_threads()))
    torch.set_num_threads(1)
    try:
        patch_model(model)
        assert used == {threads}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "logit_scale", "softcap"),
    [
        ("LlamaForCausalLM", None, None),
        ("Qwen2ForCausalLM", None, None),
        ("Gemma2ForCausalLM", None, 1.5),
        ("Cohere2ForCausalLM", 0.3, None),
        ("GraniteForCausalLM", 1 / 6.0, None),
        ("HyperCLOVAXForCausalLM", 6.0, None),  # multiplies where Granite divides
        ("xLSTMForCausalLM", None, 1.5),
        ("GPT2LMHeadModel", None, None),
        ("GptOssForCausalLM", None, None),
    ],
)
def test_a_family_is_accepted_with_its_scale_and_cap(name, logit_scale, softcap):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    verdict = families.verdict(name)
    assert verdict.accepted and not verdict.wrong, verdict
    model = patch_model(families.tiny_model(name))
    logit_map = getattr(model, "lm_head", model)._smoothce_head_forward.logit_map
    assert logit_map == LogitMap(logit_scale, softcap)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CpmAntForCausalLM", "is not the mean cross-entropy of its logits and the next tokens"),
        ("XLNetLMHeadModel", "is not the mean cross-entropy"),
        ("MBartForCausalLM", "calls the decoder 0 times"),
        ("BertLMHeadModel", "has no head"),
        ("InklingForCausalLM", "last_hidden_state is not lm_head's input"),
        ("CamembertForCausalLM", "must be a torch.nn.Linear"),
    ],
)
def test_a_family_with_another_loss_is_refused_whatever_is_given(name, message):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = families.tiny_model(name)
    for given in ({}, {"softcap": None, "logit_scale": None}):
        with pytest.raises((TypeError, ValueError), match=message):
            patch_model(model, **given)


@pytest.mark.slow
def test_no_class_is_accepted_and_computes_another_loss():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = [families.verdict(name) for name in families.class_names()]
    assert [verdict for verdict in verdicts if verdict.wrong] == []
    accepted = sum(verdict.accepted for verdict in verdicts)
    assert accepted >= (100 if V5 else 20), accepted


@pytest.mark.slow
@pytest.mark.parametrize("router", ["config", "argument"])
def test_no_mixture_is_accepted_and_computes_another_auxiliary_loss(router):
    """A class whose auxiliary loss is not known raises where it is asked for."""
    compared = 0
    for name in families.class_names():
        settings = {"output_router_logits": True} if router == "config" else {}
        data = families.batch()
        if router == "argument":
            data["output_router_logits"] = True
        try:
            model = families.tiny_model(name, **settings)
            if not hasattr(model.config, "output_router_logits"):
                continue
            theirs = families.seeded_outputs(model, data).loss
            ours = families.seeded_outputs(patch_model(model), data).loss
        except Exception:
            continue
        torch.testing.assert_close(ours, theirs, msg=name)
        compared += 1
    assert compared >= (10 if V5 else 1)


class Scaled(transformers.LlamaForCausalLM):
    """A model of somebody's own: what it does to logits has a name that nobody knows."""

    def logits_of(self, logits):
        return 0.25 * logits

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        output.logits = self.logits_of(output.logits)
        if labels is not None:
            output.loss = self.loss_of(output.logits, labels)
        return output

    def loss_of(self, logits, labels):
        targets = labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)


class Capped(Scaled):
    def logits_of(self, logits):
        return 50 * torch.tanh(0.5 * logits / 50)


class Plain(Scaled):
    def logits_of(self, logits):
        return logits


class Masked(Scaled):
    """As models that never answer with an image token."""

    def logits_of(self, logits):
        return torch.cat([logits[..., :3] - 1e9, logits[..., 3:]], -1)


class LearnedScale(Scaled):
    def __init__(self, config):
        super().__init__(config)
        self.logit_scale = torch.nn.Parameter(torch.ones(()))

    def logits_of(self, logits):
        return logits * self.logit_scale


class Unshifted(Plain):
    def loss_of(self, logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class MeanOfRows(Plain):
    def loss_of(self, logits, labels):
        rows = []
        for row, row_labels in zip(logits, labels, strict=True):
            rows.append(super().loss_of(row[None], row_labels[None]))
        return torch.stack(rows).mean()


class Penalized(Plain):
    def loss_of(self, logits, labels):
        return super().loss_of(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


class TwiceThroughTheHead(Plain):
    def loss_of(self, logits, labels):
        self.lm_head(torch.zeros(1, 1, 16))
        return super().loss_of(logits, labels)


class AnotherDecoderInput(Plain):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids.flip(1) if input_ids is not None else None, **kwargs)


@pytest.mark.parametrize(
    ("architecture", "advice"),
    [
        (Scaled, "pass logit_scale=0.25 and softcap=None"),
        (Capped, "pass logit_scale=0.5 and softcap=50.0"),
    ],
)
def test_a_refusal_says_what_to_pass(architecture, advice):
    model, data = tiny_of(architecture), batch()
    with pytest.raises(ValueError, match=advice) as refusal:
        patch_model(model, label_smoothing=0.1)
    assert "largest difference" in str(refusal.value)
    given = {}
    for name, value in (part.split("=") for part in advice.removeprefix("pass ").split(" and ")):
        given[name] = None if value == "None" else float(value)
    theirs = gradients(model, expected(model, data, 0.1))
    patch_model(model, label_smoothing=0.1, **given)
    assert_same(gradients(model, model(**data).loss), theirs)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (Masked, "no scale and cap describe it"),
        (LearnedScale, "logit_scale, which would get no gradient"),
        (Unshifted, "not the mean cross-entropy"),
        (MeanOfRows, "not the mean cross-entropy"),
        (Penalized, "not the mean cross-entropy"),
        (TwiceThroughTheHead, "lm_head 2 times"),
        (AnotherDecoderInput, "not the patched one"),
    ],
)
def test_a_model_of_somebodys_own_with_another_loss_is_refused(architecture, message):
    with pytest.raises(ValueError, match=message):
        patch_model(tiny_of(architecture), label_smoothing=0.1)


def test_a_model_of_somebodys_own_with_the_same_loss_is_accepted():
    model = tiny_of(Plain)
    theirs = gradients(model, expected(model, batch(), 0.1))
    patch_model(model, label_smoothing=0.1)
    assert_same(gradients(model, model(**batch()).loss), theirs)


class Bare(torch.nn.Module):
    """A model of somebody's own that has neither transformers' base class nor a configuration."""

    def __init__(self, decoder_of):
        super().__init__()
        self.model = decoder_of.model
        self.lm_head = decoder_of.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_model_without_a_configuration_is_accepted():
    model = Bare(tiny())
    theirs = gradients(model, expected(model, batch(), 0.1))
    patch_model(model, label_smoothing=0.1)
    assert_same(gradients(model, model(**batch()).loss), theirs)


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"logit_scale": 0.5}, {"softcap": None}])
def test_a_wrong_scale_or_cap_is_refused(given):
    with pytest.raises(ValueError, match=r"pass logit_scale=1\.0 and softcap=1\.5"):
        patch_model(tiny("Gemma2ForCausalLM"), **given)


class Upcast(Plain):
    """As transformers 4 made fp32 of a 16-bit head's logits."""

    def logits_of(self, logits):
        return logits.float()


def test_fp32_logits_of_a_16_bit_head():
    patch_model(tiny_of(Upcast).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM"])
def test_other_precisions(name, dtype):
    patch_model(tiny(name).to(dtype))
    model = tiny_of(Capped).to(dtype)
    with pytest.raises(ValueError, match=r"pass logit_scale=0.5 and softcap=50.0"):
        patch_model(model)
    patch_model(model, logit_scale=0.5, softcap=50.0)


def test_verification_leaves_nothing_behind():
    """Random states, modes, hooks, gradients, the cache: as before, patched or refused."""
    for architecture in (transformers.LlamaForCausalLM, Unshifted):
        model = tiny_of(architecture, attention_dropout=0.5)
        model.model.layers[1].eval()
        modes = [module.training for module in model.modules()]
        state = torch.random.get_rng_state()
        attention = model.config._attn_implementation
        try:
            patch_model(model)
            hooks = 1  # the decoder's
        except ValueError:
            hooks = 0
        assert torch.equal(torch.random.get_rng_state(), state)
        assert [module.training for module in model.modules()] == modes
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model.config._attn_implementation == attention
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
        assert not any(module._forward_hooks for module in model.modules())
        assert ("forward" in vars(model.lm_head)) == bool(hooks)


def test_attention_that_wants_other_inputs_is_put_aside():
    """As packed rows' attention wants their bounds, and flash attention a GPU."""

    def attention(*args, bounds, **kwargs):
        raise AssertionError("called without bounds")

    functions = pytest.importorskip("transformers.modeling_utils")
    if not hasattr(functions, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("attention is chosen when the model is made")
    functions.ALL_ATTENTION_FUNCTIONS.register("wants_bounds", attention)
    model = tiny()
    model.config._attn_implementation = "wants_bounds"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model)
    assert model.config._attn_implementation == "wants_bounds"


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="since torch 2.6")
def test_compiled_layers_are_not_compiled_to_be_verified():
    def backend(graph, inputs):
        raise AssertionError("compiled")

    model = tiny()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    patch_model(model)


def on_meta(architecture=transformers.LlamaForCausalLM):
    with torch.device("meta"):
        return tiny_of(architecture)


def filled(model, source):
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    for name, module in source.named_modules():  # what no state_dict has
        if hasattr(module, "inv_freq"):
            rotary = model.get_submodule(name)
            rotary.inv_freq = module.inv_freq.clone()
            rotary.original_inv_freq = module.inv_freq.clone()
    return model.train()


def test_a_model_on_the_meta_device_is_verified_with_its_first_batch():
    model = on_meta()
    with pytest.warns(UserWarning, match="first training batch comes, not now: .*meta device"):
        patch_model(model, label_smoothing=0.1)
    filled(model, tiny())
    source = tiny()
    theirs = gradients(source, expected(source, batch(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(**batch()).loss
    assert_same(gradients(model, loss), theirs)


def test_the_first_batch_refuses_a_model_that_could_not_be_verified_before():
    model = on_meta(Unshifted)
    with pytest.warns(UserWarning, match="first training batch"):
        patch_model(model, label_smoothing=0.1)
    filled(model, tiny_of(Unshifted))
    with pytest.raises(ValueError, match="not the mean cross-entropy"):
        model(**batch())


def test_the_first_batch_finds_the_scale_of_a_model_that_could_not_be_verified_before():
    model = on_meta(transformers.CohereForCausalLM)
    with pytest.warns(UserWarning, match="first training batch"):
        patch_model(model, label_smoothing=0.1)
    source = tiny_of(transformers.CohereForCausalLM)
    filled(model, source)
    torch.testing.assert_close(model(**batch()).loss, expected(source, batch(), 0.1))
    assert model.lm_head._smoothce_head_forward.logit_map.logit_scale == source.config.logit_scale


def test_a_model_that_cannot_run_is_refused_with_its_first_batch():
    model = tiny()
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="not now: its forward on 2 × 8 tokens raises"):
        patch_model(model)
    with pytest.raises(ValueError, match="cannot tell whether LlamaForCausalLM's loss is"):
        model(**batch())


def test_a_refused_call_leaves_the_earlier_patch():
    model = patch_model(tiny("Gemma2ForCausalLM"), label_smoothing=0.3)
    loss = model(**batch()).loss
    with pytest.raises(ValueError, match="softcap"):
        patch_model(model, softcap=9.0)
    assert torch.equal(model(**batch()).loss, loss)


@pytest.mark.parametrize(
    ("keyword", "value", "said"),
    [
        ("eval_logits", "no", "eval_logits must be True or False, not 'no'"),
        ("loss", 3, r"loss must be a function .* not 3"),
        ("softcap", "from_model", "softcap must be None or a positive number"),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused(keyword, value, said):
    with pytest.raises(ValueError, match=said):
        patch_model(tiny(), label_smoothing=0.1, **{keyword: value})


def test_what_is_said_of_the_cap_is_none_a_number_or_nothing():
    """Left out, the cap is read; None says that the model has none, which is verified likewise."""
    default = inspect.signature(patch_model).parameters["softcap"].default
    assert repr(default) == "FROM_MODEL"
    for settings in ({}, {"softcap": 1.5}, {"softcap": default}):
        model = patch_model(tiny("Gemma2ForCausalLM"), label_smoothing=0.1, **settings)
        assert model.lm_head._smoothce_head_forward.logit_map == LogitMap(None, 1.5)
    with pytest.raises(ValueError, match="logit_scale=None and softcap=None do not turn"):
        patch_model(tiny("Gemma2ForCausalLM"), softcap=None)


def test_the_keywords_are_in_the_signature():
    """An option of the loss is a keyword of `patch_model`, and one that editors complete."""
    from smoothce.hf_patch.settings import SETTING_OPTIONS, PatchSettings

    assert {*SETTING_OPTIONS, "logit_scale", "softcap"} <= set(PatchSettings.__annotations__)
    assert set(inspect.signature(patch_model).parameters) == {
        "model",
        *PatchSettings.__annotations__,
    }


def test_a_copy_is_verified_no_more():
    model = copy.deepcopy(patch_model(tiny("Gemma2ForCausalLM"), label_smoothing=0.1))
    torch.testing.assert_close(
        model(**batch()).loss, expected(tiny("Gemma2ForCausalLM"), batch(), 0.1)
    )
    assert model._smoothce_model_forward.verified.logit_map.softcap == 1.5
    assert model.lm_head.out_features == VOCABULARY


def halves(head, args, logits):
    return logits / 2


def halves_in_place(head, args, logits):
    logits.div_(2)


def halves_with_keywords(head, args, keywords, logits):
    return logits / 2


def drops_an_entry(head, args, logits):
    return logits[..., :-1]


def only_looks(head, args, logits):
    assert logits is not None


class Halves:
    def __call__(self, head, args, logits):
        return logits / 2


CHANGING_HOOKS = [halves, halves_in_place, Halves(), functools.partial(halves)]


@pytest.mark.parametrize("hook", CHANGING_HOOKS)
def test_a_hook_that_changes_logits_is_refused_where_it_is_there_already(hook):
    model = tiny()
    model.lm_head.register_forward_hook(hook)
    with pytest.raises(ValueError, match="patch_model refuses LlamaForCausalLM"):
        patch_model(model, label_smoothing=0.1)


@pytest.mark.parametrize("hook", [*CHANGING_HOOKS, halves_with_keywords, drops_an_entry])
def test_a_hook_that_changes_logits_is_refused_where_it_comes_later(hook):
    model = patch_model(tiny(), label_smoothing=0.1)
    model(**batch())
    handle = model.lm_head.register_forward_hook(hook, with_kwargs=hook is halves_with_keywords)
    with pytest.raises(ValueError, match="on lm_head changes the logits"):
        model(**batch())
    handle.remove()
    model(**batch())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_only_looks_stays(when):
    model = tiny()
    if when == "before":
        model.lm_head.register_forward_hook(only_looks)
    patch_model(model, label_smoothing=0.1)
    if when == "after":
        model.lm_head.register_forward_hook(only_looks)
    torch.testing.assert_close(model(**batch()).loss, expected(tiny(), batch(), 0.1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_raises_for_the_ramp_is_named(when):
    """It may want its own batch's shape, and can then not be tried."""

    def wants_two_rows(head, args, logits):
        if logits.dim() == 3 and logits.shape[0] != 2:  # in training it gets the loss, ()
            raise IndexError("two rows only")

    model = tiny()
    if when == "before":
        model.lm_head.register_forward_hook(wants_two_rows)
        with pytest.raises(ValueError, match=r"wants_two_rows on lm_head raises IndexError: two"):
            patch_model(model, label_smoothing=0.1)
    else:
        patch_model(model, label_smoothing=0.1)
        model.lm_head.register_forward_hook(wants_two_rows)
        with pytest.raises(ValueError, match=r"wants_two_rows on lm_head raises IndexError: two"):
            model(**batch())


def test_a_hook_that_looks_by_the_heads_weight_stays_on_a_16_bit_head():
    """What it is tried with has the head's dtype, as hidden states have."""

    def looks_by_weight(head, args, logits):
        args[0] @ head.weight.T

    model = tiny().to(torch.bfloat16)
    model.lm_head.register_forward_hook(looks_by_weight)
    patch_model(model, label_smoothing=0.1)


def test_a_high_cap_is_seen_where_torch_makes_16_bit_tensors():
    class HighlyCapped(Plain):
        def logits_of(self, logits):
            return 4000 * torch.tanh(logits / 4000)

    model = tiny_of(HighlyCapped)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(ValueError, match=r"pass logit_scale=1\.0 and softcap="):
            patch_model(model)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_number_of_the_outer_configuration_is_a_candidate_beside_the_inner_one():
    class OuterScale(Plain):
        def logits_of(self, logits):
            return self.config.logit_scale * logits

    model = tiny_of(OuterScale)
    text_config = copy.deepcopy(model.config)
    text_config.logit_scale = 0.25
    model.config.logit_scale = 0.5
    model.config.get_text_config = lambda *args, **kwargs: text_config
    patch_model(model)
    with pytest.raises(
        ValueError, match=r"config\.logit_scale=0\.5, text_config\.logit_scale=0\.25"
    ):
        patch_model(model, logit_scale=0.1)


def test_random_states_of_every_kind_of_device_are_kept(monkeypatch):
    from smoothce.hf_patch.probe import undisturbed

    kept = []

    def fork_rng(devices, device_type=None):
        kept.append((device_type, [str(device) for device in devices]))
        return contextlib.nullcontext()

    class OnTwoKinds(torch.nn.Module):
        def parameters(self, recurse=True):
            for name in ("cpu", "cuda:0", "xpu:0", "cuda:1"):
                yield types.SimpleNamespace(device=torch.device(name))

    monkeypatch.setattr("torch.random.fork_rng", fork_rng)
    with undisturbed(OnTwoKinds()):
        pass
    assert ("cuda", ["cuda:0", "cuda:1"]) in kept and ("xpu", ["xpu:0"]) in kept


def test_a_pre_hook_that_changes_hidden_states_works_on_both():
    def doubles(head, args):
        return (args[0] * 2, *args[1:])

    model = patch_model(tiny(), label_smoothing=0.1)
    model.lm_head.register_forward_pre_hook(doubles)
    plain = tiny()
    plain.lm_head.register_forward_pre_hook(doubles)
    torch.testing.assert_close(model(**batch()).loss, expected(plain, batch(), 0.1))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Gemma2ForCausalLM", lambda m: setattr(m.config, "final_logit_softcapping", 9.0), "1.5"),
        ("Gemma2ForCausalLM", lambda m: setattr(m.config, "final_logit_softcapping", None), "None"),
        ("GraniteForCausalLM", lambda m: setattr(m.config, "logits_scaling", 2.0), "6.0"),
        ("CohereForCausalLM", lambda m: setattr(m, "logit_scale", 2.0), "0.3"),
    ],
)
def test_a_scale_or_cap_that_is_changed_later_is_refused(name, change, said):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = patch_model(tiny(name), label_smoothing=0.1)
    model(**batch())
    change(model)
    with pytest.raises(ValueError, match=f"{said}.*call patch_model again"):
        model(**batch())
    patch_model(model, label_smoothing=0.1)
    fresh = tiny(name)
    change(fresh)
    torch.testing.assert_close(model(**batch()).loss, expected(fresh, batch(), 0.1))


def test_a_head_whose_forward_is_wrapped_later_is_refused():
    model = patch_model(tiny(), label_smoothing=0.1)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2
    with pytest.raises(TypeError, match=r"lm_head.forward was wrapped after patch_model"):
        model(**batch())


def test_a_cap_that_is_changed_under_compile_is_refused():
    model = patch_model(tiny("Gemma2ForCausalLM"), label_smoothing=0.1)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(
        compiled(**batch()).loss, expected(tiny("Gemma2ForCausalLM"), batch(), 0.1)
    )
    assert model._smoothce_model_forward.gave_loss_in_training
    model.config.final_logit_softcapping = 9.0
    with pytest.raises(ValueError, match="call patch_model again"):
        compiled(**batch())


def patched_on_meta():
    """A patched model that has its weights only now, so that it is verified with its next batch."""
    model = on_meta()
    with pytest.warns(UserWarning, match="first training batch"):
        patch_model(model, label_smoothing=0.1)
    return filled(model, tiny())


def test_a_model_that_could_not_run_before_is_verified_under_compile():
    torch.compiler.reset()
    model = patched_on_meta()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="something trains a patched model")
        for _ in range(2):
            torch.testing.assert_close(compiled(**batch()).loss, expected(tiny(), batch(), 0.1))
    assert model._smoothce_model_forward.verified is not None


def test_a_model_that_could_not_run_before_and_is_one_graph_now_is_refused():
    torch.compiler.reset()
    model = patched_on_meta()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="call it once, in training mode with labels"):
        compiled(**batch())
    model(**batch())
    torch.compiler.reset()
    torch.testing.assert_close(compiled(**batch()).loss, expected(tiny(), batch(), 0.1))


def test_compiled_code_that_goes_on_in_python_gives_no_warning():
    """A call that raises under compile leaves the patched forward half compiled, for all models:
    then its decoder is called from Python."""
    torch.compiler.reset()
    model = patch_model(tiny("Gemma2ForCausalLM"), label_smoothing=0.1)
    compiled = torch.compile(model, backend="eager")
    compiled(**batch())
    model.config.final_logit_softcapping = 9.0
    with pytest.raises(ValueError, match="call patch_model again"):
        compiled(**batch())
    another = torch.compile(patched_on_meta(), backend="eager", fullgraph=True)
    with warnings.catch_warnings(), contextlib.suppress(torch._dynamo.exc.Unsupported):
        warnings.filterwarnings("error", message="something trains a patched model")
        another(**batch())
    torch.compiler.reset()


def test_a_hook_under_compile_that_changes_logits_is_refused():
    model = patch_model(tiny(), label_smoothing=0.1)
    compiled = torch.compile(model, backend="eager")
    compiled(**batch())
    model.lm_head.register_forward_hook(halves)
    torch.compiler.reset()
    with pytest.raises(ValueError, match=r"halves on lm_head changes the logits"):
        compiled(**batch())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_hook_under_compile_that_only_looks_stays(fullgraph):
    model = tiny()
    model.lm_head.register_forward_hook(only_looks)
    patch_model(model, label_smoothing=0.1)
    found = torch.compile(model, backend="eager", fullgraph=fullgraph)(**batch()).loss
    torch.testing.assert_close(found, expected(tiny(), batch(), 0.1))


def test_a_hook_on_all_modules_that_changes_logits_is_refused():
    def doubles(module, args, output):
        return output * 2 if isinstance(module, torch.nn.Linear) else None

    model = patch_model(tiny(), label_smoothing=0.1)
    handle = torch.nn.modules.module.register_module_forward_hook(doubles)
    try:
        with pytest.raises(ValueError, match="doubles on lm_head changes the logits"):
            model(**batch())
    finally:
        handle.remove()


def test_a_hook_that_only_looks_gets_no_invented_logits_at_every_step():
    shapes = []
    model = patch_model(tiny(), label_smoothing=0.1)
    model.lm_head.register_forward_hook(lambda head, args, logits: shapes.append(logits.shape))
    for _ in range(3):
        model(**batch())
    assert shapes == [(1, 2, VOCABULARY), (), (), ()]


def test_hooks_are_tried_without_reading_the_heads_weight():
    """Which under ZeRO-3 would gather it for the whole step, outside the head's forward."""
    from smoothce.hf_patch.head_hooks import HeadHooks

    read = []

    class Parameters(dict):  # as ZeRO-3 puts one into each module
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    head = torch.nn.Linear(4, 6)
    head.register_forward_hook(only_looks)
    head.__dict__["_parameters"] = Parameters(head._parameters)
    HeadHooks().admit(head, "lm_head")
    assert read == []


def test_a_hook_that_changes_logits_in_training_alone_is_refused():
    def doubles(head, args, logits):
        return logits * 2 if head.training else None

    model = tiny().eval()
    model.lm_head.register_forward_hook(doubles)
    with pytest.raises(ValueError, match="in training mode"):
        patch_model(model, label_smoothing=0.1)


class DropoutBeforeHead(torch.nn.Module):
    """A model of somebody's own, whose forward does more in training."""

    def __init__(self, inner):
        super().__init__()
        self.model = inner.model
        self.lm_head = inner.lm_head
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.logits_of(hidden)
        targets = labels[:, 1:].flatten()
        flat = logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(flat, targets) + self.penalty(logits)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    def logits_of(self, hidden):
        return self.lm_head(self.dropout(hidden))

    def penalty(self, logits):
        return 0.0


class DropoutAfterHead(DropoutBeforeHead):
    def logits_of(self, hidden):
        return self.dropout(self.lm_head(hidden))


class PenaltyInTraining(DropoutBeforeHead):
    def logits_of(self, hidden):
        return self.lm_head(hidden)

    def penalty(self, logits):
        return 0.1 * logits.logsumexp(-1).square().mean() if self.training else 0.0


@pytest.mark.parametrize("architecture", [DropoutBeforeHead, DropoutAfterHead, PenaltyInTraining])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_what_acts_in_training_alone_is_seen(architecture, mode):
    model = architecture(tiny())
    getattr(model, mode)()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="in training mode"):
        patch_model(model, label_smoothing=0.1)
    assert [module.training for module in model.modules()] == modes


class NoLossInTraining(Plain):
    def loss_of(self, logits, labels):
        return None if self.training else super().loss_of(logits, labels)


def test_a_model_that_returns_no_loss_in_training_is_refused():
    with pytest.raises(ValueError, match="in training mode its forward does not return a loss"):
        patch_model(tiny_of(NoLossInTraining), label_smoothing=0.1)


class GradientInTraining(Plain):
    """A parameter that has a gradient in training alone, and never a part in the loss's value."""

    def __init__(self, config):
        super().__init__(config)
        self.outside = torch.nn.Parameter(torch.ones(()))

    def loss_of(self, logits, labels):
        loss = super().loss_of(logits, labels)
        if self.training:
            loss = loss + self.outside - self.outside.detach()
        return loss


def test_a_parameter_that_is_used_in_training_alone_is_refused():
    with pytest.raises(ValueError, match="outside, which would get no gradient, changes"):
        patch_model(tiny_of(GradientInTraining), label_smoothing=0.1)


class AttentionThatFails(Plain):
    def forward(self, *args, **kwargs):
        raise RuntimeError(f"no {self.config._attn_implementation} here")


def test_both_reasons_are_said_of_a_model_that_runs_with_no_attention():
    model = tiny_of(AttentionThatFails)
    model.config._attn_implementation = "sdpa"
    with pytest.warns(UserWarning, match=r"no sdpa here; with plain attention, .*no eager here"):
        patch_model(model, label_smoothing=0.1)


class BiasOutside(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.logit_bias = torch.nn.Parameter(torch.zeros(config.vocab_size))

    def logits_of(self, logits):
        return logits + self.logit_bias


def test_a_parameter_outside_that_is_trained_later_is_refused():
    model = tiny_of(BiasOutside)
    torch.nn.init.zeros_(model.logit_bias)
    model.logit_bias.requires_grad_(False)
    patch_model(model, label_smoothing=0.1)
    model(**batch())
    model.logit_bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"logit_bias is trained now.*call patch_model again"):
        model(**batch())


class ScaledByConfig(Scaled):
    def logits_of(self, logits):
        return self.config.unheard_of * logits


def test_a_given_scale_that_is_changed_under_its_own_name_is_refused():
    model = tiny_of(ScaledByConfig, unheard_of=3.0)
    patch_model(model, label_smoothing=0.1, logit_scale=3.0)
    model(**batch())
    model.config.unheard_of = 2.0
    with pytest.raises(ValueError, match=r"unheard_of was 3.0 .* is 2.0 now: call patch_model"):
        model(**batch())


class ScaledByModule(Scaled):
    def __init__(self, config):
        super().__init__(config)
        self.my_scale = 2

    def logits_of(self, logits):
        return self.my_scale * logits


def test_a_given_scale_that_a_whole_number_holds_is_followed():
    model = tiny_of(ScaledByModule)
    patch_model(model, label_smoothing=0.1, logit_scale=2.0)
    model(**batch())
    model.my_scale = 3
    with pytest.raises(ValueError, match=r"my_scale was 2 .* is 3 now: call patch_model again"):
        model(**batch())


@pytest.mark.parametrize("given", [True, False])
def test_an_attribute_that_holds_the_scale_by_chance_may_change(given):
    architecture = ScaledByConfig if given else transformers.CohereForCausalLM
    name = "unheard_of" if given else "logit_scale"
    model = tiny_of(architecture, attention_dropout=0.5, **{name: 0.5})
    patch_model(model, label_smoothing=0.1, **({"logit_scale": 0.5} if given else {}))
    assert model.config.attention_dropout == 0.5
    model.config.attention_dropout = 0.1
    model(**batch())
    setattr(model.config, name, 0.25)
    with pytest.raises(ValueError, match=rf"{name} was 0.5 .* is 0.25 now"):
        model(**batch())


@pytest.mark.skipif(not V5, reason="transformers 4 has no such attribute")
def test_a_loss_function_that_is_set_later_is_refused():
    model = patch_model(tiny(), label_smoothing=0.1)
    model(**batch())
    model.loss_function = lambda *args, **kwargs: torch.zeros(())
    with pytest.raises(ValueError, match=r"_loss_function was .*call patch_model again"):
        model(**batch())


class SlightlyScaled(Scaled):
    def logits_of(self, logits):
        return (self.config.logit_scale * logits).to(torch.bfloat16)

    def loss_of(self, logits, labels):
        return super().loss_of(logits.float(), labels)


def test_a_scale_that_the_rounding_of_logits_would_hide_is_found():
    model = tiny_of(SlightlyScaled, logit_scale=1.02).to(torch.bfloat16)
    patch_model(model)
    assert model.lm_head._smoothce_head_forward.logit_map.logit_scale == 1.02


def test_attention_inside_configurations_is_restored():
    """To set a configuration's attention sets those inside it too."""
    import types

    from smoothce.hf_patch.probe import plain_attention

    whole = transformers.LlavaConfig()
    whole._attn_implementation = "sdpa"
    whole.vision_config._attn_implementation = "flash_attention_2"
    model = types.SimpleNamespace(config=whole)
    with plain_attention(model):
        assert whole.vision_config._attn_implementation == "eager"
    assert whole._attn_implementation == "sdpa"
    assert whole.text_config._attn_implementation == "sdpa"
    assert whole.vision_config._attn_implementation == "flash_attention_2"


def test_checkpointed_layers_are_no_sharded_ones():
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = tiny()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = wrapper.checkpoint_wrapper(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(model, label_smoothing=0.1)


def test_an_auxiliary_loss_that_is_turned_on_later_is_refused_until_it_is_verified():
    model = patch_model(tiny("MixtralForCausalLM"), label_smoothing=0.1)
    model(**batch())
    model.config.output_router_logits = True
    with pytest.raises(
        ValueError, match=r"output_router_logits was False .*call patch_model again"
    ):
        model(**batch())
    patch_model(model, label_smoothing=0.1)
    assert model(**batch()).aux_loss is not None


class BufferOutside(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("outside", torch.zeros(config.vocab_size))

    def logits_of(self, logits):
        return logits + self.outside


@pytest.mark.parametrize("architecture", [BiasOutside, BufferOutside])
def test_a_value_that_is_loaded_outside_later_is_seen(architecture):
    model = tiny_of(architecture)
    name = "outside" if architecture is BufferOutside else "logit_bias"
    tensor = getattr(model, name)
    tensor.requires_grad_(False).zero_()
    patch_model(model, label_smoothing=0.1)
    model(**batch())
    verified = model._smoothce_model_forward.verified
    model.load_state_dict(model.state_dict())  # as DistributedDataParallel does, value for value
    model(**batch())
    assert model._smoothce_model_forward.verified is verified
    state = model.state_dict()
    state[name] = torch.linspace(0, 5, VOCABULARY)
    model.load_state_dict(state)
    with pytest.raises(ValueError, match="no scale and cap describe it"):
        model(**batch())


class ScaledBiasOutside(BiasOutside):
    """Its logits also have a scale of a known name."""

    def logits_of(self, logits):
        return self.config.logit_scale * super().logits_of(logits)


def test_a_scale_that_a_checkpoint_changes_with_a_value_outside_is_refused():
    """The new value alone would have the model verified once more, with the new scale."""
    model = tiny_of(ScaledBiasOutside, logit_scale=0.5)
    model.logit_bias.requires_grad_(False).zero_()
    patch_model(model, label_smoothing=0.1)
    model.config.logit_scale = 0.25
    model.logit_bias.data = torch.zeros(VOCABULARY, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"logit_scale was 0\.5 .* and is 0\.25 now"):
        model(**batch())


def replaced(model, name, value, how):
    """Give a model's tensor another value in one of the ways that torch has."""
    if how == "assigned":
        model.load_state_dict({**model.state_dict(), name: value}, assign=True)
        getattr(model, name).requires_grad_(False)
    else:
        getattr(model, name).data = value


@pytest.mark.parametrize("how", ["assigned", "data"])
@pytest.mark.parametrize("architecture", [BiasOutside, BufferOutside])
def test_a_tensor_that_is_replaced_outside_later_is_seen(architecture, how):
    """A new tensor counts anew how often it is written to: an equal count is no equal value."""
    model = tiny_of(architecture)
    name = "outside" if architecture is BufferOutside else "logit_bias"
    getattr(model, name).requires_grad_(False).zero_()
    patch_model(model, label_smoothing=0.1)
    model(**batch())
    verified = model._smoothce_model_forward.verified
    for _ in range(4):  # also tensors of one count each
        replaced(model, name, torch.zeros(VOCABULARY), how)
        model(**batch())
    assert model._smoothce_model_forward.verified is verified
    for count in range(4):
        value = torch.linspace(0, 5, VOCABULARY)
        for _ in range(count):
            value.add_(0)
        replaced(model, name, value, how)
        with pytest.raises(ValueError, match="no scale and cap describe it"):
            model(**batch())


class ScaleInABuffer(Plain):
    """Its scale has a known name, and is a tensor of as many numbers as logits."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("logit_scale", torch.full((config.vocab_size,), 0.5))

    def logits_of(self, logits):
        return logits * self.logit_scale


def test_a_scale_that_is_a_tensor_is_followed_by_its_value():
    model = patch_model(tiny_of(ScaleInABuffer), label_smoothing=0.1, logit_scale=0.5)
    model(**batch())
    model.logit_scale = model.logit_scale.clone()  # as moving a model to a device does
    model(**batch())
    model.logit_scale = 2 * model.logit_scale
    with pytest.raises(ValueError, match="logit_scale"):
        model(**batch())


class TenfoldAuxiliaryLoss(transformers.MixtralForCausalLM):
    """Its auxiliary loss counts ten times as much as its coefficient says."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None and outputs.aux_loss is not None:
            outputs.loss = outputs.loss + 9 * self.router_aux_loss_coef * outputs.aux_loss
        return outputs


def mixture(architecture):
    return tiny_of(architecture, num_local_experts=3, num_experts_per_tok=2)


def test_an_auxiliary_loss_that_a_call_asks_for_is_verified_then():
    model = patch_model(mixture(TenfoldAuxiliaryLoss), label_smoothing=0.1)
    model(**batch())
    with pytest.raises(ValueError, match="its loss is not the patched one without smoothing"):
        model(**batch(), output_router_logits=True)
    model(**batch())  # without it the loss is the fused one, as before
    model = patch_model(mixture(transformers.MixtralForCausalLM))
    theirs = mixture(transformers.MixtralForCausalLM)(**batch(), output_router_logits=True).loss
    for _ in range(2):
        ours = model(**batch(), output_router_logits=True)
        torch.testing.assert_close(ours.loss, theirs)
        assert ours.aux_loss is not None


def test_an_auxiliary_loss_that_a_compiled_call_asks_for_is_verified_before():
    torch.compiler.reset()
    model = patch_model(mixture(transformers.MixtralForCausalLM))
    compiled = torch.compile(model, backend="eager")
    compiled(**batch())
    assert compiled(**batch(), output_router_logits=True).aux_loss is not None


class RoundedScale(SlightlyScaled):
    """Its scale has a name that nobody knows, and its logits are bf16."""

    def logits_of(self, logits):
        return (self.config.unheard_of * logits).to(torch.bfloat16)


@pytest.mark.parametrize("scale", [1.02, 0.98])
def test_an_unknown_scale_that_rounding_would_hide_is_refused(scale):
    model = tiny_of(RoundedScale, unheard_of=scale).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"pass logit_scale=\S+ and softcap=None") as refusal:
        patch_model(model, label_smoothing=0.1)
    suggested = float(str(refusal.value).partition("pass logit_scale=")[2].split()[0])
    assert suggested == pytest.approx(scale, rel=2e-3)
    patch_model(model, label_smoothing=0.1, logit_scale=scale)
    patch_model(tiny_of(RoundedScale, unheard_of=1.0).to(torch.bfloat16))


def test_what_is_printed_of_one_class_names_it(capsys):
    families.main(["LlamaForCausalLM"])
    printed = capsys.readouterr().out
    assert "Every class" not in printed
    assert "LlamaForCausalLM" in printed and "1 is accepted" in printed
