"""Calibration while a model trains: a callback for transformers' Trainer and its subclasses."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_callback import CallbackHandler
from typing_extensions import Unpack

from calibeval import measures
from calibeval.ask import scoring
from calibeval.ask.request import EngineOptions, Task
from calibeval.io import InputError
from calibeval.measures import MAIN_ERROR, METRICS, SUMMARY
from calibeval.records import Records

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer


class CalibrationCallback(TrainerCallback):
    """Score tasks before training, every so many steps, and after it; log the metrics.

    It logs `eval_<task>_accuracy`, `_nll`, `_ece` and `_ece_floor`, which 95 % of calibrated models
    stay below; where letters are scored, `_ece_vocabulary` and its floor as well, of probabilities
    among all tokens. The values are those of `calibeval score` on the model as it would be saved
    then, and training goes on as it would without them.

    Of several processes the first scores, while the others wait for it in the next exchange of all
    of them, mostly that of gradients. So a scoring must take less than
    `TrainingArguments.ddp_timeout`, which is 30 minutes by default: give a task a `limit`, or raise
    it.

        trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
        watch = CalibrationCallback([{"task": "mmlu", "data": "DATA"}], every=100, trainer=trainer)
        trainer.add_callback(watch)

    Args:
        tasks: `Task`s, or their keys as in the example.
        every: Training steps between two scorings; 0 scores before and after training alone.
        tokenizer: The Trainer's unless given, else the model's folder's.
        trainer: The Trainer whose reports (TensorBoard, Weights & Biases, …) are to show the
            metrics. A callback that is made before its Trainer, to be one of its `callbacks=[…]`,
            cannot be given it; then it is the Trainer that calls the callback.
        **options: Fields of `calibeval.ask.request.Request`, such as `batch_size`.

    Raises:
        InputError: as `calibeval.score` does, and at the beginning of training where the model is
            in pieces (ZeRO-3 or FSDP).
    """

    def __init__(
        self,
        tasks: Sequence[Task | Mapping[str, Any]],
        every: int,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        trainer: "Trainer | None" = None,
        **options: Unpack[EngineOptions],
    ):
        self.tasks = tasks
        self.every = every
        self.tokenizer = tokenizer
        self.trainer = trainer
        self.options = options
        self.last_scored_step: int | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Score the model as it comes."""
        if is_deepspeed_zero3_enabled() or args.fsdp:
            raise InputError("CalibrationCallback: the model is in pieces (ZeRO-3 or FSDP)")
        self._score_and_log(args, state, control, **kwargs)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Score every so many steps."""
        if self.every and state.global_step % self.every == 0:
            self._score_and_log(args, state, control, **kwargs)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Score the model as it leaves."""
        if args.load_best_model_at_end:
            # It is another than the one that was scored at the last step.
            self.last_scored_step = None
        self._score_and_log(args, state, control, **kwargs)

    def _score_and_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: "PreTrainedModel",
        processing_class: "PreTrainedTokenizerBase | None" = None,
        **kwargs: Any,
    ) -> None:
        """Score the model on the main process, unless it was at this step already."""
        if state.global_step == self.last_scored_step or not state.is_world_process_zero:
            return
        self.last_scored_step = state.global_step
        tokenizer = self.tokenizer or processing_class
        scored = scoring.score(model, tokenizer, self.tasks, progress=False, **self.options)
        logged: dict[str, float] = {}
        for key, records in scored.items():
            logged.update(_logged_metrics(key, records))
        state.log_history.append({**logged, "step": state.global_step, "epoch": state.epoch})
        handler = self._callback_handler()
        if handler is not None:
            # Whether the loss is logged too. `on_log` sets it to False.
            should_log = control.should_log
            handler.on_log(args, state, control, {**logged, "epoch": state.epoch})
            control.should_log = should_log

    def _callback_handler(self) -> CallbackHandler | None:
        """What tells all callbacks, reports among them, of an event.

        Not `Trainer.log`: some Trainers' (TRL's) add averages of the training since their last log,
        which they would then lack.
        """
        if self.trainer is not None:
            return self.trainer.callback_handler
        return _calling_handler()


def _calling_handler() -> CallbackHandler | None:
    """The handler that calls this callback; None where something else does.

    transformers hands a callback the model, the tokenizer and the data loaders, but nothing that
    leads to the other callbacks. So the handler is looked for among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back
    return None


def _logged_metrics(key: str, records: Records) -> dict[str, float]:
    """What is logged of a task's records: `measures.SUMMARY`, the main error with its floor."""
    samples = measures.samples_of(measures.in_order(records))
    logged: dict[str, float] = {}
    for metric in SUMMARY:
        if metric != MAIN_ERROR:
            logged[f"eval_{key}_{metric}"] = float(METRICS[metric](samples["choices"])[0])
    for among, sample in samples.items():
        name = f"eval_{key}_{MAIN_ERROR}"
        if among != "choices":
            name += f"_{among}"
        test = measures.floor_tests(sample, [MAIN_ERROR])[MAIN_ERROR]
        logged[name] = float(METRICS[MAIN_ERROR](sample)[0])
        logged[f"{name}_floor"] = test.floor
    return logged
