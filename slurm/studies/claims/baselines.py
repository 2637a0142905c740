"""What rests on a model's own logits: the base model's mean prediction."""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calibeval.io import atomic_write
from sweeps.data import IGNORE, Updates, make_tokenizer, tokenised
from sweeps.finetune import load_model
from sweeps.train import Train

CHUNK = 1024  # tokens whose logits are there at a time: 0.6 GB of 151,936 each
CONVERSATIONS = 2048  # of which the mean prediction is


def base_mean(keys: Train) -> None:
    """Make `keys.smoothing_target` of the model before training, unless it is there."""
    out = Path(keys.smoothing_target)
    if not out.exists():
        u = mean_prediction(keys)
        with atomic_write(out, "wb") as file:
            np.save(file, u)
        torch.cuda.empty_cache()  # other processes train now


def mean_prediction(keys: Train) -> np.ndarray:
    """The mean of softmax(z), (V,), over the targets of the first conversations trained on."""
    tokenizer, updates = read(keys)
    model = loaded(keys, len(tokenizer))
    hidden, _ = answers(model, updates, updates.kept[:CONVERSATIONS])
    total = sum(z.softmax(-1).sum(0, dtype=torch.float64) for z in logits(model, hidden))
    return (total / total.sum()).cpu().numpy()


def read(keys: Train) -> tuple[object, Updates]:
    """A run's tokenizer, and its conversations as it trains on them."""
    tokenizer = make_tokenizer(keys)
    data = tokenised(keys, tokenizer)
    return tokenizer, Updates(keys, data, ranks=1, rank=0, pad=tokenizer.pad_token_id)


def loaded(keys: Train, tokens: int) -> PreTrainedModel:
    """The run's base model; on a GPU, if there is one, in its own precision, else in fp32."""
    model = load_model(keys, tokens).eval()
    return model.to("cuda", model.config.dtype) if torch.cuda.is_available() else model


@torch.inference_mode()
def answers(model: PreTrainedModel, updates: Updates, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """The last hidden states (N, D) behind all targets of some conversations, and these (N,)."""
    found = []
    for some in updates.bins(rows):
        batch = {key: value.to(model.device) for key, value in updates.batch(some).items()}
        hidden = model.model(batch["input_ids"], use_cache=False).last_hidden_state[:, :-1]
        said = (labels := batch["labels"][:, 1:]) != IGNORE
        found.append((hidden[said], labels[said]))
    hidden, labels = map(torch.cat, zip(*found, strict=True))
    return hidden, labels


@torch.inference_mode()
def logits(model: PreTrainedModel, hidden: Tensor) -> Iterator[Tensor]:
    """The logits (n, V) of hidden states (N, D), in fp32, a chunk at a time."""
    head: nn.Module = copy.deepcopy(model.get_output_embeddings()).float()
    for some in hidden.split(CHUNK):
        yield head(some.float())
