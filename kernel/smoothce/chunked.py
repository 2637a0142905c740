"""The loss by row chunks in plain PyTorch: the path for CPUs, and wherever Triton cannot serve.

One chunk's logits (128 × V on a CPU) are the only array that grows like N × V. For a reduced loss
the forward computes the gradients too, up to the upstream factor, so that the logits are computed
once: three matrix products in all. Without reduction, or with the log-sum-exps as an output, the
backward repeats the forward's product.
Everything is accumulated in fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd import function

from smoothce.options import Inputs, LossOutput, Options
from smoothce.vocab_parallel import TokenLogitSums, all_reduce_gradient, merge_shards

ROWS = 128  # the chunk's height on a CPU; a GPU needs taller ones to be busy
DEVICE_NUMBERS, DEVICE_ROWS = 2**27, 1024  # and has at most so many logits, or rows, at a time
CAST_ROWS = 4096  # vocabulary rows of a half-precision weight that are widened at a time


def loss(inputs: Inputs) -> LossOutput:
    """The loss of `reference.loss`, without its memory."""
    tensors, rest = inputs[:4], inputs[4:]
    return LossOutput(*_Chunked.apply(*tensors, rest, torch.is_grad_enabled()))


def unsupported(inputs: Inputs) -> None:
    """Nothing is: this path serves all inputs."""


def describe(inputs: Inputs) -> None:
    """There is nothing to choose."""


def once_differentiable(backward: Callable) -> Callable:
    """torch's, which alone lets a second derivative pass, without the loss's part of it, where the
    upstream gradient needs no gradient itself."""
    guarded = function.once_differentiable(backward)

    def either(ctx, *upstream):
        if torch.is_grad_enabled():  # create_graph=True
            upstream = [None if x is None else x.detach().requires_grad_() for x in upstream]
        return guarded(ctx, *upstream)

    return either


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, rest, differentiable):
        inputs = Inputs(hidden, weight, labels, bias, *rest)
        options, wide = inputs.options, torch.promote_types(hidden.dtype, torch.float32)
        needs = tuple(differentiable and ctx.needs_input_grad[i] for i in (0, 1, 3))
        ctx.rest, ctx.needs = rest, needs
        ctx.set_materialize_grads(False)
        loss_scale = inputs.loss_scale(wide)
        ctx.later = options.reduction == "none" or options.return_lse
        if ctx.later:
            losses, *found, _ = _sweep(inputs, None, None, needs)
            ctx.save_for_backward(hidden, weight, labels, bias, loss_scale)
        else:
            g = loss_scale.expand(labels.shape) if any(needs) else None
            losses, *found, gradients = _sweep(inputs, g, None, needs)
            ctx.dtype = hidden.dtype
            ctx.save_for_backward(*gradients)
        fixed = found[1:] if options.return_lse else found
        ctx.mark_non_differentiable(*[x for x in fixed if x is not None])
        if options.reduction != "none":
            losses = losses.sum() * loss_scale
        return losses, *found

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, of_lse, *_):
        if upstream is None and of_lse is None:
            return (None,) * 6
        if ctx.later:
            *tensors, loss_scale = ctx.saved_tensors
            inputs = Inputs(*tensors, *ctx.rest)
            g = torch.zeros_like(loss_scale) if upstream is None else upstream * loss_scale
            g = g.expand(inputs.labels.shape)
            with torch.autocast(g.device.type, enabled=False):
                *_, gradients = _sweep(inputs, g, of_lse, ctx.needs)
            dtype = inputs.hidden.dtype
            gradients = [x if x is None else x.to(dtype) for x in gradients]
        else:
            gradients = [_scaled(x, upstream, ctx.dtype) for x in ctx.saved_tensors]
        d_hidden, d_weight, d_bias = gradients
        return d_hidden, d_weight, None, d_bias, None, None


def _scaled(gradient: Tensor | None, upstream: Tensor, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return None
    if gradient.dtype == dtype and not graph_is_kept():
        return gradient.mul_(upstream)  # its last use: spares a copy of the weight's size
    return torch.mul(gradient, upstream, out=torch.empty_like(gradient, dtype=dtype))


def graph_is_kept() -> bool:
    """Whether another backward through this graph may follow; True where torch cannot tell."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return query is None or query()


def _sweep(
    inputs: Inputs,
    upstream: Tensor | None,  # (N,) ∂total/∂loss_i; None where no gradient is wanted
    of_lse: Tensor | None,  # (N,) ∂total/∂lse_i, besides
    needs: tuple[bool, bool, bool],  # hidden, weight, bias
) -> tuple[Tensor | list | None, ...]:
    """Every token's loss, log-sum-exp and statistics, (N,), and the total's wide gradients.

    Without a softcap both smoothing terms are linear in E and C, and cost means, not passes:
    Σ_v u_v z_iv = E_i · Σ_v u_v C_v, so dE_i takes −g_i β c̄ and dC_v takes −β u_v Σ_i g_i E_i."""
    hidden, weight, labels, bias, u, omega, options, shard = inputs
    beta, zeta, cap, scale = options.label_smoothing, options.z_loss, options.softcap, inputs.scale
    entries, dim = weight.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = inputs.valid().nonzero().squeeze(1)  # masked tokens cost nothing
    tall = min(max(DEVICE_NUMBERS // entries, ROWS), DEVICE_ROWS) if hidden.is_cuda else ROWS
    chunk = min(tall, max(rows.numel(), 1))
    linear = bool(beta) and cap is None
    wide_bias = None if bias is None else bias.to(wide)
    u = None if u is None else u.to(wide)
    every = 1 / inputs.vocabulary  # u where none is given

    def like(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=wide, device=hidden.device)

    losses, lse = like(*labels.shape), like(*labels.shape)
    log_p = entropy = argmax = None
    if options.return_statistics:
        log_p, entropy, argmax = like(*labels.shape), like(*labels.shape), labels.new_full((), -1)
        argmax = argmax.repeat(labels.shape)
    want_hidden, want_weight, want_bias = (upstream is not None and need for need in needs)
    d_hidden = like(*hidden.shape) if want_hidden else None
    d_weight = like(entries, dim) if want_weight else None
    d_bias = like(entries) if want_bias else None
    if linear and u is None:
        mean_weight = weight.sum(0, dtype=wide) * every  # c̄, (D,)
        mean_bias = 0.0 if bias is None else wide_bias.sum() * every
    elif linear:
        mean_weight = sum(u[block] @ c for block, c in _widened(weight, wide))
        mean_bias = 0.0 if bias is None else _mixture(wide_bias, u)
    sums, total = like(dim), like()  # Σ_i g_i E_i and Σ_i g_i

    buffer = torch.empty(chunk, entries, dtype=wide, device=hidden.device)
    for chosen in rows.split(chunk):
        e = hidden[chosen].to(wide)
        if scale != 1.0:
            e.mul_(scale)
        y = labels[chosen, None] if shard is None else labels[chosen, None] - shard.offset
        here = (y >= 0) & (y < entries)
        y = y.where(here, 0)
        z = buffer[: len(chosen)]
        for block, c in _widened(weight, wide):
            torch.mm(e, c.T, out=z[:, block])
        if bias is not None:
            z.add_(wide_bias)
        if cap is not None:
            z.div_(cap).tanh_()
            slope = None if upstream is None else 1 - z * z
            z.mul_(cap)
        target = z.gather(1, y).where(here, 0).squeeze(1)
        if linear:
            mixed = e @ mean_weight + mean_bias
        elif beta:
            mixed = z.sum(1) * every if u is None else _mixture(z, u)
        else:
            mixed = torch.zeros_like(target)
        top, first = z.max(1) if options.return_statistics else (z.amax(1), None)
        p = torch.softmax(z, 1, out=z)
        own = top - p.amax(1).log()  # that p ≥ 1/V: the logarithm is exact
        found = TokenLogitSums(own, target, mixed)
        if options.return_statistics:
            first = first if shard is None else first + shard.offset
            found = TokenLogitSums(*found[:3], own - torch.special.entr(p).sum(1), top, first)
        found = merge_shards(found, shard)
        value = found.lse - (1 - beta) * found.target - beta * found.mixed
        if zeta:
            value += zeta * found.lse.square()
        losses[chosen] = value if omega is None else value * omega[chosen]
        lse[chosen] = found.lse
        if options.return_statistics:
            log_p[chosen] = found.target - found.lse
            entropy[chosen], argmax[chosen] = found.lse - found.expected, found.argmax
        if upstream is None:
            continue

        # S is `outer` times what is in p, and `inner` what of g is in there already
        if shard is not None:
            p.mul_((own - found.lse).exp_()[:, None])
        g = upstream[chosen, None].to(wide)
        g = g if omega is None else g * omega[chosen, None]
        lift = 1 + 2 * zeta * found.lse[:, None]  # of the softmax, by the z-loss
        outer, inner = g, torch.ones_like(g)
        if of_lse is not None:
            outer, inner = inner, outer
            p.mul_(g * lift + of_lse[chosen, None])
        elif zeta:
            p.mul_(lift)
        p.scatter_add_(1, y, inner * (beta - 1) * here)
        if cap is not None and beta:
            p.sub_(inner * (beta * (every if u is None else u)))
        if cap is not None:
            p.mul_(slope)
        if want_hidden:
            d = torch.zeros_like(e)
            for block, c in _widened(weight, wide):
                d.addmm_(p[:, block], c)
            if linear:
                d.sub_(inner * mean_weight, alpha=beta)
            d_hidden[chosen] = d.mul_(outer * scale)
        if want_weight:
            d_weight.addmm_(p.T, e * outer)
        if want_bias:
            d_bias.addmv_(p.T, outer.squeeze(1))
        sums += (e * g).sum(0)
        total += g.sum()

    share = torch.full((entries,), every, dtype=wide, device=hidden.device) if u is None else u
    if linear and want_weight:
        d_weight.addr_(share, sums, alpha=-beta)
    if linear and want_bias:
        d_bias.sub_(share * total, alpha=beta)
    gradients = [all_reduce_gradient(d_hidden, shard), d_weight, d_bias]
    return losses, lse, log_p, entropy, argmax, gradients


def _mixture(z: Tensor, u: Tensor) -> Tensor:
    """Σ_v u_v z_v, to which a forbidden entry (z = −∞) that has no part in u adds nothing."""
    return torch.where(u > 0, u * z, 0).sum(-1)


def _widened(weight: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in the accumulation dtype: itself, or block by block to spare the copy."""
    if weight.dtype == wide:
        yield slice(None), weight
        return
    for start in range(0, weight.shape[0], CAST_ROWS):
        yield slice(start, start + CAST_ROWS), weight[start : start + CAST_ROWS].to(wide)


def logits(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> Tensor:  # (N, V)
    """`reference.logits`, without a widened copy of the weight."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.is_cuda and hidden.dtype != wide and MIXED:
        z = torch.mm(hidden, weight.T, out_dtype=wide)
    else:
        z = torch.empty(len(hidden), len(weight), dtype=wide, device=hidden.device)
        for block, c in _widened(weight, wide):
            torch.mm(hidden.to(wide), c.T, out=z[:, block])
    if options.logit_scale is not None:
        z *= options.logit_scale
    if bias is not None:
        z += bias.to(wide)
    return z if options.softcap is None else z.div_(options.softcap).tanh_().mul_(options.softcap)


# Whether this PyTorch takes 16-bit factors to an fp32 product.
MIXED = "dtype_out" in torch.ops.aten.addmm.overloads()
