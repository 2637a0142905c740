"""Reinforcement learning on checked answers: GRPO, an entropy bonus, differential smoothing."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from calibeval.io import InputError
from sweeps.backends.base import TrainKeys
from sweeps.backends.builtin import Builtin, model_problems
from sweeps.config import Seq, Strict, World
from sweeps.trainer import countdown

OWN = {"grpo": set(), "entropy": {"bonus"}, "differential": {"gamma_p", "gamma_n"}}


class Method(Strict):
    """What is added to GRPO's advantages; sweeps.trainer.policy_gradient has the equations."""

    name: Literal["grpo", "entropy", "differential"]
    bonus: float = Field(0.0, ge=0)  # of a nat of a token's entropy
    gamma_p: float = Field(0.0, ge=0)  # on right answers
    gamma_n: float = Field(0.0, ge=0)  # on wrong ones

    @model_validator(mode="after")
    def _own(self) -> "Method":
        own, given = OWN[self.name], {key for key, of in self if key != "name" and of}
        if not given <= own or bool(given) != bool(own):
            above = f"only {' or '.join(sorted(own))} above 0" if own else "nothing else"
            raise ValueError(f"{above} with {self.name}")
        return self


class PolicyGradientKeys(TrainKeys):
    """The `train:` keys of the policy-gradient trainer."""

    label_smoothing: float = Field(0.0, ge=0, le=0)
    method: Method
    train_file: str  # problems, see sweeps.trainer.countdown
    test_file: str  # those that the trained model answers at the end
    samples: int = Field(64, ge=1)  # answers to each of them
    k: Seq[int] = Field((1, 4, 16, 64), min_length=1)  # pass@k is asked of them
    kl_weight: float = Field(0.0, ge=0)  # b, of the anchor to the model that the run starts from
    problems_per_step: int = Field(16, ge=1)
    answers_per_problem: int = Field(16, ge=2)
    max_new_tokens: int = Field(6, ge=1)  # of an answer: five words and the end
    max_train_steps: int = Field(200, ge=1)
    clip_grad_norm: float = 1.0  # not above 0: no clipping
    logging_steps: int = Field(10, ge=1)
    checkpointing_steps: int | None = Field(100, ge=1)
    keep_last_n_checkpoints: int = Field(1, ge=1)
    with_tracking: bool = False
    report_to: Literal["tensorboard", "wandb", "trackio"] = "tensorboard"

    @field_validator("k")
    @classmethod
    def _drawn(cls, k: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if not 1 <= min(k) <= max(k) <= (most := info.data.get("samples", max(k))):
            raise ValueError(f"whole numbers from 1 to {most}, the samples of a problem")
        return k


class PolicyGradient(Builtin):
    """See sweeps.backends.base.Backend; run folders are the builtin trainer's."""

    name, Train = "policy-gradient", PolicyGradientKeys

    def packages(self, train: PolicyGradientKeys, world: World) -> list[str]:
        return [train.report_to] if train.with_tracking else []

    def missing(self, train: PolicyGradientKeys, world: World) -> list[str]:
        problems = model_problems(train)
        if world != World():
            problems.append("world: one process is expected, without mixed precision or DeepSpeed")
        for key in ("train_file", "test_file"):
            try:
                countdown.read(Path(getattr(train, key)))
            except InputError as error:
                problems.append(f"train.{key}: {error}")
        return problems


BACKEND = PolicyGradient()
