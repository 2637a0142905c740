"""Post-hoc calibrators: a temperature for every answer, fitted after training on other questions.

    log P(token) = log_softmax(logits / τ),   τ = exp(4 tanh(head(LayerNorm(h)) / 4))

`h` (D,) is the frozen model's last hidden state where it answers. The head is a constant
(temperature scaling, Guo et al. 2017) or linear (adaptive temperature scaling, Xie et al. 2024,
arXiv 2409.19817); it starts at τ = 1. A positive temperature never changes the order of the tokens,
so accuracy stays what it was; the bound, e^±4, keeps different logits different in floating point.
"""

import copy
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from calibeval import models, scoring, tasks
from calibeval.engines import Job, context_length, first_line
from calibeval.engines.hf import Answer, TransformersEngine
from calibeval.io import InputError, atomic_write, counted, read_text, sha256
from calibeval.request import Request, Task
from calibeval.tasks import Question, Subject

LIMIT = 4.0  # of |log τ|
CONFIG, WEIGHTS = "calibrator.json", "calibrator.safetensors"
EPOCHS, BATCH, RATE, DECAY, HELD_OUT, PATIENCE = 100, 64, 1e-3, 1e-2, 0.2, 15
FEWEST = 20


class Calibrator(nn.Module):
    """Temperatures (B,) of hidden states (B, D); `fitted` says on what and with which result."""

    def __init__(self, head: str, hidden_size: int, fitted=None):
        super().__init__()
        self.settings = {"head": head, "hidden_size": hidden_size}
        self.fitted = fitted or {}
        self.norm, self.out = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.out.weight.requires_grad_(head != "constant")

    def forward(self, hidden: Tensor) -> Tensor:
        """Temperatures (B,) of hidden states (B, D)."""
        log_tau = self.out(self.norm(hidden.float())).squeeze(-1)
        return (LIMIT * torch.tanh(log_tau / LIMIT)).exp()

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights, then `calibrator.json`."""
        from safetensors.torch import save

        with atomic_write(folder / WEIGHTS, "wb") as file:
            file.write(save(self.state_dict()))
        with atomic_write(folder / CONFIG) as file:
            json.dump(self.settings | {"fitted": self.fitted}, file, indent=1)

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Calibrator":
        """Read what `save_pretrained` wrote; raises `InputError` if it is absent or not whole."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not (folder / CONFIG).is_file():
            made = "`calibeval fit-temperature` or fit-ats makes one"
            raise InputError(f"{folder}: no {CONFIG}; {made}")
        try:
            found = json.loads(read_text(folder / CONFIG))
            fitted = dict(found["fitted"])
            calibrator = cls(found["head"], found["hidden_size"], fitted)
            calibrator.load_state_dict(load_file(folder / WEIGHTS))
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, SafetensorError) as error:
            raise InputError(f"{folder}: not a whole calibrator: {first_line(error)}") from error
        return calibrator.eval()


class CalibratedEngine(TransformersEngine):
    """The transformers engine with logits / τ in the place of logits."""

    def __init__(self, model: str, folder: Path, **options):
        super().__init__(model, **options)
        self.calibrator = Calibrator.from_pretrained(folder).to(self.device)

    def describe(self) -> dict:
        """Engine settings and the kind of calibrator."""
        return super().describe() | {"calibrator": self.calibrator.settings["head"]}

    @torch.inference_mode()
    def batches(self, groups: list[list[Job]], skip: Container[int] = ()) -> Iterator[list[Answer]]:
        """Yield what the engine yields, the logits divided by their temperatures."""
        for batch in super().batches(groups, skip):
            for job, *_ in batch:
                one_token(job)
            yield [(j, h, z.double() / self.calibrator(h)[:, None]) for j, h, z in batch]


def one_token(job: Job) -> None:
    """Refuse letters of several tokens: temperatures of their own could reorder them."""
    if len(job.nodes) > 1:
        raise InputError(
            "the tokenizer spells a letter in several tokens; temperatures along them could change "
            "which letter is likeliest, so only letters of one token can be calibrated"
        )


def question_digest(question: Question) -> str:
    """SHA-256, 16 digits of it, of a question's text and its choices in any order.

    Its prompt's digest would not do: other shots or another style change that.
    """
    parts = [question.text.strip(), *sorted(choice.strip() for choice in question.choices)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def unseen(subjects: list[Subject], tested: list[Question]) -> list[Subject]:
    """The subjects without questions that are tested, or are examples in their own prompts."""
    examples = (question for subject in subjects for question in subject.shots)
    seen = {question_digest(question) for question in (*tested, *examples)}
    return [
        replace(s, questions=tuple(q for q in s.questions if question_digest(q) not in seen))
        for s in subjects
    ]


class Answers(NamedTuple):
    """What the frozen model thought where it was about to give N answers."""

    hidden: Tensor  # (N, D): the output layer's input
    logits: Tensor  # (N, K) of the choices
    labels: Tensor  # (N,) place of the right answer


def answers(engine: TransformersEngine, groups: list[list[Job]], labels: list[int]) -> Answers:
    """What the model thinks of the choices where it is about to answer; `labels` by job index.

    Of questions with as many choices as most have.
    """
    found = []
    for job, hidden, logits in itertools.chain.from_iterable(engine.batches(groups)):
        one_token(job)
        letters = logits[0, [token for (token,) in job.branches]]
        found.append((hidden[0].cpu().clone(), letters.float().cpu(), labels[job.index]))
    usual = Counter(len(logits) for _, logits, _ in found).most_common(1)
    found = [one for one in found if len(one[1]) == usual[0][0]]
    if len(found) < FEWEST:
        many = counted(len(found), "answer")
        raise InputError(f"{many} to fit a calibrator on; expected {FEWEST} or more")
    hidden, logits, right = zip(*found, strict=True)
    if not (stacked := torch.stack(logits)).isfinite().all():
        raise InputError("the model's output is not finite: nothing can be fitted to it")
    return Answers(torch.stack(hidden), stacked, torch.tensor(right))


def selective_smoothing(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Mean over N of (1 − α)(−log p_label) where argmax p = label, α (−mean_v log p_v) elsewhere.

    Be sure where right, and take wrong answers for evidence that nothing was known (Xie et al.
    2024); `logits` (N, V) are divided by their temperatures already.
    """
    sure = cross_entropy(logits.float(), labels, reduction="none")
    unsure = -torch.log_softmax(logits.float(), dim=-1).mean(-1)
    right = logits.argmax(-1) == labels
    return torch.where(right, (1 - alpha) * sure, alpha * unsure).mean()


def fit(answers: Answers, head: str, alpha: float = 0.5, seed: int = 0) -> tuple[Calibrator, dict]:
    """The calibrator of a kind for a model's answers, and how the fit went.

    A constant minimises the negative log-likelihood of the right answers; a linear head minimises
    `selective_smoothing`, stopping where a fifth of the answers, held out, does best.
    """
    torch.manual_seed(seed)
    calibrator = Calibrator(head, answers.hidden.shape[-1])
    if head == "constant":
        report = fit_constant(calibrator, answers)
    else:
        report = {"alpha": alpha} | fit_head(calibrator, answers, alpha, seed)
    return calibrator.eval(), {"answers": len(answers.labels), "head": head} | report


def fit_constant(calibrator: Calibrator, answers: Answers) -> dict:
    """Temperature scaling: argmin over log τ of the mean −log softmax(logits / τ)_label."""
    from scipy.optimize import minimize_scalar

    logits = answers.logits.double()

    def nll(log_tau: float) -> float:
        return cross_entropy(logits / math.exp(log_tau), answers.labels).item()

    bounds = (-0.99 * LIMIT, 0.99 * LIMIT)
    found = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    nn.init.constant_(calibrator.out.bias, LIMIT * math.atanh(found.x / LIMIT))
    return {"temperature": math.exp(found.x), "nll": [nll(0.0), float(found.fun)]}


def fit_head(calibrator: Calibrator, answers: Answers, alpha: float, seed: int) -> dict:
    """Adaptive temperature scaling: AdamW on the loss of scaled logits, with early stopping."""
    order = torch.randperm(len(answers.labels), generator=torch.Generator().manual_seed(seed))
    cut = max(1, int(HELD_OUT * len(order)))
    held, used = order[:cut], order[cut:]

    def loss(rows: Tensor) -> Tensor:
        scaled = answers.logits[rows] / calibrator(answers.hidden[rows])[:, None]
        return selective_smoothing(scaled, answers.labels[rows], alpha)

    optimizer = torch.optim.AdamW(calibrator.parameters(), RATE, weight_decay=DECAY)
    losses = []
    for epoch in range(EPOCHS + 1):
        with torch.no_grad():
            losses.append(loss(held).item())
        best = int(np.nanargmin(losses))
        if best == epoch:
            kept = copy.deepcopy(calibrator.state_dict())
        if epoch - best > PATIENCE or epoch == EPOCHS:
            break
        shuffled = torch.randperm(len(used), generator=torch.Generator().manual_seed(epoch))
        for rows in used[shuffled].split(BATCH):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
    calibrator.load_state_dict(kept)
    return {"epochs": len(losses) - 1, "held_out_loss": [losses[0], losses[best]]}


def fit_task(model: str, request: Request, head: str, alpha: float = 0.5) -> Calibrator:
    """A calibrator fitted to a model's answers to questions that no score is made of.

    The task's split is by default the one that is not scored; questions of the scored split that it
    holds as well, and examples that a prompt shows, are left out.
    """
    task = tasks.resolved(request.tasks[0].model_copy(update={"scoring": "letters"}))
    scored, default = tasks.SPLITS.get(task.task, (None, None))
    if scored and scored == (task.split or "").lower():
        note = f"{task.task} is scored on it; fit on another split, by default {default}"
        raise InputError(f"--split {task.split}: {note}")
    task = task.model_copy(update={"split": task.split or default})
    loaded, tested = tasks.load(task), []
    if scored and not Path(task.data).is_file():  # a single file is of no split
        with suppress(InputError):  # not there; `score` compares the questions again
            for subject in tasks.load(Task(task=task.task, data=task.data, shots=0, split=scored)):
                tested += subject.questions
    subjects = unseen(loaded, tested)
    left_out = sum(len(s.questions) for s in loaded) - sum(len(s.questions) for s in subjects)
    engine = TransformersEngine(
        model, **request.model_dump(include={"device", "dtype", "batch_size", "revision"})
    )
    longest = request.max_length or context_length(engine.model.config)
    items = scoring.fit_prompts(subjects, task, engine.tokenizer, longest)
    questions = [item.prompt.question for item in items]
    seen = answers(engine, scoring.groups_of(items), [question.label for question in questions])
    calibrator, report = fit(seen, head, alpha)
    report |= {"model": model, "task": task.task, "split": task.split, "left_out": left_out}
    calibrator.fitted = report | {
        "versions": engine.versions(),
        "questions": sorted(map(question_digest, questions)),
        "model_digest": models.digest(model, request.revision),
    }
    return calibrator


def for_questions(folder: Path, model: str, model_digest: str, questions: list[Question]) -> str:
    """The SHA-256 of a calibrator that may be used here.

    Raises `InputError` for another model than it was fitted to, or a question fitted on.
    """
    fitted = Calibrator.from_pretrained(folder).fitted
    if (found := fitted.get("model_digest")) != model_digest:
        raise InputError(
            f"{folder}: was fitted to {fitted.get('model')} (digest {str(found)[:12]}), not to "
            f"{model} (digest {str(model_digest)[:12]}); fit one to this model"
        )
    digests = set(fitted["questions"])
    again = [q.id for q in questions if question_digest(q) in digests]
    if again:
        raise InputError(
            f"{folder}: was fitted on {len(again)} of these {len(questions)} questions, "
            f"{again[0]} for one; score others, or fit it on others"
        )
    return sha256(folder / WEIGHTS)
