"""What the filter does to a gradient, read off dlogits: with C = I, dE is dlogits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, gradients, inputs

from smoothce import triton
from smoothce.options import Options
from smoothce.triton import plan
from smoothce.triton.tiles import tiles_for


def implied_dlogits(z, labels, eps, beta, width):
    """The definition: kept blocks as they are, dropped ones as mass times profile."""
    n, v = z.shape
    p = z.softmax(1)
    a = z.mean(0)
    model = torch.empty_like(p)
    for start in range(0, v, width):
        block = slice(start, start + width)
        has_target = (labels >= start) & (labels < start + width)
        keep = ((p[:, block].amax(1) * p[:, block].sum(1)).sqrt() >= eps) | has_target
        dropped = p[:, block].sum(1, keepdim=True) * a[block].softmax(0)
        model[:, block] = torch.where(keep[:, None], p[:, block], dropped)
    model[torch.arange(n), labels] -= 1 - beta
    return (model - beta / v) / n


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("eps", [0.01, 0.05, 0.9])
def test_dropped_blocks_keep_their_mass(eps, beta):
    v = 150
    z, _, labels, _ = inputs(45, 1, v, spread=1.0)
    labels = torch.randint(0, v, (45,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    eye = torch.eye(v, device=DEVICE)
    width = tiles_for(z, eye).width
    options = Options(label_smoothing=beta, filter_eps=eps)
    _, found, d_weight = gradients(triton.loss, z, eye, labels, None, options)
    expected = implied_dlogits(z, labels, eps, beta, width)
    # masses are kept with fp16 and bf16 precision, relative to themselves
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-5 / len(z))
    torch.testing.assert_close(d_weight, expected.T @ z, rtol=2e-2, atol=2e-4)
    assert found.sum(1).abs().max() <= 8e-3 * found.abs().sum(1).max()


def test_statistics_tell_what_was_dropped():
    hidden, weight, labels, _ = inputs(45, 150, 16, masked=0.3)
    for eps, options in ((1e-12, Options(filter_eps=1e-12)), (0.9, Options(filter_eps=0.9))):
        kept, mass = triton.filter_statistics(hidden, weight, labels, None, options)
        if eps < 1e-6:
            assert kept == 1 and mass == 0
        else:
            p = (hidden @ weight.T).softmax(1)
            valid = labels >= 0
            width = tiles_for(hidden, weight).width
            block = labels.clamp(min=0) // width
            inside = torch.arange(150, device=DEVICE)[None] // width == block[:, None]
            expected = (p * ~inside).sum(1)[valid].mean()
            torch.testing.assert_close(mass, expected, rtol=1e-2, atol=1e-3)
            assert 0 < kept < 1


@settings(max_examples=60, deadline=None)
@given(
    kept=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    slices=st.integers(0, 4),
    ring=st.integers(5, 12),
)
def test_queue_items_wait_only_for_earlier_ones(kept, slices, ring):
    hidden = torch.zeros(64, 16, device=DEVICE)
    tiles = tiles_for(hidden, hidden)
    counts = torch.tensor(kept, dtype=torch.int32, device=DEVICE)
    most = -(-62 // tiles.kept_rows)
    ring = max(ring, most)
    queue = plan.schedule(counts, 60, slices, tiles, ring)
    readers = queue.readers.tolist()
    items = queue.items[: queue.total.item()].tolist()
    first, owner = queue.first.tolist(), queue.owner.tolist()
    n_tiles = [-(-(k + 2) // tiles.kept_rows) for k in kept]
    assert all(min(slices, 1) <= r <= slices for r in readers)
    assert len(items) == sum(n_tiles) + sum(readers)
    assert len(set(items)) == len(items)
    tiles_done, slices_done = [0] * len(kept), [0] * len(kept)
    for item in items:
        block, index, kind = item >> 14, (item >> 2) & 4095, item & 3
        if kind == 0:
            tile = first[block] + index
            assert owner[tile] == block
            if tile >= ring:
                before = owner[tile - ring]
                assert slices_done[before] == readers[before]
            tiles_done[block] += 1
        else:
            assert tiles_done[block] == n_tiles[block]
            slices_done[block] += 1
