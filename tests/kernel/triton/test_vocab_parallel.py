"""A vocabulary split over two ranks (gloo; on a GPU both share it) equals one that is not."""

import datetime
import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss_check import DEVICE, WIDE_CUMSUM, inputs

from smoothce import linear_cross_entropy, token_mean_factor
from smoothce.triton import filter, plan
from smoothce.triton.tiles import tiles_for

U = torch.randn(90, generator=torch.Generator().manual_seed(1)).softmax(0).to(DEVICE)
CASES = [
    {"label_smoothing": 0.2, "smoothing_target": U, "z_loss": 0.1},
    {"label_smoothing": 0.1, "softcap": 2.0},
    {"label_smoothing": 0.1, "reduction": "none", "workspace": 0},
    {"label_smoothing": 0.1, "return_lse": True},
]


def step(hidden, weight, labels, bias, **options):
    """Loss, log-sum-exps and statistics; gradients of hidden, weight and bias."""
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    leaves = [x.detach().requires_grad_() for x in leaves]
    bias = None if bias is None else leaves[2]
    given = {"bias": bias, "return_statistics": True, **options}
    loss, *rest = linear_cross_entropy(*leaves[:2], labels, **given)
    total = loss.sum() * 2
    if options.get("return_lse"):
        total = total + rest[0].square().sum()
    return [loss.detach(), *rest[-1]], torch.autograd.grad(total, leaves)


def compare(rank, **options):
    hidden, weight, labels, bias = inputs(30, 90, 16, masked=0.2, bias=True)
    bias = None if "filter_eps" in options else bias
    mine = slice(45 * rank, 45 * rank + 45)
    of_one = {**options, "impl": "chunked"}
    whole, gradients = step(hidden, weight, labels, bias, **of_one)
    parts = hidden, weight[mine], labels, bias if bias is None else bias[mine]
    found, own = step(*parts, **options, process_group=dist.group.WORLD)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    gradients = gradients[0], *(x[mine] for x in gradients[1:])
    torch.testing.assert_close(own, gradients, rtol=1e-3, atol=1e-5)


def forbidden_on_one_rank(rank, impl):
    """Padding rows of the classifier whose bias forbids them, and a rank that has no others."""
    hidden, weight, labels, _ = inputs(20, 12, 16)
    bias = weight.new_zeros(12)
    bias[6:] = -math.inf
    mine = slice(6 * rank, 6 * rank + 6)
    labels = labels % 6
    whole, gradients = step(hidden, weight, labels, bias, impl="reference")
    parts = hidden, weight[mine], labels, bias[mine]
    found, own = step(*parts, impl=impl, process_group=dist.group.WORLD)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    gradients = gradients[0], *(x[mine] for x in gradients[1:])
    torch.testing.assert_close(own, gradients, rtol=1e-3, atol=1e-5)


def refuse_vectors_of_a_wrong_length(weight, hidden, labels):
    """Every rank refuses a vector that is neither its part nor the whole, before a collective."""
    rows = len(weight)
    for name in ("bias", "smoothing_target"):
        for shape in ((rows - 1,), (rows + 1,), (2 * rows - 1,), (2 * rows + 1,), (rows, 1), ()):
            vector = torch.full(shape, 1 / rows, device=DEVICE)
            expected = f"{name} must be ({rows},), this rank's part, or ({2 * rows},), the whole "
            said = re.escape(expected + f"vocabulary's, not {shape}")
            with pytest.raises(ValueError, match=said):
                linear_cross_entropy(
                    hidden, weight, labels, process_group=dist.group.WORLD, **{name: vector}
                )


def dtensors(rank):
    """An uneven split: DTensor's own."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    hidden, weight, labels, _ = inputs(20, 31, 16)
    mesh = dist.device_mesh.init_device_mesh(weight.device.type, (2,))
    split = tensor.distribute_tensor(weight, mesh, [tensor.Shard(0)]).requires_grad_()
    options = {"label_smoothing": 0.2, "impl": "chunked"}
    loss = linear_cross_entropy(hidden, split, labels, process_group=mesh.get_group(), **options)
    loss.backward()
    whole = weight.clone().requires_grad_()
    want = linear_cross_entropy(hidden, whole, labels, **options)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(split.grad.full_tensor(), whole.grad)
    with pytest.raises(TypeError, match=r"weight is a DTensor.*process_group="):
        linear_cross_entropy(hidden, split, labels)
    copied = tensor.distribute_tensor(weight, mesh, [tensor.Replicate()])
    with pytest.raises(ValueError, match=r"Shard\(0\) on a mesh of its 2 ranks, not .*Replicate"):
        linear_cross_entropy(hidden, copied, labels, process_group=mesh.get_group())


def compare_uneven(total, **options):
    """A DTensor of `total` rows on two ranks, which must choose the same way and the same parts."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    hidden, weight, labels, _ = inputs(100, total, 16, masked=0.2)
    mesh = dist.device_mesh.init_device_mesh(weight.device.type, (2,))
    split = tensor.distribute_tensor(weight, mesh, [tensor.Shard(0)]).requires_grad_()
    own_hidden = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(
        own_hidden, split, labels, process_group=mesh.get_group(), impl="triton", **options
    )
    loss.backward()
    whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = linear_cross_entropy(*whole, labels, impl="chunked", label_smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    found = own_hidden.grad, split.grad.full_tensor()
    torch.testing.assert_close(found, tuple(x.grad for x in whole), rtol=1e-3, atol=1e-5)


def choose_alike(rank):
    """Ranks of unequal parts decide by what all of them know: shapes are the interpreter's."""
    width = tiles_for(torch.zeros(1, 16, device=DEVICE), torch.zeros(1, 16, device=DEVICE)).width
    uneven = 2 * width + 1  # blocks: 2 on rank 0, 1 on rank 1
    smoothing = {"label_smoothing": 0.1}
    compare_uneven(uneven, workspace=16 * 2 * width * 4, **smoothing)
    if not WIDE_CUMSUM:
        filter.STATISTICS_BYTES = 2**8  # so that the blocks say how large super-blocks are
        compare_uneven(uneven, filter_eps=1e-12, **smoothing)
        # "auto" on the one rank, exact on the other
        filter.LEAST_FILTERED_ENTRIES, filter.AUTO_EPS = width + 1, 1e-12
        compare_uneven(uneven, filter_eps="auto", **smoothing)

    tensor = pytest.importorskip("torch.distributed.tensor")
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (2,))
    hidden, weight, labels, _ = inputs(20, 3, 16)
    for rows, said in (
        (3, "a rank of process_group has fewer than 2 entries"),
        (1, "at least one row on each rank of process_group, not 1 rows over 2 ranks"),
    ):
        split = tensor.distribute_tensor(weight[:rows], mesh, [tensor.Shard(0)])
        with pytest.raises(ValueError, match=said):
            linear_cross_entropy(
                hidden, split, labels, process_group=mesh.get_group(), impl="triton"
            )


def work(rank, store):
    timeout = datetime.timedelta(seconds=60)  # of a rank that waits for another which does not come
    store = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    plan.BUSY_TOKENS, plan.LEAST_TOKENS = 16, 1
    for case in CASES:
        for impl in ("chunked", "triton"):
            compare(rank, impl=impl, **case)
    for impl in ("chunked", "triton"):
        forbidden_on_one_rank(rank, impl)
    if not WIDE_CUMSUM:
        compare(rank, impl="triton", label_smoothing=0.1, filter_eps=1e-12)
    dtensors(rank)
    choose_alike(rank)
    hidden, weight, labels, _ = inputs(20, 30, 16)
    group = {"process_group": dist.group.WORLD, "impl": "chunked"}
    if not labels.is_cuda:  # there the device raises
        for given, error, said in (
            ((weight, labels.roll(rank)), ValueError, "must have the same labels"),
            ((weight[rank:], labels), ValueError, "parts of one weight that follow"),
            ((weight, labels + 60), IndexError, "expected 0 to 59"),
        ):
            with pytest.raises(error, match=said):
                linear_cross_entropy(hidden, *given, **group)
    with pytest.raises(ValueError, match="reference knows no split vocabulary"):
        linear_cross_entropy(hidden, weight, labels, **{**group, "impl": "reference"})
    refuse_vectors_of_a_wrong_length(weight, hidden, labels)
    # The ranks' means of gradients become the mean over all their tokens, 9 and 19.
    mine = torch.zeros(1, 10 * rank + 10, dtype=torch.long)
    assert token_mean_factor([mine]) == pytest.approx(2 / (9 + 19))
    dist.barrier()  # a rank that leaves first may abort the other
    dist.destroy_process_group()


@pytest.mark.timeout(600)
def test_two_ranks(tmp_path):
    mp.spawn(work, (str(tmp_path / "store"),), 2)
