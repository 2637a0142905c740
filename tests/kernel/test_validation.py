"""Bad input: one error that names what was given. And signatures."""

import dataclasses
import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import smoothce
from smoothce import dispatch, linear_cross_entropy
from smoothce.options import Options

HIDDEN = torch.randn(4, 8)
WEIGHT = torch.randn(10, 8)
LABELS = torch.tensor([0, 9, -100, 3])
F16_BIAS = torch.zeros(10, dtype=torch.float16)
FP8 = {"hidden": HIDDEN.to(torch.float8_e4m3fn), "weight": WEIGHT.to(torch.float8_e4m3fn)}

# Each with the error and with what its message has to name.
BAD_OPTIONS = [
    ({"label_smoothing": 1.5}, "label_smoothing .*1.5"),
    ({"label_smoothing": -1.0}, "label_smoothing .*-1"),
    ({"label_smoothing": True}, "label_smoothing .*True"),
    ({"label_smoothing": np.float32("nan")}, "label_smoothing .*nan"),
    ({"reduction": "avg"}, "'avg'"),
    ({"softcap": 0.0}, "softcap .*0.0"),
    ({"logit_scale": math.inf}, "logit_scale .*inf"),
    ({"z_loss": math.nan}, "z_loss .*nan"),
    ({"ignore_index": None}, "ignore_index .*None"),
    ({"filter_eps": 0.0}, "filter_eps .*0.0"),
    ({"filter_eps": 1.0}, "filter_eps .*1.0"),
    ({"return_lse": 1}, "return_lse .*1"),
    ({"return_statistics": 1}, "return_statistics .*1"),
    ({"workspace": -1}, "workspace .*-1"),
    ({"impl": "fast"}, "'fast'"),
]
BAD_TENSORS = [
    ({"hidden": HIDDEN.numpy()}, TypeError, "hidden .*ndarray"),
    ({"hidden": HIDDEN[:, :7]}, ValueError, r"\(4, 7\)"),
    ({"hidden": HIDDEN.long(), "weight": WEIGHT.long()}, TypeError, "hidden .*int64"),
    (FP8, TypeError, "float8"),
    ({"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]}, ValueError, r"hidden .*\(4, 0\)"),
    ({"weight": WEIGHT[:0]}, ValueError, "weight"),
    ({"weight": WEIGHT.double()}, TypeError, "weight .*float64"),
    ({"weight": WEIGHT.to("meta")}, ValueError, "weight .*meta"),
    ({"bias": torch.zeros(9)}, ValueError, r"bias .*\(9,\)"),
    ({"bias": F16_BIAS}, TypeError, "bias .*float16"),
    ({"smoothing_target": torch.full((9,), 1 / 9)}, ValueError, r"smoothing_target .*\(9,\)"),
    (
        {"smoothing_target": torch.full((10,), 0.1, requires_grad=True)},
        ValueError,
        "smoothing_target",
    ),
    ({"token_weights": torch.ones(3)}, ValueError, r"token_weights .*\(3,\)"),
    ({"token_weights": torch.ones(4, requires_grad=True)}, ValueError, "token_weights"),
]
BAD_VALUES = [  # which explain, which looks at no numbers, cannot see
    ({"smoothing_target": torch.full((10,), 0.2)}, ValueError, "smoothing_target"),
    ({"ignore_index": 1.0}, ValueError, "ignore_index .*1.0"),
    ({"labels": LABELS[:3]}, ValueError, r"labels .*\(3,\)"),
    ({"labels": LABELS.to("meta")}, ValueError, "labels"),
    ({"labels": LABELS.to(torch.int16)}, TypeError, "labels .*int16"),
    ({"labels": torch.tensor([0, 10, 1, 1])}, IndexError, "label 10 .*0 to 9"),
    ({"labels": torch.tensor([0, -1, 1, 1]).int()}, IndexError, "label -1 "),
    ({"token_weights": torch.tensor([1, -1.0, 1, 1])}, ValueError, "token_weights"),
]


def name_of(change):
    return "-".join(change) if isinstance(change, dict) else None


@pytest.mark.parametrize(("change", "error", "named"), [*BAD_TENSORS, *BAD_VALUES], ids=name_of)
def test_a_bad_tensor_is_named(change, error, named):
    with pytest.raises(error, match=named):
        linear_cross_entropy(**{"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **change})


@pytest.mark.parametrize(("option", "named"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_named_compiled_too(option, named):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="eager")
    for function in (linear_cross_entropy, compiled):
        with pytest.raises(ValueError, match=named):
            function(HIDDEN, WEIGHT, LABELS, **option)


EXPLAINED = [*BAD_TENSORS, *((option, ValueError, named) for option, named in BAD_OPTIONS[::4])]


@pytest.mark.parametrize(("change", "error", "named"), EXPLAINED, ids=name_of)
def test_explain_refuses_what_the_loss_refuses(change, error, named):
    with pytest.raises(error, match=named):
        smoothce.explain(**{"hidden": HIDDEN, "weight": WEIGHT, **change})


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"softcap": "30"}, ValueError, "softcap .*'30'"),
        ({"logit_scale": True}, ValueError, "logit_scale .*True"),
        ({"temperature": np.float32("nan")}, ValueError, "temperature"),
        ({"temperature": 0}, ValueError, "temperature"),
    ],
    ids=name_of,
)
def test_statistics_refuse_what_the_loss_refuses_as_it_was_given(change, error, named):
    tensors = {"hidden": HIDDEN, "weight": WEIGHT, "temperature": 2.0}
    with pytest.raises(error, match=named):
        smoothce.token_statistics(**{**tensors, **change})


@pytest.mark.parametrize("kind", [np.float16, Fraction])
def test_every_real_number_is_taken_and_becomes_pythons(kind):
    options = Options(label_smoothing=kind(0.25), softcap=kind(8), workspace=np.int64(3))
    assert options == Options(label_smoothing=0.25, softcap=8.0, workspace=3)
    assert type(options.label_smoothing) is float and type(options.workspace) is int


@pytest.mark.parametrize("function", [linear_cross_entropy, smoothce.LinearCrossEntropy])
def test_a_signature_shows_every_option_its_default_and_no_other(function):
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(Options):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default
    kinds = [parameter.kind for parameter in parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


FUNCTIONS = {
    linear_cross_entropy: (HIDDEN, WEIGHT, LABELS),
    smoothce.explain: (HIDDEN, WEIGHT),
    smoothce.LinearCrossEntropy: (),
}


@pytest.mark.parametrize(("function", "tensors"), FUNCTIONS.items())
def test_an_unknown_option_is_refused(function, tensors):
    with pytest.raises(TypeError, match="'smoothing'"):
        function(*tensors, smoothing=0.1)


# Shapes of weights and labels: equal, or one of them flat.
LAYOUTS = [
    ((6,), (6,), True),
    ((6,), (2, 3), True),
    ((2, 3), (6,), True),
    ((2, 6), (2, 2, 3), False),
    ((1,), (), True),
    ((0,), (2, 0), True),
    ((3, 2), (2, 3), False),
    ((5,), (2, 3), False),
]


@pytest.mark.parametrize(("weights_shape", "labels_shape", "alike"), LAYOUTS, ids=str)
def test_token_weights_of_another_layout_than_the_labels_are_refused(
    weights_shape, labels_shape, alike
):
    """Flattened, they would weigh other tokens than they stand beside."""
    labels = torch.randint(10, labels_shape)
    hidden = torch.randn(*labels_shape, 8)
    weights = torch.rand(weights_shape)
    torch._dynamo.reset()  # else these are more shapes than are compiled for one function
    compiled = torch.compile(linear_cross_entropy, backend="eager", dynamic=True, fullgraph=alike)
    flat = linear_cross_entropy(hidden.reshape(-1, 8), WEIGHT, labels.reshape(-1), reduction="none")
    for loss in (linear_cross_entropy, compiled):
        if alike:
            losses = loss(hidden, WEIGHT, labels, token_weights=weights, reduction="none")
            torch.testing.assert_close(losses.reshape(-1), flat * weights.reshape(-1))
            continue
        with pytest.raises(ValueError, match="token_weights"):
            loss(hidden, WEIGHT, labels, token_weights=weights)


class LikeOnCuda(torch.Tensor):
    """A tensor on a CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_warning_of_the_slow_path_names_the_dtype_and_the_callers_line(dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "_unsupported", lambda name, inputs: "a test forbids it")
    dispatch._warn_once.cache_clear()
    hidden = HIDDEN.to(dtype).as_subclass(LikeOnCuda)
    with pytest.warns(UserWarning, match=f"chunked path, in {dtype} and .*a test") as caught:
        linear_cross_entropy(hidden, WEIGHT.to(dtype), LABELS)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"impl": "reference"}, "reference: asked for by impl="),
        ({}, "chunked: triton is not used because "),
        ({"impl": "chunked"}, "gradients are made in the forward"),
        ({"impl": "chunked", "reduction": "none"}, "the backward computes logits a second time"),
    ],
    ids=str,
)
def test_explain_names_the_implementation_and_how_it_makes_the_gradient(options, said):
    assert said in smoothce.explain(HIDDEN.clone().requires_grad_(), WEIGHT, **options)


def test_statistics_under_autocast_divide_a_bias_of_any_dtype():
    bias = torch.arange(10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = smoothce.token_statistics(HIDDEN, WEIGHT, bias=bias, temperature=2.0)
        expected = smoothce.token_statistics(HIDDEN, WEIGHT, bias=bias.float(), temperature=2.0)
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=0)
