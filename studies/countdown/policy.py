"""Policy gradient on checked answers, on the fused loss.

Of G answers y_i to a problem x, of T_i tokens, r_i is 1 where y_i is right, else 0, and

    ℓ_i = log π_old(y_i | x) / T_i                     the mean over its tokens, the end included
    A_i = (r_i − mean r) / (std r + 1e-4)              GRPO (Shao et al. 2024), of the group
        − γ_p ℓ_i  if y_i is right,  + γ_n ℓ_i  else   differential smoothing (arXiv 2511.19942)
    A_it = A_i − α (log π(y_it) + H_it)                the entropy bonus, H_it the token's entropy
    loss = mean_i Σ_t A_it nll_it

π_old is the policy that drew the answers, one update a draw, so that no ratio is clipped. The last
line's gradient is in the mean that of −α Σ_t H_it, without a gradient through the logits. ℓ does
not grow with the length, so that γ means the same for short and long answers. As published, the
smoothing is not centred, and a group without a wrong answer is pushed by it alone.
"""

import numpy as np
import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from transformers import LlamaForCausalLM

from calibeval.request import Strict
from smoothce import linear_cross_entropy, token_statistics
from studies.countdown.problems import OPERATORS, TARGETS, Problem
from studies.demo.pretrain import IGNORE

WORDS = ["<pad>", "</s>", "=", *OPERATORS, *map(str, range(TARGETS))]
IDS = {word: i for i, word in enumerate(WORDS)}
END, MOST = 1, 6  # </s>; tokens of an answer: five words and the end


class Method(Strict):
    """What is added to GRPO's advantages."""

    bonus: NonNegativeFloat = 0.0  # α, of a nat of a token's entropy
    gamma_p: NonNegativeFloat = 0.0  # on right answers
    gamma_n: NonNegativeFloat = 0.0  # on wrong ones


def advantages(
    correct: Tensor,  # (P, G) bool
    log_pi: Tensor,  # (P, G) ℓ
    method: Method,
) -> Tensor:  # (P, G)
    """A of P groups of G answers."""
    r = correct.to(log_pi.dtype)
    found = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    return found + torch.where(correct, -method.gamma_p, method.gamma_n) * log_pi


def answer_losses(
    nll: Tensor,  # (N, T) −log π of the answers' tokens, 0 elsewhere
    entropy: Tensor,  # (N, T)
    advantage: Tensor,  # (N,)
    method: Method,
) -> Tensor:  # (N,)
    """Σ_t A_it nll_it of each answer."""
    weight = advantage[:, None] + method.bonus * (nll.detach() - entropy)
    return (weight * nll).sum(1)


def encoded(texts: list[str]) -> Tensor:
    """Ids (N, L) of texts of L words."""
    return torch.tensor([[IDS[word] for word in text.split()] for text in texts])


def answer(
    model: LlamaForCausalLM, problems: list[Problem], seed: int
) -> tuple[Tensor, Tensor, list[bool]]:
    """Prompts, of one length, with their answers, as ids (N, L); the answers' tokens as labels
    (N, T), the end included and then `IGNORE`; whether each is right."""
    asked = encoded([p.prompt for p in problems])
    torch.manual_seed(seed)
    ids = model.generate(asked, do_sample=True, top_k=0, max_new_tokens=MOST)
    answers = ids[:, asked.shape[1] :]
    end = answers == END
    texts = (" ".join(WORDS[i] for i in row if i > END) for row in answers.tolist())
    right = [p.solved_by(t) for p, t in zip(problems, texts, strict=True)]
    return ids, answers.masked_fill(end.cumsum(1) - end.int() > 0, IGNORE), right


def read(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of N answers, (N, T): −log π of their tokens, and entropies, in nats."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    inputs = hidden[:, -1 - labels.shape[1] : -1], model.lm_head.weight, labels
    return linear_cross_entropy(*inputs, reduction="none"), token_statistics(*inputs).entropy


def solved(model: LlamaForCausalLM, problems: list[Problem], samples: int) -> list[int]:
    """How many of `samples` answers to each problem are right.

    The seeds are the same for every model, so that differences are less noisy.
    """
    return [sum(answer(model, [p] * samples, seed)[2]) for seed, p in enumerate(problems)]


def train(
    model: LlamaForCausalLM, problems: list[Problem], method: Method, seed: int, keys
) -> list[float]:
    """Train the model, an update a step; returns the share of right answers at each.

    `keys` are the study's: learning_rate, steps, problems_per_step, answers_per_problem.
    """
    weights = [*model.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=keys.learning_rate, weight_decay=0.0)
    shape, rewards = (keys.problems_per_step, keys.answers_per_problem), []
    for step in range(keys.steps):
        random = np.random.default_rng([seed, step])
        drawn = random.integers(0, len(problems), shape[0]).repeat(shape[1])
        draw = int(random.integers(2**31))
        ids, labels, right = answer(model, [problems[i] for i in drawn], draw)
        nll, entropy = read(model, ids, labels)
        correct, log_pi = torch.tensor(right), -nll.detach().sum(1) / (labels != IGNORE).sum(1)
        found = advantages(correct.view(shape), log_pi.view(shape), method).view(-1)
        answer_losses(nll, entropy, found, method).mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = keys.learning_rate * (1 - step / keys.steps)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(sum(right) / len(right))
    return rewards
