"""One mean over all valid tokens of an update, however it is split over ranks and micro-batches."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def token_mean_factor(
    labels: Sequence[Tensor],  # (B, T) each: this rank's micro-batches of one update, not shifted
    *,
    steps: int | None = None,
    ignore_index: int = -100,
) -> Tensor:  # () fp32
    """Return what each micro-batch's summed loss is multiplied by, for a mean over all tokens.

        factor = ranks · steps / max(valid tokens over all ranks and micro-batches, 1)

    DDP and DeepSpeed average gradients over ranks, and Accelerate and DeepSpeed divide a loss by
    `gradient_accumulation_steps`; the numerator undoes both. `steps` is that divisor, by default
    the number of micro-batches; give 1 where nothing divides. A first token is never a target, so
    its label does not count.

    Every rank calls this once for each update, since it sums over the default process group, where
    there is one. Where that is a group of NCCL alone, labels have to be on the rank's GPU. Raises
    ValueError where they are not, where there are no labels or `steps` is below 1, and TypeError
    for a tensor in place of the list or for anything but tensors in it.
    """
    if isinstance(labels, Tensor) or not all(isinstance(batch, Tensor) for batch in labels):
        raise TypeError("labels must be a list of tensors, one a micro-batch")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps!r}")
    if len(labels) == 0:
        raise ValueError("labels must hold this rank's micro-batches of one update, not nothing")
    counts = [(batch[..., 1:] != ignore_index).sum() for batch in labels]
    tokens = torch.stack(counts).sum()
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() == dist.Backend.NCCL and not tokens.is_cuda:
            raise ValueError(
                f"labels are on {tokens.device}, and NCCL sums on GPUs alone: "
                "give [batch.cuda() for batch in labels]"
            )
        dist.all_reduce(tokens)
        ranks = dist.get_world_size()
    divisor = len(labels) if steps is None else steps
    return ranks * divisor / tokens.clamp(min=1).float()
