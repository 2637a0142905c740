"""What is measured: inputs, some labels masked, a softcap; and the right gradients."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothce import linear_cross_entropy
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


def problems(args: argparse.Namespace, dtype: torch.dtype | None = None) -> Iterator[Problem]:
    """Each input with each share of masked labels and each softcap."""
    dtype = dtype or (torch.float32 if args.device == "cpu" else torch.bfloat16)
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
        yield args.tensors.stem, *(tensors[k].detach() for k in ("hidden", "weight", "labels"))
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


def gradients(problem: Problem, beta: float) -> tuple[Tensor, ...]:
    """Of the mean loss for hidden and weight, in fp32 (of fp32: in fp64), in plain PyTorch."""
    given = problem.hidden, problem.weight
    wide = torch.float64 if problem.hidden.dtype == torch.float32 else torch.float32
    leaves = [t.detach().to(wide).requires_grad_() for t in given]
    settings = {"label_smoothing": beta, "softcap": problem.softcap, "impl": "chunked"}
    return torch.autograd.grad(linear_cross_entropy(*leaves, problem.labels, **settings), leaves)
