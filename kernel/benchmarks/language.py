"""Inputs with a language model's statistics, where random ones would flatter or mislead a filter.

Token frequencies follow Zipf's law and fall, noisily, with the token's id, as in BPE vocabularies.
A position favors its target and some competitors, each to its own degree, so that p(target) runs
from 1e-4 to 0.998. `context` is the standard deviation over the vocabulary of what the position
adds to a logit; it is about 2 in real models.
"""

import torch
from torch import Tensor

UNIGRAM_NORM = 8.0  # length of the direction in which the unigram log-probabilities lie
RANK_NOISE = 0.75  # standard deviation of a token's log rank, given its id
COMPETITORS = 24  # of each position
COMPETITOR_STRENGTH = 0.8  # of the strongest, as a share of the target's confidence
CONFIDENCE = (2.0, 16.0)  # range of how far a target's logit is above its prior, drawn uniformly


def language_like(
    tokens: int,
    vocabulary: int,
    features: int,
    context: float,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (N, D), a classifier (V, D) and labels (N,)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    ids = torch.arange(vocabulary, device=device, dtype=torch.float32)
    ids_by_rank = ((ids + 3).log() + RANK_NOISE * normal(vocabulary)).argsort()
    rank = torch.empty_like(ids).scatter_(0, ids_by_rank, ids)
    unigram_log_p = (-(rank + 3).log()).log_softmax(0)
    unigram_direction = torch.nn.functional.normalize(normal(features), dim=0)
    embedding = normal(vocabulary, features) / features**0.5
    labels = unigram_log_p.exp().multinomial(tokens, replacement=True, generator=generator)
    low, high = CONFIDENCE
    confidence = low + (high - low) * uniform(tokens, 1)
    hidden = UNIGRAM_NORM * unigram_direction + context * normal(tokens, features)
    hidden += confidence * embedding[labels]
    # Labels are drawn by p, competitors by √p: rare words are competitors more often than labels.
    competitors = (
        unigram_log_p.mul(0.5)
        .exp()
        .multinomial(tokens * COMPETITORS, replacement=True, generator=generator)
    )
    for competitor in competitors.view(COMPETITORS, tokens):
        strength = COMPETITOR_STRENGTH * confidence * uniform(tokens, 1) ** 3
        hidden += strength * embedding[competitor]
    weight = embedding.addcmul_((unigram_log_p / UNIGRAM_NORM)[:, None], unigram_direction)
    return hidden.to(dtype), weight.to(dtype), labels
