"""Bad input: one message that names what was given and what was expected. And signatures."""

import dataclasses
import inspect
from fractions import Fraction

import numpy as np
import pytest
import torch

import smoothce
from smoothce.options import LossKeywords, Options

HIDDEN = torch.randn(4, 8)
WEIGHT = torch.randn(10, 8)
LABELS = torch.tensor([0, 9, -100, 3])
WHOLE_NUMBERS = {"hidden": HIDDEN.long(), "weight": WEIGHT.long()}


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


def test_an_option_that_is_none():
    assert_refused({"smoothing": 0.1}, TypeError, "unexpected keyword argument 'smoothing'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": HIDDEN[:, :7]}, r"\(4, 7\) and \(10, 8\)"),
        ({"weight": WEIGHT[0]}, r"weight \(V, D\)"),
        ({"weight": WEIGHT[:0]}, "at least one row"),
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
        (WHOLE_NUMBERS, "hidden .*floating point"),
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


def test_editors_complete_every_option():
    """`LossKeywords` and the two flags, which overloads name, are the fields of `Options`."""
    keywords = {**LossKeywords.__annotations__, "return_lse": bool, "return_statistics": bool}
    fields = {field.name: field.type for field in dataclasses.fields(Options)}
    assert list(keywords.items()) == list(fields.items())


def test_a_module_refuses_an_implementation_that_is_none():
    with pytest.raises(ValueError, match="'fast'"):
        smoothce.LinearCrossEntropy(impl="fast")


@pytest.mark.parametrize("temperature", [True, np.float32("nan"), 0])
def test_statistics_refuse_a_temperature_out_of_range(temperature):
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        smoothce.token_statistics(HIDDEN, WEIGHT, temperature=temperature)


def test_statistics_refuse_what_is_no_tensor():
    with pytest.raises(TypeError, match="hidden must be a tensor, not list"):
        smoothce.token_statistics([1.0], WEIGHT)


def test_explain_names_the_implementation_and_the_reason():
    assert smoothce.explain(HIDDEN, WEIGHT, impl="reference") == "reference: asked for by impl="
    chosen = smoothce.explain(HIDDEN, WEIGHT)
    assert chosen.startswith("chunked: triton is not used because ")
