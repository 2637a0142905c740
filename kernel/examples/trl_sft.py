"""Label-smoothed fine-tuning with TRL (`pip install "trl>=1.15,<1.17"`), from the hub or files:

    python trl_sft.py --output_dir out
    python trl_sft.py --model MODEL --data DATA.jsonl --label_smoothing 0.2 --output_dir out

Every option of TRL's SFTConfig can be given.
"""

from dataclasses import dataclass

from datasets import Dataset, load_dataset
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

from smoothce import patch_trainer


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-0.5B"
    data: str = "trl-lib/Capybara"  # on the hub, or a .jsonl file
    label_smoothing: float = 0.1


def training_set(data: str) -> Dataset:
    if data.endswith(".jsonl"):
        return load_dataset("json", data_files=data, split="train")
    return load_dataset(data, split="train")


def main() -> None:
    arguments, config = HfArgumentParser((Arguments, SFTConfig)).parse_args_into_dataclasses()
    trainer = SFTTrainer(arguments.model, args=config, train_dataset=training_set(arguments.data))
    patch_trainer(trainer, label_smoothing=arguments.label_smoothing)  # the one line
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
