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

from smoothce.options import Options

ROWS = {"cpu": 128}  # the chunk's height; a GPU needs taller ones to be busy
DEVICE_ROWS = 1024
CAST_ROWS = 4096  # vocabulary rows of a half-precision weight that are widened at a time


def loss(
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:  # () or (N,), and with return_lse the log-sum-exps (N,)
    """The loss of `reference.loss`, without its memory."""
    found, lse = _Chunked.apply(hidden, weight, labels, bias, options, torch.is_grad_enabled())
    return (found, lse) if options.return_lse else found


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
    def forward(ctx, hidden, weight, labels, bias, options, differentiable):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs = tuple(differentiable and ctx.needs_input_grad[i] for i in (0, 1, 3))
        ctx.options, ctx.needs = options, needs
        ctx.set_materialize_grads(False)
        token_weight = options.token_weight(labels, wide)
        ctx.later = options.reduction == "none" or options.return_lse
        if ctx.later:
            losses, lse, _ = _sweep(hidden, weight, labels, bias, options, None, None, needs)
            ctx.save_for_backward(hidden, weight, labels, bias, token_weight)
        else:
            g = token_weight.expand(labels.shape) if any(needs) else None
            losses, lse, gradients = _sweep(hidden, weight, labels, bias, options, g, None, needs)
            ctx.dtype = hidden.dtype
            ctx.save_for_backward(*gradients)
        if not options.return_lse:
            ctx.mark_non_differentiable(lse)
        if options.reduction != "none":
            losses = losses.sum() * token_weight
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, of_lse):
        if upstream is None and of_lse is None:
            return (None,) * 6
        if ctx.later:
            *inputs, token_weight = ctx.saved_tensors
            labels, dtype = inputs[2], inputs[0].dtype
            g = torch.zeros_like(token_weight) if upstream is None else upstream * token_weight
            g = g.expand(labels.shape)
            with torch.autocast(g.device.type, enabled=False):
                *_, gradients = _sweep(*inputs, ctx.options, g, of_lse, ctx.needs)
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
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    options: Options,
    upstream: Tensor | None,  # (N,) ∂total/∂loss_i; None where no gradient is wanted
    of_lse: Tensor | None,  # (N,) ∂total/∂lse_i, besides
    needs: tuple[bool, bool, bool],  # hidden, weight, bias
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Every token's loss and log-sum-exp, (N,), and the total's wide gradients that are needed.

    Without a softcap both smoothing terms are linear in E and C, and cost means, not passes:
    Σ_v z_iv = E_i · Σ_v C_v, so dE_i takes −g_i β c̄ and dC_v takes −(β/V) Σ_i g_i E_i."""
    beta, cap = options.label_smoothing, options.softcap
    vocabulary, dim = weight.shape
    scale = 1.0 if options.logit_scale is None else options.logit_scale
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = options.valid(labels).nonzero().squeeze(1)  # masked tokens cost nothing
    chunk = min(ROWS.get(hidden.device.type, DEVICE_ROWS), max(rows.numel(), 1))
    linear = bool(beta) and cap is None
    wide_bias = None if bias is None else bias.to(wide)

    losses = torch.zeros(labels.shape, dtype=wide, device=hidden.device)
    lse = torch.zeros_like(losses)
    want_hidden, want_weight, want_bias = (upstream is not None and need for need in needs)
    d_hidden = torch.zeros_like(hidden, dtype=wide) if want_hidden else None
    d_weight = (
        torch.zeros(vocabulary, dim, dtype=wide, device=hidden.device) if want_weight else None
    )
    d_bias = torch.zeros(vocabulary, dtype=wide, device=hidden.device) if want_bias else None
    if linear:
        mean_weight = weight.mean(0, dtype=wide)  # c̄, (D,)
        mean_bias = 0.0 if bias is None else wide_bias.mean()
    sums = torch.zeros(dim, dtype=wide, device=hidden.device)  # Σ_i g_i E_i

    buffer = torch.empty(chunk, vocabulary, dtype=wide, device=hidden.device)
    for chosen in rows.split(chunk):
        e = hidden[chosen].to(wide)
        if scale != 1.0:
            e.mul_(scale)
        y = labels[chosen, None]
        z = buffer[: len(chosen)]
        for block, c in _widened(weight, wide):
            torch.mm(e, c.T, out=z[:, block])
        if bias is not None:
            z.add_(wide_bias)
        if cap is not None:
            z.div_(cap).tanh_()
            slope = None if upstream is None else 1 - z * z
            z.mul_(cap)
        top = z.amax(1, keepdim=True)
        value = (beta - 1) * z.gather(1, y)
        if linear:
            value -= beta * (e @ mean_weight + mean_bias)[:, None]
        elif beta:
            value -= beta * z.mean(1, keepdim=True)
        p = torch.softmax(z, 1, out=z)
        top -= p.amax(1, keepdim=True).log()  # that p ≥ 1/V: the logarithm is exact
        lse[chosen] = top.squeeze(1)
        losses[chosen] = (value + top).squeeze(1)
        if upstream is None:
            continue

        # S is `outer` times what is in p, and `inner` what of g is in there already
        g = upstream[chosen, None].to(wide)
        outer, inner = g, torch.ones_like(g)
        if of_lse is not None:
            outer, inner = inner, outer
            p.mul_(g + of_lse[chosen, None])
        p.scatter_add_(1, y, inner * (beta - 1))
        if cap is not None:
            p.sub_(inner * (beta / vocabulary)).mul_(slope)
        if want_hidden:
            d = torch.zeros_like(e)
            for block, c in _widened(weight, wide):
                d.addmm_(p[:, block], c)
            if linear:
                d.sub_(inner * mean_weight, alpha=beta)
            d_hidden[chosen] = d.mul_(outer * scale)
        if want_weight:
            d_weight.addmm_(p.T, e * outer)
            sums += (e * g).sum(0)
        if want_bias:
            d_bias.addmv_(p.T, outer.squeeze(1))

    if linear and want_weight:
        d_weight.sub_(sums, alpha=beta / vocabulary)
    if linear and want_bias:
        d_bias.sub_(upstream[rows].sum(), alpha=beta / vocabulary)
    return losses, lse, [d_hidden, d_weight, d_bias]


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
