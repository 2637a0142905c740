"""`torch.compile` takes the loss into its graph whole, and finds what is found without it.

A whole model's graph is in test_deferred_logits.py, refusals of options are in test_validation.py.
"""

import pytest
import torch

from smoothce import linear_cross_entropy, token_statistics

# A number that is another in the next call becomes a symbol, or is compiled anew.
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "softcap": 3.0, "filter_eps": 0.01},
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


@pytest.mark.parametrize(
    ("impl", "more"),
    [
        ("auto", {"reduction": "none"}),
        ("auto", {"return_lse": True}),
        ("triton", {"reduction": "sum"}),
    ],
    ids=str,
)
def test_in_one_graph(impl, more):
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
    for temperature in (0.7, 0.8, 2, 3):
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


def test_mistakes_in_tensors_are_named():
    _, weight, _, labels = problem()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    hidden = torch.randn(3, 4, 16)
    for given, options, named in (
        (labels.T, {}, "labels"),
        (torch.full_like(labels, 50), {}, "label 50"),
        (labels, {"smoothing": 0.1}, "'smoothing'"),
    ):
        with pytest.raises(Exception, match=named):
            compiled(hidden, weight, given, **options)
