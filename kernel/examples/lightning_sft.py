"""Label smoothing in a Lightning module (`pip install lightning`):

    python lightning_sft.py                 # Qwen 2.5 0.5B, on four sentences
    python lightning_sft.py MODEL

`configure_model` is where Lightning has a model made, before a strategy wraps it.
"""

import sys

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from smoothce import patch_model


class SmoothedLanguageModel(lightning.LightningModule):
    def __init__(self, name: str, label_smoothing: float, learning_rate: float = 1e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning may call this twice
            model = AutoModelForCausalLM.from_pretrained(self.hparams.name)
            self.model = patch_model(model, label_smoothing=self.hparams.label_smoothing)
            self.model.train()  # from_pretrained returns it in evaluation mode

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss = self.model(**batch).loss  # the mean over a batch's labels
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.log("validation_loss", self.model(**batch).loss)  # without smoothing

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main(name: str = "Qwen/Qwen2.5-0.5B") -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def batch(sentences: list[str]) -> dict[str, Tensor]:
        inputs = tokenizer(sentences, return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        return {**inputs, "labels": labels}

    sentences = ["One sentence.", "Another one.", "A third.", "And the last of them."]
    loader = DataLoader(sentences, batch_size=2, collate_fn=batch)
    trainer = lightning.Trainer(max_steps=2, logger=False, enable_checkpointing=False)
    trainer.fit(SmoothedLanguageModel(name, label_smoothing=0.1), loader)
    print({key: round(value.item(), 4) for key, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
