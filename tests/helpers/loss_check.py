"""The criterion of the tests of the loss: at most twice the error of PyTorch in the same dtype.

`check` applies it to a call that is described by numbers and flags, which `ANY_SHAPE_AND_OPTION`
draws at random. `inputs`, `gradients` and `error` are its parts, for tests that compare otherwise.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from triton import __version__ as triton_version

from smoothce import linear_cross_entropy
from smoothce.options import Options
from smoothce.triton.tiles import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Before Triton 3.3 the interpreter holds tl.cumsum of int32 in 8-byte elements that it calls int32,
# and tl.store writes all 8: the last element's upper half falls on what follows. So the filtered
# backward's schedule loses tiles. Compiled kernels are not affected.
WIDE_CUMSUM = INTERPRETED and tuple(map(int, triton_version.split(".")[:2])) < (3, 3)
# The mark of tests that run the filtered backward's schedule.
needs_narrow_cumsum = pytest.mark.skipif(
    WIDE_CUMSUM, reason="Triton < 3.3's interpreter stores tl.cumsum of int32 as int64"
)
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bf16
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# A gradient of few numbers may have terms that cancel: which of two errors is larger is luck then.
FEW_NUMBERS = 16
FLOOR_OF_FEW = 1e-4

# Keywords of `check`, and what each is drawn from. Those that `check` does not name itself, such as
# `needs` and the options of the loss, are in its `**options`.
ANY_SHAPE_AND_OPTION = {
    "n": st.integers(0, 70),
    "v": st.integers(2, 160),
    "d": st.integers(1, 40),
    "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "softcap": st.sampled_from([None, 2.0]),
    "logit_scale": st.sampled_from([None, -1.7]),
    "z_loss": st.sampled_from([0.0, 0.1, -0.3]),
    "bias": st.booleans(),
    "with_smoothing_target": st.booleans(),
    "with_token_weights": st.booleans(),
    "masked": st.sampled_from([0.0, 0.4, 1.0]),
    "ignore_index": st.sampled_from([-100, 0]),
    "needs": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    "noncontiguous": st.booleans(),
    "with_upstream": st.booleans(),
    "passes": st.sampled_from([1, 2]),
    "seed": st.integers(0, 1000),
}


def inputs(n, v, d, dtype=torch.float32, masked=0.0, bias=False, seed=0, spread=1.0):
    """Hidden states (n, d), a classifier (v, d), labels (n,) of which about a share `masked` is
    -100, and a bias (v,) or None. Logits have a standard deviation of about `spread`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * (spread / d**0.5)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < masked] = -100
    bias_values = None
    if bias:
        bias_values = torch.randn(v, generator=generator).to(DEVICE, dtype)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE), bias_values


def noncontiguous_copies(hidden, weight, labels, bias):
    """The same numbers, in memory that is not contiguous."""
    if bias is not None:
        bias = bias.repeat_interleave(2)[::2]
    return (
        noncontiguous_matrix(hidden),
        noncontiguous_matrix(weight),
        torch.stack([labels] * 3, 1)[:, 0],
        bias,
    )


def noncontiguous_matrix(matrix):
    return matrix.T.repeat_interleave(2, 1).contiguous().T[::2]


def gradients(
    impl,
    hidden,
    weight,
    labels,
    bias=None,
    upstream=None,
    needs=(True, True, True),
    passes=1,
    **options,
):
    """The loss, and those gradients of hidden, weight and bias that are needed, in a list.

    With `impl` None they are those of what one writes without this package: `torch_loss`. With more
    `passes` through one graph the list has the gradients of each. What is done to a gradient in
    place, as an optimizer may, must leave the next right."""
    leaves = []
    for tensor, need in zip((hidden, weight, bias), needs, strict=True):
        leaves.append(None if tensor is None else tensor.detach().requires_grad_(need))
    hidden, weight, bias = leaves
    if impl is None:
        loss = torch_loss(hidden, weight, labels, bias, **options)
    else:
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, impl=impl, **options)
    results = [loss.detach()]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if not wanted:
        return results
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    for number in range(passes):
        graph_is_needed = number < passes - 1
        made = torch.autograd.grad(loss, wanted, upstream, retain_graph=graph_is_needed)
        results += [gradient.clone() for gradient in made]
        for gradient in made:
            gradient.fill_(7)
    return results


def torch_loss(hidden, weight, labels, bias, smoothing_target=None, token_weights=None, **options):
    """The loss with logits in the inputs' dtype, and `F.cross_entropy` of them in fp32."""
    options = Options(**options)
    logits = F.linear(hidden, weight)
    if options.logit_scale is not None:
        logits = logits * options.logit_scale
    if bias is not None:
        logits = logits + bias
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

    n, v = logits.shape
    valid = labels != options.ignore_index
    if smoothing_target is None:
        smoothing_target = logits.new_full((v,), 1 / v)
    target = (options.label_smoothing * smoothing_target).repeat(n, 1)
    at_label = target.new_full((n, 1), 1 - options.label_smoothing)
    target.scatter_add_(1, labels.where(valid, 0)[:, None], at_label)
    losses = F.cross_entropy(logits, target, reduction="none")
    losses = losses + options.z_loss * logits.logsumexp(1).square()

    if token_weights is None:
        token_weights = torch.ones_like(losses)
    losses = torch.where(valid, losses * token_weights, 0)
    if options.reduction == "none":
        return losses
    total_weight = torch.where(valid, token_weights, 0).sum()
    if options.reduction == "mean" and total_weight > 0:
        return losses.sum() / total_weight
    return losses.sum()


def error(found, expected):
    """The norm of the difference, relative to the norm of what is expected."""
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def check(
    n,
    v,
    d,
    dtype=torch.float32,
    masked=0.0,
    bias=False,
    seed=0,
    *,
    impl="triton",
    with_smoothing_target=False,
    with_token_weights=False,
    with_upstream=False,
    noncontiguous=False,
    **options,
):
    """Assert that an implementation's loss and gradients have at most twice PyTorch's error.

    Errors are against the reference in wider numbers. The chunked path is held to the reference's
    error in the dtype instead of to that of `torch_loss`. A `filter_eps` must be so small that it
    drops nothing. An upstream gradient is drawn where there is no reduction, too.

    `options` go to `gradients`, which takes `needs`, `passes` and `upstream` and hands the others
    to the loss. A new option of the loss must be computed in `torch_loss`, too."""
    hidden, weight, labels, bias = inputs(n, v, d, dtype, masked, bias, seed)
    ignore_index = options.get("ignore_index", -100)
    labels[labels == -100] = ignore_index
    generator = torch.Generator().manual_seed(seed + 1)
    if with_smoothing_target:
        target = torch.randn(v, generator=generator).softmax(0)
        options["smoothing_target"] = target.to(DEVICE)
    if with_token_weights:
        options["token_weights"] = torch.rand(n, generator=generator).to(DEVICE)
    unreduced = options.get("reduction") == "none"
    if with_upstream or unreduced:
        shape = (n,) if unreduced else ()
        options["upstream"] = torch.randn(shape, generator=generator).to(DEVICE)

    exact = {**options, "filter_eps": None}
    tensors = hidden, weight, labels, bias
    expected = gradients("reference", *(wider(x) for x in tensors), **exact)
    comparison = gradients("reference" if impl == "chunked" else None, *tensors, **exact)
    if noncontiguous:
        tensors = noncontiguous_copies(*tensors)
    leave_nan_in_freed_memory()
    found = gradients(impl, *tensors, **options)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert all(x.isfinite().all() for x in found)
    if n == 0 or (labels == ignore_index).all():
        assert not any(x.any() for x in found)
        return
    # A loss less its z-loss may be next to nothing.
    loss_may_cancel = options.get("z_loss", 0) < 0
    for index, (ours, right, theirs) in enumerate(zip(found, expected, comparison, strict=True)):
        is_loss = index == 0
        floor = FLOOR[dtype]
        if ours.numel() < FEW_NUMBERS and (loss_may_cancel or not is_loss):
            floor = max(floor, FLOOR_OF_FEW)
        our_error = error(ours, right)
        their_error = error(theirs, right)
        assert our_error <= 2 * their_error + floor, (index, our_error, their_error)


def wider(tensor):
    """In fp32 where it is in 16 bits, in fp64 where it is in fp32; labels and None as they are."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.to(torch.float32 if is_half else torch.float64)


def leave_nan_in_freed_memory():
    """For the next allocations on a GPU to find, if they read what they have not written."""
    if DEVICE == "cuda":
        blocks = [torch.full((2**size,), float("nan"), device=DEVICE) for size in range(8, 22)]
        del blocks
