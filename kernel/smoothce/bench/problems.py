"""What is measured on a GPU: inputs, some labels masked, a softcap; and the right gradients."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothce.bench.inputs import IGNORED, classifier
from smoothce.bench.language import language_like


@dataclass
class Problem:
    """Inputs, the softcap of their logits, and their name."""

    name: str
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    labels: Tensor  # (N,)
    softcap: float | None = None


def problems(args: argparse.Namespace, dtype: torch.dtype = torch.bfloat16) -> Iterator[Problem]:
    """Each input with each share of masked labels and each softcap."""
    for name, hidden, weight, labels in _inputs(args, dtype):
        for share in args.masked:
            for cap in args.softcap:
                title = name + (f", {100 * share:g} % of labels masked" if share else "")
                title += f", softcap {cap:g}" if cap else ""
                yield Problem(title, hidden, weight, mask(labels, share), cap)


def _inputs(
    args: argparse.Namespace, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    if args.tensors:
        tensors = torch.load(args.tensors, map_location=args.device)
        yield args.tensors.stem, *(tensors[k] for k in ("hidden", "weight", "labels"))
        return
    for model in args.models:
        for tokens in args.tokens:
            for context in args.contexts:
                v, d = classifier(model)
                name = f"{model}, N={tokens}, V={v}, D={d}, context {context:g}"
                yield name, *language_like(tokens, v, d, context, dtype, device=args.device)


def mask(labels: Tensor, share: float) -> Tensor:
    """The same labels, but this share of them, chosen at random, is ignored."""
    draws = torch.Generator(labels.device).manual_seed(0)
    order = torch.randperm(len(labels), generator=draws, device=labels.device)
    return labels.index_fill(0, order[: int(share * len(labels))], IGNORED)


def gradients(problem: Problem, beta: float, rows: int = 1024) -> tuple[Tensor, Tensor]:
    """Of the mean loss, from fp32 logits, some tokens at a time."""
    e, c, y = problem.hidden.float(), problem.weight.float(), problem.labels
    cap = problem.softcap
    valid = (y != IGNORED).nonzero()[:, 0]
    d_hidden, d_weight = torch.zeros_like(e), torch.zeros_like(c)
    for part in valid.split(rows):
        z = e[part] @ c.T
        if cap:
            z = z.div_(cap).tanh_().mul_(cap)
        g = z.softmax(1).sub_(beta / len(c))
        g[torch.arange(len(part)), y[part]] -= 1 - beta
        if cap:
            g *= z.div_(cap).square_().neg_().add_(1)
        g /= len(valid)
        d_hidden[part] = g @ c
        d_weight.addmm_(g.T, e[part])
    return d_hidden, d_weight
