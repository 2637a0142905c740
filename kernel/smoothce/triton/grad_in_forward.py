"""Exact gradients made in the forward, some of the tokens at a time: no logit is computed twice.

The walk saves p̃_iv = exp(z_iv − o_i), in the kernels 2^ of base-2 logits. The offset o_i is the
label's logit, unless a logit lies more than 64 powers of 2 above it: then it is the largest of the
token's offsets in its tiles (`forward` says what these are), and `repair_kernel` brings the other
tiles to it. So the label's p̃ is mostly 1, which is exact in 16 bits. With w_i = a_i exp(o_i −
lse_i) and the token's coefficients a, b

    dE_i = scale (w_i Σ_v p̃_iv C_v − b_i ((1−β) C_y + β Σ_v u_v C_v))
    dC_v = scale (Σ_i p̃_iv w_i E_i − (1−β) Σ_{i: y_i = v} b_i E_i − β u_v Σ_i b_i E_i)

are two products with p̃ itself, so that no pass turns probabilities into S (`tokens.Coefficients`).
The smoothing terms are of rank one, and take part in them as a row before the first token's. That
row is û, which is u, or 1 for every entry where u is uniform, since 1 is exact in 16 bits. With κ,
`KernelCall.smoothing_factor`, it is κ û_v = β u_v, and the two products are

    [ û ]            [ Σ_v û_v C_v     ]          [ û ]ᵀ  [ ê             ]
    [ p̃ ]  ·  C  =  [ Σ_v p̃_iv C_v   ]          [ p̃ ]  · [ w_i scale E_i ]  =  dC

where ê = −κ scale Σ_i b_i E_i, over the tokens of all parts. The first gives κ Σ_v û_v C_v, the
mean that dE takes; the second gives dC its smoothing term. dE's other terms are added in fp32 when
its row is rounded. For dC the label's p̃ becomes p̃ − (1−β) b_i / w_i, one number a token.

û and ê are each the sum of two numbers in the inputs' dtype, so that the one row is three
(`SmoothingRows`). The bias's gradient is a product too, Σ_i p̃_iv w_i. Its factors w_i are rounded
to the inputs' dtype once, and so is −κ Σ_i b_i beside û.

Under a softcap ∂logit/∂product differs from logit to logit: there such a pass makes S, in place,
and the smoothing term is in it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.options import Gradients, LossOutput
from smoothce.triton.dproduct import convert_to_dproduct, write_hidden_from_dproduct
from smoothce.triton.forward import SavedProbabilities, output_of_tokens, run_forward
from smoothce.triton.tiles import LOG2E, add_matmul_fp32, matmul_fp32
from smoothce.triton.tokens import (
    Coefficients,
    KernelCall,
    PackedTokens,
    ValidCounts,
    coefficients,
    gather,
    token_slices,
    valid_first,
)
from smoothce.vocab_parallel import all_reduce_gradient

# Rows of the workspace before the first token's: three hold û, the others zeros. There are
# eight, since `weigh` puts as many before the hidden states that go into dC's product: eight rows
# of any D take whole 16-byte pieces, so that the states behind them are as aligned as without them.
LEAD = 8
# The rows that hold û, each named for the term of `SmoothingRows`'s product û ê that it has.
U_HIGH_E_HIGH = 0
U_HIGH_E_LOW = 1
U_LOW_E_HIGH = 2

REPAIR_BLOCKS = 16  # vocabulary blocks that one program of `repair_kernel` looks at
REPAIR_PROGRAMS = 4  # programs of it to the rows of a token tile


def forward_with_gradients(
    call: KernelCall, output: LossOutput, part_tokens: int, sum_in_fp32: bool
) -> Gradients:
    """Fill in the output and make the gradients, `part_tokens` tokens at a time. All that gradients
    lack is the upstream factor, which comes in the backward.

    With `sum_in_fp32` dC is summed in fp32 over the parts; otherwise each part rounds it."""
    weight = call.weight
    sums = GradientSums.allocate(call, sum_in_fp32)
    # The forward writes whole tiles, and `part_tokens` is a number of them.
    workspace = weight.new_empty(LEAD + part_tokens, call.blocks * call.tiles.width)
    tile_offsets_base2 = weight.new_empty(call.blocks * part_tokens, dtype=torch.float32)
    saved = SavedProbabilities(workspace[LEAD:], tile_offsets_base2)
    smoothing_rows = None
    if call.options.label_smoothing and call.options.softcap is None:
        smoothing_rows = SmoothingRows.written_into(workspace, call)
    loss_scale = call.loss_scale()
    upstream_loss = torch.ones((), device=loss_scale.device, dtype=torch.float32)

    places = token_slices(len(call.labels), part_tokens)
    orders = [valid_first(call.of_tokens(where)) for where in places]
    counts = ValidCounts([valid_count for _, valid_count in orders])
    for i, (where, (order, valid_count)) in enumerate(zip(places, orders, strict=True)):
        part_call = call.of_tokens(where)
        tokens, packed = gather(part_call, order, valid_count)
        run_forward(part_call, packed, tokens, output_of_tokens(output, where), saved=saved)
        # asked for after the large kernel's launch, so that the device is busy meanwhile
        n_valid = counts.values()[i]
        n = len(part_call.labels) if n_valid is None else n_valid
        part = Part(
            call=part_call,
            tokens=tokens,
            packed=packed,
            n=n,
            coefficients=coefficients(part_call, tokens, upstream_loss, loss_scale),
            saved=saved,
            rows=workspace[: LEAD + n, : len(weight)],
            d_hidden=None if sums.hidden is None else sums.hidden[where],
        )
        if call.options.softcap is not None:
            add_from_dproduct(part, sums)
        else:
            repair(part, clear=n_valid is None)
            add_from_probabilities(part, sums, smoothing_rows, is_last=where == places[-1])
        del tokens, packed, part  # before the next part takes their memory
    return sums.result(call)


@dataclass(frozen=True)
class Part:
    """Some of the tokens after their forward."""

    call: KernelCall  # of these tokens alone
    tokens: PackedTokens
    packed: Tensor  # (padded, D)
    n: int  # rows of the products: the valid tokens, or all where the host does not know them
    coefficients: Coefficients
    saved: SavedProbabilities
    rows: Tensor  # (LEAD + n, V) of the workspace: û, then the tokens' p̃
    d_hidden: Tensor | None  # (tokens, D), written


def add_from_dproduct(part: Part, sums: "GradientSums") -> None:
    """Under a softcap: turn probabilities into S, which both products take, since the cap's slope
    differs from logit to logit."""
    n = part.n
    convert_to_dproduct(part.call, part.tokens, part.coefficients, part.saved, n)
    dproduct = part.rows[LEAD:]
    # The bias is added after the scale, which S has as a factor.
    ones = torch.ones_like(part.coefficients.softmax[:n])
    sums.add_products(dproduct, part.packed[:n], ones, bias_divisor=part.call.logit_scale)
    if part.d_hidden is not None:
        d_hidden_sums = matmul_fp32(dproduct, part.call.weight)
        write_hidden_from_dproduct(part.tokens, d_hidden_sums, part.d_hidden)


def add_from_probabilities(
    part: Part, sums: "GradientSums", smoothing_rows: "SmoothingRows | None", is_last: bool
) -> None:
    """Without a softcap: both products take the probabilities themselves."""
    # dE comes first: its product takes p̃ as it is, and `weigh` changes the labels' p̃ in the
    # workspace for dC.
    if part.d_hidden is not None:
        write_hidden(part, smoothing_rows, part.d_hidden)
    if sums.weight is None and sums.bias is None:
        return
    states, bias_factors = weigh(part)
    if smoothing_rows is not None:
        smoothing_rows.add(part.packed[: part.n], part.coefficients.label[: part.n])
    # ê sums over all parts, so that the last one alone adds the smoothing term, of every token.
    if smoothing_rows is not None and is_last:
        smoothing_rows.write_factors(states, bias_factors, part.call.logit_scale)
        sums.add_products(part.rows, states, bias_factors)
    else:
        sums.add_products(part.rows[LEAD:], states[LEAD:], bias_factors[LEAD:])


def repair(part: Part, clear: bool) -> None:
    """Make all probabilities relative to their tokens' offsets. With `clear`, which is for where
    the host does not know how many tokens are valid, make the rows of masked ones 0."""
    if part.n == 0:
        return
    tiles = part.call.tiles
    rows = max(tiles.rows // REPAIR_PROGRAMS, 1)
    repair_kernel[(cdiv(part.call.blocks, REPAIR_BLOCKS), cdiv(part.n, rows))](
        memory=part.saved.probabilities,
        tile_offsets_base2=part.saved.tile_offsets_base2,
        offsets_base2=part.tokens.offset_base2,
        valid_count=part.tokens.valid_count,
        n=part.n,
        n_blocks=part.call.blocks,
        padded=len(part.tokens.offset_base2),
        stride=part.saved.probabilities.stride(0),
        CLEAR=clear,
        BLOCKS=REPAIR_BLOCKS,
        ROWS=rows,
        WIDTH=tiles.width,
    )


def write_hidden(part: Part, smoothing_rows: "SmoothingRows | None", out: Tensor) -> None:
    """Write dE of these tokens in the caller's order, (tokens, D), 0 where they are masked."""
    tokens = part.tokens
    d = out.shape[1]
    mean_weight = None
    if smoothing_rows is not None and smoothing_rows.mean_weight is None:
        products = matmul_fp32(part.rows, part.call.weight)
        smoothing_rows.take_mean_weight(products)
        products = products[LEAD:]
    else:
        products = matmul_fp32(part.rows[LEAD:], part.call.weight)
    if smoothing_rows is not None:
        mean_weight = smoothing_rows.mean_weight
    finish_hidden_kernel[(len(out),)](
        sums=products,
        order=tokens.order,
        valid_count=tokens.valid_count,
        labels=tokens.labels,
        lses_base2=tokens.lse_base2,
        offsets_base2=tokens.offset_base2,
        softmax_coefficients=part.coefficients.softmax,
        label_coefficients=part.coefficients.label,
        weight=part.call.weight,
        mean_weight=mean_weight,
        out=out,
        smoothing=part.call.options.label_smoothing,
        scale=part.call.logit_scale,
        D=d,
        BLOCK=min(1024, triton.next_power_of_2(d)),
    )


def weigh(part: Part) -> tuple[Tensor, Tensor]:
    """Make the factors of dC's product, w_i scale E_i in (LEAD + n, D), and of the bias's, w_i in
    (LEAD + n,); their first rows are 0. Changes the workspace as well: each label's p̃ becomes what
    dC takes of it (`weigh_kernel`), so that dE must have been made before."""
    n = part.n
    tokens = part.tokens
    d = part.packed.shape[1]
    states = part.packed.new_zeros(LEAD + n, d)
    bias_factors = part.packed.new_zeros(LEAD + n, dtype=torch.float32)
    if n:
        weigh_kernel[(n,)](
            packed=part.packed,
            labels=tokens.labels,
            label_logits=tokens.label_logit,
            lses_base2=tokens.lse_base2,
            offsets_base2=tokens.offset_base2,
            softmax_coefficients=part.coefficients.softmax,
            label_coefficients=part.coefficients.label,
            valid_count=tokens.valid_count,
            memory=part.saved.probabilities,
            stride=part.saved.probabilities.stride(0),
            weighed=states[LEAD:],
            token_factors=bias_factors[LEAD:],
            smoothing=part.call.options.label_smoothing,
            scale=part.call.logit_scale,
            D=d,
            BLOCK=min(1024, triton.next_power_of_2(d)),
        )
    return states, bias_factors


@dataclass
class SmoothingRows:
    """Rows of the workspace by which the smoothing term −β u_v b_i of all tokens, of rank one, is a
    part of the products. There are none without smoothing, nor under a softcap.

    The module's docstring says what û, ê and κ are. In the inputs' dtype û = û_hi + û_lo and
    ê = ê_hi + ê_lo are sums of two numbers (in fp32 the second ones are 0), and of their product
    the smallest term is left out:

        û ê ≈ û_hi ê_hi + û_hi ê_lo + û_lo ê_hi

    So there are three rows of û in the workspace, beside three rows of ê among the hidden states
    that dC's product takes:

        row             of û    of ê    of the bias's factors
        U_HIGH_E_HIGH   û_hi    ê_hi    ŵ
        U_HIGH_E_LOW    û_hi    ê_lo    0
        U_LOW_E_HIGH    û_lo    ê_hi    ŵ

    where ŵ = −κ Σ_i b_i, since the bias is added after the scale. It has no low part, since the
    tokens' factors w_i beside it are rounded to 16 bits once as well. û is in the workspace from
    the first part on, whose dE needs Σ_v û_v C_v already: the first and the last row are enough for
    that. ê and ŵ are sums over the tokens of all parts, so that the last part alone has them."""

    smoothing_factor: float  # κ
    hidden_sum: Tensor  # (D,) fp32, Σ_i b_i E_i over the parts so far
    coefficient_sum: Tensor  # () fp32, Σ_i b_i over the parts so far
    mean_weight: Tensor | None = None  # (D,) fp32 β Σ_v u_v C_v, from the first part on

    @classmethod
    def written_into(cls, workspace: Tensor, call: KernelCall) -> "SmoothingRows":
        """Write û into the workspace's first rows."""
        weight = call.weight
        v, d = weight.shape
        u_hat = call.smoothing_target
        if u_hat is None:
            u_hat = weight.new_ones(v, dtype=torch.float32)
        high = u_hat.to(weight.dtype)
        workspace[:LEAD].zero_()
        workspace[U_HIGH_E_HIGH, :v] = high
        workspace[U_HIGH_E_LOW, :v] = high
        workspace[U_LOW_E_HIGH, :v] = u_hat - high.float()
        return cls(
            call.smoothing_factor,
            hidden_sum=weight.new_zeros(d, dtype=torch.float32),
            coefficient_sum=weight.new_zeros((), dtype=torch.float32),
        )

    def take_mean_weight(self, products: Tensor) -> None:
        """Note β Σ_v u_v C_v, which is κ Σ_v û_v C_v, from the first rows of the product
        (LEAD + n, V) · C."""
        mean_weight = products[U_HIGH_E_HIGH] + products[U_LOW_E_HIGH]
        self.mean_weight = self.smoothing_factor * mean_weight

    def add(self, packed: Tensor, label_coefficients: Tensor) -> None:
        """Note the hidden states (n, D) and coefficients (n,) of a part."""
        self.hidden_sum += label_coefficients @ packed.float()
        self.coefficient_sum += label_coefficients.sum()

    def write_factors(self, states: Tensor, bias_factors: Tensor, scale: float) -> None:
        """Write what dC's product and the bias's take beside the rows of û: ê into the first rows
        of `states`, (·, D), and ŵ into those of `bias_factors`, (·,)."""
        state = -self.smoothing_factor * scale * self.hidden_sum
        states[U_HIGH_E_HIGH] = state  # which rounds it
        states[U_HIGH_E_LOW] = state - states[U_HIGH_E_HIGH].float()
        states[U_LOW_E_HIGH] = state
        bias_factor = -self.smoothing_factor * self.coefficient_sum
        bias_factors[U_HIGH_E_HIGH] = bias_factor
        bias_factors[U_LOW_E_HIGH] = bias_factor


@dataclass
class GradientSums:
    """The gradients that are wanted, up to the upstream factor, as far as parts have added to
    them."""

    hidden: Tensor | None  # (N, D), each row written once
    weight: Tensor | None  # (V, D) in the inputs' dtype, or fp32
    bias: Tensor | None  # (V,) fp32
    begun: bool = False  # whether a part has been added; `weight` holds no numbers before that

    @classmethod
    def allocate(cls, call: KernelCall, sum_in_fp32: bool) -> "GradientSums":
        hidden = call.hidden
        weight = call.weight
        d_weight = None
        if call.needs.weight:
            d_weight = torch.empty_like(weight, dtype=torch.float32 if sum_in_fp32 else None)
        return cls(
            hidden=torch.empty_like(hidden) if call.needs.hidden else None,
            weight=d_weight,
            bias=weight.new_zeros(len(weight), dtype=torch.float32) if call.needs.bias else None,
        )

    def add_products(
        self,
        rows: Tensor,  # (n, V)
        states: Tensor,  # (n, D)
        bias_factors: Tensor,  # (n,), rounded to the dtype of `rows`
        bias_divisor: float = 1.0,
    ) -> None:
        """Add rowsᵀ · states to dC, and bias_factors · rows / bias_divisor to the bias's gradient.

        The divisor is applied in fp32, where it is not rounded as the factors are."""
        if len(rows) == 0:
            return
        if self.weight is not None:
            if self.weight.dtype != rows.dtype:  # `sum_in_fp32`: dC is fp32, the rows 16 bits
                if not self.begun:
                    self.weight.zero_()
                add_matmul_fp32(self.weight, rows.T, states)
            elif self.begun:
                self.weight.addmm_(rows.T, states)
            else:
                torch.mm(rows.T, states, out=self.weight)
        if self.bias is not None:
            self.bias += matmul_fp32(bias_factors.to(rows.dtype)[None], rows)[0] / bias_divisor
        self.begun = True

    def result(self, call: KernelCall) -> Gradients:
        """Return the gradients of hidden and weight in the inputs' dtype, that of the bias in fp32:
        autograd casts it to the bias's dtype."""
        weight = self.weight
        if weight is not None:
            if not self.begun:
                weight.zero_()
            weight = weight.to(call.weight.dtype)
        hidden = all_reduce_gradient(self.hidden, call.shard)
        return Gradients(hidden=hidden, weight=weight, bias=self.bias)


@triton.jit
def repair_kernel(
    memory, tile_offsets_base2,  # (n, stride), as (blocks, padded)
    offsets_base2, valid_count,  # (padded,), (1,)
    n, n_blocks, padded, stride, CLEAR: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Make a tile's probabilities relative to their tokens' offsets, where they are not.

    CLEAR: also make the rows of masked tokens 0. It is set where the host does not know how many
    tokens are valid, since the matrix products then run over all rows."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = rows < tl.load(valid_count)
    offset_base2 = tl.load(offsets_base2 + rows, mask=valid, other=0.0)
    first = tl.program_id(0) * BLOCKS
    for block in range(first, tl.minimum((tl.program_id(0) + 1) * BLOCKS, n_blocks)):
        tile_offset_base2 = tl.load(
            tile_offsets_base2 + block * padded + rows, mask=valid, other=0.0
        )
        wrong = tile_offset_base2 != offset_base2
        if CLEAR:
            wrong = wrong | (valid == 0)
        if tl.max(wrong.to(tl.int32), 0) > 0:
            pointers = memory + rows.to(tl.int64)[:, None] * stride + block * WIDTH
            pointers += tl.arange(0, WIDTH)[None, :]
            mask = (wrong & (rows < n))[:, None]
            probabilities = tl.load(pointers, mask=mask & valid[:, None], other=0.0).to(tl.float32)
            probabilities *= tl.exp2(tile_offset_base2 - offset_base2)[:, None]
            tl.store(pointers, probabilities.to(memory.dtype.element_ty), mask=mask)


@triton.jit
def weigh_kernel(
    packed, labels, label_logits, lses_base2, offsets_base2,  # of packed tokens
    softmax_coefficients, label_coefficients, valid_count,
    memory, stride,  # p̃, whose labels' are changed
    weighed, token_factors,  # (n, D) w_i scale E_i, (n,) w_i, written
    smoothing, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: write its hidden state as dC takes it, and make its label's p̃ the
    p̃ − (1−β) b_i / w_i that dC takes.

    (dE takes the label from `finish_hidden_kernel`, which subtracts b_i (1−β) C_y.)"""
    token = tl.program_id(0)
    valid = token < tl.load(valid_count)
    lse_base2 = tl.load(lses_base2 + token)
    offset_base2 = tl.load(offsets_base2 + token)
    softmax_coefficient = tl.load(softmax_coefficients + token)
    token_factor = tl.where(valid, softmax_coefficient * tl.exp2(offset_base2 - lse_base2), 0.0)
    tl.store(token_factors + token, token_factor)
    label = tl.load(labels + token)
    if label >= 0:
        # b_i / w_i = (b_i / a_i) 2^(lse_i − o_i), which does not divide by a w_i that underflows.
        # Here a_i is b_i times a lift that is never 0 (`tokens.coefficients_kernel`). So where a_i
        # is 0, as for a token of weight 0, b_i is 0 too, and there is no label's term to lose.
        label_coefficient = tl.load(label_coefficients + token)
        b_over_a = tl.where(softmax_coefficient != 0, label_coefficient / softmax_coefficient, 0.0)
        label_probability = tl.exp2(tl.load(label_logits + token) * LOG2E - offset_base2)
        label_probability -= (1.0 - smoothing) * b_over_a * tl.exp2(lse_base2 - offset_base2)
        pointer = memory + token.to(tl.int64) * stride + label
        tl.store(pointer, label_probability.to(memory.dtype.element_ty), mask=valid)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        places = token.to(tl.int64) * D + columns
        state = tl.load(packed + places, mask=columns < D, other=0.0).to(tl.float32)
        tl.store(
            weighed + places,
            (state * (token_factor * scale)).to(weighed.dtype.element_ty),
            mask=columns < D,
        )


@triton.jit
def finish_hidden_kernel(
    sums,  # (·, D) fp32 Σ_v p̃_iv C_v, of packed tokens
    order, valid_count,
    labels, lses_base2, offsets_base2, softmax_coefficients, label_coefficients,  # of packed tokens
    weight,  # (V, D)
    mean_weight,  # (D,) β Σ_v u_v C_v; None without smoothing
    out,  # (n, D) in the caller's order, written; 0 where a token is masked
    smoothing, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, with w_i = a_i 2^(o_i − lse_i), at its place in the caller's order:

    dE_i = scale (w_i Σ_v p̃_iv C_v − b_i ((1−β) C_y + β Σ_v u_v C_v))"""
    place = tl.program_id(0).to(tl.int64)
    out_row = tl.load(order + place).to(tl.int64)
    valid_columns = tl.where(place < tl.load(valid_count), D, 0)
    factor = tl.load(softmax_coefficients + place)
    factor = factor * tl.exp2(tl.load(offsets_base2 + place) - tl.load(lses_base2 + place)) * scale
    label_coefficient = tl.load(label_coefficients + place) * scale
    label = tl.load(labels + place).to(tl.int64)
    label_columns = tl.where(label >= 0, valid_columns, 0)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        gradient = tl.load(sums + place * D + columns, mask=columns < valid_columns, other=0.0)
        label_weight = tl.load(
            weight + tl.maximum(label, 0) * D + columns,
            mask=columns < label_columns,
            other=0.0,
        )
        gradient = gradient * factor - label_coefficient * (1.0 - smoothing) * label_weight.to(
            tl.float32
        )
        if mean_weight is not None:
            mean = tl.load(mean_weight + columns, mask=columns < valid_columns, other=0.0)
            gradient -= label_coefficient * mean
        gradient = tl.where(columns < valid_columns, gradient, 0.0)
        tl.store(out + out_row * D + columns, gradient.to(out.dtype.element_ty), mask=columns < D)


@triton.jit
def scale_kernel(values, factors, size, D: tl.constexpr, BLOCK: tl.constexpr):
    """The values times one factor, or where D is given times one for each row of D numbers."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if D is not None:
        factor = tl.load(factors + places // D, mask=places < size, other=0.0)
        scaled = tl.load(values + places, mask=places < size, other=0.0).to(tl.float32) * factor
        tl.store(values + places, scaled.to(values.dtype.element_ty), mask=places < size)
    else:
        factor = tl.load(factors)
        if factor != 1.0:  # in a plain `loss.backward()` it is 1, and then nothing is read
            scaled = tl.load(values + places, mask=places < size, other=0.0).to(tl.float32) * factor
            tl.store(values + places, scaled.to(values.dtype.element_ty), mask=places < size)


def scale_gradients(
    gradients: Gradients,  # contiguous, multiplied in place
    upstream_loss: Tensor,  # fp32 (), or (N,) where there is a gradient of hidden alone
) -> None:
    """Multiply gradients made in the forward by the upstream factor that the backward brings."""
    factors = upstream_loss.contiguous()
    for gradient in gradients:
        if gradient is None or gradient.numel() == 0:
            continue
        scale_kernel[(cdiv(gradient.numel(), 4096),)](
            values=gradient,
            factors=factors,
            size=gradient.numel(),
            D=gradient.shape[1] if factors.dim() else None,
            BLOCK=4096,
            num_warps=8,
        )
