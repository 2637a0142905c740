"""The criterion of all these tests: at most twice the error of PyTorch in the same dtype."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from triton import __version__ as triton_version

from smoothce import reference, triton
from smoothce.options import Options
from smoothce.triton.tiles import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Before 3.3 the interpreter holds tl.cumsum of int32 in 8-byte elements that it calls int32, and
# tl.store writes all 8: the last element's upper half falls on what follows. So the filtered
# backward's schedule loses tiles. Compiled kernels are not affected.
WIDE_CUMSUM = INTERPRETED and tuple(map(int, triton_version.split(".")[:2])) < (3, 3)
runs_schedule = pytest.mark.skipif(
    WIDE_CUMSUM, reason="Triton < 3.3's interpreter stores tl.cumsum of int32 as int64"
)
FLOOR = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# Of gradients of fewer numbers than FEW: where their terms cancel, which of two errors is the
# larger is luck.
FEW, FLOOR_OF_FEW = 16, 1e-4


def inputs(n, v, d, dtype=torch.float32, masked=0.0, bias=False, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g)
    weight = torch.randn(v, d, generator=g) * (spread / d**0.5)
    labels = torch.randint(0, v, (n,), generator=g)
    labels[torch.rand(n, generator=g) < masked] = -100
    b = torch.randn(v, generator=g).to(DEVICE, dtype) if bias else None
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE), b


def poison():
    """Freed memory of NaN, for the next allocations to find."""
    if DEVICE == "cuda":
        del_me = [torch.full((2**i,), float("nan"), device=DEVICE) for i in range(8, 22)]
        del del_me


def gradients(loss, hidden, weight, labels, bias, options, upstream=None):
    """Loss and the gradients of hidden and weight; the kernels make none of the bias."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    value = loss(*leaves, labels, bias, options)
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    return [value.detach()] + [t.grad for t in leaves]


def torch_loss(hidden, weight, labels, bias, options):
    """What one writes without this package: logits in the inputs' dtype, cross_entropy in fp32."""
    z = F.linear(hidden, weight)
    if options.logit_scale is not None:
        z = z * options.logit_scale
    if bias is not None:
        z = z + bias
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    loss = F.cross_entropy(
        z.float(),
        labels,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    return loss


def error(found, expected):
    return (
        (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)
    ).item()


def check(n, v, d, dtype=torch.float32, masked=0.0, bias=False, seed=0, **options):
    """The Triton loss and gradients against the reference in wider numbers; a tiny eps drops
    nothing."""
    options = Options(**options)
    data = inputs(n, v, d, dtype, masked, bias, seed)
    upstream = None
    if options.reduction == "none":
        upstream = torch.randn(n, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    exact = replace(options, filter_eps=None)
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    wide = [t.to(wider) if t is not None and t.is_floating_point() else t for t in data]
    expected = gradients(reference.loss, *wide, exact, upstream)
    plain = gradients(torch_loss, *data, exact, upstream)
    poison()
    found = gradients(triton.loss, *data, options, upstream)
    for name, a, b, c in zip(("loss", "hidden", "weight"), found, expected, plain, strict=True):
        assert torch.isfinite(a).all(), name
        if n == 0 or (data[2] == -100).all():
            assert not a.any(), name
            continue
        ours, theirs = error(a, b), error(c, b)
        floor = FLOOR[dtype]
        if name != "loss" and a.numel() < FEW:
            floor = max(floor, FLOOR_OF_FEW)
        assert ours <= 2 * theirs + floor, (name, ours, theirs)
