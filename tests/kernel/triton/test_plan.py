"""Which way gradients are made, from what a call is, and what `explain` says of it."""

import re

import numpy as np
import pytest
import torch
from loss_check import DEVICE

from smoothce import explain, linear_cross_entropy
from smoothce.options import Needs, Options
from smoothce.triton import plan
from smoothce.triton.tiles import Tiles
from smoothce.triton.tokens import KernelCall

GEMMA = (256000, 2304)  # V and D of Gemma 2 2B
QWEN = (151936, 1536)  # of Qwen2.5 1.5B

BOTH = Needs(hidden=True, weight=True, bias=False)
HIDDEN_ALONE = Needs(hidden=True, weight=False, bias=False)
NONE = Needs(hidden=False, weight=False, bias=False)


def call_of(n, v, d, dtype=torch.bfloat16, needs=BOTH, eps=None, **options):
    """A call with a GPU's tiles and with tensors that nobody holds."""
    return KernelCall(
        hidden=torch.empty(n, d, dtype=dtype, device="meta"),
        weight=torch.empty(v, d, dtype=dtype, device="meta"),
        labels=torch.empty(n, dtype=torch.int64, device="meta"),
        bias=None,
        smoothing_target=None,
        token_weights=None,
        options=Options(**options),
        needs=needs,
        tiles=Tiles(),
        eps=eps,
    )


def plan_of(*shape, **options):
    return plan.plan_for(call_of(*shape, **options))


def test_the_example_in_the_docstring_of_explain_is_what_it_says():
    description = plan.describe(call_of(8192, *GEMMA))
    assert f"triton: the Triton kernels; {description}" in " ".join(explain.__doc__.split())


@pytest.mark.parametrize(
    ("n", "shape", "options", "part_tokens", "sum_in_fp32"),
    [  # a workspace of the gradients' bytes or a quarter of the logits
        (8192, GEMMA, {}, 2048, False),
        (16384, GEMMA, {}, 4096, False),
        (10000, (256000, 2048), {}, 2560, False),  # four parts, though a quarter is not whole tiles
        (9200, (256000, 2300), {}, 2304, False),
        (20000, GEMMA, {}, 5120, False),
        (300, GEMMA, {}, 384, False),
        (300, GEMMA, {"softcap": 43.3}, 384, False),
        (65536, QWEN, {}, 2048, True),  # so many are summed in fp32
        (65536, QWEN, {"dtype": torch.float32}, 2048, False),
        (16384, GEMMA, {"needs": HIDDEN_ALONE}, 2048, False),
        (8192, GEMMA, {"needs": HIDDEN_ALONE, "reduction": "none"}, 2048, False),
        (8200, GEMMA, {"workspace": np.int64(8200 * 256000 // 2)}, 1664, False),
    ],
)
def test_what_is_made_in_the_forward(n, shape, options, part_tokens, sum_in_fp32):
    chosen = plan_of(n, *shape, **options)
    assert chosen.mode == "grad_in_forward"
    assert chosen.part_tokens == part_tokens
    assert chosen.sum_in_fp32 == sum_in_fp32


@pytest.mark.parametrize(
    ("options", "mode", "reason"),
    [
        ({"workspace": 0}, "recompute_backward", "workspace is 0"),
        ({"workspace": 2**26}, "recompute_backward", "holds the probabilities of 131 tokens"),
        ({"dtype": torch.float16}, "recompute_backward", "fp16"),
        ({"return_lse": True}, "recompute_backward", "log-sum-exps"),
        ({"reduction": "none"}, "recompute_backward", "each token has an upstream gradient"),
        ({"softcap": 43.4}, "recompute_backward", "softcap over 43.3"),
        ({"softcap": 43.4, "workspace": 2**40}, "recompute_backward", "softcap over 43.3"),
        ({"eps": 0.1}, "filtered", ""),
        ({"needs": NONE}, "none", ""),
    ],
)
def test_what_is_not_made_in_the_forward(options, mode, reason):
    chosen = plan_of(8192, *GEMMA, **options)
    assert chosen.mode == mode
    assert reason in chosen.reason


BYTES_OF_A_TOKEN = 2 * GEMMA[0]  # its probabilities in bf16


@pytest.mark.parametrize(
    ("n", "tokens", "reason"),
    [
        (8192, 511, "of 511 tokens, and it must have room for 512; workspace=524288000 or more"),
        (8192, 700, "8192 tokens would take 12 parts, .* sums in fp32, of 2359296000 bytes"),
        (8192, 1023, "8192 tokens would take 9 parts, .* workspace=524288000 or more"),
        (2**20, 5000, "1048576 tokens would take 210 parts, .* workspace=2621440000 or more"),
        (100, 60, "of 60 tokens, and it must have room for 100; workspace=51200000 or more"),
    ],
)
def test_the_reason_says_what_a_workspace_lacks(n, tokens, reason):
    """And the number of bytes that it names is the least that is enough."""
    workspace = tokens * BYTES_OF_A_TOKEN
    chosen = plan_of(n, *GEMMA, workspace=workspace)
    assert chosen.mode == "recompute_backward"
    assert re.search(f"a workspace of {workspace} bytes .*{reason}", chosen.reason)
    enough = int(re.search(r"workspace=(\d+) or more", chosen.reason)[1])
    assert plan_of(n, *GEMMA, workspace=enough).mode == "grad_in_forward"
    assert plan_of(n, *GEMMA, workspace=enough - 1).mode == "recompute_backward"


def test_a_part_has_a_tile_of_tokens_however_little_was_asked_for():
    assert plan.tokens_of_equal_parts(100, 8, tile_rows=16) == 16
    assert plan.tokens_of_equal_parts(10, 8, tile_rows=16) == 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "3 products: gradients are made in the forward, 700 of 700 tokens at a time, in a"),
        ({"workspace": 0}, "4 products, for workspace is 0"),
        ({"softcap": 50.0}, "4 products, for a softcap over 43.3 lets"),
        ({"filter_eps": 0.1}, "drawn at random"),
        ({"filter_eps": 0.1, "softcap": 30.0}, "under a softcap the gradient is biased"),
    ],
)
def test_explain_tells_products_and_bytes(options, words):
    hidden = torch.zeros(700, 16, device=DEVICE, requires_grad=True)
    weight = torch.zeros(300, 16, device=DEVICE, requires_grad=True)
    assert words in explain(hidden, weight, impl="triton", **options)


@pytest.mark.parametrize(
    ("needs", "workspace", "products"),
    [
        ("", "auto", "one product"),
        ("hidden", "auto", "2 products"),
        ("weight", "auto", "2 products"),
        ("hidden weight", "auto", "3 products"),
        ("hidden weight bias", "auto", "3 products"),
        ("hidden bias", "auto", "2 products"),
        ("bias", "auto", "1 product:"),  # the bias's gradient is no product of matrices
        ("bias", 0, "2 products"),
        ("weight", 0, "3 products"),
    ],
)
def test_explain_tells_products_of_frozen_inputs(needs, workspace, products):
    hidden = torch.zeros(700, 16, device=DEVICE, requires_grad="hidden" in needs)
    weight = torch.zeros(300, 16, device=DEVICE, requires_grad="weight" in needs)
    bias = torch.zeros(300, device=DEVICE, requires_grad="bias" in needs)
    said = explain(hidden, weight, bias=bias, impl="triton", workspace=workspace)
    assert f" {products}" in said


def test_a_bias_of_the_filter_is_said_where_it_is_and_nowhere_else():
    """Under a softcap, wherever a user reads of the filter."""
    hidden = torch.zeros(700, 16, device=DEVICE, requires_grad=True)
    weight = torch.zeros(300, 16, device=DEVICE, requires_grad=True)
    with_softcap = explain(hidden, weight, impl="triton", filter_eps=0.1, softcap=30)
    assert with_softcap.endswith("under a softcap the gradient is biased; filter_eps=None is exact")
    without = explain(hidden, weight, impl="triton", filter_eps=0.1)
    assert "biased" not in without
    documented = " ".join(linear_cross_entropy.__doc__.split())
    assert "Under a softcap the filtered gradient is biased" in documented
