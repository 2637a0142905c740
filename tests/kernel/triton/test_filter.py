"""What the filter does to a gradient, read off dlogits: with C = I, dE is dlogits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE, error, gradients, inputs, runs_schedule

from smoothce import reference, triton
from smoothce.options import Options
from smoothce.triton import function, plan
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


@runs_schedule
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("eps", [0.01, 0.05, 0.9])
def test_dropped_blocks_keep_their_mass(eps, beta):
    v = 150
    z, _, labels, _ = inputs(45, 1, v, spread=1.0)
    labels = torch.randint(0, v, (45,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    eye = torch.eye(v, device=DEVICE)
    width = tiles_for(z, eye).width
    options = Options(label_smoothing=beta, filter_eps=eps, filter_unbiased=False)
    _, found, d_weight = gradients(triton.loss, z, eye, labels, None, options)
    expected = implied_dlogits(z, labels, eps, beta, width)
    # masses are kept with fp16 and bf16 precision, relative to themselves
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-5 / len(z))
    torch.testing.assert_close(d_weight, expected.T @ z, rtol=2e-2, atol=2e-4)
    assert found.sum(1).abs().max() <= 8e-3 * found.abs().sum(1).max()


def width_for():
    z = torch.zeros(1, 64, device=DEVICE)
    return tiles_for(z, z).width


def copies(n, times, v, seed=3):
    """n tokens, each `times` times: every copy is drawn anew, so that they show the mean."""
    z, _, _, _ = inputs(n, 1, v, spread=1.0)
    labels = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return z.repeat(times, 1), labels.repeat(times)


@runs_schedule
@pytest.mark.parametrize(
    ("eps", "options"),
    [(0.1, {}), (0.4, {}), (0.4, {"softcap": 4.0}), (0.4, {"reduction": "none"})],
    ids=str,
)
def test_unbiased_filter_is_right_in_the_mean(eps, options):
    n, times = 4, 48
    v = 3 * width_for()
    z, labels = copies(n, times, v)
    eye = torch.eye(v, device=DEVICE)
    both = {}
    for unbiased in (True, False):
        settings = Options(label_smoothing=0.1, filter_eps=eps, filter_unbiased=unbiased, **options)
        upstream = torch.ones(len(z), device=DEVICE) if "reduction" in options else None
        both[unbiased] = gradients(triton.loss, z, eye, labels, None, settings, upstream)[1:]
    want = gradients(reference.loss, z, eye, labels, None, settings, upstream)[1:]
    found = both[True][0].view(times, n, v)
    mean, spread = found.mean(0), found.std(0) / times**0.5
    off = (mean - want[0][:n]) / (spread + 1e-3 * want[0][:n].abs() + 1e-9)
    assert off.pow(2).mean() < 2.0  # in standard errors; what fp16 statistics round comes on top
    biased = both[False][0][:n]
    assert error(mean, want[0][:n]) < 0.5 * error(biased, want[0][:n])
    assert error(both[True][1], want[1]) < 0.5 * error(both[False][1], want[1])
    if "softcap" not in options:  # every token's row sums to zero all the same
        assert found.sum(2).abs().max() <= 8e-3 * found.abs().sum(2).max()


def test_drawn_pairs_and_their_weights(monkeypatch):
    """1 − coefficient / mass is the weight, 1 / probability; equal inputs have equal plans."""
    monkeypatch.setattr(plan, "DRAWN", 1e-6)  # the threshold alone
    v, eps = 3 * width_for(), 0.2
    z, labels = copies(5, 60, v)
    eye = torch.eye(v, device=DEVICE)
    call = function.Call(z, eye, None, labels, Options(filter_eps=eps), (True, True, False))
    plans = []
    for _ in range(2):
        losses = torch.empty(2, len(labels), device=DEVICE)
        ((tokens, statistics),) = call.blocks(True, *losses)
        plans.append(plan.plan(statistics, tokens, eps, True, call.tiles))
    assert torch.equal(plans[0].kept, plans[1].kept)
    assert torch.equal(plans[0].mass, plans[1].mass)
    width = call.tiles.width
    for j, (kept, mass) in enumerate(zip(plans[0].kept.tolist(), plans[0].mass, strict=True)):
        rows = plans[0].rows[j, :kept].long()
        assert torch.equal(rows, plans[1].rows[j, :kept].long())
        p = z.softmax(1)[:, j * width : (j + 1) * width]
        norm = (p.amax(1) * p.sum(1)).sqrt()
        target = (labels >= j * width) & (labels < (j + 1) * width)
        chance = torch.where(target, 1.0, (norm / eps).clamp(max=1))
        listed = torch.zeros_like(target)
        listed[rows] = True
        weight = 1 - mass[: len(z)].float() / p.sum(1)
        assert (mass[: len(z)][~listed] > 0).all()
        torch.testing.assert_close(weight[listed], 1 / chance[listed], rtol=3e-2, atol=1e-2)
        assert abs(kept - chance.sum()) < 5 * (chance * (1 - chance)).sum().sqrt() + 1


def test_blocks_of_small_norms_are_drawn_from_all_the_same():
    width, n = width_for(), 256
    v = 3 * width
    z = torch.zeros(n, v, device=DEVICE)
    z[:, :width] += 12  # leaves the other blocks next to nothing
    labels = torch.zeros(n, dtype=torch.long, device=DEVICE)
    eye = torch.eye(v, device=DEVICE)
    options = Options(filter_eps=0.1)
    kept, _ = triton.filter_statistics(z, eye, labels, None, options)
    assert abs(kept.item() - (1 + 2 * plan.DRAWN / n) / 3) < 0.05


def test_statistics_tell_what_was_dropped():
    hidden, weight, labels, _ = inputs(45, 150, 16, masked=0.3)
    for eps in (1e-12, 0.9):
        options = Options(filter_eps=eps, filter_unbiased=False)
        kept, mass = triton.filter_statistics(hidden, weight, labels, None, options)
        drawn = Options(filter_eps=eps)
        kept_drawn, mass_drawn = triton.filter_statistics(hidden, weight, labels, None, drawn)
        assert kept_drawn >= kept and mass_drawn <= mass
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


@runs_schedule
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


@pytest.mark.parametrize(
    ("unbiased", "v", "eps"),
    [
        (True, 256000, 2**-8.3),
        (True, 16000, 2**-7.3),
        (True, 8000, None),
        (False, 256000, 2**-10.6),
        (False, 32768, None),
    ],
)
def test_auto_is_exact_where_filtering_would_lose(unbiased, v, eps):
    found = function.threshold(Options(filter_unbiased=unbiased), v)
    assert found == (eps if eps is None else pytest.approx(eps))
