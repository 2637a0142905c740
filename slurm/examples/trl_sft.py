"""TRL's SFTTrainer as `backend: command` wants a script: see trl_sft.yaml beside it.

It saves and leaves when it gets TERM, goes on from its last checkpoint, and leaves its model in
RUN_DIR/model.
"""

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from transformers import HfArgumentParser, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from smoothce import patch_trainer


@dataclass
class Arguments:
    model: str
    data: str  # JSON lines with `messages`
    beta: float
    run_dir: Path


class SaveOnTerm(TrainerCallback):
    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics
        self.signals = []
        signal.signal(signal.SIGTERM, lambda number, frame: self.signals.append(number))

    def on_step_end(self, args, state, control, **_):
        if self.signals:  # several processes would have to agree, by torch.distributed.all_reduce
            control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs, **_):
        row = {"step": state.global_step, "steps": state.max_steps, "loss": logs.get("loss")}
        with open(self.metrics, "a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    arguments, config = HfArgumentParser((Arguments, SFTConfig)).parse_args_into_dataclasses()
    stop = SaveOnTerm(arguments.run_dir / "metrics.jsonl")
    data = load_dataset("json", data_files=arguments.data, split="train")
    trainer = SFTTrainer(arguments.model, args=config, train_dataset=data, callbacks=[stop])
    patch_trainer(trainer, label_smoothing=arguments.beta)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir))
    if stop.signals:
        sys.exit(75)
    trainer.save_model(arguments.run_dir / "model")


if __name__ == "__main__":
    main()
