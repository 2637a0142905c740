"""A frozen model with its calibrator: what `calibeval score --calibrator` runs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from calibeval.engines import Job
from calibeval.engines.hf import TransformersEngine
from calibeval.io import InputError
from calibeval.posthoc.calibrator import Calibrator
from calibeval.posthoc.fit import Answers


class CalibratedEngine(TransformersEngine):
    """The transformers engine with logits / τ in the place of logits."""

    def __init__(self, model: str, calibrator: Calibrator, **options):
        super().__init__(model, **options)
        self.calibrator = calibrator.to(self.device).eval()
        found, expected = hidden_size(self.model), calibrator.settings.hidden_size
        if found != expected:
            raise InputError(
                f"{model}: its hidden states have {found} features, the calibrator was fitted "
                f"on {expected}; use the model it was fitted on"
            )

    def describe(self) -> dict:
        """Engine settings and the kind of calibrator."""
        return super().describe() | {"calibrator": self.calibrator.settings.head}

    @torch.inference_mode()
    def states(
        self, groups: list[list[Job]], context: bool = False
    ) -> Iterator[tuple[Job, Tensor, Tensor]]:
        """Yield what the engine yields, the logits divided by their temperatures."""
        for job, hidden, logits in super().states(groups, self.calibrator.reads_context):
            one_token(job)
            yield job, hidden, logits.double() / self.calibrator(hidden[None])[:, None]


def hidden_size(model) -> int:
    """Features of what the output layer is given."""
    return model.get_output_embeddings().weight.shape[1]


def one_token(job: Job) -> None:
    """Refuse letters of several tokens: temperatures of their own could reorder them."""
    if len(job.nodes) > 1:
        raise InputError(
            "the tokenizer spells a letter in several tokens; temperatures along them could change "
            "which letter is likeliest, so only letters of one token can be calibrated"
        )


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
    return Answers(hidden, torch.stack(logits), torch.tensor(right))
