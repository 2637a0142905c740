"""When a run logs, measures, saves and stops."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from calibeval.io import regular_file, write_rows
from sweeps.runs.files import read_rows
from sweeps.runs.stages import Outcome
from sweeps.training.checkpoint import PART
from sweeps.training.ranks import print_once, seconds_since_start
from sweeps.training.saving import MODEL_PART
from sweeps.training.sft_trainer import SweepTrainer

# Slurm sends USR2 ahead of a job's end. On one node every process of the job gets it, ranks too. On
# several nodes only the job's script does, and the ranks learn of it by the stop file.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopSignal:
    """Whether someone wants this run to save and leave: by a stop file, or by a signal.

    Making one installs handlers of these signals. Until this attempt has made an update nothing is
    to be saved, and a signal ends this process at once, with the exit code of a run that stopped.
    From then on it is noted, and `on_any_rank` tells of it. (Ranks end the first update some
    milliseconds apart. A signal between them loses that update, and nothing else.)
    """

    def __init__(self, stop_file: Path) -> None:
        self.stop_file = stop_file
        self.received = False
        self.has_updated = False  # whether this attempt has made an update
        self._group: dist.ProcessGroup | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note_or_leave)
        # A process that is forked, to tokenize for example, has nothing to save. With this handler
        # it would outlive the TERM by which its pool ends it, and the pool would wait forever.
        os.register_at_fork(after_in_child=stop_handling_signals)

    def _note_or_leave(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self.has_updated:
            return
        name = signal.Signals(number).name
        # Neither print nor an exception: the signal may have come in the middle of a print, and
        # `datasets` replaces an exception by its own while it tokenizes.
        os.write(1, f"stopped: {name} came before the first update; nothing is lost\n".encode())
        os._exit(Outcome.STOPPED.value)

    def on_any_rank(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank.

        All ranks have to call it. They ask each other over gloo, so that nobody waits for a GPU.
        """
        here = self.received or self.stop_file.exists()
        if not dist.is_initialized():
            return here
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        ranks_asked = torch.tensor(float(here))
        dist.all_reduce(ranks_asked, group=self._group)
        return bool(ranks_asked > 0)


def stop_handling_signals() -> None:
    """Let TERM and INT end this process at once again, and let it ignore USR2.

    By default USR2 would end it too, but Slurm's warning is for those who save.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class ScheduleCallback(TrainerCallback):
    """Decides after each update what the Trainer does: log, evaluate, save a checkpoint, stop."""

    def __init__(self, trainer: SweepTrainer, stop_signal: StopSignal) -> None:
        self.trainer = trainer
        self.stop_signal = stop_signal

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the clock, and delete what a former attempt has left unfinished.

        Metrics of updates that are about to be repeated go too.
        """
        self.trainer.start_clock()
        run = self.trainer.run
        metrics = run.metrics
        if state.is_world_process_zero:
            # What a kill left of a checkpoint or a model would lie there until the next one.
            shutil.rmtree(run.checkpoints / PART, ignore_errors=True)
            shutil.rmtree(run.path / MODEL_PART, ignore_errors=True)
            rows = [row for row in read_rows(metrics) if row["step"] <= state.global_step]
            write_rows(metrics, rows)
        if state.global_step > 0:
            print_once(f"resumed: step {state.global_step} of {state.max_steps}")
        # Of this process: under torchrun of the first rank, without torchrun's own start.
        print_once(f"training: begins after {seconds_since_start():.0f} s")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.stop_signal.has_updated = True
        step = state.global_step
        is_last_update = step == state.max_steps
        ends_epoch = step % self.trainer.data.updates_per_epoch == 0
        # A collective operation: every rank calls it after every update, also after the last.
        was_asked_to_stop = self.stop_signal.on_any_rank()
        stops_early = was_asked_to_stop and not is_last_update
        if is_last_update:
            control.should_log = True
        if stops_early:
            control.should_training_stop = True
        has_held_out = self.trainer.train_options.held_out > 0
        control.should_evaluate = has_held_out and (is_last_update or ends_epoch)
        # The last update needs no checkpoint: model/ follows at once (see `checkpoint`).
        due = stops_early or self._is_checkpoint_due(step)
        control.should_save = due and not is_last_update

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Write a row of metrics.jsonl."""
        if state.is_world_process_zero:
            row = {"step": state.global_step, "steps": state.max_steps, **more["logs"]}
            row["time"] = round(time.time(), 1)
            with open(self.trainer.run.metrics, "a", encoding="utf-8", opener=regular_file) as file:
                file.write(json.dumps(row) + "\n")

    def _is_checkpoint_due(self, step: int) -> bool:
        interval = self.trainer.train_options.checkpointing_steps
        if interval is None:
            return False
        if interval == "epoch":
            interval = self.trainer.data.updates_per_epoch
        return step % interval == 0
