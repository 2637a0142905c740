"""Attention for packed rows on a GPU: several conversations end to end, each seeing itself alone.

flash-attn's where it is installed, else the varlen flash attention that torch itself carries (whose
public name, torch.nn.attention.varlen, has no dropout).
"""

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

NAME = "packed"  # as transformers' attention implementations are called


def use(model: nn.Module, *, gpu: bool, half: bool) -> str | None:
    """Make the model's attention one for packed rows, which then needs `Updates.batch`'s batches.

    On a CPU transformers masks other conversations by itself. Returns why it cannot be, or None.
    """
    if getattr(model.config, "output_router_logits", False):
        return "its auxiliary loss counts padding"
    if not gpu:
        return None
    if not half:
        return "flash attention needs 16 bits: world.mixed_precision: bf16"
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


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, d)
    key: Tensor,  # (1, H_kv, T, d)
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,  # (n + 1,) int32, where conversations begin, then T
    max_length_q: int,  # at least the longest conversation
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:  # (1, T, H, d)
    """Causal attention within each conversation: token i sees j with i − window < j ≤ i."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    query, key = query.to(value.dtype), key.to(value.dtype)  # the rotation is computed in fp32
    out, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(), key.contiguous(), value.contiguous(), cu_seq_lens_q, cu_seq_lens_q,
        max_length_q, max_length_q, dropout, True, False, scale=scaling,
        window_size_left=sliding_window - 1 if sliding_window else -1, window_size_right=0,
    )  # fmt: skip
    return out[None], None
