"""Inputs with a language model's statistics, where random ones would flatter or mislead a filter.

Token frequencies follow Zipf's law and fall, noisily, with the token's id, as in BPE vocabularies.
A position favours its target and some competitors, each to its own degree, so that p(target) runs
from 1e-4 to 0.998; `context` is the standard deviation over the vocabulary of what the position
adds to a logit: about 2 in real models.
"""

import torch
from torch import Tensor

PRIOR = 8.0  # length of the direction in which the unigram log-probabilities lie
NOISE = 0.75  # of log rank against id
COMPETITORS = 24
CONFIDENCE = (2.0, 16.0)  # a target's logit above its prior, uniformly


def language_like(
    tokens: int,
    vocabulary: int,
    features: int,
    context: float,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden (N, D), weight (V, D) and labels (N,)."""
    g = torch.Generator(device).manual_seed(seed)
    on = {"device": device, "generator": g}
    ids = torch.arange(vocabulary, device=device, dtype=torch.float32)
    by_rank = ((ids + 3).log() + NOISE * torch.randn(vocabulary, **on)).argsort()
    rank = torch.empty_like(ids).scatter_(0, by_rank, ids)
    prior = (-(rank + 3).log()).log_softmax(0)
    common = torch.nn.functional.normalize(torch.randn(features, **on), dim=0)
    own = torch.randn(vocabulary, features, **on) / features**0.5
    labels = prior.exp().multinomial(tokens, replacement=True, generator=g)
    low, high = CONFIDENCE
    confidence = low + (high - low) * torch.rand(tokens, 1, **on)
    hidden = PRIOR * common + context * torch.randn(tokens, features, **on)
    hidden += confidence * own[labels]
    others = prior.mul(0.5).exp().multinomial(tokens * COMPETITORS, replacement=True, generator=g)
    for other in others.view(COMPETITORS, tokens):
        hidden += 0.8 * confidence * torch.rand(tokens, 1, **on) ** 3 * own[other]
    weight = own.addcmul_((prior / PRIOR)[:, None], common)
    return hidden.to(dtype), weight.to(dtype), labels
