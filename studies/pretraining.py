"""How studies train the small Llamas that they start from."""

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

IGNORE = -100  # the label of a token that is not learned
LEARNING_RATE = 3e-3
WARMUP = 100  # updates


def train_once(model: LlamaForCausalLM, ids: Tensor, labels: Tensor, batch_size: int) -> None:
    """Train on rows of tokens, each row once; `ids` and `labels` are (rows, tokens).

    Up to `batch_size` − 1 rows at the end, which make no whole batch, are left out.
    The optimizer is AdamW. Its learning rate falls linearly from LEARNING_RATE to 0, and is scaled
    down in the first WARMUP updates, so that its peak is a little below LEARNING_RATE.
    """
    steps = len(ids) // batch_size
    if steps == 0:
        raise ValueError(f"{len(ids)} rows make no batch of {batch_size}")

    def rate_at(step: int) -> float:
        return min(1, (step + 1) / WARMUP) * (1 - step / steps)

    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    for step in tqdm(range(steps), "pre-training", mininterval=5):
        rows = slice(step * batch_size, (step + 1) * batch_size)
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
