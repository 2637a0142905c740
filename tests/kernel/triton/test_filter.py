"""What the filter does to a gradient, read off dlogits: with C = I, dE is dlogits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, error, gradients, inputs, runs_schedule

from smoothce import triton
from smoothce.options import Options
from smoothce.triton import filter_plan, threshold
from smoothce.triton.tiles import tiles_for

WIDTH = tiles_for(torch.zeros(1, 64, device=DEVICE), torch.zeros(1, 64, device=DEVICE)).width


@runs_schedule
@pytest.mark.parametrize(
    "options",
    [{"softcap": 4.0}, {"reduction": "none"}, {"z_loss": 0.05, "mixture": True}],
    ids=str,
)
def test_unbiased_filter_is_right_in_the_mean(options):
    n, times, eps = 4, 48, 0.4
    v = 3 * WIDTH
    z, _, labels, _ = inputs(n, v, v)
    z, labels = z.repeat(times, 1), labels.repeat(times)  # every copy is drawn anew
    eye = torch.eye(v, device=DEVICE)
    settings = {"label_smoothing": 0.1, **options}
    if settings.pop("mixture", False):
        draws = torch.randn(v, generator=torch.Generator().manual_seed(5))
        settings["smoothing_target"] = draws.softmax(0).to(DEVICE)
    both = gradients("triton", z, eye, labels, filter_eps=eps, **settings)[1:]
    want = gradients("reference", z, eye, labels, **settings)[1:]
    found = both[0].view(times, n, v)
    mean, spread = found.mean(0), found.std(0) / times**0.5
    off = (mean - want[0][:n]) / (spread + 1e-3 * want[0][:n].abs() + 1e-9)
    assert off.pow(2).mean() < 2.0  # in standard errors; what fp16 statistics round comes on top
    single = error(found, want[0].view_as(found))
    assert single > 3e-3  # else nothing was left out
    assert error(mean, want[0][:n]) < 0.35 * single
    assert error(both[1], want[1]) < 0.35 * single
    if not {"softcap", "z_loss"} & options.keys():  # every token's row sums to zero all the same
        assert found.sum(2).abs().max() <= 8e-3 * found.abs().sum(2).max()


def test_blocks_of_small_norms_are_drawn_from_all_the_same():
    n, v = 128, 3 * WIDTH
    z = torch.zeros(n, v, device=DEVICE)
    z[:, :WIDTH] += 12  # leaves the other blocks next to nothing
    labels = torch.zeros(n, dtype=torch.long, device=DEVICE)
    eye = torch.eye(v, device=DEVICE)
    options = Options(filter_eps=0.1)
    kept, _ = triton.filter_statistics(z, eye, labels, None, options)
    assert abs(kept.item() - (1 + 2 * filter_plan.DRAWN / n) / 3) < 0.05


def test_statistics_tell_what_was_left_out():
    hidden, weight, labels, _ = inputs(90, 150, 16, masked=0.3)
    given = hidden, weight, labels, None
    assert [*map(float, triton.filter_statistics(*given, Options(filter_eps=1e-12)))] == [1, 0]
    kept, mass = triton.filter_statistics(*given, Options(filter_eps=0.9))
    width, valid = tiles_for(hidden, weight).width, labels >= 0
    elsewhere = torch.arange(150, device=DEVICE) // width != labels[:, None] // width
    most = ((hidden @ weight.T).softmax(1) * elsewhere).sum(1)[valid].mean()
    assert 0 < mass < most and 0 < kept < 1


@runs_schedule
@settings(max_examples=30, deadline=None)
@given(
    kept=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    slices=st.integers(0, 4),
    ring=st.integers(5, 12),
)
def test_queue_items_wait_only_for_earlier_ones(kept, slices, ring):
    hidden = torch.zeros(64, 16, device=DEVICE)
    tiles = tiles_for(hidden, hidden)
    counts = torch.tensor(kept, dtype=torch.int32, device=DEVICE)
    most = -(-62 // tiles.pair_rows)
    ring = max(ring, most)
    queue = filter_plan.schedule(counts, 60, slices, tiles, ring)
    readers = queue.readers.tolist()
    items = queue.items[: queue.total.item()].tolist()
    first, owner = queue.first.tolist(), queue.owner.tolist()
    n_tiles = [-(-(k + 2) // tiles.pair_rows) for k in kept]
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


@pytest.mark.parametrize(("v", "eps"), [(256000, 2**-8.3), (16000, 2**-7.3), (8000, None)])
def test_auto_is_exact_where_filtering_would_lose_or_bits_are_to_come_again(v, eps, monkeypatch):
    """The filter's atomics add in an order that depends on timing."""
    found = threshold(Options(filter_eps="auto"), v)
    assert found == (eps if eps is None else pytest.approx(eps))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert threshold(Options(filter_eps=0.1), v) is None
