"""How far gradients are off, by the loss of the tokens and by the filter's number of draws.

    python kernel/benchmarks/accuracy.py          # one CUDA GPU, half a minute

The first table has the relative error ‖g − g*‖ / ‖g*‖ of dE and dC for labels from likely to hardly
possible, beside torch's cross-entropy of bf16 logits. g* is the reference's gradient, of the same
inputs in fp32. The first row's inputs look like a language model's, and those of the others are
random, with labels that are drawn evenly.

The second table has the error of the mean of several draws of the filtered gradient, which falls
with their number as long as the filter is right on average. What the filter draws of a token
follows from its place and the bits of its log-sum-exp, so that equal inputs draw alike: each draw
has the tokens in another order. `--softcap` adds a cap on the logits, under which the filter is
biased.

Inputs are bf16. Without a GPU they are fp32, since Triton's interpreter has no right bf16 products:
`TRITON_INTERPRET=1 python kernel/benchmarks/accuracy.py --tokens 16 --entries 256 --features 32
--draws 1 4` only shows that the program runs.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce import linear_cross_entropy
from smoothce.bench.language import language_like

LABEL_SMOOTHING = 0.1
# Standard deviations of the hidden states: the larger, the less likely is a label drawn evenly.
DEVIATIONS = (3.6, 13.0, 39.0, 390.0)
CONTEXT = 2.0  # of inputs that look like a language model's
PRECISION = {"cuda": torch.bfloat16, "cpu": torch.float32}

Gradients = tuple[Tensor, Tensor]


def main() -> None:
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print_by_loss(arguments, device)
    print_by_draws(arguments, device)


def parse() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="N; of the filter twice as many")
    parser.add_argument("--entries", type=int, default=32768, help="V; of the filter twice as many")
    parser.add_argument("--features", type=int, default=1024, help="D; of the filter half as many")
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--softcap", type=float, help="of the second table")
    return parser.parse_args()


def print_by_loss(arguments: argparse.Namespace, device: str) -> None:
    """The first table."""
    tokens, entries, features = arguments.tokens, arguments.entries, arguments.features
    print(f"N = {tokens}, V = {entries}, D = {features}, β = {LABEL_SMOOTHING}; dE / dC error\n")
    print(
        "| mean loss, nats | ours | ours, `workspace=0` | torch, logits in the inputs' precision |"
    )
    print("|---|---|---|---|")
    for deviation in (None, *DEVIATIONS):
        if deviation is None:
            hidden, weight, labels = language_like(
                tokens, entries, features, CONTEXT, PRECISION[device], device=device
            )
        else:
            generator = torch.Generator(device).manual_seed(0)
            random: Any = {"device": device, "generator": generator}
            hidden = (torch.randn(tokens, features, **random) * deviation).to(PRECISION[device])
            weight = (torch.randn(entries, features, **random) / features**0.5).to(
                PRECISION[device]
            )
            labels = torch.randint(entries, (tokens,), **random)
        nats, right = reference(hidden, weight, labels)
        found = (
            gradients(fused(), hidden, weight, labels)[1],
            gradients(fused(workspace=0), hidden, weight, labels)[1],
            gradients(dense, hidden, weight, labels)[1],
        )
        cells = [f"{error(g[0], right[0]):.1e} / {error(g[1], right[1]):.1e}" for g in found]
        print(f"| {nats:,.1f} | {' | '.join(cells)} |")


def print_by_draws(arguments: argparse.Namespace, device: str) -> None:
    """The second table."""
    tokens = 2 * arguments.tokens
    entries = 2 * arguments.entries
    features = arguments.features // 2
    hidden, weight, labels = language_like(
        tokens, entries, features, CONTEXT, PRECISION[device], device=device
    )
    cap = {} if arguments.softcap is None else {"softcap": arguments.softcap}
    _, right = reference(hidden, weight, labels, **cap)
    filtered = fused(filter_eps="auto", **cap)
    said = f", softcap {arguments.softcap:g}" if cap else ""
    print(f"\nN = {tokens}, V = {entries}, D = {features}, β = {LABEL_SMOOTHING}{said}\n")
    print("| draws | dE error of their mean | dC |")
    print("|---|---|---|")
    sums = [torch.zeros_like(gradient) for gradient in right]
    generator = torch.Generator().manual_seed(0)
    for draw in range(1, max(arguments.draws) + 1):
        order = torch.randperm(tokens, generator=generator).to(device)
        _, (of_hidden, of_weight) = gradients(filtered, hidden[order], weight, labels[order])
        sums[0][order] += of_hidden.float()
        sums[1] += of_weight.float()
        if draw in arguments.draws:
            errors = [error(total / draw, g) for total, g in zip(sums, right, strict=True)]
            print(f"| {draw} | {errors[0]:.1e} | {errors[1]:.1e} |")


def fused(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The Triton loss with these options."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, label_smoothing=LABEL_SMOOTHING, impl="triton", **options
        )

    return loss


def dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Torch's loss of logits in the inputs' precision."""
    return F.cross_entropy(hidden @ weight.T, labels, label_smoothing=LABEL_SMOOTHING)


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any
) -> tuple[float, Gradients]:
    """Loss and gradients by the definition, of fp32 inputs."""

    def loss(*inputs: Tensor) -> Tensor:
        return linear_cross_entropy(
            *inputs, label_smoothing=LABEL_SMOOTHING, impl="reference", **options
        )

    return gradients(loss, hidden.float(), weight.float(), labels)


def gradients(
    loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[float, Gradients]:
    """A loss, and its gradients of the hidden states and the weight."""
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    loss = loss_of(hidden, weight, labels)
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss.item(), (of_hidden, of_weight)


def error(found: Tensor, right: Tensor) -> float:
    """The relative distance of a gradient from the right one."""
    return ((found.float() - right).norm() / right.norm()).item()


if __name__ == "__main__":
    main()
