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

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoothce.autograd_tools import graph_is_kept, once_differentiable
from smoothce.options import (
    Gradients,
    Inputs,
    InputTensors,
    LossOutput,
    Needs,
    Options,
    accumulation_dtype,
)
from smoothce.vocab_parallel import TokenLogitSums, all_reduce_gradient, merge_shards

CPU_CHUNK_TOKENS = 128
# A GPU needs taller chunks to be busy: as many tokens as have this many logits, within limits.
GPU_CHUNK_LOGITS = 2**27
GPU_MAX_CHUNK_TOKENS = 1024
CAST_ROWS = 4096  # rows of a 16-bit classifier that are widened at a time


def loss(inputs: Inputs) -> LossOutput:
    """The loss of `reference.loss`, without its memory."""
    needs = inputs.tensors.needs()
    return LossOutput(*_ChunkedLoss.apply(inputs.hidden, inputs.weight, inputs.bias, inputs, needs))


def unsupported(inputs: Inputs) -> str | None:
    return "meta tensors have no numbers" if inputs.hidden.is_meta else None


def describe(inputs: Inputs) -> str:
    """How the gradient of these inputs is made."""
    if not any(inputs.tensors.needs()):
        return "no gradient is wanted"
    if makes_gradients_in_forward(inputs.options):
        return "gradients are made in the forward"
    if inputs.options.return_lse:
        reason = "the log-sum-exps have an upstream gradient of their own"
    else:
        reason = "without reduction each token has an upstream gradient of its own"
    return f"the backward computes logits a second time, for {reason}"


def makes_gradients_in_forward(options: Options) -> bool:
    """Whether one upstream factor, which the backward brings, is all that gradients still lack."""
    return options.reduction != "none" and not options.return_lse


class _ChunkedLoss(torch.autograd.Function):
    """The loss, log-sum-exps and statistics, differentiable once in hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: Inputs,  # has the three as well, but autograd sees only tensors that are arguments
        needs: Needs,
    ) -> tuple[Tensor | None, ...]:
        options = inputs.options
        loss_scale = inputs.loss_scale(accumulation_dtype(hidden.dtype))
        ctx.needs = needs
        ctx.set_materialize_grads(False)
        ctx.gradients_are_made = makes_gradients_in_forward(options)
        if ctx.gradients_are_made:
            upstream = loss_scale.expand(inputs.labels.shape) if any(needs) else None
            output, gradients = _Walk(inputs, needs, upstream).run()
            ctx.dtypes = _leaf_dtypes(inputs)
            ctx.save_for_backward(hidden, weight, bias, *gradients)
        else:
            output, _ = _Walk(inputs, needs).run()
            ctx.options = options
            ctx.shard = inputs.shard
            ctx.save_for_backward(*inputs.tensors, loss_scale)

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
        if upstream_loss is None and upstream_lse is None:
            gradients = Gradients()
        elif ctx.gradients_are_made:
            assert upstream_loss is not None  # the log-sum-exps have no gradient then
            gradients = Gradients(
                *(
                    _scaled(gradient, upstream_loss, dtype)
                    for gradient, dtype in zip(ctx.saved_tensors[3:], ctx.dtypes, strict=True)
                )
            )
        else:
            gradients = _walk_again(ctx, upstream_loss, upstream_lse)
        return gradients.hidden, gradients.weight, gradients.bias, None, None


def _scaled(gradient: Tensor | None, upstream_loss: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A gradient from the forward times the upstream factor."""
    if gradient is None:
        return None
    if gradient.dtype == dtype and not graph_is_kept():
        return gradient.mul_(upstream_loss)  # its last use: spares a copy of the weight's size
    return torch.mul(gradient, upstream_loss, out=torch.empty_like(gradient, dtype=dtype))


def _walk_again(ctx: Any, upstream_loss: Tensor | None, upstream_lse: Tensor | None) -> Gradients:
    """The gradients where the forward could not make them, since their upstream gradient is more
    than one factor: each token's loss has its own, or the log-sum-exps have one too."""
    *tensors, loss_scale = ctx.saved_tensors
    inputs = InputTensors(*tensors).with_options(ctx.options, ctx.shard)
    upstream = torch.zeros_like(loss_scale)
    if upstream_loss is not None:
        upstream = upstream_loss * loss_scale
    upstream = upstream.expand(inputs.labels.shape)
    with torch.autocast(upstream.device.type, enabled=False):
        _, gradients = _Walk(inputs, ctx.needs, upstream, upstream_lse).run()
    hidden_dtype, weight_dtype, bias_dtype = _leaf_dtypes(inputs)
    return Gradients(
        hidden=None if gradients.hidden is None else gradients.hidden.to(hidden_dtype),
        weight=None if gradients.weight is None else gradients.weight.to(weight_dtype),
        bias=None if gradients.bias is None else gradients.bias.to(bias_dtype),
    )


def _leaf_dtypes(inputs: Inputs) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes that the gradients of hidden, weight and bias have. A bias may be fp32 beside
    16-bit hidden states; without one the last says nothing."""
    bias = inputs.hidden if inputs.bias is None else inputs.bias
    return inputs.hidden.dtype, inputs.weight.dtype, bias.dtype


@dataclass
class _Chunk:
    """Some tokens that are worked on together."""

    tokens: Tensor  # (n,) int64, their places among the call's tokens
    hidden: Tensor  # (n, D) in the accumulation dtype, times the logit scale
    label_rows: Tensor  # (n, 1) int64, the label's row of this rank's classifier ...
    has_label: Tensor  # (n, 1) bool, ... where it has one: else the row is 0


class _Walk:
    """One walk over the valid tokens, chunk by chunk: losses, statistics and gradients."""

    def __init__(
        self,
        inputs: Inputs,
        needs: Needs,
        # (N,) the upstream gradient of each token's loss, times the reduction's scale, but without
        # the token's weight, which `_add_gradients` multiplies it by; None: no gradient is made
        upstream: Tensor | None = None,
        upstream_lse: Tensor | None = None,  # (N,), that of each token's log-sum-exp, or None
    ) -> None:
        self.inputs = inputs
        self.smoothing = inputs.options.label_smoothing
        self.upstream = upstream
        self.upstream_lse = upstream_lse
        self.dtype = accumulation_dtype(inputs.hidden.dtype)
        self.bias = None if inputs.bias is None else inputs.bias.to(self.dtype)
        self.smoothing_target = inputs.smoothing_target
        if self.smoothing_target is not None:
            self.smoothing_target = self.smoothing_target.to(self.dtype)
        self.output = self._empty_output()
        self.gradients = self._zero_gradients(needs)
        self.linear_smoothing = None
        if self.smoothing != 0 and inputs.options.softcap is None:
            self.linear_smoothing = _LinearSmoothing(inputs, self.bias, self.smoothing_target)

    def run(self) -> tuple[LossOutput, Gradients]:
        """Every token's loss, log-sum-exp and statistics, (N,), and the gradients that are wanted,
        in the accumulation dtype."""
        inputs = self.inputs
        valid_tokens = inputs.valid().nonzero().squeeze(1)  # the others cost nothing
        size = min(_chunk_tokens(inputs), max(len(valid_tokens), 1))
        buffer = self._new(torch.empty, size, len(inputs.weight))
        for tokens in valid_tokens.split(size):
            chunk = self._chunk(tokens)
            # Logits, probabilities and the gradient take each other's place in the buffer.
            logits, cap_slope = self._logits(chunk, buffer[: len(tokens)])
            sums_here, probabilities = self._softmax(chunk, logits)
            sums = merge_shards(sums_here, inputs.shard)
            self._write_output(tokens, sums)
            if self.upstream is not None:
                if inputs.shard is not None:  # make the softmax over this rank's that over all
                    probabilities.mul_((sums_here.lse - sums.lse).exp_()[:, None])
                self._add_gradients(chunk, probabilities, cap_slope, sums.lse, self.upstream)
        if self.linear_smoothing is not None:
            self.linear_smoothing.add_to(self.gradients, self.smoothing)
        all_reduce_gradient(self.gradients.hidden, inputs.shard)
        return self.output, self.gradients

    def _new(self, make: Callable[..., Tensor], *shape: int) -> Tensor:
        return make(shape, dtype=self.dtype, device=self.inputs.hidden.device)

    def _empty_output(self) -> LossOutput:
        """What masked tokens have, for all tokens."""
        labels = self.inputs.labels
        tokens = len(labels)
        output = LossOutput(self._new(torch.zeros, tokens), self._new(torch.zeros, tokens))
        if not self.inputs.options.return_statistics:
            return output
        return output._replace(
            log_probability=self._new(torch.zeros, tokens),
            entropy=self._new(torch.zeros, tokens),
            argmax=torch.full_like(labels, -1, dtype=torch.int64),
        )

    def _zero_gradients(self, needs: Needs) -> Gradients:
        if self.upstream is None:
            return Gradients()
        hidden = self.inputs.hidden
        weight = self.inputs.weight
        return Gradients(
            hidden=self._new(torch.zeros, *hidden.shape) if needs.hidden else None,
            weight=self._new(torch.zeros, *weight.shape) if needs.weight else None,
            bias=self._new(torch.zeros, len(weight)) if needs.bias else None,
        )

    def _chunk(self, tokens: Tensor) -> _Chunk:
        inputs = self.inputs
        hidden = inputs.hidden[tokens].to(self.dtype)
        if inputs.logit_scale != 1.0:
            hidden.mul_(inputs.logit_scale)
        label_rows = inputs.labels[tokens, None]
        if inputs.shard is not None:
            label_rows = label_rows - inputs.shard.first_entry
        has_label = (label_rows >= 0) & (label_rows < len(inputs.weight))
        return _Chunk(tokens, hidden, label_rows.where(has_label, 0), has_label)

    def _logits(self, chunk: _Chunk, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """The chunk's logits, (n, V), in the buffer's memory, and the cap's slope, (n, V).

        Of a logit x before the cap z = softcap · tanh(x / softcap) is the logit, and the slope is
        ∂z/∂x = 1 − tanh²(x / softcap). It is None without a softcap, or where no gradient is
        wanted."""
        for rows, widened in _widened(self.inputs.weight, self.dtype):
            torch.mm(chunk.hidden, widened.T, out=buffer[:, rows])
        if self.bias is not None:
            buffer.add_(self.bias)
        softcap = self.inputs.options.softcap
        if softcap is None:
            return buffer, None
        cap_slope = None
        buffer.div_(softcap).tanh_()
        if self.upstream is not None:
            cap_slope = buffer.square().neg_().add_(1)  # 1 − tanh², with no other temporary
        return buffer.mul_(softcap), cap_slope

    def _softmax(self, chunk: _Chunk, logits: Tensor) -> tuple[TokenLogitSums, Tensor]:
        """What is found of the logits over this rank's entries, and their softmax over these, (n,
        V), in the logits' memory."""
        label_logit = logits.gather(1, chunk.label_rows).where(chunk.has_label, 0).squeeze(1)
        smoothing_logit = self._smoothing_logit(chunk, logits)
        argmax = None
        if self.inputs.options.return_statistics:
            largest_logit, argmax = logits.max(1)
        else:
            largest_logit = logits.amax(1)
        probabilities = torch.softmax(logits, 1, out=logits)
        # The largest probability is 1/V at least, so that its logarithm is accurate.
        lse = largest_logit - probabilities.amax(1).log()
        if self.inputs.shard is not None:
            # All that this rank has may be forbidden, while other ranks have entries that are not.
            nothing_here = largest_logit == -math.inf
            probabilities.masked_fill_(nothing_here[:, None], 0)
            lse.masked_fill_(nothing_here, -math.inf)
        sums = TokenLogitSums(lse=lse, label_logit=label_logit, smoothing_logit=smoothing_logit)
        if argmax is None:
            return sums, probabilities
        if self.inputs.shard is not None:
            argmax = argmax + self.inputs.shard.first_entry
        expected_logit = lse - torch.special.entr(probabilities).sum(1)
        return sums._replace(
            expected_logit=expected_logit, largest_logit=largest_logit, argmax=argmax
        ), probabilities

    def _smoothing_logit(self, chunk: _Chunk, logits: Tensor) -> Tensor:  # (n,)
        """Σ_v u_v z_v over this rank's entries; 0 where it counts for nothing."""
        if self.smoothing == 0:
            return logits.new_zeros(len(chunk.tokens))
        if self.linear_smoothing is not None:
            return self.linear_smoothing.smoothing_logit(chunk.hidden)
        if self.smoothing_target is None:
            return logits.sum(1) * (1 / self.inputs.vocabulary)
        return _expectation(logits, self.smoothing_target)

    def _write_output(self, tokens: Tensor, sums: TokenLogitSums) -> None:
        output = self.output
        losses = sums.lse - (1 - self.smoothing) * sums.label_logit
        losses = losses - self.smoothing * sums.smoothing_logit
        z_loss = self.inputs.options.z_loss
        if z_loss != 0:
            losses += z_loss * sums.lse.square()
        if self.inputs.token_weights is not None:
            losses = losses * self.inputs.token_weights[tokens]
        output.loss[tokens] = losses
        output.lse[tokens] = sums.lse
        if output.log_probability is not None:
            output.log_probability[tokens] = sums.label_logit - sums.lse
        if output.entropy is not None and sums.expected_logit is not None:
            output.entropy[tokens] = sums.lse - sums.expected_logit
        if output.argmax is not None and sums.argmax is not None:
            output.argmax[tokens] = sums.argmax

    def _add_gradients(
        self,
        chunk: _Chunk,
        probabilities: Tensor,  # (n, V) over the whole vocabulary, of this rank's entries
        cap_slope: Tensor | None,  # (n, V)
        lse: Tensor,  # (n,) over the whole vocabulary
        upstream: Tensor,  # (N,)
    ) -> None:
        """Add what these tokens have in the gradients.

        Both matrix products take a row of V numbers for each token (`_gradient_rows`) and operands
        of D numbers. Where the loss alone has an upstream gradient, a token's g_i is a common
        factor of its row. Then the operands are multiplied by it, since these are shorter, and the
        row is made with 1 in its place. Where the token's log-sum-exp has an upstream gradient h_i
        too, the row is g_i · (…) + h_i p_i. So g_i has to be in the row, and the operands' factor
        is 1.
        """
        g = upstream[chunk.tokens, None].to(self.dtype)
        if self.inputs.token_weights is not None:
            g = g * self.inputs.token_weights[chunk.tokens, None]
        if self.upstream_lse is None:
            row_factor = torch.ones_like(g)
            operand_factor = g
        else:
            row_factor = g
            operand_factor = torch.ones_like(g)
        rows = self._gradient_rows(chunk, probabilities, cap_slope, lse, row_factor)
        self._add_products(chunk, rows, row_factor, operand_factor)
        if self.linear_smoothing is not None:
            self.linear_smoothing.add_tokens(chunk.hidden, g)

    def _gradient_rows(
        self,
        chunk: _Chunk,
        probabilities: Tensor,  # (n, V)
        cap_slope: Tensor | None,  # (n, V)
        lse: Tensor,  # (n,)
        row_factor: Tensor,  # (n, 1): g_i, or 1 where the operands are multiplied by it
    ) -> Tensor:  # (n, V)
        """∂loss / ∂x_iv in the probabilities' memory, with `row_factor` in the place of g_i.

        x_iv = logit_scale · E_i · C_v + b_v is the logit before the cap.

        Unlike the S of smoothce.triton it lacks the logit scale, which is in `chunk.hidden`, and a
        linear smoothing term, which `_add_products` and `_LinearSmoothing` add."""
        rows = probabilities
        z_loss = self.inputs.options.z_loss
        z_loss_factor = 1 + 2 * z_loss * lse[:, None]
        if self.upstream_lse is not None:
            upstream_lse = self.upstream_lse[chunk.tokens, None]
            rows.mul_(row_factor * z_loss_factor + upstream_lse)
        elif z_loss != 0:
            rows.mul_(z_loss_factor)
        at_label = row_factor * (self.smoothing - 1) * chunk.has_label
        rows.scatter_add_(1, chunk.label_rows, at_label)
        if self.smoothing != 0 and self.linear_smoothing is None:
            if self.smoothing_target is None:
                smoothing_of_entry = self.smoothing * (1 / self.inputs.vocabulary)
                rows.sub_(row_factor * smoothing_of_entry)
            else:
                rows.sub_(row_factor * (self.smoothing * self.smoothing_target))
        if cap_slope is not None:
            rows.mul_(cap_slope)
        return rows

    def _add_products(
        self,
        chunk: _Chunk,
        gradient_rows: Tensor,  # (n, V)
        row_factor: Tensor,  # (n, 1) the factor that is in them
        operand_factor: Tensor,  # (n, 1) the factor that is to come
    ) -> None:
        """Add the products of the gradient rows with the classifier and with hidden states."""
        gradients = self.gradients
        if gradients.hidden is not None:
            products = torch.zeros_like(chunk.hidden)
            for entries, widened in _widened(self.inputs.weight, self.dtype):
                products.addmm_(gradient_rows[:, entries], widened)
            if self.linear_smoothing is not None:
                mean_weight = self.linear_smoothing.mean_weight
                products.sub_(row_factor * mean_weight, alpha=self.smoothing)
            products.mul_(operand_factor * self.inputs.logit_scale)
            gradients.hidden[chunk.tokens] = products
        if gradients.weight is not None:
            gradients.weight.addmm_(gradient_rows.T, chunk.hidden * operand_factor)
        if gradients.bias is not None:
            gradients.bias.addmv_(gradient_rows.T, operand_factor.squeeze(1))


class _LinearSmoothing:
    """The smoothing term where there is no softcap.

    Logits are linear in E and C then, so that it costs means instead of passes over the logits.
    With c̄ = Σ_v u_v C_v, b̄ = Σ_v u_v b_v and g_i, a token's upstream gradient times its weight,

        Σ_v u_v z_iv = E_i · c̄ + b̄
        dE_i takes −β g_i c̄,    dC_v takes −β u_v Σ_i g_i E_i,    db_v takes −β u_v Σ_i g_i

    where a logit scale belongs to E_i.
    """

    def __init__(
        self,
        inputs: Inputs,
        bias: Tensor | None,  # (V,) in the accumulation dtype, as the next
        smoothing_target: Tensor | None,  # (V,)
    ) -> None:
        weight = inputs.weight
        dtype = accumulation_dtype(weight.dtype)
        self.mean_weight: Tensor  # c̄, (D,)
        self.mean_bias: Tensor | float = 0.0  # b̄
        if smoothing_target is None:
            uniform = 1 / inputs.vocabulary
            self.mean_weight = weight.sum(0, dtype=dtype) * uniform
            if bias is not None:
                self.mean_bias = bias.sum() * uniform
            smoothing_target = weight.new_full((len(weight),), uniform, dtype=dtype)
        else:
            self.mean_weight = weight.new_zeros(weight.shape[1], dtype=dtype)
            for rows, widened in _widened(weight, dtype):
                self.mean_weight += smoothing_target[rows] @ widened
            if bias is not None:
                self.mean_bias = _expectation(bias, smoothing_target)
        self.smoothing_target = smoothing_target
        self.g_sum = weight.new_zeros((), dtype=dtype)  # Σ_i g_i
        self.hidden_sum = torch.zeros_like(self.mean_weight)  # Σ_i g_i E_i

    def smoothing_logit(self, hidden: Tensor) -> Tensor:  # (n,)
        return hidden @ self.mean_weight + self.mean_bias

    def add_tokens(
        self,
        hidden: Tensor,  # (n, D)
        g: Tensor,  # (n, 1): the tokens' g_i, with their token weights in it
    ) -> None:
        self.hidden_sum += (hidden * g).sum(0)
        self.g_sum += g.sum()

    def add_to(self, gradients: Gradients, smoothing: float) -> None:
        """Add the term's part of the classifier's gradients, when all tokens are counted."""
        if gradients.weight is not None:
            gradients.weight.addr_(self.smoothing_target, self.hidden_sum, alpha=-smoothing)
        if gradients.bias is not None:
            gradients.bias.sub_(self.smoothing_target * self.g_sum, alpha=smoothing)


def _chunk_tokens(inputs: Inputs) -> int:
    """How many tokens have their logits in memory at a time.

    All ranks that share a vocabulary have equal chunks, since they join each chunk's sums."""
    if not inputs.weight.is_cuda:
        return CPU_CHUNK_TOKENS
    return min(max(GPU_CHUNK_LOGITS // inputs.most_rows, CPU_CHUNK_TOKENS), GPU_MAX_CHUNK_TOKENS)


def _expectation(values: Tensor, distribution: Tensor) -> Tensor:
    """Σ_v u_v z_v, to which a forbidden entry (z = −∞) that has no part in u adds nothing."""
    return torch.where(distribution > 0, distribution * values, 0).sum(-1)


def _widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in the accumulation dtype: itself, or block by block to spare the copy."""
    if weight.dtype == dtype:
        yield slice(None), weight
        return
    for start in range(0, len(weight), CAST_ROWS):
        rows = slice(start, start + CAST_ROWS)
        yield rows, weight[rows].to(dtype)
