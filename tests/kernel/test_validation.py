"""Bad input: one message that names what was given and what was expected."""

import dataclasses
import inspect
from fractions import Fraction

import numpy as np
import pytest
import torch

import smoothce
from smoothce.options import LossKeywords, Options

E, C, Y = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([0, 9, -100, 3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing .*\[0, 1\].*1\.5"),
        ({"label_smoothing": np.float32("nan")}, ValueError, "label_smoothing .*nan"),
        ({"reduction": "avg"}, ValueError, "none, sum, mean, not 'avg'"),
        ({"softcap": 0.0}, ValueError, r"softcap .*0\.0"),
        ({"logit_scale": float("inf")}, ValueError, "logit_scale .*inf"),
        ({"ignore_index": 1.0}, ValueError, r"ignore_index .*1\.0"),
        ({"filter_eps": 2.0}, ValueError, r"filter_eps .*2\.0"),
        ({"return_lse": 1}, ValueError, r"return_lse .*1"),
        ({"workspace": -1}, ValueError, "workspace .*-1"),
        ({"impl": "fast"}, ValueError, "reference, chunked, triton, not 'fast'"),
        ({"hidden": E[:, :7]}, ValueError, r"\(4, 7\) and \(10, 8\)"),
        ({"weight": C[0]}, ValueError, r"weight \(V, D\)"),
        ({"weight": C[:0]}, ValueError, "at least one row"),
        ({"hidden": E.numpy()}, TypeError, "hidden .*ndarray"),
        ({"labels": None}, TypeError, "labels must be a tensor, not NoneType"),
        ({"weight": C.double()}, TypeError, "weight .*torch.float32"),
        ({"bias": torch.zeros(9)}, ValueError, r"bias .*\(10,\), not \(9,\)"),
        ({"labels": Y[:3]}, ValueError, r"\(4,\), not \(3,\)"),
        ({"labels": Y.float()}, TypeError, "labels .*not torch.float32"),
        ({"labels": torch.tensor([0, 10, 1, 1])}, IndexError, "label 10 .*0 to 9"),
        ({"labels": torch.tensor([0, -1, 1, 1])}, IndexError, "label -1 .*ignore_index -100"),
        ({"hidden": E.long(), "weight": C.long()}, TypeError, "hidden .*floating point"),
        ({"labels": Y.to("meta")}, ValueError, "labels .*device cpu"),
    ],
)
def test_message(change, error, message):
    arguments = {"hidden": E, "weight": C, "labels": Y, **change}
    with pytest.raises(error, match=message):
        smoothce.linear_cross_entropy(**arguments)


@pytest.mark.parametrize("kind", [np.float16, Fraction])
def test_every_real_number_is_taken(kind):
    options = Options(
        label_smoothing=kind(0.25), softcap=kind(8), logit_scale=kind(2), filter_eps=kind(0.5)
    )
    assert options == Options(label_smoothing=0.25, softcap=8.0, logit_scale=2.0, filter_eps=0.5)
    assert type(options.label_smoothing) is type(options.filter_eps) is float


@pytest.mark.parametrize(
    "function", [smoothce.linear_cross_entropy, smoothce.explain, smoothce.LinearCrossEntropy]
)
def test_a_signature_shows_every_option_and_its_default(function):
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(Options):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default
    assert not any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())


def test_editors_complete_every_option():
    """`LossKeywords` and the two flags, which overloads name, are the fields of `Options`."""
    keywords = {**LossKeywords.__annotations__, "return_lse": bool, "return_statistics": bool}
    assert list(keywords.items()) == [(x.name, x.type) for x in dataclasses.fields(Options)]


def test_a_module_and_statistics_refuse_what_the_function_refuses():
    with pytest.raises(ValueError, match="'fast'"):
        smoothce.LinearCrossEntropy(impl="fast")
    for wrong in (True, np.float32("nan"), 0):
        with pytest.raises(ValueError, match="temperature must be a positive number"):
            smoothce.token_statistics(E, C, temperature=wrong)
    with pytest.raises(TypeError, match="hidden must be a tensor, not list"):
        smoothce.token_statistics([1.0], C)


def test_explain_names_the_implementation_and_the_reason():
    assert smoothce.explain(E, C, impl="reference").startswith("reference: ")
    assert smoothce.explain(E, C).startswith("chunked: triton is not used because ")
