"""Calibration while a model trains: a callback for transformers' Trainer and its subclasses."""

import sys
from collections.abc import Mapping, Sequence

from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from calibeval import measures, scoring, stats
from calibeval.io import InputError
from calibeval.request import Task


class CalibrationCallback(TrainerCallback):
    """Score tasks before training, every so many steps (0: none), and after; log as the Trainer.

    `eval_<task>_accuracy`, `_nll`, `_ece` and `_ece_floor`, what 95 % of calibrated models read
    less than; of letters `_ece_vocabulary` and its floor as well, among all tokens. The figures are
    those of `calibeval score` on the model as it would be saved then; training goes on as without.

        Trainer(…, callbacks=[CalibrationCallback([{"task": "mmlu", "data": "DATA"}], every=100)])

    `tokenizer`: the Trainer's, else the model's folder's. `options` are keys of `Request`.
    """

    def __init__(self, tasks: Sequence[Task | Mapping], every: int, *, tokenizer=None, **options):
        self.tasks, self.every, self.tokenizer, self.options = tasks, every, tokenizer, options
        self.last: int | None = None  # the step that was scored last

    def on_train_begin(self, args, state, control, **given):
        """Score the model as it comes."""
        if is_deepspeed_zero3_enabled() or args.fsdp:
            raise InputError("CalibrationCallback: the model is in pieces (ZeRO-3 or FSDP)")
        self._score(args, state, control, sys._getframe(1), **given)

    def on_step_end(self, args, state, control, **given):
        """Score every so many steps."""
        if self.every and state.global_step % self.every == 0:
            self._score(args, state, control, sys._getframe(1), **given)

    def on_train_end(self, args, state, control, **given):
        """Score the model as it leaves."""
        self._score(args, state, control, sys._getframe(1), **given)

    def _score(self, args, state, control, caller, *, model, processing_class=None, **_) -> None:
        if state.global_step == self.last or not state.is_world_process_zero:
            return
        self.last = state.global_step
        tokenizer = self.tokenizer or processing_class
        scored = scoring.score(model, tokenizer, self.tasks, progress=False, **self.options)
        logs = {}
        for key, records in scored.items():
            samples = stats.samples(stats.in_order(records))
            for metric in (measures.accuracy, measures.nll):
                logs[f"eval_{key}_{metric.__name__}"] = float(metric(samples["choices"])[0])
            for confidence, sample in samples.items():
                name = f"eval_{key}_ece" + f"_{confidence}" * (confidence != "choices")
                logs[name] = float(measures.ece(sample)[0])
                logs[f"{name}_floor"] = stats.consistency(sample, ["ece"])["ece"][0]
        state.log_history.append(logs | {"step": state.global_step, "epoch": state.epoch})
        # The reports are other callbacks, and the one who knows them is who calls this one.
        handler, should_log = caller.f_locals["self"], control.should_log
        handler.on_log(args, state, control, logs | {"epoch": state.epoch})
        control.should_log = should_log
