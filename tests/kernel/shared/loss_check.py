"""The criterion of all these tests: at most twice the error of PyTorch in the same dtype."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from triton import __version__ as triton_version

from smoothce import linear_cross_entropy
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
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bf16
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# Of gradients of fewer numbers than FEW: where their terms cancel, which of two errors is the
# larger is luck.
FEW, FLOOR_OF_FEW = 16, 1e-4

ANY_SHAPE_AND_OPTION = {  # of `check`
    "n": st.integers(0, 70),
    "v": st.integers(2, 160),
    "d": st.integers(1, 40),
    "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "softcap": st.sampled_from([None, 2.0]),
    "logit_scale": st.sampled_from([None, -1.7]),
    "z_loss": st.sampled_from([0.0, 0.1, -0.3]),
    "bias": st.booleans(),
    "mixture": st.booleans(),
    "weighted": st.booleans(),
    "masked": st.sampled_from([0.0, 0.4, 1.0]),
    "ignore_index": st.sampled_from([-100, 0]),
    "needs": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    "apart": st.booleans(),
    "scaled": st.booleans(),
    "passes": st.sampled_from([1, 2]),
    "seed": st.integers(0, 1000),
}


def inputs(n, v, d, dtype=torch.float32, masked=0.0, bias=False, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g)
    weight = torch.randn(v, d, generator=g) * (spread / d**0.5)
    labels = torch.randint(0, v, (n,), generator=g)
    labels[torch.rand(n, generator=g) < masked] = -100
    b = torch.randn(v, generator=g).to(DEVICE, dtype) if bias else None
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE), b


def spaced(hidden, weight, labels, bias):
    """The same numbers, in memory that is not contiguous."""
    matrices = (x.T.repeat_interleave(2, 1).contiguous().T[::2] for x in (hidden, weight))
    bias = bias if bias is None else bias.repeat_interleave(2)[::2]
    return *matrices, torch.stack([labels] * 3, 1)[:, 0], bias


def gradients(impl, *data, upstream=None, needs=(True, True, True), passes=1, **options):
    """Loss and the gradients that are needed of hidden, weight and, if there is one, bias. Of
    `impl` None what one writes without this package: logits in the inputs' dtype, cross_entropy in
    fp32. With more `passes` through one graph, those of each; what is done to a gradient in place,
    as an optimizer may, leaves the next right."""
    hidden, weight, labels, bias = (*data, None)[:4]
    leaves = [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip((hidden, weight, bias), needs, strict=True)
    ]
    if impl is None:
        value = torch_loss(*leaves[:2], labels, leaves[2], **options)
    else:
        value = linear_cross_entropy(*leaves[:2], labels, bias=leaves[2], impl=impl, **options)
    upstream = torch.ones_like(value) if upstream is None else upstream.to(value)
    found, wanted = [value.detach()], [t for t in leaves if t is not None and t.requires_grad]
    for left in reversed(range(passes if wanted else 0)):
        made = torch.autograd.grad(value, wanted, upstream, retain_graph=left > 0)
        found += [gradient.clone() for gradient in made]
        for gradient in made:
            gradient.fill_(7)
    return found


def torch_loss(hidden, weight, labels, bias, smoothing_target=None, token_weights=None, **options):
    asked, z = Options(**options), F.linear(hidden, weight)
    if asked.logit_scale is not None:
        z = z * asked.logit_scale
    if bias is not None:
        z = z + bias
    if asked.softcap is not None:
        z = asked.softcap * torch.tanh(z / asked.softcap)
    z, valid = z.to(torch.promote_types(z.dtype, torch.float32)), labels != asked.ignore_index
    v, target = z.shape[1], labels.where(valid, 0)
    u = z.new_full((v,), 1 / v) if smoothing_target is None else smoothing_target
    soft = (asked.label_smoothing * u).repeat(len(z), 1)
    soft.scatter_add_(1, target[:, None], torch.full_like(soft[:, :1], 1 - asked.label_smoothing))
    losses = F.cross_entropy(z, soft, reduction="none") + asked.z_loss * z.logsumexp(1).square()
    omega = torch.ones_like(losses) if token_weights is None else token_weights
    losses = torch.where(valid, losses * omega, 0)
    if asked.reduction == "none":
        return losses
    total = torch.where(valid, omega, 0).sum()
    return losses.sum() / (total if asked.reduction == "mean" and total > 0 else 1)


def error(found, expected):
    return (
        (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)
    ).item()


def check(n, v, d, dtype=torch.float32, masked=0.0, bias=False, seed=0, apart=False, **options):
    """The Triton loss and gradients against the reference in wider numbers; a tiny eps drops
    nothing. `mixture` and `weighted` ask for a smoothing target and for token weights, `apart` for
    inputs that are not contiguous, `scaled` for an upstream gradient. `impl` "chunked" is held to
    the reference's own error in the dtype."""
    impl = options.pop("impl", "triton")
    data = inputs(n, v, d, dtype, masked, bias, seed)
    data[2][data[2] == -100] = ignored = options.get("ignore_index", -100)
    g = torch.Generator().manual_seed(seed + 1)
    if options.pop("mixture", False):
        options["smoothing_target"] = torch.randn(v, generator=g).softmax(0).to(DEVICE)
    if options.pop("weighted", False):
        options["token_weights"] = torch.rand(n, generator=g).to(DEVICE)
    shape = (n,) if options.get("reduction") == "none" else ()
    if options.pop("scaled", bool(shape)):
        options["upstream"] = torch.randn(shape, generator=g).to(DEVICE)
    exact = {**options, "filter_eps": None}
    wider = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
    wide = [t.to(wider) if t is not None and t.is_floating_point() else t for t in data]
    expected = gradients("reference", *wide, **exact)
    plain = gradients("reference" if impl == "chunked" else None, *data, **exact)
    if apart:
        data = spaced(*data)
    if DEVICE == "cuda":  # freed memory of NaN, for the next allocations to find
        del_me = [torch.full((2**i,), float("nan"), device=DEVICE) for i in range(8, 22)]
        del del_me
    found = gradients(impl, *data, **options)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    for i, (a, b, c) in enumerate(zip(found, expected, plain, strict=True)):
        assert torch.isfinite(a).all(), i
        if n == 0 or (data[2] == ignored).all():
            assert not a.any(), i
            continue
        ours, theirs = error(a, b), error(c, b)
        floor = FLOOR[dtype]
        # A loss less its z-loss may be next to nothing.
        if a.numel() < FEW and (i > 0 or options.get("z_loss", 0) < 0):
            floor = max(floor, FLOOR_OF_FEW)
        assert ours <= 2 * theirs + floor, (i, ours, theirs)  # 0 is the loss, others gradients
