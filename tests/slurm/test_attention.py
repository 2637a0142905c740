"""Attention for packed rows, by torch's flash kernels, against plain attention."""

import itertools

import pytest
import torch
from torch import Tensor

from sweeps.training.attention import packed_attention


def attention_one_by_one(
    query: Tensor,  # (T, H, d)
    key: Tensor,  # (T, H_kv, d)
    value: Tensor,  # (T, H_kv, d)
    bounds: Tensor,  # (n + 1,)
    scaling: float,
    window: int,
) -> Tensor:  # (T, H, d)
    """Each conversation's attention by torch, with the mask written out; window 0 is none."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    outputs = []
    for start, end in itertools.pairwise(bounds.tolist()):
        length = end - start
        distance = torch.arange(length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance < (window or end))
        output = torch.nn.functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1),
            key[start:end].transpose(0, 1),
            value[start:end].transpose(0, 1),
            attn_mask=visible.to(query.device),
            scale=scaling,
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def assert_relatively_close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 1e-2, error


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 256), (8, 4, 64)])
@pytest.mark.parametrize("window", [0, 5, 96])
def test_flash_attention_is_attention(heads, groups, size, window, compiled):
    torch.manual_seed(0)
    lengths = torch.tensor([0, 130, 1, 37, 300, 44])
    total = int(lengths.sum())
    bounds = lengths.cumsum(0).int().cuda()

    def draw(head_count: int) -> Tensor:
        """Numbers that bf16 holds exactly, in fp32."""
        return torch.randn(total, head_count, size, device="cuda").bfloat16().float()

    exact = [draw(heads), draw(heads // groups), draw(heads // groups)]
    for tensor in exact:
        tensor.requires_grad_()
    gradient = draw(heads)
    expected = attention_one_by_one(*exact, bounds, size**-0.5, window)
    expected.backward(gradient)
    inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs)
        output, _ = packed_attention(
            None,
            query,
            key,
            value,
            None,
            cu_seq_lens_q=bounds,
            max_length_q=384,
            sliding_window=window,
        )
        return output[0]

    run = torch.compile(attend, dynamic=True) if compiled else attend
    output = run(*inputs)
    output.backward(gradient.bfloat16())
    assert_relatively_close(output, expected)
    for half, full in zip(inputs, exact, strict=True):
        assert_relatively_close(half.grad, full.grad)
