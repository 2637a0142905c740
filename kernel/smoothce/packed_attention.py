"""Attention for packed rows: several documents end to end, each seeing itself alone.

On a GPU it is the variable-length flash attention that torch itself carries, so that no
FlashAttention has to be built. torch's public name for that, torch.nn.attention.varlen, has no
dropout, so that the operator below it is called.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "packed"  # under which transformers finds this attention


def use_packed_attention(model: Any) -> Any:
    """Give a transformers model attention for padding-free batches. Returns the model.

        use_packed_attention(trainer.model)    # of an SFTTrainer with SFTConfig(padding_free=True)

    A padding-free batch is one row of documents end to end, with `cu_seq_lens_q` and
    `max_length_q`, as TRL's and transformers' collators make it. Token i sees token j of its own
    document where i − window < j ≤ i. On a GPU this takes bf16 or fp16. Other batches, of
    evaluation and generation with transformers' default cache, and batches on a CPU, have their
    mask written out, which is right and slower.

    Raises ValueError for a model whose attention caps its scores, or that does not take other
    attention functions, or has a part that is no text decoder.
    """
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    if hasattr(model, "get_base_model"):  # of PEFT
        use_packed_attention(model.get_base_model())
        return model
    name = type(model).__name__
    config = model.config
    if config.get_text_config() is not config:
        raise ValueError(f"{name} is no text decoder alone, which packed attention is for")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not take other attention functions")
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"{name}'s attention caps its scores: load it with "
            "attn_implementation='flash_attention_2' instead"
        )
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # which leaves a mask (B, S)
    config._attn_implementation = NAME
    return model


def packed_attention(
    module: nn.Module | None,
    query: Tensor,  # (B, H, T, d)
    key: Tensor,  # (B, H_kv, S, d)
    value: Tensor,  # (B, H_kv, S, d)
    attention_mask: Tensor | None,  # (B, S), where a batch is padded
    scaling: float | None = None,  # of the scores; None is 1 / √d
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,  # (n + 1,) int32: where each document begins, and T
    max_length_q: int | None = None,  # no document is longer
    position_ids: Tensor | None = None,  # (B, T)
    **settings: Any,
) -> tuple[Tensor, None]:  # (B, T, H, d), and no attention weights
    """Causal attention within each document, as transformers calls its attention functions.

    Raises ValueError for attention of another kind: not causal, or with sinks or capped scores."""
    for name in ("softcap", "s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise ValueError(
                f"packed attention has no {name}, which {type(module).__name__} asks for"
            )
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"packed attention is causal, and {type(module).__name__} is not")
    # Rotary embeddings are computed in fp32 and leave query and key in it.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    is_packed = cu_seq_lens_q is not None and max_length_q is not None
    if is_packed and query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        output = _flash_attention(
            query, key, value, cu_seq_lens_q, max_length_q, scaling, dropout, sliding_window
        )
        return output, None
    visible = _visible(query.shape[2], key.shape[2], sliding_window or 0, query.device)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, : key.shape[2]].bool()
    documents = _documents(cu_seq_lens_q, position_ids, query.shape[2], key.shape[2])
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    groups = query.shape[1] // key.shape[1]
    output = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=visible,
        dropout_p=dropout,
        scale=scaling,
    )
    return output.transpose(1, 2).contiguous(), None


def _flash_attention(
    query: Tensor,  # (1, H, T, d)
    key: Tensor,  # (1, H_kv, T, d)
    value: Tensor,  # (1, H_kv, T, d)
    bounds: Any,  # (n + 1,) int32
    length_bound: Any,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:  # (1, T, H, d)
    output, *_ = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        bounds,
        bounds,
        length_bound,
        length_bound,
        dropout,
        True,  # causal
        False,  # without a debug mask
        scale=scaling,
        window_size_left=sliding_window - 1 if sliding_window else -1,  # −1 means no window
        window_size_right=0,
    )
    return output[None]


def _visible(
    queries: int, keys: int, window: int, device: torch.device
) -> Tensor:  # (1, 1, T, S) bool
    """What causality and the window let each token see; a window of 0 is none."""
    query_position = torch.arange(keys - queries, keys, device=device)[:, None]
    distance = query_position - torch.arange(keys, device=device)
    visible = distance >= 0
    if window > 0:
        visible = visible & (distance < window)
    return visible[None, None]


def _documents(
    bounds: Tensor | None,  # (n + 1,)
    position_ids: Tensor | None,  # (B, T)
    queries: int,
    keys: int,
) -> Tensor | None:  # (B, T)
    """The number of each token's document; None where that is not known.

    Without bounds a document begins wherever positions do not go on."""
    if queries != keys:  # earlier tokens come from a cache
        return None
    if bounds is not None:
        places = torch.arange(queries, device=bounds.device, dtype=bounds.dtype)
        return torch.searchsorted(bounds, places, right=True)[None]
    if position_ids is None:
        return None
    steps = F.pad(position_ids.diff(dim=-1), (1, 0), value=1)
    return (steps != 1).cumsum(-1)
