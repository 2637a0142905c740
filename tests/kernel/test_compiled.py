"""`torch.compile` takes the loss into its graph whole, and finds what is found without it."""

import dataclasses
import math

import pytest
import torch

from smoothce import linear_cross_entropy, patch_model, token_statistics
from smoothce.options import Options

# A number that is another in the next call becomes a symbol, or is compiled anew.
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "softcap": 3.0, "filter_eps": 0.01},
    {"label_smoothing": 0.2, "softcap": 5.0, "filter_eps": 0.02, "ignore_index": 7},
    {"softcap": 6.0, "ignore_index": 9, "logit_scale": 0.5, "filter_eps": "auto"},
]


def problem():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 16)
    weight, bias = torch.randn(50, 16), torch.randn(50)
    labels = torch.randint(50, (3, 4))
    labels[0, 0] = -100
    return layer, weight.requires_grad_(), bias.requires_grad_(), labels


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize(
    "more", [{"reduction": "none"}, {"reduction": "sum"}, {"return_lse": True}]
)
def test_in_one_graph(more, impl):
    layer, weight, bias, labels = problem()

    def total(x, **options):
        options |= {"return_statistics": "return_lse" in more, "impl": impl, **more}
        found = linear_cross_entropy(layer(x) * 2, weight, labels, bias=bias, **options)
        if more.get("return_lse"):
            return found[0] * 3 + found[1].square().mean()
        return (found * torch.arange(12.0).view(3, 4)).sum() if found.dim() else found * 3

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    x, leaves = torch.randn(3, 4, 8), [weight, bias, *layer.parameters()]
    for options in OPTIONS:
        labels[0, 0] = options.get("ignore_index", -100)
        found, want = compiled(x, **options), total(x, **options)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(*(torch.autograd.grad(t, leaves) for t in (found, want)))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, **options), want.detach())


def test_statistics_at_several_temperatures_are_in_one_graph():
    """The second number is a symbol, of which a graph cannot ask whether it is finite."""
    _, weight, _, labels = problem()
    hidden = torch.randn(3, 4, 16)

    def entropy(temperature):
        return token_statistics(hidden, weight, labels, temperature=temperature).entropy

    compiled = torch.compile(entropy, fullgraph=True, backend="aot_eager")
    for temperature in (0.7, 0.8, 0.9, 2, 3, 4):
        torch.testing.assert_close(compiled(temperature), entropy(temperature))


def test_fp16_gradients_are_not_rounded_before_the_scalers_factor():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16).half(), (torch.randn(2000, 16) / 4).half().requires_grad_()
    labels = torch.randint(10, (64,))

    def loss(x):
        return linear_cross_entropy(x, weight, labels, label_smoothing=0.1) * 2.0**13

    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden)
    (a,), (b,) = (torch.autograd.grad(t, [weight]) for t in (found, loss(hidden)))
    assert torch.equal(a, b)


def test_mistakes_are_named():
    _, weight, _, labels = problem()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    hidden = torch.randn(3, 4, 16)
    for given, options, said in (
        (labels.T, {}, "labels must have the shape"),
        (torch.full_like(labels, 50), {}, "label 50 is out of range"),
        (labels, {"label_smoothing": True}, "label_smoothing .*not True"),
        (labels, {"label_smoothing": 1.5}, "label_smoothing .*not 1.5"),
        (labels, {"smoothing": 0.1}, r"^linear_cross_entropy\(\) .*argument 'smoothing'"),
    ):
        with pytest.raises(Exception, match=said):
            compiled(hidden, weight, given, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"workspace": -1},
        {"workspace": -2},
        {"filter_eps": -1.0},
        {"filter_eps": 0.0},
        {"filter_eps": 1.0},
        {"label_smoothing": -1.0},
        {"softcap": 0.0},
        {"logit_scale": math.inf},
        {"z_loss": math.nan},
        {"reduction": "avg"},
        {"workspace": "little"},
        {"filter_eps": "some"},
        {"label_smoothing": True},
        {"ignore_index": None},
        {"return_statistics": 1},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_as_without_compilation(options):
    _, weight, _, labels = problem()
    hidden = torch.randn(3, 4, 16)
    (name,) = options
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    for function in (linear_cross_entropy, compiled):
        with pytest.raises(ValueError, match=f"{name} must be "):
            function(hidden, weight, labels, **options)


def test_around_a_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=100, num_attention_heads=2, **sizes)
    model = patch_model(transformers.LlamaForCausalLM(config).train(), label_smoothing=0.1)
    ids = torch.randint(100, (2, 9))

    def found(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    # torch 2.4 rounds within layers, around the unpatched model too
    close = {"atol": 1e-4, "rtol": 1e-2} if torch.__version__ < "2.5" else {}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(found(compiled), found(model), **close)


def test_the_operators_take_every_option_by_name():
    for operator in (torch.ops.smoothce.loss, torch.ops.smoothce.loss_backward):
        keywords = [x.name for x in operator.default._schema.arguments if x.kwarg_only]
        options = [field.name for field in dataclasses.fields(Options)]
        assert keywords == ["impl", "needs", "auto", *options]
