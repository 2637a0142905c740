"""What the filter does to a gradient, read off S = ∂loss/∂(E Cᵀ): with C = I, dE is S."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, error, gradients, inputs, needs_narrow_cumsum

from smoothce import linear_cross_entropy, triton
from smoothce.linear_cross_entropy import make_call
from smoothce.triton import filter
from smoothce.triton.filter import pairs
from smoothce.triton.filter.pairs import (
    BLOCK_SHIFT,
    INDEX_MASK,
    INDEX_SHIFT,
    KIND_MASK,
    SHARE_ITEM,
    TILE_ITEM,
)
from smoothce.triton.forward import empty_output
from smoothce.triton.tiles import tiles_for
from smoothce.triton.tokens import valid_first

WIDTH = tiles_for(torch.zeros(1, 64, device=DEVICE), torch.zeros(1, 64, device=DEVICE)).width


@needs_narrow_cumsum
@pytest.mark.parametrize(
    "options",
    [{"softcap": 4.0}, {"reduction": "none"}, {"z_loss": 0.05, "mixture": True}],
    ids=str,
)
def test_unbiased_filter_is_right_in_the_mean(options):
    n, times, eps = 4, 32, 0.4
    v = 3 * WIDTH
    z, _, labels, _ = inputs(n, v, v)
    z = z.repeat(times, 1)  # every copy is drawn anew
    labels = labels.repeat(times)
    eye = torch.eye(v, device=DEVICE)
    settings = {"label_smoothing": 0.1, **options}
    if settings.pop("mixture", False):
        draws = torch.randn(v, generator=torch.Generator().manual_seed(5))
        settings["smoothing_target"] = draws.softmax(0).to(DEVICE)
    _, d_hidden, d_weight = gradients("triton", z, eye, labels, filter_eps=eps, **settings)
    _, true_hidden, true_weight = gradients("reference", z, eye, labels, **settings)

    draws = d_hidden.view(times, n, v)
    mean = draws.mean(0)
    standard_error = draws.std(0) / times**0.5
    # What fp16 statistics round comes on top.
    rounding = 1e-3 * true_hidden[:n].abs() + 1e-9
    off = (mean - true_hidden[:n]) / (standard_error + rounding)
    assert off.pow(2).mean() < 2.0
    single = error(draws, true_hidden.view_as(draws))
    assert single > 3e-3  # else nothing was left out
    assert error(mean, true_hidden[:n]) < 0.35 * single
    assert error(d_weight, true_weight) < 0.35 * single
    if not {"softcap", "z_loss"} & options.keys():  # every token's row sums to zero all the same
        assert draws.sum(2).abs().max() <= 8e-3 * draws.abs().sum(2).max()


@needs_narrow_cumsum
def test_a_token_whose_label_is_forbidden_keeps_its_softmax():
    """Its loss is infinite and its gradient finite; so small a threshold leaves nothing out."""
    n, v = 8, 3 * WIDTH
    hidden, weight, labels, _ = inputs(n, v, 16)
    bias = torch.zeros(v, device=DEVICE)
    bias[labels[:2]] = -torch.inf
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, labels, bias=bias, impl="triton", filter_eps=1e-9)
    expected = linear_cross_entropy(*exact, labels, bias=bias, impl="reference")
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, leaves)
    true = torch.autograd.grad(expected, exact)
    for gradient, true_gradient in zip(found, true, strict=True):
        torch.testing.assert_close(gradient, true_gradient, rtol=1e-3, atol=1e-6)


def statistics_of(hidden, weight, labels, **options):
    """Return the share of (token, block) pairs whose gradient is computed, kept or drawn, and the
    mean over valid tokens of the softmax mass in the others."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    call = triton.kernel_call(make_call(*leaves, labels, **options))
    listed_pairs = hidden.new_zeros((), dtype=torch.float32)
    dropped_mass = torch.zeros_like(listed_pairs)
    if call.eps is None:
        return listed_pairs + 1, dropped_mass
    with torch.no_grad():
        order, valid_count = valid_first(call)
        for _, plan in filter.plan_super_blocks(call, empty_output(call), order, valid_count):
            listed_pairs += plan.listed.sum()
            # Coefficients of dropped pairs are positive, those of the others 0 or negative.
            dropped_mass += plan.pair_coefficients.clamp(min=0).sum(dtype=torch.float32)
    n_valid = valid_count[0]
    return listed_pairs / (n_valid * call.blocks), dropped_mass / n_valid


def test_blocks_of_small_norms_are_drawn_from_all_the_same():
    n, v = 128, 3 * WIDTH
    z = torch.zeros(n, v, device=DEVICE)
    z[:, :WIDTH] += 12  # leaves the other blocks next to nothing
    labels = torch.zeros(n, dtype=torch.long, device=DEVICE)
    eye = torch.eye(v, device=DEVICE)
    share_kept, _ = statistics_of(z, eye, labels, filter_eps=0.1)
    kept_of_other_blocks = pairs.DRAWN / n
    assert abs(share_kept.item() - (1 + 2 * kept_of_other_blocks) / 3) < 0.05


def test_statistics_tell_what_was_left_out():
    hidden, weight, labels, _ = inputs(90, 150, 16, masked=0.3)
    assert statistics_of(hidden, weight, labels, filter_eps=1e-12) == (1, 0)
    half = hidden.half(), weight.half()  # which are not filtered
    assert statistics_of(*half, labels, filter_eps=0.9) == (1, 0)
    share_kept, mass_left_out = statistics_of(hidden, weight, labels, filter_eps=0.9)
    width = tiles_for(hidden, weight).width
    is_valid = labels >= 0
    in_other_blocks = torch.arange(150, device=DEVICE) // width != labels[:, None] // width
    mass_in_other_blocks = ((hidden @ weight.T).softmax(1) * in_other_blocks).sum(1)
    assert 0 < mass_left_out < mass_in_other_blocks[is_valid].mean()
    assert 0 < share_kept < 1


def unpack_item(item: int) -> tuple[int, int, int]:
    """(block, index, kind), as the kernels' `unpack_item` gives them."""
    index = (item >> INDEX_SHIFT.value) & INDEX_MASK.value
    return item >> BLOCK_SHIFT.value, index, item & KIND_MASK.value


@needs_narrow_cumsum
@settings(max_examples=20, deadline=None)
@given(
    listed=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    slices=st.integers(0, 4),
    ring=st.integers(5, 12),
)
def test_queue_items_wait_only_for_earlier_ones(listed, slices, ring):
    hidden = torch.zeros(64, 16, device=DEVICE)
    tiles = tiles_for(hidden, hidden)
    most_tiles = -(-62 // tiles.pair_rows)
    ring = max(ring, most_tiles)
    counts = torch.tensor(listed, dtype=torch.int32, device=DEVICE)
    queue = pairs.schedule(counts, 60, slices, tiles, ring)
    items = queue.items[: queue.n_items.item()].tolist()
    n_shares = queue.n_shares.tolist()
    first_tile = queue.first_tile.tolist()
    tile_owner = queue.tile_owner.tolist()
    n_tiles = [-(-(n + 2) // tiles.pair_rows) for n in listed]
    assert all(min(slices, 1) <= shares <= slices for shares in n_shares)
    assert len(items) == sum(n_tiles) + sum(n_shares)
    assert len(set(items)) == len(items)

    tiles_done = [0] * len(listed)
    shares_done = [0] * len(listed)
    for item in items:
        block, index, kind = unpack_item(item)
        if kind == TILE_ITEM.value:
            tile = first_tile[block] + index
            assert tile_owner[tile] == block
            if tile >= ring:  # whose slot held another tile before
                previous = tile_owner[tile - ring]
                assert shares_done[previous] == n_shares[previous]
            tiles_done[block] += 1
        else:
            assert kind == SHARE_ITEM.value
            assert tiles_done[block] == n_tiles[block]
            shares_done[block] += 1


def call_of(v, dtype=torch.float32, bias=None, **options):
    """A call of tensors that nobody holds."""
    hidden = torch.empty(1, 16, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(v, 16, dtype=dtype, device="meta", requires_grad=True)
    labels = torch.empty(1, dtype=torch.int64, device="meta")
    return make_call(hidden, weight, labels, bias=bias, **options)


@pytest.mark.parametrize(
    ("call", "eps"),
    [
        (call_of(256000, filter_eps="auto"), 2**-8.3),
        (call_of(16000, filter_eps="auto"), 2**-7.3),
        (call_of(8000, filter_eps="auto"), None),
        (call_of(9, filter_eps=0.1), 0.1),
        (call_of(9, torch.float16, filter_eps=0.1), None),
        (call_of(9, bias=torch.empty(9, device="meta", requires_grad=True), filter_eps=0.1), None),
        (call_of(9, filter_eps=0.1, return_lse=True), None),
    ],
)
def test_the_filter_is_off_where_its_gradient_would_be_wrong(call, eps, monkeypatch):
    """And where bits are to come again: its atomics add in an order that depends on timing."""
    assert filter.threshold(call) == (eps if eps is None else pytest.approx(eps))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert filter.threshold(call) is None
