"""Which way gradients are made, from what a call is, and what `explain` says of it."""

import re

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize(
    ("n", "shape", "options", "part_tokens", "sum_in_fp32"),
    [  # a workspace of the gradients' bytes or a quarter of the logits
        (8192, GEMMA, {}, 2048, False),
        (16384, GEMMA, {}, 4096, False),
        (10000, (256000, 2048), {}, 2560, False),  # four parts, though a quarter is not whole tiles
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
    ("n", "tokens"), [(8192, 511), (8192, 700), (8192, 1023), (2**20, 5000), (100, 60)]
)
def test_the_workspace_that_a_reason_names_is_the_least_that_is_enough(n, tokens):
    """Too few tokens at a time, or too many parts, or no room for sums in fp32 beside them."""
    chosen = plan_of(n, *GEMMA, workspace=tokens * BYTES_OF_A_TOKEN)
    assert chosen.mode == "recompute_backward"
    enough = int(re.search(r"workspace=(\d+) or more", chosen.reason)[1])
    assert plan_of(n, *GEMMA, workspace=enough).mode == "grad_in_forward"
    assert plan_of(n, *GEMMA, workspace=enough - 1).mode == "recompute_backward"
