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
`LossCall.smoothing_factor`, it is κ û_v = β u_v, and the two products are

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

from smoothce.options import Gradients
from smoothce.triton.dproduct import (
    add_matmul_fp32,
    convert_to_dproduct,
    matmul_fp32,
    write_hidden_from_dproduct,
    write_hidden_from_probabilities,
)
from smoothce.triton.forward import Results, SavedProbabilities, run_forward
from smoothce.triton.made_gradients import MadeGradients
from smoothce.triton.tiles import LOG2E
from smoothce.triton.tokens import (
    Coefficients,
    LossCall,
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

    (dE takes the label from `dproduct.finish_hidden_kernel`, which subtracts b_i (1−β) C_y.)"""
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


def forward_with_gradients(
    call: LossCall, results: Results, part_tokens: int, sum_in_fp32: bool
) -> MadeGradients:
    """Fill in the results and make the gradients, `part_tokens` tokens at a time.

    With `sum_in_fp32` dC is summed in fp32 over the parts; otherwise each part rounds it."""
    places = token_slices(len(call.inputs.labels), part_tokens)
    orders = [valid_first(call.of_tokens(where)) for where in places]
    counts = ValidCounts([valid_count for _, valid_count in orders])
    maker = GradientMaker.allocate(call, part_tokens, sum_in_fp32)
    for i, (where, (order, valid_count)) in enumerate(zip(places, orders, strict=True)):
        part_call = call.of_tokens(where)
        tokens, packed = gather(part_call, order, valid_count)
        own_results = results.of_tokens(where)
        run_forward(part_call, packed, tokens, own_results, saved=maker.workspace.saved)
        # asked for after the large kernel's launch, so that the device is busy meanwhile
        n_valid = counts.values()[i]
        maker.add(Part.of(part_call, where, tokens, packed, n_valid))
        del tokens, packed  # before the next part takes their memory
    return MadeGradients(maker.sums.result(call))


@dataclass(frozen=True)
class Workspace:
    """The memory that holds some tokens' probabilities, and û before them."""

    memory: Tensor  # (LEAD + tokens, blocks · width) in the inputs' dtype
    saved: SavedProbabilities  # the tokens' rows of it, which the forward writes
    entries: int  # V: columns that have an entry of the vocabulary

    @classmethod
    def allocate(cls, call: LossCall, part_tokens: int) -> "Workspace":
        weight = call.inputs.weight
        tiles = call.tiles
        # The forward writes whole tiles, and `part_tokens` is a number of them.
        memory = weight.new_empty(LEAD + part_tokens, call.blocks * tiles.width)
        tile_offsets_base2 = weight.new_empty(call.blocks * part_tokens, dtype=torch.float32)
        return cls(memory, SavedProbabilities(memory[LEAD:], tile_offsets_base2), len(weight))

    def rows(self, n: int) -> Tensor:
        """What there is of the first n tokens, (n, V)."""
        return self.memory[LEAD : LEAD + n, : self.entries]

    def rows_with_lead(self, n: int) -> Tensor:
        """The same after the rows of û, (LEAD + n, V)."""
        return self.memory[: LEAD + n, : self.entries]


@dataclass(frozen=True)
class Part:
    """Some of the tokens after their forward."""

    call: LossCall  # of these tokens alone
    where: slice  # which of the caller's tokens they are
    tokens: PackedTokens
    packed: Tensor  # (padded, D)
    n: int  # rows of the products: the valid tokens, or all where the host does not know them
    count_known: bool

    @classmethod
    def of(
        cls,
        call: LossCall,
        where: slice,
        tokens: PackedTokens,
        packed: Tensor,
        n_valid: int | None,
    ) -> "Part":
        size = where.stop - where.start
        n = size if n_valid is None else n_valid
        return cls(call, where, tokens, packed, n, count_known=n_valid is not None)


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
    def written_into(cls, workspace: Workspace, call: LossCall) -> "SmoothingRows":
        """Write û into the workspace's first rows."""
        weight = call.inputs.weight
        v, d = weight.shape
        u_hat = call.inputs.smoothing_target
        if u_hat is None:
            u_hat = weight.new_ones(v, dtype=torch.float32)
        high = u_hat.to(weight.dtype)
        memory = workspace.memory
        memory[:LEAD].zero_()
        memory[U_HIGH_E_HIGH, :v] = high
        memory[U_HIGH_E_LOW, :v] = high
        memory[U_LOW_E_HIGH, :v] = u_hat - high.float()
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
    def allocate(cls, call: LossCall, sum_in_fp32: bool) -> "GradientSums":
        hidden = call.inputs.hidden
        weight = call.inputs.weight
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

    def result(self, call: LossCall) -> Gradients:
        """The gradients of hidden and weight in the inputs' dtype, that of the bias in fp32:
        autograd casts it to the bias's dtype."""
        weight = self.weight
        if weight is not None:
            if not self.begun:
                weight.zero_()
            weight = weight.to(call.inputs.weight.dtype)
        hidden = all_reduce_gradient(self.hidden, call.inputs.shard)
        return Gradients(hidden=hidden, weight=weight, bias=self.bias)


def products_take_probabilities(call: LossCall) -> bool:
    """Whether dE and dC are products with p̃ itself. Under a softcap they take S, since the cap's
    slope differs from logit to logit."""
    return call.inputs.options.softcap is None


@dataclass(frozen=True)
class GradientMaker:
    """Makes the gradients, part by part, from the probabilities in its workspace."""

    workspace: Workspace
    sums: GradientSums
    smoothing_rows: SmoothingRows | None  # None without smoothing, and under a softcap
    upstream_loss: Tensor  # () 1: the upstream factor comes in the backward
    loss_scale: Tensor  # ()
    n_tokens: int  # of all parts

    @classmethod
    def allocate(cls, call: LossCall, part_tokens: int, sum_in_fp32: bool) -> "GradientMaker":
        inputs = call.inputs
        loss_scale = inputs.loss_scale()
        sums = GradientSums.allocate(call, sum_in_fp32)
        workspace = Workspace.allocate(call, part_tokens)
        smoothing_rows = None
        if inputs.options.label_smoothing and products_take_probabilities(call):
            smoothing_rows = SmoothingRows.written_into(workspace, call)
        upstream_loss = torch.ones((), device=loss_scale.device, dtype=torch.float32)
        return cls(workspace, sums, smoothing_rows, upstream_loss, loss_scale, len(inputs.labels))

    def add(self, part: Part) -> None:
        """Write dE of these tokens; write dC and the bias's gradient, or add to them."""
        token_coefficients = coefficients(
            part.call, part.tokens, self.upstream_loss, self.loss_scale
        )
        if products_take_probabilities(part.call):
            self.add_from_probabilities(part, token_coefficients)
        else:
            self.add_from_dproduct(part, token_coefficients)

    def add_from_dproduct(self, part: Part, token_coefficients: Coefficients) -> None:
        """Under a softcap: turn probabilities into S, which both products take."""
        n = part.n
        inputs = part.call.inputs
        convert_to_dproduct(part.call, part.tokens, token_coefficients, self.workspace.saved, n)
        dproduct = self.workspace.rows(n)
        # The bias is added after the scale, which S has as a factor.
        ones = torch.ones_like(token_coefficients.softmax[:n])
        self.sums.add_products(dproduct, part.packed[:n], ones, bias_divisor=inputs.logit_scale)
        if self.sums.hidden is not None:
            d_hidden_sums = matmul_fp32(dproduct, inputs.weight)
            write_hidden_from_dproduct(part.tokens, d_hidden_sums, self.sums.hidden[part.where])

    def add_from_probabilities(self, part: Part, token_coefficients: Coefficients) -> None:
        """Without a softcap: both products take the probabilities themselves."""
        self.repair(part)
        # dE comes first: its product takes p̃ as it is, and `weigh` changes the labels' p̃ in the
        # workspace for dC.
        if self.sums.hidden is not None:
            self.write_hidden(part, token_coefficients, self.sums.hidden[part.where])
        if self.sums.weight is None and self.sums.bias is None:
            return
        states, bias_factors = self.weigh(part, token_coefficients)
        smoothing_rows = self.smoothing_rows
        if smoothing_rows is not None:
            n = part.n
            smoothing_rows.add(part.packed[:n], token_coefficients.label[:n])
        # ê sums over all parts, so that the last one alone adds the smoothing term, of every token.
        is_last_part = part.where.stop == self.n_tokens
        if smoothing_rows is not None and is_last_part:
            smoothing_rows.write_factors(states, bias_factors, part.call.inputs.logit_scale)
            rows = self.workspace.rows_with_lead(part.n)
            self.sums.add_products(rows, states, bias_factors)
        else:
            self.sums.add_products(self.workspace.rows(part.n), states[LEAD:], bias_factors[LEAD:])

    def repair(self, part: Part) -> None:
        """Make all probabilities relative to their tokens' offsets."""
        if part.n == 0:
            return
        tiles = part.call.tiles
        n_blocks = part.call.blocks
        saved = self.workspace.saved
        rows = max(tiles.rows // REPAIR_PROGRAMS, 1)
        repair_kernel[(cdiv(n_blocks, REPAIR_BLOCKS), cdiv(part.n, rows))](
            memory=saved.probabilities,
            tile_offsets_base2=saved.tile_offsets_base2,
            offsets_base2=part.tokens.offset_base2,
            valid_count=part.tokens.valid_count,
            n=part.n,
            n_blocks=n_blocks,
            padded=len(part.tokens.offset_base2),
            stride=saved.probabilities.stride(0),
            CLEAR=not part.count_known,
            BLOCKS=REPAIR_BLOCKS,
            ROWS=rows,
            WIDTH=tiles.width,
        )

    def write_hidden(
        self,
        part: Part,
        token_coefficients: Coefficients,
        out: Tensor,  # (tokens, D)
    ) -> None:
        """Write dE of the part's tokens."""
        weight = part.call.inputs.weight
        smoothing_rows = self.smoothing_rows
        if smoothing_rows is not None and smoothing_rows.mean_weight is None:
            products = matmul_fp32(self.workspace.rows_with_lead(part.n), weight)
            smoothing_rows.take_mean_weight(products)
            d_hidden_sums = products[LEAD:]
        else:
            d_hidden_sums = matmul_fp32(self.workspace.rows(part.n), weight)
        mean_weight = None
        if smoothing_rows is not None:
            mean_weight = smoothing_rows.mean_weight
        write_hidden_from_probabilities(
            part.call, part.tokens, token_coefficients, d_hidden_sums, mean_weight, out
        )

    def weigh(self, part: Part, token_coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        """The factors of dC's product, w_i scale E_i in (LEAD + n, D), and of the bias's, w_i in
        (LEAD + n,); their first rows are 0. Changes the workspace as well: each label's p̃ becomes
        what dC takes of it (`weigh_kernel`), so that dE must have been made before."""
        n = part.n
        inputs = part.call.inputs
        tokens = part.tokens
        d = part.packed.shape[1]
        states = part.packed.new_zeros(LEAD + n, d)
        bias_factors = part.packed.new_zeros(LEAD + n, dtype=torch.float32)
        if n:
            saved = self.workspace.saved
            weigh_kernel[(n,)](
                packed=part.packed,
                labels=tokens.labels,
                label_logits=tokens.label_logit,
                lses_base2=tokens.lse_base2,
                offsets_base2=tokens.offset_base2,
                softmax_coefficients=token_coefficients.softmax,
                label_coefficients=token_coefficients.label,
                valid_count=tokens.valid_count,
                memory=saved.probabilities,
                stride=saved.probabilities.stride(0),
                weighed=states[LEAD:],
                token_factors=bias_factors[LEAD:],
                smoothing=inputs.options.label_smoothing,
                scale=inputs.logit_scale,
                D=d,
                BLOCK=min(1024, triton.next_power_of_2(d)),
            )
        return states, bias_factors
