"""Unusual dtypes: int32 labels, an fp32 bias beside other hidden states, meta tensors."""

import pytest
import torch
from loss_check import error, inputs

from smoothce import explain, linear_cross_entropy, token_statistics

IMPLEMENTATIONS = ["reference", "chunked", "triton"]


def compiled_loss(*tensors, **options):
    torch._dynamo.reset()
    return torch.compile(linear_cross_entropy, backend="aot_eager")(*tensors, **options)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_int32_labels_give_what_int64_labels_give(impl):
    hidden, weight, labels, _ = inputs(12, 61, 16, masked=0.3)
    functions = (
        [linear_cross_entropy] if impl == "reference" else [linear_cross_entropy, compiled_loss]
    )
    for options in (
        {"return_statistics": True},
        {"reduction": "none", "return_lse": True, "ignore_index": -(2**40)},
    ):
        if "ignore_index" in options:
            labels = labels.clamp(min=0)
        expected = linear_cross_entropy(hidden, weight, labels, impl=impl, **options)
        for function in functions:
            found = function(hidden, weight, labels.int(), impl=impl, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found = token_statistics(hidden, weight, labels.int(), impl=impl)
    torch.testing.assert_close(
        found, token_statistics(hidden, weight, labels, impl=impl), rtol=0, atol=0
    )
    assert found.argmax.dtype == torch.int64


@pytest.mark.parametrize(
    ("dtype", "options", "loss"),
    [
        (torch.float16, {}, linear_cross_entropy),
        (torch.float16, {"reduction": "none"}, compiled_loss),
        (torch.bfloat16, {"return_lse": True}, linear_cross_entropy),
        (torch.bfloat16, {}, compiled_loss),
        (torch.float64, {"reduction": "none"}, linear_cross_entropy),
        (torch.float64, {"softcap": 2.0}, compiled_loss),
    ],
)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_gradient_of_an_fp32_bias_has_its_precision(impl, dtype, options, loss):
    """Beside hidden states of any dtype, wherever gradients are made."""
    if impl == "reference" and loss is compiled_loss and torch.__version__ < "2.5":
        pytest.skip("torch 2.4's compiler fails inside the reference")
    hidden, weight, labels, bias = inputs(40, 61, 16, bias=True)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = {"label_smoothing": 0.1, **options}
    found = bias_gradient(loss, hidden, weight, labels, bias, impl=impl, **options)
    wide = hidden.double(), weight.double(), labels, bias.double()
    exact = bias_gradient(linear_cross_entropy, *wide, impl="reference", **options)
    assert found.dtype == torch.float32
    assert error(found, exact) < 1e-6


def bias_gradient(loss, hidden, weight, labels, bias, **options):
    """Of a loss times 3. The classifier wants a gradient too, as it does in training."""
    weight = weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_()
    result = loss(hidden, weight, labels, bias=bias, **options)
    value = result[0] if isinstance(result, tuple) else result
    return torch.autograd.grad(value.sum() * 3, bias)[0]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_meta_tensors_give_the_shapes_and_dtypes(reduction):
    """As torch's own functions do, for models that are built before there is memory for them."""
    hidden, weight, labels, bias = inputs(12, 61, 16, torch.bfloat16, bias=True)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    options = {"reduction": reduction, "return_statistics": True, "label_smoothing": 0.1}
    found = []
    for device in (hidden.device, "meta"):
        hidden, weight, bias = on_device = [x.to(device) for x in leaves]
        loss, statistics = linear_cross_entropy(
            hidden, weight, labels.to(device), bias=bias, **options
        )
        gradients = torch.autograd.grad(loss.sum(), on_device)
        found.append([(x.shape, x.dtype) for x in (loss, *statistics, *gradients)])
    assert found[0] == found[1]
    assert explain(hidden, weight).startswith("reference: meta tensors")


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_target_and_weights_are_rounded_to_fp32_beside_fp64(impl):
    """As the docstring says: in fp64 they make the loss that they make in fp32, bit for bit."""
    hidden, weight, labels, _ = inputs(12, 61, 16, torch.float64)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(61, generator=generator, dtype=torch.float64).softmax(0).to(hidden)
    weights = torch.rand(12, generator=generator, dtype=torch.float64).to(hidden)
    losses = []
    for dtype in (torch.float64, torch.float32):
        options = {"smoothing_target": target.to(dtype), "token_weights": weights.to(dtype)}
        losses.append(
            linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, impl=impl, **options)
        )
    assert losses[0].dtype == torch.float64
    assert torch.equal(*losses)
