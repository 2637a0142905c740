"""Which way gradients are made, from shapes and options alone; what `explain` says of it."""

import numpy as np
import pytest
import torch
from loss_check import DEVICE

from smoothce import explain
from smoothce.options import Inputs, Options
from smoothce.triton import plan
from smoothce.triton.tiles import Tiles
from smoothce.triton.tokens import LossCall

GEMMA, QWEN = (256000, 2304), (151936, 1536)


def planned(n, v, d, dtype=torch.bfloat16, needs=(True, True, False), eps=None, **options):
    """The plan of a GPU's tiles for tensors that nobody holds."""
    on = {"dtype": dtype, "device": "meta"}
    hidden, weight = torch.empty(n, d, **on), torch.empty(v, d, **on)
    labels = torch.empty(n, dtype=torch.int64, device="meta")
    inputs = Inputs(hidden, weight, labels, None, None, None, Options(**options))
    return plan.plan_for(LossCall(inputs, needs, Tiles(), eps))


@pytest.mark.parametrize(
    ("n", "shape", "more", "tokens", "wide"),
    [  # the gradients' bytes or a quarter of the logits
        (8192, GEMMA, {}, 2048, False),
        (16384, GEMMA, {}, 4096, False),
        (300, GEMMA, {}, 300, False),
        (300, GEMMA, {"softcap": 43.3}, 300, False),
        (65536, QWEN, {}, 2048, True),  # so many are summed in fp32
        (65536, QWEN, {"dtype": torch.float32}, 2048, False),
        (16384, GEMMA, {"needs": (True, False, False)}, 2048, False),
        (8192, GEMMA, {"needs": (True, False, False), "reduction": "none"}, 2048, False),
        (8200, GEMMA, {"workspace": np.int64(8200 * 256000 // 2)}, 1664, False),
    ],
)
def test_what_is_made_in_the_forward(n, shape, more, tokens, wide):
    found = planned(n, *shape, **more)
    assert (found.how, found.tokens, found.wide) == ("grad_in_forward", tokens, wide)


@pytest.mark.parametrize(
    ("change", "how", "why"),
    [
        ({"workspace": 0}, "recompute_backward", "workspace is 0"),
        ({"workspace": 2**26}, "recompute_backward", "67108864 bytes holds too few"),
        ({"dtype": torch.float16}, "recompute_backward", "fp16"),
        ({"return_lse": True}, "recompute_backward", "log-sum-exps"),
        ({"reduction": "none"}, "recompute_backward", "each token has an upstream gradient"),
        ({"softcap": 43.4}, "recompute_backward", "softcap over 43.3"),
        ({"softcap": 43.4, "workspace": 2**40}, "recompute_backward", "softcap over 43.3"),
        ({"eps": 0.1}, "filtered", ""),
        ({"needs": (False,) * 3}, "none", ""),
    ],
)
def test_what_is_not_made_in_the_forward(change, how, why):
    found = planned(8192, *GEMMA, **change)
    assert found.how == how and why in found.why


def test_explain_tells_products_and_bytes():
    hidden, weight = (torch.zeros(n, 16, device=DEVICE, requires_grad=True) for n in (700, 300))
    for options, words in (
        ({}, "3 products: gradients are made in the forward, 700 of 700 tokens at a time, in a"),
        ({"workspace": 0}, "4 products or a little less, for workspace is 0"),
        ({"filter_eps": 0.1}, "drawn at random"),
    ):
        assert words in explain(hidden, weight, impl="triton", **options)
    assert "2 products" in explain(hidden, weight.detach(), impl="triton")
    assert "one product" in explain(hidden.detach(), weight.detach(), impl="triton")
