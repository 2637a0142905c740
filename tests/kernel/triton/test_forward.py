"""How the forward's work is cut: every tile is some program's, and none is two programs'."""

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_check import DEVICE

from smoothce.triton.forward import share


@triton.jit
def cover_kernel(
    count, tiles, work, n_blocks, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """How often each (token block, vocabulary block) is visited, and each program's visits."""
    n = tl.load(count)
    program = tl.program_id(0)
    visits = 0
    o = tl.arange(0, BLOCK)
    for group in range(0, tl.cdiv(n, ROWS * GROUP)):
        start, n_rows, _, first, last, begin, step = share(
            program, n, group, n_blocks, tl.num_programs(0), ROWS, GROUP
        )
        for i in range(begin, n_rows, step):
            inside = (o >= first) & (o < last)
            tl.atomic_add(tiles + (start + i) * n_blocks + o, 1, mask=inside)
            visits += last - first
    tl.store(work + program, visits)


def cover(n, n_blocks, workers, rows, group):
    tiles = torch.zeros(-(-n // rows), n_blocks, dtype=torch.int32, device=DEVICE)
    work = torch.zeros(workers, dtype=torch.int32, device=DEVICE)
    count = torch.tensor([n], dtype=torch.int32, device=DEVICE)
    block = triton.next_power_of_2(n_blocks)
    cover_kernel[(workers,)](count, tiles, work, n_blocks, ROWS=rows, GROUP=group, BLOCK=block)
    return tiles, work


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 200),
    n_blocks=st.integers(1, 40),
    workers=st.integers(1, 12),
    group=st.integers(1, 12),
)
def test_every_tile_has_one_program(n, n_blocks, workers, group):
    tiles, work = cover(n, n_blocks, workers, 16, min(group, workers))
    assert (tiles == 1).all()
    assert work.sum() == tiles.numel()


def test_shares_are_even():
    """132 programs do not divide 64 token blocks; nobody has 4 % more than the mean."""
    _, work = cover(1024, 120, 132, 16, 12)
    assert work.max() <= 1.04 * work.float().mean()
