"""Attention for packed rows on a GPU: several conversations end to end, each seeing itself alone.

flash-attn computes it where it is installed, else the variable-length flash attention that torch
itself carries. Torch's public name for that, torch.nn.attention.varlen, has no dropout, so that the
operator below it is called.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available
from typing_extensions import Required, TypedDict, Unpack

NAME = "packed"  # under which transformers finds this attention


def use_packed_attention(model: PreTrainedModel, *, gpu: bool, half_precision: bool) -> str | None:
    """Give the model attention for packed rows, or return why that is impossible.

    The model then needs batches as a packed `GlobalBatchDataset` makes them. On a CPU nothing has
    to change: transformers itself masks other conversations.
    """
    if not gpu:
        return None
    if not half_precision:
        return "flash attention needs 16 bits: set world.mixed_precision=bf16"
    if is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
        return None
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take other attention implementations"
    if getattr(model.config, "attn_logit_softcapping", None):
        return "its attention caps its scores: install flash-attn"
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    model.config._attn_implementation = NAME
    return None


class PackedSettings(TypedDict, total=False):
    """What `packed_attention` reads of the settings that transformers hands to every attention."""

    cu_seq_lens_q: Required[Tensor]  # (n + 1,) int32: where each conversation begins, and T
    max_length_q: Required[int]  # no conversation is longer
    scaling: float | None  # of the scores; None is 1 / √d
    dropout: float
    sliding_window: int | None


def packed_attention(
    module: nn.Module | None,
    query: Tensor,  # (1, H, T, d)
    key: Tensor,  # (1, H_kv, T, d)
    value: Tensor,  # (1, H_kv, T, d)
    attention_mask: None,
    **settings: Unpack[PackedSettings],
) -> tuple[Tensor, None]:  # (1, T, H, d), and no attention weights
    """Causal attention within each conversation: token i sees j with i − window < j ≤ i."""
    query = query[0].transpose(0, 1)
    key = key[0].transpose(0, 1)
    value = value[0].transpose(0, 1)
    # Rotary embeddings are computed in fp32 and leave query and key in it.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    bounds = settings["cu_seq_lens_q"]
    length_bound = settings["max_length_q"]
    sliding_window = settings.get("sliding_window")
    window_left = sliding_window - 1 if sliding_window else -1  # −1 means no window
    output, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        bounds,
        bounds,
        length_bound,
        length_bound,
        settings.get("dropout", 0.0),
        True,  # causal
        False,  # without a debug mask
        scale=settings.get("scaling"),
        window_size_left=window_left,
        window_size_right=0,
    )
    return output[None], None
