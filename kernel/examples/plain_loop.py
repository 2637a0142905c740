"""Label smoothing in a training loop of one's own, on any number of processes:

    python plain_loop.py
    torchrun --nproc_per_node 2 plain_loop.py

The update is the same however many processes and micro-batches its eight rows are split into: the
mean over all its labels. Three things make it so. The loss is a sum (`reduction="sum"`), each
micro-batch's sum is multiplied by `token_mean_factor`, and DDP's gradients meet in the last one.
The model shifts the labels, as ever. A loop that calls `linear_cross_entropy` itself has to.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from smoothce import patch_model, token_mean_factor

ROWS, TOKENS, UPDATES = 8, 16, 3
ROWS_OF_A_MICRO_BATCH = int(os.environ.get("ROWS_OF_A_MICRO_BATCH", "2"))


def model_of_your_own() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def rows_of_an_update(update: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each (8, 16); prompts of unequal length have no labels."""
    generator = torch.Generator().manual_seed(update)
    ids = torch.randint(3, 128, (ROWS, TOKENS), generator=generator)
    prompt = torch.arange(TOKENS) <= torch.arange(ROWS)[:, None]
    return ids, ids.masked_fill(prompt, -100)


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # nccl on GPUs
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    model = model_of_your_own()
    patch_model(model, label_smoothing=0.1, reduction="sum")  # before DDP wraps it
    model.train()
    trained = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for update in range(UPDATES):
        ids, labels = rows_of_an_update(update)
        micro_ids = ids[rank::ranks].split(ROWS_OF_A_MICRO_BATCH)
        micro_labels = labels[rank::ranks].split(ROWS_OF_A_MICRO_BATCH)
        factor = token_mean_factor(micro_labels, steps=1)  # nothing divides the loss by steps
        loss_of_update = torch.zeros(())
        micro_batches = list(zip(micro_ids, micro_labels, strict=True))
        for number, (ids_of_batch, labels_of_batch) in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            apart = trained.no_sync() if ranks > 1 and not is_last else nullcontext()
            with apart:
                loss = trained(input_ids=ids_of_batch, labels=labels_of_batch).loss * factor
                loss.backward()
            loss_of_update += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(loss_of_update)
        mean_loss = loss_of_update / ranks  # `factor` has multiplied by ranks, for DDP's average
        if rank == 0:
            print(f"update {update}: loss {mean_loss:.5f}, gradient {norm:.5f}")
    if ranks > 1:
        dist.barrier()  # a process that leaves first may keep gloo's other processes from leaving
        del trained  # DDP holds the process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
