"""The loss by chunks of tokens, in plain PyTorch: for CPUs, and wherever Triton cannot serve.

The logits of one chunk (128 × V on a CPU) are all that is held at a time. They become its
probabilities and then its gradient in the same memory. Under a softcap the cap's slope, which the
gradient takes, needs as much again, and a smoothing target beside it twice as much for a while. The
entropy takes as much again for a while too.

For a reduced loss the forward computes the gradients too, up to the upstream factor, so that the
logits are computed once: three matrix products in all. Without reduction, or with the log-sum-exps
as an output, the backward computes the logits a second time.

Everything is accumulated in fp32 (fp64 for fp64 inputs).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from smoothce.autograd_tools import graph_is_kept, once_differentiable
from smoothce.options import TENSORS, Gradients, LossCall, LossOutput, Options, accumulation_dtype
from smoothce.vocab_parallel import TokenLogitSums, all_reduce_gradient, merge_shards

CPU_CHUNK_TOKENS = 128
# A GPU needs taller chunks to be busy: as many tokens as have this many logits, within limits.
GPU_CHUNK_LOGITS = 2**27
GPU_MAX_CHUNK_TOKENS = 1024
CAST_ROWS = 4096  # rows of a 16-bit classifier that are widened at a time


def loss(call: LossCall) -> LossOutput:
    """Compute the loss of `reference.loss`, without its memory."""
    return LossOutput(*ChunkedLoss.apply(call.hidden, call.weight, call.bias, call))


def unsupported(call: LossCall) -> str | None:
    return "meta tensors have no numbers" if call.hidden.is_meta else None


def describe(call: LossCall) -> str:
    """Say how the gradient is made."""
    if not any(call.needs):
        return "no gradient is wanted"
    if makes_gradients_in_forward(call.options):
        return "gradients are made in the forward"
    if call.options.return_lse:
        reason = "the log-sum-exps have an upstream gradient of their own"
    else:
        reason = "without reduction each token has an upstream gradient of its own"
    return f"the backward computes logits a second time, for {reason}"


def makes_gradients_in_forward(options: Options) -> bool:
    """Tell whether one upstream factor, which the backward brings, is all that gradients lack."""
    return options.reduction != "none" and not options.return_lse


class ChunkedLoss(torch.autograd.Function):
    """The loss, log-sum-exps and statistics, differentiable once in hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LossCall,  # has the three as well, but autograd sees only tensors that are arguments
    ) -> tuple[Tensor | None, ...]:
        options = call.options
        loss_scale = call.loss_scale(accumulation_dtype(hidden.dtype))
        ctx.set_materialize_grads(False)
        ctx.gradients_are_made = makes_gradients_in_forward(options)
        upstream = None
        if ctx.gradients_are_made and any(call.needs):
            upstream = loss_scale.expand(call.labels.shape)
        output, gradients = walk(call, upstream)
        ctx.settings = call.settings()
        tensors = call.tensors().values()
        ctx.save_for_backward(*tensors, *(gradients if ctx.gradients_are_made else [loss_scale]))

        without_gradient = [output.log_probability, output.entropy, output.argmax]
        if not options.return_lse:
            without_gradient.append(output.lse)
        ctx.mark_non_differentiable(*[x for x in without_gradient if x is not None])
        if options.reduction != "none":
            output = output._replace(loss=output.loss.sum() * loss_scale)
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, upstream_loss: Tensor | None, upstream_lse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        gradients = Gradients()
        if upstream_loss is not None or upstream_lse is not None:
            tensors = ctx.saved_tensors[: len(TENSORS)]
            hidden, weight, _, bias, *_ = tensors
            # A bias may be fp32 beside 16-bit hidden states.
            dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
            if ctx.gradients_are_made:
                gradients = Gradients(*ctx.saved_tensors[len(TENSORS) :])
            else:
                call = LossCall(*tensors, **ctx.settings)
                gradients = walk_again(call, upstream_loss, upstream_lse, ctx.saved_tensors[-1])
                upstream_loss = None
            gradients = Gradients(
                *(_scaled(g, upstream_loss, d) for g, d in zip(gradients, dtypes, strict=True))
            )
        return *gradients, None


def _scaled(
    gradient: Tensor | None, upstream_loss: Tensor | None, dtype: torch.dtype | None
) -> Tensor | None:
    """Return a gradient times the upstream factor that it lacks, if any, in its input's dtype."""
    if gradient is None or dtype is None:
        return None
    if upstream_loss is None:
        return gradient.to(dtype)
    if gradient.dtype == dtype and not graph_is_kept():
        return gradient.mul_(upstream_loss)  # its last use: spares a copy of the weight's size
    return torch.mul(gradient, upstream_loss, out=torch.empty_like(gradient, dtype=dtype))


def walk_again(
    call: LossCall, upstream_loss: Tensor | None, upstream_lse: Tensor | None, loss_scale: Tensor
) -> Gradients:
    """Make the gradients where the forward could not, since their upstream gradient is more than
    one factor: each token's loss has its own, or the log-sum-exps have one too."""
    upstream = torch.zeros_like(loss_scale)
    if upstream_loss is not None:
        upstream = upstream_loss * loss_scale
    with torch.autocast(upstream.device.type, enabled=False):
        _, gradients = walk(call, upstream.expand(call.labels.shape), upstream_lse)
    return gradients


def walk(
    call: LossCall,
    # (N,) the upstream gradient of each token's loss, times the reduction's scale, but without the
    # token's weight; None: no gradient is made
    upstream: Tensor | None = None,
    upstream_lse: Tensor | None = None,  # (N,), that of each token's log-sum-exp, or None
) -> tuple[LossOutput, Gradients]:
    """Walk over the valid tokens, chunk by chunk. Returns every token's loss, log-sum-exp and
    statistics, (N,), and the gradients that are wanted, in the accumulation dtype."""
    dtype = accumulation_dtype(call.hidden.dtype)
    call = dataclasses.replace(
        call,
        bias=None if call.bias is None else call.bias.to(dtype),
        smoothing_target=None if call.smoothing_target is None else call.smoothing_target.to(dtype),
    )
    output = _empty_output(call, dtype)
    gradients = Gradients() if upstream is None else _zero_gradients(call, dtype)
    smoothing = None
    if call.options.label_smoothing != 0 and has_linear_logits(call):
        smoothing = LinearSmoothing(call, dtype)
    valid_tokens = call.valid().nonzero().squeeze(1)  # the others cost nothing
    size = min(chunk_tokens(call), max(len(valid_tokens), 1))
    buffer = call.hidden.new_empty(size, len(call.weight), dtype=dtype)
    for tokens in valid_tokens.split(size):
        chunk = Chunk.of(call, tokens, dtype)
        # Logits, probabilities and the gradient take each other's place in the buffer.
        logits, slope = map_logits(call, chunk, buffer[: len(tokens)], upstream)
        sums_here, probabilities = softmax(call, chunk, logits, smoothing)
        sums = merge_shards(sums_here, call.shard)
        _write_output(call, output, tokens, sums)
        if upstream is None:
            continue
        if call.shard is not None:  # make the softmax over this rank's entries that over all
            probabilities.mul_((sums_here.lse - sums.lse).exp_()[:, None])
        g = upstream[tokens, None].to(dtype)
        if call.token_weights is not None:
            g = g * call.token_weights[tokens, None]
        h = None if upstream_lse is None else upstream_lse[tokens, None]
        # With h the row is g · (…) + h p, so that g has to be in it. Without, g is a factor of the
        # products' other operands, which are shorter.
        row_factor = torch.ones_like(g) if h is None else g
        operand_factor = g if h is None else torch.ones_like(g)
        rows = gradient_rows(call, chunk, probabilities, sums.lse, row_factor, h)
        if slope is not None:
            rows.mul_(slope)
        _add_products(call, chunk, gradients, rows, operand_factor, row_factor, smoothing)
        if smoothing is not None:
            smoothing.add_tokens(chunk.hidden, g)
    if smoothing is not None:
        smoothing.add_to(gradients)
    all_reduce_gradient(gradients.hidden, call.shard)
    return output, gradients


def _empty_output(call: LossCall, dtype: torch.dtype) -> LossOutput:
    """Return what masked tokens have, for all tokens."""
    labels = call.labels
    losses, lse, log_probability, entropy = [
        torch.zeros(labels.shape, dtype=dtype, device=labels.device) for _ in range(4)
    ]
    if not call.options.return_statistics:
        return LossOutput(losses, lse)
    return LossOutput(losses, lse, log_probability, entropy, torch.full_like(labels, -1))


def _zero_gradients(call: LossCall, dtype: torch.dtype) -> Gradients:
    zeros: list[Tensor | None] = []
    for tensor, needed in zip((call.hidden, call.weight, call.bias), call.needs, strict=True):
        zero = None
        if needed and tensor is not None:
            zero = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
        zeros.append(zero)
    return Gradients(*zeros)


@dataclasses.dataclass
class Chunk:
    """Some tokens that are worked on together."""

    tokens: Tensor  # (n,) int64, their places among the call's tokens
    hidden: Tensor  # (n, D) in the accumulation dtype, times the logit scale
    label_rows: Tensor  # (n, 1) int64, the label's row of this rank's classifier ...
    has_label: Tensor  # (n, 1) bool, ... where it has one: else the row is 0

    @classmethod
    def of(cls, call: LossCall, tokens: Tensor, dtype: torch.dtype) -> "Chunk":
        hidden = call.hidden[tokens].to(dtype)
        if call.logit_scale != 1.0:
            hidden.mul_(call.logit_scale)
        label_rows = call.labels[tokens, None]
        if call.shard is not None:
            label_rows = label_rows - call.shard.first_entry
        has_label = (label_rows >= 0) & (label_rows < len(call.weight))
        return cls(tokens, hidden, label_rows.where(has_label, 0), has_label)


def has_linear_logits(call: LossCall) -> bool:
    """Tell whether logits are linear in the hidden states, alike for all tokens."""
    return call.options.softcap is None


def map_logits(
    call: LossCall,
    chunk: Chunk,
    buffer: Tensor,  # (n, V), written
    upstream: Tensor | None,  # None: the slope is not wanted
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's logits, (n, V), in the buffer's memory, and their slope, (n, V).

    Of a logit x before the cap z = softcap · tanh(x / softcap) is the logit, and the slope is
    ∂z/∂x = 1 − tanh²(x / softcap). It is None without a softcap."""
    for rows, widened in _widened(call.weight, buffer.dtype):
        torch.mm(chunk.hidden, widened.T, out=buffer[:, rows])
    if call.bias is not None:
        buffer.add_(call.bias)
    softcap = call.options.softcap
    if softcap is None:
        return buffer, None
    slope = None
    buffer.div_(softcap).tanh_()
    if upstream is not None:
        slope = buffer.square().neg_().add_(1)  # 1 − tanh², with no other temporary
    return buffer.mul_(softcap), slope


def softmax(
    call: LossCall, chunk: Chunk, logits: Tensor, smoothing: "LinearSmoothing | None"
) -> tuple[TokenLogitSums, Tensor]:
    """Return what is found of the logits over this rank's entries, and their softmax over these,
    (n, V), in the logits' memory."""
    label_logit = logits.gather(1, chunk.label_rows).where(chunk.has_label, 0).squeeze(1)
    if call.options.label_smoothing == 0:
        smoothing_logit = torch.zeros_like(label_logit)
    elif smoothing is not None:
        smoothing_logit = chunk.hidden @ smoothing.mean_weight + smoothing.mean_bias
    elif call.smoothing_target is None:
        smoothing_logit = logits.sum(1) * (1 / call.vocabulary)
    else:
        smoothing_logit = _expectation(logits, call.smoothing_target)
    argmax = None
    if call.options.return_statistics:
        largest_logit, argmax = logits.max(1)
    else:
        largest_logit = logits.amax(1)
    probabilities = torch.softmax(logits, 1, out=logits)
    # The largest probability is 1/V at least, so that its logarithm is accurate.
    lse = largest_logit - probabilities.amax(1).log()
    if call.shard is not None:
        # All that this rank has may be forbidden, while other ranks have entries that are not.
        nothing_here = largest_logit == -math.inf
        probabilities.masked_fill_(nothing_here[:, None], 0)
        lse.masked_fill_(nothing_here, -math.inf)
    sums = TokenLogitSums(lse, label_logit, smoothing_logit)
    if argmax is None:
        return sums, probabilities
    if call.shard is not None:
        argmax = argmax + call.shard.first_entry
    expected_logit = lse - torch.special.entr(probabilities).sum(1)
    return sums._replace(
        expected_logit=expected_logit, largest_logit=largest_logit, argmax=argmax
    ), probabilities


def _write_output(call: LossCall, output: LossOutput, tokens: Tensor, sums: TokenLogitSums) -> None:
    smoothing = call.options.label_smoothing
    z_loss = call.options.z_loss
    losses = sums.lse - (1 - smoothing) * sums.label_logit
    losses = losses - smoothing * sums.smoothing_logit
    if z_loss != 0:
        losses += z_loss * sums.lse.square()
    if call.token_weights is not None:
        losses = losses * call.token_weights[tokens]
    output.loss[tokens] = losses
    output.lse[tokens] = sums.lse
    if output.log_probability is not None:
        output.log_probability[tokens] = sums.label_logit - sums.lse
    if output.entropy is not None and sums.expected_logit is not None:
        output.entropy[tokens] = sums.lse - sums.expected_logit
    if output.argmax is not None and sums.argmax is not None:
        output.argmax[tokens] = sums.argmax


def gradient_rows(
    call: LossCall,
    chunk: Chunk,
    probabilities: Tensor,  # (n, V) over the whole vocabulary, of this rank's entries
    lse: Tensor,  # (n,) over the whole vocabulary
    row_factor: Tensor,  # (n, 1): each token's upstream gradient g_i, or 1 in its place
    upstream_lse: Tensor | None,  # (n, 1) h_i, that of its log-sum-exp
) -> Tensor:  # (n, V)
    """Return ∂loss / ∂z_iv in the probabilities' memory.

    It lacks the logit scale, which is in `chunk.hidden`, and a linear smoothing term, which
    `_add_products` and `LinearSmoothing` add."""
    rows = probabilities
    smoothing = call.options.label_smoothing
    z_loss = call.options.z_loss
    z_loss_factor = 1 + 2 * z_loss * lse[:, None]
    if upstream_lse is not None:
        rows.mul_(row_factor * z_loss_factor + upstream_lse)
    elif z_loss != 0:
        rows.mul_(z_loss_factor)
    at_label = row_factor * (smoothing - 1) * chunk.has_label
    rows.scatter_add_(1, chunk.label_rows, at_label)
    if smoothing != 0 and not has_linear_logits(call):
        if call.smoothing_target is None:
            rows.sub_(row_factor * (smoothing * (1 / call.vocabulary)))
        else:
            rows.sub_(row_factor * (smoothing * call.smoothing_target))
    return rows


def _add_products(
    call: LossCall,
    chunk: Chunk,
    gradients: Gradients,  # added to
    rows: Tensor,  # (n, V)
    operand_factor: Tensor,  # (n, 1) the factor that is to come
    row_factor: Tensor,  # (n, 1) the factor that is in the rows
    smoothing: "LinearSmoothing | None",
) -> None:
    """Add the products of the gradient rows with the classifier and with hidden states."""
    if gradients.hidden is not None:
        products = torch.zeros_like(chunk.hidden)
        for entries, widened in _widened(call.weight, rows.dtype):
            products.addmm_(rows[:, entries], widened)
        if smoothing is not None:
            products.sub_(row_factor * smoothing.mean_weight, alpha=smoothing.label_smoothing)
        products.mul_(operand_factor * call.logit_scale)
        gradients.hidden[chunk.tokens] = products
    if gradients.weight is not None:
        gradients.weight.addmm_(rows.T, chunk.hidden * operand_factor)
    if gradients.bias is not None:
        gradients.bias.addmv_(rows.T, operand_factor.squeeze(1))


class LinearSmoothing:
    """The smoothing term where there is no softcap.

    Logits are linear in E and C then, so that it costs means instead of passes over the logits.
    With c̄ = Σ_v u_v C_v, b̄ = Σ_v u_v b_v and g_i, a token's upstream gradient times its weight,

        Σ_v u_v z_iv = E_i · c̄ + b̄
        dE_i takes −β g_i c̄,    dC_v takes −β u_v Σ_i g_i E_i,    db_v takes −β u_v Σ_i g_i

    where a logit scale belongs to E_i.
    """

    def __init__(self, call: LossCall, dtype: torch.dtype) -> None:
        weight = call.weight
        bias = call.bias
        self.label_smoothing = call.options.label_smoothing
        self.mean_weight: Tensor  # c̄, (D,)
        self.mean_bias: Tensor | float = 0.0  # b̄
        if call.smoothing_target is None:
            uniform = 1 / call.vocabulary
            self.mean_weight = weight.sum(0, dtype=dtype) * uniform
            if bias is not None:
                self.mean_bias = bias.sum() * uniform
            self.smoothing_target = weight.new_full((len(weight),), uniform, dtype=dtype)
        else:
            self.smoothing_target = call.smoothing_target
            self.mean_weight = weight.new_zeros(weight.shape[1], dtype=dtype)
            for rows, widened in _widened(weight, dtype):
                self.mean_weight += self.smoothing_target[rows] @ widened
            if bias is not None:
                self.mean_bias = _expectation(bias, self.smoothing_target)
        self.g_sum = weight.new_zeros((), dtype=dtype)  # Σ_i g_i
        self.hidden_sum = torch.zeros_like(self.mean_weight)  # Σ_i g_i E_i

    def add_tokens(self, hidden: Tensor, g: Tensor) -> None:  # (n, D), (n, 1)
        self.hidden_sum += (hidden * g).sum(0)
        self.g_sum += g.sum()

    def add_to(self, gradients: Gradients) -> None:
        """Add the term's part of the classifier's gradients, when all tokens are counted."""
        beta = self.label_smoothing
        if gradients.weight is not None:
            gradients.weight.addr_(self.smoothing_target, self.hidden_sum, alpha=-beta)
        if gradients.bias is not None:
            gradients.bias.sub_(self.smoothing_target * self.g_sum, alpha=beta)


def chunk_tokens(call: LossCall) -> int:
    """Return how many tokens have their logits in memory at a time.

    All ranks that share a vocabulary have equal chunks, since they join each chunk's sums."""
    if not call.weight.is_cuda:
        return CPU_CHUNK_TOKENS
    return min(max(GPU_CHUNK_LOGITS // call.most_rows, CPU_CHUNK_TOKENS), GPU_MAX_CHUNK_TOKENS)


def _expectation(values: Tensor, distribution: Tensor) -> Tensor:
    """Return Σ_v u_v z_v, to which a forbidden entry (z = −∞) with no part in u adds nothing."""
    return torch.where(distribution > 0, distribution * values, 0).sum(-1)


def _widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight in the accumulation dtype: itself, or block by block to spare the copy."""
    if weight.dtype == dtype:
        yield slice(None), weight
        return
    for start in range(0, len(weight), CAST_ROWS):
        rows = slice(start, start + CAST_ROWS)
        yield rows, weight[rows].to(dtype)
