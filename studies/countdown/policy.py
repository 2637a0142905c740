"""Policy gradient on checked answers, on the fused loss.

Of G answers y_i to a problem x, of T_i tokens, r_i is 1 where y_i is right, else 0, and

    ℓ_i = log π_old(y_i | x) / T_i                     the mean over its tokens, the end included
    A_i = (r_i − mean r) / (std r + 1e-4)              GRPO (Shao et al. 2024), of the group
        − γ_p ℓ_i  if y_i is right,  + γ_n ℓ_i  else   differential smoothing (arXiv 2511.19942)
    A_it = A_i − α (log π(y_it) + H_it)                the entropy bonus, H_it the token's entropy
    loss = mean_i Σ_t A_it nll_it

π_old is the policy that drew the answers, one update a draw, so that no ratio is clipped. A_it is
taken as a number: neither log π(y_it) nor H_it in it is differentiated. All the same, in the mean
over drawn tokens the bonus adds the gradient of −α Σ_t H_it to that of the loss. ℓ does not grow
with the length, so that γ means the same for short and long answers. As published, the smoothing is
not centred, and a group without a wrong answer is pushed by it alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from transformers import LlamaForCausalLM

from calibeval.validation import Strict
from smoothce import linear_cross_entropy, token_statistics
from studies.countdown.problems import OPERATORS, TARGETS, Problem
from studies.pretraining import IGNORE

WORDS = ["<pad>", "</s>", "=", *OPERATORS, *map(str, range(TARGETS))]
IDS = {word: index for index, word in enumerate(WORDS)}
END = IDS["</s>"]
LONGEST_ANSWER = 6  # tokens: five words and the end


class Method(Strict):
    """What is added to GRPO's advantages."""

    bonus: NonNegativeFloat = 0.0  # α, of a nat of a token's entropy
    gamma_p: NonNegativeFloat = 0.0  # on right answers
    gamma_n: NonNegativeFloat = 0.0  # on wrong ones


@dataclass(frozen=True)
class Schedule:
    """How long and on how much is trained; the same for every method."""

    learning_rate: float  # at the first step, from which it falls linearly to 0
    steps: int
    problems_per_step: int  # P
    answers_per_problem: int  # G


def advantages(
    correct: Tensor,  # (P, G) bool
    mean_log_probability: Tensor,  # (P, G) ℓ
    method: Method,
) -> Tensor:  # (P, G)
    """A of P groups of G answers."""
    rewards = correct.to(mean_log_probability.dtype)
    centered = rewards - rewards.mean(1, keepdim=True)
    grpo = centered / (rewards.std(1, keepdim=True) + 1e-4)
    return grpo + torch.where(correct, -method.gamma_p, method.gamma_n) * mean_log_probability


def answer_losses(
    nll: Tensor,  # (N, T) −log π of the answers' tokens, 0 elsewhere
    entropy: Tensor,  # (N, T), without a gradient
    advantage: Tensor,  # (N,)
    method: Method,
) -> Tensor:  # (N,)
    """Σ_t A_it nll_it of each answer."""
    weight = advantage[:, None] + method.bonus * (nll.detach() - entropy)
    return (weight * nll).sum(1)


def encoded(texts: list[str]) -> Tensor:
    """Ids (N, L) of texts of L words."""
    return torch.tensor([[IDS[word] for word in text.split()] for text in texts])


@dataclass(frozen=True)
class Answers:
    """Sampled answers to N problems."""

    ids: Tensor  # (N, L): a prompt, all of one length, and its answer
    labels: Tensor  # (N, T): the answer's tokens with the end, and then IGNORE
    correct: list[bool]  # (N)


def sample_answers(model: LlamaForCausalLM, problems: list[Problem], seed: int) -> Answers:
    """Sample an answer to each problem."""
    prompts = encoded([problem.prompt for problem in problems])
    torch.manual_seed(seed)
    generator: Any = model  # transformers annotates `generate` so that its own models lack it
    ids: Tensor = generator.generate(
        prompts, do_sample=True, top_k=0, max_new_tokens=LONGEST_ANSWER
    )
    answers = ids[:, prompts.shape[1] :]
    correct = []
    for problem, tokens in zip(problems, answers.tolist(), strict=True):
        text = answer_text(tokens)
        correct.append(text is not None and problem.solved_by(text))
    is_end = answers == END
    follows_an_end = is_end.cumsum(1) - is_end.int() > 0
    return Answers(ids, answers.masked_fill(follows_an_end, IGNORE), correct)


def answer_text(tokens: list[int]) -> str | None:
    """The words of an answer before its end; None where it has none.

    What follows the end is padding. A padding token that was sampled before it is a word like any
    other, and makes the answer wrong."""
    if END not in tokens:
        return None
    return " ".join(WORDS[token] for token in tokens[: tokens.index(END)])


def nll_and_entropy(model: LlamaForCausalLM, answers: Answers) -> tuple[Tensor, Tensor]:
    """Of the answers' tokens −log π, and the entropies of π, in nats; (N, T) both."""
    length = answers.labels.shape[1]
    hidden = model.base_model(input_ids=answers.ids, use_cache=False).last_hidden_state
    before_each_token = hidden[:, -1 - length : -1]
    weight = model.lm_head.weight
    nll = linear_cross_entropy(before_each_token, weight, answers.labels, reduction="none")
    return nll, token_statistics(before_each_token, weight, answers.labels).entropy


def count_correct(model: LlamaForCausalLM, problems: list[Problem], samples: int) -> list[int]:
    """How many of `samples` answers to each problem are right.

    The seeds are the same for every model, so that differences are less noisy.
    """
    counts = []
    for seed, problem in enumerate(problems):
        counts.append(sum(sample_answers(model, [problem] * samples, seed).correct))
    return counts


def train(
    model: LlamaForCausalLM,
    problems: list[Problem],
    method: Method,
    seed: int,
    schedule: Schedule,
) -> list[float]:
    """Train the model, an update a step; returns the share of right answers at each."""
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=schedule.learning_rate, weight_decay=0.0)
    groups = (schedule.problems_per_step, schedule.answers_per_problem)  # (P, G)
    rewards = []
    for step in range(schedule.steps):
        rng = np.random.default_rng([seed, step])
        drawn = rng.integers(0, len(problems), schedule.problems_per_step)
        sampling_seed = int(rng.integers(2**31))
        asked = [problems[index] for index in drawn.repeat(schedule.answers_per_problem)]
        answers = sample_answers(model, asked, sampling_seed)
        nll, entropy = nll_and_entropy(model, answers)
        mean_log_probability = -nll.detach().sum(1) / (answers.labels != IGNORE).sum(1)
        correct = torch.tensor(answers.correct)
        advantage = advantages(
            correct.view(groups), mean_log_probability.view(groups), method
        ).view(-1)
        answer_losses(nll, entropy, advantage, method).mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = schedule.learning_rate * (1 - step / schedule.steps)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(sum(answers.correct) / len(answers.correct))
    return rewards
