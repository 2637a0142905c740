"""What one call of the loss works on, and its tokens with the valid ones first.

Masked tokens cost nothing because the large kernels see the others alone: `valid_first` orders the
tokens, `gather` packs the valid ones' hidden states and computes their labels' logits, and
`coefficients` says what each counts in the gradients. The device alone knows how many tokens are
valid, and nothing here but `ValidCounts.values` waits for it. So memory is allocated for all
tokens. Behind the valid ones hidden states and coefficients are 0, labels −1 and `lse_base2` +∞.

Fields, and tensors in memory, follow their names. Without a suffix logits, label logits and
log-sum-exps are in nats. A name that ends in `_base2` is of a quantity in base 2, log2(e) times as
much: kernels exponentiate with exp2, so that what a backward exponentiates (`lse_base2`,
`offset_base2`) is kept that way. Kernels convert what they read; what leaves the forward for the
caller is in nats. Kernels' local variables are mostly in base 2 without a suffix, such as `logits`
as `base2_logits` returns them, and the running sums of `forward.finish_kernel`.

In the kernels of this package `scale` is the logit scale (1 without one) and `V` is how many
entries this rank has. "The product" is E Cᵀ, before scale, bias and cap.

The smoothing term has two names in code: `smoothing` is β, which the label's 1 − β takes, and
`smoothing_factor` is κ. With û, which is u, or 1 for every entry where u is uniform, it is
κ û_v = β u_v. So κ is β where there is a smoothing target, and β / V where there is none.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from smoothce.options import LossCall
from smoothce.triton.tiles import LOG2E, Tiles


@dataclass
class KernelCall(LossCall):
    """A call as every step of it takes it: contiguous tensors, and how they are worked on."""

    tiles: Tiles = field(default_factory=Tiles)
    eps: float | None = None  # the filter's threshold; None where gradients are exact
    # Blocks of this rank's part of the vocabulary, of `tiles.width` entries each, and of the rank
    # that has most, which all ranks cut their tokens by.
    blocks: int = field(init=False)
    most_blocks: int = field(init=False)
    # κ, with κ û_v = β u_v for the û that kernels take: u, or 1 for every entry where u is uniform.
    smoothing_factor: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = cdiv(len(self.weight), self.tiles.width)
        self.most_blocks = cdiv(self.most_rows, self.tiles.width)
        self.smoothing_factor = self.options.label_smoothing
        if self.smoothing_target is None:
            self.smoothing_factor /= self.vocabulary

    def of_tokens(self, where: slice) -> "KernelCall":
        """Return the call of these tokens alone.

        Its `loss_scale()` would be that of these tokens, which nobody wants: steps that work on
        some of the tokens are given the whole call's."""
        token_weights = self.token_weights
        return replace(
            self,
            hidden=self.hidden[where],
            labels=self.labels[where],
            token_weights=None if token_weights is None else token_weights[where],
        )


def token_slices(n_tokens: int, size: int) -> list[slice]:
    """Cut all tokens, in the caller's order, into pieces of at most `size`."""
    return [slice(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size)]


class PackedTokens(NamedTuple):
    """Tokens that are worked on together, valid ones first.

    "padded" is their number rounded up to whole tiles; what stands behind the valid tokens says
    that there is none. `gather` fills in the labels and their logits and leaves memory for
    `lse_base2` and `offset_base2`. `forward.run_forward` writes them, the latter where it saves
    probabilities."""

    # (n,) int32, where each token is among those of the call that they were packed from: the whole
    # call's in `filter`, those of a part or super-block in the other two ways.
    order: Tensor
    valid_count: Tensor  # (1,) int32, how many are valid
    labels: Tensor  # (padded,) int32, the label's row of C; -1 where this rank has none
    label_logit: Tensor  # (padded,) fp32 nats
    # (padded,) fp32 base 2, over the whole vocabulary and absolute, unlike that of
    # `forward.BlockSums`; +inf where there is no valid token
    lse_base2: Tensor
    offset_base2: Tensor  # (padded,) fp32 base 2, what saved probabilities are relative to
    # The filter's alone.
    hidden_total: Tensor | None = None  # (D,) fp32, Σ E_i over valid tokens
    mean_hidden: Tensor | None = None  # (D,) the mean hidden state in the inputs' dtype


@triton.jit(do_not_specialize=["n_tokens"])
def order_kernel(labels, order, valid_count, ignore_index, n_tokens, BLOCK: tl.constexpr):
    """One program counts the valid tokens, then gives each token its place."""
    n_valid = 0
    for start in range(0, n_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        label = tl.load(labels + token, mask=token < n_tokens, other=0)
        n_valid += tl.sum(((token < n_tokens) & (label != ignore_index)).to(tl.int32), 0)
    tl.store(valid_count, n_valid)
    n_before = 0  # valid tokens before those of this turn of the loop
    for start in range(0, n_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        label = tl.load(labels + token, mask=token < n_tokens, other=0)
        is_valid = ((token < n_tokens) & (label != ignore_index)).to(tl.int32)
        n_until = n_before + tl.cumsum(is_valid, 0)  # valid tokens up to each one
        place = tl.where(is_valid > 0, n_until - 1, n_valid + token - n_until)
        tl.store(order + place, token, mask=token < n_tokens)
        n_before += tl.sum(is_valid, 0)


def valid_first(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Return the stable order that puts valid tokens first, (N,) int32, and their number, (1,)."""
    labels = call.labels
    order = torch.empty(len(labels), device=labels.device, dtype=torch.int32)
    valid_count = torch.empty(1, device=labels.device, dtype=torch.int32)
    order_kernel[(1,)](
        labels=labels,
        order=order,
        valid_count=valid_count,
        ignore_index=call.options.ignore_index,
        n_tokens=len(labels),
        BLOCK=4096,
    )
    return order, valid_count


class ValidCounts:
    """Numbers of valid tokens, on their way to the host: None while a CUDA graph is captured.

    They are counted before the forward's large kernel. Whoever asks for them after its launch keeps
    the device busy meanwhile."""

    def __init__(self, counts: list[Tensor]) -> None:
        self.event: torch.cuda.Event | None = None
        self.host: list[Tensor | None] = [None] * len(counts)
        if not counts:
            return
        if not counts[0].is_cuda:
            self.host = [*counts]
        elif not torch.cuda.is_current_stream_capturing():
            self.host = [count.to("cpu", non_blocking=True) for count in counts]
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> list[int | None]:
        """The numbers. The host waits for the kernel that counts them, and for no later one."""
        if self.event is not None:
            self.event.synchronize()
        return [None if count is None else int(count.item()) for count in self.host]


@triton.jit(do_not_specialize=["first_entry"])
def gather_kernel(
    hidden, weight, bias, labels, order, valid_count,
    packed, packed_labels, label_logits,  # written, at the token's place
    first_entry, V, scale, softcap, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: copy its hidden state to its place and take the product with its label's row,
    where that is one of the V rows here, which begin at `first_entry`."""
    place = tl.program_id(0)
    valid = place < tl.load(valid_count)
    source = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    label = tl.load(labels + source, mask=valid, other=-1) - first_entry
    is_here = valid & (label >= 0) & (label < V)
    weight_row = tl.where(is_here, label, 0).to(tl.int64)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < tl.where(valid, D, 0)
        state = tl.load(hidden + source * D + columns, mask=mask, other=0.0)
        weights = tl.load(weight + weight_row * D + columns, mask=mask, other=0.0)
        products += state.to(tl.float32) * weights.to(tl.float32)
        tl.store(packed + place.to(tl.int64) * D + columns, state, mask=columns < D)
    logit = tl.sum(products, 0) * scale
    if bias is not None:
        logit += tl.load(bias + weight_row).to(tl.float32)
    if softcap is not None:  # as in `tiles.base2_logits`, but in nats
        logit = softcap * (1.0 - 2.0 / (tl.exp2(logit * (2.0 * LOG2E / softcap)) + 1.0))
    tl.store(label_logits + place, tl.where(is_here, logit, 0.0))
    tl.store(packed_labels + place, tl.where(is_here, label, -1).to(tl.int32))


def gather(
    call: KernelCall,
    order: Tensor,  # (n,) the part of the order that belongs to these tokens
    valid_count: Tensor,  # (1,)
) -> tuple[PackedTokens, Tensor]:
    """Pack these tokens: returns them, and their hidden states, (padded, D).

    Their labels' logits are computed on the way. Where ranks share a vocabulary this is a
    collective: each rank has some of the labels' rows, and the logits are summed over the ranks."""
    shard = call.shard
    hidden = call.hidden
    d = hidden.shape[1]
    padded = cdiv(len(order), call.tiles.rows) * call.tiles.rows
    packed = hidden.new_empty(padded, d)
    tokens = PackedTokens(
        order=order,
        valid_count=valid_count,
        labels=torch.empty(padded, device=hidden.device, dtype=torch.int32),
        label_logit=torch.empty(padded, device=hidden.device, dtype=torch.float32),
        lse_base2=torch.empty(padded, device=hidden.device, dtype=torch.float32),
        offset_base2=torch.empty(padded, device=hidden.device, dtype=torch.float32),
    )
    gather_kernel[(padded,)](
        hidden=hidden,
        weight=call.weight,
        bias=call.bias,
        labels=call.labels,
        order=order,
        valid_count=valid_count,
        packed=packed,
        packed_labels=tokens.labels,
        label_logits=tokens.label_logit,
        first_entry=0 if shard is None else shard.first_entry,
        V=len(call.weight),
        scale=call.logit_scale,
        softcap=call.options.softcap,
        D=d,
        BLOCK=min(1024, triton.next_power_of_2(d)),
        num_warps=4,
    )
    if shard is not None:
        dist.all_reduce(tokens.label_logit, group=shard.group)
    return tokens, packed


class Coefficients(NamedTuple):
    """Two numbers a token, by which its gradient is made of its softmax and its smoothed label.

    S is the gradient of the loss in the product E Cᵀ, before scale, bias and cap:

        S_iv = ∂loss / ∂(E_i · C_v)
             = (a_i p_iv − b_i ((1−β) [v = y_i] + β u_v)) · f_iv
        a_i  = g_i (1 + 2ζ lse_i) + h_i
        b_i  = g_i
        dE = S C,   dC = Sᵀ E

    g_i is the upstream gradient of the token's loss, times the reduction's scale and the token's
    weight; h_i is that of its log-sum-exp. The bracket in a_i is called the *lift*. (The upstream
    *factor* is another number: that of the whole reduced loss, by which made gradients are
    multiplied in the backward.) f_iv = ∂z_iv / ∂(E_i · C_v) is `tiles.slope`: the logit
    scale, times the cap's slope under a softcap. Everywhere in smoothce.triton S is this; what the
    filter computes of it is called R (`filter`)."""

    softmax: Tensor  # a: (padded,) fp32, 0 where there is no valid token
    label: Tensor  # b: (padded,) fp32, likewise


@triton.jit
def coefficients_kernel(
    order, valid_count, lses_base2,  # (n,), (1,), (padded,) base 2
    upstream_loss, loss_scale, token_weights, upstream_lse,  # () or (N,), (), and (N,) or None
    softmax_coefficients, label_coefficients,  # (padded,) written
    padded, z_loss, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Coefficients` of BLOCK tokens; PER_TOKEN where each loss has an upstream gradient of its
    own."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = place < tl.load(valid_count)
    source = tl.load(order + place, mask=valid, other=0)
    if PER_TOKEN:
        upstream = tl.load(upstream_loss + source, mask=valid, other=0.0)
    else:
        upstream = tl.load(upstream_loss)
    label_coefficient = tl.where(valid, upstream * tl.load(loss_scale), 0.0)
    if token_weights is not None:
        label_coefficient *= tl.load(token_weights + source, mask=valid, other=0.0)
    # The z-loss ζ lse² adds 2ζ lse to the softmax's coefficient.
    lift = 1.0 + 2.0 * z_loss * (tl.load(lses_base2 + place, mask=valid, other=0.0) / LOG2E)
    # `grad_in_forward.weigh_kernel` divides the label's coefficient by the softmax's, and where
    # that is 0 it takes the token for a masked one. So no lift is 0: a number too small to matter
    # takes the place of one next to 0, also in the ways that do not divide by it.
    lift = tl.where(tl.abs(lift) < 1e-6, 1e-6, lift)
    tl.store(label_coefficients + place, label_coefficient, mask=place < padded)
    if upstream_lse is None:
        softmax_more = 0.0
    else:
        softmax_more = tl.load(upstream_lse + source, mask=valid, other=0.0)
    tl.store(
        softmax_coefficients + place,
        label_coefficient * lift + softmax_more,
        mask=place < padded,
    )


def coefficients(
    call: KernelCall,  # or the part of it whose tokens these are
    tokens: PackedTokens,
    upstream_loss: Tensor,  # fp32: (N,) of the call's or part's tokens, or () where all are alike
    loss_scale: Tensor,  # ()
    upstream_lse: Tensor | None = None,  # (N,)
) -> Coefficients:
    """Find what each of these tokens counts in the gradients."""
    if upstream_lse is not None:  # contiguous, for the gradient of a sum is one number repeated
        upstream_lse = upstream_lse.contiguous()
    padded = len(tokens.lse_base2)
    device = tokens.lse_base2.device
    softmax, label = torch.empty(2, padded, device=device, dtype=torch.float32).unbind()
    coefficients_kernel[(cdiv(padded, 1024),)](
        order=tokens.order,
        valid_count=tokens.valid_count,
        lses_base2=tokens.lse_base2,
        upstream_loss=upstream_loss.contiguous(),
        loss_scale=loss_scale,
        token_weights=call.token_weights,
        upstream_lse=upstream_lse,
        softmax_coefficients=softmax,
        label_coefficients=label,
        padded=padded,
        z_loss=call.options.z_loss,
        PER_TOKEN=upstream_loss.dim() > 0,
        BLOCK=1024,
    )
    return Coefficients(softmax, label)
