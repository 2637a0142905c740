"""What both exact gradients are made of: S = ∂loss/∂(E Cᵀ) of a tile, from saved probabilities or
from the product E Cᵀ again; matrix products in fp32; and the rows of dE from their sums.

`tokens.Coefficients` defines S, which is called `dproduct` in names. `grad_in_forward` and
`recompute_backward` build on this.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.triton.forward import SavedProbabilities
from smoothce.triton.tiles import base2_logits, descriptor, product_tile, programs, slope
from smoothce.triton.tokens import Coefficients, KernelCall, PackedTokens

CONVERT_PROGRAMS = 16  # programs of `convert_kernel` to the rows of a token tile

# `convert_kernel` raises smaller saved probabilities to this one, for it reads masked rows as 0,
# whose logarithm is −∞. It meets masked rows only where the host does not know how many tokens are
# valid (`grad_in_forward.Part`). (Columns past V in the last block hold 0 too, but what becomes of
# them is never read.) No other is smaller: `plan.SAVED_POWERS` keeps them above 2^-125, or 2.4e-38.
# This is 2^-126, the least normal number of fp32 and bf16. Triton 3.6 takes a smaller constant for
# one of fp64, and would compute all that follows from it in fp64.
LEAST_PROBABILITY = tl.constexpr(2.0**-126)


@triton.jit
def store_dproduct(
    probabilities, logits,  # of the tile, base-2 logits
    entries, rows, columns,  # its entries of the vocabulary, its tokens, its columns in dproduct
    labels, softmax_coefficients, label_coefficients, smoothing_target,
    dproduct, stride,  # written
    n_rows, V, smoothing_factor, smoothing, scale, softcap,
):  # fmt: skip
    """Store S of a tile; it is 0 for masked tokens, whose coefficients are 0."""
    known = rows < n_rows
    label = tl.load(labels + rows, mask=known, other=-1)
    label_coefficient = tl.load(label_coefficients + rows, mask=known, other=0.0)[:, None]
    softmax_coefficient = tl.load(softmax_coefficients + rows, mask=known, other=0.0)[:, None]
    gradient = probabilities * softmax_coefficient
    if smoothing_target is not None:
        u_hat = tl.load(smoothing_target + entries, mask=entries < V, other=0.0)
        gradient -= label_coefficient * (smoothing_factor * u_hat)[None, :]
    else:  # û is 1
        gradient -= label_coefficient * smoothing_factor
    is_label = label[:, None] == entries[None, :]
    gradient = tl.where(is_label, gradient - label_coefficient * (1.0 - smoothing), gradient)
    gradient *= scale if softcap is None else slope(logits, scale, softcap)
    # Columns have no mask: a row of `dproduct` has room for whole tiles of them. What the last tile
    # writes past the chunk or past V is never read.
    pointers = dproduct + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, gradient.to(dproduct.dtype.element_ty), mask=known[:, None])


@triton.jit(do_not_specialize=["n_rows", "chunk"])
def recompute_kernel(
    hidden, weight, bias, smoothing_target,  # (n_rows, D) packed, (V, D), (V,) or None twice
    labels, lses_base2, softmax_coefficients, label_coefficients,  # (n_rows,) each
    dproduct,  # written: S of entries [first_entry, first_entry + chunk)
    n_rows, V, first_entry, chunk, stride,
    smoothing_factor, smoothing, scale, softcap, D: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TMA: tl.constexpr, FLATTEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S of all tokens and of the chunk of the vocabulary that starts at `first_entry`."""
    row_tiles = tl.cdiv(n_rows, ROWS)
    n_tiles = row_tiles * tl.cdiv(chunk, WIDTH)
    workers = tl.num_programs(0)
    # Flattened into the loop over D, so that the next tile's loads start while this one is written.
    # `range` knows no `flatten`, but its unknown arguments are ignored by Triton's compiler, and
    # the interpreter takes `tl.range` (`Tiles.product_settings`).
    for tile in (tl.range if FLATTEN else range)(tl.program_id(0), n_tiles, workers, flatten=True):  # type: ignore[call-overload]
        row = (tile % row_tiles) * ROWS
        column = (tile // row_tiles) * WIDTH
        entry = first_entry + column
        product = product_tile(
            hidden, weight, row, entry, n_rows, V, D, ROWS, WIDTH, DEPTH, TMA, PRECISION
        )
        entries = entry + tl.arange(0, WIDTH)
        logits = base2_logits(product, bias, entries, V, scale, softcap)
        rows = row + tl.arange(0, ROWS)
        lse_base2 = tl.load(lses_base2 + rows, mask=rows < n_rows, other=float("inf"))
        probabilities = tl.exp2(logits - lse_base2[:, None])
        store_dproduct(
            probabilities, logits, entries, rows, column + tl.arange(0, WIDTH),
            labels, softmax_coefficients, label_coefficients, smoothing_target,
            dproduct, stride, n_rows, V, smoothing_factor, smoothing, scale, softcap,
        )  # fmt: skip


@triton.jit
def convert_kernel(
    memory,  # (n_rows, stride): saved probabilities, which become S
    tile_offsets_base2, labels, lses_base2,
    softmax_coefficients, label_coefficients, smoothing_target,
    valid_count,
    n_rows, V, padded, stride,
    smoothing_factor, smoothing, scale, softcap, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """S from saved probabilities, in the same memory."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    entries = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    valid = rows < tl.minimum(n_rows, tl.load(valid_count))  # the other tokens have none
    pointers = memory + rows.to(tl.int64)[:, None] * stride + entries[None, :]
    probabilities = tl.load(pointers, mask=valid[:, None], other=0.0).to(tl.float32)
    offset_base2 = tl.load(
        tile_offsets_base2 + tl.program_id(0) * padded + rows, mask=valid, other=0.0
    )
    logits = tl.log2(tl.maximum(probabilities, LEAST_PROBABILITY)) + offset_base2[:, None]
    lse_base2 = tl.load(lses_base2 + rows, mask=valid, other=0.0)
    probabilities *= tl.exp2(offset_base2 - lse_base2)[:, None]
    store_dproduct(
        probabilities, logits, entries, rows, entries,
        labels, softmax_coefficients, label_coefficients, smoothing_target,
        memory, stride, n_rows, V, smoothing_factor, smoothing, scale, softcap,
    )  # fmt: skip


def convert_to_dproduct(
    call: KernelCall,
    tokens: PackedTokens,
    coefficients: Coefficients,
    saved: SavedProbabilities,
    n: int,
) -> None:
    """Turn the first n tokens' probabilities into their S, in place."""
    if n == 0:
        return
    rows = max(call.tiles.rows // CONVERT_PROGRAMS, 1)
    convert_kernel[(call.blocks, cdiv(n, rows))](
        memory=saved.probabilities,
        tile_offsets_base2=saved.tile_offsets_base2,
        labels=tokens.labels,
        lses_base2=tokens.lse_base2,
        softmax_coefficients=coefficients.softmax,
        label_coefficients=coefficients.label,
        smoothing_target=call.smoothing_target,
        valid_count=tokens.valid_count,
        n_rows=n,
        V=len(call.weight),
        padded=len(tokens.lse_base2),
        stride=saved.probabilities.stride(0),
        smoothing_factor=call.smoothing_factor,
        smoothing=call.options.label_smoothing,
        scale=call.logit_scale,
        softcap=call.options.softcap,
        ROWS=rows,
        WIDTH=call.tiles.width,
    )


def recompute_dproduct(
    call: KernelCall,
    packed: Tensor,  # (n, D)
    tokens: PackedTokens,
    coefficients: Coefficients,
    out: Tensor,  # (n, stop − start or more, in whole tiles), written
    start: int,
    stop: int,
) -> Tensor:  # (n, stop − start)
    """Make S of entries [start, stop) from the product."""
    tiles = call.tiles
    recompute_kernel[(programs(packed.device),)](
        hidden=descriptor(packed, [tiles.rows, tiles.depth], tiles.tma),
        weight=descriptor(call.weight, [tiles.width, tiles.depth], tiles.tma),
        bias=call.bias,
        smoothing_target=call.smoothing_target,
        labels=tokens.labels,
        lses_base2=tokens.lse_base2,
        softmax_coefficients=coefficients.softmax,
        label_coefficients=coefficients.label,
        dproduct=out,
        n_rows=len(packed),
        V=len(call.weight),
        first_entry=start,
        chunk=stop - start,
        stride=out.stride(0),
        smoothing_factor=call.smoothing_factor,
        smoothing=call.options.label_smoothing,
        scale=call.logit_scale,
        softcap=call.options.softcap,
        D=packed.shape[1],
        **tiles.product_settings,
    )
    return out[:, : stop - start]


@triton.jit
def spread_hidden_kernel(
    sums,  # (·, D) fp32, of packed tokens
    order, valid_count,
    out,  # (n, D) in the caller's order, written; 0 where a token is masked
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: dE_i is its sum, written at the token's place in the caller's order."""
    place = tl.program_id(0).to(tl.int64)
    out_row = tl.load(order + place).to(tl.int64)
    valid_columns = tl.where(place < tl.load(valid_count), D, 0)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        gradient = tl.load(sums + place * D + columns, mask=columns < valid_columns, other=0.0)
        tl.store(out + out_row * D + columns, gradient.to(out.dtype.element_ty), mask=columns < D)


def write_hidden_from_dproduct(
    tokens: PackedTokens,
    sums: Tensor,  # (valid tokens or more, D) fp32 Σ_v S_iv C_v; rows behind them are not read
    out: Tensor,  # (n, D) of all these tokens, masked ones too, written
) -> None:
    """Write dE of these tokens in the caller's order."""
    d = out.shape[1]
    spread_hidden_kernel[(len(out),)](
        sums=sums,
        order=tokens.order,
        valid_count=tokens.valid_count,
        out=out,
        D=d,
        BLOCK=min(1024, triton.next_power_of_2(d)),
    )
