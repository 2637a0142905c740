"""Bad input: one message that names what was given and what was expected. And signatures."""

import dataclasses
import inspect
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

import smoothce
from smoothce import dispatch
from smoothce.linear_cross_entropy import LossKeywords
from smoothce.options import Options

HIDDEN = torch.randn(4, 8)
WEIGHT = torch.randn(10, 8)
LABELS = torch.tensor([0, 9, -100, 3])
WHOLE_NUMBERS = {"hidden": HIDDEN.long(), "weight": WEIGHT.long()}
FP8 = {"hidden": HIDDEN.to(torch.float8_e4m3fn), "weight": WEIGHT.to(torch.float8_e4m3fn)}


def assert_refused(change, error, message):
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **change}
    with pytest.raises(error, match=message):
        smoothce.linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"label_smoothing": 1.5}, r"label_smoothing .*\[0, 1\].*1\.5"),
        ({"label_smoothing": np.float32("nan")}, "label_smoothing .*nan"),
        ({"reduction": "avg"}, "none, sum, mean, not 'avg'"),
        ({"softcap": 0.0}, r"softcap .*0\.0"),
        ({"logit_scale": float("inf")}, "logit_scale .*inf"),
        ({"ignore_index": 1.0}, r"ignore_index .*1\.0"),
        ({"filter_eps": 2.0}, r"filter_eps .*2\.0"),
        ({"return_lse": 1}, r"return_lse .*1"),
        ({"workspace": -1}, "workspace .*-1"),
        ({"impl": "fast"}, "reference, chunked, triton, not 'fast'"),
    ],
)
def test_an_option_out_of_range(option, message):
    assert_refused(option, ValueError, message)


def test_a_keyword_that_is_no_option():
    for function, tensors in (
        (smoothce.linear_cross_entropy, (HIDDEN, WEIGHT, LABELS)),
        (smoothce.explain, (HIDDEN, WEIGHT)),
        (smoothce.LinearCrossEntropy, ()),
    ):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'smoothing'"):
            function(*tensors, smoothing=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": HIDDEN[:, :7]}, r"\(4, 7\) and \(10, 8\)"),
        ({"weight": WEIGHT[0]}, r"weight \(V, D\)"),
        ({"weight": WEIGHT[:0]}, "at least one row"),
        (
            {"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]},
            r"D of hidden .* 1 or more, not \(4, 0\)",
        ),
        ({"bias": torch.zeros(9)}, r"bias .*\(10,\), not \(9,\)"),
        ({"labels": LABELS[:3]}, r"\(4,\), not \(3,\)"),
        ({"labels": LABELS.to("meta")}, "labels .*device cpu"),
    ],
)
def test_a_tensor_of_another_shape_or_device(change, message):
    assert_refused(change, ValueError, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": HIDDEN.numpy()}, "hidden .*ndarray"),
        ({"labels": None}, "labels must be a tensor, not NoneType"),
        ({"weight": WEIGHT.double()}, "weight .*torch.float32"),
        ({"bias": torch.zeros(10, dtype=torch.float16)}, "bias .*torch.float32, not torch.float16"),
        ({"labels": LABELS.float()}, "labels .*not torch.float32"),
        ({"labels": LABELS.to(torch.int16)}, "labels .*not torch.int16"),
        (WHOLE_NUMBERS, "hidden .*float16, .*float64, not torch.int64"),
        (FP8, r"hidden .*float16, .*not torch.float8_e4m3fn: .*hidden.to\(torch.bfloat16\)"),
        ({**FP8, "hidden": HIDDEN}, "weight .*torch.float32, not torch.float8_e4m3fn"),
        ({"bias": torch.zeros(10).to(torch.float8_e5m2)}, "bias .*not torch.float8_e5m2"),
    ],
)
def test_a_tensor_of_another_type(change, message):
    assert_refused(change, TypeError, message)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 10, 1, 1], "label 10 .*0 to 9"), ([0, -1, 1, 1], "label -1 .*ignore_index -100")],
)
def test_a_label_out_of_range(labels, message, dtype):
    assert_refused({"labels": torch.tensor(labels, dtype=dtype)}, IndexError, message)


@pytest.mark.parametrize("kind", [np.float16, Fraction])
def test_every_real_number_is_taken(kind):
    options = Options(
        label_smoothing=kind(0.25), softcap=kind(8), logit_scale=kind(2), filter_eps=kind(0.5)
    )
    assert options == Options(label_smoothing=0.25, softcap=8.0, logit_scale=2.0, filter_eps=0.5)


def test_numbers_become_pythons():
    options = Options(label_smoothing=np.float32(0.25), workspace=np.int64(3), softcap=8)
    assert type(options.label_smoothing) is float
    assert type(options.softcap) is float
    assert type(options.workspace) is int


@pytest.mark.parametrize(
    "function", [smoothce.linear_cross_entropy, smoothce.explain, smoothce.LinearCrossEntropy]
)
def test_a_signature_shows_every_option_and_its_default(function):
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(Options):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default
    kinds = [parameter.kind for parameter in parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_the_signature_of_explain_takes_a_model_alone():
    inspect.signature(smoothce.explain).bind(torch.nn.Linear(1, 1))


def test_editors_complete_every_option():
    """`LossKeywords` and what overloads name are the keywords of the loss."""
    keywords = {**LossKeywords.__annotations__, "impl": str}
    keywords |= {"return_lse": bool, "return_statistics": bool}
    parameters = inspect.signature(smoothce.linear_cross_entropy).parameters.values()
    shown = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords == shown


def test_a_module_refuses_an_implementation_that_is_none():
    with pytest.raises(ValueError, match="'fast'"):
        smoothce.LinearCrossEntropy(impl="fast")


@pytest.mark.parametrize("temperature", [True, np.float32("nan"), 0])
def test_statistics_refuse_a_temperature_out_of_range(temperature):
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        smoothce.token_statistics(HIDDEN, WEIGHT, temperature=temperature)


def test_statistics_refuse_fp8():
    with pytest.raises(TypeError, match=r"not torch\.float8_e4m3fn"):
        smoothce.token_statistics(**FP8)
    bias = torch.zeros(10).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"bias .*not torch\.float8_e4m3fn"):
        smoothce.token_statistics(HIDDEN, WEIGHT, bias=bias, temperature=2.0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_statistics_refuse_a_bias_of_another_dtype_at_every_temperature(dtype, temperature):
    bias = torch.zeros(10, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"bias .*torch\.float32, not torch\.float16"):
        smoothce.token_statistics(
            HIDDEN.to(dtype), WEIGHT.to(dtype), bias=bias, temperature=temperature
        )


def test_statistics_under_autocast_divide_a_bias_of_any_dtype():
    bias = torch.arange(10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = smoothce.token_statistics(HIDDEN, WEIGHT, bias=bias, temperature=2.0)
        expected = smoothce.token_statistics(HIDDEN, WEIGHT, bias=bias.float(), temperature=2.0)
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"softcap": "30"}, "softcap must be None or a positive number, not '30'"),
        ({"softcap": True}, "softcap must be None or a positive number, not True"),
        ({"softcap": -3}, "softcap must be None or a positive number, not -3"),
        ({"logit_scale": "2"}, "logit_scale must be None or a number, not '2'"),
        ({"logit_scale": True}, "logit_scale must be None or a number, not True"),
    ],
)
def test_statistics_refuse_an_option_as_it_was_given(option, message, temperature):
    with pytest.raises(ValueError, match=message):
        smoothce.token_statistics(HIDDEN, WEIGHT, temperature=temperature, **option)


def test_statistics_refuse_what_is_no_tensor():
    with pytest.raises(TypeError, match="hidden must be a tensor, not list"):
        smoothce.token_statistics([1.0], WEIGHT)


@pytest.mark.parametrize(
    ("weights_shape", "labels_shape"),
    [((3, 2), (2, 3)), ((2, 6), (3, 4)), ((5,), (2, 3)), ((2,), (2, 3)), ((3, 2, 1), (2, 3))],
    ids=str,
)
def test_token_weights_of_another_layout_than_the_labels(weights_shape, labels_shape):
    """Flattened, they would weigh other tokens than they stand beside."""
    labels = torch.zeros(labels_shape, dtype=torch.int64)
    hidden = torch.randn(*labels_shape, 8)
    message = f"token_weights .*{re.escape(str(labels_shape))}.*{re.escape(str(weights_shape))}"
    with pytest.raises(ValueError, match=message):
        smoothce.linear_cross_entropy(
            hidden, WEIGHT, labels, token_weights=torch.ones(weights_shape)
        )


@pytest.mark.parametrize(
    ("weights_shape", "labels_shape"),
    [
        ((6,), (6,)),
        ((2, 3), (2, 3)),
        ((6,), (2, 3)),
        ((2, 3), (6,)),
        ((6, 1), (6,)),
        ((4, 3), (2, 2, 3)),
        ((2, 6), (2, 2, 3)),
        ((1,), ()),
        ((0,), (2, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_token_weights_that_flatten_as_the_labels_do(weights_shape, labels_shape, compiled):
    labels = torch.randint(10, labels_shape)
    hidden = torch.randn(*labels_shape, 8)
    weights = torch.rand(weights_shape)
    loss = smoothce.linear_cross_entropy
    if compiled:
        torch.compiler.reset()  # else these are more shapes than are compiled for one function
        loss = torch.compile(loss, backend="eager", dynamic=True, fullgraph=True)
    losses = loss(hidden, WEIGHT, labels, token_weights=weights, reduction="none")
    flat = smoothce.linear_cross_entropy(
        hidden.reshape(-1, 8), WEIGHT, labels.reshape(-1), reduction="none"
    )
    torch.testing.assert_close(losses.reshape(-1), flat * weights.reshape(-1))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden": None}, TypeError),
        ({"hidden": HIDDEN.numpy()}, TypeError),
        ({"weight": None}, TypeError),
        ({"weight": WEIGHT.double()}, TypeError),
        ({"weight": WEIGHT[:0]}, ValueError),
        ({"weight": WEIGHT.to("meta")}, ValueError),
        ({"hidden": HIDDEN[:, :7]}, ValueError),
        (WHOLE_NUMBERS, TypeError),
        (FP8, TypeError),
        ({"bias": torch.zeros(9)}, ValueError),
        ({"bias": torch.zeros(10, dtype=torch.float16)}, TypeError),
        ({"smoothing_target": torch.full((9,), 1 / 9)}, ValueError),
        ({"smoothing_target": torch.full((10,), 0.1, requires_grad=True)}, ValueError),
        ({"token_weights": torch.ones(3)}, ValueError),
        ({"token_weights": torch.ones(4, requires_grad=True)}, ValueError),
        ({"label_smoothing": 1.5}, ValueError),
        ({"impl": "fast"}, ValueError),
    ],
    ids=lambda change: "-".join(change) if isinstance(change, dict) else None,
)
def test_explain_refuses_what_the_loss_refuses(change, error):
    """What can be told without the labels, and without a look at the tensors' numbers."""
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, **change}
    with pytest.raises(error) as of_the_loss:
        smoothce.linear_cross_entropy(labels=LABELS, **arguments)
    with pytest.raises(error) as of_explain:
        smoothce.explain(**arguments)
    assert str(of_explain.value) == str(of_the_loss.value)


class LikeOnCuda(torch.Tensor):
    """A tensor on a CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_warning_of_the_slow_path_names_the_dtype_and_the_callers_line(dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "_unsupported", lambda name, inputs: "a test forbids it")
    dispatch._warn_once.cache_clear()
    hidden = HIDDEN.to(dtype).as_subclass(LikeOnCuda)
    with pytest.warns(UserWarning, match=f"chunked path, in {dtype} and .*a test") as caught:
        smoothce.linear_cross_entropy(hidden, WEIGHT.to(dtype), LABELS)
    assert caught[0].filename == __file__


def test_explain_names_the_implementation_and_the_reason():
    assert smoothce.explain(HIDDEN, WEIGHT, impl="reference") == "reference: asked for by impl="
    chosen = smoothce.explain(HIDDEN, WEIGHT)
    assert chosen.startswith("chunked: triton is not used because ")


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "no gradient is wanted"),
        ({"hidden": HIDDEN.clone().requires_grad_()}, "gradients are made in the forward"),
        (
            {"hidden": HIDDEN.clone().requires_grad_(), "reduction": "none"},
            "the backward computes logits a second time",
        ),
        (
            {"hidden": HIDDEN.clone().requires_grad_(), "return_lse": True},
            "the backward computes logits a second time",
        ),
    ],
    ids=["none", "reduced", "per token", "return_lse"],
)
def test_explain_says_how_the_chunked_path_makes_the_gradient(options, way):
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "impl": "chunked", **options}
    assert way in smoothce.explain(**arguments)
