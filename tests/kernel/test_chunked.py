"""`chunked` against the reference in fp64, by the error the reference itself makes in the dtype."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import ANY_SHAPE_AND_OPTION, DEVICE, check, inputs

import smoothce
from smoothce import chunked

chunked_loss = functools.partial(smoothce.linear_cross_entropy, impl="chunked")


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    chunk_tokens=st.sampled_from([1, 4, 128]),
    **ANY_SHAPE_AND_OPTION,
)
def test_as_exact_as_the_reference(chunk_tokens, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CPU_CHUNK_TOKENS", chunk_tokens)
        patch.setattr(chunked, "CAST_ROWS", 50)
        check(impl="chunked", **options)


def test_the_module_takes_leading_dimensions():
    hidden, weight, labels, bias = inputs(6, 9, 4, masked=0.3, bias=True)
    module = smoothce.LinearCrossEntropy(label_smoothing=0.1, reduction="none", impl="chunked")
    flat = module(hidden, weight, labels, bias)
    shaped = module(hidden.reshape(3, 2, 4), weight, labels.reshape(3, 2), bias)
    assert shaped.shape == (3, 2)
    assert torch.equal(shaped.flatten(), flat)


def test_autocast_casts_the_inputs_and_nothing_inside():
    """Around the backward it changes nothing either: tests/kernel/triton/test_gradients.py."""
    hidden, weight, labels, _ = inputs(6, 9, 64, masked=0.3)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = chunked_loss(hidden, weight, labels)
    assert torch.equal(loss, chunked_loss(hidden.bfloat16(), weight.bfloat16(), labels))


@pytest.fixture
def shapes_of_zeros(monkeypatch):
    """The shapes of the buffers that `torch.zeros` makes during the test."""
    shapes = []
    zeros = torch.zeros

    def noted(shape, **options):
        shapes.append(tuple(shape))
        return zeros(shape, **options)

    monkeypatch.setattr(torch, "zeros", noted)
    return shapes


def test_a_frozen_classifier_has_no_gradient_buffer(shapes_of_zeros):
    hidden, weight, labels, _ = inputs(40, 5000, 4)
    chunked_loss(hidden.requires_grad_(), weight, labels).backward()
    assert hidden.shape in shapes_of_zeros
    assert weight.shape not in shapes_of_zeros


def test_no_gradient_buffer_is_made_under_no_grad(shapes_of_zeros):
    hidden, weight, labels, _ = inputs(40, 5000, 4)
    weight.requires_grad_()
    with torch.no_grad():
        chunked_loss(hidden, weight, labels)
    assert labels.shape in shapes_of_zeros
    assert weight.shape not in shapes_of_zeros
