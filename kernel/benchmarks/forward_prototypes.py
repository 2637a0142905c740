# mypy: allow-untyped-defs
"""How fast a fused forward could be on a Hopper GPU: prototypes beside smoothce and cuBLAS.

    python kernel/benchmarks/forward_prototypes.py --shapes gemma2-2b qwen2.5-1.5b

Each prototype finds the log-sum-exp of every token's logits, without smoothing, masks, a softcap or
anything else that a loss needs, as `smoothce.triton.forward` does: a large kernel keeps one number
of each token and tile, and a small one joins a token's tiles.

    Triton, no loss      the product's tiles alone, summed instead of exponentiated: its floor
    Triton               tiles as smoothce has them
    Gluon, cooperative   one warp loads, and two groups of four warps share each tile of 128 tokens
    Gluon, ping-pong     one warp loads, and two groups of four warps have every second tile of 64
                         tokens each, so that one multiplies while the other exponentiates

Gluon is Triton's language for layouts, shared memory and barriers by hand. It is experimental: this
file is for Triton 3.6, and later ones have renamed what it calls. A variant that takes over a
minute ends the program; the rows before it are printed by then.

(Kernels take no Python types, so mypy lets functions without annotations pass in this file.)
"""

import argparse
import dataclasses
import signal
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from bench import MODELS
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from smoothce import linear_cross_entropy

TOKENS = 8192
SHAPES = ("gemma2-2b", "llama3-8b", "qwen2.5-1.5b")  # of `MODELS`
GROUP = 16  # token tiles that take all blocks of the vocabulary before the next ones come
DEPTH = 64  # step along D
WIDTH = 256  # vocabulary entries of a tile
LOG2E = 1.4426950408889634
SECONDS = 60  # of a variant, at most
ROUNDS = 6


@triton.jit
def triton_kernel(
    hidden, weight, parts, V: tl.constexpr, FACTOR: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, LOSS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """parts[block, token]: the base-2 log-sum-exp of a tile; or without LOSS its sum."""
    n_tiles = (N // ROWS) * BLOCKS
    for tile in tl.range(tl.program_id(0), n_tiles, PROGRAMS, flatten=True):
        within = tile % (GROUP * BLOCKS)
        row = (tile // (GROUP * BLOCKS) * GROUP + within % GROUP) * ROWS
        block = within // GROUP
        logits = tl.zeros((ROWS, WIDTH), tl.float32)
        for column in range(0, D, DEPTH):
            states = hidden.load([row, column])
            weights = weight.load([block * WIDTH, column])
            logits = tl.dot(states, weights.T, logits)
        if LOSS:
            if V % WIDTH != 0:
                entries = block * WIDTH + tl.arange(0, WIDTH)
                logits = tl.where((entries < V)[None, :], logits, -1e30)
            top = tl.max(logits, 1) * FACTOR
            part = top + tl.log2(tl.sum(tl.exp2(logits * FACTOR - top[:, None]), 1))
        else:
            part = tl.sum(logits, 1)
        tl.store(parts + block * N + row + tl.arange(0, ROWS), part)


@triton.jit
def join_kernel(
    parts, lses, n_blocks, FACTOR: tl.constexpr,
    N: tl.constexpr, PROGRAM_TOKENS: tl.constexpr, STEP_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of PROGRAM_TOKENS tokens, in nats, from those of their tiles.

    Each step of the loop reads STEP_BLOCKS of their blocks of the vocabulary."""
    rows = tl.program_id(0) * PROGRAM_TOKENS + tl.arange(0, PROGRAM_TOKENS)
    top = tl.full((STEP_BLOCKS, PROGRAM_TOKENS), -1e38, tl.float32)
    total = tl.zeros((STEP_BLOCKS, PROGRAM_TOKENS), tl.float32)
    for first in range(0, n_blocks, STEP_BLOCKS):
        blocks = first + tl.arange(0, STEP_BLOCKS)
        mask = (blocks < n_blocks)[:, None]
        part = tl.load(parts + blocks[:, None] * N + rows[None, :], mask=mask, other=-1e38)
        new_top = tl.maximum(top, part)
        total = total * tl.exp2(top - new_top) + tl.exp2(part - new_top)
        top = new_top
    whole_top = tl.max(top, 0)
    whole = tl.sum(total * tl.exp2(top - whole_top[None, :]), 0)
    tl.store(lses + rows, (whole_top + tl.log2(whole)) / FACTOR)


@gluon.jit
def tile_place(
    tile, BLOCKS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr
):
    """The first token and the first vocabulary entry of a tile."""
    within = tile % (GROUP * BLOCKS)
    row = (tile // (GROUP * BLOCKS) * GROUP + within % GROUP) * ROWS
    return row, within // GROUP * WIDTH


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next buffer of the ring, and the phase of its barriers, which changes with each round."""
    is_last = stage + 1 == STAGES
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def load_tiles(
    hidden, weight, states, weights, full, empty, turns, parts,
    V: gl.constexpr, FACTOR: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, PING_PONG: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """The loading warp: it fills the ring with the pieces of every tile of this program."""
    PIECES: gl.constexpr = 1 if PING_PONG else 2
    PIECE_ROWS: gl.constexpr = ROWS // PIECES
    stage = 0
    # All buffers are empty at first. A wait for phase 1 of a barrier that nobody has arrived at
    # returns at once, so the first round of the ring waits for that phase of `empty`. Of `full` the
    # first phase that is waited for is 0, which ends when the buffer has been loaded.
    phase = 1
    for tile in range(gl.program_id(0), (N // ROWS) * BLOCKS, PROGRAMS):
        row, entry = tile_place(tile, BLOCKS, ROWS, WIDTH, GROUP)
        for column in range(0, D, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (ROWS + WIDTH) * DEPTH * 2)
            for piece in gl.static_range(PIECES):
                tma.async_copy_global_to_shared(
                    hidden, [row + piece * PIECE_ROWS, column], barrier,
                    states.index(stage * PIECES + piece),
                )  # fmt: skip
            tma.async_copy_global_to_shared(weight, [entry, column], barrier, weights.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply_tiles(
    WHICH: gl.constexpr,
    hidden, weight, states, weights, full, empty, turns, parts,
    V: gl.constexpr, FACTOR: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, PING_PONG: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Warp group WHICH of two: half the rows of every tile, or with PING_PONG every other tile."""
    PIECES: gl.constexpr = 1 if PING_PONG else 2
    PIECE_ROWS: gl.constexpr = ROWS // PIECES
    STEPS: gl.constexpr = D // DEPTH
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    first = gl.program_id(0)
    step = PROGRAMS
    piece: gl.constexpr = 0 if PING_PONG else WHICH
    stage = 0
    phase = 0
    if PING_PONG:
        first += WHICH * PROGRAMS
        step = 2 * PROGRAMS
        stage = (WHICH * STEPS) % STAGES
        phase = (WHICH * STEPS // STAGES) & 1
    turn = 0
    for tile in range(first, (N // ROWS) * BLOCKS, step):
        row, entry = tile_place(tile, BLOCKS, ROWS, WIDTH, GROUP)
        if PING_PONG:
            # Only when the other group has multiplied the tile before this one. The first tile of
            # all has none before it: group 0 waits for phase 1 there, which returns at once as in
            # `load_tiles`. Group 1 waits at its first tile for phase 0, which ends when group 0 has
            # multiplied the first of all. From then on each waits for the other phase at each turn:
            # 1, 0, 1, … in group 0 and 0, 1, 0, … in group 1.
            mbarrier.wait(turns.index(WHICH), (turn & 1) ^ (1 - WHICH))
        logits = warpgroup_mma_init(gl.zeros((PIECE_ROWS, WIDTH), gl.float32, MMA))
        for k in range(0, STEPS):
            mbarrier.wait(full.index(stage), phase)
            tile_states = states.index(stage * PIECES + piece)
            tile_weights = weights.index(stage).permute((1, 0))
            logits = warpgroup_mma(tile_states, tile_weights, logits, use_acc=k > 0, is_async=True)
            logits = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[logits]))
            # The product before this one is done, and its buffer free. `stage` is not kept in a
            # second variable: Triton 3.6 takes such a one for constant within the loop.
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        if PING_PONG:
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)
        turn += 1  # noqa: SIM113  # kernels know no `enumerate`
        if PING_PONG:  # past the other group's tile
            ahead = stage + STEPS
            phase = (phase + ahead // STAGES) & 1
            stage = ahead % STAGES

        if V % WIDTH != 0:  # noqa: SIM102  # this is decided by the compiler, and the next is not
            if entry + WIDTH > V:
                entries = entry + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA))
                logits = gl.where(gl.expand_dims(entries < V, 0), logits, -1e30)
        top = gl.reduce(logits, 1, larger) * FACTOR
        exponentials = gl.exp2(logits * FACTOR - gl.expand_dims(top, 1))
        part = top + gl.log2(gl.reduce(exponentials, 1, add))
        rows = row + piece * PIECE_ROWS + gl.arange(0, PIECE_ROWS, layout=gl.SliceLayout(1, MMA))
        gl.store(parts + entry // WIDTH * N + rows, part)


@gluon.jit
def gluon_kernel(
    hidden, weight, parts, V: gl.constexpr, FACTOR: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, PING_PONG: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """As `triton_kernel`, with a warp that loads and two warp groups that multiply."""
    PIECES: gl.constexpr = 1 if PING_PONG else 2
    states = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * PIECES, ROWS // PIECES, DEPTH], hidden.layout
    )
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDTH, DEPTH], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=PIECES)
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
    gl.warp_specialize(
        [
            (multiply_tiles, (0, hidden, weight, states, weights, full, empty, turns, parts, V,
             FACTOR, N, D, BLOCKS, GROUP, PROGRAMS, PING_PONG, STAGES, ROWS, WIDTH, DEPTH)),
            (multiply_tiles, (1, hidden, weight, states, weights, full, empty, turns, parts, V,
             FACTOR, N, D, BLOCKS, GROUP, PROGRAMS, PING_PONG, STAGES, ROWS, WIDTH, DEPTH)),
            (load_tiles, (hidden, weight, states, weights, full, empty, turns, parts, V,
             FACTOR, N, D, BLOCKS, GROUP, PROGRAMS, PING_PONG, STAGES, ROWS, WIDTH, DEPTH)),
        ],
        # The first group is the launch's own num_warps=4. These are the others: warps of the second
        # group and of the loading one, and registers of a thread of each.
        [4, 1],
        [240, 24],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of a shape, and memory for what the prototypes find."""

    hidden: Tensor  # (TOKENS, D) bf16
    weight: Tensor  # (V, D) bf16
    labels: Tensor  # (TOKENS,)
    logits: Tensor  # (TOKENS, V) bf16, which cuBLAS writes
    parts: Tensor  # (blocks, TOKENS) fp32
    lses: Tensor  # (TOKENS,) fp32

    @classmethod
    def of(cls, v: int, d: int) -> "Problem":
        torch.manual_seed(0)
        return cls(
            hidden=torch.randn(TOKENS, d, device="cuda", dtype=torch.bfloat16),
            weight=(torch.randn(v, d, device="cuda") * (2.5 / d**0.5)).bfloat16(),
            labels=torch.randint(v, (TOKENS,), device="cuda"),
            logits=torch.empty(TOKENS, v, device="cuda", dtype=torch.bfloat16),
            parts=torch.empty(triton.cdiv(v, WIDTH), TOKENS, device="cuda"),
            lses=torch.empty(TOKENS, device="cuda"),
        )

    def product(self) -> None:
        torch.mm(self.hidden, self.weight.T, out=self.logits)

    def smoothce(self) -> None:
        with torch.no_grad():
            found = linear_cross_entropy(self.hidden, self.weight, self.labels, return_lse=True)
        self.lses.copy_(found[1])

    def triton(self, loss: bool = True) -> None:
        rows = 128
        hidden = TensorDescriptor.from_tensor(self.hidden, [rows, DEPTH])
        weight = TensorDescriptor.from_tensor(self.weight, [WIDTH, DEPTH])
        programs = multiprocessors()
        triton_kernel[(programs,)](
            hidden, weight, self.parts, LOSS=loss, PROGRAMS=programs,
            ROWS=rows, num_warps=8, num_stages=4, **self.settings(),
        )  # fmt: skip
        self.join()

    def gluon(self, ping_pong: bool) -> None:
        rows = 64 if ping_pong else 128
        # Of a tile's tokens a multiplying warp group takes 64 in either case.
        layout = gl.NVMMASharedLayout.get_default_for([64, DEPTH], gl.bfloat16)
        hidden = GluonDescriptor.from_tensor(self.hidden, [64, DEPTH], layout)
        layout = gl.NVMMASharedLayout.get_default_for([WIDTH, DEPTH], gl.bfloat16)
        weight = GluonDescriptor.from_tensor(self.weight, [WIDTH, DEPTH], layout)
        programs = multiprocessors()
        gluon_kernel[(programs,)](
            hidden, weight, self.parts, PROGRAMS=programs, PING_PONG=ping_pong,
            STAGES=5 if ping_pong else 4, ROWS=rows, num_warps=4, **self.settings(),
        )  # fmt: skip
        self.join()

    def settings(self) -> dict[str, int | float]:
        """What both kernels take alike."""
        v, d = self.weight.shape
        return {
            "V": v,
            "FACTOR": LOG2E,
            "N": TOKENS,
            "D": d,
            "BLOCKS": len(self.parts),
            "GROUP": GROUP,
            "WIDTH": WIDTH,
            "DEPTH": DEPTH,
        }

    def join(self) -> None:
        program_tokens = 32
        join_kernel[(TOKENS // program_tokens,)](
            self.parts, self.lses, len(self.parts), FACTOR=LOG2E, N=TOKENS,
            PROGRAM_TOKENS=program_tokens, STEP_BLOCKS=64,
        )  # fmt: skip

    def error(self) -> float:
        """The largest difference of a log-sum-exp, in nats, over some tokens."""
        some = torch.arange(0, TOKENS, 127, device="cuda")
        exact = torch.logsumexp(self.hidden[some].float() @ self.weight.float().T, 1)
        return (self.lses[some] - exact).abs().max().item()


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def milliseconds(run: Callable[[], None], product: Callable[[], None]) -> tuple[float, float]:
    """Medians of `run` and of cuBLAS's product, which take turns."""
    run()  # compiled and chosen
    product()
    torch.cuda.synchronize()
    times: dict[Callable[[], None], list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    for _ in range(ROUNDS):
        for timed in (product, run, run, product):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            timed()
            end.record()
            times.setdefault(timed, []).append((begin, end))
    torch.cuda.synchronize()
    return (
        statistics.median(begin.elapsed_time(end) for begin, end in times[run]),
        statistics.median(begin.elapsed_time(end) for begin, end in times[product]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print("| shape | forward | ms | products | error |\n|---|---|---|---|---|")
    for shape in arguments.shapes:
        time_shape(shape, Problem.of(*MODELS[shape]))


def time_shape(shape: str, problem: Problem) -> None:
    """Print a row of the table for each forward."""
    variants: dict[str, Callable[[], None]] = {
        "smoothce": problem.smoothce,
        "Triton, no loss": lambda: problem.triton(loss=False),
        "Triton": problem.triton,
        "Gluon, cooperative": lambda: problem.gluon(ping_pong=False),
        "Gluon, ping-pong": lambda: problem.gluon(ping_pong=True),
    }
    for name, run in variants.items():
        signal.alarm(SECONDS)
        its, product = milliseconds(run, problem.product)
        run()
        error = "" if name == "Triton, no loss" else f"{problem.error():.0e}"
        signal.alarm(0)
        print(f"| {shape} | {name} | {its:.2f} | {its / product:.3f} | {error} |", flush=True)


if __name__ == "__main__":
    main()
