"""Policy gradient on checked answers, on the fused loss.

Of G answers y_i to a problem x, of T_i tokens, r_i is 1 where y_i is right, else 0, and

    ℓ_i = log π_old(y_i | x) / T_i                     the mean over its tokens, the end included
    A_i = (r_i − mean r) / (std r + 1e-4)              GRPO (Shao et al. 2024), of the group
        − γ_p ℓ_i  if y_i is right,  + γ_n ℓ_i  else   differential smoothing (arXiv 2511.19942)
        − b (ℓ_i − ℓ_i of the starting model)          the gradient of b KL(π ‖ π_start) a token
    A_it = A_i − α (log π(y_it) + H_it)                the entropy bonus, H_it the token's entropy
    loss = mean_i Σ_t A_it nll_it

π_old is the policy that drew the answers, one update a draw, so that no ratio is clipped. The last
line's gradient is in the mean that of −α Σ_t H_it, without a gradient through the logits. ℓ does
not grow with the length, so that γ and b mean the same for short and long answers. As published,
the smoothing is not centred, and a group without a wrong answer is pushed by it alone.
"""

import copy
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoModelForCausalLM

from calibeval import records
from calibeval.engines import load, load_tokenizer
from calibeval.engines.sampling import Sampler, Setting, padded
from calibeval.io import sha256
from calibeval.references import end_tokens
from smoothce import linear_cross_entropy, token_statistics
from sweeps.backends.policy_gradient import Method, PolicyGradientKeys
from sweeps.rundir import RunDir
from sweeps.trainer import checkpoint, countdown, loop
from sweeps.trainer.data import IGNORE


def advantages(
    correct: Tensor,  # (P, G) bool
    log_pi: Tensor,  # (P, G) ℓ
    anchor: Tensor,  # (P, G) b (ℓ − ℓ of the starting model)
    method: Method,
) -> Tensor:  # (P, G)
    """A of P groups of G answers."""
    r = correct.to(log_pi.dtype)
    found = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    return found + torch.where(correct, -method.gamma_p, method.gamma_n) * log_pi - anchor


def answer_losses(
    nll: Tensor,  # (N, T) −log π of the answers' tokens, 0 elsewhere
    entropy: Tensor,  # (N, T)
    advantage: Tensor,  # (N,)
    method: Method,
) -> Tensor:  # (N,)
    """Σ_t A_it nll_it of each answer."""
    weight = advantage[:, None] + method.bonus * (nll.detach() - entropy)
    return (weight * nll).sum(1)


class Policy:
    """A model with its tokenizer as a distribution over answers to problems."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self.sampler, self.tokenizer = Sampler.of(model), load_tokenizer(name)
        self.ends = end_tokens(name, self.tokenizer)
        self.head = {"bias": self.sampler.bias, **self.sampler.scales}

    def answer(self, problems: list, most: int, random: np.random.Generator) -> tuple[list, ...]:
        """Prompts and answers of up to `most` tokens, as ids, and whether each is right."""
        prompts = self.tokenizer([problem.prompt for problem in problems])["input_ids"]
        uniforms = random.random((len(problems), most))
        answers = self.sampler.sample(prompts, Setting(), uniforms, self.ends)
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return prompts, answers, [p.solved_by(t) for p, t in zip(problems, texts, strict=True)]

    def read(self, prompts: list[list[int]], answers: list[list[int]]) -> tuple[Tensor, ...]:
        """Of N answers, (N, T): −log π of their tokens, and entropies, in nats; the lengths."""
        ids, asked = (x.to(self.sampler.weight.device) for x in padded(prompts, answers))
        labels = ids[:, 1:].masked_fill(~asked, IGNORE)
        hidden = self.sampler.decoder(input_ids=ids, use_cache=False).last_hidden_state
        inputs = hidden[:, :-1], self.sampler.weight, labels
        nll = linear_cross_entropy(*inputs, reduction="none", **self.head)
        return nll, token_statistics(*inputs, **self.head).entropy, (labels != IGNORE).sum(1)

    def measure(self, path: Path, out: Path, samples: int, most: int, train: dict) -> None:
        """Write a record of each problem in `path`, `samples` times answered, for `pass@k`.

        The random numbers are the same for every model, so that differences are less noisy.
        """
        random, found = np.random.default_rng(0), []
        for problem in (problems := countdown.read(path)):
            found.append(sum(self.answer([problem] * samples, most, random)[2]))
        rows = [
            {"id": problem.prompt, "samples": samples, "correct": correct}
            for problem, correct in zip(problems, found, strict=True)
        ]
        out.parent.mkdir(exist_ok=True)
        records.write(out, rows, {"train": train})


def train(run: RunDir) -> None:
    """Train the run to its end, or to the next step once `run.stop` exists or a signal came.

    Resumes from the newest whole checkpoint: a step's problems and answers are a function of seed,
    step and weights. Raises SweepError for what the user can put right.
    """
    asked, config = loop.StopRequest(run), run.config()
    keys: PolicyGradientKeys = config.keys
    accelerator, base = loop.start_accelerator(run, keys, config.world), keys.model_name_or_path
    set_seed(keys.seed)
    problems = countdown.read(Path(keys.train_file))
    model = load(AutoModelForCausalLM, base, "a causal language model").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=keys.learning_rate, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    policy = Policy(model, base)
    anchor = Policy(copy.deepcopy(model), base) if keys.kl_weight else None
    facts, total = {"data": sha256(Path(keys.train_file))}, keys.max_train_steps
    found = checkpoint.latest(run, facts)
    start = found["step"] if found else 0
    if found:
        torch.set_num_threads(found["threads"])  # sums split otherwise differ in their last bit
        accelerator.load_state(str(run.checkpoints / f"step-{start}"))
        accelerator.print(f"resumed: step {start} of {total}")
    groups, size = keys.problems_per_step, keys.answers_per_problem
    log = loop.Log(run, accelerator, start, total, config, max(1, len(problems) // groups))
    for step in range(start, total):
        random = np.random.default_rng([keys.seed, step])
        chosen = [problems[i] for i in random.integers(0, len(problems), groups).repeat(size)]
        prompts, answers, right = policy.answer(chosen, keys.max_new_tokens, random)
        nll, entropy, lengths = policy.read(prompts, answers)
        correct = torch.tensor(right, device=nll.device)
        log_pi, pull = -nll.detach().sum(1) / lengths, torch.zeros(len(right), device=nll.device)
        if anchor:
            with torch.no_grad():
                pull = log_pi + anchor.read(prompts, answers)[0].sum(1) / lengths
        grouped = (x.view(groups, size) for x in (correct, log_pi, keys.kl_weight * pull))
        found = advantages(*grouped, keys.method).view(-1)
        losses = answer_losses(nll, entropy, found, keys.method)
        accelerator.backward(losses.mean())
        norm = loop.gradient_norm(accelerator, model, keys.clip_grad_norm, log.due(step + 1))
        rate = keys.learning_rate * (1 - step / total)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        log.add(losses.detach().sum())
        targets, prompted = int(lengths.sum()), sum(map(len, prompts))
        more = {"reward": correct.float().mean(), "entropy": entropy.sum() / targets}
        more = {key: float(of) for key, of in (more | {"log_probability": log_pi.mean()}).items()}
        counts = {"tokens": prompted + targets, "targets": targets, "flops": None}
        log.step(step + 1, norm=norm, learning_rate=rate, **counts, **more)
        done = step + 1 == total
        stopping = not done and asked.everywhere(accelerator)
        due = keys.checkpointing_steps and (step + 1) % keys.checkpointing_steps == 0 and not done
        if stopping or due:
            with log.paused("saving"):
                checkpoint.save(run, accelerator, step + 1, facts, keys.keep_last_n_checkpoints)
        if stopping:
            accelerator.print(f"stopped: step {step + 1} of {total} is saved")
            return log.close()
    given = keys.samples, keys.max_new_tokens, config.train
    policy.measure(Path(keys.test_file), run.scores / "passk.jsonl", *given)
    with log.paused("saving"):
        loop.save_model(run, accelerator, model, policy.tokenizer, loop.base_dtype(base))
    log.close()
