"""Attention for packed rows, by torch's flash kernels, against plain attention."""

import itertools

import pytest
import torch
from torch import Tensor

from sweeps.training import attention


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float, window: int
) -> Tensor:
    """Each conversation's attention, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    outs = []
    for first, end in itertools.pairwise(bounds.tolist()):
        apart = torch.arange(end - first)[:, None] - torch.arange(end - first)
        seen = (apart >= 0) & (apart < (window or end))
        one = (x[first:end].transpose(0, 1) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            *one, attn_mask=seen.to(query.device), scale=scaling
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 256), (8, 4, 64)])
@pytest.mark.parametrize("window", [0, 5, 96])
def test_flash_attention_is_attention(heads, groups, size, window, compiled):
    torch.manual_seed(0)
    lengths = torch.tensor([0, 130, 1, 37, 300, 44])
    bounds, total = lengths.cumsum(0).int().cuda(), int(lengths.sum())
    shapes = [(heads, size), (heads // groups, size), (heads // groups, size)]
    exact = [
        torch.randn(total, *shape, device="cuda").bfloat16().float().requires_grad_()
        for shape in shapes
    ]
    gradient = torch.randn(total, heads, size, device="cuda").bfloat16().float()
    expected = one_by_one(*exact, bounds, size**-0.5, window)
    expected.backward(gradient)
    given = [x.detach().bfloat16().requires_grad_() for x in exact]

    def attend(*inputs):
        heads_first = (x.transpose(0, 1)[None] for x in inputs)
        told = {"cu_seq_lens_q": bounds, "max_length_q": 384, "sliding_window": window}
        return attention.packed_attention(None, *heads_first, None, **told)[0][0]

    run = torch.compile(attend, dynamic=True) if compiled else attend
    found = run(*given)
    found.backward(gradient.bfloat16())
    for left, right in zip(
        [found, *(x.grad for x in given)], [expected, *(x.grad for x in exact)], strict=True
    ):
        error = (left.float() - right).norm() / right.norm()
        assert error < 1e-2, error
