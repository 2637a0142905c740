"""Fitting a calibrator on answers of a frozen model; gradients stay in the head."""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from calibeval.engines import Job
from calibeval.engines.hf import TransformersEngine
from calibeval.io import InputError, counted
from calibeval.posthoc.calibrator import LIMIT, Calibrator, Settings, one_token, question_digest
from calibeval.tasks import Question, Subject

EPOCHS, BATCH, RATE, DECAY, HELD_OUT, PATIENCE = 100, 64, 1e-3, 1e-2, 0.2, 15
FEWEST = 20
# The split that a task is scored on, and the one to fit on.
SPLITS = {
    "mmlu": ("test", "val"),
    "hellaswag": ("val", "train"),
    "arc_easy": ("test", "dev"),
    "arc_challenge": ("test", "dev"),
}


def split_to_fit(task: str, split: str | None) -> str | None:
    """The split to fit on; the one that the task is scored on raises `InputError`."""
    scored, default = SPLITS.get(task, (None, None))
    if split and split.lower() == scored:
        raise InputError(
            f"--split {split}: {task} is scored on it; a calibrator is fitted on questions that "
            f"do not test it, by default {default}"
        )
    return split or default


def unseen(subjects: list[Subject], tested: list[Question]) -> list[Subject]:
    """The subjects without questions that are tested, or are examples in their own prompts."""
    examples = (question for subject in subjects for question in subject.shots)
    seen = {question_digest(question) for question in (*tested, *examples)}
    return [
        replace(s, questions=tuple(q for q in s.questions if question_digest(q) not in seen))
        for s in subjects
    ]


@dataclass(frozen=True)
class Answers:
    """What the frozen model thought where it was about to answer N questions."""

    hidden: list[Tensor]  # N of (T_i, D): the output layer's input; T = 1 where that is enough
    logits: Tensor  # (N, V), or (N, K) for the choices alone
    labels: Tensor  # (N,) column of the right answer

    def __len__(self) -> int:
        return len(self.hidden)

    def take(self, rows: Tensor) -> "Answers":
        """The answers at `rows`."""
        hidden = [self.hidden[i] for i in rows.tolist()]
        return Answers(hidden, self.logits[rows], self.labels[rows])


def answers(
    engine: TransformersEngine,
    groups: list[list[Job]],
    labels: dict[int, int],
    *,
    over: str,
    context: bool,
) -> Answers:
    """What the model thinks where it is about to answer; `labels` by job index.

    Over the choices, logits are the letters' and labels their places; over the vocabulary, logits
    are all and labels the right letters' ids. `context` keeps the states of the whole prompt.
    """
    hidden, logits, right = [], [], []
    for job, states, row in engine.states(groups, context):
        one_token(job)
        ids = [token for (token,) in job.branches]
        label = labels[job.index]
        hidden.append(states.cpu().clone())
        logits.append((row[0, ids] if over == "choices" else row[0]).float().cpu().clone())
        right.append(label if over == "choices" else ids[label])
    if len({len(row) for row in logits}) > 1:
        raise InputError(
            "questions with different numbers of choices cannot be fitted together over the "
            "choices; give --over vocabulary"
        )
    stacked = torch.stack(logits)
    if not stacked.isfinite().all():
        raise InputError("the model's output is not finite: nothing can be fitted to it")
    return Answers(hidden, stacked, torch.tensor(right))


def selective_smoothing(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Mean over N of (1 − α) (−log p_label) where argmax p = label, α (−mean_v log p_v) elsewhere.

    `logits` (N, V) are divided by their temperatures already. Xie et al. 2024, arXiv 2409.19817:
    be sure where right, and take wrong answers for evidence that nothing was known.
    """
    sure = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    unsure = -torch.log_softmax(logits.float(), dim=-1).mean(-1)
    right = logits.argmax(-1) == labels
    return torch.where(right, (1 - alpha) * sure, alpha * unsure).mean()


def pad_left(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences (T_i, D) as (N, T, D) that end together, and their lengths."""
    ends = pad_sequence([s.flip(0) for s in sequences], batch_first=True)
    return ends.flip(1), torch.tensor([len(s) for s in sequences])


def fit(
    answers: Answers, head: str, *, over: str = "choices", alpha: float = 0.5, seed: int = 0
) -> tuple[Calibrator, dict]:
    """The calibrator of a kind for a model's answers, and how the fit went.

    A constant minimises the negative log-likelihood of the right answers; every other head
    minimises `selective_smoothing`, stopping where a fifth of the answers, held out, does best.
    """
    if len(answers) < FEWEST:
        raise InputError(
            f"{counted(len(answers), 'answer')} to fit a calibrator on; expected {FEWEST} or more"
        )
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}, expected 0 to 1")
    torch.manual_seed(seed)
    calibrator = Calibrator(Settings(head, answers.hidden[0].shape[-1], over))
    report = (
        fit_constant(calibrator, answers)
        if head == "constant"
        else fit_head(calibrator, answers, alpha, seed)
    )
    return calibrator.eval(), {"answers": len(answers), "head": head, "over": over} | report


def fit_constant(calibrator: Calibrator, answers: Answers) -> dict:
    """Temperature scaling: argmin over log τ of the mean −log softmax(logits / τ)_label."""
    from scipy.optimize import minimize_scalar

    logits = answers.logits.double()

    def nll(log_tau: float) -> float:
        scaled = logits / math.exp(log_tau)
        return torch.nn.functional.cross_entropy(scaled, answers.labels).item()

    bounds = (-0.99 * LIMIT, 0.99 * LIMIT)
    found = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    with torch.no_grad():
        calibrator.out.bias.fill_(LIMIT * math.atanh(found.x / LIMIT))
    return {"temperature": math.exp(found.x), "nll": [nll(0.0), float(found.fun)]}


def fit_head(calibrator: Calibrator, answers: Answers, alpha: float, seed: int) -> dict:
    """Adaptive temperature scaling: AdamW on `selective_smoothing`, with early stopping."""
    order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(seed))
    cut = max(1, int(HELD_OUT * len(answers)))
    held, used = answers.take(order[:cut]), answers.take(order[cut:])
    optimizer = torch.optim.AdamW(calibrator.parameters(), RATE, weight_decay=DECAY)
    kept, losses = None, []
    for epoch in range(EPOCHS + 1):
        with torch.no_grad():
            losses.append(objective(calibrator, held, alpha).item())
        best = int(np.nanargmin(losses))
        if best == epoch:
            kept = copy.deepcopy(calibrator.state_dict())
        if epoch - best > PATIENCE or epoch == EPOCHS:
            break
        shuffled = torch.randperm(len(used), generator=torch.Generator().manual_seed(epoch))
        for rows in shuffled.split(BATCH):
            optimizer.zero_grad()
            objective(calibrator, used.take(rows), alpha).backward()
            optimizer.step()
    calibrator.load_state_dict(kept)
    return {"alpha": alpha, "epochs": len(losses) - 1, "held_out_loss": [losses[0], losses[best]]}


def temperatures(calibrator: Calibrator, answers: Answers) -> Tensor:
    """τ of each answer, (N,)."""
    return calibrator(*pad_left(answers.hidden))


def objective(calibrator: Calibrator, answers: Answers, alpha: float) -> Tensor:
    """The loss that a head minimises."""
    scaled = answers.logits / temperatures(calibrator, answers)[:, None]
    return selective_smoothing(scaled, answers.labels, alpha)
